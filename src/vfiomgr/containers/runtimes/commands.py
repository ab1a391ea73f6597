"""`vfiomgr runtime …`, and what it shares with `vfiomgr kata install`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.changes import host_of, print_outcome
from vfiomgr.cli.completion import complete_host_file
from vfiomgr.cli.container_completion import complete_runtime
from vfiomgr.cli.group import LazyGroup
from vfiomgr.cli.options import FILES, RenamedOption, session_options
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.containers.runtimes.model import PROGRAMS
from vfiomgr.runtimes import configure as configured
from vfiomgr.runtimes import unconfigure as unconfigured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.containers.runtimes.model import ProgramName
    from vfiomgr.runtimes import EntryChange, EntryOutcome, EntryPlan


def place_options(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
    """The options that select the container runtime."""
    options: tuple[Callable[[Any], Any], ...] = (
        click.option(
            "--runtime",
            "program",
            cls=RenamedOption,
            former=("--for",),
            type=click.Choice(PROGRAMS),
            help="Use this container runtime.  [default: the installed one]",
        ),
        click.option(
            "--runtime-config",
            metavar="FILE",
            shell_complete=complete_host_file,
            help="Use this configuration file of the container runtime.",
        ),
        click.option(
            "--containerd-version",
            metavar="VERSION",
            help="Write for this containerd, e.g. 2.1.  [default: installed]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def at_place(session: Session, program: str | None, runtime_config: str | None) -> str:
    """The options that select the same place in another command."""
    root = session.root if session.root.strip("/") else None
    told = {"--root": root, "--runtime": program, "--runtime-config": runtime_config}
    return "".join(f" {option} {value}" for option, value in told.items() if value)


def carry_out(session: Session, change: EntryChange, undo: str = "") -> None:
    """Apply the change and print what to do next; with --dry-run, print the plan."""
    if session.dry_run:
        _print_plan(session, change.plan())
        return
    done = change.apply()
    outcome = done.outcome
    facts: dict[str, object] = {"not_checked": done.not_checked}
    if outcome.is_changed:
        facts["backups"] = done.backups
        facts["restart"] = done.restart
    lines = [f"done: {step.describe()}" for step in outcome.plan.steps if outcome.is_changed]
    print_outcome(session, outcome, lines, **facts)
    if session.format == "table":
        for text in _further(done, undo):
            note(text)


def _further(done: EntryOutcome, undo: str) -> Iterator[str]:
    for text in done.not_checked:
        yield f"not checked: {text}"
    if not done.outcome.is_changed:
        return
    for path in done.backups:
        yield f"backup: {path}"
    yield f"restart {done.program} to apply the change: {done.restart}"
    if undo:
        yield f"undo with: {undo}"


def _print_plan(session: Session, found: EntryPlan) -> None:
    plan = found.plan
    if session.format != "table":
        body = {
            **plan.to_document(),
            "not_checked": found.not_checked,
            "differences": found.differences,
        }
        print_document("Plan", body, session.format)
        return
    say(f"plan: {plan.summary}")
    for text in (*plan.notes, *plan.already):
        say(f"  {text}")
    if plan.is_empty:
        say("nothing to do")
    for number, step in enumerate(plan.steps, start=1):
        say(f"{number:3}. {step.describe()}")
    for text in found.differences.values():
        say_text(text)
    for text in found.not_checked:
        note(f"not checked: {text}")


_HERE = "vfiomgr.containers.runtimes.commands"
_COMMANDS = {"install": (_HERE, "configure"), "uninstall": (_HERE, "unconfigure")}
_FORMER = {"configure": (_HERE, "configure"), "unconfigure": (_HERE, "unconfigure")}


@click.group("runtime", cls=LazyGroup, table=_COMMANDS, unlisted=_FORMER)
def runtime() -> None:
    """Install OCI runtimes in containerd, CRI-O or Docker.

    \b
    Examples:
      vfiomgr runtime install nvidia --path /usr/bin/nvidia-container-runtime
      vfiomgr runtime uninstall nvidia
    """


@click.command("install")
@click.argument("name", shell_complete=complete_runtime)
@click.option(
    "--path",
    metavar="FILE",
    required=True,
    shell_complete=complete_host_file,
    help="Add this OCI runtime, which must be compatible with runc.",
)
@click.option(
    "--set-default",
    cls=RenamedOption,
    former=("--set-as-default",),
    is_flag=True,
    help="Make it the default runtime of containers.",
)
@click.option("--cdi", "enable_cdi", is_flag=True, help="Also enable CDI.")
@place_options
@session_options(*FILES)
@pass_session
def configure(
    session: Session,
    *,
    name: str,
    path: str,
    set_default: bool,
    enable_cdi: bool,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Install an OCI runtime in a container runtime.

    The entry for the OCI runtime at FILE has the options of runc. Everything else in the
    configuration stays, including comments and the order of keys, and a backup copy is kept beside
    it. Nothing is restarted.

    \b
    Examples:
      vfiomgr runtime install nvidia --path /usr/bin/nvidia-container-runtime --dry-run
      vfiomgr runtime install crun --path /usr/bin/crun --runtime docker
      vfiomgr runtime install crun --path /usr/bin/crun --cdi --set-default
    """
    undo = f"vfiomgr runtime uninstall {name}{at_place(session, program, runtime_config)}"
    change = configured(
        host_of(session),
        name,
        path,
        set_default=set_default,
        cdi=enable_cdi,
        undo=undo,
        program=program,
        runtime_config=runtime_config,
        containerd_version=containerd_version,
    )
    carry_out(session, change, undo)


@click.command("uninstall")
@click.argument("name", shell_complete=complete_runtime)
@place_options
@session_options(*FILES)
@pass_session
def unconfigure(
    session: Session,
    *,
    name: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Remove an entry that `runtime install` added.

    An entry that was edited since is refused, and so is a handler of `kata install`.

    \b
    Examples:
      vfiomgr runtime uninstall crun --runtime docker
    """
    change = unconfigured(
        host_of(session),
        name,
        command=f"vfiomgr runtime uninstall {name}{at_place(session, program, runtime_config)}",
        program=program,
        runtime_config=runtime_config,
        containerd_version=containerd_version,
    )
    carry_out(session, change)
