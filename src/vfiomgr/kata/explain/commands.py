"""`vfiomgr check pod` and `check-image`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.completion import complete_address
from vfiomgr.cli.findings import counted, finding_document, print_findings, report_document
from vfiomgr.cli.options import READING, RenamedOption, session_options
from vfiomgr.cli.output import Marked, note, print_document, say
from vfiomgr.cli.session import session_of
from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.kata.commands import release_options
from vfiomgr.kata.explain.model import LIST, NUMBERS, SILENT
from vfiomgr.kata.explain.pods import explain_pod
from vfiomgr.kata.named import check_image as checked_image

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.cli.options import Format
    from vfiomgr.containers.runtimes.handlers import CriName
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.model import DeviceChain, Difference, KataTrace, TraceStep
    from vfiomgr.kata.model import RuntimeName

_COLOURS = {"ok": "green", "broken": "red", "unknown": "yellow"}
_STATE_WIDTH = 9
_NAME_WIDTH = 15
_INDENT = " " * _STATE_WIDTH
_CHAINS = 3
"""How many devices are followed in a table; the links tell what is wrong with any."""
_PARTS = 3
"""How many parts of a list are told there, where more than _LONG are in it."""
_LONG = 5
_BREAKS = 8
"""How many breaks of a link that has them of each device."""
_OF_EACH_DEVICE = frozenset({"CDI", "node", "functions"})


def print_explanations(found: Sequence[KataTrace], output: Format, *, is_whole: bool) -> None:
    """Each pod's links in their order; in JSON a `KataTrace` of all, whole in any case."""
    if output != "table":
        items = [_document(item) for item in found]
        body = {"items": items, "is_broken": any(item.is_broken for item in found)}
        print_document("KataTrace", body, output)
        return
    for number, item in enumerate(found):
        say(*[""] * bool(number), *_lines(item, is_whole=is_whole))


def _document(item: KataTrace) -> dict[str, object]:
    members = {name: getattr(item, name) for name in item.__struct_fields__}
    steps = [_step_document(step) for step in item.steps]
    differences = [str(difference) for difference in item.differences]
    return {"is_broken": item.is_broken, **members, "steps": steps, "differences": differences}


def _step_document(step: TraceStep) -> dict[str, object]:
    return {
        "name": step.name,
        "state": step.state,
        "what": step.what,
        "looked_at": step.looked_at,
        "breaks": [
            {
                **finding_document(found),
                "number": NUMBERS.get(found.rule),
                "is_silent": found.rule in SILENT,
            }
            for found in step.breaks
        ],
    }


def _lines(item: KataTrace, *, is_whole: bool) -> Iterator[str | Marked]:
    place = f" ({item.source}:{item.line})" if item.line else f" for {item.source}"
    handler = f", handler {item.handler}" if item.handler else ""
    yield f"{item.kind} {item.pod}{place}{handler}, {item.release} ({item.release_source})"
    for step in item.steps:
        yield from _step_lines(step, is_whole=is_whole)
    if item.devices:
        which = "each device that the kubelet could give" if len(item.devices) > 1 else "the device"
        yield f"{which}, were nothing broken:" if item.is_broken else f"{which}:"
    told = item.devices if is_whole else item.devices[:_CHAINS]
    for chain in told:
        yield from _chain_lines(chain)
    more = len(item.devices) - len(told)
    if more:
        yield f"  and {more} more: -v, or --format json, tells of each"
    for difference in item.differences:
        yield f"  they differ: {difference if is_whole else _shorter(difference)}"
    yield _verdict(item)


def _step_lines(step: TraceStep, *, is_whole: bool) -> Iterator[str | Marked]:
    what, looked, breaks = step.what, step.looked_at, step.breaks
    if not is_whole and step.name in _OF_EACH_DEVICE:
        what = LIST.join(_first(step.parts))
        looked = _first(looked)
        breaks = tuple(sorted(breaks, key=lambda found: SEVERITIES.index(found.severity)))[:_BREAKS]
    state = step.state.ljust(_STATE_WIDTH)
    yield Marked(state, _COLOURS[step.state], f"{step.name.ljust(_NAME_WIDTH)}{what}")
    if looked:
        yield f"{_INDENT}  looked at: {', '.join(looked)}"
    for found in breaks:
        yield from _break_lines(found)
    if len(breaks) < len(step.breaks):
        yield f"{_INDENT}and {len(step.breaks) - len(breaks)} more such: -v tells them"


def _first(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The first ones of many, and how many more there are."""
    if len(parts) <= _LONG:
        return parts
    return (*parts[:_PARTS], f"and {len(parts) - _PARTS} more")


def _shorter(difference: Difference) -> str:
    """`RESOURCE, ASPECT: VALUE: ID, ID; VALUE: …` with the first ones of each."""
    parts = tuple(f"{value}: {', '.join(_first(ids))}" for value, ids in difference.ids)
    return f"{difference.resource}, {difference.aspect}: {LIST.join(_first(parts))}"


def _break_lines(found: Diagnostic) -> Iterator[str]:
    number = f" {NUMBERS[found.rule]}" if found.rule in NUMBERS else ""
    silent = ", silent" if found.rule in SILENT else ""
    verb = "break" if found.severity == "blocker" else "may break"
    why = f": {found.why}" if found.why else ""
    evidence = f" ({'; '.join(found.evidence)})" if found.evidence else ""
    yield f"{_INDENT}{verb}{number}{silent}: {found.summary}{why}{evidence}"
    yield f"{_INDENT}  remedy: {found.remedy}"


def _chain_lines(chain: DeviceChain) -> Iterator[str]:
    groups = ", ".join(map(str, chain.groups)) or "-"
    nodes = ", ".join(chain.nodes) or "-"
    yield f"  {chain.cdi_name} -> {chain.source or 'no specification'} -> {nodes} -> group {groups}"
    for function in chain.functions:
        index = function.guest_index
        guest = "a PCI device of the guest" if index is None else f"nvidia.com/gpu={index}"
        driver = function.driver or "no driver"
        yield f"    {function.address} on {driver} -> {function.port or '-'} -> {guest}"
    for key, value in chain.annotations:
        yield f"    the agent is told {key}: {value}"


def _verdict(item: KataTrace) -> str:
    broken = [step.name for step in item.steps if step.state == "broken"]
    if broken:
        return f"broken: {', '.join(broken)}"
    unknown = [step.name for step in item.steps if step.state == "unknown"]
    if unknown:
        return f"nothing is broken that can be seen; not known: {', '.join(unknown)}"
    doubtful = [step.name for step in item.steps if step.breaks]
    if doubtful:
        return f"the chain is complete, unless what may break does: {', '.join(doubtful)}"
    return "the chain is complete"


@click.command("explain")
@click.argument("subject", metavar="POD.yaml|DEVICE", shell_complete=complete_address)
@release_options()
@click.option(
    "--config", metavar="FILE", help="Kata's configuration.  [default: the one of the handler]"
)
@click.option(
    "--handler", metavar="NAME", help="What the RuntimeClass names, where it is not in the file."
)
@click.option(
    "--runtime",
    "cri",
    cls=RenamedOption,
    former=("--cri",),
    type=click.Choice(["containerd", "crio"]),
    help="Which container runtime.  [default: the one that is configured]",
)
@click.option(
    "--resource", metavar="DOMAIN/NAME", help="Of a DEVICE: what its device plugin calls it."
)
@session_options(*READING, "verbose")
@click.pass_context
def explain(
    context: click.Context,
    *,
    subject: str,
    kata_version: str | None,
    runtime: RuntimeName | None,
    config: str | None,
    handler: str | None,
    cri: CriName | None,
    resource: str | None,
) -> None:
    """Follow a device to the guest of a pod, link by link, and say what breaks the way.

    From the pod of a file (YAML or JSON, - for a pipe; a Deployment's or another's as well), or
    from a pod that asks for DEVICE (an address, or KIND=NAME of CDI): RuntimeClass, handler, Kata's
    configuration, the resource, its CDI name, specification, node, IOMMU group, functions, root
    ports, and the index that the guest's agent is told. Nothing is started, and nothing is asked of
    a cluster. Which device of a resource the kubelet gives is not known: the way of each is told,
    and where they differ; of many the first ones, without -v.

    Exit status 1 where a link is broken.

    \b
    Examples:
      vfiomgr check pod pod.yaml
      vfiomgr check pod 0000:04:00.0 --resource nvidia.com/pgpu
      vfiomgr check pod nvidia.com/pgpu=23
      vfiomgr check pod pod.yaml --kata-version 3.24 --kata-runtime go --runtime crio
      vfiomgr --root /srv/node check pod pod.yaml --handler kata-gpu --config kata.toml
    """
    session = session_of(context)
    found = explain_pod(
        session,
        subject,
        version=kata_version,
        runtime=runtime,
        config=config,
        handler=handler,
        cri=cri,
        resource=resource,
    )
    print_explanations(found, session.format, is_whole=bool(session.verbose))
    if any(explanation.is_broken for explanation in found):
        context.exit(1)


_BLOCKED = 1


@click.command("check-image")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--config",
    metavar="FILE",
    help="Kata's configuration, as a path of the host.  [default: the one of the handler "
    "kata-vfio, else the first that is there in /etc/kata-containers and of Kata's own]",
)
@click.option("--all", "every", is_flag=True, help="Show also what is fine.")
@session_options(*READING)
@click.pass_context
def check_image(
    context: click.Context, addresses: tuple[str, ...], *, config: str | None, every: bool
) -> None:
    """Say whether the guest of a Kata configuration can use the devices of this host.

    Looked at are the files that it names, the file system of the image, and what names and hooks
    tell of driver and toolkit; for ADDRESSES, or for the GPUs that are ready for guests. What is
    inside an image is not looked at.

    Exit status: 0 where nothing blocks, 1 where no guest would start.

    \b
    Examples:
      vfiomgr check kata
      vfiomgr check kata 0000:04:00.0 --all
      vfiomgr check kata --config /opt/kata/share/defaults/kata-containers/configuration.toml
    """
    session = session_of(context)
    report = checked_image(session, *addresses, config=config)
    if session.format != "table":
        print_document("CheckReport", report_document(report), session.format)
    else:
        print_findings(report, every=every)
        verdict = "no guest starts" if report.is_blocked else "nothing blocks"
        counts = [counted(report, severity) for severity in ("blocker", "warning", "info")]
        say(f"{verdict}: {', '.join(counts)}, {report.count('ok')} fine")
        for text in report.not_checked:
            note(f"not checked: {text}")
    if report.is_blocked:
        context.exit(_BLOCKED)
