"""A layout for every boot: its file, rules that act before drivers do, units; and all of it back.

Rules are for functions that a layout gives to guests whole and that are there now. A virtual
function comes without a host driver, from the very unit that makes it, and needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import blocker, refusal, refuse_if_any
from vfiomgr.documents.text_file import TextFile
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.layout.compare import binds, compare
from vfiomgr.layout.parts import counted
from vfiomgr.layout.requests import InstallLayout, UninstallLayout
from vfiomgr.passthrough import plan as passthrough_plan
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
    boot_command,
    digest_of,
    parse_record,
    render_boot,
    render_record,
    render_wanted,
    render_watch,
)
from vfiomgr.persistence.model import UNIT, PersistedBinding, parse_rule, render_rule, rule_file
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.engine.step import Step
    from vfiomgr.passthrough.requests import Bind
    from vfiomgr.snapshot.model import HostSnapshot

LOCK = "layout"


class _Rules(Value):
    """What rules of udev there are to be."""

    wanted: dict[PciAddress, PersistedBinding]
    written: tuple[WrittenRule, ...]
    """Those of them that are the layout's."""
    targets: tuple[PciDevice, ...]
    with_settings: tuple[PciDevice, ...]
    """Functions that get none, since no udev rule sets device settings."""


@plans(InstallLayout)
def plan_install(host: HostSnapshot, request: InstallLayout) -> Plan:
    """Keep a layout that this host can have, and have it brought about at each boot.

    Raises:
        Refusal: the host cannot have it, or no unit could run vfiomgr.

    """
    compared = compare(host, request.apply)
    refused = [*compared.diagnostics, *(o for part in compared.parts for o in part.diagnostics)]
    refuse_if_any(refused, frozenset())
    name = request.apply.name
    services = _services(host, request)
    before = _without_own_rules(host)
    rules = _rules(host, before, request)
    kept = persistence_plan.exchange(
        host, rules.wanted, request.program, rebuild=request.update_initramfs
    )
    meanwhile, after = _records(host, name, rules.written)
    steps: list[Step] = [
        *_replaced(host, RECORD, meanwhile),
        *_replaced(host, FILE, request.text),
        *persistence_plan.unswept(host, kept.steps),
        *kept.steps,
        *((ReplaceFile(RECORD, meanwhile, after),) if meanwhile != after else ()),
        *(step for path, text in services.items() for step in _replaced(host, path, text)),
    ]
    return Plan(
        summary=f"install the layout {name}",
        steps=tuple(steps),
        locks=(LOCK, *kept.locks),
        notes=(
            *persistence_plan.notes_on(before, rules.targets),
            *_settings_notes(host, rules.with_settings),
            *_replacing_notes(host, rules.written),
            *kept.notes,
            *_service_notes(host, request, is_changed=bool(steps)),
            *_difference_notes(len(compared.differences)),
        ),
        already=(f"the layout {name} is installed so already",) * (not steps),
    )


@plans(UninstallLayout)
def plan_uninstall(host: HostSnapshot, request: UninstallLayout) -> Plan:
    """Take back what `plan_install` wrote, and nothing that others wrote since."""
    before = _without_own_rules(host)
    installed = parse_record(host.file(RECORD))
    # A unit that went with the last rule comes back with it; another is left as it is.
    program = request.program if host.file(UNIT) is None else None
    bindings = persistence_plan.bindings(before)
    kept = persistence_plan.exchange(host, bindings, program, rebuild=request.update_initramfs)
    removed = [path for path in (*reversed(SERVICES), FILE, RECORD) if host.file(path) is not None]
    services = [path for path in removed if path in SERVICES]
    files = [path for path in removed if path not in SERVICES]
    if not removed:
        return Plan("uninstall the layout", (), already=("no layout is installed",))
    return Plan(
        summary=f"uninstall the layout{f' {installed.name}' if installed else ''}",
        steps=(
            *(step for path in services for step in _replaced(host, path, None)),
            *persistence_plan.unswept(host, kept.steps),
            *kept.steps,
            *(step for path in files for step in _replaced(host, path, None)),
        ),
        locks=(LOCK, *kept.locks),
        notes=(*_left_notes(host, installed), *kept.notes, *_staying_notes()),
    )


# ---- rules


def _records(host: HostSnapshot, name: str, written: tuple[WrittenRule, ...]) -> tuple[str, str]:
    """What is recorded while rules are exchanged, those of before among it, and once they are.

    So a run that was cut off leaves no rule behind that nobody knows of.
    """
    installed = parse_record(host.file(RECORD))
    old = () if installed is None else installed.rules
    there = tuple(r for r in old if r not in written and r.is_as_written(host.file(r.path)))
    after = render_record(InstalledLayout(name, written))
    return render_record(InstalledLayout(name, (*written, *there))) if there else after, after


def _without_own_rules(host: HostSnapshot) -> HostSnapshot:
    """The host as if no layout had a word in its rules; one that others changed since is theirs."""
    installed = parse_record(host.file(RECORD))
    own: dict[str, list[WrittenRule]] = {}
    for rule in () if installed is None else installed.rules:
        own.setdefault(rule.path, []).append(rule)
    return replace(host, files=(*_others(host.files, own), *_put_aside(host, own)))


def _others(files: Iterable[TextFile], own: dict[str, list[WrittenRule]]) -> Iterator[TextFile]:
    for file in files:
        rule = next((r for r in own.get(file.path, ()) if r.is_as_written(file.text)), None)
        if rule is None:
            yield file
        elif rule.before is not None:
            yield TextFile(file.path, rule.before)


def _put_aside(host: HostSnapshot, own: dict[str, list[WrittenRule]]) -> Iterator[TextFile]:
    """Rules removed for the device settings of the layout, and not written again since."""
    for path, rules in own.items():
        absence = next((rule for rule in rules if rule.is_absence), None)
        if absence is not None and absence.before is not None and host.file(path) is None:
            yield TextFile(path, absence.before)


def _rules(host: HostSnapshot, before: HostSnapshot, request: InstallLayout) -> _Rules:
    wanted = persistence_plan.bindings(before)
    written: list[WrittenRule] = []
    targets: list[PciDevice] = []
    with_settings: list[PciDevice] = []
    for bind, others in binds(host, request.apply):
        for address, choice in passthrough_plan.drivers_for(host, bind, others).items():
            device = host.device(address)
            if device.physical_function is not None:
                continue
            path = rule_file(address)
            there = before.file(path)
            readable = there if parse_rule(there or "") else None
            if _has_settings(bind):
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


def _has_settings(bind: Bind) -> bool:
    """Whether a function must come from its host driver, whose device settings are restored."""
    return bind.reset_method is not None or bind.no_d3cold


# ---- units


def _services(host: HostSnapshot, request: InstallLayout) -> dict[str, str | None]:
    """The texts of all units; none without systemd.

    Raises:
        Refusal: vfiomgr is no command that a unit could run.

    """
    if not host.has_systemd:
        return dict.fromkeys(SERVICES)
    if request.program is None:
        message = "vfiomgr is no installed command here, so that no service can run it at boot"
        raise refusal(
            [
                blocker(
                    "not-installed",
                    "vfiomgr",
                    message,
                    "install vfiomgr as its README says, and run that command",
                )
            ]
        )
    name, allow = request.apply.name, _kept_allowances(request)
    return {
        BOOT: render_boot(request.program, name, allow),
        WATCH: render_watch(request.program, name, allow) if request.enforce else None,
        WANTED: render_wanted(with_watch=request.enforce),
    }


def _kept_allowances(request: InstallLayout) -> tuple[str, ...]:
    """Those that hold for each boot; who uses a device now is of now."""
    return tuple(sorted(request.apply.allow - {"in-use"}))


def _replaced(host: HostSnapshot, path: str, text: str | None) -> Iterator[ReplaceFile]:
    return persistence_plan.replaced(host, path, text)


# ---- what is told


def _service_notes(
    host: HostSnapshot, request: InstallLayout, *, is_changed: bool
) -> Iterator[str]:
    if not host.has_systemd:
        command = boot_command(request.apply.name, _kept_allowances(request))
        yield (
            f"no systemd here: run `vfiomgr {command}` at boot, once the drivers are loaded and "
            "before anything uses the devices"
        )
        if request.enforce:
            yield "no systemd here: keep `vfiomgr layout watch --enforce` running"
    elif request.enforce and is_changed:
        yield f"the layout is kept from the next boot on; from now on: systemctl start {WATCH.name}"


def _settings_notes(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[str]:
    for device in devices:
        yield (
            f"{device} gets no rule: what is pinned of it (reset_method, d3cold) is pinned when it "
            "leaves its host driver, once that is loaded"
        )
        for entry in host.driverctl_overrides:
            if entry.address == device.address:
                yield (
                    f"driverctl has {device.address} on {entry.driver} before it can be pinned "
                    f"({entry.file.path}): driverctl unset-override {device.address}"
                )


def _replacing_notes(host: HostSnapshot, written: Iterable[WrittenRule]) -> Iterator[str]:
    """Rules of `bind --persist` that give way."""
    for rule in written:
        if rule.before is not None and host.file(rule.path) == rule.before:
            does = "goes" if rule.is_absence else "gives way to the layout's"
            yield f"{rule.path}, which bind --persist wrote, {does}, until vfiomgr layout uninstall"


def _difference_notes(differences: int) -> Iterator[str]:
    if differences:
        yield (
            f"nothing moves now: the host differs from it in {counted(differences, 'thing')}; "
            f"vfiomgr apply {FILE} ends that before the next boot"
        )


def _left_notes(host: HostSnapshot, installed: InstalledLayout | None) -> Iterator[str]:
    """What is not taken back, and why."""
    if installed is None:
        if host.file(RECORD) is not None:
            yield (
                f"{RECORD} cannot be read: rules that were written for the layout stay; "
                "vfiomgr persist list shows all, and vfiomgr persist remove takes them back"
            )
        return
    for rule in installed.rules:
        now = host.file(rule.path)
        if now not in (None, rule.before) and not rule.is_as_written(now):
            yield f"{rule.path} was changed since, and stays: vfiomgr persist remove takes it back"


def _staying_notes() -> tuple[str, ...]:
    return ("devices stay as they are; undo what was applied in this boot: vfiomgr layout revert",)
