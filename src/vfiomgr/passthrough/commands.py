"""The commands `vfiomgr bind`, `unbind` and `reset`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn, Unpack

import click
from msgspec.structs import replace

from vfiomgr.cli.options import CHANGING, allow_option, declared, flag, session_options
from vfiomgr.cli.output import note, say
from vfiomgr.desktop.service import DetachedRun, agreed_sessions, is_in_session
from vfiomgr.desktop.steps import EndSession
from vfiomgr.diagnostic import OVERRIDES, Override
from vfiomgr.engine.changes import (
    can_ask,
    confirm,
    host_of,
    plan_or_apply,
    print_outcome,
    update_initramfs_option,
)
from vfiomgr.errors import UsageError, forbid_alone
from vfiomgr.passthrough.named import (
    Bind,
    BindOptions,
    Reset,
    Unbind,
    UnbindOptions,
    is_kept,
    moved_functions,
    resized_bars,
)
from vfiomgr.passthrough.persist_commands import import_driverctl, remove_rules, reserve_cards
from vfiomgr.passthrough.steps import ResetBus
from vfiomgr.pci.capabilities import RESET_METHODS, ResetMethod
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.named import keeps_files, own_program
from vfiomgr.persistence.steps import RebuildInitramfs, ReplaceFile
from vfiomgr.snapshot.completion import complete_address, complete_assignable
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted, is_uuid
from vfiomgr.users.released import read_released

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.passthrough import steps


_match_option = click.option(
    "--match", metavar="NAME", help="The only device with a name like this, e.g. A40."
)


def _chosen(session: Session, addresses: tuple[str, ...], match: str | None) -> tuple[str, ...]:
    """The devices that are meant, as they are named on the command line."""
    if match is not None:
        return (*addresses, session.matching(match))
    if not addresses:
        message = "missing argument: ADDRESS"
        raise UsageError(message, "vfiomgr list lists the addresses of GPUs and accelerators")
    for text in addresses:
        _refuse_name(text)
    return addresses


def _refuse_name(text: str) -> None:
    """Refuse a text that can only be the name of a device, with the option for names.

    Raises:
        UsageError: it has no separator of an address.
    """
    if not text.strip() or set("_:./").intersection(text):
        return
    try:
        PciAddress.parse(text)
    except UsageError as error:
        if is_uuid(text):
            message = f"not a PCI address: {text} is a UUID"
            remedy = f"assign the vGPU with this UUID: vfiomgr libvirt hostdev {text}"
            raise UsageError(message, remedy) from None
        command = click.get_current_context().command_path
        by_name = f"by name: {command} --match {shlex.quote(text)}"
        raise UsageError(error.message, f"{error.hint}; {by_name}") from None


@click.command("bind")
@click.argument("addresses", nargs=-1, metavar="ADDRESS...", shell_complete=complete_assignable)
@_match_option
@declared(BindOptions)
@flag("--driverctl", text="With --persist: import the VFIO entries of driverctl.")
@flag("--reserve", text="Only keep compositors off a card for guests.")
@update_initramfs_option
@session_options(*CHANGING, "yes")
@pass_session
def bind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    match: str | None,
    driverctl: bool,
    reserve: bool,
    **options: Unpack[BindOptions],
) -> None:
    """Bind devices to vfio-pci for passthrough.

    All functions of the slot are bound, for example the audio function of a GPU. The original
    driver is saved; `vfiomgr unbind` restores it. A failed bind is rolled back.

    A device in use can be bound at the next boot: --at-boot writes its rules and leaves the device
    alone until then. `vfiomgr unbind --forget` removes them.

    A display in use by the desktop can be bound with --release: compositors that can close it do
    so, otherwise the display manager and the sessions end (it asks first), then the text console is
    detached. `vfiomgr unbind` restores the console, the display manager and the services, and so
    does a rollback. It works from a terminal of such a session and over SSH. `vfiomgr check
    console` shows beforehand who is affected.

    With --persist --driverctl the VFIO entries of /etc/driverctl.d become rules of vfiomgr, and no
    device is changed now. Other entries stay with driverctl, as do entries of absent devices
    (vfiomgr records the identity of each device) and of devices in an installed layout.

    A second graphics card that a guest gets on demand can stay on its driver until then: --reserve
    writes udev rules that keep compositors and audio servers of the desktop off it, and binds
    nothing. `vfiomgr unbind --forget-only` removes them.

    \b
    Examples:
      vfiomgr bind 0000:04:00.0
      vfiomgr bind 04:00.0 --dry-run
      vfiomgr bind 04:00.0 --persist --owner libvirt-qemu:kvm
      vfiomgr bind 04:00.0 --at-boot
      vfiomgr bind 0000:04:00.0 0000:05:00.0 --format json
      vfiomgr bind 0000:04:00.0 --reset-method flr --no-d3cold
      vfiomgr bind 0000:04:00.0 --release --dry-run
      vfiomgr bind 0000:04:00.0 --release --end-sessions
      vfiomgr bind 04:00.0 --bar 1=16G
      vfiomgr bind 10de:2684            # all devices with these PCI IDs
      vfiomgr bind --match "RTX 4090"
      vfiomgr bind --persist --driverctl --dry-run
      vfiomgr bind --reserve 0000:04:00.0
    """
    if reserve:
        if driverctl or any(options.values()):
            message = "--reserve only takes addresses and --match"
            raise UsageError(message, "e.g. vfiomgr bind --reserve 0000:04:00.0")
        reserve_cards(session, _chosen(session, addresses, match))
        return
    if driverctl:
        also = {"persist", "update_initramfs"}
        others = [value for name, value in options.items() if name not in also]
        is_alone = not any((addresses, match, *others))
        _require_import(is_alone=is_alone, persist=options["persist"])
        import_driverctl(session, update_initramfs=options["update_initramfs"])
        return
    addresses = _chosen(session, addresses, match)
    request = Bind(*addresses, **options).request(session)
    if request.release and not session.dry_run:
        request = replace(request, agreed=_confirm_release(session, request))
        if is_in_session(session.tree):
            _run_detached(session, request)
    outcome = _move(session, request, addresses, options["allow"])
    if outcome is not None and outcome.is_changed and session.format == "table":
        _tell_undo(session, request)


def _confirm_release(session: Session, request: steps.Bind) -> tuple[str, ...] | None:
    """Ask before sessions end, and return those that may; None for any, if nobody is asked."""
    if not can_ask(session):
        return agreed_sessions()
    ending = [s for s in host_of(session).plan(request).steps if isinstance(s, EndSession)]
    if ending:
        shown = " and ".join(step.describe() for step in ending)
        question = f"This will {shown}; unsaved work is lost. Continue?"
        confirm(session, question, "the end of the sessions")
    return tuple(step.session for step in ending)


def _run_detached(session: Session, request: steps.Bind) -> NoReturn:
    """Run the command in a service, which goes on if this terminal ends with its session."""
    program = own_program()
    if program is None:
        message = "cannot release a display from a session: vfiomgr is not installed as a command"
        raise UsageError(message, "install vfiomgr as its README says, and run that command")
    detached = DetachedRun(session.tree, request.addresses[0], program, request.agreed)
    note(f"continues without this terminal; output: {detached.log}")
    status, output = detached.run()
    say(*output.splitlines())
    click.get_current_context().exit(status)


def _tell_undo(session: Session, request: steps.Bind) -> None:
    names = " ".join(str(address) for address in request.addresses)
    group = " --with-group" if request.with_group else ""
    forget = " --forget" if request.persist else ""
    note(f"undo with: vfiomgr unbind {names}{group}{forget}")
    if request.bars:
        note("until reboot: at boot a BAR has the size of the firmware")
    elif not (
        request.release or request.persist or is_kept(session, request.addresses)
    ) and keeps_files(session):
        note(f"until reboot; keep it with: vfiomgr bind --persist {names}")


def _require_import(*, is_alone: bool, persist: bool) -> None:
    """Require what an import of driverctl's entries needs, and nothing else."""
    if not persist:
        forbid_alone("--driverctl", "--persist", "its entries are bindings for each boot")
    if not is_alone:
        message = "--driverctl imports all VFIO entries; it takes no ADDRESS and no other option"
        raise UsageError(message, "e.g. vfiomgr bind --persist --driverctl")


@click.command("unbind")
@click.argument("addresses", nargs=-1, metavar="ADDRESS...", shell_complete=complete_address)
@_match_option
@declared(UnbindOptions)
@flag("--forget-only", text="Only remove these rules; keep the drivers.")
@flag("--all", "every", text="With --forget-only: all except those of a layout.")
@update_initramfs_option
@session_options(*CHANGING, "yes")
@pass_session
def unbind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    match: str | None,
    forget_only: bool,
    every: bool,
    **options: Unpack[UnbindOptions],
) -> None:
    """Return devices to their original drivers.

    The original driver_override and power settings are restored too. With --forget-only functions
    keep their drivers until `vfiomgr unbind` or the next boot.

    \b
    Examples:
      vfiomgr unbind 0000:04:00.0
      vfiomgr unbind 04:00.0 --dry-run
      vfiomgr unbind 04:00.0 --forget
      vfiomgr unbind 0000:04:00.0 0000:04:00.1 --forget-only
      vfiomgr unbind --forget-only --all
    """
    if forget_only:
        update_initramfs = options.pop("update_initramfs")
        if match or any(options.values()):
            message = "--forget-only only removes rules; it takes addresses, or --all"
            raise UsageError(message, "e.g. vfiomgr unbind 0000:04:00.0 --forget-only")
        remove_rules(session, addresses, every=every, update_initramfs=update_initramfs)
        return
    if every:
        forbid_alone("--all", "--forget-only", "devices are unbound by address")
    addresses = _chosen(session, addresses, match)
    request = Unbind(*addresses, **options).request(session)
    _return_displays(session, request)
    _move(session, request, addresses, options["allow"])


def _return_displays(session: Session, request: steps.Unbind) -> None:
    """Return released displays alone: a fault of another function must not cost the screen."""
    if session.dry_run or not session.is_live:
        return
    released = {card.device.address for card in read_released(session.tree)[0]}
    first = tuple(address for address in request.addresses if address in released)
    if first:
        host_of(session).apply(replace(request, addresses=first, only=True, with_group=False))


def _move(
    session: Session,
    request: steps.Bind | steps.Unbind,
    named: Iterable[str],
    allow: Iterable[Override],
) -> Outcome | None:
    """Bind or unbind functions, and print where they are now, and which files changed."""
    if allow:
        confirm(session, f"Override safety check {', '.join(allow)} for {', '.join(named)}?")
    outcome = plan_or_apply(session, request)
    if outcome is None:
        return None
    moved = moved_functions(session, outcome)
    lines = [
        f"{one.address} is on {one.driver or 'no driver'}"
        + (
            f", VFIO node{'s' if len(one.nodes) > 1 else ''}: {', '.join(one.nodes)}"
            if one.nodes
            else ""
        )
        for one in moved
    ]
    lines += resized_bars(session, outcome)
    about_files = (s for s in outcome.plan.steps if isinstance(s, ReplaceFile | RebuildInitramfs))
    lines += [step.report() for step in about_files if outcome.is_changed]
    print_outcome(session, outcome, lines, devices=moved)
    return outcome


@click.command("reset")
@click.argument("address", shell_complete=complete_address)
@click.option(
    "--method", type=click.Choice(RESET_METHODS), help="Use this method for this reset only."
)
@flag("--with-bus", text="Reset all devices on its bus (Linux 6.13).")
@allow_option(*OVERRIDES)
@session_options(*CHANGING, "yes")
@pass_session
def reset(
    session: Session,
    *,
    address: str,
    method: ResetMethod | None,
    with_bus: bool,
    allow: tuple[Override, ...],
) -> None:
    """Reset a device, and check its configuration space.

    The device must be on a VFIO driver, without a driver, or on a driver that handles resets, such
    as nvme and ice: any other host driver would stop working.

    The kernel tries the methods of reset_method in order; `vfiomgr show` lists the available ones,
    and why others are unavailable. --method uses one method; reset_method is restored afterwards.

    If no method works, --with-bus resets the entire bus by the bridge above it, with all functions
    on and below the bus. They must be free: on vfio-pci without a guest, or without a driver.

    \b
    Examples:
      vfiomgr reset 0000:04:00.0
      vfiomgr reset 04:00.0 --method flr
      vfiomgr reset 04:00.0 --method bus --dry-run
      vfiomgr reset 04:00.0 --with-bus
    """
    request = Reset(address, method, allow, with_bus=with_bus).request(session)
    if allow:
        confirm(session, f"Override safety check {', '.join(allow)} for {request.address}?")
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        print_outcome(session, outcome, [_was_reset(outcome, request.address)])


def _was_reset(outcome: Outcome, address: PciAddress) -> str:
    bus = (step for step in outcome.plan.steps if isinstance(step, ResetBus))
    others = len([each for step in bus for each in step.functions]) - 1
    if others > 0:
        were = f"{address} and {counted(others, 'other function')} were reset"
        return f"{were}; their configuration spaces answer"
    return f"{address} was reset; its configuration space answers"
