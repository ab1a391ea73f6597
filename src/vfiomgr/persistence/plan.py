"""Plans for udev rules, the initramfs, node owners and prepared configuration files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess, NodeOwner
from vfiomgr.paths import IOMMU_NODE, VFIO_CDEVS, HostPath, vfio_group_node
from vfiomgr.pci.model import PciAddress, PciDevice, is_vfio_driver
from vfiomgr.persistence.installed_layout import (
    layout_name,
    of_layout,
    removal_notes,
    replacement_notes,
)
from vfiomgr.persistence.model import (
    COMMANDS,
    HOOKS,
    SWEPT,
    UNIT,
    VERIFIED,
    PersistedBinding,
    dracut_lines,
    hook_mode,
    render_hook,
    render_rule,
    render_unit,
    rule_file,
)
from vfiomgr.persistence.reservation import reservation_file, reservations
from vfiomgr.persistence.steps import (
    ChangeFiles,
    ForgetPersisted,
    ImportDriverctl,
    LoadModule,
    Part,
    RebuildInitramfs,
    ReplaceFile,
    SetNodeAccess,
    bindings,
    replaced,
)
from vfiomgr.persistence.systems import lost_rules, why_lost

if TYPE_CHECKING:
    from vfiomgr.passthrough.steps import Bind, Unbind
    from vfiomgr.persistence.model import DriverctlOverride, Initramfs
    from vfiomgr.persistence.steps import Bindings, FileChange
    from vfiomgr.snapshot.model import HostSnapshot

LOCK = "persistence"


def part_of_bind(
    host: HostSnapshot,
    drivers: Mapping[PciAddress, LoadModule],
    moving: Sequence[PciDevice],
    request: Bind,
) -> Part:
    """Plan rules for all functions of a bind, and the owners of their nodes."""
    targets = [host.device(address) for address in drivers]
    owner = None if request.at_boot else request.owner
    access = tuple(_access_steps(host, targets, moving, owner))
    notes = tuple(_driverctl_notes(host, targets))
    if request.owner is not None and host.vfio.has_groups is False:
        who = f"a QEMU that {request.owner.name} runs"
        notes += (f"{who} also opens {IOMMU_NODE}: give access to it with a udev rule",)
    if not request.persist:
        if access and not why_lost(host.files):
            notes += ("the owner is set until the next unbind; keep it with --persist",)
        return Part(access, notes)
    wanted = bindings(host)
    for device in targets:
        choice = drivers[device.address]
        wanted[device.address] = binding_for(host, device, choice, request.owner)
    replacing = replacement_notes(host, [wanted[d.address] for d in targets])
    part = exchange(host, wanted, request.program, rebuild=request.update_initramfs)
    return Part(
        (*access, *part.steps),
        (
            *notes,
            *_other_device_notes(host, targets),
            *_built_in_notes(targets),
            *replacing,
            *part.notes,
        ),
        tuple(
            f"{d} is already persisted" for d in targets if wanted[d.address] in host.files.bindings
        ),
        part.locks,
    )


def part_of_unbind(host: HostSnapshot, targets: Sequence[PciDevice], request: Unbind) -> Part:
    """Plan the rules of functions that are unbound."""
    addresses = [device.address for device in targets]
    kept = [a for a in addresses if host.files.text(rule_file(a)) is not None]
    again = tuple(removal_notes(host, addresses))
    if request.forget:
        there = [address for address in addresses if _has_rules(host, address)]
        return _without(host, there, rebuild=request.update_initramfs).with_notes(again)
    names = [str(a) for a in kept if of_layout(host, a) is None]
    if not names:
        return Part(notes=again)
    command = f"vfiomgr unbind {' '.join(names)} --forget-only"
    told = f"rules bind {', '.join(names)} at the next boot; to prevent it: {command}"
    return Part(notes=(told, *again))


def revoke_access(host: HostSnapshot, moving: Sequence[PciDevice]) -> Iterator[SetNodeAccess]:
    """Return nodes to root before their last function is unbound."""
    for device in moving:
        group = device.iommu_group
        access = None if group is None else host.files.access(vfio_group_node(group))
        staying = [d for d in host.group_members(group) if d.is_on_vfio and d not in moving]
        if access not in (None, ROOT_ONLY) and not staying:
            yield _set_access(host, device, access, ROOT_ONLY)


@plans(ForgetPersisted)
def plan_forget(host: HostSnapshot, request: ForgetPersisted) -> Plan:
    """Remove rules; functions keep their drivers until unbind or the next boot."""
    addresses = request.addresses
    notes: list[str] = []
    if request.every:
        addresses = tuple(sorted({*bindings(host), *reservations(host.files)}))
        staying = [a for a in addresses if of_layout(host, a) is not None]
        addresses = tuple(a for a in addresses if a not in staying)
        if staying:
            names = ", ".join(map(str, staying))
            notes.append(
                f"keeping rules of the layout {layout_name(host)} ({names}); remove them with: "
                "vfiomgr layout uninstall"
            )
    gone = [a for a in addresses if not _has_rules(host, a)]
    there = [a for a in addresses if a not in gone]
    notes += [*removal_notes(host, there), *_staying_notes(host, there)]
    part = _without(host, there, rebuild=request.update_initramfs)
    return Plan(
        summary=f"remove rules: {', '.join(map(str, addresses)) or 'all'}",
        steps=part.steps,
        locks=part.locks,
        notes=(*notes, *part.notes),
        already=tuple(f"no rule for {address}" for address in gone)
        or (() if addresses or notes else ("no persistent bindings",)),
    )


@plans(ImportDriverctl)
def plan_import(host: HostSnapshot, request: ImportDriverctl) -> Plan:
    """Import driverctl entries for VFIO drivers; report the others with the reason."""
    wanted, taken, notes = bindings(host), [], []
    present = {device.address: device for device in host.devices}
    for entry in host.files.driverctl_overrides:
        device = present.get(entry.address)
        why = _why_left(host, entry, device)
        if device is None or why:
            notes.append(f"not importing {entry.address}: {why}")
            continue
        choice = LoadModule(entry.driver, entry.driver)
        wanted[entry.address] = binding_for(host, device, choice, None)
        taken.append(entry)
    refuse_if_any(lost_rules(host, [present[entry.address] for entry in taken]) if taken else ())
    part = exchange(host, wanted, request.program, rebuild=request.update_initramfs)
    removals = tuple(ReplaceFile(e.file.path, before=e.file.text, after=None) for e in taken)
    return Plan(
        summary=f"import from driverctl: {', '.join(str(e.address) for e in taken) or 'nothing'}",
        steps=(*unswept(host, part.steps), *part.steps, *removals) if taken else (),
        locks=(LOCK,),
        notes=(*notes, *part.notes) if taken else tuple(notes),
        already=() if taken else ("driverctl has no entries to import",),
    )


def _why_left(host: HostSnapshot, entry: DriverctlOverride, device: PciDevice | None) -> str:
    if device is None:
        return "device not found, so its identity cannot be recorded"
    if not is_vfio_driver(entry.driver):
        return f"{entry.driver} is not a VFIO driver"
    if of_layout(host, entry.address) is not None:
        name = layout_name(host)
        return (
            f"the installed layout {name} already binds it at each boot; remove the entry with: "
            f"driverctl unset-override {entry.address}"
        )
    return ""


def unswept(host: HostSnapshot, steps: Iterable[Step]) -> Iterator[ReplaceFile]:
    """Mark all existing functions as checked, so that a new service moves none of them."""
    if any(getattr(step, "path", None) == UNIT for step in steps) and host.files.text(UNIT) is None:
        yield from marked_as_swept(host)


def marked_as_swept(host: HostSnapshot) -> Iterator[ReplaceFile]:
    """Mark all existing functions as checked, so that the service binds none of them now."""
    return replaced(host, SWEPT, host.files.text(SWEPT) or "")


def binding_for(
    host: HostSnapshot, device: PciDevice, choice: LoadModule, owner: NodeOwner | None
) -> PersistedBinding:
    """Keep the values of an existing rule for the same device that are not set again."""
    module = choice.module.replace("-", "_")
    old = host.files.binding(device.address)
    if old is None or not old.is_of(device.identity):
        return PersistedBinding(device.identity, choice.driver, module, owner)
    identity = old.device if device.identity.serial is None else device.identity
    return PersistedBinding(identity, choice.driver, module, owner or old.owner)


def _has_rules(host: HostSnapshot, address: PciAddress) -> bool:
    paths = (rule_file(address), reservation_file(address))
    return any(host.files.text(path) is not None for path in paths)


def _without(host: HostSnapshot, addresses: Sequence[PciAddress], *, rebuild: bool) -> Part:
    wanted = {a: b for a, b in bindings(host).items() if a not in addresses}
    broken = [rule_file(a) for a in addresses if host.files.binding(a) is None]
    others = (*broken, *map(reservation_file, addresses))
    removed = tuple(step for path in others for step in replaced(host, path, None))
    part = exchange(host, wanted, None, rebuild=rebuild)
    opened = [a for a in addresses if host.files.text(reservation_file(a)) is not None]
    told = (f"compositors open {address} again from the next boot on" for address in opened)
    return Part((*removed, *part.steps), (*told, *part.notes), part.already, (LOCK,))


def exchange(host: HostSnapshot, wanted: Bindings, program: str | None, *, rebuild: bool) -> Part:
    """Plan the steps from the current to the wanted rules, with unit and hook."""
    steps = [
        step
        for address in sorted({*bindings(host), *wanted})
        for step in replaced(
            host, rule_file(address), render_rule(wanted[address]) if address in wanted else None
        )
    ]
    notes: list[str] = []
    if not wanted:
        steps += replaced(host, UNIT, None)
    elif program is not None and host.files.has_systemd:
        steps += replaced(host, UNIT, render_unit(program))
    elif not host.files.has_systemd and not set(wanted.values()) <= set(host.files.bindings):
        notes.append(
            "systemd not found: keep `vfiomgr persist watch` running for hot-plugged functions"
        )
    image = initramfs_part(host, wanted, rebuild=rebuild, is_changed=bool(steps))
    return Part((*steps, *image.steps), (*notes, *image.notes), locks=(LOCK,))


def _access_steps(
    host: HostSnapshot,
    targets: Iterable[PciDevice],
    moving: Sequence[PciDevice],
    owner: NodeOwner | None,
) -> Iterator[SetNodeAccess]:
    for device in targets:
        if owner is None:
            return
        found = accesses(host, device)
        if device in moving or any(access != owner.access for access in found):
            before = found[0] if found else ROOT_ONLY
            yield _set_access(host, device, before, owner.access)


def _set_access(
    host: HostSnapshot, device: PciDevice, before: NodeAccess, after: NodeAccess
) -> SetNodeAccess:
    has_groups = host.vfio.has_groups is not False
    has_cdevs = bool(host.vfio.has_cdevs) or device.vfio_cdev
    group = device.iommu_group
    return SetNodeAccess(device.identity, group, before, after, has_groups, has_cdevs)


def accesses(host: HostSnapshot, device: PciDevice) -> list[NodeAccess]:
    """The owners of a function's existing nodes: that of its group, and its cdev."""
    group = device.iommu_group
    nodes = [] if group is None else [str(vfio_group_node(group))]
    nodes += [] if device.vfio_device is None else [VFIO_CDEVS / device.vfio_device]
    return [access for access in map(host.files.access, nodes) if access is not None]


def notes_on(host: HostSnapshot, targets: Sequence[PciDevice]) -> tuple[str, ...]:
    """Report special cases of functions that get rules."""
    return (
        *_driverctl_notes(host, targets),
        *_other_device_notes(host, targets),
        *_built_in_notes(targets),
    )


def _driverctl_notes(host: HostSnapshot, targets: Iterable[PciDevice]) -> Iterator[str]:
    addresses = {device.address for device in targets}
    for entry in host.files.driverctl_overrides:
        if entry.address in addresses:
            yield (
                f"driverctl binds {entry.address} to {entry.driver} ({entry.file.path}); import it "
                "with: vfiomgr bind --persist --driverctl"
            )


def _other_device_notes(host: HostSnapshot, targets: Iterable[PciDevice]) -> Iterator[str]:
    for device in targets:
        binding = host.files.binding(device.address)
        if binding is not None and not binding.is_of(device.identity):
            yield f"replacing the rule of a different device: {binding.device}"


def _built_in_notes(targets: Iterable[PciDevice]) -> Iterator[str]:
    for device in targets:
        if device.driver and not device.is_on_vfio and device.driver_module is None:
            yield (
                f"module of {device.driver} not found: if it is built into the kernel, it binds "
                f"{device.address} at boot before any rule; vfiomgr persist watch then "
                "binds it to the guest driver"
            )


def _staying_notes(host: HostSnapshot, addresses: Iterable[PciAddress]) -> Iterator[str]:
    for device in host.devices:
        if device.address in addresses and device.is_on_vfio:
            yield f"{device} stays on {device.driver} until vfiomgr unbind {device.address}"


@plans(ChangeFiles)
def plan_change(host: HostSnapshot, request: ChangeFiles) -> Plan:
    """Plan the remaining changes; an interrupted run may have made some of them.

    Raises:
        Refusal: a file has none of the expected texts.
    """
    wanted = set(_remaining(host, request))
    steps = tuple(
        ReplaceFile(change.path, change.before, change.after, change.mode)
        for number, change in enumerate(request.changes)
        if number in wanted
    )
    return Plan(
        request.summary,
        steps,
        locks=request.locks,
        notes=request.notes,
        already=() if steps else request.already,
    )


def _remaining(host: HostSnapshot, request: ChangeFiles) -> Iterator[int]:
    """The indices of the remaining changes."""
    by_path: dict[str, list[tuple[int, FileChange]]] = {}
    for numbered in enumerate(request.changes):
        by_path.setdefault(numbered[1].path, []).append(numbered)
    for path, changes in by_path.items():
        texts = [changes[0][1].before, *(change.after for _, change in changes)]
        current = host.files.text(path)
        if current not in texts:
            message = f"{path} was changed by another program during this run"
            refuse("file-changed", path, message, "check the file, then run the command again")
        done = len(texts) - 1 - texts[::-1].index(current)
        yield from (number for number, _ in changes[done:])


_NEW_ROOT = {
    "rpm-ostree": "the new initramfs belongs to a new deployment: reboot to use it, and upgrade "
    "with rpm-ostree, since `bootc upgrade` refuses a system that rpm-ostree changed",
    "transactional-update": "the new initramfs belongs to a new snapshot: reboot to use it, or "
    "pass --continue to further transactional-update commands",
}
"""What is not in effect at each next boot, since another deployment may be made in between."""
_BY_HAND = {
    "rpm-ostree": "run rpm-ostree status, which lists them as InitramfsEtc",
    "transactional-update": "after the reboot, run lsinitrd IMAGE, with the path in the boot entry",
}
"""How to look for the rules in the images of tools that are not VERIFIED."""


def initramfs_part(
    host: HostSnapshot, wanted: Bindings, *, rebuild: bool, is_changed: bool
) -> Part:
    """Plan the hook if the initramfs includes a driver, and the rebuild if rules change."""
    image = host.files.initramfs
    if image is None:
        return Part()
    hook = HOOKS.get(image.tool)
    if hook is not None:
        return _by_hook(host, image, hook, wanted, rebuild=rebuild, is_changed=is_changed)
    if not is_changed:
        return Part()
    if image.tool == "rpm-ostree":
        return _tracked(host, wanted, rebuild=rebuild)
    if not image.is_known:
        return _unsupported(host, image, wanted)
    brought = [binding for binding in wanted.values() if _is_brought(host, binding)]
    return Part(notes=(_of_image(brought),)) if brought else Part()


def _by_hook(  # noqa: PLR0913 - what `initramfs_part` was given, and what it found
    host: HostSnapshot,
    image: Initramfs,
    hook: HostPath,
    wanted: Bindings,
    *,
    rebuild: bool,
    is_changed: bool,
) -> Part:
    had_hook = host.files.text(hook) is not None
    needed = bool(wanted) and (had_hook or any(_is_brought(host, b) for b in wanted.values()))
    if not (needed or had_hook):
        return Part()
    text = render_hook(image.tool, wanted.values()) if needed else None
    command = COMMANDS[image.tool]
    if text is not None and not image.reads_fragments:
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        place = image.configuration or "/etc/mkinitcpio.conf"
        advice = f"add {' and '.join(lines)} to {place}, then run {' '.join(command)}"
        note = f"the initramfs includes a host driver: {advice}"
        return Part(notes=(note,) if is_changed else ())
    steps: list[Step] = [*replaced(host, hook, text, hook_mode(image.tool))]
    if not (steps or is_changed):
        return Part()
    return _rebuilt(image.tool, command, steps, rebuild=rebuild)


def _tracked(host: HostSnapshot, wanted: Bindings, *, rebuild: bool) -> Part:
    """Have rpm-ostree add the rules to the initramfs of each deployment, or no longer.

    A rule alone keeps host drivers away: it sets driver_override; the module is loaded later. If a
    tracked file does not exist, no deployment can be made any more (initramfs.rs); to track no
    file twice, or not to track one that is not tracked, changes nothing (treefile.rs).
    """
    before = bindings(host)
    gone = sorted(before.keys() - wanted.keys())
    if not any(_is_brought(host, binding) for binding in (*before.values(), *wanted.values())):
        return Part()
    untracked = (f"--untrack={rule_file(address)}" for address in gone)
    tracked = (f"--track={rule_file(address)}" for address in sorted(wanted))
    command = (*COMMANDS["rpm-ostree"], *untracked, *tracked)
    part = _rebuilt("rpm-ostree", command, (), rebuild=rebuild)
    if rebuild or not gone:
        return part
    told = "rpm-ostree cannot deploy anything while it tracks a file that does not exist"
    return part.with_notes((told,))


def _rebuilt(tool: str, command: Sequence[str], steps: Iterable[Step], *, rebuild: bool) -> Part:
    if rebuild:
        told = _NEW_ROOT.get(tool)
        notes = () if told is None else (told,)
        if tool not in VERIFIED:
            what = "vfiomgr does not verify that the new initramfs contains the rules"
            notes = (*notes, f"{what}: to look for them, {_BY_HAND[tool]}")
        return Part((*steps, RebuildInitramfs(tuple(command))), notes)
    how = f"rebuild it with {shlex.join(command)}"
    return Part(
        tuple(steps), (f"the initramfs must include the rules: {how}, or pass --update-initramfs",)
    )


def _of_image(brought: Sequence[PersistedBinding]) -> str:
    """What to change in the image of a bootc host, whose initramfs is built with the image."""
    files = " ".join(rule_file(binding.address) for binding in brought)
    lines = " and ".join(dracut_lines(brought).splitlines())
    return (
        "the initramfs includes a host driver, and belongs to the bootc image: when the image is "
        f"built, copy {files} into it, write {lines} to /usr/lib/dracut/dracut.conf.d/"
        "90-vfiomgr.conf, and run dracut"
    )


def _unsupported(host: HostSnapshot, image: Initramfs, wanted: Bindings) -> Part:
    """What to do if vfiomgr does not know what a tool includes.

    Hooks for other tools are removed: they name rules that may not exist any more.
    """
    hooks = {hook: hook_mode(tool) for tool, hook in HOOKS.items()}
    steps = [step for hook, mode in hooks.items() for step in replaced(host, hook, None, mode)]
    if wanted:
        files = " ".join(rule_file(address) for address in sorted(wanted))
        note = (
            "cannot tell whether the initramfs includes a host driver: "
            f"{image.tool} is not supported. If it does, leave the driver out, or add {files}; "
            "then rebuild it"
        )
    else:
        note = f"{image.tool} is not supported: rebuild the initramfs if it includes removed rules"
    return Part(tuple(steps), (note,))


def _is_brought(host: HostSnapshot, binding: PersistedBinding) -> bool:
    """Whether the initramfs includes the function's host driver or its VFIO driver."""
    image = host.files.initramfs
    return image is not None and (
        image.brings(_host_module(host, binding), binding.device.class_code)
        or binding.module in image.modules
    )


def _host_module(host: HostSnapshot, binding: PersistedBinding) -> str | None:
    """The module of the function's host driver."""
    device = next((d for d in host.devices if d.address == binding.address), None)
    origin = None if device is None else host.origin(device)
    return origin.driver_module if origin else device.driver_module if device else None
