"""Entries of OCI runtimes in container runtimes: find, add and remove them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Unpack

from vfiomgr.cli.keywords import Keywords, Option
from vfiomgr.containers.runtimes import apply, entries, location, text
from vfiomgr.containers.runtimes.model import ProgramName, RuntimeRequest
from vfiomgr.containers.runtimes.record import RECORD
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plan
from vfiomgr.engine.run import Outcome
from vfiomgr.engine.transaction import ApplyContext, scan_for
from vfiomgr.errors import UsageError, require_known
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.containers.runtimes.location import RuntimeLocation
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.snapshot.source import HostSource

__all__ = [
    "EntryChange",
    "PlaceOptions",
    "adding",
    "configure",
    "locate",
    "locate_entry",
    "removing",
    "unconfigure",
]

_UNITS = {"containerd": "containerd", "crio": "crio", "docker": "docker"}
_NODE_UNITS = {"k3s": ("k3s-agent", "k3s"), "rke2": ("rke2-agent", "rke2-server")}
_UNIT_DIRECTORIES = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_NAME = expression(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class PlaceOptions(Keywords, total=False):
    """The container runtime; each option may be omitted."""

    program: ProgramName | None
    """`containerd`, `crio`, `docker`, `k3s` or `rke2`; None for the installed one."""
    runtime_config: Annotated[
        str | None,
        Option(
            "Use this configuration file of the container runtime.",
            metavar="FILE",
            complete="snapshot.completion:complete_host_file",
        ),
    ]
    containerd_version: Annotated[
        str | None,
        Option("Write for this containerd, e.g. 2.1.  [default: installed]", metavar="VERSION"),
    ]


class EntryOutcome(Value):
    """The outcome of a change of an entry."""

    outcome: Outcome
    not_checked: tuple[str, ...]
    """What was not checked, and why."""
    backups: tuple[str, ...]
    """The backup copies of the files."""
    program: ProgramName
    restart: str
    """The command that makes the runtime read its configuration; vfiomgr never runs it."""


class EntryPlan(Value):
    """The plan of a change of an entry."""

    plan: Plan
    not_checked: tuple[str, ...]
    """What was not checked, and why."""
    differences: dict[str, str]
    """The differences of each file of the runtime, like `diff -u`."""


class EntryChange:
    """A change of an entry of a container runtime; prepared when it is planned or applied."""

    def __init__(self, host: ManagedHost, make: Callable[[], Prepared]) -> None:
        self._host = host
        self._make = make

    def plan(self) -> EntryPlan:
        """Return the plan; nothing is changed.

        Raises:
            InvalidDocument: a file is not readable.
            Refusal: the runtime would not accept the entry, or would lose other settings.
        """
        ready = self._make()
        found = plan(scan_for(ready.request, self._host.files, None), ready.request)
        return EntryPlan(found, ready.unchecked, dict(_differences(found)))

    def apply(self) -> EntryOutcome:
        """Apply the change, and let the container runtime read the result.

        Raises:
            InvalidDocument, Refusal: as `plan`.
            RolledBack: the runtime does not read the expected settings; all files were restored.
            RollbackIncomplete: the files could not be restored.
        """
        tree = self._host.files
        ready, outcome = apply.change(self._make, ApplyContext(tree, **self._host.options))
        restart = _restart(self._host, ready.place.program)
        return EntryOutcome(outcome, ready.unchecked, ready.backups, ready.place.program, restart)


def _differences(found: Plan) -> Iterator[tuple[str, str]]:
    """The differences of each file of the runtime, between the first and the last text."""
    steps = [step for step in found.steps if isinstance(step, ReplaceFile)]
    for path in dict.fromkeys(step.path for step in steps):
        own = [step for step in steps if step.path == path]
        shown = text.difference(path, own[0].before, own[-1].after)
        if path != RECORD and ".vfiomgr-" not in path and shown:
            yield path, shown


def _restart(host: HostSource, program: ProgramName) -> str:
    if program in _UNITS:
        return f"systemctl restart {_UNITS[program]}"
    agent, server = _NODE_UNITS[program]
    is_agent = any(
        host.files.exists(HostPath(f"{directory}/{agent}.service"))
        for directory in _UNIT_DIRECTORIES
    )
    return f"systemctl restart {agent if is_agent else server}"


def configure(  # noqa: PLR0913 - each is an option of the command
    host: ManagedHost,
    name: str,
    path: str,
    *,
    set_default: bool = False,
    cdi: bool = False,
    undo: str = "",
    **options: Unpack[PlaceOptions],
) -> EntryChange:
    """Add an entry for the OCI runtime at `path` to a container runtime, with the options of runc.

    `undo` is the command that removes it, for error messages.

    Raises:
        UsageError: the name or the path is invalid, or there is no container runtime, or several.
        Refusal: the program does not exist.
    """
    require_name(name)
    place = locate(host, **options)
    if not path.startswith("/"):
        message = f"not an absolute path: --path {path}"
        raise UsageError(message, "write an absolute path, e.g. --path /usr/bin/crun")
    remedy = "install it first, or pass its path with --path"
    location.require_program(host.files, HostPath(path), remedy)
    request = RuntimeRequest(place.program, name, path, set_default=set_default, enable_cdi=cdi)
    return adding(host, place, request, undo)


def unconfigure(
    host: ManagedHost, name: str, *, command: str = "", **options: Unpack[PlaceOptions]
) -> EntryChange:
    """Remove an entry that `configure` added; an entry that was edited since is refused.

    `command` is the command to run again, for error messages.

    Raises:
        UsageError: the name is invalid, or there is no runtime, or several have the entry.
    """
    require_name(name)
    place = locate_entry(host, name, **options)
    return removing(host, place, name, command, is_kata=False)


def adding(
    host: ManagedHost, place: RuntimeLocation, request: RuntimeRequest, undo: str
) -> EntryChange:
    """The change that adds an entry; `undo` is the command that removes it."""
    return EntryChange(host, lambda: entries.prepare_entry(host.files, place, request, undo))


def removing(
    host: ManagedHost, place: RuntimeLocation, name: str, command: str, *, is_kata: bool | None
) -> EntryChange:
    """The change that removes an entry; error messages name `command` to run again.

    `is_kata` refuses entries of the other kind; None removes both.
    """
    return EntryChange(
        host, lambda: entries.prepare_removal(host.files, place, name, command, is_kata=is_kata)
    )


def locate(host: HostSource, **options: Unpack[PlaceOptions]) -> RuntimeLocation:
    """The runtime that the options select, and the place of its configuration.

    Raises:
        UsageError: there is none, or there are several.
        Refusal: it reads its entries from files that vfiomgr does not write.
        InvalidDocument: its configuration is not readable.
    """
    version = _checked(host, options)
    main = options.get("runtime_config")
    location.refuse_elsewhere(host.files, options.get("program"), main)
    how = "install one, or select the future one, e.g. --runtime containerd"
    return _located(host, version, options, how)


def _located(
    host: HostSource, version: Version | None, options: PlaceOptions, how: str
) -> RuntimeLocation:
    """The selected runtime; `how` is the remedy if none is selected or installed."""
    chosen = options.get("program") or _only(host, how)
    return location.locate(host.files, chosen, options.get("runtime_config"), version)


def locate_entry(host: HostSource, name: str, **options: Unpack[PlaceOptions]) -> RuntimeLocation:
    """The runtime in which vfiomgr recorded the entry, else the one that the options select.

    Raises:
        UsageError: several runtimes have one.
        NeedsRoot: only root may read the record.
        InvalidDocument: the record, or a file of a runtime, is not readable.
    """
    version = _checked(host, options)
    main = options.get("runtime_config")
    found = location.places_of(host.files, name, options.get("program"), main, version)
    if len(found) > 1:
        named = ", ".join(f"{place.program} ({place.main})" for place in found)
        first = found[0]
        message = f"several container runtimes have entry {name}: {named}"
        told = f"--runtime {first.program} --runtime-config {first.main}"
        raise UsageError(message, f"select one, e.g. {told}")
    how = "select the runtime that has the entry, e.g. --runtime containerd"
    return found[0] if found else _located(host, version, options, how)


def _checked(host: HostSource, options: PlaceOptions) -> Version | None:
    """The given version, if the options are valid."""
    require_known(options, PlaceOptions)
    host.require_live(
        "a snapshot has no files of container runtimes", "omit --snapshot, or pass --root DIR"
    )
    main = options.get("runtime_config")
    if main is not None and not main.startswith("/"):
        message = f"not an absolute path: --runtime-config {main}"
        raise UsageError(
            message, "write an absolute path, e.g. --runtime-config /etc/containerd/config.toml"
        )
    version = options.get("containerd_version")
    return None if version is None else Version.parse(version, "2.1")


def _only(host: HostSource, how: str) -> ProgramName:
    """The runtime that Kubernetes would use here; Docker if there is no other."""
    found = location.present(host.files)
    named = tuple(name for name in found if name != "docker") or found
    if len(named) == 1:
        return named[0]
    if named:
        message = f"several container runtimes found: {', '.join(named)}"
        own = (name for name in named if name not in ("containerd", "crio"))  # with a kubelet
        raise UsageError(message, f"select one, e.g. --runtime {next(own, named[0])}")
    message = "no container runtime found (containerd, CRI-O, Docker, k3s, rke2)"
    raise UsageError(message, how)


def require_name(name: str) -> None:
    """Make sure that a name is valid for an entry.

    Raises:
        UsageError: it has characters other than letters, digits, - and _.
    """
    if not _NAME.fullmatch(name):
        message = f"invalid runtime name: {name!r}"
        raise UsageError(message, "use letters, digits, - and _, e.g. nvidia")
