"""What a handler of Kata's is made of: a configuration, and the shim that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.location import require_file, require_program
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.kata import facts as kata_facts
from vfiomgr.kata.model import NEWEST, handler_configuration, search_path
from vfiomgr.kata.settings import read_settings
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.errors import Refusal
    from vfiomgr.kata.model import KataConfigurationFile, KataInstallation, RuntimeName
    from vfiomgr.snapshot.source import HostSource


_DEFAULTS = HostPath("/opt/kata/share/defaults/kata-containers")
_WITH_GPUS: dict[RuntimeName, HostPath] = {
    "rs": _DEFAULTS / "runtime-rs/configuration-qemu-nvidia-gpu-runtime-rs.toml",
    "go": _DEFAULTS / "configuration-qemu-nvidia-gpu.toml",
}
"""Those that Kata ships and that plug devices."""


def configuration_of(host: HostSource, handler: str, told: str | None) -> HostPath:
    """Kata's configuration for a handler: the one that is told, its own, or one that plugs devices.

    Of those the first is what Kata finds by itself, where somebody set it up so, with a drop-in
    perhaps; then those for GPUs that Kata ships.

    Raises:
        Refusal: it is not there.

    """
    own = handler_configuration(handler)
    if told is not None:
        path = _whole_path(told)
        if not host.files.exists(path):
            raise _lacking(host, path, f"; or leave out --config {path}")
        require_file(
            host.files, path, "name the file of Kata's configuration, or leave out --config"
        )
        return path
    if host.files.exists(own):
        return own
    installed = kata_facts.read_installation(host.files)
    default = _default_runtime(installed)
    found = installed.configuration(search_path(default))
    if found is not None and _plugs_devices(found, default):
        host.on_note(
            f"the handler has no {own}: it reads {found.path}, which Kata finds by itself and "
            "which plugs devices, with all that lies in its config.d"
        )
        return found.path
    for runtime in sorted(_WITH_GPUS, key=lambda name: name != default):
        shipped = _WITH_GPUS[runtime]
        if host.files.exists(shipped):
            host.on_note(
                f"the handler has no {own}: it reads {shipped}, as Kata ships it, with all that "
                "lies in its config.d; vfiomgr kata config --whole makes one of its own"
            )
            return shipped
    raise _lacking(host, own)


def _plugs_devices(file: KataConfigurationFile, runtime: RuntimeName) -> bool:
    """Whether devices have a port by it and its drop-ins; not where that cannot be read."""
    try:
        settings = read_settings(file.resolved, file.text, file.drop_ins)
    except InvalidDocument:
        return False
    return settings.plugs_devices(runtime)


def _lacking(host: HostSource, path: HostPath, otherwise: str = "") -> Refusal:
    """The refusal, with the command that makes the file."""
    installed = kata_facts.read_installation(host.files)
    base = installed.configuration(search_path(_default_runtime(installed)))
    named = "BASE" if base is None else base.path
    message = f"there is no {path}, which the handler's shim would read"
    root = f" --root {host.root}" if host.root.strip("/") else ""
    hint = f"make it: vfiomgr kata config{root} --whole {named} --output {path}{otherwise}"
    return refusal([blocker("kata-configuration-missing", path, message, hint)])


def _default_runtime(installed: KataInstallation) -> RuntimeName:
    return installed.default_runtime(installed.version or NEWEST)


def shim_of(host: HostSource, configuration: HostPath, told: str | None) -> str:
    """The shim of a handler: the one that is told, or the one that the configuration is for.

    Raises:
        Refusal: it is not installed.

    """
    if told is not None:
        path = _whole_path(told)
        require_program(host.files, path, "name Kata's shim, or leave out --runtime-path")
        return path
    installed = kata_facts.read_installation(host.files)
    runtime = _runtime_of(host, configuration) or _default_runtime(installed)
    shims = [shim.path for shim in installed.shims if shim.runtime == runtime]
    if not shims:
        named = "runtime-rs" if runtime == "rs" else "the Go runtime"
        message = f"{configuration} is for {named}, whose containerd-shim-kata-v2 is not installed"
        hint = "install Kata Containers, or say where it is: --runtime-path FILE"
        refuse("kata-shim-missing", named, message, hint)
    if len(installed.shims) > 1:
        host.on_note(f"of Kata's shims {shims[0]} is taken; --runtime-path names another")
    return shims[0]


def _runtime_of(host: HostSource, path: HostPath) -> RuntimeName | None:
    """The runtime that a configuration shows to be for; None where it does not say."""
    file = kata_facts.read_configuration(host.files, path)
    if file is None:
        return None
    try:
        settings = read_settings(file.resolved, file.text, ())
    except InvalidDocument as error:
        message = f"{path}: Kata could not read it: {error.message}"
        refuse("kata-configuration-unreadable", path, message, error.hint)
    return settings.stated_runtime


def _whole_path(text: str) -> HostPath:
    """A path from / on.

    Raises:
        UsageError: it is none.

    """
    if not text.startswith("/"):
        message = f"{text} is no absolute path"
        raise UsageError(message, f"write it from / on, e.g. /etc/{text}")
    return HostPath(text)
