"""A layout for every boot: its file, early udev rules, units; and the removal of all of them.

Functions that a layout passes through as they are now get udev rules. A virtual function needs
none: the unit that creates it leaves it without a host driver.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans
from vfiomgr.layout import adopt
from vfiomgr.layout.compare import binds, compare
from vfiomgr.layout.requests import InstallLayout, UninstallLayout
from vfiomgr.messages.known import first_address
from vfiomgr.passthrough import plan as passthrough_plan
from vfiomgr.passthrough.plan import ends_at_reboot
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.persistence import plan as persistence_plan
from vfiomgr.persistence.installed_layout import (
    BOOT,
    FILE,
    RECORD,
    SERVICES,
    WANTED,
    WATCH,
    InstalledLayout,
    WrittenRule,
    digest_of,
    parse_record,
    render_boot,
    render_record,
    render_wanted,
    render_watch,
    shell_command,
)
from vfiomgr.persistence.model import (
    DRIVERCTL,
    UNIT,
    PersistedBinding,
    parse_rule,
    render_rule,
    rule_file,
)
from vfiomgr.persistence.steps import ReplaceFile, bindings, replaced
from vfiomgr.persistence.systems import lost_rules
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

LOCK = "layout"


class _Rules(Value):
    """The udev rules to write."""

    wanted: dict[PciAddress, PersistedBinding]
    written: tuple[WrittenRule, ...]
    """Those that belong to the layout."""
    targets: tuple[PciDevice, ...]
    with_settings: tuple[PciDevice, ...]
    """Functions without rules, since udev rules cannot set device settings."""


@plans(InstallLayout)
def plan_install(host: HostSnapshot, request: InstallLayout) -> Plan:
    """Install a layout that this host can have, so that it is applied at each boot.

    Raises:
        Refusal: the host cannot have it, or no unit could run vfiomgr.
    """
    compared = compare(host, request.apply)
    found = [*compared.diagnostics, *(o for part in compared.parts for o in part.diagnostics)]
    refuse_if_any(one for one in found if not ends_at_reboot(host, one))
    name = request.apply.name
    services = _services(host, request)
    before = _without_own_rules(host)
    rules = _rules(host, before, request)
    taken_over = _driverctl_entries(before, rules) if request.apply.adopt else ()
    refuse_if_any(lost_rules(host, rules.targets))
    kept = persistence_plan.exchange(
        host, rules.wanted, request.program, rebuild=request.update_initramfs
    )
    meanwhile, after = _records(host, name, (*rules.written, *taken_over))
    steps: list[Step] = [
        *replaced(host, RECORD, meanwhile),
        *replaced(host, FILE, request.text),
        *persistence_plan.unswept(host, kept.steps),
        *kept.steps,
        *(step for entry in taken_over for step in replaced(host, entry.path, None)),
        *restored_entries(host, {entry.path for entry in taken_over}),
        *((ReplaceFile(RECORD, meanwhile, after),) if meanwhile != after else ()),
        *(step for path, text in services.items() for step in replaced(host, path, text)),
    ]
    return Plan(
        summary=f"install the layout {name}",
        steps=tuple(steps),
        locks=(LOCK, *kept.locks),
        notes=(
            *persistence_plan.notes_on(_without(before, taken_over), rules.targets),
            *_settings_notes(_without(host, taken_over), rules.with_settings),
            *_replacing_notes(host, (*rules.written, *taken_over)),
            *kept.notes,
            *(
                adopt.binders(host, {device.address for device in rules.targets})
                if request.apply.adopt
                else ()
            ),
            *_service_notes(host, request, is_changed=bool(steps)),
            *dict.fromkeys(one.summary for one in found),
            *_difference_notes(request, len(compared.differences), is_busy=bool(found)),
        ),
        already=() if steps else (f"the layout {name} is already installed",),
    )


@plans(UninstallLayout)
def plan_uninstall(host: HostSnapshot, request: UninstallLayout) -> Plan:
    """Remove what `plan_install` wrote; later changes by others are kept."""
    before = _without_own_rules(host)
    installed = parse_record(host.files.text(RECORD))
    # A unit that went with the last rule comes back with it; another is left as it is.
    program = request.program if host.files.text(UNIT) is None else None
    kept = persistence_plan.exchange(
        host, bindings(before), program, rebuild=request.update_initramfs
    )
    removed = [
        path for path in (*reversed(SERVICES), FILE, RECORD) if host.files.text(path) is not None
    ]
    services = [path for path in removed if path in SERVICES]
    files = [path for path in removed if path not in SERVICES]
    if not removed:
        return Plan("uninstall the layout", (), already=("no layout is installed",))
    return Plan(
        summary=f"uninstall the layout{f' {installed.name}' if installed else ''}",
        steps=(
            *(step for path in services for step in replaced(host, path, None)),
            *persistence_plan.unswept(host, kept.steps),
            *kept.steps,
            *restored_entries(host),
            *(step for path in files for step in replaced(host, path, None)),
        ),
        locks=(LOCK, *kept.locks),
        notes=(
            *_left_notes(host, installed),
            *kept.notes,
            "devices are not changed; undo what was applied since boot: vfiomgr layout revert",
        ),
    )


# ---- rules


def _records(host: HostSnapshot, name: str, written: tuple[WrittenRule, ...]) -> tuple[str, str]:
    """The record during the exchange of rules (with the former rules) and after it.

    So an interrupted run leaves no rule behind that no record names.
    """
    installed = parse_record(host.files.text(RECORD))
    old = () if installed is None else installed.rules
    there = tuple(r for r in old if r not in written and r.is_as_written(host.files.text(r.path)))
    after = render_record(InstalledLayout(name, written))
    return render_record(InstalledLayout(name, (*written, *there))) if there else after, after


def _without_own_rules(host: HostSnapshot) -> HostSnapshot:
    """The host without the layout's rules; a rule that others changed since is kept."""
    installed = parse_record(host.files.text(RECORD))
    own: dict[str, list[WrittenRule]] = {}
    for rule in () if installed is None else installed.rules:
        own.setdefault(rule.path, []).append(rule)
    texts: list[TextFile] = []
    for file in host.files.texts:
        mine = [one for one in own.get(file.path, ()) if one.is_as_written(file.text)]
        if not mine:
            texts.append(file)
        elif mine[0].before is not None:
            texts.append(TextFile(file.path, mine[0].before))
    # And those removed because of the layout's device settings, and not written again since.
    for path, rules in own.items():
        absence = next((one for one in rules if one.is_absence), None)
        if absence is not None and absence.before is not None and host.files.text(path) is None:
            texts.append(TextFile(path, absence.before))
    return replace(host, files=replace(host.files, texts=tuple(texts)))


def _rules(host: HostSnapshot, before: HostSnapshot, request: InstallLayout) -> _Rules:
    wanted = bindings(before)
    written: list[WrittenRule] = []
    targets: list[PciDevice] = []
    with_settings: list[PciDevice] = []
    for bind, others in binds(host, request.apply):
        for address, choice in passthrough_plan.drivers_for(host, bind, others).items():
            device = host.device(address)
            if device.physical_function is not None:
                continue
            path = rule_file(address)
            there = before.files.text(path)
            readable = there if parse_rule(there or "") else None
            if bind.reset_method is not None or bind.no_d3cold:
                with_settings.append(device)
                written.append(WrittenRule(path, None, readable))
                wanted.pop(address, None)
                continue
            binding = persistence_plan.binding_for(before, device, choice, bind.owner)
            text = render_rule(binding)
            if there != text:
                written.append(WrittenRule(path, digest_of(text), readable))
            wanted[address] = binding
            targets.append(device)
    return _Rules(wanted, tuple(written), tuple(targets), tuple(with_settings))


def _driverctl_entries(before: HostSnapshot, rules: _Rules) -> tuple[WrittenRule, ...]:
    """The entries of driverctl that the layout's rules replace until it is uninstalled."""
    functions = {device.address for device in (*rules.targets, *rules.with_settings)}
    return tuple(
        WrittenRule(entry.file.path, None, entry.file.text)
        for entry in before.files.driverctl_overrides
        if entry.address in functions
    )


def restored_entries(host: HostSnapshot, kept: Container[str] = ()) -> Iterator[ReplaceFile]:
    """The entries of driverctl that an installed layout removed, and nobody wrote again.

    Those at the paths `kept` stay away, since another layout replaces them too.
    """
    installed = parse_record(host.files.text(RECORD))
    for entry in () if installed is None else installed.rules:
        is_gone = host.files.text(entry.path) is None and entry.path not in kept
        if entry.path.startswith(DRIVERCTL) and entry.before is not None and is_gone:
            yield ReplaceFile(entry.path, None, entry.before)


def _without(host: HostSnapshot, entries: Iterable[WrittenRule]) -> HostSnapshot:
    gone = {entry.path for entry in entries}
    texts = tuple(file for file in host.files.texts if file.path not in gone)
    return replace(host, files=replace(host.files, texts=texts))


# ---- units


def _services(host: HostSnapshot, request: InstallLayout) -> dict[str, str | None]:
    """The texts of all units; none without systemd.

    Raises:
        Refusal: vfiomgr is not a command that a unit can run.
    """
    if not host.files.has_systemd:
        return dict.fromkeys(SERVICES)
    if request.program is None:
        message = "vfiomgr is not an installed command, so no service can run it at boot"
        refuse(
            "not-installed",
            "vfiomgr",
            message,
            "install vfiomgr as described in its README, and run the installed command",
        )
    name, allow = request.apply.name, _kept_allowances(request)
    return {
        BOOT: render_boot(request.program, name, allow, adopt=request.apply.adopt),
        WATCH: render_watch(request.program, name, allow) if request.enforce else None,
        WANTED: render_wanted(with_watch=request.enforce),
    }


def _kept_allowances(request: InstallLayout) -> tuple[str, ...]:
    """The overrides that apply at each boot; in-use only concerns the present."""
    return tuple(sorted(request.apply.allow - {"in-use"}))


# ---- what is reported


def _service_notes(
    host: HostSnapshot, request: InstallLayout, *, is_changed: bool
) -> Iterator[str]:
    if not host.files.has_systemd:
        command = shell_command(request.apply.name, _kept_allowances(request))
        yield (
            f"systemd not found: run `{command}` at boot, after the drivers are loaded and "
            "before anything uses the devices"
        )
        if request.enforce:
            yield "systemd not found: keep `vfiomgr layout watch --enforce` running"
    elif request.enforce and is_changed:
        yield f"drift is corrected from the next boot on; start now: systemctl start {WATCH.name}"


def _settings_notes(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[str]:
    for device in devices:
        yield (
            f"{device} gets no udev rule: its settings (reset_method, d3cold) are applied when "
            "it leaves its host driver"
        )
        for entry in host.files.driverctl_overrides:
            if entry.address == device.address:
                yield (
                    f"driverctl binds {device.address} to {entry.driver} before its settings can "
                    f"be applied ({entry.file.path}): driverctl unset-override {device.address}"
                )


def _replacing_notes(host: HostSnapshot, written: Iterable[WrittenRule]) -> Iterator[str]:
    """Rules of `bind --persist` that the layout replaces."""
    for rule in written:
        if rule.before is not None and host.files.text(rule.path) == rule.before:
            does = "is removed" if rule.is_absence else "is replaced by the layout's"
            whose = "driverctl" if rule.path.startswith(DRIVERCTL) else "bind --persist"
            yield f"{rule.path} of {whose} {does} until vfiomgr layout uninstall"


def _difference_notes(request: InstallLayout, differences: int, *, is_busy: bool) -> Iterator[str]:
    if is_busy:
        yield "no device is changed now; the layout is applied at the next boot"
    elif differences:
        command = shell_command(request.apply.name, _kept_allowances(request))
        yield (
            f"no device is changed now; the host differs in {counted(differences, 'thing')}; "
            f"apply the layout before the next boot: {command}"
        )


def _left_notes(host: HostSnapshot, installed: InstalledLayout | None) -> Iterator[str]:
    """What is not removed, and why."""
    if installed is None:
        if host.files.text(RECORD) is not None:
            yield (
                f"cannot read {RECORD}: udev rules of the layout are kept; list them with "
                "vfiomgr list --persistent, remove them with vfiomgr unbind --forget-only"
            )
        return
    for rule in installed.rules:
        if rule.path.startswith(DRIVERCTL):
            continue  # an entry that was added since belongs to driverctl
        now = host.files.text(rule.path)
        if now not in (None, rule.before) and not rule.is_as_written(now):
            yield (
                f"{rule.path} was changed since and is kept; remove it with: "
                f"vfiomgr unbind {first_address(rule.path)} --forget-only"
            )
