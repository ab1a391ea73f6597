"""Pods for the devices of a host, their RuntimeClass and handler, and the guest image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.devices import offers as ready_groups
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.grammar import is_kind
from vfiomgr.containers.cdi.model import DEFAULT_KIND, generating
from vfiomgr.containers.runtimes.location import require_file, require_program
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.errors import InvalidDocument, UsageError, forbid_together
from vfiomgr.kata import facts as kata_facts
from vfiomgr.kata.config.plan import GPU_MEMORY_MIB
from vfiomgr.kata.config.sizing import recommended_overhead_mib
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.image import check_guest_image, devices_named
from vfiomgr.kata.manifests.plan import (
    NAMINGS,
    Naming,
    PodDevice,
    PodOptions,
    RuntimeClassRequest,
    is_label,
    offers,
    parse_selector,
    pods_for,
    require_image,
    require_label,
    require_resource,
    require_subdomain,
    resource_of_none,
    selection_of,
    selections,
    units_of,
)
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    LEAST_GUEST_MIB,
    NEWEST,
    guest_mebibytes,
    handler_configuration,
    search_path,
)
from vfiomgr.kata.settings import read_settings
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import MACHINE, HostPath
from vfiomgr.units import mebibytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.check.model import Report
    from vfiomgr.errors import Refusal
    from vfiomgr.kata.explain.image import GuestImage
    from vfiomgr.kata.manifests.plan import PodRequest, Workload
    from vfiomgr.kata.model import KataConfigurationFile, KataInstallation, RuntimeName
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


__all__ = ["NAMINGS", "Naming", "check_image", "pods", "runtime_class"]

_CLAIMS_IGNORED = (
    "Kata ignores claims when it starts a VM (kata-containers/kata-containers#13322): with "
    "cold_plug_vfio the pod starts without its device. Only the Go runtime with hot_plug_vfio "
    "plugs it in later; otherwise request a resource of the device plugin: omit --dra"
)
_DRIVER_NEEDED = (
    "the pods wait until the driver vfiomgr.io publishes devices: vfiomgr node manifests --dra"
)
_GATES_NEEDED = (
    "claims need KubeVirt 1.6 or later, with its feature gates GPUsWithDRA and HostDevicesWithDRA"
)
DEFAULT_SELECTOR = (("katacontainers.io/kata-runtime", "true"),)
"""The label that kata-deploy sets on nodes where it installed Kata."""


# ---- kata check-image


def check_image(source: HostSource, *addresses: str, config: str | None = None) -> Report:
    """Check whether the guest of a configuration can use devices, by default all available GPUs.

    Raises:
        UsageError: the host is a snapshot, or has no such configuration.
        UnknownDevice: the host has no such device.

    """
    source.require_live(
        "a snapshot has no files of Kata", "run the command on the host itself, or with --root"
    )
    return check_guest_image(_guest_image(source, config), _devices(source, addresses))


def _devices(source: HostSource, addresses: tuple[str, ...]) -> list[PciDevice]:
    host = source.scan_devices()
    if not addresses:
        known = (d for d in host.devices if d.is_graphics_or_accelerator)
        return [device for device in known if host.is_ready_for_guests(device)]
    return [host.device(host.parse_address(text)) for text in addresses]


def _guest_image(source: HostSource, config: str | None) -> GuestImage:
    """The guest files of the configuration."""
    file = _image_configuration(source, config)
    settings = read_settings(file.path, file.text, file.drop_ins)
    return gather.image_of(source.tree, settings)


def _image_configuration(source: HostSource, config: str | None) -> KataConfigurationFile:
    """The named configuration, or the first default one."""
    if config is None:
        facts = gather.configuration_of(source, DEFAULT_HANDLER)
    else:
        facts = gather.read_settings_of(source.tree, (HostPath(config),))
    if facts.file is not None:
        return facts.file
    message = f"no readable configuration of Kata: {', '.join(facts.looked_for)}"
    below = "" if source.root == MACHINE else f" (a path below {source.root})"
    raise UsageError(message, f"name one with --config FILE{below}, or install Kata Containers")


# ---- kata pod


def pods(  # noqa: PLR0913 - each is an option of the command
    source: HostSource,
    *addresses: str,
    deployment: bool = False,
    name: str = "gpu",
    namespace: str | None = None,
    runtime_class: str = DEFAULT_HANDLER,
    image: str | None = None,
    resource: str | None = None,
    naming: Naming = "kind",
    count: int | None = None,
    memory: str = "16G",
    cpus: int = 4,
    dra: bool = False,
    kubevirt: bool = False,
) -> tuple[PodRequest, ...]:
    """Pods with devices for their VMs: those of `addresses`, or one pod for each resource.

    `memory` is the limit of the container, e.g. `16G`; the VM uses default_memory in addition.
    With `dra`, claims request the devices instead of resources; with a `resource` too, a
    DeviceClass offers them under that name. With `kubevirt` these are VMs of
    KubeVirt, and `memory` is that of the guest.

    Raises:
        UsageError: a name or a size is invalid.
        Refusal: a bridge or a mediated device was named.

    """
    host = source.scan()
    if resource is not None:
        require_resource("--resource", resource)
    units = _units(host, addresses)
    if dra and resource is None:
        offered = selections(units) or {"": ()}
    else:
        offered = {resource: units} if resource else offers(units, naming, DEFAULT_KIND)
    kind: Workload = "VirtualMachine" if kubevirt else "Deployment" if deployment else "Pod"
    options = PodOptions(
        kind=kind,
        name=require_label("--name", name),
        namespace=None if namespace is None else require_label("--namespace", namespace),
        runtime_class=require_subdomain("--runtime-class", runtime_class),
        image=None if image is None else require_image("--image", image),
        memory_mib=_limit(memory),
        cpus=cpus,
        count=count,
        by_claim=dra and resource is None,
        selector=selection_of(resource, units) if dra and resource else "",
    )
    offered = offered or {resource_of_none(naming, DEFAULT_KIND): ()}
    wanted = pods_for(offered, options, together=bool(addresses))
    _tell(source, host, offered, wanted)
    return wanted


def _limit(memory: str) -> int:
    """The memory limit of a container in MiB."""
    found = mebibytes("--memory", memory)
    if memory.strip().isdecimal() and found < LEAST_GUEST_MIB:
        message = f"missing unit: --memory {memory}"
        raise UsageError(message, f"write --memory {memory}G (a number without a unit is MiB)")
    return found


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[PodDevice, ...]:
    """The IOMMU groups of the named devices, or all available ones."""
    if not addresses:
        return tuple(PodDevice(offer.functions) for offer in ready_groups(host))
    return units_of(host, devices_named(host, addresses))


def _tell(
    source: HostSource,
    host: HostSnapshot,
    offered: dict[str, tuple[PodDevice, ...]],
    requests: tuple[PodRequest, ...],
) -> None:
    """Note what else the pods need to start."""
    units = [unit for found in offered.values() for unit in found]
    if not units:
        source.on_note(
            "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create"
        )
    lead = [unit.lead for unit in units]
    tell_how_to_bind(source, host, [d for d in lead if not host.is_ready_for_guests(d)])
    if notes := list(_of_others(offered, requests[0])):
        for note in notes:
            source.on_note(note)
        return
    kinds = {read_file(file).kind for file in host.cdi_files}
    asked = {item.name: item.count for request in requests for item in request.resources}
    for name, count in asked.items():
        if not is_kind(name):
            source.on_note(
                f"{name} is not a valid CDI kind (vendor and class need two characters or more "
                "and start with a letter). Kata looks up the kubelet's devices by that kind, so "
                "pods with cold-plugged devices fail. Configure another name in the device "
                "plugin, and pass it: --resource domain/name"
            )
            continue
        if count > len(offered[name]) > 0:
            source.on_note(
                f"a pod requests {count} of {name}, but this host has {len(offered[name])}: it "
                "waits for a node with more"
            )
        source.on_note(f"the pods wait until a device plugin offers {name}")
        if name not in kinds:
            source.on_note(f"no CDI specification has the kind {name}: {generating(name)}")


def _of_others(offered: Iterable[str], request: PodRequest) -> Iterator[str]:
    """The notes on requests that are not served by the device plugin for Kata; else none."""
    of_kubevirt = request.kind == "VirtualMachine"
    if request.by_claim or request.selector:
        yield _GATES_NEEDED if of_kubevirt else _CLAIMS_IGNORED
        yield _DRIVER_NEEDED
        if request.selector:
            yield _extended(request.resources[0].name)
    elif of_kubevirt:
        yield from map(_of_kubevirt, offered)


def _extended(resource: str) -> str:
    return (
        f"a DeviceClass offers {resource} from Kubernetes 1.36 on; the device plugin must offer "
        "these devices under another name: vfiomgr node run --alias"
    )


def _of_kubevirt(resource: str) -> str:
    return (
        f"the VMs wait until the device plugin offers {resource}: vfiomgr node run --consumer "
        "kubevirt. KubeVirt refuses them unless permittedHostDevices of its configuration has the "
        "resource, with externalResourceProvider: true"
    )


def runtime_class(  # noqa: PLR0913 - each is an option of the command
    source: HostSource,
    handler: str = DEFAULT_HANDLER,
    *,
    name: str | None = None,
    default_memory: str | None = None,
    config: str | None = None,
    cpus: int = 1,
    selectors: Sequence[str] | None = (),
) -> RuntimeClassRequest:
    """A RuntimeClass for a handler, with an overhead large enough for its VMs.

    `default_memory`, e.g. `8G`, is that of the configuration (of `config`, or the handler's).
    `selectors` are KEY=VALUE; None selects all nodes, () those with kata-deploy's label.

    Raises:
        UsageError: a name, a size or a selector is invalid.
        InvalidDocument: the configuration is not TOML.

    """
    chosen = tuple(parse_selector("--node-selector", text) for text in selectors or ())
    require_label("--handler", handler)
    memory = _default_memory(source, handler, default_memory, config)
    if selectors is not None and not chosen:
        label = "=".join(DEFAULT_SELECTOR[0])
        source.on_note(
            f"pods run only on nodes with the label {label} (kata-deploy sets it): "
            f"kubectl label node NODE {label}"
        )
    return RuntimeClassRequest(
        name=require_subdomain("--name", name or handler),
        handler=handler,
        overhead_mib=recommended_overhead_mib(memory),
        overhead_cpus=cpus,
        default_memory_mib=memory,
        node_selector=() if selectors is None else (chosen or DEFAULT_SELECTOR),
    )


def _default_memory(source: HostSource, handler: str, typed: str | None, config: str | None) -> int:
    """The given size, or that of the configuration, or Kata's usual one for GPUs."""
    if typed is not None:
        if config is not None:
            forbid_together("--default-memory", "--config", "both set the memory of a guest")
        return guest_mebibytes("--default-memory", typed)
    if config is not None:
        facts = gather.named_configuration(source, config)
    else:
        facts = gather.configuration_of(source, handler)
    settings = facts.settings
    if settings is None and facts.file is not None:
        raise InvalidDocument(facts.problem, "correct that place, or set --default-memory SIZE")
    if settings is not None and settings.default_memory_mib is not None:
        source.on_note(f"default_memory is {settings.default_memory_mib} MiB in {settings.path}")
        return settings.default_memory_mib
    why = facts.problem or "not set in the configuration"
    source.on_note(
        f"assuming default_memory {GPU_MEMORY_MIB} MiB, as in Kata's configurations for GPUs "
        f"({why}); set --default-memory to change it"
    )
    return GPU_MEMORY_MIB


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


def _plugs_devices(file: KataConfigurationFile, runtime: RuntimeName) -> bool:
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
    named = "BASE" if base is None else base.path
    message = f"configuration for the handler's shim not found: {path}"
    root = f" --root {host.root}" if host.root.strip("/") else ""
    hint = f"create it: vfiomgr kata config{root} --whole {named} --output {path}{otherwise}"
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
