"""Pods for devices of a host, their class, and a check of the guest image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.generate import offers as ready_groups
from vfiomgr.containers.cdi.model import DEFAULT_KIND
from vfiomgr.containers.cdi.names import is_kind
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.kata.config.plan import GPU_MEMORY_MIB
from vfiomgr.kata.config.sizing import recommended_overhead_mib
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.image import check_guest_image, devices_named
from vfiomgr.kata.manifests.model import (
    RuntimeClassRequest,
    parse_selector,
    require_image,
    require_label,
    require_resource,
    require_subdomain,
)
from vfiomgr.kata.manifests.plan import (
    NAMINGS,
    Naming,
    PodDevice,
    PodOptions,
    offers,
    pods_for,
    resource_of_none,
    units_of,
)
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    guest_mebibytes,
)
from vfiomgr.kata.settings import read_settings
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import HostPath
from vfiomgr.units import mebibytes
from vfiomgr.usage import forbid_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.check.model import Report
    from vfiomgr.kata.explain.image import GuestImage
    from vfiomgr.kata.manifests.model import PodRequest
    from vfiomgr.kata.model import KataConfigurationFile
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

__all__ = [
    "NAMINGS",
    "Naming",
    "check_image",
    "pods",
    "runtime_class",
]

DEFAULT_SELECTOR = (("katacontainers.io/kata-runtime", "true"),)
"""The label that kata-deploy gives to nodes where it has installed Kata."""


# ---- kata check-image


def check_image(source: HostSource, *addresses: str, config: str | None = None) -> Report:
    """Whether the guest of a configuration can use devices, or all GPUs that are ready.

    Raises:
        UsageError: the host is a recorded one, or has no such configuration.
        UnknownDevice: the host has no such device.

    """
    source.require_live(
        "a snapshot holds no files of Kata",
        "run it on the host itself, or with --root",
    )
    return check_guest_image(_guest_image(source, config), _devices(source, addresses))


def _devices(source: HostSource, addresses: tuple[str, ...]) -> list[PciDevice]:
    host = source.scan_devices()
    if not addresses:
        known = (d for d in host.devices if d.is_graphics_or_accelerator)
        return [device for device in known if host.is_ready_for_guests(device)]
    return [host.device(host.parse_address(text)) for text in addresses]


def _guest_image(source: HostSource, config: str | None) -> GuestImage:
    """What the configuration says, and what is there of it."""
    file = _image_configuration(source, config)
    settings = read_settings(file.path, file.text, file.drop_ins)
    return gather.image_of(source.tree, settings)


def _image_configuration(source: HostSource, config: str | None) -> KataConfigurationFile:
    """The one that is named, or the first of those that are usual.

    Raises:
        UsageError: there is none.

    """
    if config is None:
        facts = gather.configuration_of(source, DEFAULT_HANDLER)
    else:
        facts = gather.read_settings_of(source.tree, (HostPath(config),))
    if facts.file is not None:
        return facts.file
    message = f"cannot read a configuration of Kata: {', '.join(facts.looked_for)}"
    raise UsageError(message, "name one: --config FILE; or install Kata Containers")


# ---- kata pod, kata runtimeclass


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
) -> tuple[PodRequest, ...]:
    """Pods whose VMs receive devices: those of `addresses`, or one for each resource.

    `memory` is the limit of the container, e.g. `16G`; the VM has default_memory besides.

    Raises:
        UsageError: a name or a size cannot be read.
        Refusal: a bridge or a mediated device was named.

    """
    host = source.scan()
    if resource is not None:
        require_resource("--resource", resource)
    units = _units(host, addresses)
    offered = {resource: units} if resource else offers(units, naming, DEFAULT_KIND)
    options = PodOptions(
        kind="Deployment" if deployment else "Pod",
        name=require_label("--name", name),
        namespace=None if namespace is None else require_label("--namespace", namespace),
        runtime_class=require_subdomain("--runtime-class", runtime_class),
        image=None if image is None else require_image("--image", image),
        memory_mib=mebibytes("--memory", memory),
        cpus=cpus,
        count=count,
    )
    offered = offered or {resource_of_none(naming, DEFAULT_KIND): ()}
    wanted = pods_for(offered, options, together=bool(addresses))
    _tell(source, host, offered, wanted)
    return wanted


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[PodDevice, ...]:
    """The IOMMU groups of what was named, or all that a guest can take now.

    Raises:
        Refusal: a bridge or a mediated device was named.

    """
    if not addresses:
        return tuple(PodDevice(offer.functions) for offer in ready_groups(host))
    return units_of(host, devices_named(host, addresses))


def _tell(
    source: HostSource,
    host: HostSnapshot,
    offered: dict[str, tuple[PodDevice, ...]],
    requests: tuple[PodRequest, ...],
) -> None:
    """What is still missing for the pods to start."""
    units = [unit for found in offered.values() for unit in found]
    if not units:
        source.on_note(
            "nothing is ready for a guest yet: vfiomgr bind ADDRESS; or vfiomgr vgpu create"
        )
    lead = [unit.lead for unit in units]
    tell_how_to_bind(source, host, [d for d in lead if not host.is_ready_for_guests(d)])
    asked = {item.name: item.count for request in requests for item in request.resources}
    for name, count in asked.items():
        if not is_kind(name):
            source.on_note(
                f"{name} can be no kind of CDI: vendor and class have two characters or more, the "
                "first a letter. Kata looks for what the kubelet tells of in the kind that is the "
                "resource: pods fail with cold-plugged devices. Have the device plugin call it "
                "otherwise, and write that: --resource domain/name"
            )
            continue
        if count > len(offered[name]) > 0:
            source.on_note(
                f"a pod asks for {count} of {name}, and on this host there is "
                f"{len(offered[name])}: it waits for a node with more"
            )
        source.on_note(
            f"the pods wait until a device plugin offers {name}; a CDI specification of that kind "
            f"comes from: vfiomgr cdi generate --kind {name}"
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
    """A RuntimeClass for a handler, with an overhead that its VMs fit in.

    `default_memory`, e.g. `8G`, is that of the configuration (of `config`, or the handler's).
    `selectors` are KEY=VALUE; None selects all nodes, () those with kata-deploy's label.

    Raises:
        UsageError: a name, a size or a selector cannot be read.
        InvalidDocument: the configuration is no TOML.

    """
    chosen = tuple(parse_selector("--node-selector", text) for text in selectors or ())
    require_label("--handler", handler)
    memory = _default_memory(source, handler, default_memory, config)
    return RuntimeClassRequest(
        name=require_subdomain("--name", name or handler),
        handler=handler,
        overhead_mib=recommended_overhead_mib(memory),
        overhead_cpus=cpus,
        default_memory_mib=memory,
        node_selector=() if selectors is None else (chosen or DEFAULT_SELECTOR),
    )


def _default_memory(source: HostSource, handler: str, typed: str | None, config: str | None) -> int:
    """What was typed, else what the configuration says, else what those for GPUs say.

    Raises:
        InvalidDocument: the configuration is there, and is no TOML.

    """
    if typed is not None:
        if config is not None:
            forbid_together("--default-memory", "--config", "both say how much memory a guest has")
        return guest_mebibytes("--default-memory", typed)
    if config is not None:
        facts = gather.named_configuration(source, config)
    else:
        facts = gather.configuration_of(source, handler)
    settings = facts.settings
    if settings is None and facts.file is not None:
        raise InvalidDocument(facts.problem, "correct that place, or tell --default-memory SIZE")
    if settings is not None and settings.default_memory_mib is not None:
        source.on_note(f"default_memory is {settings.default_memory_mib} MiB in {settings.path}")
        return settings.default_memory_mib
    why = facts.problem or "it is not set there"
    source.on_note(
        f"default_memory is taken to be {GPU_MEMORY_MIB} MiB, as in Kata's configurations for "
        f"GPUs ({why}); --default-memory says otherwise"
    )
    return GPU_MEMORY_MIB
