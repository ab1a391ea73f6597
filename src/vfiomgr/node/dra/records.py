"""The files of a claim on the host: its record, CDI specifications, metadata, and device nodes.

Metadata are files in containers that describe the devices of their claims, for KubeVirt and others:
https://github.com/kubernetes/enhancements/tree/master/keps/sig-node/5304-dra-attributes-downward-api
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.model import (
    CLAIM_KIND,
    DYNAMIC,
    METADATA_KIND,
    CdiDevice,
    CdiEdits,
    CdiMount,
    device_nodes,
    further_request,
    own_file,
    shared_nodes,
)
from vfiomgr.errors import HostError, Refusal
from vfiomgr.expressions import expression
from vfiomgr.node.answers import common_nodes, specification_of, write_specification
from vfiomgr.node.dra.model import DRIVER, STANDARD, PreparedClaim
from vfiomgr.node.messages import read_record
from vfiomgr.paths import MDEV_DEVICES, RUNTIME, VFIO_CDEVS, HostPath, vfio_group_node
from vfiomgr.pci.model import is_address, pci_device

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.dra.model import AttributeValue, Claim, Parameters, PreparedDevice
    from vfiomgr.node.model import NodeUnit

    Attributes = Mapping[str, AttributeValue]

DIRECTORY = RUNTIME / "dra"
_SUFFIX = ".json"
_UID = expression(r"[0-9A-Za-z][0-9A-Za-z-]{0,127}")
"""The UID of a claim becomes part of file names."""


def read_records(tree: HostTree) -> dict[str, PreparedClaim | HostError]:
    """The records of all claims, by UID, or why one cannot be read.

    Files that vfiomgr would not write for a claim are ignored: another name, another UID.
    """
    found: dict[str, PreparedClaim | HostError] = {}
    for name in tree.children(DIRECTORY):
        uid = name.removesuffix(_SUFFIX)
        if uid == name or not is_file_name(uid):
            continue
        try:
            record = read_record(PreparedClaim, tree, DIRECTORY / name)
        except HostError as error:
            found[uid] = error
            continue
        if record is not None and record.uid == uid:
            found[uid] = record
    return found


def record_of(uid: str) -> HostPath:
    """The file of the record of a claim."""
    return DIRECTORY / f"{uid}{_SUFFIX}"


def write_claim(tree: HostTree, claim: PreparedClaim, metadata: tuple[CdiDevice, ...]) -> None:
    """Write the CDI specifications of a claim: its devices, and its metadata.

    Raises:
        OSError: a file cannot be written.
    """
    devices = tuple(
        CdiDevice(
            device_name(claim.uid, each.device),
            CdiEdits(device_nodes=device_nodes(each.nodes, each.access)),
        )
        for each in claim.devices
    )
    if not devices:
        return  # runtimes reject a specification without devices
    paths = [path for each in claim.devices for path in each.nodes]
    common = shared_nodes(common_nodes(paths, "default"), (each.access for each in claim.devices))
    file = _specification(CLAIM_KIND, claim.uid)
    write_specification(tree, file, specification_of(CLAIM_KIND, devices, common))
    if metadata:
        file = _specification(METADATA_KIND, claim.uid)
        write_specification(tree, file, specification_of(METADATA_KIND, metadata))


def nodes_of(tree: HostTree, unit: NodeUnit, parameters: Parameters) -> Iterator[str]:
    """The nodes of a unit in one form: with both, a guest could get the device twice.

    Raises:
        Refusal: it has no node of the form.
    """
    match parameters.form:
        case "":
            yield from unit.nodes
            return
        case "group":
            found = [] if unit.group is None else [vfio_group_node(unit.group)]
            remedy = "leave out the form, or use cdev"
        case "cdev":
            found = list(_cdevs(tree, unit))
            remedy = "leave out the form, or use group; cdevs need Linux 6.6"
    if not found or not all(map(tree.exists, found)):
        message = f"{unit.id} has no VFIO node of the form {parameters.form}"
        raise Refusal(message, remedy)
    yield from map(str, found)


def _cdevs(tree: HostTree, unit: NodeUnit) -> Iterator[HostPath]:
    mediated = (MDEV_DEVICES / unit.id,)
    holders = mediated if unit.kind == "mdev" else tuple(map(pci_device, unit.addresses))
    for holder in holders:
        for name in tree.children(holder / "vfio-dev"):
            yield VFIO_CDEVS / name


def remove_specifications(tree: HostTree, uid: str) -> None:
    """Remove the CDI specifications of a claim.

    Raises:
        OSError: a file cannot be removed.
    """
    for kind in (CLAIM_KIND, METADATA_KIND):
        tree.remove(_specification(kind, uid))


def device_name(uid: str, device: str) -> str:
    """The name of the CDI device for a device of a claim."""
    return f"{uid}-{device}"


def is_file_name(uid: str) -> bool:
    """Whether the UID of a claim can be a part of file names."""
    return _UID.fullmatch(uid) is not None


def _specification(kind: str, uid: str) -> HostPath:
    return own_file(DYNAMIC, f"{kind}-{uid}")


METADATA = HostPath("/var/lib/kubelet/plugins") / DRIVER
"""The kubelet's directory of the driver."""
_BELOW = "dra-device-metadata"
_FILE = "metadata.json"
_IN_CONTAINERS = "/var/run/kubernetes.io/dra-device-attributes"
_VERSION = "metadata.resource.k8s.io/v1alpha1"
_OPTIONS = ("ro", "bind", "nosuid", "nodev", "noexec")
_BUS_ID = f"{STANDARD}/pciBusID"
_KINDS: dict[type, str] = {bool: "bool", int: "int", str: "string"}


def attributes_of(published: Attributes, unit: str) -> dict[str, AttributeValue]:
    """The attributes of a prepared device, with the name by which KubeVirt finds it.

    Of several values only the first is written: readers of the files know no lists.
    """
    own = _BUS_ID if is_address(unit) else "mdevUUID"
    single = {n: value[0] if isinstance(value, tuple) else value for n, value in published.items()}
    return {**single, own: unit}


def metadata_name(uid: str, request: str) -> str:
    """The qualified name of the CDI device for a request, or for an alternative of it."""
    return f"{METADATA_KIND}={uid}-{request.partition('/')[0]}"


def write_metadata(
    tree: HostTree,
    claim: Claim,
    devices: Iterable[tuple[PreparedDevice, Attributes]],
    directory: HostPath,
) -> tuple[CdiDevice, ...]:
    """Write the files of a claim, one for each request; returns what mounts them in containers.

    KubeVirt takes one function from a file (resolveDevice in pkg/dra/utils.go of 1.8). The further
    functions of a device have files as if they were requested too: VMs can name these requests.

    Raises:
        OSError: a file cannot be written.
    """
    by_request: dict[str, list[tuple[PreparedDevice, Attributes]]] = defaultdict(list)
    for device, attributes in devices:
        by_request[_request(device)].append((device, attributes))
    made = []
    for request, found in by_request.items():
        files = {request: found}
        for device, _ in found if len(found) == 1 else ():
            for number, address in enumerate(device.functions, 1):
                name = further_request(request, number)
                if name not in by_request:
                    files[name] = [(replace(device, request=name), {_BUS_ID: address})]
        for name, content in files.items():
            file = _file(claim, name, directory)
            text = json.dumps(_document(claim, content), indent=2) + "\n"
            tree.make_directory(file.parent)
            tree.replace(file, text.encode(), durable=False)
        made.append(_mounting(claim, request, files, directory))
    return tuple(made)


def remove_metadata(tree: HostTree, claim: PreparedClaim, directory: HostPath) -> None:
    """Remove the files of a claim, also those of which an interrupted run left no record.

    Raises:
        OSError: a file cannot be removed.
    """
    own = _own(claim, directory)
    for request in tree.children(own):
        tree.remove(own / request / _FILE)
        tree.remove_empty_directory(own / request)
    tree.remove_empty_directory(own)


def _request(device: PreparedDevice) -> str:
    """The request, without an alternative: alternatives share its directory."""
    return device.request.partition("/")[0]


def _file(claim: Claim | PreparedClaim, request: str, directory: HostPath) -> HostPath:
    return _own(claim, directory) / request / _FILE


def _own(claim: Claim | PreparedClaim, directory: HostPath) -> HostPath:
    """The directory of a claim, in which each request has one."""
    return directory / _BELOW / f"{claim.namespace}_{claim.name}"


def _mounting(claim: Claim, request: str, files: Iterable[str], directory: HostPath) -> CdiDevice:
    owner = f"resourceclaims/{claim.name}"
    if claim.pod_claim_name:
        owner = f"resourceclaimtemplates/{claim.pod_claim_name}"
    mounts = (
        CdiMount(
            host_path=_file(claim, each, directory),
            container_path=f"{_IN_CONTAINERS}/{owner}/{each}/{DRIVER}-metadata.json",
            options=_OPTIONS,
        )
        for each in files
    )
    name = metadata_name(claim.uid, request).partition("=")[2]
    return CdiDevice(name, CdiEdits(mounts=tuple(mounts)))


def _document(
    claim: Claim, devices: Iterable[tuple[PreparedDevice, Attributes]]
) -> dict[str, object]:
    by_name: dict[str, list[dict[str, object]]] = defaultdict(list)
    for device, attributes in devices:
        by_name[device.request].append(
            {
                "driver": DRIVER,
                "pool": device.pool,
                "name": device.device,
                "attributes": {
                    name: {_KINDS[type(value)]: value} for name, value in attributes.items()
                },
            }
        )
    named = {"podClaimName": claim.pod_claim_name} if claim.pod_claim_name else {}
    return {
        "kind": "DeviceMetadata",
        "apiVersion": _VERSION,
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
        **named,
        "requests": [{"name": name, "devices": found} for name, found in by_name.items()],
    }
