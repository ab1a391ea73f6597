"""The command line: its commands, its start and its exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from importlib import import_module
from itertools import pairwise

import click

from vfiomgr import __version__
from vfiomgr.cli.options import Format, LazyGroup, Options, prepare, session_options
from vfiomgr.cli.output import note, note_text, print_error, print_error_document, say
from vfiomgr.errors import VfiomgrError

_COMMANDS = {
    "list": ("vfiomgr.main.commands.list", "list_devices"),
    "show": ("vfiomgr.main.commands.show", "show"),
    "groups": ("vfiomgr.main.commands.groups", "groups"),
    "topology": ("vfiomgr.topology.commands", "topology"),
    "check": ("vfiomgr.check.commands", "check"),
    "bind": ("vfiomgr.passthrough.commands", "bind"),
    "unbind": ("vfiomgr.passthrough.commands", "unbind"),
    "reset": ("vfiomgr.passthrough.commands", "reset"),
    "laptop": ("vfiomgr.laptop.commands", "laptop"),
    "rom": ("vfiomgr.main.commands.rom", "rom"),
    "recover": ("vfiomgr.main.commands.recover", "recover"),
    "plan": ("vfiomgr.layout.commands.changes", "plan"),
    "apply": ("vfiomgr.layout.commands.changes", "apply"),
    "layout": ("vfiomgr.layout.commands", "layout"),
    "sriov": ("vfiomgr.sriov.commands", "sriov"),
    "vgpu": ("vfiomgr.main.commands.vgpu", "vgpu"),
    "libvirt": ("vfiomgr.libvirt.commands", "libvirt"),
    "qemu": ("vfiomgr.qemu.commands", "qemu"),
    "kata": ("vfiomgr.kata.commands", "kata"),
    "cdi": ("vfiomgr.containers.cdi.commands", "cdi"),
    "runtime": ("vfiomgr.containers.runtimes.commands", "runtime"),
    "oci": ("vfiomgr.main.commands.oci", "oci"),
    "node": ("vfiomgr.node.commands", "node"),
    "metrics": ("vfiomgr.metrics.commands", "metrics"),
    "fleet": ("vfiomgr.fleet.commands", "fleet"),
    "uninstall": ("vfiomgr.uninstall.commands", "uninstall"),
    "snapshot": ("vfiomgr.main.commands.show", "snapshot"),
    "explain": ("vfiomgr.main.commands.explain", "explain"),
    "completion": ("vfiomgr.main.commands.completion", "completion"),
}
_OF_SERVICES = {
    "interrupts": ("vfiomgr.tuning.commands", "interrupts"),
    "persist": ("vfiomgr.passthrough.persist_commands", "persist"),
}
_READING = frozenset(
    {
        "list",
        "show",
        "groups",
        "topology",
        "check",
        "fleet",
        "plan",
        "snapshot",
        "explain",
        "completion",
    }
)
"""Commands that change nothing and may therefore end at once."""
_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""
_PIPE_CLOSED = 141
_COMPLETE = "_VFIOMGR_COMPLETE"
"""The variable in which a shell asks for completion."""


class _Commands(LazyGroup):
    """The top-level commands; those that change something handle signals."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of the table, then those that capabilities add."""
        from vfiomgr.capability import added_commands  # noqa: PLC0415 - --version needs none

        self._table = _COMMANDS | added_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name."""
        if cmd_name in {*self.list_commands(ctx), *_OF_SERVICES} and cmd_name not in _READING:
            _be_interruptible()
        return super().get_command(ctx, cmd_name)


def _show_version(context: click.Context, _parameter: click.Parameter, value: object) -> None:
    if value and not context.resilient_parsing:
        say(f"vfiomgr, version {__version__}")
        context.exit()


@click.group(cls=_Commands, table=_COMMANDS, unlisted=_OF_SERVICES)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@session_options(from_environment=True)
def cli() -> None:
    """Assign PCI devices and vGPUs to virtual machines and containers.

    \b
    Examples:
      vfiomgr list                            # list GPUs and accelerators
      vfiomgr check                           # check whether this host is ready
      vfiomgr bind --persist 0000:04:00.0     # bind to vfio-pci, now and at each boot
      vfiomgr libvirt hostdev 0000:04:00.0    # print the XML for a libvirt domain
      vfiomgr unbind 0000:04:00.0             # return to the original driver

    A change can be shown with --dry-run before it is made, and is rolled back if a step fails.

    \b
    Exit status:
      0    success, or nothing to do
      1    failed and rolled back (checks: a blocker was found)
      2    usage error
      3    the host differs from the layout (layout assert)
      4    refused by a safety check
      5    failed, and the rollback is incomplete
      65   malformed document
      130  interrupted

    Each option below can also be set as VFIOMGR_<OPTION>, e.g. VFIOMGR_FORMAT=json.
    """


prepare(cli)

_VARIABLES = frozenset({"VFIOMGR_CONNECT", "VFIOMGR_PAGER", "VFIOMGR_AGREED_SESSIONS"})
"""Variables that are read besides those of the options of `vfiomgr` itself."""
_OF_OTHERS = ("_SERVICE_", "_PORT", "VFIOMGR_LAB_", "VFIOMGR_TEST_")
"""Variables that Kubernetes sets in pods, named by services, and those of the tests."""


def _warn_of_unknown_variables() -> None:
    """Name the variables that look like options and are ignored."""
    known = _VARIABLES.union(one.envvar for one in cli.params if isinstance(one, click.Option))
    for name in sorted(os.environ):
        is_known = name in known or any(part in name for part in _OF_OTHERS)
        if name.startswith("VFIOMGR_") and not is_known:
            _show_warning(f"ignoring {name}: no option has this name; see vfiomgr --help")


def _be_interruptible() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that a change is rolled back.

    A signal that is already ignored, as with nohup(1), stays ignored.
    """
    import signal  # noqa: PLC0415 - slow to import

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    """End as after Ctrl-C: a change is rolled back first."""
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
    if _COMPLETE in os.environ:
        import_module("vfiomgr.main.shells")  # makes them known to click
    else:
        _warn_of_unknown_variables()
    try:
        status = cli.main(prog_name="vfiomgr", standalone_mode=False, obj=options)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - the edge
        if options.debug and not isinstance(error, SystemExit):
            _show_traceback(error)
        sys.exit(_conclude(error, _format(options)))
    if status:
        sys.exit(status)


def _format(options: Options) -> Format:
    """The output format; if the command line could not be parsed, the one that it names."""
    words = [word for arg in sys.argv[1:] for word in arg.split("=", 1)]
    typed = (value for name, value in pairwise(words) if name == "--format")
    match next(typed, options.format):
        case "json" | "yaml" as form:
            return form
    return "table"


def _report(error: VfiomgrError, form: Format) -> int:
    if form == "table":
        print_error(error)
    else:
        print_error_document(error, form)
    return error.exit_code


def _conclude(error: BaseException, form: Format) -> int | str | None:
    """Report an error and return the exit status."""
    match error:
        case VfiomgrError():
            return _report(error, form)
        case click.ClickException():
            return _tell_mistake(error, form)
        case click.Abort() | KeyboardInterrupt():
            return _INTERRUPTED
        case SystemExit():
            # click answers a closed pipe with status 1, which would mean a failure here.
            closed = type(sys.stdout).__name__.endswith("PacifyFlushWrapper")
            return _PIPE_CLOSED if closed else error.code
        case OSError():
            return _tell_of_system(error, form)
    remedy = (
        "this is a bug in vfiomgr: run the command again as `vfiomgr --debug …` and report "
        "the output"
    )
    return _report(VfiomgrError(f"unexpected {type(error).__name__}: {error}", remedy), form)


def _tell_mistake(error: click.ClickException, form: Format) -> int:
    """Explain a usage error; for a group without a command, print its help."""
    is_help = type(error).__name__ == "NoArgsIsHelpError"  # which came with click 8.2
    if isinstance(error, click.UsageError) and not is_help:
        explained = import_module("vfiomgr.main.usage").explained  # for mistakes alone
        _report(explained(error, cli, sys.argv[1:]), form)
    else:
        error.show()
    return error.exit_code


def _tell_of_system(error: OSError, form: Format) -> int:
    """Report an error of the operating system, usually of the output file."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is buffered cannot be written either
    if isinstance(error, BrokenPipeError):
        return _PIPE_CLOSED
    place = f": {error.filename}" if error.filename else ""
    problem = VfiomgrError(
        f"{error.strerror or error}{place}", "check that there is space for the output"
    )
    with contextlib.suppress(OSError):
        _report(problem, form)
    return 1
