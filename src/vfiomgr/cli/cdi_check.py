"""`vfiomgr cdi check`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.cdi_files import named_file, present_nodes
from vfiomgr.cli.output import note, print_document, print_table, say
from vfiomgr.cli.session import Session, session_options
from vfiomgr.planner.cdi.consumers import ANY, NAMES, consumers_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.planner.cdi.check import CdiFinding, CdiReport
    from vfiomgr.planner.cdi.consumers import Consumer

_BROKEN = 1


@click.command("check")
@click.argument("paths", nargs=-1, metavar="[FILE]...")
@click.option(
    "--consumer",
    type=click.Choice(NAMES),
    default=ANY,
    show_default=True,
    metavar="NAME",
    help="Judge as this one does, or as a family does: kata, containerd, podman.",
)
@session_options()
@click.pass_context
def check(context: click.Context, *, paths: tuple[str, ...], consumer: str) -> None:
    """Say which consumers cannot read which CDI specification, why, and what would be right.

    All of /etc/cdi and /run/cdi is judged as each consumer reads it, or FILES as if they were
    alone in one directory. Where one file cannot be read, or one name is there twice, Kata gives no
    CDI device of any file (`breaks all`); other runtimes lose what is in that file. Of VFIO's nodes
    is said whether a guest could have what is behind them, and whether that is the device that they
    are called after.

    \b
    Consumers, each from that release on: kata-go, kata-rs-3.31 and kata-rs (runtime-rs up to 3.32,
    and since 4.0), containerd-1.7, containerd-1.7.12, containerd-1.7.16, containerd-1.7.27,
    containerd-2.0, containerd-2.1 (2.0.5 to 2.2.0), containerd-2.3 (since 2.2.1), podman-4.3,
    podman-4.9, podman-5.4, podman-5.8.

    Exit status: 0 where all is well, 1 where a consumer cannot use something.

    \b
    Examples:
      vfiomgr cdi check
      vfiomgr cdi check --consumer kata
      vfiomgr cdi check pgpu.json --consumer containerd-1.7
      vfiomgr cdi check --format json
    """
    from vfiomgr.planner.cdi.check import check as judge  # noqa: PLC0415 - not for help

    session: Session = context.obj
    consumers = consumers_named(consumer)
    host = session.host_or_image()
    files = tuple(named_file(path) for path in paths) if paths else host.cdi_files
    is_image = host.pci_unlisted is not None
    nodes = present_nodes(session, host, files)
    report = judge(files, consumers, None if is_image else host, nodes)
    if is_image:
        unseen = f"what devices are there: {session.root} holds files alone"
        report = replace(report, not_checked=(*report.not_checked, unseen))
    if session.format != "table":
        print_document("CdiCheck", _body(report, consumers), session.format)
    else:
        _print(report, consumers)
    if not files:
        note("there is no CDI specification in /etc/cdi and /run/cdi")
    for text in report.not_checked:
        note(f"not checked: {text}")
    context.exit(_BROKEN if report.is_broken else 0)


def _body(report: CdiReport, consumers: Sequence[Consumer]) -> dict[str, object]:
    return {
        "items": report.findings,
        "verdicts": report.verdicts,
        "consumers": consumers,
        "not_checked": report.not_checked,
        "summary": {
            severity: sum(finding.severity == severity for finding in report.findings)
            for severity in ("error", "warning")
        },
    }


def _print(report: CdiReport, consumers: Sequence[Consumer]) -> None:
    for finding in report.findings:
        say(f"{finding.severity}: {finding.file}:{finding.line}: {finding.what}")
        say(f"  rule      {finding.rule}")
        say(f"  concerns  {_concerned(finding, consumers)}")
        say(f"  remedy    {finding.remedy}")
    files = dict.fromkeys(verdict.file for verdict in report.verdicts)
    if files:
        rows = [row for file in files for row in _verdicts(report, file, consumers)]
        print_table(("FILE", "VERDICT", "CONSUMERS"), rows)


def _verdicts(
    report: CdiReport, file: str, consumers: Sequence[Consumer]
) -> Iterator[tuple[str, str, str]]:
    """One row for each verdict about a file, with the consumers that share it."""
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
        return f"{told}; {', '.join(finding.breaks_all)} can use no CDI device of any file"
    return told
