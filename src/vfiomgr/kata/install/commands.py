"""What a handler of Kata's is made of: a configuration, and the shim that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr import api
from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session, session_options
from vfiomgr.containers.runtimes.commands import (
    at_place,
    carry_out,
    place_of,
    place_of_entry,
    place_options,
    require_file,
    require_program,
)
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.kata import facts as kata_facts
from vfiomgr.kata.manifests.model import is_label
from vfiomgr.kata.model import DEFAULT_HANDLER, NEWEST, handler_configuration, search_path
from vfiomgr.kata.settings import read_settings
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import ProgramName
    from vfiomgr.errors import Refusal
    from vfiomgr.kata.model import KataConfigurationFile, KataInstallation, RuntimeName


_DEFAULTS = HostPath("/opt/kata/share/defaults/kata-containers")
_WITH_GPUS: dict[RuntimeName, HostPath] = {
    "rs": _DEFAULTS / "runtime-rs/configuration-qemu-nvidia-gpu-runtime-rs.toml",
    "go": _DEFAULTS / "configuration-qemu-nvidia-gpu.toml",
}
"""Those that Kata ships and that plug devices."""


def configuration_of(session: Session, handler: str, told: str | None) -> HostPath:
    """Kata's configuration for a handler: the one that is told, its own, or one that plugs devices.

    Of those the first is what Kata finds by itself, where somebody set it up so, with a drop-in
    perhaps; then those for GPUs that Kata ships.

    Raises:
        Refusal: it is not there.

    """
    own = handler_configuration(handler)
    if told is not None:
        path = whole_path(told)
        if not session.files.exists(path):
            raise _lacking(session, path, f"; or leave out --config {path}")
        require_file(session, path, "name the file of Kata's configuration, or leave out --config")
        return path
    if session.files.exists(own):
        return own
    installed = kata_facts.read_installation(session.files)
    default = _default_runtime(installed)
    found = installed.configuration(search_path(default))
    if found is not None and _plugs_devices(found, default):
        note(
            f"the handler has no {own}: it reads {found.path}, which Kata finds by itself and "
            "which plugs devices, with all that lies in its config.d"
        )
        return found.path
    for runtime in sorted(_WITH_GPUS, key=lambda name: name != default):
        shipped = _WITH_GPUS[runtime]
        if session.files.exists(shipped):
            note(
                f"the handler has no {own}: it reads {shipped}, as Kata ships it, with all that "
                "lies in its config.d; vfiomgr kata config --whole makes one of its own"
            )
            return shipped
    raise _lacking(session, own)


def _plugs_devices(file: KataConfigurationFile, runtime: RuntimeName) -> bool:
    """Whether devices have a port by it and its drop-ins; not where that cannot be read."""
    try:
        settings = read_settings(file.resolved, file.text, file.drop_ins)
    except InvalidDocument:
        return False
    return settings.plugs_devices(runtime)


def _lacking(session: Session, path: HostPath, otherwise: str = "") -> Refusal:
    """The refusal, with the command that makes the file."""
    installed = kata_facts.read_installation(session.files)
    base = installed.configuration(search_path(_default_runtime(installed)))
    named = "BASE" if base is None else base.path
    message = f"there is no {path}, which the handler's shim would read"
    root = f" --root {session.root}" if session.root.strip("/") else ""
    hint = f"make it: vfiomgr kata config{root} --whole {named} --output {path}{otherwise}"
    return refusal([blocker("kata-configuration-missing", path, message, hint)])


def _default_runtime(installed: KataInstallation) -> RuntimeName:
    return installed.default_runtime(installed.version or NEWEST)


def shim_of(session: Session, configuration: HostPath, told: str | None) -> str:
    """The shim of a handler: the one that is told, or the one that the configuration is for.

    Raises:
        Refusal: it is not installed.

    """
    if told is not None:
        path = whole_path(told)
        require_program(session, path, "name Kata's shim, or leave out --runtime-path")
        return path
    installed = kata_facts.read_installation(session.files)
    runtime = _runtime_of(session, configuration) or _default_runtime(installed)
    shims = [shim.path for shim in installed.shims if shim.runtime == runtime]
    if not shims:
        named = "runtime-rs" if runtime == "rs" else "the Go runtime"
        message = f"{configuration} is for {named}, whose containerd-shim-kata-v2 is not installed"
        hint = "install Kata Containers, or say where it is: --runtime-path FILE"
        refuse("kata-shim-missing", named, message, hint)
    if len(installed.shims) > 1:
        note(f"of Kata's shims {shims[0]} is taken; --runtime-path names another")
    return shims[0]


def _runtime_of(session: Session, path: HostPath) -> RuntimeName | None:
    """The runtime that a configuration shows to be for; None where it does not say."""
    file = kata_facts.read_configuration(session.files, path)
    if file is None:
        return None
    try:
        settings = read_settings(file.resolved, file.text, ())
    except InvalidDocument as error:
        message = f"{path}: Kata could not read it: {error.message}"
        refuse("kata-configuration-unreadable", path, message, error.hint)
    return settings.stated_runtime


def whole_path(text: str) -> HostPath:
    """A path from / on.

    Raises:
        UsageError: it is none.

    """
    if not text.startswith("/"):
        message = f"{text} is no absolute path"
        raise UsageError(message, f"write it from / on, e.g. /etc/{text}")
    return HostPath(text)


_handler_option = click.option(
    "--handler",
    default=DEFAULT_HANDLER,
    show_default=True,
    metavar="NAME",
    help="What a RuntimeClass names.",
)


@click.command("install")
@_handler_option
@click.option(
    "--config",
    "config",
    metavar="FILE",
    help="Kata's configuration for it.  [default: the handler's own, else Kata's for GPUs]",
)
@click.option(
    "--runtime-path",
    metavar="FILE",
    help="Kata's shim.  [default: the installed one that the configuration is for]",
)
@click.option("--set-default", is_flag=True, help="Make it the runtime of pods that name none.")
@place_options
@session_options()
@click.pass_obj
def install(
    session: Session,
    *,
    handler: str,
    config: str | None,
    runtime_path: str | None,
    set_default: bool,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Give containerd, CRI-O, Docker, k3s or rke2 a handler for Kata with devices.

    Where the container runtime can be asked, it reads the files before they are written, and they
    are not if it would see anything else differently. All else in them stays as it is, comments
    too; a copy lies beside. Nothing is restarted.

    \b
    Examples:
      vfiomgr kata install --dry-run
      vfiomgr kata install
      vfiomgr kata install --handler kata-gpu --for crio
      vfiomgr kata install --config /etc/kata-containers/gpu.toml
      vfiomgr kata install --runtime-path /opt/kata/runtime-rs/bin/containerd-shim-kata-v2
      vfiomgr kata install --root /mnt/image --for containerd --containerd-version 2.1
    """
    _require_handler(handler)
    place = place_of(session, program, runtime_config, containerd_version)
    configuration = configuration_of(session, handler, config)
    wish = RuntimeRequest(
        place.program,
        handler,
        shim_of(session, configuration, runtime_path),
        config_path=configuration,
        set_default=set_default,
        enable_cdi=True,
    )
    undo = _uninstalling(handler) + at_place(session, program, runtime_config)
    carry_out(session, lambda: api.prepare_entry(session.files, place, wish, undo), undo)


@click.command("uninstall")
@_handler_option
@place_options
@session_options()
@click.pass_obj
def uninstall(
    session: Session,
    *,
    handler: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Take back what `kata install` wrote, and nothing else; what was edited since is refused.

    Where nothing else was changed since, the files are as they were to the byte. A configuration
    that `kata config --output` wrote for the handler stays, and is named.

    \b
    Examples:
      vfiomgr kata uninstall --dry-run
      vfiomgr kata uninstall --handler kata-gpu --for crio
    """
    _require_handler(handler)
    place = place_of_entry(session, handler, program, runtime_config, containerd_version)
    command = _uninstalling(handler) + at_place(session, program, runtime_config)
    carry_out(session, lambda: api.prepare_removal(session.files, place, handler, command))
    _tell_of_configuration(session, handler)


def _tell_of_configuration(session: Session, handler: str) -> None:
    """What `kata config --output` wrote is its user's, who may have edited it since."""
    path = handler_configuration(handler)
    if session.files.exists(path):
        here = session.files.locate(path)
        note(f"{path}, the configuration of {handler}, stays: remove it with: rm {here}")


def _uninstalling(handler: str) -> str:
    named = "" if handler == DEFAULT_HANDLER else f" --handler {handler}"
    return f"vfiomgr kata uninstall{named}"


def _require_handler(handler: str) -> None:
    """What a RuntimeClass may name: a label of DNS (node.k8s.io/v1)."""
    if not is_label(handler):
        message = f"--handler {handler!r}: no RuntimeClass can name that"
        raise UsageError(message, "take small letters, digits and -, e.g. --handler kata-vfio")
