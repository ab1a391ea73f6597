"""What differs between hosts, or between two snapshots of one; pure.

What changes by itself is not compared: users, free memory, power states, numbers of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.fleet.model import cards_of, name_of_file, natural
from vfiomgr.persistence.installed_layout import FILE
from vfiomgr.units import counted, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.created import Created
    from vfiomgr.snapshot.model import HostSnapshot


class Inventory(Value):
    """What is compared of a host."""

    name: str
    time: str | None
    facts: dict[str, str]
    """By what they are: `kernel`, `0000:41:00.0 driver`; without those that are unknown."""
    unknown: frozenset[str] = frozenset()
    """What is unknown: facts, or the first words of facts (`NUMA node`, `module`)."""
    path: str = ""
    """The file of its snapshot."""
    cards: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    """The addresses of its GPUs, with their serial numbers; empty if unknown."""


class Difference(Value):
    """A fact that differs, on some hosts in the same way."""

    what: str
    before: str | None
    """None if there was none."""
    after: str | None
    hosts: tuple[str, ...]


def inventory(host: HostSnapshot, created: Created, path: str) -> Inventory:
    """What is compared of a host.

    Raises:
        HostError: the PCI devices are unknown.
    """
    if host.pci_unlisted is not None:
        message = f"{path}: PCI devices are unknown: {host.pci_unlisted}"
        raise HostError(message, "create the snapshot again, as root on the running host")
    facts, unknown = {}, set(host.pci_unidentified)
    for what, text in _facts(host):
        if text is None:
            unknown.add(what)
        elif text:
            facts[what] = text
    name = created.host_name or name_of_file(path)
    return Inventory(name, created.time, facts, frozenset(unknown), cards=cards_of(host))


def differences(pairs: Iterable[tuple[Inventory, Inventory]]) -> tuple[Difference, ...]:
    """What differs between each two, the same difference of several hosts once."""
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    for before, after in pairs:
        for what in before.facts | after.facts:
            old, new = before.facts.get(what), after.facts.get(what)
            if _is_unknown(what, before.unknown) or _is_unknown(what, after.unknown):
                continue
            if old != new and not _is_of_other(what, before.facts, after.facts):
                found.setdefault((what, old, new), []).append(after.name)
    every = (Difference(*key, tuple(sorted(names, key=natural))) for key, names in found.items())
    return tuple(sorted(every, key=lambda one: (-len(one.hosts), natural(one.what))))


def _is_unknown(what: str, unknown: frozenset[str]) -> bool:
    """Whether a fact, or all of its kind, is unknown."""
    words = what.split(" ")
    return any(" ".join(words[:count]) in unknown for count in range(1, len(words) + 1))


def _is_of_other(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether a fact is that of a device that is missing or another one, which is said once."""
    device, _, rest = what.partition(" ")
    return (
        bool(rest)
        and (device in before or device in after)
        and (before.get(device) != after.get(device))
    )


def _facts(host: HostSnapshot) -> Iterator[tuple[str, str | None]]:
    """Each fact with its text: None if it is unknown, empty if there is none."""
    kernel, support = host.kernel, host.guest_support
    yield "kernel", kernel.release
    yield "kernel command line", kernel.command_line
    yield "machine", kernel.machine_vendor
    yield "CPU", kernel.cpu_vendor
    yield "IOMMU", ("on" if host.iommu.is_on else "off") if host.iommu.is_known else None
    yield "libvirt", support.libvirt if support else None
    yield "QEMU", support.qemu if support else None
    if host.topology is None:
        yield "NUMA node", None
    for node in host.topology.nodes if host.topology else ():
        yield f"NUMA node {node.number}: CPUs", str(len(node.cpus))
        memory = node.memory_bytes
        yield f"NUMA node {node.number}: memory", None if memory is None else size(memory)
        for pool in node.hugepages:
            what = f"NUMA node {node.number}: huge pages of {size(pool.page_bytes)}"
            yield what, str(pool.total)
    if host.readiness is None:
        yield "module", None
    for module in host.readiness.modules if host.readiness else ():
        if module.parameters is None:
            yield f"module {module.name}:", None
        for name, value in (module.parameters or {}).items():
            yield f"module {module.name}: {name}", value
    text = host.files.text(FILE)
    yield "layout", "" if text is None else sha256(text.encode()).hexdigest()[:12]
    widths = {link.address: link.width for link in host.links or ()}
    for device in host.devices:
        if device.physical_function is None and not device.is_bridge:
            yield from _of_device(host, device)
            width = widths.get(device.address)
            yield f"{device.address} link width", f"x{width}" if width else None


def _of_device(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str | None]]:
    name = str(device.address)
    ids = f"{device.vendor_id}:{device.device_id}, subsystem {device.subsystem_id}"
    yield name, f"{device.short_name} ({ids})"
    yield f"{name} driver", device.driver or "none"
    yield f"{name} driver_override", device.driver_override or ""
    yield f"{name} NUMA node", "" if device.numa_node is None else str(device.numa_node)
    if device.sriov_totalvfs:
        yield f"{name} VFs", str(device.sriov_numvfs or 0)
    bars = (f"{bar.index}: {size(bar.size)}" for bar in device.bars if bar.is_memory)
    yield f"{name} BARs", ", ".join(bars)
    others = [str(d.address) for d in host.group_members(device.iommu_group) if d is not device]
    group = "none" if device.iommu_group is None else ", ".join(others) or "alone"
    yield f"{name} IOMMU group", group
    binding = host.files.binding(device.address)
    yield f"{name} at boot", "" if binding is None else f"bound to {binding.driver}"
    yield f"{name} serial", device.serial or None
    vgpus = len(host.vgpus.of(name))
    yield f"{name} vGPUs", counted(vgpus, "vGPU") if vgpus else ""
