"""The guest image of a configuration, and the configuration and shim of a handler."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.location import require_file, require_program
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.errors import InvalidDocument, Refusal, UsageError
from vfiomgr.kata import facts as kata_facts
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.image import check_guest_image
from vfiomgr.kata.explain.releases import configured_faults, device_faults
from vfiomgr.kata.facts import read_settings
from vfiomgr.kata.kubernetes import is_label
from vfiomgr.kata.model import (
    AGENT_WAITS,
    DEFAULT_HANDLER,
    NEWEST,
    KataRelease,
    handler_configuration,
    search_path,
)
from vfiomgr.paths import MACHINE, HostPath
from vfiomgr.snapshot.named import find_device

if TYPE_CHECKING:
    from vfiomgr.kata.model import KataConfigurationFile, KataInstallation, RuntimeName
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


# ---- check kata


def check_image(source: HostSource, *addresses: str, config: str | None = None) -> Report:
    """Check whether the guest of a configuration can use devices, by default all available GPUs.

    Raises:
        UsageError: the host is a snapshot, or has no such configuration.
        UnknownDevice: the host has no such device.
    """
    source.require_live(
        "a snapshot has no files of Kata", "run the command on the host itself, or with --root"
    )
    file = _image_configuration(source, config)
    settings = read_settings(file.path, file.text, file.drop_ins)
    installed = kata_facts.installation_of(source)
    release = KataRelease(installed.version or NEWEST, settings.runtime)
    image = gather.image_of(source.tree, settings)
    host = source.scan(with_readiness=True)
    devices = _devices(host, addresses)
    named = devices if addresses else []
    groups = dict.fromkeys(device.iommu_group for device in named)
    together = [d for number in groups for d in host.group_members(number) if not d.is_bridge]
    faults = (*configured_faults(release, settings), *device_faults(settings, together))
    waits = installed.version is not None and release.version >= AGENT_WAITS
    return check_guest_image(image, devices, host, faults, waits_for_cdi=waits)


def _devices(host: HostSnapshot, addresses: tuple[str, ...]) -> list[PciDevice]:
    if not addresses:
        known = (d for d in host.devices if d.is_graphics_or_accelerator)
        return [device for device in known if host.vgpus.is_ready_for_guests(device)]
    return [find_device(host, text) for text in addresses]


def _image_configuration(source: HostSource, config: str | None) -> KataConfigurationFile:
    """The named configuration, or the first default one."""
    if config is None:
        facts = gather.configuration_of(source, DEFAULT_HANDLER)
    else:
        facts = gather.read_settings_of(source.tree, (HostPath(config),))
    if facts.file is not None:
        return facts.file
    others = () if config is not None else tuple(kata_facts.read_configurations(source.tree))
    if others:
        found = next((each for each in others if _plugs_devices(each, None)), others[0])
        source.on_note(
            f"checking {found.path}; for another configuration: vfiomgr check kata --config FILE"
        )
        return found
    message = f"no readable configuration of Kata: {', '.join(facts.looked_for)}"
    below = "" if source.root == MACHINE else f" (a path below {source.root})"
    raise UsageError(message, f"name one with --config FILE{below}, or install Kata Containers")


# ---- runtime install --kata


_DEFAULTS = HostPath("/opt/kata/share/defaults/kata-containers")
_WITH_GPUS: dict[RuntimeName, HostPath] = {
    "rs": _DEFAULTS / "runtime-rs/configuration-qemu-nvidia-gpu-runtime-rs.toml",
    "go": _DEFAULTS / "configuration-qemu-nvidia-gpu.toml",
}
"""Configurations that Kata ships and that plug devices."""


def require_handler(handler: str) -> None:
    """Make sure that a RuntimeClass can name the handler: it is a DNS label (node.k8s.io/v1)."""
    if not is_label(handler):
        message = f"invalid handler name: {handler!r}"
        raise UsageError(message, "use lower-case letters, digits and -, e.g. kata-vfio")


def configuration_of(host: HostSource, handler: str, told: str | None) -> HostPath:
    """The configuration of a handler: the given one, its own, or one that plugs devices.

    The last one is Kata's default, if it was set up to plug devices (perhaps with a drop-in), or
    else one for GPUs that Kata ships.

    Raises:
        Refusal: it does not exist.
    """
    own = handler_configuration(handler)
    if told is not None:
        path = _whole_path(told)
        if not host.files.exists(path):
            raise _lacking(host, path, f"; or omit --config {path}")
        require_file(host.files, path, "name the file of Kata's configuration, or omit --config")
        return path
    if host.files.exists(own):
        return own
    installed = kata_facts.read_installation(host.files)
    default = _default_runtime(installed)
    found = installed.configuration(search_path(default))
    if found is not None and _plugs_devices(found, default):
        host.on_note(
            f"{own} does not exist; the handler uses {found.path}, Kata's default, which plugs "
            "devices, with all files of its config.d"
        )
        return found.path
    for runtime in sorted(_WITH_GPUS, key=lambda name: name != default):
        shipped = _WITH_GPUS[runtime]
        if host.files.exists(shipped):
            host.on_note(
                f"{own} does not exist; the handler uses {shipped}, as shipped by Kata, with all "
                "files of its config.d; create its own with vfiomgr kata config --whole"
            )
            return shipped
    raise _lacking(host, own)


def _plugs_devices(file: KataConfigurationFile, runtime: RuntimeName | None) -> bool:
    """Whether it and its drop-ins set a port for devices; false if it is not readable."""
    try:
        settings = read_settings(file.resolved, file.text, file.drop_ins)
    except InvalidDocument:
        return False
    return settings.plugs_devices(runtime)


def _lacking(host: HostSource, path: HostPath, otherwise: str = "") -> Refusal:
    """The refusal, with the command that creates the file."""
    installed = kata_facts.read_installation(host.files)
    base = installed.configuration(search_path(_default_runtime(installed)))
    named = "BASE" if base is None else shlex.quote(base.path)
    message = f"configuration for the handler's shim not found: {path}"
    root = f" --root {shlex.quote(host.root)}" if host.root.strip("/") else ""
    command = f"vfiomgr kata config{root} --whole {named} --output {shlex.quote(path)}"
    hint = f"create it: {command}{otherwise}"
    return refusal([blocker("kata-configuration-missing", path, message, hint)])


def _default_runtime(installed: KataInstallation) -> RuntimeName:
    return installed.default_runtime(installed.version or NEWEST)


def shim_of(host: HostSource, configuration: HostPath, told: str | None) -> str:
    """The shim of a handler: the given one, or the one that the configuration is for.

    Raises:
        Refusal: it is not installed.
    """
    if told is not None:
        path = _whole_path(told)
        require_program(host.files, path, "name Kata's shim, or omit --path")
        return path
    installed = kata_facts.read_installation(host.files)
    runtime = _runtime_of(host, configuration) or _default_runtime(installed)
    shims = [shim.path for shim in installed.shims if shim.runtime == runtime]
    if not shims:
        named = "runtime-rs" if runtime == "rs" else "the Go runtime"
        message = (
            f"{configuration} is for {named}, but its containerd-shim-kata-v2 is not installed"
        )
        hint = "install Kata Containers, or set its path: --path FILE"
        refuse("kata-shim-missing", named, message, hint)
    if len(installed.shims) > 1:
        host.on_note(f"using Kata's shim {shims[0]}; --path selects another one")
    return shims[0]


def _runtime_of(host: HostSource, path: HostPath) -> RuntimeName | None:
    """The runtime that a configuration is for; None if it does not say."""
    file = kata_facts.read_configuration(host.files, path)
    if file is None:
        return None
    try:
        settings = read_settings(file.resolved, file.text, ())
    except InvalidDocument as error:
        message = f"Kata cannot read {path}: {error.message}"
        refuse("kata-configuration-unreadable", path, message, error.hint)
    return settings.stated_runtime


def _whole_path(text: str) -> HostPath:
    """An absolute path."""
    if not text.startswith("/"):
        message = f"not an absolute path: {text}"
        raise UsageError(message, f"write an absolute path, e.g. /etc/{text}")
    return HostPath(text)
