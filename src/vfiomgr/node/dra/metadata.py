"""Files in containers that describe the devices of their claims, for KubeVirt and others.

Format: https://github.com/kubernetes/enhancements/tree/master/keps/sig-node/5304-dra-attributes-downward-api
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.model import METADATA_KIND, CdiDevice, CdiEdits, CdiMount
from vfiomgr.node.dra.model import DRIVER, STANDARD
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import is_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.dra.model import AttributeValue, Claim, PreparedClaim, PreparedDevice

    Attributes = Mapping[str, AttributeValue]

DIRECTORY = HostPath("/var/lib/kubelet/plugins") / DRIVER
"""The kubelet's directory of the driver."""
_BELOW = "dra-device-metadata"
_FILE = "metadata.json"
_IN_CONTAINERS = "/var/run/kubernetes.io/dra-device-attributes"
_VERSION = "metadata.resource.k8s.io/v1alpha1"
_OPTIONS = ("ro", "bind", "nosuid", "nodev", "noexec")
_KINDS: dict[type, str] = {bool: "bool", int: "int", str: "string"}


def attributes_of(published: Attributes, unit: str) -> dict[str, AttributeValue]:
    """The attributes of a prepared device, with the name by which KubeVirt finds it."""
    own = f"{STANDARD}/pciBusID" if is_address(unit) else "mdevUUID"
    return {**published, own: unit}


def metadata_devices(
    claim: Claim, devices: Iterable[PreparedDevice], directory: HostPath
) -> tuple[CdiDevice, ...]:
    """The CDI devices that mount the files of a claim, one for each request."""
    requests = dict.fromkeys(_request(device) for device in devices)
    return tuple(_device(claim, request, directory) for request in requests)


def metadata_name(uid: str, request: str) -> str:
    """The qualified name of the CDI device for a request, or for an alternative of it."""
    return f"{METADATA_KIND}={uid}-{request.partition('/')[0]}"


def write_metadata(
    tree: HostTree,
    claim: Claim,
    devices: Sequence[tuple[PreparedDevice, Attributes]],
    directory: HostPath,
) -> None:
    """Write the files of a claim, one for each request.

    Raises:
        OSError: a file cannot be written.

    """
    by_request: dict[str, list[tuple[PreparedDevice, Attributes]]] = defaultdict(list)
    for device, attributes in devices:
        by_request[_request(device)].append((device, attributes))
    for request, found in by_request.items():
        place = _place(claim, request, directory)
        text = json.dumps(_document(claim, found), indent=2) + "\n"
        tree.make_directory(place)
        tree.replace(place / _FILE, text.encode(), durable=False)


def remove_metadata(tree: HostTree, claim: PreparedClaim, directory: HostPath) -> None:
    """Remove the files of a claim; those that do not exist are ignored.

    Raises:
        OSError: a file cannot be removed.

    """
    for request in {_request(device) for device in claim.devices}:
        place = _place(claim, request, directory)
        tree.remove(place / _FILE)
        tree.remove_empty_directory(place)
    tree.remove_empty_directory(_place_of(claim, directory))


def _request(device: PreparedDevice) -> str:
    """The request, without an alternative: alternatives share its directory."""
    return device.request.partition("/")[0]


def _place_of(claim: Claim | PreparedClaim, directory: HostPath) -> HostPath:
    return directory / _BELOW / f"{claim.namespace}_{claim.name}"


def _place(claim: Claim | PreparedClaim, request: str, directory: HostPath) -> HostPath:
    return _place_of(claim, directory) / request


def _device(claim: Claim, request: str, directory: HostPath) -> CdiDevice:
    by_template = claim.pod_claim_name
    owner = (
        f"resourceclaimtemplates/{by_template}" if by_template else f"resourceclaims/{claim.name}"
    )
    mount = CdiMount(
        host_path=_place(claim, request, directory) / _FILE,
        container_path=f"{_IN_CONTAINERS}/{owner}/{request}/{DRIVER}-metadata.json",
        options=_OPTIONS,
    )
    name = metadata_name(claim.uid, request).partition("=")[2]
    return CdiDevice(name, CdiEdits(mounts=(mount,)))


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
