"""What a handler of Kata's is made of: a configuration, and the shim that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.kata.read import read_settings
from vfiomgr.cli.output import note
from vfiomgr.cli.runtime_entry import require_file, require_program
from vfiomgr.errors import InvalidDocument, Refusal, UsageError
from vfiomgr.host import kata
from vfiomgr.model.kata import NEWEST, handler_configuration, search_path
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.cli.session import Session
    from vfiomgr.model.kata import RuntimeName
    from vfiomgr.model.kata_installation import KataConfigurationFile, KataInstallation

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
    installed = kata.read_installation(session.files)
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
    drop_ins = [(HostPath(part.path), part.text) for part in file.drop_ins]
    try:
        settings = read_settings(file.resolved, file.text, drop_ins)
    except InvalidDocument:
        return False
    ports = {settings.cold_plug} if runtime == "rs" else {settings.cold_plug, settings.hot_plug}
    return ports != {"no-port"}


def _lacking(session: Session, path: HostPath, otherwise: str = "") -> Refusal:
    """The refusal, with the command that makes the file."""
    installed = kata.read_installation(session.files)
    base = installed.configuration(search_path(_default_runtime(installed)))
    named = "BASE" if base is None else base.path
    message = f"there is no {path}, which the handler's shim would read"
    root = f" --root {session.root}" if session.root.strip("/") else ""
    hint = f"make it: vfiomgr kata config{root} --whole {named} --output {path}{otherwise}"
    return Refusal(message, hint)


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
    installed = kata.read_installation(session.files)
    runtime = _runtime_of(session, configuration) or _default_runtime(installed)
    shims = [shim.path for shim in installed.shims if shim.runtime == runtime]
    if not shims:
        named = "runtime-rs" if runtime == "rs" else "the Go runtime"
        message = f"{configuration} is for {named}, whose containerd-shim-kata-v2 is not installed"
        raise Refusal(message, "install Kata Containers, or say where it is: --runtime-path FILE")
    if len(installed.shims) > 1:
        note(f"of Kata's shims {shims[0]} is taken; --runtime-path names another")
    return shims[0]


def _runtime_of(session: Session, path: HostPath) -> RuntimeName | None:
    """The runtime that a configuration shows to be for; None where it does not say."""
    file = kata.read_configuration(session.files, path)
    if file is None:
        return None
    try:
        settings = read_settings(file.resolved, file.text, ())
    except InvalidDocument as error:
        message = f"{path}: Kata could not read it: {error.message}"
        raise Refusal(message, error.hint) from None
    return settings.runtime if "runtime" in settings.document else None


def whole_path(text: str) -> HostPath:
    """A path from / on.

    Raises:
        UsageError: it is none.

    """
    if not text.startswith("/"):
        message = f"{text} is no absolute path"
        raise UsageError(message, f"write it from / on, e.g. /etc/{text}")
    return HostPath(text)
