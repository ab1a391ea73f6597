"""QEMU's own arguments in a domain (`<qemu:commandline>`), which libvirt passes on unread.

libvirt neither binds these devices nor reserves their addresses, and does not raise the limit on
locked memory for them (qemuDomainGetMemLockLimitBytes counts `<hostdev>`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from uuid import UUID

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, finding, problem, warning
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.libvirt.model import Domain, DomainHostdev
from vfiomgr.libvirt.preflight.context import ROOT_BUS, PreflightContext
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

_LINE = "qemu:commandline"
_PLACE = expression(r"(?:0x)?([0-9a-f]{1,2})(?:\.([0-7]))?")
"""`6`, `0x6`, `06.1`: both numbers are hexadecimal (set_pci_devfn in hw/core/qdev-properties)."""
_BUS = expression(r"pcie?\.(\d{1,3})")
"""Names of libvirt's buses: pcie.0 or pci.0, and pci.N for the controller of index N."""
_SLOTS = 32
_JSON_SINCE, _JSON_QEMU = Version(8, 0), Version(7, 0)
"""The releases that write and read -device as JSON (libvirt's news for 7.9.0 and 8.0.0)."""
_BOOLEANS = {"on": "true", "off": "false", "true": "true", "false": "false"}
_READ = frozenset({"device", "set", "global", "fw_cfg", "object"})
"""Options that rules read."""
_BUILT_IN = {True: (0, 0x1F), False: (0, 1)}
"""Slots of pcie.0 of q35 and of pci.0 of i440fx with devices of the machine itself."""


def values_of(argument: str, implied: str) -> dict[str, object]:
    """The members of an argument, in JSON or as `a=b,c=d`; the first may have no name."""
    if argument.startswith("{"):
        try:
            read = parse_json(argument)
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}
    first, *more = (part.partition("=") for part in argument.split(","))
    unnamed = implied and not first[1]
    found: dict[str, object] = {implied: first[0]} if unnamed else {first[0]: first[2]}
    return found | {part[0]: part[2] for part in more}


def given(domain: Domain, option: str) -> Iterator[str]:
    """The arguments of an option; both `-option` and `--option` are accepted."""
    for name, argument in pairwise(domain.command_line):
        if name in (f"-{option}", f"--{option}"):
            yield argument


def devices(domain: Domain) -> Iterator[tuple[str, dict[str, object]]]:
    """The devices of `-device`: each argument, and its members."""
    for argument in given(domain, "device"):
        yield argument, values_of(argument, "driver")


def with_arguments(domain: Domain) -> Domain:
    """The domain with the host devices of its own QEMU arguments, for the rules about them."""
    found = [one for _, values in devices(domain) if (one := _hostdev(domain, values)) is not None]
    return replace(domain, hostdevs=(*domain.hostdevs, *found)) if found else domain


def _hostdev(domain: Domain, values: dict[str, object]) -> DomainHostdev | None:
    name = str(values.get("host") or values.get("sysfsdev") or "").rstrip("/").rpartition("/")[2]
    if not name or not str(values.get("driver")).startswith("vfio-pci"):
        return None
    line = domain.line(_LINE)
    try:
        address = PciAddress.parse(name)
    except UsageError:
        try:
            uuid = str(UUID(name))
        except ValueError:
            return None
        return DomainHostdev(line, "mdev", "qemu:arg", uuid=uuid)
    return DomainHostdev(line, "pci", "qemu:arg", address=address)


def not_locked(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO_MAP_DMA: ENOMEM; "RLIMIT_MEMLOCK (65536) exceeded" in the kernel's log."""
    memory, readiness = context.domain.memory, context.host.readiness
    own = [hostdev for hostdev in context.hostdevs if hostdev.element == "qemu:arg"]
    limits = readiness.memlock if readiness is not None else None
    is_unlimited = any(one.kind == "virtualization" and one.is_unlimited for one in limits or ())
    is_raised = memory.hard_limit_bytes is not None or memory.is_locked or is_unlimited
    if not own or is_raised or len(own) < len(context.hostdevs):
        return
    for hostdev in own:
        element = f"vfiomgr libvirt hostdev {hostdev.name} prints it"
        yield warning(
            "commandline-device",
            f"{hostdev.name} is only in QEMU's own arguments, so libvirt does not raise the limit "
            "on locked memory",
            (context.cite(hostdev), "no <hard_limit>, no <locked>, no <hostdev>"),
            "VFIO locks the guest's memory: QEMU fails with VFIO_MAP_DMA, or the guest hangs; "
            "libvirt also refuses QEMU access to /dev/vfio unless cgroup_device_acl of qemu.conf "
            "lists it",
            f"write the device as <hostdev> instead ({element}); or write <memtune><hard_limit "
            f"unit='KiB'>{(memory.total_bytes >> 10) + (1 << 20)}</hard_limit></memtune>",
            subject=hostdev.name,
        )


def clashes(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "PCI: slot 6 function 0 not available for nvme, in use by nvme"."""
    places: dict[tuple[str | int, int, int], list[str]] = defaultdict(list)
    for argument, values in devices(context.domain):
        found = _PLACE.fullmatch(str(values.get("addr", "")).lower())
        bus = str(values.get("bus", "pci.0"))
        index = _BUS.fullmatch(bus)
        if found and int(found[1], 16) < _SLOTS:
            name: str | int = int(index[1]) if index else bus
            places[name, int(found[1], 16), int(found[2] or "0")].append(argument)
    is_q35 = "q35" in (context.domain.machine or "")
    line = context.at(context.domain.line(_LINE))
    for (name, slot, function), arguments in places.items():
        count = context.times_taken[name, slot, function] if isinstance(name, int) else 0
        is_own = name == ROOT_BUS and slot in _BUILT_IN[is_q35] and not function
        if len(arguments) + max(count, is_own) < 2:  # noqa: PLR2004 - two at one place
            continue
        other = "the machine's own device" if is_own else f"<address> of {count} devices"
        yield problem(
            "same-place",
            f"{len(arguments) + max(count, is_own)} devices are at the same address: bus {name}, "
            f"slot {slot:#04x}, function {function:#x}",
            (
                *(f"{line}: <qemu:arg value='{one}'>" for one in arguments),
                *([other] if count or is_own else []),
            ),
            'QEMU exits with "PCI: slot not available"; libvirt does not read these addresses',
            _elsewhere(context, name, {key[1] for key in places if key[0] == name}),
        )


def _elsewhere(context: PreflightContext, bus: str | int, used: set[int]) -> str:
    """Another place for a device of the arguments, which neither they nor libvirt's devices use."""
    if isinstance(bus, int) and context.is_single_slot(bus):
        return "write bus= with a free <controller type='pci' model='pcie-root-port'> of its own"
    taken = used | {key[1] for key in context.times_taken if key[0] == bus}
    free = next((slot for slot in range(_SLOTS // 2, _SLOTS) if slot not in taken), None)
    shown = "another bus" if free is None else f"e.g. addr={free:#04x}"
    return f"write a different addr= for each, a free slot of the bus: {shown}"


def settings(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "there is no device "hostdev0" defined": -set ignores devices in JSON."""
    libvirt, qemu = context.libvirt, context.qemu
    is_old = libvirt is not None and libvirt < _JSON_SINCE
    is_old = is_old or (qemu is not None and qemu < _JSON_QEMU)
    own = {values.get("id") for _, values in devices(context.domain)}
    for argument in given(context.domain, "set") if context.domain.has_json_devices else ():
        place, _, value = argument.partition("=")
        kind, _, rest = place.partition(".")
        alias, _, name = rest.rpartition(".")
        if kind != "device" or alias in own or is_old:
            continue
        form = "bool" if value in _BOOLEANS else "unsigned" if value.isdecimal() else "string"
        yield finding(
            "commandline-set",
            "warning" if libvirt is None or qemu is None else "blocker",
            f"-set cannot change {alias}, which libvirt {_JSON_SINCE} and later pass as JSON to "
            f"QEMU {_JSON_QEMU} and later",
            (f"{context.at(context.domain.line(_LINE))}: <qemu:arg value='{argument}'>",),
            f'QEMU exits with "there is no device "{alias}" defined"',
            f"write <qemu:override><qemu:device alias='{alias}'><qemu:frontend><qemu:property "
            f"name='{name}' type='{form}' value='{_BOOLEANS.get(value, value)}'/></qemu:frontend>"
            "</qemu:device></qemu:override> instead of it",
        )


def unread(domain: Domain) -> Iterator[str]:
    """The options of which no rule reads anything."""
    options = [text for text in domain.command_line if text.startswith("-")]
    others = sorted({text for text in options if text.lstrip("-") not in _READ})
    if others:
        yield f"QEMU's own arguments in <qemu:commandline>: {', '.join(others)}"
