"""`vfiomgr plan`, `apply`, `assert`, `export` and `revert`: a host from a file, and back."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import click

from vfiomgr import api
from vfiomgr.cli.change import not_checked, plan_body, print_outcome, print_plan
from vfiomgr.cli.layout_files import source_of, text_of
from vfiomgr.cli.output import note, print_document, print_text, say
from vfiomgr.cli.progress import followed
from vfiomgr.cli.session import Session, session_options
from vfiomgr.cli.usage import forbid_together
from vfiomgr.errors import HostError, RollbackIncomplete, StillDiffers, VfiomgrError
from vfiomgr.executor.applied import reversion
from vfiomgr.executor.scanning import slots_with_serials
from vfiomgr.host.rewrite import rewrite
from vfiomgr.model.intent import ALLOWANCES, REVERSIBLE
from vfiomgr.model.jsonable import API_VERSION, to_jsonable
from vfiomgr.model.layout_plan import KIND, is_plan, read_plan
from vfiomgr.model.parsed import parse_json
from vfiomgr.model.path import BOOT_ID
from vfiomgr.planner.recovery import refuse_other_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.model.intent import Allowance, ApplyLayout
    from vfiomgr.model.layout_plan import ReviewedPlan
    from vfiomgr.model.plan import Plan
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.layout import Comparison

_DRIFT = 3
"""Exit status of `assert` where something differs."""
_FAILED, _INCOMPLETE = 1, RollbackIncomplete.exit_code


def of_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """The file, which of its layouts, and the guards to override."""
    for decorate in (
        click.option(
            "--allow",
            multiple=True,
            type=click.Choice(ALLOWANCES),
            help="Override a guard; a refusal names the one.",
        ),
        click.option("--layout", "name", metavar="NAME", help="Which one, where FILE has several."),
        click.argument("file"),
    ):
        function = decorate(function)
    return function


@click.command("plan")
@of_layout
@click.option("--out", metavar="PLAN", help="Write the plan to a file that `apply` takes.")
@session_options()
@click.pass_obj
def plan(
    session: Session, *, file: str, name: str | None, allow: tuple[Allowance, ...], out: str | None
) -> None:
    """Show what differs from the layout in FILE, and the steps that would end it.

    \b
    Examples:
      vfiomgr plan host.yaml
      vfiomgr plan fleet.yaml --layout kata-node --out today.json
      vfiomgr --snapshot host.json plan fleet.yaml --layout kata-node
    """
    from vfiomgr.planner.layout import compare, plan_of  # noqa: PLC0415 - brings pydantic

    session.tell_of_cut_off_runs()
    intent = _intent(session, file, name, allow)
    host = host_for(session, intent)
    compared = compare(host, intent)
    if session.format == "table":
        _print_differences(compared)
    made = plan_of(host, intent, compared)
    body = _planned(intent, compared, made)
    if out is not None:
        _write_plan(out, body)
        note(f"written to {out}; apply it with: vfiomgr apply {shlex.quote(str(out))}")
    if session.format != "table":
        print_document(KIND, {**body, "not_checked": not_checked(host, intent)}, session.format)
        return
    print_plan(session, made, not_checked(host, intent))


@click.command("apply")
@of_layout
@click.option("--keep-going", is_flag=True, help="Do what can be done, whatever else fails.")
@session_options()
@click.pass_obj
def apply(
    session: Session,
    *,
    file: str,
    name: str | None,
    allow: tuple[Allowance, ...],
    keep_going: bool,
) -> int:
    """Bring the host to the layout in FILE, or carry out a plan that was written with --out.

    What is so already is not touched, whoever uses it. All of it is done, or nothing: a layout that
    cannot be is refused before anything is, and a failure rolls all back.

    \b
    Examples:
      vfiomgr apply host.yaml
      vfiomgr apply fleet.yaml --layout kata-node --dry-run
      vfiomgr apply today.json
      vfiomgr export | vfiomgr apply -
    """
    text = text_of(file, "a layout file")
    reviewed = _reviewed(text, source_of(file))
    if reviewed is not None and (name is not None or keep_going or allow):
        option = "--layout" if name else "--keep-going" if keep_going else "--allow"
        forbid_together("a plan", option, "a plan was made for all that it says, and no more")
    if reviewed is None:
        intent = intent_of(session, text, source_of(file), name, frozenset(allow))
    else:
        intent = reviewed.intent
    if session.dry_run:
        host = host_for(session, intent)
        made = api.plan(host, intent)
        if reviewed is not None:
            refuse_other_steps(made.steps, reviewed.steps)
        print_plan(session, made, not_checked(host, intent))
        return 0
    session.require_live("a snapshot cannot be changed", "pass --dry-run to see the plan")
    if keep_going:
        return _apply_each(session, intent)
    with followed(session) as options:
        steps = reviewed.steps if reviewed else None
        outcome = api.apply(intent, tree=session.tree, reviewed=steps, **options)
    done = [f"the host is as the layout {intent.name} wants it"] if outcome.is_changed else []
    print_outcome(session, outcome, done, layout=intent.name)
    if outcome.is_changed and session.format == "table":
        note("undo with: vfiomgr revert")
    return 0


@click.command("assert")
@of_layout
@session_options()
@click.pass_obj
def assert_(session: Session, *, file: str, name: str | None, allow: tuple[Allowance, ...]) -> int:
    """Exit with 3 where the host differs from the layout in FILE, and say in what.

    \b
    Examples:
      vfiomgr assert host.yaml
      vfiomgr assert fleet.yaml --layout kata-node --format json
    """
    from vfiomgr.planner.layout import compare  # noqa: PLC0415 - brings pydantic

    intent = _intent(session, file, name, allow)
    compared = compare(host_for(session, intent), intent)
    differences = compared.differences
    if session.format != "table":
        body = {
            "layout": intent.name,
            "is_met": not differences,
            "differences": to_jsonable(differences),
        }
        print_document("LayoutAssertion", body, session.format)
    elif differences:
        _print_differences(compared)
    else:
        say(f"the host is as the layout {intent.name} wants it")
    return _DRIFT if differences else 0


@click.command("export")
@click.option("--name", default="exported", help="What to call the layout.  [default: exported]")
@session_options()
@click.pass_obj
def export(session: Session, *, name: str) -> None:
    """Print a layout that says what the host is now: applied here, it changes nothing.

    \b
    Examples:
      vfiomgr export > host.yaml
      vfiomgr --snapshot host.json export --name web-07
    """
    from vfiomgr.model.layout import LayoutFile  # noqa: PLC0415 - brings pydantic
    from vfiomgr.model.layout_render import render_layouts  # noqa: PLC0415
    from vfiomgr.planner.layout_export import export as exported  # noqa: PLC0415

    host = session.host(with_gpu_modes=True)
    file = LayoutFile.model_validate({"version": "vfiomgr/v1", "layouts": {name: exported(host)}})
    if session.format == "json":
        print_text(json.dumps(to_jsonable(file), indent=2) + "\n")
    else:
        print_text(render_layouts(file))
    if not file.layouts[name].devices:
        note("nothing of this host is given to guests or divided for them: the layout is empty")


@click.command("revert")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(REVERSIBLE),
    help="Override a guard; a refusal names the one.",
)
@session_options()
@click.pass_obj
def revert(session: Session, *, allow: tuple[Allowance, ...]) -> None:
    """Undo the layout that was applied last, with all later corrections of it.

    The host is again as it was before that layout. Another `revert` undoes the one before.

    \b
    Examples:
      vfiomgr revert --dry-run
      vfiomgr revert
    """
    session.require_live("a snapshot holds no journal", "run vfiomgr revert on the host itself")
    if session.dry_run:
        try:
            intent = reversion(session.tree, session.tree.read(BOOT_ID), frozenset(allow))
        except PermissionError:
            message = "the journal can be read by root alone"
            raise HostError(message, "run it as root, e.g. with sudo") from None
        host = session.host(with_users=True)
        print_plan(session, api.plan(host, intent), not_checked(host, intent))
        return
    with followed(session) as options:
        outcome = api.revert(tree=session.tree, allow=frozenset(allow), **options)
    print_outcome(session, outcome, ["the host is as it was before the layout"])


# ---- what they share


def _intent(
    session: Session, file: str, name: str | None, allow: tuple[Allowance, ...]
) -> ApplyLayout:
    text = text_of(file, "a layout file")
    return intent_of(session, text, source_of(file), name, frozenset(allow))


def intent_of(
    session: Session, text: str, source: str, name: str | None, allow: frozenset[Allowance]
) -> ApplyLayout:
    """The wish for a layout of a text, with what of this host it takes."""
    from vfiomgr.model.layout_document import choose_layout, read_layouts  # noqa: PLC0415

    chosen, layout = choose_layout(read_layouts(text, source), name)
    tree = None if session.snapshot is not None else session.tree
    return api.layout_intent(tree, chosen, layout, allow=allow)


def host_for(session: Session, intent: ApplyLayout) -> HostSnapshot:
    """The host with all that a layout is compared to."""
    slots: frozenset[tuple[int, int, int]] = frozenset()
    if session.snapshot is None:
        slots = slots_with_serials(session.tree, intent)
    return session.host(with_users=True, with_resets=True, with_gpu_modes=True, serials_of=slots)


def _reviewed(text: str, source: str) -> ReviewedPlan | None:
    """The plan that a text is, where it is one."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = parse_json(text)
    except ValueError:
        return None  # and the reader of layouts tells what is wrong with it
    return read_plan(document, source) if is_plan(document) else None


def _planned(intent: ApplyLayout, compared: Comparison, made: Plan) -> dict[str, object]:
    return {
        "layout": intent.name,
        "differences": to_jsonable(compared.differences),
        **plan_body(made),
        "later": made.later,
        "intent": to_jsonable(intent),
    }


def _write_plan(out: str, body: dict[str, object]) -> None:
    document = to_jsonable({"api_version": API_VERSION, "kind": KIND, **body})
    rewrite(out, None, (json.dumps(document, indent=2) + "\n").encode())


def _print_differences(compared: Comparison) -> None:
    for difference in compared.differences:
        say(f"  {difference}")


def _is_changed(result: api.Outcome | VfiomgrError) -> bool:
    if isinstance(result, VfiomgrError):
        return isinstance(result, StillDiffers)
    return result.is_changed


def _apply_each(session: Session, intent: ApplyLayout) -> int:
    with followed(session) as options:
        results = api.apply_each(intent, tree=session.tree, **options)
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
        print_document("LayoutResults", {"layout": intent.name, "items": items}, session.format)
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
