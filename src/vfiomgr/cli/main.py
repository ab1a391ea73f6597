"""Groups of commands whose modules are imported when a command is asked for."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import click

import vfiomgr.capabilities  # noqa: F401 - makes them known
from vfiomgr import __version__
from vfiomgr.capability import added_commands
from vfiomgr.cli.options import Options, session_options
from vfiomgr.cli.output import note, note_text, print_error
from vfiomgr.cli.usage import explained
from vfiomgr.errors import VfiomgrError

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """Finds its commands in a table: of each name the module, and what it is called there."""

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's own
        table: Mapping[str, tuple[str, str]],
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table, which is that in which a newcomer meets them."""
        return [*self._table, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in self._table:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._table[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the tables are ours
        return command


_COMMANDS = {
    "list": ("vfiomgr.cli.commands.list", "list_devices"),
    "show": ("vfiomgr.cli.commands.show", "show"),
    "groups": ("vfiomgr.cli.commands.groups", "groups"),
    "check": ("vfiomgr.check.commands", "check"),
    "bind": ("vfiomgr.passthrough.commands", "bind"),
    "unbind": ("vfiomgr.passthrough.commands", "unbind"),
    "plan": ("vfiomgr.layout.commands.changes", "plan"),
    "apply": ("vfiomgr.layout.commands.changes", "apply"),
    "assert": ("vfiomgr.layout.commands.changes", "assert_"),
    "export": ("vfiomgr.layout.commands.changes", "export"),
    "revert": ("vfiomgr.layout.commands.changes", "revert"),
    "watch": ("vfiomgr.layout.commands.watch", "watch"),
    "recover": ("vfiomgr.cli.commands.recover", "recover"),
    "reset": ("vfiomgr.passthrough.commands", "reset"),
    "sriov": ("vfiomgr.sriov.commands", "sriov"),
    "layout": ("vfiomgr.layout.commands.layout", "layout"),
    "persist": ("vfiomgr.persistence.commands", "persist"),
    "vgpu": ("vfiomgr.vgpu.commands.group", "vgpu"),
    "libvirt": ("vfiomgr.libvirt.commands", "libvirt"),
    "kata": ("vfiomgr.kata.commands", "kata"),
    "cdi": ("vfiomgr.containers.cdi.commands", "cdi"),
    "runtime": ("vfiomgr.containers.runtimes.commands", "runtime"),
    "oci": ("vfiomgr.containers.oci.commands", "oci"),
    "snapshot": ("vfiomgr.cli.commands.snapshot", "snapshot"),
    "explain": ("vfiomgr.cli.commands.explain", "explain"),
}
_READING = frozenset(
    {"list", "show", "groups", "check", "plan", "assert", "export", "snapshot", "explain"}
)
"""Commands that change nothing: they may end at once."""
_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""
_PIPE_CLOSED = 141


class _Commands(LazyGroup):
    """Those of the top: one that may change something can be interrupted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those of the table, then those that capabilities add."""
        self._table = _COMMANDS | added_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name in self.list_commands(ctx) and cmd_name not in _READING:
            _be_interruptible()
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands, table=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="vfiomgr")
@session_options(from_environment=True)
def cli() -> None:
    """Take a PCI device from its host driver to a guest, and back.

    \b
    Examples:
      vfiomgr list                      # GPUs and accelerators of this host
      vfiomgr bind 0000:04:00.0         # hand a GPU, whole, to guests
      vfiomgr bind 04:00.0 --dry-run    # show what that would do
      vfiomgr libvirt hostdev 04:00.0   # the XML for a domain
      vfiomgr unbind 0000:04:00.0       # give it back to the driver it had

    Exit status: 0 done or already so, 1 failed and rolled back (check: something blocks), 2 usage,
    3 assert found a difference, 4 refused by a guard, 5 failed and the roll-back is incomplete, 65
    a malformed document, 130 interrupted. Each option below can also be set as VFIOMGR_<OPTION>,
    e.g. VFIOMGR_FORMAT=json.
    """


def _be_interruptible() -> None:
    """Let SIGTERM and SIGHUP end a change as Ctrl-C does: it is rolled back first."""
    import signal  # noqa: PLC0415 - slow to import

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    """End as by Ctrl-C: a run rolls back first."""
    raise KeyboardInterrupt


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    note(f"vfiomgr: warning: {message}")


def _show_traceback(error: BaseException) -> None:
    import traceback  # noqa: PLC0415 - for --debug alone

    note_text("".join(traceback.format_exception(error)))


def main() -> None:
    """Run the command line and exit with its status."""
    options = Options()
    warnings.showwarning = _show_warning
    try:
        status = cli.main(prog_name="vfiomgr", standalone_mode=False, obj=options)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - the edge
        if options.debug and not isinstance(error, SystemExit):
            _show_traceback(error)
        sys.exit(_conclude(error))
    if status:
        sys.exit(status)


def _conclude(error: BaseException) -> int | str | None:
    """Tell a person what happened; the exit status."""
    match error:
        case VfiomgrError():
            print_error(error)
            return error.exit_code
        case click.ClickException():
            return _tell_mistake(error)
        case click.Abort() | KeyboardInterrupt():
            return _INTERRUPTED
        case SystemExit():
            # click answers a closed pipe with status 1, which would mean a failure here.
            closed = type(sys.stdout).__name__.endswith("PacifyFlushWrapper")
            return _PIPE_CLOSED if closed else error.code
        case OSError():
            return _tell_of_system(error)
    print_error(
        VfiomgrError(
            f"unexpected {type(error).__name__}: {error}",
            "this is a defect of vfiomgr: run it again with --debug and report what it prints",
        )
    )
    return 1


def _tell_mistake(error: click.ClickException) -> int:
    """Explain what click found wrong; of a group without a command it shows the help."""
    is_help = type(error).__name__ == "NoArgsIsHelpError"  # which came with click 8.2
    if isinstance(error, click.UsageError) and not is_help:
        print_error(explained(error, cli, sys.argv[1:]))
    else:
        error.show()
    return error.exit_code


def _tell_of_system(error: OSError) -> int:
    """Report an error of the operating system, most likely of the place that output goes to."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is buffered cannot be written either
    if isinstance(error, BrokenPipeError):
        return _PIPE_CLOSED
    place = f": {error.filename}" if error.filename else ""
    problem = VfiomgrError(
        f"{error.strerror or error}{place}", "is there room where the output goes?"
    )
    with contextlib.suppress(OSError):
        print_error(problem)
    return 1
