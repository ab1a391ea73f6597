"""Rules about IOMMU groups, host drivers of their functions, and `ids=` of vfio-pci."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.model import (
    LOAD,
    add_line,
    add_to_dracut,
    command_line,
    rebuild_initramfs,
)
from vfiomgr.diagnostic import Diagnostic, Remedy, finding, info, warning
from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters
from vfiomgr.listing import first_of
from vfiomgr.passthrough import guards, isolation
from vfiomgr.passthrough.readiness_hints import bind_remedy
from vfiomgr.paths import IOMMU_GROUPS, PCI_DEVICES, PCI_DRIVERS_PROBE, echo
from vfiomgr.pci.drivers import parse_pci_ids
from vfiomgr.pci.iommu import (
    HARMLESS_DRIVERS,
    acs_override_words,
    acs_redirect_words,
    blockers,
    is_blocking,
)
from vfiomgr.pci.model import CLASS_VGA, PciDevice, is_address
from vfiomgr.persistence.model import Initramfs
from vfiomgr.persistence.systems import why_lost
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.check.model import KernelModule, ParameterSetting, Readiness
    from vfiomgr.diagnostic import Severity
    from vfiomgr.pci.drivers import PciIdEntry
    from vfiomgr.snapshot.model import HostSnapshot


def gpus(host: HostSnapshot) -> list[PciDevice]:
    """GPUs and accelerators that can be passed through entirely.

    The console's display on a host driver, functions with VFs or vGPUs, and NVSwitches are
    excluded.
    """
    parents = host.vgpus.parent_names
    return [
        d
        for d in host.devices
        if d.is_graphics_or_accelerator
        and not d.is_nvswitch
        and not (
            (d.is_boot_display and not d.is_on_vfio)
            or d.virtual_functions
            or str(d.address) in parents
        )
    ]


def without_group(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report functions that no IOMMU covers, if the host has one: GPUs one by one."""
    why = "VFIO requires that an IOMMU isolates the function"
    own, others = gpus(host), dict[str, list[PciDevice]]()
    for device in host.devices:
        for found in () if device.is_bridge else isolation.isolation(host, device):
            if device not in own:
                others.setdefault(found.remedy, []).append(device)
                continue
            title = f"{device} has no IOMMU group"
            shown = (_no_group(device),)
            yield warning("no-group", title, shown, why, found.remedy, subject=device)
    for remedy, devices in others.items():
        title = f"{counted(len(devices), 'function')} without an IOMMU group"
        yield warning("no-group", title, tuple(map(_no_group, devices)), why, remedy)


def _no_group(device: PciDevice) -> str:
    return f"{PCI_DEVICES}/{device.address} has no iommu_group"


def shared_with_gpu(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs whose IOMMU group also has other slots on host drivers."""
    for number in _numbers(gpus(host)):
        members, foreign = host.group_members(number), _foreign(host, number)
        if not foreign:
            continue
        inside = [d for d in gpus(host) if d in members]
        names = ", ".join(map(str, inside))
        yield warning(
            "shared-group",
            f"IOMMU group {number} of {names} also has other devices",
            (*(f"{d} is on {d.driver}" for d in foreign), *_nothing_between(host, number)),
            f"{isolation.why_together(host, number)}: the host loses these devices too",
            *(Remedy(text, joint=", ") for text in _separating(host, inside)),
            bind_remedy(
                f"bind all of them with: vfiomgr bind {inside[0].address} --with-group",
                inside[:1],
                with_group=True,
            ),
        )


def _foreign(host: HostSnapshot, number: int) -> list[PciDevice]:
    """Functions of a group on host drivers that are not of its GPUs."""
    members = host.group_members(number)
    own = {other.address for d in gpus(host) if d in members for other in host.slot(d)}
    return [d for d in blockers(members) if d.address not in own and not d.is_bridge]


def not_viable(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report groups with a function on VFIO that guests cannot open: others are on host drivers.

    With a GPU, functions of other slots are in shared-group.
    """
    of_gpus = set(_numbers(gpus(host)))
    for group in host.groups:
        members = _endpoints(host, group.number)
        ready = [d for d in members if d.is_on_vfio]
        slots = {d.address.slot for d in ready}
        left = [d for d in blockers(members) if not d.is_bridge]
        if group.number in of_gpus:
            left = [d for d in left if d.address.slot in slots]
        if ready and left:
            is_other = any(d.address.slot not in slots for d in left)
            how = f"bind them too: vfiomgr bind {ready[0].address}{' --with-group' * is_other}"
            yield warning(
                "group-not-viable",
                f"no guest can open {ready[0]}: {counted(len(left), 'function')} of its IOMMU "
                "group on host drivers",
                tuple(f"{d} is on {d.driver}" for d in left),
                f"VFIO gives guests only entire groups (group {group.number}); which functions "
                "share a group can change with the kernel and the firmware",
                bind_remedy(how, ready[:1], with_group=is_other),
                *(isolation.separating(host, ready, "it") if is_other else ()),
            )


def _separating(host: HostSnapshot, inside: Sequence[PciDevice]) -> list[str]:
    return [*isolation.separating(host, inside, "the GPU")] or [isolation.ENABLE_ACS]


def reserved_regions(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report groups that the kernel does not assign: of GPUs and functions on VFIO one by one."""
    of_guests = [*gpus(host), *(d for d in host.devices if d.is_on_vfio)]
    wanted, others = set(_numbers(of_guests)), list[str]()
    for group in host.groups:
        members = [d for d in _endpoints(host, group.number) if not d.is_boot_display]
        for found in isolation.reserved_region(host, members[0]) if members else ():
            place = f"{IOMMU_GROUPS}/{group.number}/reserved_regions"
            shown = tuple(f"{place}: {region} direct" for region in group.direct_regions or ())
            if group.number not in wanted:
                others.append(f"{shown[0]}: {', '.join(map(str, members))}")
                continue
            names = ", ".join(str(d) for d in members)
            summary = f"cannot assign {names}: {found.summary}"
            why = "the firmware uses this memory by the device's DMA, which a guest would take over"
            yield warning(found.rule, summary, shown, why, found.without("allow").remedy)
    if others:
        yield info(
            "reserved-region",
            f"the firmware requires memory mapped 1:1 in {counted(len(others), 'IOMMU group')}",
            tuple(others),
            "the kernel does not assign devices of these groups",
            "assign devices of other groups",
        )


def acs_override(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report the ACS override patch, which splits groups that the hardware does not isolate."""
    words = acs_override_words(host.kernel.command_line)
    together = _behind_own_port(host) if any("downstream" in word for word in words) else ()
    title = "IOMMU groups may be smaller than what the hardware isolates"
    why = (
        "a kernel with the ACS override patch assumes that these ports isolate devices: a "
        "guest's device may then bypass the IOMMU and access devices of the host and of other "
        "guests; a kernel without the patch ignores the option"
    )
    then = ", reboot, and list the real groups with: vfiomgr groups"
    if together:
        title = "pcie_acs_override has no effect: this kernel does not have the patch"
        why = "with the patch, a port and what is behind it would have separate groups"
        then = ", or boot a kernel with the patch"
    yield from _removing("acs-override", host, words, (title, why, "", then), together)


def acs_parameter(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report `pci=` parameters that take ACS from ports, which makes groups larger."""
    words = acs_redirect_words(host.kernel.command_line)
    title = "IOMMU groups may be larger than the hardware requires"
    why = (
        "ports without ACS redirection let the devices behind them access each other, so they "
        "are assigned together; groups are formed at boot"
    )
    before = "unless devices need peer-to-peer access on the host, "
    yield from _removing("acs-parameter", host, words, (title, why, before, ", and reboot"))


def relaxed_regions(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report relax_rmrr of intel_iommu=, which only patched kernels read."""
    for one in parameters(host.kernel.command_line, "intel_iommu"):
        kept = [value for value in one.value.split(",") if value != isolation.RELAXED]
        if kept != one.value.split(","):
            yield info(
                "relaxed-region",
                "the kernel may assign devices whose memory the firmware uses (relax_rmrr)",
                (f"/proc/cmdline: {one.word}",),
                "a kernel with this patch does not reserve memory that the firmware requires "
                "mapped 1:1: the firmware's access may fail, or change a guest's memory",
                f"if no guest needs it: write intel_iommu={','.join(kept) or 'on'} for {one.word} "
                f"on the kernel command line{command_line(host)}, and reboot",
            )


def _removing(
    rule: str,
    host: HostSnapshot,
    words: Sequence[str],
    texts: tuple[str, str, str, str],
    evidence: Sequence[str] = (),
) -> Iterator[Diagnostic]:
    """Report words of the kernel command line: title, why, and what is around the remedy."""
    title, why, before, then = texts
    if words:
        shown = " ".join(words)
        fix = f"{before}remove {shown} from the kernel command line{command_line(host)}{then}"
        yield warning(rule, title, (f"/proc/cmdline: {shown}", *evidence), why, fix)


def _behind_own_port(host: HostSnapshot) -> tuple[str, ...]:
    """Groups with a PCI Express port and a function directly behind it, as evidence."""
    ports = {str(d.address): d for d in host.devices if d.driver == "pcieport"}
    pairs = ((d, ports.get(d.bridge_path.rpartition("/")[2])) for d in host.devices)
    return tuple(
        f"{IOMMU_GROUPS}/{d.iommu_group}: {port.address}, and {d.address} behind it"
        for d, port in pairs
        if port is not None and d.iommu_group is not None and d.iommu_group == port.iommu_group
    )


def unisolated_slots(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report groups that contain several slots, if `shared_with_gpu` does not."""
    reported = {number for number in _numbers(gpus(host)) if _foreign(host, number)}
    evidence: list[str] = []
    ways: list[str] = []
    for group in host.groups:
        members = _endpoints(host, group.number)
        slots = {d.address.slot for d in members}
        if len(slots) < 2 or group.is_noiommu or group.number in reported:  # noqa: PLR2004 - several
            continue
        ways += isolation.separating(host, members, "it")
        names = ", ".join(str(d.address) for d in members)
        evidence += [f"{IOMMU_GROUPS}/{group.number}: {names}"]
        evidence += _nothing_between(host, group.number)
    if evidence:
        yield info(
            "no-isolation",
            "some IOMMU groups have devices of several slots",
            tuple(evidence),
            "they can access each other without the IOMMU (no ACS, or a conventional PCI bridge), "
            "so they are assigned together",
            f"to assign one separately, {' or '.join(dict.fromkeys(ways))}"
            if ways
            else "assign them together: functions of the chipset cannot be moved to another slot",
        )


def _numbers(devices: Sequence[PciDevice]) -> list[int]:
    return sorted({d.iommu_group for d in devices if d.iommu_group is not None})


def _endpoints(host: HostSnapshot, number: int) -> list[PciDevice]:
    members = host.group_members(number)
    return [d for d in members if not d.is_bridge and host.controller_of(d) is None]


def _nothing_between(host: HostSnapshot, number: int) -> tuple[str, ...]:
    """The lowest bridge above all endpoints of a group."""
    paths = [d.bridge_path.split("/") for d in _endpoints(host, number)]
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    if common and is_address(common[-1]):
        return (f"{common[-1]} is the lowest bridge above all of group {number}",)
    return ()


_NVIDIA = "10de"
_NOUVEAU = "nouveau"


def nouveau(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report nouveau, unless modeset=0 keeps it from registering a driver."""
    module = facts.module(_NOUVEAU)
    if _NOUVEAU not in (*module.pci_drivers, *host.pci_drivers):
        return
    held = [d for d in host.devices if d.driver == _NOUVEAU]
    places = [f"/sys/module/{_NOUVEAU}"] if module.state == "loaded" else []
    holds = ", ".join(str(d) for d in held) or "no function"
    blacklists = tuple(str(s) for s in facts.settings("blacklist", _NOUVEAU))
    is_unknown = not any(d.is_boot_display for d in host.devices)
    displays = [
        d for d in held if d.is_boot_display or (is_unknown and d.class_code.startswith(CLASS_VGA))
    ]
    shown = (f"{d} {_sign(d)}" for d in displays)
    file = "/etc/modprobe.d/blacklist-nouveau.conf"
    blacklisting = add_line(host, "blacklist nouveau", file)
    ignored = tuple(_not_in_initramfs(host, bool(blacklists)))
    yield warning(
        "nouveau",
        "nouveau is loaded",
        (*places, f"/sys/bus/pci/drivers/{_NOUVEAU}: {holds}", *shown, *blacklists, *ignored),
        "it binds any NVIDIA GPU without driver_override at boot, after a rescan and after a "
        "guest, and may fail to unload while it drives a display",
        *((add_to_dracut(host, "/etc/modprobe.d/*.conf"),) if ignored else ()),
        *(_pinning(host, displays) if displays else () if ignored else (blacklisting,)),
    )


def _sign(device: PciDevice) -> str:
    if device.is_boot_display:
        return f"is the console's display ({', '.join(device.display_signs) or 'boot_vga is 1'})"
    return f"may be the console's display: class {device.class_code}"


def _pinning(host: HostSnapshot, displays: Sequence[PciDevice]) -> Iterator[Remedy]:
    """Return the remedies that keep nouveau for the console and pin the other NVIDIA GPUs."""
    others = [
        d
        for d in gpus(host)
        if d.vendor_id == _NVIDIA and d not in displays and d.physical_function is None
    ]
    slots = {d.address.slot: d for d in reversed(others)}
    pinned = sorted(slots.values(), key=lambda d: d.address)
    yield Remedy("keep nouveau: without it the console stays dark")
    if pinned:
        names = " ".join(str(device.address) for device in pinned)
        text = f"bind the GPUs for guests instead: vfiomgr bind --persist {names}"
        yield bind_remedy(text, pinned, persist=True, joint="; ")
    else:
        yield Remedy("use a second graphics card for guests or for the console", joint="; ")


def host_drivers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report the host drivers of GPUs, and whether a udev rule can precede them at boot."""
    native = _native(host)
    for name in sorted({d.driver for d in native if d.driver and d.driver != _NOUVEAU}):
        held = [d for d in native if d.driver == name]
        module = facts.module((held[0].driver_module or name).replace("-", "_"))
        is_first = module.state == "built-in"
        shown, more = first_of(held, _SHOWN, "; list them with: vfiomgr list")
        severity: Severity = "warning" if is_first else "info"
        count, them = f"{len(held)} GPUs or accelerators", "them"
        if len(held) == 1:
            count, them = "1 GPU or accelerator", "it"
        why = f"{name} binds {them} at boot"
        loaded = facts.settings(LOAD, module.name)
        if is_first:
            why = f"{name} is built into the kernel and binds {them} at boot before any udev rule"
        elif loaded:
            why += "; a blacklist does not apply to a module that is loaded by name"
        yield finding(
            "host-driver",
            severity,
            f"{count} on host driver {name}",
            (
                *(f"{d} is on {name}" for d in shown),
                *more,
                *_module(module, host),
                *map(str, loaded),
            ),
            why,
            *(
                (_STAY,)
                if name in of_containers(facts)
                else _race_remedies(host, held[0], is_first=is_first)
            ),
        )


_STAY = Remedy(
    "no action for containers, which use it on this driver (NVIDIA's container runtime is "
    "installed); for a guest see: vfiomgr show ADDRESS"
)


def of_containers(facts: Readiness) -> tuple[str, ...]:
    """The drivers that containers need, where NVIDIA's toolkit is installed."""
    tools = facts.distribution.tools if facts.distribution is not None else ()
    return ("nvidia",) if "nvidia-container-runtime" in tools else ()


_SHOWN = 4


def _native(host: HostSnapshot) -> list[PciDevice]:
    """GPUs on host drivers that could be assigned; VFs are excluded, as they appear after boot."""
    return [
        d
        for d in gpus(host)
        if d.driver not in (None, *HARMLESS_DRIVERS)
        and d.physical_function is None
        and not d.is_for_guests
    ]


def _module(module: KernelModule, host: HostSnapshot) -> tuple[str, ...]:
    match module.state:
        case "built-in":
            return (f"modules.builtin of {host.kernel.release} lists {module.name}",)
        case "loaded":
            return (f"/sys/module/{module.name}: loaded as a module",)
    return ()


def _race_remedies(host: HostSnapshot, first: PciDevice, *, is_first: bool) -> Iterator[Remedy]:
    slot = host.slot(first)
    blocking = blockers(host.group_members(first.iommu_group))
    shared = any(d not in slot and not d.is_bridge for d in blocking)
    command = f"vfiomgr bind {first.address}{' --with-group' if shared else ''}"
    which = ""
    if first.driver == guards.GIM:
        yield Remedy(f"for virtual functions, {guards.GIM_OPTIONS}")
        which = "for the entire GPU, "
    again = " (repeat it after each boot)" if is_first else ""
    bind = f"{which}before a guest starts: {command}{again}"
    now = bind_remedy(bind, [first], with_group=shared, joint="; ")
    if shared and not now.is_useful(host):
        yield Remedy("first give it an IOMMU group of its own (see rule shared-group)", joint="; ")
        return
    yield now
    if not is_first:
        update = (
            ", then rebuild the initramfs"
            if host.files.initramfs is None or not host.files.initramfs.is_known
            else " --update-initramfs"
        )
        rule = f"for a rule that applies at boot: {command} --persist{update}"
        yield bind_remedy(rule, [first], with_group=shared, persist=True, joint="; ")


class _Entry(Value):
    """One vendor:device of a list, and the matching functions."""

    source: str
    text: str
    meant: tuple[PciDevice, ...]


def taken_by_identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report `ids=` entries that match several devices, the console's display or a used disk."""
    for entry in _entries(host, facts):
        disks = _disks_on(host, entry.meant)
        trouble = _trouble(entry.meant) or next(iter(disks), None)
        if trouble is not None:
            is_console = any(d.is_boot_display for d in entry.meant)
            kept = {
                d.address.slot for d in entry.meant if d.is_boot_display or _disks_on(host, [d])
            }
            free = [d.address for d in entry.meant if d.address.slot not in kept]
            one = free[0] if len({address.slot for address in free}) == 1 else "ADDRESS"
            yield warning(
                "vfio-pci-ids",
                f"vfio-pci.ids={entry.text} matches {trouble}",
                (entry.source, *(f"{d} has these PCI IDs" for d in entry.meant), *disks),
                "vfio-pci binds those without a driver when it loads"
                + (": the console stops there" if is_console else "")
                + (": loaded before the driver of the disk, it takes the disk" if disks else ""),
                f"remove the PCI IDs{_edited(host, entry.source)}; then bind by address: vfiomgr "
                f"bind {one}",
                "make another display the primary one in the firmware setup" if is_console else "",
            )


def _disks_on(host: HostSnapshot, meant: Sequence[PciDevice]) -> tuple[str, ...]:
    """The disks that the host uses, each with its function."""
    addresses = {device.address for device in meant}
    return tuple(
        f"{use.address} with a disk that the host uses: {use.what}"
        for use in host.users.host_uses or ()
        if use.kind == "mounted-disk" and use.address in addresses
    )


def ignored_options(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report module settings that a later setting replaces with another value.

    A module that shows the value in /sys has it, and defaults of packages are there to be replaced.
    """
    for module, name in dict.fromkeys((*_OPTIONS, *_set_options(host, facts))):
        settings = facts.parameter(host.kernel.command_line, module, name)
        values = [_meant(one.value) for one in settings if not one.ignored]
        now = (facts.module(module).parameters or {}).get(name)
        if now is not None:
            values.append(_meant(now))
        for one in settings:
            if one.ignored and _meant(one.value) not in values and not _is_packaged(one.place):
                yield finding(
                    "module-option-ignored",
                    "warning" if (module, name) in _OPTIONS else "info",
                    f"{name}={one.value} of {module} has no effect",
                    (one.place, one.ignored),
                    "a built-in module gets its parameters from the kernel command line alone; for "
                    "others the last setting counts: modprobe.d by the names of its files, then "
                    "the kernel command line",
                    *_in_force(host, facts, module, name, one),
                )


def _is_packaged(place: str) -> bool:
    """Whether a package owns the file of a setting; one of that name in /etc replaces it."""
    return place.startswith(("/usr/lib/", "/lib/"))


_VFIO_PCI = "vfio_pci"
_OPTIONS = (
    (_VFIO_PCI, "ids"),
    (_VFIO_PCI, "disable_denylist"),
    ("vfio_iommu_type1", "allow_unsafe_interrupts"),
)
"""Parameters that other rules and messages depend on."""
_ADDED = frozenset({"dyndbg"})
"""Parameters of which each setting adds to the previous ones."""
_BOOLEAN = {"": "1", "y": "1", "on": "1", "n": "0", "off": "0"}


def _meant(value: str) -> str:
    """The value, with one spelling of booleans (kstrtobool in lib/kstrtox.c)."""
    return _BOOLEAN.get(value.lower(), value)


def _set_options(host: HostSnapshot, facts: Readiness) -> Iterator[tuple[str, str]]:
    """Module and name of each parameter that modprobe.d or the command line sets."""
    modules = {module.name for module in facts.modules}
    words = [
        f"{line.module}.{word}"
        for line in facts.module_settings or ()
        if line.command == "options"
        for word in line.arguments.split()
    ]
    for word in (*words, *host.kernel.words):
        module, dot, name = word.partition("=")[0].replace("-", "_").partition(".")
        if dot and module in modules and name not in _ADDED:
            yield module, name


def _in_force(
    host: HostSnapshot, facts: Readiness, module: str, name: str, lost: ParameterSetting
) -> Iterator[Remedy]:
    """How to make an ignored value effective; devices can also be bound by address."""
    settings = facts.parameter(host.kernel.command_line, module, name)
    values = dict.fromkeys(v for one in settings for v in one.value.split(","))
    last = settings[-1]
    wanted = f"{name}={','.join(values) if name == 'ids' else lost.value}"
    if facts.module(module).state == "built-in":
        option = f"{module.replace('_', '-')}.{wanted}"
        yield Remedy(f"add to the kernel command line: {option}{command_line(host)}; then reboot")
    elif name == "ids":
        files = [one.place for one in settings if not one.place.startswith("/proc/")]
        done = _edited(host, files[-1]) if files else ""
        yield Remedy(f"keep one setting: options {module} {wanted}{done}")
    else:
        yield Remedy(f"to use {wanted}, remove {name}={last.value}{_edited(host, last.place)}")
    if name == "ids":
        meant = _once(
            device
            for one in settings
            for _, entry in parse_pci_ids(one.value)
            for device in host.devices
            if entry is not None and entry.matches(device) and is_blocking(device)
        )
        if meant:
            yield _pin(host, "bind by address: ", meant)


_CUT_OFF = expression(r'(?<!")\bids=[^\s"]*\s+((?:,?[0-9a-fA-F]{4}:[0-9a-fA-F]{4}[^\s"]*\s*)+)')


def _cut_off(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report PCI IDs after a space, which ends the value (next_arg in lib/cmdline.c)."""
    for one in facts.parameter(host.kernel.command_line, _VFIO_PCI, "ids"):
        is_word = one.place.startswith("/proc/cmdline")
        line = host.kernel.command_line or "" if is_word else one.place
        found = None if one.ignored else _CUT_OFF.search(line)
        if found is not None:
            rest = ",".join(filter(None, found[1].replace(",", " ").split()))
            yield warning(
                "vfio-pci-ids-invalid",
                f"vfio-pci does not get {rest}: a space ends the value of vfio-pci.ids=",
                (one.place,),
                "the kernel reads the words after the space as other parameters",
                f"write the PCI IDs without spaces: ids={one.value.rstrip(',')},{rest}"
                + _edited(host, one.place),
            )


def invalid_identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report `ids=` entries that vfio-pci ignores (vfio_pci_fill_ids in vfio_pci.c)."""
    yield from _cut_off(host, facts)
    for source, text, entry in _listed(host, facts):
        if entry is None:
            yield warning(
                "vfio-pci-ids-invalid",
                f"vfio-pci ignores the entry {text!r} of vfio-pci.ids=",
                (source,),
                "an entry begins with a vendor and a device in hexadecimal, e.g. 10de:2684",
                f"correct the entry{_edited(host, source)}, or bind by address: vfiomgr bind "
                "ADDRESS",
            )


def _edited(host: HostSnapshot, source: str) -> str:
    """Where a setting is changed, and what makes that effective: the initramfs may have a copy."""
    place = source.partition(":")[0]
    if place == "/proc/cmdline":
        return f" on the kernel command line{command_line(host)}, and reboot"
    copied = ""
    if _is_packaged(place):
        copied, place = f", a copy of {place}", f"/etc/modprobe.d/{place.rpartition('/')[2]}"
    if why_lost(host.files):
        return f" in {place}{copied}"
    return f" in {place}{copied}, {rebuild_initramfs(host, place)}, and reboot"


def _trouble(meant: Sequence[PciDevice]) -> str | None:
    if len({d.address.slot for d in meant}) > 1:
        return "more than one device"
    return "the console's display" if any(d.is_boot_display for d in meant) else None


def lost_race(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions that `ids=` matches but a host driver has bound."""
    entries = _entries(host, facts)
    lost = _once(d for e in entries for d in e.meant if is_blocking(d) and not d.is_boot_display)
    if not lost:
        return
    sources = dict.fromkeys(e.source for e in entries if any(d in lost for d in e.meant))
    module = facts.module("vfio_pci")
    absent = ("vfio_pci is not loaded",) if module.state == "available" else ()
    yield warning(
        "vfio-pci-ids-lost",
        f"vfio-pci has not bound {counted(len(lost), 'function')} that vfio-pci.ids= matches",
        (
            *sources,
            *(f"{d} is on {d.driver}" for d in lost),
            *dict.fromkeys(one for d in lost for one in _built_in(host, facts, d)),
            *absent,
            *_not_in_initramfs(host, any("modprobe.d" in source for source in sources)),
        ),
        "ids= applies only to functions without a driver when vfio-pci loads; the driver that "
        "loads first keeps them",
        _pin(host, "bind them by address, independent of the load order: ", lost),
        *([Remedy(_BOOSTER)] if host.files.initramfs == Initramfs("booster") else []),
    )


_BOOSTER = (
    "write `modules_force_load: vfio,vfio_iommu_type1,vfio_pci` to /etc/booster.yaml, then run "
    "/usr/lib/booster/regenerate_images"
)
"""`modules` of booster.yaml only adds modules to the image (docs/manpage.md of booster)."""


def _built_in(host: HostSnapshot, facts: Readiness, device: PciDevice) -> tuple[str, ...]:
    module = facts.module((device.driver_module or device.driver or "").replace("-", "_"))
    return _module(module, host) if module.state == "built-in" else ()


def _not_in_initramfs(host: HostSnapshot, is_named: bool) -> Iterator[str]:  # noqa: FBT001
    """Evidence that settings in /etc/modprobe.d are not in the initramfs."""
    initramfs = host.files.initramfs
    if is_named and initramfs is not None and initramfs.lacks_modprobe:
        yield "dracut with hostonly=no: the initramfs does not contain /etc/modprobe.d"


def not_probed(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions with a driver_override that no driver has bound."""
    for device in filter(host.awaits_probe, host.devices):
        yield info(
            "override-not-probed",
            f"{device} has driver_override {device.driver_override} and no driver",
            (f"/sys/bus/pci/drivers/{device.driver_override} exists",),
            "who returned it to the host did not have it probed, or its driver failed (kernel log)",
            f"have the kernel bind it: {echo(str(device.address), PCI_DRIVERS_PROBE)}",
            subject=device,
        )
    waiting = [
        d for d in host.devices if d.driver is None and (d.driver_override or "").startswith("vfio")
    ]
    if not waiting:
        return
    module = facts.module("vfio_pci")
    shown = _module(module, host) if module.state == "built-in" else ()
    yield info(
        "override-not-probed",
        f"{counted(len(waiting), 'function')} with driver_override vfio-pci and without a driver",
        (*(f"{d} has no driver" for d in waiting), *shown),
        "the kernel binds a function when it is found, when a driver is registered, or when its "
        "address is written to drivers_probe: "
        + (
            "vfio-pci is built in, so loading it does nothing"
            if shown
            else "the override alone does nothing"
        ),
        _pin(host, "", waiting),
    )


def gone_modules(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report modules of VFIO that are loaded by name and that this kernel does not have."""
    for module in map(facts.module, ("vfio_mdev", "vfio_virqfd")):
        places = dict.fromkeys(one.source for one in facts.settings(LOAD, module.name))
        if module.state == "missing" and places:
            yield finding(
                "module-gone",
                "info" if all("/etc/modules" in place for place in places) else "warning",
                f"this kernel does not have {module.name}, which is loaded by name",
                (
                    *map(str, facts.settings(LOAD, module.name)),
                    f"neither modules.dep nor modules.builtin of {host.kernel.release} lists it",
                ),
                "the initramfs may be incomplete, or not be built"
                + ("; vfio contains it since Linux 6.2" if module.name == "vfio_virqfd" else ""),
                f"remove {module.name} from {' and '.join(places)}, "
                f"{rebuild_initramfs(host)}, and reboot",
            )


def left_out(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions of a device that `ids=` does not match and that are not on VFIO.

    On a root bus, where each function is a device, those of its slot that block its IOMMU group.
    """
    entries = _entries(host, facts)
    meant = _once(d for e in entries for d in e.meant if not d.is_boot_display)
    taken = [d for d in meant if d.physical_function is None]
    rest = _once(
        o
        for d in taken
        for o in (*host.slot(d), *_blocking_beside(host, d))
        if o not in meant and not o.is_on_vfio
    )
    if not rest:
        return
    slots = {d.address.slot for d in rest}
    partly = [d for d in taken if d.address.slot in slots]
    sources = dict.fromkeys(e.source for e in entries if any(d in partly for d in e.meant))
    yield warning(
        "vfio-pci-ids-incomplete",
        f"vfio-pci.ids= does not list {', '.join(str(d.address) for d in rest)}",
        (*sources, *(f"{d} is on {d.driver or 'no driver'}" for d in rest)),
        "a group with a function on a host driver cannot be assigned, and VFIO can reset a slot "
        "only while all of its functions are on VFIO drivers",
        _pin(
            host,
            "bind entire slots by address: ",
            partly,
            with_group=not _is_taken(host, rest, taken),
        ),
    )


def _is_taken(host: HostSnapshot, devices: Sequence[PciDevice], named: Sequence[PciDevice]) -> bool:
    """Whether a bind of the named functions takes all of these."""
    return all(any(d in host.slot(one) for one in named) for d in devices)


def _blocking_beside(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    """The other functions of its slot that block its IOMMU group."""
    there = blockers(host.group_members(device.iommu_group))
    beside = (d for d in there if d.address.slot == device.address.slot)
    return [d for d in beside if not guards.stays_with_host(d)]


def _pin(
    host: HostSnapshot, before: str, devices: Sequence[PciDevice], *, with_group: bool = False
) -> Remedy:
    """The command that binds one function of each device, which binds the entire device."""
    firsts = sorted({host.slot(d): d for d in reversed(devices)}.values(), key=lambda d: d.address)
    names = " ".join(str(device.address) for device in firsts)
    command = f"vfiomgr bind --persist {names}{' --with-group' if with_group else ''}"
    return bind_remedy(f"{before}{command}", firsts, with_group=with_group, persist=True)


def _once(devices: Iterator[PciDevice]) -> list[PciDevice]:
    return sorted(dict.fromkeys(devices), key=lambda device: device.address)


def _entries(host: HostSnapshot, facts: Readiness) -> list[_Entry]:
    """The valid entries."""
    return [
        _Entry(
            source,
            text,
            tuple(d for d in host.devices if entry.matches(d) and not d.is_bridge),
        )
        for source, text, entry in _listed(host, facts)
        if entry is not None
    ]


def _listed(host: HostSnapshot, facts: Readiness) -> Iterator[tuple[str, str, PciIdEntry | None]]:
    """Source and text of each entry; None for one that vfio-pci ignores."""
    for one in facts.parameter(host.kernel.command_line, _VFIO_PCI, "ids"):
        if not one.ignored:
            for text, entry in parse_pci_ids(one.value):
                yield one.place, text, entry
