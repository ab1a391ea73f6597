"""`vfiomgr check pod` and `check-image`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Unpack

import click
from msgspec.structs import replace

from vfiomgr.cli.options import READING, Format, declared, flag, session_options
from vfiomgr.cli.output import Marked, finding_document, print_document, say
from vfiomgr.cli.reports import exit_status, print_report, strict_option
from vfiomgr.kata.explain.context import LIST, NUMBERS, SILENT
from vfiomgr.kata.explain.pod import POD_TEMPLATES
from vfiomgr.kata.explain.pods import ExplainOptions, explain_pod
from vfiomgr.kata.named import check_image as checked_image
from vfiomgr.listing import first_of
from vfiomgr.rules.runner import by_severity
from vfiomgr.snapshot.completion import complete_address, complete_host_file
from vfiomgr.snapshot.session import session_of
from vfiomgr.units import counted
from vfiomgr.vgpu.completion import complete_device_or_file

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import DeviceChain, Difference, KataTrace, TraceStep

_COLOURS = {"ok": "green", "broken": "red", "unknown": "yellow"}
_STATE_WIDTH = 9
_NAME_WIDTH = 15
_INDENT = " " * _STATE_WIDTH
_CHAINS = 3
"""How many devices a table shows; the steps report problems of all devices."""
_PARTS = 3
"""How many parts of a longer list a table shows."""
_LONG = 5
_INLINE = 2
"""How much evidence stands in the line of a problem."""
_BREAKS = 8
"""How many problems of a step with many devices a table shows."""
_OF_EACH_DEVICE = frozenset({"CDI", "node", "functions"})


def print_explanations(
    found: Sequence[KataTrace], output: Format, *, is_whole: bool, every: bool
) -> None:
    """Print the steps of each pod in order; JSON has a complete `KataTrace` of all pods.

    Of several pods, those without problems are only counted, except with `every`.
    """
    if output != "table":
        items = [_document(item) for item in found]
        body = {"items": items, "is_broken": any(item.is_broken for item in found)}
        print_document("KataTrace", body, output)
        return
    shown = [item for item in found if every or len(found) == 1 or not item.is_fine]
    for number, item in enumerate(shown):
        say(*([""] if number else []), *_lines(item, is_whole=is_whole))
    if hidden := len(found) - len(shown):
        say(*([""] if shown else []), f"no problem found in {counted(hidden, 'pod')} (see --all)")


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
    how = ""
    if item.release:
        how = f", {item.release} ({item.release_source})"
    elif item.kind in POD_TEMPLATES:
        how = ": not a Kata pod: Kata's chain is not checked"
    yield f"{item.kind} {item.pod}{place}{handler}{how}"
    for _, alike in groupby(item.steps, lambda s: (s.state, s.parts, s.looked_at, s.breaks)):
        steps = tuple(alike)
        name = ", ".join(step.name for step in steps)
        yield from _step_lines(replace(steps[0], name=name), is_whole=is_whole)
    if item.devices:
        which = (
            "each device that the kubelet could assign" if len(item.devices) > 1 else "the device"
        )
        yield f"{which}, if nothing were broken:" if item.is_broken else f"{which}:"
    most = len(item.devices) if is_whole else _CHAINS
    chains, more = first_of(item.devices, most, ": -v or --format json shows all")
    for chain in chains:
        yield from _chain_lines(chain)
    yield from (f"  {line}" for line in more)
    for difference in item.differences:
        yield f"  differences: {difference if is_whole else _shorter(difference)}"
    yield _verdict(item)


def _step_lines(step: TraceStep, *, is_whole: bool) -> Iterator[str | Marked]:
    what, looked = step.what, step.looked_at
    breaks, more = first_of(step.breaks, len(step.breaks))
    if not is_whole and step.name in _OF_EACH_DEVICE:
        what = LIST.join(_first(step.parts))
        looked = _first(looked)
        breaks, more = first_of(sorted(breaks, key=by_severity), _BREAKS, ": -v shows all")
    state = step.state.ljust(_STATE_WIDTH)
    yield Marked(state, _COLOURS[step.state], f"{step.name.ljust(_NAME_WIDTH - 2)}  {what}")
    if looked:
        yield f"{_INDENT}  checked: {', '.join(looked)}"
    for found in breaks:
        yield from _break_lines(found)
    yield from (f"{_INDENT}{line}" for line in more)


def _first(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The first items of many, and how many follow."""
    if len(parts) <= _LONG:
        return parts
    shown, more = first_of(parts, _PARTS)
    return (*shown, *more)


def _shorter(difference: Difference) -> str:
    """`RESOURCE, ASPECT: VALUE: ID, ID; VALUE: …`, shortened."""
    parts = tuple(f"{value}: {', '.join(_first(ids))}" for value, ids in difference.ids)
    return f"{difference.resource}, {difference.aspect}: {LIST.join(_first(parts))}"


def _break_lines(found: Diagnostic) -> Iterator[str]:
    number = f" {NUMBERS[found.rule]}" if found.rule in NUMBERS else ""
    silent = ", silent" if found.rule in SILENT else ""
    verb = "break" if found.severity == "blocker" else "may break"
    why = f": {found.why}" if found.why else ""
    is_long = len(found.evidence) > _INLINE
    evidence = f" ({'; '.join(found.evidence)})" if found.evidence and not is_long else ""
    yield f"{_INDENT}{verb}{number}{silent}: {found.summary}{why}{evidence}"
    yield from (f"{_INDENT}  {each}" for each in found.evidence if is_long)
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
        yield f"    annotation for the agent: {key}: {value}"


def _verdict(item: KataTrace) -> str:
    broken = [step.name for step in item.steps if step.state == "broken"]
    if broken:
        return f"broken: {', '.join(broken)}"
    if item.unknown:
        return f"unknown: {', '.join(item.unknown)}"
    if item.is_fine:
        return "no problem found"
    doubtful = [step.name for step in item.steps if step.breaks]
    return f"no step is broken; possible problems: {', '.join(doubtful)}"


@click.command("explain")
@click.argument("subject", metavar="POD.yaml|DEVICE", shell_complete=complete_device_or_file)
@declared(ExplainOptions)
@flag("--all", "every", text="Also show the steps of pods without problems.")
@strict_option()
@session_options(*READING, "verbose")
@click.pass_context
def explain(
    context: click.Context,
    *,
    subject: str,
    every: bool,
    strict: bool,
    **options: Unpack[ExplainOptions],
) -> None:
    """Check whether a pod gets its devices, step by step.

    POD.yaml contains pods, Deployments or similar objects in YAML or JSON (- reads from a pipe),
    or guests of KubeVirt, KubeVirt's own object, and claims.
    For DEVICE, an address or KIND=NAME of CDI, a pod that requests it is assumed. If POD.yaml has
    several pods, those without problems are only counted. Nothing is started, and no cluster is
    contacted. If the node agent runs on this host, it reports which devices are available.

    The steps are RuntimeClass, handler, Kata's configuration, resource, CDI name, specification,
    device node, IOMMU group, functions, root ports, and the GPU index in the guest. The kubelet
    chooses the device of a resource. Therefore all candidates are checked and compared; -v lists
    all of them.

    Exit status: 1 if a step is broken, or with --strict if a step is unknown; else 0.

    \b
    Examples:
      vfiomgr check pod pod.yaml
      vfiomgr check pod 0000:04:00.0 --resource nvidia.com/pgpu
      vfiomgr check pod nvidia.com/pgpu=23
      vfiomgr check pod pod.yaml --kata-version 3.24 --kata-runtime go --runtime crio
      vfiomgr check pod pod.yaml --with-layout layout.yaml
      vfiomgr --root /srv/node check pod pod.yaml --handler kata-gpu --config kata.toml
    """
    session = session_of(context)
    found = explain_pod(session, subject, **options)
    print_explanations(found, session.format, is_whole=bool(session.verbose), every=every)
    context.exit(exit_status(*found, strict=strict))


@click.command("check-image")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Use this configuration, a path on the host.  [default: the configuration of the handler "
    "kata-vfio; then the first file in /etc/kata-containers or Kata's defaults; then an installed "
    "configuration that plugs devices]",
)
@flag("--all", "every", text="Also show passed and skipped checks.")
@strict_option()
@session_options(*READING)
@click.pass_context
def check_image(
    context: click.Context,
    addresses: tuple[str, ...],
    *,
    config: str | None,
    every: bool,
    strict: bool,
) -> None:
    """Check whether a Kata guest can use the devices.

    The files of the configuration, the file system of the image, and the driver and toolkit (as far
    as file names and hooks show them) are checked, for ADDRESSES or for all available GPUs. The
    contents of an image are not checked.

    Exit status: 0 if no blocker is found; 1 if no guest can use devices, or with --strict if a fact
    is unknown.

    \b
    Examples:
      vfiomgr check kata
      vfiomgr check kata 0000:04:00.0 --all
      vfiomgr check kata --config /opt/kata/share/defaults/kata-containers/configuration.toml
    """
    session = session_of(context)
    report = checked_image(session, *addresses, config=config)
    print_report(report, "no guest can use devices", session.format, every=every)
    context.exit(exit_status(report, strict=strict))
