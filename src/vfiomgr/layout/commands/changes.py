"""`vfiomgr plan` and `apply`, and `vfiomgr layout assert`, `export` and `revert`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import click
from msgspec.structs import replace

from vfiomgr import layout as layouts
from vfiomgr.cli.options import (
    CHANGING,
    READING,
    allow_option,
    complete_file,
    flag,
    session_options,
    with_options,
)
from vfiomgr.cli.output import note, print_document, print_text, say
from vfiomgr.cli.reports import say_unknown
from vfiomgr.diagnostic import OVERRIDES, REVERSIBLE, Override
from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.reader import read_values
from vfiomgr.documents.text import parse_json, source_of, text_of
from vfiomgr.engine.changes import followed, host_of, print_outcome, print_plan
from vfiomgr.engine.host import not_checked, tell_of_cut_off_runs
from vfiomgr.engine.unfinished import completed, inherited, interrupted, refuse_other_steps
from vfiomgr.errors import (
    HostError,
    RollbackIncomplete,
    StillDiffers,
    VfiomgrError,
    forbid_alone,
    forbid_together,
)
from vfiomgr.host.rewrite import rewrite
from vfiomgr.layout.compare import Comparison, compare, plan_of
from vfiomgr.layout.document import render_layouts
from vfiomgr.layout.for_managers import MANAGERS, Manager, configuration
from vfiomgr.layout.from_host import export as exported
from vfiomgr.layout.from_host import unexpressed
from vfiomgr.layout.model import LayoutFile
from vfiomgr.layout.named import KIND, ApplyLayout, ReviewedPlan, is_plan, layout_of_text, read_plan
from vfiomgr.layout.revert import reversion
from vfiomgr.passthrough.isolation import iommu_unread
from vfiomgr.paths import BOOT_ID
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.run import Outcome
    from vfiomgr.layout import requests
    from vfiomgr.layout.requests import LayoutCheckpoint


_DRIFT = 3
"""Exit status of `assert` if the host differs."""
_FAILED, _INCOMPLETE = 1, RollbackIncomplete.exit_code


def complete_layout(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """The layouts in FILE, which may have flaws; a pipe is not read."""
    named = context.params
    path = named.get("layout_file") if "layout_file" in named else named.get("file")
    if not path or not os.path.isfile(path):
        return []
    document = read_values(text_of(path, "the layout file"), path, "")
    layouts = document.get("layouts") if isinstance(document, dict) else None
    names = map(str, layouts) if isinstance(layouts, dict) else ()
    return [name for name in names if name.startswith(incomplete)]


layout_option = click.option(
    "--layout",
    "name",
    metavar="NAME",
    shell_complete=complete_layout,
    help="Name of the layout, if FILE has several.",
)


def of_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments and options: the file, the layout in it, and the safety checks to override."""
    file = click.argument("file", shell_complete=complete_file)
    return with_options(function, file, layout_option, allow_option(*OVERRIDES))


adopt_option = flag(
    "--adopt",
    text="Record vGPUs of other tools that fit the layout as vfiomgr's own, and name these tools.",
)


@click.command("plan")
@of_layout
@adopt_option
@click.option(
    "--output",
    "out",
    metavar="PLAN",
    shell_complete=complete_file,
    help="Write the plan to a file, for `apply`.",
)
@session_options(*READING)
@pass_session
def plan(
    session: Session,
    *,
    file: str,
    name: str | None,
    allow: tuple[Override, ...],
    adopt: bool,
    out: str | None,
) -> None:
    """Show how the host differs from FILE and what `apply` would do.

    \b
    Examples:
      vfiomgr plan host.yaml
      vfiomgr plan fleet.yaml --layout kata-node --output today.json
      vfiomgr plan fleet.yaml --layout kata-node --adopt
      vfiomgr --snapshot host.json plan fleet.yaml --layout kata-node
    """
    library = host_of(session)
    runs = tell_of_cut_off_runs(session)
    request = ApplyLayout(file, name, frozenset(allow), adopt).request(session)
    host = library.facts_for(request)
    earlier = tuple(interrupted(request, runs, host, library.files))
    checkpoint = cast("LayoutCheckpoint | None", inherited(earlier))
    compared = compare(host, request, checkpoint)
    if session.format == "table":
        _print_differences(compared)
    made = completed(plan_of(host, request, compared, checkpoint), earlier)
    made = replace(made, not_checked=not_checked(host, request, made))
    body = _planned(request, compared, made)
    if out is not None:
        document = to_jsonable({"api_version": API_VERSION, "kind": KIND, **body})
        rewrite(out, None, (json.dumps(document, indent=2) + "\n").encode())
        note(f"written to {out}; apply it with: vfiomgr apply {shlex.quote(str(out))}")
    if session.format != "table":
        print_document(KIND, {**body, "not_checked": made.not_checked}, session.format)
        return
    print_plan(session, made)


@click.command("apply")
@of_layout
@adopt_option
@flag("--keep-going", text="Apply as much as possible, even if a part fails.")
@session_options(*CHANGING)
@pass_session
def apply(
    session: Session,
    *,
    file: str,
    name: str | None,
    allow: tuple[Override, ...],
    adopt: bool,
    keep_going: bool,
) -> int:
    """Apply the layout in FILE, or a plan saved with --output.

    Devices already in the desired state are left alone. The layout is applied entirely or not at
    all: it is refused if it cannot be applied, and rolled back if a step fails. With --adopt, vGPUs
    that other tools created and that fit the layout count as vfiomgr's own; they are not changed,
    and one that does not fit is never removed.

    \b
    Examples:
      vfiomgr apply host.yaml
      vfiomgr apply fleet.yaml --layout kata-node --dry-run
      vfiomgr apply fleet.yaml --layout kata-node --adopt
      vfiomgr apply today.json
      vfiomgr layout export | vfiomgr apply -
    """
    text = text_of(file, "the layout file")
    reviewed = _reviewed(text, source_of(file))
    given = {"--layout": name, "--keep-going": keep_going, "--allow": allow, "--adopt": adopt}
    option = next((option for option, value in given.items() if value), None)
    if reviewed is not None and option is not None:
        forbid_together("a plan", option, "a saved plan already contains these choices")
    if reviewed is None:
        request = layout_of_text(session, text, source_of(file), name, frozenset(allow))
        request = replace(request, adopt=adopt)
    else:
        request = reviewed.request
    if session.dry_run:
        made = host_of(session).plan(request)
        if reviewed is not None:
            refuse_other_steps(made.steps, reviewed.steps)
        print_plan(session, made)
        return 0
    session.require_live("a snapshot cannot be changed", "pass --dry-run to see the plan")
    if keep_going:
        return _apply_each(session, request)
    with followed(session) as host:
        outcome = host.apply(request, reviewed=reviewed.steps if reviewed else None)
    done = [f"host matches layout '{request.name}'"] if outcome.is_changed else []
    print_outcome(session, outcome, done, layout=request.name)
    if outcome.is_changed and session.format == "table":
        note("undo with: vfiomgr layout revert")
    return 0


@click.command("assert")
@of_layout
@session_options(*READING)
@pass_session
def assert_(session: Session, *, file: str, name: str | None, allow: tuple[Override, ...]) -> int:
    """Exit with status 3 if the host differs from FILE.

    The differences are printed. If facts are missing for the comparison, the status is also 3.

    \b
    Examples:
      vfiomgr layout assert host.yaml
      vfiomgr layout assert fleet.yaml --layout kata-node --format json
    """
    request = ApplyLayout(file, name, frozenset(allow)).request(session)
    host = host_of(session).facts_for(request)
    compared = compare(host, request)
    differences = compared.differences
    unknown = iommu_unread(host) if request.layout.gives_to_guests else ()
    if session.format != "table":
        body = {
            "layout": request.name,
            "is_met": not differences and not unknown,
            "differences": to_jsonable(differences),
            "unknown": unknown,
        }
        print_document("LayoutAssertion", body, session.format)
    elif differences:
        _print_differences(compared)
        say(f"host differs from layout '{request.name}'")
    elif unknown:
        say_unknown(unknown)
        say(f"unknown whether the host matches layout '{request.name}'")
    else:
        say(f"host matches layout '{request.name}'")
    return _DRIFT if differences or unknown else 0


@click.command("export")
@click.option("--name", default="exported", help="Name of the layout.  [default: exported]")
@click.option(
    "--for",
    "manager",
    type=click.Choice(MANAGERS),
    help="Print the devices for guests as configuration of nova, KubeVirt, Proxmox VE or Incus.",
)
@click.option("--node", metavar="NAME", help="With --for proxmox: this host's name in the cluster.")
@flag("--addresses", text="Select by address, and name vGPUs by UUID.")
@session_options(*READING)
@pass_session
def export(
    session: Session, *, name: str, manager: Manager | None, node: str | None, addresses: bool
) -> None:
    """Print the present state of this host as a layout.

    Applied on this host, the layout changes nothing. Devices are selected by model (PCI ID, and
    NUMA node if boards of one model differ), and vGPUs by type and number, so that the layout fits
    other hosts of the same kind. Addresses are only used where a model would select other devices.

    MSI-X vectors of virtual functions (vf_msix) are not exported: the kernel does not show whether
    their number was set or is the default of the driver. `show` prints the present numbers.

    \b
    Examples:
      vfiomgr layout export > fleet.yaml
      vfiomgr layout export --addresses > host.yaml
      vfiomgr --snapshot host.json layout export --name web-07
      vfiomgr layout export --for nova > pci.conf
      vfiomgr layout export --for proxmox --node pve1
    """
    if manager is not None and (addresses or session.format != "table"):
        option = "--addresses" if addresses else "--format"
        forbid_together("--for", option, "the text is in the format of that manager")
    if manager is None and node is not None:
        forbid_alone("--node", "--for proxmox", "only its mappings name a node")
    host = session.scan(with_gpu_modes=True)
    if manager is not None:
        made = configuration(host, manager, node)
        print_text(made.text)
        for text in made.left:
            note(text)
        return
    layout = exported(host, by_address=addresses)
    file = LayoutFile.model_validate({"version": "vfiomgr/v1", "layouts": {name: layout}})
    if session.format == "json":
        print_text(json.dumps(to_jsonable(file), indent=2) + "\n")
    else:
        print_text(render_layouts(file))
    if not file.layouts[name].devices:
        note("no device of this host is passed through or divided: the layout is empty")
    for text in unexpressed(host):
        note(text)
    named = [vgpu for vgpu in host.vgpus.active if vgpu.uuid is not None]
    if named and not addresses:
        note(
            f"not exported: {counted(len(named), 'UUID')} of vGPUs, which guests may name; "
            "include them with --addresses"
        )


@click.command("revert")
@allow_option(*REVERSIBLE)
@session_options(*CHANGING)
@pass_session
def revert(session: Session, *, allow: tuple[Override, ...]) -> None:
    """Undo the last applied layout and its later corrections.

    The host returns to the state before that layout. Another `revert` undoes the layout before it.

    \b
    Examples:
      vfiomgr layout revert --dry-run
      vfiomgr layout revert
    """
    session.require_live("a snapshot has no journal", "run vfiomgr layout revert on the host")
    if session.dry_run:
        try:
            request = reversion(session.tree, session.tree.read(BOOT_ID), frozenset(allow))
        except PermissionError:
            message = "cannot read the journal: requires root"
            raise HostError(message, "run the command as root, e.g. with sudo") from None
        print_plan(session, host_of(session).plan(request))
        return
    with followed(session) as host:
        outcome = host.apply(reversion(host.tree, host.tree.read(BOOT_ID), frozenset(allow)))
    print_outcome(session, outcome, ["the host is in the state before the layout"])


# ---- what they share


def _reviewed(text: str, source: str) -> ReviewedPlan | None:
    """The saved plan in a text, if it is one."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = parse_json(text)
    except ValueError:
        return None  # the reader of layouts reports the error
    return read_plan(document, source) if is_plan(document) else None


def _planned(request: requests.ApplyLayout, compared: Comparison, made: Plan) -> dict[str, object]:
    return {
        "layout": request.name,
        "differences": to_jsonable(compared.differences),
        **made.to_document(),
        "deferred": made.deferred,
        "request": to_jsonable(request),
    }


def _print_differences(compared: Comparison) -> None:
    for difference in compared.differences:
        say(f"  {difference}")


def _is_changed(result: Outcome | VfiomgrError) -> bool:
    if isinstance(result, VfiomgrError):
        return isinstance(result, StillDiffers)
    return result.is_changed


def _apply_each(session: Session, request: requests.ApplyLayout) -> int:
    with followed(session) as host, host.changing() as work:
        results = layouts.apply_parts(request, work)
    failed = [error for _, error in results if isinstance(error, VfiomgrError)]
    if session.format != "table":
        items = [
            {
                "device": name,
                "changed": _is_changed(result),
                "error": result.message if isinstance(result, VfiomgrError) else None,
                "remedy": result.hint if isinstance(result, VfiomgrError) else None,
            }
            for name, result in results
        ]
        print_document("LayoutResults", {"layout": request.name, "items": items}, session.format)
    else:
        for name, result in results:
            if isinstance(result, VfiomgrError):
                say(f"{name or 'missing'}: failed: {result.message}; {result.hint}")
            else:
                say(f"{name}: done")
        if not results:
            say("nothing to do")
    if any(isinstance(error, RollbackIncomplete) for error in failed):
        return _INCOMPLETE
    return _FAILED if failed else 0
