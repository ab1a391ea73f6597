"""The CDI devices of a host: those that it can offer, and those that its specifications name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from vfiomgr.containers.cdi.document import (
    is_kind,
    needed_version,
    parse_specification,
    read_file,
    render_specification,
)
from vfiomgr.containers.cdi.model import (
    DYNAMIC,
    PGPU,
    STATIC,
    CdiDevice,
    CdiEdits,
    CdiSpecification,
    device_nodes,
    shared_nodes,
)
from vfiomgr.containers.cdi.rules import ANY, CONSUMERS, consumers_named, faults
from vfiomgr.diagnostic import Diagnostic, blocker, refusal, refuse, refuse_if_any
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.guests.nodes import (
    CONTROL,
    IOMMU,
    AssignableGroup,
    default_form,
    node_access,
    node_paths,
    offers,
    resolve,
)
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.model import CdiFile, OfferRequest
    from vfiomgr.snapshot.model import HostSnapshot


LOWEST = Version(0, 5)
"""Every consumer supports it, and it allows names that begin with a digit, as most do."""
_MOST_OF_CLASS = 63
"""The length limit of a Kubernetes resource name."""

_NVIDIA, _NVIDIA_ID = "nvidia.com", "10de"
_MOST_TRIED = 8
"""GPUs for which a bind is suggested."""


def specification_of(host: HostSnapshot, offer_request: OfferRequest) -> CdiSpecification:
    """The requested specification; without devices if none is available.

    Raises:
        UsageError: the kind is invalid.
        Refusal: a named device is not available, or lacks the requested kind of node; or the
            requested consumer cannot read the specification.
    """
    _refuse_kind(offer_request.kind)
    every = list(offers(host, with_mediated=offer_request.is_plain))
    chosen = _chosen(host, every, offer_request)
    forms = [_form(host, offer, offer_request) for offer in chosen]
    numbers = {offer.group: number for number, offer in enumerate(every)}
    devices = tuple(
        CdiDevice(
            _name(offer, numbers, offer_request),
            CdiEdits(device_nodes=device_nodes(node_paths(offer, form), node_access(host, offer))),
        )
        for offer, form in zip(chosen, forms, strict=True)
    )
    accesses = [node_access(host, offer) for offer in chosen]
    common = CdiEdits(device_nodes=shared_nodes(_common(forms, offer_request), accesses))
    built = CdiSpecification("", offer_request.kind, devices, common)
    version = max(LOWEST, needed_version(built))
    made = CdiSpecification(str(version), offer_request.kind, devices, built.edits)
    refuse_unread(made, offer_request)
    return made


def kind_notes(host: HostSnapshot, made: CdiSpecification) -> Iterator[str]:
    """Notes about devices that NVIDIA's device plugin does not offer by this kind and name."""
    if made.kind == PGPU and any(is_address(device.name) for device in made.devices):
        yield (
            "the device IDs of NVIDIA's sandbox-device-plugin are not addresses but IOMMU groups "
            "(--name-by group), or numbers (--name-by index)"
        )
    for device in made.devices if made.vendor == _NVIDIA else ():
        behind = [resolve(host, node.on_host) for node in device.edits.device_nodes]
        functions = [function for target in behind for function in target.functions]
        if functions and all(function.vendor_id != _NVIDIA_ID for function in functions):
            yield (
                f"{functions[0].address} is not an NVIDIA device; name the devices to leave it out"
            )


def _refuse_kind(kind: str) -> None:
    if not is_kind(kind):
        message = f"invalid CDI kind: {kind!r}"
        raise UsageError(message, "use vendor/class, e.g. nvidia.com/pgpu")
    length = len(kind.partition("/")[2])
    if length > _MOST_OF_CLASS:
        message = f"the class of the CDI kind is too long: {length} characters"
        raise UsageError(message, f"use at most {_MOST_OF_CLASS}, like Kubernetes resources")


def refuse_unread(made: CdiSpecification, offer_request: OfferRequest) -> None:
    """Make sure that the requested consumers can read a specification."""
    if offer_request.consumer == ANY or not made.devices:
        return
    written = parse_specification(render_specification(made))
    against = [
        blocker(
            "cdi-rejected",
            made.kind,
            f"{', '.join(found.consumers)} cannot read the specification: {found.summary}",
            found.remedy,
        )
        for found in faults(written, consumers_named(offer_request.consumer))
    ]
    refuse_if_any(against, frozenset())


def nothing_ready(host: HostSnapshot) -> Refusal:
    """The refusal if no device is available, with the remedy."""
    message = (
        "no device is available, and container runtimes reject a specification without devices"
    )
    remedy = (
        f"bind a device, {_bind_of_some(host)}, or create a vGPU on a virtual function; then run "
        "the command again"
    )
    return refusal([blocker("nothing-ready", "", message, remedy)])


def _bind_of_some(host: HostSnapshot) -> str:
    """The bind command for a GPU of this host that can be bound, if there is one."""
    gpus = [d for d in host.devices if d.is_graphics_or_accelerator and not d.physical_function]
    for gpu in gpus[:_MOST_TRIED]:
        if not diagnostics_to_bind(host, [gpu]):
            return f"vfiomgr bind {gpu.address}"
    return "vfiomgr bind ADDRESS (vfiomgr list shows the addresses)"


def _chosen(
    host: HostSnapshot, every: list[AssignableGroup], offer_request: OfferRequest
) -> list[AssignableGroup]:
    if not offer_request.addresses:
        return every
    by_group = {offer.group: offer for offer in every}
    found: dict[int, AssignableGroup] = {}
    diagnostics: list[Diagnostic] = []
    for address in offer_request.addresses:
        device = host.device(address)
        offer = by_group.get(-1 if device.iommu_group is None else device.iommu_group)
        if offer is not None and device in offer.functions:
            found[offer.group] = offer
        else:
            diagnostics.append(why_not_ready(host, device))
    refuse_if_any(diagnostics, frozenset())
    return [offer for offer in every if offer.group in found]


def why_not_ready(host: HostSnapshot, device: PciDevice) -> Diagnostic:
    """The reason why a function, or its group, cannot be assigned."""
    if host.vgpus.is_vendor_function(device):
        create = f"vfiomgr vgpu create --parent {device.address} --type …"
        return blocker("vgpu-missing", device, f"{device} has no vGPU", create)
    group = host.group(device.iommu_group)
    if device.is_on_vfio and group is not None and group.is_noiommu:
        return blocker(
            "no-iommu-mode", device, f"{device} is in the unsafe no-IOMMU mode", "enable the IOMMU"
        )
    if device.is_on_vfio:
        members = host.group_members(device.iommu_group)
        others = [m for m in members if not host.vgpus.is_ready_for_guests(m) and not m.is_bridge]
        names = ", ".join(f"{m.address} (on {m.driver or 'no driver'})" for m in others)
        return blocker(
            "group-not-viable",
            device,
            f"cannot assign {device}: IOMMU group {device.iommu_group} also contains {names}",
            f"vfiomgr bind {device.address} --with-group",
        )
    against = diagnostics_to_bind(host, [device])
    begin = f"{device} is on {device.driver or 'no driver'}"
    if against:
        return blocker(
            "on-host-driver",
            device,
            f"{begin}, and vfiomgr bind refuses it: {against[0].summary}",
            against[0].hint,
        )
    return blocker("on-host-driver", device, begin, f"vfiomgr bind {device.address}")


def _form(
    host: HostSnapshot, offer: AssignableGroup, offer_request: OfferRequest
) -> Literal["group", "cdev"]:
    """The requested kind of node."""
    if offer_request.node == "cdev" and not offer.cdevs:
        message = f"{offer.name} has no node below {VFIO_CDEVS}"
        remedy = "use its IOMMU group: --node group (cdevs need Linux 6.6 and VFIO_DEVICE_CDEV)"
        refuse("no-cdev", offer.name, message, remedy)
    return default_form(host, offer) if offer_request.node == "auto" else offer_request.node


def _common(forms: Sequence[str], offer_request: OfferRequest) -> list[str]:
    """What all devices need, once for the kind and not in each device.

    Kata's runtime-rs attaches every node of a device, and fails for /dev/vfio/vfio ("Invalid VFIO
    group path"); it ignores the edits of the kind.
    """
    paths = [str(CONTROL)] if "group" in forms else []
    return paths + ([IOMMU] if "cdev" in forms and offer_request.is_plain else [])


def _name(offer: AssignableGroup, numbers: Mapping[int, int], offer_request: OfferRequest) -> str:
    match offer_request.name_by:
        case "group":
            return str(offer.group)
        case "index":
            return str(numbers[offer.group])
        case "cdev":
            if not offer.cdevs:
                message = f"cannot name {offer.name} by cdev: it has none"
                refuse("no-cdev", offer.name, message, "pass --name-by group, address or index")
            return offer.cdevs[0]
        case "address":
            return offer.name


EntryState = Literal["ready", "stale", "missing", "conflict", "shadowed", "unread", "unknown"]
"""`missing`: a node does not exist; `unknown`: nodes other than VFIO's were not checked."""


class CdiFunction(Value):
    """A PCI function behind a node."""

    address: PciAddress
    name: str
    driver: str | None


class CdiNode(Value):
    """A host node of a device, and the device behind it."""

    path: str
    iommu_group: int | None
    functions: tuple[CdiFunction, ...]
    vgpus: tuple[str, ...]
    problem: str | None


class CdiEntry(Value):
    """A device of a specification."""

    name: str
    """VENDOR/CLASS=NAME."""
    kind: str
    device: str
    file: str
    line: int
    is_own: bool
    state: EntryState
    problem: str | None
    nodes: tuple[CdiNode, ...]


def entries(host: HostSnapshot, present: Mapping[str, bool]) -> Iterator[CdiEntry]:
    """All devices of all files, in file order.

    `present` says which nodes other than VFIO's exist.
    """
    pairs = [(file, read_file(file)) for file in host.cdi_files]
    counted = Counter(
        (file.directory, specification.qualified(device))
        for file, specification in pairs
        for device in specification.devices
        if _is_read(file)
    )
    for file, specification in pairs:
        for number, device in enumerate(specification.devices):
            nodes = tuple(_named_nodes(host, device, present))
            state, problem = _state(file, specification.qualified(device), nodes, counted, present)
            yield CdiEntry(
                name=specification.qualified(device),
                kind=specification.kind,
                device=device.name,
                file=file.path,
                line=specification.line(("devices", number)),
                is_own=file.is_own,
                state=state,
                problem=problem,
                nodes=nodes,
            )


def _named_nodes(
    host: HostSnapshot, device: CdiDevice, present: Mapping[str, bool]
) -> Iterator[CdiNode]:
    for node in device.edits.device_nodes:
        target = resolve(host, node.on_host)
        if host.pci_unlisted is not None:  # of an image nobody knows what it leads to
            yield CdiNode(target.path, None, (), (), None)
            continue
        problem = target.problem
        if problem is None and present.get(target.path) is False:
            problem = "it does not exist"
        yield CdiNode(
            path=target.path,
            iommu_group=target.group,
            functions=tuple(CdiFunction(d.address, d.name, d.driver) for d in target.functions),
            vgpus=tuple(vgpu.name for vgpu in target.vgpus),
            problem=problem,
        )


def _state(
    file: CdiFile,
    name: str,
    nodes: tuple[CdiNode, ...],
    counted: Mapping[tuple[str, str], int],
    present: Mapping[str, bool],
) -> tuple[EntryState, str | None]:
    if not _is_read(file):
        return "unread", "no consumer reads a file with this name"
    if counted[file.directory, name] > 1:
        return "conflict", "the name occurs twice, so neither is used"
    if file.directory == STATIC and (DYNAMIC, name) in counted:
        return (
            "shadowed",
            f"it is also in {DYNAMIC}, which all consumers except Kata's runtime-rs prefer",
        )
    problems = [node for node in nodes if node.problem is not None]
    if problems:
        is_vfio = any(node.iommu_group is not None or "/vfio/" in node.path for node in problems)
        told = "; ".join(f"{node.path}: {node.problem}" for node in problems)
        return ("stale" if is_vfio else "missing"), told
    if any(node.iommu_group is None and node.path not in present for node in nodes):
        return "unknown", None
    return "ready", None


def _is_read(file: CdiFile) -> bool:
    return any(consumer.reads(file) for consumer in CONSUMERS)
