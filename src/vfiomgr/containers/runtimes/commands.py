"""What the commands share that give container runtimes entries and take them back."""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Any

import click

from vfiomgr import api
from vfiomgr.cli.apply import options_of, print_outcome
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.cli.session import Session, session_options
from vfiomgr.containers.runtimes.model import PROGRAMS, RECORD, RuntimeRequest
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.containers.runtimes.location import RuntimeLocation
    from vfiomgr.containers.runtimes.model import ProgramName
    from vfiomgr.engine.plan import Plan
    from vfiomgr.version import Version


_UNITS = {"containerd": "containerd", "crio": "crio", "docker": "docker"}
_EXECUTABLE = 0o111
_NODE_UNITS = {"k3s": ("k3s-agent", "k3s"), "rke2": ("rke2-agent", "rke2-server")}


def place_options(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
    """The options that tell which runtime is meant."""
    options: tuple[Callable[[Any], Any], ...] = (
        click.option(
            "--for",
            "program",
            type=click.Choice(PROGRAMS),
            help="The container runtime.  [default: the one that is there]",
        ),
        click.option(
            "--runtime-config",
            metavar="FILE",
            help="The container runtime's own file, where it is not at its usual place.",
        ),
        click.option(
            "--containerd-version",
            metavar="VERSION",
            help="Write for this containerd, e.g. 2.1; by default for the installed one.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def place_of(
    session: Session,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> RuntimeLocation:
    """The runtime that the options mean.

    Raises:
        UsageError: none is there, or several are.

    """
    version = _checked(session, runtime_config, containerd_version)
    chosen = program or _only(session)
    return api.locate_runtime(session.files, chosen, runtime_config, version)


def place_of_entry(
    session: Session,
    name: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> RuntimeLocation:
    """The runtime in which vfiomgr recorded the entry, else the one that the options select.

    Raises:
        UsageError: several runtimes have one.

    """
    version = _checked(session, runtime_config, containerd_version)
    found = api.locate_entries(session.files, name, program, runtime_config, version)
    if len(found) > 1:
        named = ", ".join(f"{place.program} ({place.main})" for place in found)
        first = found[0]
        message = f"several container runtimes have an entry {name}: {named}"
        options = f"--for {first.program} --runtime-config {first.main}"
        raise UsageError(message, f"choose one, e.g. {options}")
    return found[0] if found else place_of(session, program, runtime_config, containerd_version)


def _checked(
    session: Session, runtime_config: str | None, containerd_version: str | None
) -> Version | None:
    """The version that is told, where the options can be used."""
    session.require_live("a snapshot holds no files of runtimes", "pass --root DIR, or neither")
    if runtime_config is not None and not runtime_config.startswith("/"):
        message = f"--runtime-config {runtime_config} is no absolute path"
        raise UsageError(message, "e.g. --runtime-config /etc/containerd/config.toml")
    return None if containerd_version is None else _parsed(containerd_version)


def require_program(session: Session, path: HostPath, remedy: str) -> None:
    """Make sure that what is to be run is a program.

    Raises:
        Refusal: it is not there, no regular file, or not executable.

    """
    require_file(session, path, remedy)
    found = session.files.resolve(path)
    status = None if found is None else session.files.status(found)
    if status is not None and not status.st_mode & _EXECUTABLE:
        message = f"{path} is not executable"
        raise Refusal(message, f"make it so: chmod +x {session.files.locate(path)}; or {remedy}")


def require_file(session: Session, path: HostPath, remedy: str) -> None:
    """Make sure that what is to be read is a regular file, or a link to one.

    Raises:
        Refusal: it is none, or not there.

    """
    found = session.files.resolve(path)
    status = None if found is None else session.files.status(found)
    if status is None:
        message = f"there is no {path}"
        raise Refusal(message, remedy)
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        message = f"{path} is {kind}"
        raise Refusal(message, remedy)


def at_place(session: Session, program: str | None, runtime_config: str | None) -> str:
    """The options that lead another command to the same place."""
    root = session.root if session.root.strip("/") else None
    told = {"--root": root, "--for": program, "--runtime-config": runtime_config}
    return "".join(f" {option} {value}" for option, value in told.items() if value)


def _parsed(text: str) -> Version:
    from vfiomgr.version import Version  # noqa: PLC0415 - few commands ask

    return Version.parse(text, "2.1")


def _only(session: Session) -> ProgramName:
    """The runtime that Kubernetes would use here; Docker where there is no other."""
    found = api.present_runtimes(session.files)
    named = tuple(name for name in found if name != "docker") or found
    if len(named) == 1:
        return named[0]
    if named:
        message = f"there are several container runtimes here: {', '.join(named)}"
        raise UsageError(message, f"say which, e.g. --for {named[0]}")
    message = "there is no container runtime here: no containerd, CRI-O, Docker, k3s or rke2"
    raise UsageError(message, "install one; or say which is to come, e.g. --for containerd")


def carry_out(session: Session, make: Callable[[], Prepared], undo: str = "") -> None:
    """Print what would be done with --dry-run; do it otherwise, and say what comes next."""
    if session.dry_run:
        _print_plan(session, make())
        return
    prepared, outcome = api.change_runtime(make, tree=session.files, **options_of(session))
    facts: dict[str, object] = {"not_checked": prepared.unchecked}
    if outcome.is_changed:
        facts["backups"] = prepared.backups
        facts["restart"] = _restart(session, prepared.place)
    lines = [f"done: {step.describe()}" for step in outcome.plan.steps if outcome.is_changed]
    print_outcome(session, outcome, lines, **facts)
    if session.format == "table":
        for text in _further(session, prepared, undo, is_changed=outcome.is_changed):
            note(text)


def _further(session: Session, prepared: Prepared, undo: str, *, is_changed: bool) -> Iterator[str]:
    for text in prepared.unchecked:
        yield f"not checked: {text}"
    if not is_changed:
        return
    for path in prepared.backups:
        yield f"backup: {path}"
    restart = _restart(session, prepared.place)
    yield f"it counts once {prepared.place.program} has read it: {restart}"
    if undo:
        yield f"undo with: {undo}"


def _restart(session: Session, place: RuntimeLocation) -> str:
    """What has the runtime read its configuration; vfiomgr never does that by itself."""
    if place.program in _UNITS:
        return f"systemctl restart {_UNITS[place.program]}"
    agent, server = _NODE_UNITS[place.program]
    return f"systemctl restart {agent if api.has_unit(session.files, agent) else server}"


def _print_plan(session: Session, prepared: Prepared) -> None:
    plan = api.plan_files(prepared.intent, tree=session.files)
    texts = dict(_differences(plan))
    if session.format != "table":
        body = {**plan.to_document(), "not_checked": prepared.unchecked, "differences": texts}
        print_document("Plan", body, session.format)
        return
    say(f"plan: {plan.summary}")
    for text in (*plan.notes, *plan.already):
        say(f"  {text}")
    if plan.is_empty:
        say("nothing to do")
    for number, step in enumerate(plan.steps, start=1):
        say(f"{number:3}. {step.describe()}")
    for text in texts.values():
        say_text(text)
    for text in prepared.unchecked:
        note(f"not checked: {text}")


def _differences(plan: Plan) -> Iterator[tuple[str, str]]:
    """Of each file that a runtime reads, from first to last."""
    from vfiomgr.containers.runtimes.text import difference  # noqa: PLC0415 - few commands need it
    from vfiomgr.persistence.steps import ReplaceFile  # noqa: PLC0415

    steps = [step for step in plan.steps if isinstance(step, ReplaceFile)]
    for path in dict.fromkeys(step.path for step in steps):
        own = [step for step in steps if step.path == path]
        text = difference(path, own[0].before, own[-1].after)
        if path != RECORD and ".vfiomgr-" not in path and text:
            yield path, text


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@click.group("runtime")
@session_options()
def runtime() -> None:
    """OCI runtimes below containerd, CRI-O or Docker, e.g. one that adds devices.

    \b
    Examples:
      vfiomgr runtime configure nvidia --path /usr/bin/nvidia-container-runtime
      vfiomgr runtime unconfigure nvidia
    """


@runtime.command("configure")
@click.argument("name")
@click.option(
    "--path", metavar="FILE", required=True, help="The OCI runtime, which is called as runc is."
)
@click.option(
    "--set-as-default",
    "--set-default",
    "set_default",
    is_flag=True,
    help="Make it the runtime of containers that name none.",
)
@click.option("--cdi", "enable_cdi", is_flag=True, help="Have CDI on as well.")
@place_options
@session_options()
@click.pass_obj
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
    """Give a container runtime an entry for the OCI runtime at FILE, with the options of runc.

    All else stays as it is, comments and the order of keys too; a copy lies beside. Nothing is
    restarted.

    \b
    Examples:
      vfiomgr runtime configure nvidia --path /usr/bin/nvidia-container-runtime --dry-run
      vfiomgr runtime configure crun --path /usr/bin/crun --for docker
      vfiomgr runtime configure crun --path /usr/bin/crun --cdi --set-as-default
    """
    _require_name(name)
    place = place_of(session, program, runtime_config, containerd_version)
    if not path.startswith("/"):
        message = f"--path {path} is no absolute path"
        raise UsageError(message, "e.g. --path /usr/bin/crun")
    require_program(session, HostPath(path), "install it first, or name where it is with --path")
    wish = RuntimeRequest(place.program, name, path, set_default=set_default, enable_cdi=enable_cdi)
    undo = f"vfiomgr runtime unconfigure {name}{at_place(session, program, runtime_config)}"
    carry_out(session, lambda: api.prepare_entry(session.files, place, wish, undo), undo)


@runtime.command("unconfigure")
@click.argument("name")
@place_options
@session_options()
@click.pass_obj
def unconfigure(
    session: Session,
    *,
    name: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Take back what `runtime configure` wrote; what was edited since is refused.

    \b
    Examples:
      vfiomgr runtime unconfigure crun --for docker
    """
    _require_name(name)
    place = place_of_entry(session, name, program, runtime_config, containerd_version)
    command = f"vfiomgr runtime unconfigure {name}{at_place(session, program, runtime_config)}"
    carry_out(session, lambda: api.prepare_removal(session.files, place, name, command))


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name for a runtime"
        raise UsageError(message, "take letters, digits, - and _, e.g. nvidia")
