"""The arguments of QEMU for a planned guest.

The names of options and properties are those of qemu-options.hx, hw/vfio/pci.c,
hw/pci-bridge/pcie_root_port.c and hw/pci-bridge/pci_expander_bridge.c.
"""

from __future__ import annotations

from collections.abc import Iterator

from vfiomgr.diagnostic import refuse
from vfiomgr.guests.arm import ARM
from vfiomgr.guests.model import (
    NO_ROM,
    GuestAddress,
    GuestBus,
    GuestCell,
    GuestDevice,
    GuestPlan,
    GuestRequest,
)
from vfiomgr.guests.options import qemu_properties
from vfiomgr.paths import MDEV_DEVICES
from vfiomgr.qemu.model import QemuArgument, properties_of, text_of
from vfiomgr.units import MIB, format_cpulist, parse_cpulist

_ROOT = "pcie.0"
_IOMMUFD = "iommufd0"
_MEMORY = "ram"
_FIRST_SLOT, _LAST_SLOT, _FUNCTIONS = 0x10, 0x1E, 8
"""Slots of the root bus for ports: QEMU gives the lowest free ones to other devices, and 0x1f to
the chipset of q35."""


def arguments_of(request: GuestRequest, plan: GuestPlan) -> tuple[QemuArgument, ...]:
    """All arguments, in the order in which QEMU needs them.

    Raises:
        Refusal: the root bus has too few slots for the ports.
    """
    return (
        *_machine(request, plan),
        *_memory(request, plan),
        *_window(plan),
        *_buses(plan),
        *_iommufd(plan),
        *(argument for device in plan.seen for argument in _device(plan, device)),
    )


def _machine(request: GuestRequest, plan: GuestPlan) -> Iterator[QemuArgument]:
    is_arm = plan.architecture == ARM
    accelerator = "kvm" if request.kind == "kvm" else "tcg"
    single = f"{_MEMORY}0" if _has_backend(request, plan) and not plan.memory.cells else None
    yield QemuArgument(
        "machine",
        "virt" if is_arm else "q35",
        properties_of(
            ("accel", accelerator),
            ("gic-version", "3" if is_arm else None),
            ("memory-backend", single),
        ),
    )
    yield _cpu(request, is_arm=is_arm)
    cpus = plan.cpus
    placed = (("sockets", cpus.sockets), ("cores", cpus.cores), ("threads", 1))
    yield QemuArgument("smp", "", properties_of(("cpus", request.vcpus), *placed))
    yield QemuArgument("m", "", properties_of(("size", f"{request.memory_bytes // MIB}M")))


def _cpu(request: GuestRequest, *, is_arm: bool) -> QemuArgument:
    """The host's CPU with its address width, or the best that QEMU emulates."""
    if request.kind == "qemu":
        return QemuArgument("cpu", "max")
    if is_arm:
        return QemuArgument("cpu", "host")
    limit = request.address_bits
    wide = properties_of(("host-phys-bits", "on"), ("host-phys-bits-limit", limit))
    return QemuArgument("cpu", "host", wide)


def _has_backend(request: GuestRequest, plan: GuestPlan) -> bool:
    """Whether memory is bound to nodes, or in huge pages, so that it has objects of its own."""
    return bool(request.hugepage_bytes or plan.memory.host_nodes or plan.memory.cells)


def _memory(request: GuestRequest, plan: GuestPlan) -> Iterator[QemuArgument]:
    memory = plan.memory
    if not _has_backend(request, plan):
        return
    if not memory.cells:
        node = memory.host_nodes[0] if memory.host_nodes else None
        yield _backend(request, plan, 0, request.memory_bytes, node)
    for entry in memory.cells:
        yield from _cell(request, plan, entry)


def _cell(request: GuestRequest, plan: GuestPlan, entry: GuestCell) -> Iterator[QemuArgument]:
    """A NUMA node of the guest; one without memory is for that of a device."""
    cell = entry.cell
    has_memory = cell.memory_bytes > 0
    if has_memory:
        node = entry.host_node if entry.host_node in plan.memory.host_nodes else None
        yield _backend(request, plan, cell.number, cell.memory_bytes, node)
    known = properties_of(
        ("nodeid", cell.number),
        ("cpus", format_cpulist(cell.cpus) or None),
        ("memdev", f"{_MEMORY}{cell.number}" if has_memory else None),
    )
    yield QemuArgument("numa", "node", known)


def _backend(
    request: GuestRequest, plan: GuestPlan, number: int, size: int, node: int | None
) -> QemuArgument:
    """Memory of a host node; huge pages are of a memfd, which needs no mounted file system."""
    pages = request.hugepage_bytes
    policy = "preferred" if plan.memory.mode == "preferred" else "bind"
    known = properties_of(
        ("id", f"{_MEMORY}{number}"),
        ("size", f"{size // MIB}M"),
        ("hugetlb", "on" if pages else None),
        ("hugetlbsize", f"{pages // 1024}K" if pages else None),
        ("host-nodes", node),
        ("policy", policy if node is not None else None),
    )
    return QemuArgument("object", f"memory-backend-{'memfd' if pages else 'ram'}", known)


def _window(plan: GuestPlan) -> Iterator[QemuArgument]:
    if plan.window.hole_bytes is not None:
        hole = f"{plan.window.hole_bytes // MIB}M"
        yield QemuArgument("global", "", (("q35-pcihost.pci-hole64-size", hole),))
    if plan.window.firmware_mib is not None:
        named = properties_of(
            ("name", "opt/ovmf/X-PciMmio64Mb"), ("string", plan.window.firmware_mib)
        )
        yield QemuArgument("fw_cfg", "", named)


def _bus_name(number: int) -> str:
    return f"bus{number}" if number else _ROOT


def _buses(plan: GuestPlan) -> Iterator[QemuArgument]:
    """Ports, expanders and bridges; those on the root bus share slots, eight in each."""
    on_root = 0
    for bus in plan.buses:
        if bus.kind == "root":
            continue
        place = None
        if bus.kind == "root-port" and bus.place is None:
            place = _on_root(on_root)
            on_root += 1
        yield _bus(bus, place)


def _on_root(number: int) -> tuple[int, int]:
    """Slot and function of a port."""
    slot, function = divmod(number, _FUNCTIONS)
    if _FIRST_SLOT + slot > _LAST_SLOT:
        most = (_LAST_SLOT - _FIRST_SLOT + 1) * _FUNCTIONS
        message = f"more than {most} root ports: the guest's root bus has no slot for them"
        refuse("too-many-buses", "", message, "pass fewer --spare-ports or devices")
    return _FIRST_SLOT + slot, function


def _bus(bus: GuestBus, place: tuple[int, int] | None) -> QemuArgument:
    drivers = {
        "root-port": "pcie-root-port",
        "expander": "pxb-pcie",
        "bridge": "pcie-pci-bridge",
    }
    above = bus.place
    known = properties_of(
        ("id", _bus_name(bus.number)),
        ("bus", _ROOT if above is None else _bus_name(above.bus)),
        ("addr", _slot(place, above)),
        ("multifunction", "on" if place is not None and place[1] == 0 else None),
        ("chassis", bus.number if bus.kind == "root-port" else None),
        ("bus_nr", bus.first_number),
        ("numa_node", bus.cell),
        ("hotplug", None if bus.has_hotplug else "off"),
        ("mem-reserve", bus.reserve_bytes),
    )
    return QemuArgument("device", drivers[bus.kind], known)


def _slot(place: tuple[int, int] | None, above: GuestAddress | None) -> str | None:
    if place is None:
        return None if above is None else f"{above.slot:#x}"
    slot, function = place
    return f"{slot:#x}.{function}"


def _iommufd(plan: GuestPlan) -> Iterator[QemuArgument]:
    if any(device.options.has_iommufd for device in plan.seen):
        yield QemuArgument("object", "iommufd", (("id", _IOMMUFD),))


def _device(plan: GuestPlan, device: GuestDevice) -> Iterator[QemuArgument]:
    """One vfio-pci for each function, all in one slot of the guest."""
    place = plan.places[device.name]
    if not device.functions:
        directory = str(MDEV_DEVICES / device.vgpu_uuid)
        yield _function(device, place, 0, ("sysfsdev", directory), device.vgpu_uuid)
        return
    for number, function in enumerate(device.functions):
        address = str(function.address)
        yield _function(device, place, number, ("host", address), address)
    if device.options.acpi_nodes is not None:
        first = _identifier(device.name)
        for node in parse_cpulist(device.options.acpi_nodes):
            known = (("id", f"{first}-node{node}"), ("pci-dev", first), ("node", str(node)))
            yield QemuArgument("object", "acpi-generic-initiator", known)


def _function(
    device: GuestDevice, place: GuestAddress, number: int, source: tuple[str, str], name: str
) -> QemuArgument:
    """A function; options that can occur once are those of the first."""
    options = device.options
    is_first = number == 0
    has_rom = options.rom != NO_ROM and (is_first or options.rom is None)
    driver = "vfio-pci-nohotplug" if is_first and options.ramfb else "vfio-pci"
    known = properties_of(
        source,
        ("id", _identifier(name)),
        ("bus", _bus_name(place.bus)),
        ("addr", f"{place.slot:#x}.{number}"),
        ("multifunction", "on" if is_first and len(device.functions) > 1 else None),
        ("iommufd", _IOMMUFD if options.has_iommufd else None),
        ("rombar", None if has_rom else 0),
        ("romfile", options.rom if is_first and has_rom else None),
        ("bootindex", options.boot_order if is_first else None),
        ("display", "on" if is_first and (options.display or options.ramfb) else None),
        ("ramfb", "on" if is_first and options.ramfb else None),
    )
    more = tuple(map(text_of, qemu_properties(options))) if is_first else ()
    return QemuArgument("device", driver, (*known, *more))


def _identifier(name: str) -> str:
    """An identifier of QEMU: letters, digits, `-`, `.`, `_`; the first is a letter."""
    return f"vfio-{name.replace(':', '-')}"
