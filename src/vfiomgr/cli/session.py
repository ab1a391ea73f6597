"""The options that every command takes, and the host that they select."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import click

from vfiomgr.cli.options import Seconds, WholeNumber
from vfiomgr.cli.output import note
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.snapshot.source import MACHINE, HostSource

if TYPE_CHECKING:
    from collections.abc import Callable

Format = Literal["table", "json", "yaml"]


@dataclass
class Session(HostSource):
    """What these options say; those after a command override those before it."""

    format: Format = "table"
    root: str = MACHINE
    snapshot: str | None = None
    dry_run: bool = False
    deadline: float | None = None
    """Seconds for one step of a change; None for the usual one."""
    yes: bool = False
    verbose: int = 0
    debug: bool = False
    _typed: set[str] = field(default_factory=set, init=False, repr=False)
    """Options that stand in the command line, which counts more than the environment."""

    def remember(self, name: str, value: object, *, is_typed: bool) -> None:
        """Take the value of an option; of two hosts, the one that was typed."""
        setattr(self, name, value)
        if is_typed:
            self._typed.add(name)
        if "snapshot" in self._typed and "root" not in self._typed:
            self.root = MACHINE
        if "root" in self._typed and "snapshot" not in self._typed:
            self.snapshot = None

    def on_note(self, text: str) -> None:
        """Write it to stderr."""
        note(text)


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    session = context.ensure_object(Session)
    name = str(parameter.name)
    source = context.get_parameter_source(name)
    if source is not click.core.ParameterSource.DEFAULT:
        is_typed = source is click.core.ParameterSource.COMMANDLINE
        session.remember(name, value, is_typed=is_typed)


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--format",),
        {
            "type": click.Choice(["table", "json", "yaml"]),
            "help": "How to print data.  [default: table]",
        },
    ),
    (("--root",), {"metavar": "DIR", "help": "Read the host below DIR, e.g. a recorded one."}),
    (("--snapshot",), {"metavar": "FILE", "help": "Answer from `vfiomgr snapshot` output."}),
    (("--dry-run",), {"is_flag": True, "help": "Print the plan and change nothing."}),
    (
        ("--deadline",),
        {
            "type": Seconds(),
            "metavar": "SECONDS",
            "help": "How long one step may take, or libvirt to answer.  [default: 60, 30]",
        },
    ),
    (("--yes",), {"is_flag": True, "help": "Answer every question with yes."}),
    (
        ("-v", "--verbose"),
        {
            "count": True,
            "type": WholeNumber(min=0),
            "help": "Say what is being done; -vv for more.",
        },
    ),
    (("--debug",), {"is_flag": True, "help": "Show the traceback of an error."}),
)


def session_options(*, from_environment: bool = False) -> Callable[[Any], Any]:
    """Decorate a command with the options of a session; the outermost also reads VFIOMGR_…."""

    def decorate(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        for names, settings in reversed(_OPTIONS):
            variable = f"VFIOMGR_{names[-1].lstrip('-').replace('-', '_').upper()}"
            function = click.option(
                *names,
                **settings,
                expose_value=False,
                callback=_remember,
                envvar=variable if from_environment else None,
            )(function)
        return function

    return decorate


def complete_address(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Addresses of the selected host that continue what is typed, with or without the domain."""
    session = context.find_object(Session) or Session()
    if session.snapshot is not None:
        names = [str(device.address) for device in session.scan().devices]
    else:
        from vfiomgr.pci.model import is_address  # noqa: PLC0415 - not for --version

        found = filter(is_address, session.tree.children(PCI_DEVICES))
        names = sorted(found, key=lambda name: (len(name), name))
    full = [name for name in names if name.startswith(incomplete)]
    return full or [name for name in names if name.partition(":")[2].startswith(incomplete)]
