"""`vfiomgr check domain`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import click

from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.cli.output import note, print_document, print_findings, report_document, say
from vfiomgr.cli.reports import exit_status, note_not_checked, say_unknown, strict_option, summary
from vfiomgr.documents.text import STANDARD_INPUT, source_of
from vfiomgr.errors import HostError, UsageError, forbid_together
from vfiomgr.libvirt.attach.claims import how_to_read, unread_text
from vfiomgr.libvirt.checks import check_domains
from vfiomgr.libvirt.checks import hypervisor as hypervisor_at
from vfiomgr.libvirt.client.binding import DEADLINE, split_uri
from vfiomgr.libvirt.commands.connection import (
    complete_domain_or_file,
    connect_option,
    require_libvirt_of_host,
)
from vfiomgr.libvirt.model import Domain, Hypervisor, KnownDomain
from vfiomgr.libvirt.xml.read import read_domain, read_xml
from vfiomgr.rules.runner import Report
from vfiomgr.snapshot.session import Session, session_of
from vfiomgr.value import Value

_HERE = frozenset({"", "localhost"})


class _Judged(Value):
    """A domain and its findings."""

    domain: Domain
    report: Report


@click.command("preflight")
@click.argument("names", nargs=-1, metavar="DOMAIN|FILE...", shell_complete=complete_domain_or_file)
@flag("--all", "every", text="Check all domains of libvirt.")
@strict_option()
@connect_option
@session_options(*READING, "timeout", "verbose")
@click.pass_context
def preflight(
    context: click.Context, *, names: tuple[str, ...], every: bool, strict: bool, uri: str
) -> None:
    """Check what would prevent the next start of a domain.

    Each finding has evidence and a remedy. DOMAIN is a domain of libvirt, FILE its XML, - reads
    from a pipe. Nothing is started or changed. A blocker prevents the start or harms the host when
    the domain starts; a warning reduces performance or fails later; an info is for your
    information.

    The host devices of the domain are checked, with everything they need. Disks, networks and
    firmware are not: libvirt checks them when it starts the domain.

    A FILE can also be checked without libvirt, and for another host with --snapshot or --root;
    skipped checks are then reported as not checked. Line numbers of a DOMAIN are those of virsh
    dumpxml --inactive.

    Exit status: 0 if nothing blocks the start; 1 if a blocker was found, or with --strict if a fact
    is unknown.

    \b
    Examples:
      vfiomgr check domain win11
      vfiomgr check domain guest.xml
      vfiomgr check domain --all --format json
      vfiomgr check domain guest.xml --snapshot host.json
      vfiomgr check domain win11 --connect qemu:///session
    """
    session = session_of(context)
    if every and names:
        forbid_together("--all", names[0], "--all includes every domain")
    if not (every or names):
        message = "missing argument: DOMAIN or FILE"
        raise UsageError(message, "name a domain or a file with its XML, or pass --all")
    source = context.get_parameter_source("uri")
    is_chosen = source is not click.core.ParameterSource.DEFAULT
    wanted = every or not all(map(is_file, names)) or is_chosen
    hypervisor, why_not = None, "the facts are those of another machine"
    if wanted:
        require_libvirt_of_host(
            session, "pass the XML of a domain: virsh dumpxml --inactive DOMAIN"
        )
    if wanted or _is_this_machine(session):
        refuse_remote(session, uri)
        hypervisor, why_not = asked(session, uri, must_answer=wanted)
    domains = tuple(_domains(names, hypervisor, every=every))
    reports = check_domains(session, domains, hypervisor)
    judged = [_Judged(*pair) for pair in zip(domains, reports, strict=True)]
    if session.format == "table":
        why_not = why_not if hypervisor is None else ""
        _print(judged, why_not, every=bool(session.verbose))
    else:
        _print_document(session, judged)
    context.exit(exit_status(*(one.report for one in judged), strict=strict))


def is_file(name: str) -> bool:
    """Whether a file is meant: by its path, its suffix, or because it exists."""
    return name == STANDARD_INPUT or "/" in name or name.endswith(".xml") or os.path.isfile(name)


def _is_this_machine(session: Session) -> bool:
    return session.snapshot is None and session.tree.is_machine


def refuse_remote(session: Session, uri: str) -> None:
    """Refuse a remote libvirt: it starts its domains on devices that this machine cannot see."""
    if _is_this_machine(session) and (split_uri(uri).hostname or "") not in _HERE:
        message = f"cannot check domains of {uri}: they start on another host"
        hint = (
            "run vfiomgr there, or pass --snapshot with the output of vfiomgr snapshot from "
            "that host"
        )
        raise UsageError(message, hint)


def asked(session: Session, uri: str, *, must_answer: bool) -> tuple[Hypervisor | None, str]:
    """What libvirt reports, or why it does not."""
    try:
        return hypervisor_at(uri, deadline=session.timeout or DEADLINE), ""
    except HostError as error:
        if must_answer:
            raise
        return None, error.message


def _domains(
    names: Sequence[str], hypervisor: Hypervisor | None, *, every: bool
) -> Iterator[Domain]:
    known = hypervisor.domains if hypervisor else ()
    for domain in known if every else ():
        found = _next_start(domain)
        if found is None:
            note(f"not checked: {unread_text(domain)}")
        else:
            yield found
    for name in names:
        yield read_file(name) if is_file(name) else named(name, known)


def named(name: str, known: Sequence[KnownDomain]) -> Domain:
    """The next start of a domain of libvirt.

    Raises:
        UsageError: libvirt does not have it.
        HostError: vfiomgr cannot read it.
    """
    domain = next((domain for domain in known if name in (domain.name, domain.uuid)), None)
    if domain is None:
        message = f"no such domain or file: {name}"
        raise UsageError(message, "virsh list --all shows the domains")
    found = _next_start(domain)
    if found is None:
        raise HostError(unread_text(domain), how_to_read(domain))
    return found


def _next_start(domain: KnownDomain) -> Domain | None:
    """The next start: the definition; for a transient domain, the running one."""
    return domain.defined if domain.is_persistent else domain.running


def read_file(path: str) -> Domain:
    """The domain in a file."""
    remedy = "name an existing file or a domain of libvirt"
    return read_domain(read_xml(path, remedy), source_of(path))


def _print(judged: Sequence[_Judged], why_not: str, *, every: bool) -> None:
    for one in judged:
        print_findings(one.report, every=False)
        say_unknown(one.report.unknown)
        say(f"{one.domain.source}: {summary(one.report, 'not ready')}")
    unseen = (text for one in judged for text in one.report.not_checked)
    note_not_checked(unseen, every=every, option="-v")
    if why_not:
        note(f"libvirt was not queried: {why_not}")
    if not judged:
        note("libvirt has no domains")


def _print_document(session: Session, judged: Sequence[_Judged]) -> None:
    items = [_item(one) for one in judged]
    print_document("PreflightReportList", {"items": items}, session.format)


def _item(one: _Judged) -> dict[str, object]:
    document = report_document(one.report)
    findings = document.pop("items")
    return {
        "domain": one.domain.name,
        "source": one.domain.source,
        "is_blocked": one.report.is_blocked,
        "findings": findings,
        **document,
    }
