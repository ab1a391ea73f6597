"""`vfiomgr cdi …`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.options import (
    CHANGING,
    READING,
    LazyGroup,
    complete_file,
    declared,
    file_option,
    flag,
    session_options,
)
from vfiomgr.cli.output import (
    items_document,
    note,
    or_dash,
    print_document,
    print_table,
    print_text,
    print_yaml,
    say,
)
from vfiomgr.cli.reports import exit_status, say_unknown, strict_option
from vfiomgr.cli.table import wrapped
from vfiomgr.containers.cdi import named as library
from vfiomgr.containers.cdi.completion import complete_cdi_device, complete_cdi_kind
from vfiomgr.containers.cdi.document import document_of, render_specification
from vfiomgr.containers.cdi.model import DIRECTORIES, OLD_DYNAMIC, CdiSpecification, Lifetime
from vfiomgr.containers.cdi.rules import ANY, NAMES, CdiFinding, Consumer, consumers_named
from vfiomgr.diagnostic import Severity, most_findings
from vfiomgr.engine.changes import change
from vfiomgr.errors import UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.listing import first_of
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.session import Session, pass_session, session_of
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.check import CdiReport
    from vfiomgr.containers.cdi.devices import CdiEntry


_COMMANDS = {
    "generate": ("vfiomgr.containers.cdi.commands", "generate"),
    "list": ("vfiomgr.containers.cdi.commands", "list_devices"),
    "remove": ("vfiomgr.containers.cdi.commands", "remove"),
}


@click.group("cdi", cls=LazyGroup, table=_COMMANDS)
def cdi() -> None:
    """Generate and check CDI specifications for containers."""


@click.command("check")
@click.argument("paths", nargs=-1, metavar="[FILE]...", shell_complete=complete_file)
@click.option(
    "--consumer",
    type=click.Choice(NAMES),
    default=ANY,
    show_default=True,
    metavar="NAME",
    help="Check for this consumer or family: kata, containerd, podman.",
)
@strict_option()
@session_options(*READING)
@click.pass_context
def check(context: click.Context, *, paths: tuple[str, ...], consumer: str, strict: bool) -> None:
    """Check which consumers can read the CDI specifications.

    All files in /etc/cdi and /run/cdi are checked for each consumer, or FILES of this machine (also
    with --root) as if they were alone in one directory. If one file is unreadable, or one name
    occurs twice, Kata provides no CDI device of any file (`breaks all`); other runtimes only lose
    the devices of that file. For VFIO nodes the check also covers whether the device is available
    to guests, and matches its name.

    \b
    Consumers (each name stands for that release and later ones): kata-go, kata-rs-3.31 and
    kata-rs (runtime-rs up to 3.32, and since 4.0), containerd-1.7, containerd-1.7.12,
    containerd-1.7.16, containerd-1.7.27, containerd-2.0, containerd-2.1 (2.0.5 to 2.2.0),
    containerd-2.3 (since 2.2.1), podman-4.3, podman-4.9, podman-5.4, podman-5.8.

    Exit status: 0 if no problem is found; 1 if a consumer cannot use a file or device, or with
    --strict if a fact is unknown.

    \b
    Examples:
      vfiomgr check cdi
      vfiomgr check cdi --consumer kata
      vfiomgr check cdi pgpu.json --consumer containerd-1.7
      vfiomgr check cdi --format json
    """
    session = session_of(context)
    consumers = consumers_named(consumer)
    report = library.check(session, *paths, consumer=consumer)
    if session.format != "table":
        print_document("CdiCheck", _body(report, consumers), session.format)
    else:
        _print_check(report, consumers)
    if not report.verdicts:
        note("no CDI specifications in /etc/cdi and /run/cdi")
    context.exit(exit_status(report, strict=strict))


_SEVERITIES: dict[Severity, str] = {"blocker": "error", "warning": "warning"}
"""The severities of this command: an error affects at least one consumer."""


def _item(found: CdiFinding) -> dict[str, object]:
    return {
        "rule": found.rule,
        "severity": _SEVERITIES[found.severity],
        "file": found.subject,
        "line": found.line,
        "what": found.summary,
        "remedy": found.remedy,
        "consumers": found.consumers,
        "breaks_all": found.breaks_all,
    }


def _most(report: CdiReport) -> int:
    """Maximum number of findings that are printed: all errors, which come first."""
    return most_findings(report.findings)


def _body(report: CdiReport, consumers: Sequence[Consumer]) -> dict[str, object]:
    return {
        **items_document(report.findings, _item, most=_most(report)),
        "verdicts": report.verdicts,
        "consumers": consumers,
        "unknown": report.unknown,
        "summary": {word: report.count(severity) for severity, word in _SEVERITIES.items()},
    }


def _print_check(report: CdiReport, consumers: Sequence[Consumer]) -> None:
    findings, more = first_of(report.findings, _most(report))
    for found in findings:
        say(f"{_SEVERITIES[found.severity]}: {found.subject}:{found.line}: {found.summary}")
        say(f"  rule      {found.rule}")
        say(f"  consumers {_concerned(found, consumers)}")
        say(f"  remedy    {found.remedy}")
    say(*more)
    files = dict.fromkeys(verdict.file for verdict in report.verdicts)
    if files:
        rows = [row for file in files for row in _verdicts(report, file, consumers)]
        print_table(("FILE", "VERDICT", wrapped("CONSUMERS")), rows)
    say_unknown(report.unknown)


def _verdicts(
    report: CdiReport, file: str, consumers: Sequence[Consumer]
) -> Iterator[tuple[str, str, str]]:
    """One row for each verdict about a file, with its consumers."""
    by_verdict: dict[str, list[str]] = {}
    for consumer in consumers:
        by_verdict.setdefault(report.verdict(file, consumer.name), []).append(consumer.name)
    for verdict, names in by_verdict.items():
        is_all = len(names) == len(consumers) > 1
        yield file, verdict, "all" if is_all else ", ".join(names)


def _concerned(finding: CdiFinding, consumers: Sequence[Consumer]) -> str:
    names = finding.consumers
    told = "all" if len(names) == len(consumers) > 1 else ", ".join(names)
    if finding.breaks_all:
        return f"{told}; {', '.join(finding.breaks_all)} cannot use any CDI device"
    return told


_MACHINE = "/"
_LOOKED_IN = (*DIRECTORIES.values(), OLD_DYNAMIC)


@click.command("generate")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@declared(library.CdiOptions)
@file_option("--output", text="Write to FILE on this machine; use --write for a --root.")
@flag("--write", text="Write it where container runtimes look.")
@click.option(
    "--lifetime",
    type=click.Choice(tuple(DIRECTORIES)),
    default="static",
    show_default=True,
    help="With --write: use /etc/cdi, or /run/cdi (until reboot).",
)
@session_options(*CHANGING)
@pass_session
def generate(
    session: Session,
    *,
    addresses: tuple[str, ...],
    output: str | None,
    write: bool,
    lifetime: Lifetime,
    **options: Unpack[library.CdiOptions],
) -> None:
    """Print a CDI specification as JSON or YAML.

    Without ADDRESSES it has all available devices: bound functions, and virtual functions with a
    vGPU of the vendor's driver. A device is an IOMMU group with all of its functions, named by the
    address of its first GPU. The lowest sufficient CDI version is used. If no device is available,
    the command fails: consumers reject a specification without devices.

    With --write the specification is written atomically to /etc/cdi/vfiomgr-VENDOR_CLASS.json.
    ADDRESSES are added to the devices of that file; without ADDRESSES the file has exactly the
    devices that are available now. Devices that become unavailable later (unbind, vgpu remove, …)
    are removed automatically, and an empty file is deleted.

    \b
    Examples:
      vfiomgr cdi generate
      vfiomgr cdi generate --write
      vfiomgr cdi generate --kind nvidia.com/pgpu --name-by index --write
      vfiomgr cdi generate 0000:04:00.0 --node cdev --write --lifetime dynamic
      vfiomgr cdi generate --consumer kata-rs --output pgpu.json
    """
    if write and output is not None:
        message = "--write and --output contradict each other"
        raise UsageError(
            message, "pass one of them; --write uses the directory of container runtimes"
        )
    if output is not None:
        _refuse_of_this_machine(session, output)
    if lifetime != "static" and not write:
        message = "--lifetime does nothing without --write"
        raise UsageError(message, "pass --write too")
    if write:
        change(session, library.request(session, *addresses, lifetime=lifetime, **options))
    else:
        _print(session, library.specification(session, *addresses, **options), output)


def _refuse_of_this_machine(session: Session, output: str) -> None:
    """Refuse to write a specification of another host where runtimes of this machine look."""
    is_another = session.snapshot is not None or os.path.realpath(session.root) != _MACHINE
    if is_another and os.path.dirname(os.path.abspath(output)) in _LOOKED_IN:
        message = (
            f"cannot write {output}: container runtimes of this machine read it, but it is for "
            "another host"
        )
        raise UsageError(message, "pass --write with --root, or write to another file")


def _print(session: Session, made: CdiSpecification, output: str | None) -> None:
    if output is not None:
        _save(output, made, dry_run=session.dry_run)
    elif session.format == "yaml":
        print_yaml(document_of(made))
    else:
        print_text(render_specification(made))


def _save(output: str, made: CdiSpecification, *, dry_run: bool) -> None:
    if dry_run:
        note(f"would write {output}: {counted(len(made.devices), 'device')}")
        return
    rewrite(output, None, render_specification(made).encode())
    note(f"wrote {output}")


_HEADINGS = (*("NAME", "STATE", wrapped("NODES"), "GROUP", wrapped("FUNCTIONS"), "FILE", "OWN"),)


@click.command("list")
@session_options(*READING)
@pass_session
def list_devices(session: Session) -> None:
    """List the CDI devices in /etc/cdi and /run/cdi.

    /run/cdi is also known as /var/run/cdi. STATE is ready, stale (not available to guests), missing
    (a node does not exist), conflict (the name occurs twice, so no consumer provides it), shadowed
    (another directory is used), unread (no consumer reads the file) or unknown.

    \b
    Examples:
      vfiomgr cdi list
      vfiomgr cdi list --format json
    """
    found, unreadable = library.named_devices(session)
    if session.format != "table":
        print_document("CdiDeviceList", {"items": found}, session.format)
    elif found:
        print_table(_HEADINGS, [_cells(entry) for entry in found])
    for entry in found:
        if entry.problem is not None and session.format == "table":
            note(f"{entry.name}: {entry.problem}")
    for path in unreadable:
        note(f"{path} is not a valid specification; vfiomgr check cdi shows the reason")
    if not found:
        note("no CDI devices; create them with vfiomgr cdi generate --write")


def _cells(entry: CdiEntry) -> tuple[str, ...]:
    groups = dict.fromkeys(n.iommu_group for n in entry.nodes if n.iommu_group is not None)
    functions = [f"{f.address} ({f.driver or '-'})" for node in entry.nodes for f in node.functions]
    vgpus = [name for node in entry.nodes for name in node.vgpus]
    return (
        entry.name,
        entry.state,
        or_dash(" ".join(node.path for node in entry.nodes)),
        or_dash(" ".join(map(str, groups))),
        or_dash(", ".join(dict.fromkeys((*functions, *vgpus)))),
        entry.file,
        "yes" if entry.is_own else "no",
    )


@click.command("remove")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_cdi_device)
@click.option(
    "--kind",
    metavar="VENDOR/CLASS",
    shell_complete=complete_cdi_kind,
    help="Remove only devices of this kind.",
)
@flag("--all", "every", text="Remove all devices that vfiomgr wrote.")
@flag("--stale", text="Remove devices that are no longer available.")
@session_options(*CHANGING)
@pass_session
def remove(
    session: Session, *, names: tuple[str, ...], kind: str | None, every: bool, stale: bool
) -> None:
    """Remove devices from vfiomgr's CDI specifications.

    Devices are given as NAME or VENDOR/CLASS=NAME; an address may be short (04:00.0). A file
    without devices is deleted. Specifications of other programs and the devices themselves are not
    changed.

    \b
    Examples:
      vfiomgr cdi remove nvidia.com/pgpu=0000:04:00.0
      vfiomgr cdi remove --stale
      vfiomgr cdi remove --all --kind nvidia.com/pgpu
    """
    if bool(names) + every + stale != 1:
        message = "missing argument: NAME"
        raise UsageError(
            message, "name devices, or pass --all or --stale; vfiomgr cdi list shows the names"
        )
    request = library.removal(session, *names, kind=kind, every=every, stale=stale)
    if stale and session.snapshot is None:
        session.scan_devices()  # where they cannot be listed, all would seem stale
    change(session, request, only_files=not stale)
