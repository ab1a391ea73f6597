"""`vfiomgr qemu …`: arguments of QEMU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.options import READING, declared, flag, session_options
from vfiomgr.cli.output import (
    note,
    print_document,
    print_findings,
    print_text,
    report_document,
    say,
)
from vfiomgr.cli.reports import exit_status, note_not_checked, say_unknown, summary
from vfiomgr.errors import UsageError
from vfiomgr.qemu.named import QemuOptions, check, planned_guest
from vfiomgr.qemu.render import command_line, configuration_file, without_section
from vfiomgr.snapshot.session import Session, session_of
from vfiomgr.vgpu.completion import complete_device

if TYPE_CHECKING:
    from vfiomgr.qemu.model import QemuPlan
    from vfiomgr.rules.runner import Report


@click.group("qemu")
def qemu() -> None:
    """Print arguments of QEMU for guests with devices."""


@qemu.command("args")
@click.argument(
    "devices",
    nargs=-1,
    required=True,
    metavar="ADDRESS|UUID[,OPTION…]...",
    shell_complete=complete_device,
)
@declared(QemuOptions)
@flag("--check", "is_check", text="Check the guest as `check domain` does instead.")
@flag("--readconfig", text="Print a file for -readconfig, and -cpu as a note.")
@click.option(
    "--qemu-version",
    metavar="VERSION",
    help="Write for this QEMU, e.g. 9.2.  [default: the installed one]",
)
@session_options(*READING)
@click.pass_context
def args(
    context: click.Context,
    *,
    devices: tuple[str, ...],
    is_check: bool,
    readconfig: bool,
    qemu_version: str | None,
    **options: Unpack[QemuOptions],
) -> None:
    """Print the arguments of QEMU for a guest with these devices.

    Each line is one argument of qemu-system-x86_64 (or -aarch64) with its value: machine, CPU,
    memory, root ports and devices. All functions of a slot become one multifunction device behind
    a root port. Memory is on the NUMA nodes of the devices, and the window for BARs is large
    enough. Add the arguments of disks, networks and displays; xargs -r passes all of them to
    QEMU, and starts none after an error.
    Options of a device follow its name: display, ramfb, vga, only, rom=FILE|off, boot-order=N,
    subsystem=VENDOR:DEVICE, vf-token=UUID, ats=on|off. Notes on stderr say how much memory QEMU
    locks and which devices are not bound. --check finds what would prevent the start; exit status
    1 means that it found a blocker.

    \b
    Examples:
      vfiomgr qemu args 0000:04:00.0 --memory 16G --vcpus 8
      vfiomgr qemu args 04:00.0 | xargs -r qemu-system-x86_64 -nodefaults -vnc :1
      vfiomgr qemu args f715f63c-0d00-4007-9c5a-b07b0c6c05de,display,ramfb
      vfiomgr qemu args 04:00.0,rom=/var/lib/gpu.rom,boot-order=1 --firmware bios
      vfiomgr qemu args 17:00.0 ca:00.0 --memory 256G --vcpus 64 --hugepages 1G
      vfiomgr qemu args 04:00.0 --check
      vfiomgr qemu args 04:00.0 --readconfig                      # for qemu -readconfig
      vfiomgr qemu args 04:00.0 --qemu-version 9.2 --iommufd --format json
    """
    session = session_of(context)
    require_one_output(session, is_check=is_check, readconfig=readconfig)
    if is_check:
        report = check(session, *devices, qemu_version=qemu_version, **options)
        _print_report(session, report)
        context.exit(exit_status(report, strict=False))
    plan = planned_guest(session, devices, qemu_version, options)
    if session.format != "table":
        print_document("QemuArguments", document_of(plan), session.format)
    elif readconfig:
        print_text(configuration_file(plan.arguments))
        for argument in without_section(plan.arguments):
            note(f"add -{argument.option} {argument.value}: -readconfig has no section for it")
    else:
        print_text(command_line(plan.arguments))


def require_one_output(session: Session, *, is_check: bool, readconfig: bool) -> None:
    """Refuse options of which only one would have an effect.

    Raises:
        UsageError: --readconfig beside --check or --format.
    """
    other = "--check" if is_check else f"--format {session.format}"
    if readconfig and (is_check or session.format != "table"):
        message = f"--readconfig and {other} exclude each other"
        raise UsageError(message, "use one of them")


def _print_report(session: Session, report: Report) -> None:
    if session.format != "table":
        print_document("CheckReport", report_document(report), session.format)
        return
    print_findings(report, every=False)
    say_unknown(report.unknown)
    say(summary(report, "not ready"))
    note_not_checked(report.not_checked, every=False, option="--format json")


def document_of(plan: QemuPlan) -> dict[str, object]:
    """The arguments as words, what QEMU locks, and the reasons."""
    guest = plan.guest
    return {
        "architecture": guest.architecture,
        "arguments": [w for one in plan.arguments for w in (f"-{one.option}", one.value)],
        "locked_bytes": guest.memory.locked_bytes,
        "reasons": guest.reasons,
        "notes": plan.notes,
    }
