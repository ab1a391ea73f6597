"""Summaries of snapshots; pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.fleet.model import Capacity, Gpu, HostSummary, Node, cards_of, is_counted, name_of_file
from vfiomgr.layout.compare import compare
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.layout.named import layout_request
from vfiomgr.layout.parts import components
from vfiomgr.listing import first_of
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.isolation import iommu_off, iommu_unread
from vfiomgr.passthrough.steps import Bind
from vfiomgr.persistence.installed_layout import FILE, RECORD, layout_name
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import gpus as vgpu_gpus
from vfiomgr.vgpu.capacity import rooms
from vfiomgr.vgpu.instances import more_of

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.fleet.model import GpuState
    from vfiomgr.layout.model import Layout
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.created import Created
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder

_OF_USERS = frozenset({"in-use", "held-by-guest", "held-by-pod", "held-by-claim"})
_NO_USERS = "its users are not in the snapshot (created without root, or of a recorded host)"
_MOST = 3


def summarize(host: HostSnapshot, created: Created, path: str) -> HostSummary:
    """What `fleet` needs to know of a host."""
    layout, drift, unknown = installed_drift(host)
    return HostSummary(
        name=created.host_name or name_of_file(path),
        time=created.time,
        gpus=tuple(sorted(_gpus(host), key=lambda gpu: gpu.address)),
        nodes=tuple(_nodes(host)),
        kernel=host.kernel.release,
        guests=tuple(dict.fromkeys(u.guest for u in host.users.processes or () if u.guest)),
        layout=layout,
        drift=drift,
        drift_unknown=unknown,
    )


def _gpus(host: HostSnapshot) -> Iterator[Gpu]:
    """The GPUs and accelerators that are no virtual functions."""
    found = [d for d in host.devices if is_counted(d)]

    def bonds(device: PciDevice) -> Iterator[Hashable]:
        yield device.address
        yield from {d.iommu_group for d in host.slot(device)} - {None}

    room = {gpu.name: gpu for gpu in vgpu_gpus(host)}
    for number, unit in enumerate(components(found, bonds)):
        against = reasons_against(host, unit)
        for device in unit:
            name = str(device.address)
            state, why = _judged(host, device, against)
            yield Gpu(
                address=name,
                name=device.short_name,
                ids=f"{device.vendor_id}:{device.device_id}",
                numa_node=device.numa_node,
                unit=number,
                state=state,
                why=why,
                vgpus=sum(1 for _ in _vgpus_of(host, device)),
                types=tuple(
                    Capacity(one.type.short_name or one.type.id, one.more, one.is_certain)
                    for one in (rooms(room[name]) if name in room else ())
                ),
                instances=tuple(_instances(host, name)),
                serial=device.serial,
            )


def _instances(host: HostSnapshot, name: str) -> Iterator[Capacity]:
    partition = host.vgpus.partition_of(name)
    if partition is not None:
        yield from (Capacity(one.name, more_of(partition, one)) for one in partition.profiles)


def reasons_against(host: HostSnapshot, unit: Sequence[PciDevice]) -> tuple[Diagnostic, ...]:
    """Why no guest could have these GPUs and the other functions of their slots now.

    Those on a host driver by the safety checks of `bind`; those on a VFIO driver by those of
    `unbind`, which also see guests that have them.
    """
    found: list[Diagnostic] = []
    try:
        plan(host, Bind(tuple(device.address for device in unit)))
    except Refusal as refusal:
        found += refusal.diagnostics
    for device in {d.address: d for one in unit for d in host.slot(one)}.values():
        if device.is_on_vfio:
            found += guards.assigned(host, device)
            found += guards.unusable(host, device)
    off = iommu_off(host)
    found += [] if off is None else [off]
    return tuple(dict.fromkeys(found))


def _judged(
    host: HostSnapshot, device: PciDevice, against: Sequence[Diagnostic]
) -> tuple[GpuState, str]:
    """The state of a GPU, whose IOMMU group has these reasons against it."""
    users = list(users_of(host, device))
    if users:
        return "used", ", ".join(users)
    own = {str(other.address) for other in host.slot(device)}
    mine = [one for one in against if one.subject.partition(" ")[0] in own]
    busy = next((one for one in mine if one.rule in _OF_USERS), None)
    if busy is not None:
        return "used", busy.summary
    unread = iommu_unread(host)
    if unread:
        return "unknown", unread[0]
    firm = [one for one in (*mine, *against) if one.rule != guards.UNKNOWN]
    if firm:
        return "unavailable", firm[0].summary
    if host.users.processes is None:
        return "unknown", _NO_USERS
    return ("unknown", against[0].summary) if against else ("free", "")


def users_of(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    """Guests, pods, claims and processes that have a GPU, a function of its slot, or its vGPUs."""
    vgpus = list(_vgpus_of(host, device))
    holders: list[Holder] = [*host.slot(device), *vgpus, *_virtual(host, device)]
    names: list[str] = []
    for holder in holders:
        names += [f"pod {pod}" for pod in (host.pod_of(holder),) if pod]
        names += [f"claim {claim}" for claim in (host.claim_of(holder),) if claim]
        users = host.holders(holder)
        names += [f"pod {u.pod}" if u.pod else u.guest or u.command for u in users]
    shown, more = first_of(list(dict.fromkeys(names)), _MOST)
    yield from (*shown, *more)
    if vgpus and not names:
        yield f"{len(vgpus)} active vGPU{'s' if len(vgpus) > 1 else ''}"


def _virtual(host: HostSnapshot, device: PciDevice) -> Iterator[PciDevice]:
    found = (host.device_named(str(address)) for address in device.virtual_functions)
    return (one for one in found if one is not None)


def _vgpus_of(host: HostSnapshot, device: PciDevice) -> Iterator[Holder]:
    """The active vGPUs of a GPU and of its virtual functions."""
    for one in (device, *_virtual(host, device)):
        yield from host.vgpus.of(str(one.address))


def _nodes(host: HostSnapshot) -> Iterator[Node]:
    for node in host.topology.nodes if host.topology else ():
        pools = {pool.page_bytes: pool.free * pool.page_bytes for pool in node.hugepages}
        memory, free = node.memory_bytes, node.free_bytes
        yield Node(node.number, len(node.cpus), memory, free, pools)


_Compared = tuple[tuple[str, ...] | None, str | None]
"""What differs, or why this is unknown."""


def installed_drift(
    host: HostSnapshot,
) -> tuple[str | None, tuple[str, ...] | None, str | None]:
    """The name of the installed layout, what differs from it, and why this is unknown."""
    text = host.files.text(FILE)
    if text is None or host.files.text(RECORD) is None:
        return None, None, None
    name = layout_name(host) or None
    try:
        chosen, layout = choose_layout(read_layouts(text, FILE), name)
    except VfiomgrError as error:
        return name, None, f"cannot read {FILE}: {error.message}"
    return chosen, *drift_from(host, chosen, layout)


class Drift(Value):
    """What differs on a host from a layout in a file."""

    name: str
    time: str | None
    drift: tuple[str, ...] | None
    """None if unknown."""
    drift_unknown: str | None = None
    """Why it is unknown."""
    path: str = ""
    """The file of its snapshot."""
    cards: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    """The addresses of its GPUs, with their serial numbers; empty if unknown."""


@lru_cache(maxsize=1)
def layout_in(text: str, source: str, name: str | None) -> tuple[str, Layout]:
    """The layout of this name in a text.

    Raises:
        InvalidDocument: it is malformed, or there is no such layout.
    """
    return choose_layout(read_layouts(text, source), name)


def drift_of(  # noqa: PLR0913, PLR0917 - a layout, and a snapshot
    text: str, source: str, name: str | None, host: HostSnapshot, created: Created, path: str
) -> Drift:
    """What differs on a host from the layout in a text."""
    found = drift_from(host, *layout_in(text, source, name))
    called = created.host_name or name_of_file(path)
    return Drift(called, created.time, *found, cards=cards_of(host))


def drift_from(host: HostSnapshot, name: str, layout: Layout) -> _Compared:
    """What differs from a layout, as `layout assert` reports it, or why this is unknown."""
    try:
        found = tuple(map(str, compare(host, layout_request(None, name, layout)).differences))
    except VfiomgrError as error:
        return None, f"cannot compare: {error.message}"
    unread = iommu_unread(host) if layout.gives_to_guests else ()
    return (None, unread[0]) if unread and not found else (found, None)
