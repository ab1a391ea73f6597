"""`vfiomgr check migration`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.cli.output import or_dash, print_document, print_findings, report_document, say
from vfiomgr.cli.reports import counts, exit_status, note_not_checked, strict_option, summary
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.checks import blocked_reasons, check_domain_migration
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.commands.connection import (
    complete_domain_or_file,
    connect_option,
    require_libvirt_of_host,
)
from vfiomgr.libvirt.commands.preflight import asked, is_file, named, read_file, refuse_remote
from vfiomgr.libvirt.migration.domain_rules import REASONS_QEMU
from vfiomgr.snapshot.completion import complete_host_file
from vfiomgr.snapshot.session import Session, session_of
from vfiomgr.snapshot.source import HostSource

if TYPE_CHECKING:
    from vfiomgr.libvirt.migration.plan import MigrationReport
    from vfiomgr.libvirt.model import Domain, Hypervisor
    from vfiomgr.rules.runner import Report

_VERDICTS = {True: "fits", False: "does not fit", None: "unknown whether it fits"}


class _Target(HostSource):
    """Another host, from its snapshot."""

    def __init__(self, path: str) -> None:
        self.snapshot = path


@click.command("migration")
@click.argument("name", metavar="DOMAIN|FILE", shell_complete=complete_domain_or_file)
@click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="SNAPSHOT",
    shell_complete=complete_host_file,
    help="Check this host as the target: a file of vfiomgr snapshot; repeatable.",
)
@flag(
    "--ask-qemu",
    text="Also ask QEMU of the running domain why it refuses to migrate (QEMU 6.0). libvirt then "
    "marks the domain as tainted (custom-monitor) until it is shut off.",
)
@strict_option()
@connect_option
@session_options(*READING, "timeout", "verbose")
@click.pass_context
def migration(
    context: click.Context,
    *,
    name: str,
    targets: tuple[str, ...],
    ask_qemu: bool,
    strict: bool,
    uri: str,
) -> None:
    """Check whether a domain can migrate, and to which hosts.

    DOMAIN is a domain of libvirt, FILE its XML, - reads from a pipe. Each device of the domain must
    be on a driver that supports migration. The target needs a free, ready device of that model, or
    capacity for a vGPU of the same type. Versions of libvirt, QEMU and drivers, CPU, IOMMU group
    and NUMA nodes are also compared. Nothing is migrated or changed.

    Create the snapshot of a target there, as root: vfiomgr snapshot > host2.json

    Exit status: 0 if the domain can migrate to at least one target; 1 if not, or with --strict if
    this is unknown. Without --to, only the domain and its present host are checked.

    \b
    Examples:
      vfiomgr check migration win11
      vfiomgr check migration win11 --to host2.json --to host3.json
      vfiomgr check migration win11 --ask-qemu
      vfiomgr check migration guest.xml --snapshot host1.json --to host2.json --format json
    """
    session = session_of(context)
    domain, hypervisor = _read(context, session, name, uri)
    reasons = _asked_qemu(session, name, hypervisor, uri) if ask_qemu else None
    others = {target: _Target(target) for target in targets}
    report = check_domain_migration(session, domain, others, hypervisor, reasons)
    if session.format == "table":
        _print(report, every=bool(session.verbose))
    else:
        print_document("MigrationReport", _document(report), session.format)
    context.exit(exit_status(report, strict=strict))


def _read(
    context: click.Context, session: Session, name: str, uri: str
) -> tuple[Domain, Hypervisor | None]:
    """The domain, and what libvirt says, if it was needed or named."""
    if not name:
        message = "missing argument: DOMAIN or FILE"
        raise UsageError(message, "name a domain or a file with its XML")
    is_chosen = context.get_parameter_source("uri") is not click.core.ParameterSource.DEFAULT
    if is_file(name) and not is_chosen:
        return read_file(name), None
    require_libvirt_of_host(session, "pass the XML of a domain: virsh dumpxml --inactive DOMAIN")
    refuse_remote(session, uri)
    hypervisor, _ = asked(session, uri, must_answer=True)
    known = () if hypervisor is None else hypervisor.domains
    return (read_file(name) if is_file(name) else named(name, known)), hypervisor


def _asked_qemu(
    session: Session, name: str, hypervisor: Hypervisor | None, uri: str
) -> tuple[str, ...]:
    """What QEMU says of a running domain, by its name or UUID.

    Raises:
        UsageError: it is a file, or off, or its QEMU is too old.
    """
    known = () if hypervisor is None or is_file(name) else hypervisor.domains
    domain = next((one for one in known if name in (one.name, one.uuid)), None)
    if domain is None or not domain.is_active:
        message = f"cannot ask QEMU of {name}: not a running domain of libvirt"
        raise UsageError(message, "name a domain of virsh list, or omit --ask-qemu")
    qemu = None if hypervisor is None else hypervisor.qemu
    if qemu is not None and qemu < REASONS_QEMU:
        message = f"QEMU {qemu} does not list why it refuses to migrate (added in {REASONS_QEMU})"
        raise UsageError(message, "omit --ask-qemu, or upgrade QEMU")
    return blocked_reasons(domain.name, uri, deadline=session.timeout or DEADLINE)


def _print(report: MigrationReport, *, every: bool) -> None:
    print_findings(report.report, every=False)
    say(f"{report.source}: {summary(report.report, 'cannot migrate')}")
    for target in report.targets:
        say("")
        for place in target.places:
            say(f"{place.device} -> {or_dash(place.target)}: {place.text}")
        print_findings(target.report, every=False)
        say(": ".join(filter(None, (target.name, _VERDICTS[target.fits], counts(target.report)))))
    reports = (report.report, *(target.report for target in report.targets))
    unseen = (text for one in reports for text in one.not_checked)
    note_not_checked(unseen, every=every, option="-v")


def _document(report: MigrationReport) -> dict[str, object]:
    return {
        "domain": report.domain,
        "source": report.source,
        "is_blocked": report.is_blocked,
        **_findings(report.report),
        "targets": [
            {
                "name": target.name,
                "fits": target.fits,
                "places": target.places,
                **_findings(target.report),
            }
            for target in report.targets
        ],
    }


def _findings(report: Report) -> dict[str, object]:
    document = report_document(report)
    return {"findings": document.pop("items"), **document}
