"""What releases of Kata do wrong with devices, by the tags of kata-containers/kata-containers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, problem, warning
from vfiomgr.kata.explain.context import ON_ROOT_BUS, Q35, PodContext, chain_break
from vfiomgr.kata.facts import GUEST_KERNEL, NO_PORT, KataSettings
from vfiomgr.kata.model import OLDEST, KataRelease
from vfiomgr.units import Version, counted, size
from vfiomgr.value import values_by_key

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

_VFIO_SINCE: dict[str, dict[str, Version | None]] = {
    "go": {"firecracker": None, "stratovirt": None, "dragonball": Version(3, 3)},
    "rs": {
        "firecracker": None,
        "dragonball": Version(3, 3),
        "clh": Version(3, 3),
        "cloud-hypervisor": Version(3, 3),
    },
}
"""Hypervisors that take VFIO devices only from a release on, or never (None): HotplugAddDevice in
virtcontainers/fc.go and stratovirt.go, add_device in runtime-rs/crates/hypervisor/src/*/
inner_device.rs, where Dragonball's call was a comment up to 3.2. Only runtime-rs has Dragonball."""
_WITHOUT_HOST_NODES = Version(1, 10, 3)
"""kata-containers/runtime#2550, with its backport in #2627."""
_CGROUP_WITH_DEVICES = Version(1, 11, 2)
"""kata-containers/runtime#2606 and #2775, with its backport #2810."""
_MAPS_SINCE, _MAPS_GUEST_KERNEL = Version(2, 4), Version(3, 6)
"""The agent translates PCIDEVICE_*: 78dff468bf; also for devices of guest-kernel: 3624573b12."""
_MAPS_COLD, _MAPS_BY_CONTAINER = Version(3, 32), Version(3, 15)
"""The Go runtime names cold-plugged devices to the agent: e6777f0866; one map for each container,
removed with it: 248d04c20c."""
_ENDPOINT_PORTS = Version(3, 3)
_DROPS_DEVICES = (Version(3, 14), Version(3, 17))
"""createDevices in virtcontainers/container.go: since 419b5ed715, up to 2fd2cd4a9b."""
_SMALL_PORTS = (Version(2, 3), Version(2, 5))
"""ACPI hot plug of QEMU 6.1 or later, before root ports reserve addresses (e7e7dc9dfe)."""
_PORT_WINDOW = 32 << 20
_ACPI_HOT_PLUG = Version(2, 3)
"""Before, pciehp of a guest kernel 5.x may lose a device that is plugged while it boots
(kata-containers/runtime#2890 and #3091, kata-containers#1147); from here on ACPI plugs them."""
NETWORKS, _SRIOV = "k8s.v1.cni.cncf.io/networks", "PCIDEVICE_"


def configured_faults(release: KataRelease, settings: KataSettings) -> Iterator[Diagnostic]:
    """What keeps a configuration from giving guests any device."""
    name, known = settings.hypervisor, _VFIO_SINCE[release.runtime]
    first = known.get(name)
    if name in known and (first is None or release.version < first):
        later = "" if first is None else f", or Kata {first} or later"
        yield problem(
            "kata-hypervisor",
            f"{name} of {release} takes no VFIO devices",
            (f"{settings.path}: [hypervisor.{name}]",),
            "containers with a device do not start, or start without it",
            f"use a configuration of QEMU ([hypervisor.qemu]){later}",
            subject=settings.path,
        )
    if release.version < _WITHOUT_HOST_NODES:
        yield warning(
            "vfio-node-in-container",
            f"{release} creates the host's node /dev/vfio/GROUP in the container",
            (f"{settings.path}: {release}",),
            "the group is that of the host, which the guest does not have: programs in the "
            "container find a VFIO node that does not work",
            f"use Kata {_WITHOUT_HOST_NODES} or a later Kata",
            subject=settings.path,
        )
    is_confined = settings.value("runtime", "sandbox_cgroup_only") is True
    if is_confined and release.version < _CGROUP_WITH_DEVICES:
        yield warning(
            "kata-sandbox-cgroup",
            f"{release} may leave the VFIO group out of the device cgroup of the sandbox",
            (f"{settings.path}: sandbox_cgroup_only = true",),
            "QEMU may not open /dev/vfio/GROUP (Operation not permitted)",
            f"use Kata {_CGROUP_WITH_DEVICES} or a later Kata, or set sandbox_cgroup_only = false",
            subject=settings.path,
        )
    is_on_root_bus = settings.value("hypervisor.qemu", ON_ROOT_BUS) is True
    if is_on_root_bus and settings.machine_type == Q35 and release.version < _ACPI_HOT_PLUG:
        yield warning(
            "kata-early-hotplug",
            f"{release} hot-plugs devices into a root port while the guest's kernel still boots",
            (f"{settings.path}: {ON_ROOT_BUS} = true, machine_type = {Q35}",),
            "pciehp of guest kernels 5.x may take that for an unplug: the device disappears again "
            "at once (DEVICE_DELETED), or is not usable in the container",
            f"use Kata {_ACPI_HOT_PLUG} or a later Kata (hot plug by ACPI)",
            "use a guest kernel 4.19",
            f"for devices with small BARs set {ON_ROOT_BUS} = false (a bridge with SHPC)",
            subject=settings.path,
        )


def device_faults(settings: KataSettings, functions: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """What these functions, with all of their IOMMU groups, cannot have together in one guest."""
    if settings.hypervisor == _CLH and len(functions) > 1 and settings.hot_plug != NO_PORT:
        yield warning(
            "kata-hypervisor-devices",
            f"Cloud Hypervisor may refuse a second device: {counted(len(functions), 'function')}",
            (f"{settings.path}: [hypervisor.{_CLH}], hot_plug_vfio = {settings.hot_plug}",),
            "it may map BARs of several hot-plugged devices to one place: IommuDmaMap fails with "
            "error 17 (cloud-hypervisor#6845)",
            "use a configuration of QEMU ([hypervisor.qemu]) for several devices",
            subject=settings.path,
        )
    by_group = values_by_key((device.iommu_group, device) for device in functions)
    for number, members in by_group.items() if settings.has_iommu else ():
        if number is not None and len(members) > 1 and settings.hypervisor == _QEMU:
            mode = settings.vfio_mode
            yield warning(
                "kata-address-spaces",
                f"functions of IOMMU group {number} have separate groups in the guest: "
                + ", ".join(str(device.address) for device in members),
                (f"{settings.path}: enable_iommu = true, vfio_mode = {mode}",),
                "with an IOMMU in the guest each function behind its own port has an address space "
                'of its own, and QEMU may refuse the group ("used in multiple address spaces")',
                f"write {'' if mode == GUEST_KERNEL else _IN_GUEST}enable_iommu = false, or use a "
                "device that is alone in its group",
                subject=settings.path,
            )


_CLH, _QEMU = "clh", "qemu"
_IN_GUEST = f'vfio_mode = "{GUEST_KERNEL}" and '


def of_devices(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """The same for the devices that the kubelet could give to a pod."""
    functions = dict.fromkeys(one for each in context.picked for one in each.passed)
    return device_faults(settings, tuple(functions))


def of_configuration(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """The same for a pod with devices."""
    if context.requests_devices or NETWORKS in dict(context.pod.annotations):
        yield from configured_faults(context.release, settings)


def untranslated(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """PCIDEVICE_* of the SR-IOV device plugin, without a map of addresses in the agent."""
    release, pod = context.release, context.pod
    is_set = any(n.startswith(_SRIOV) for c in pod.containers for n, _ in c.environment)
    may_be = bool(pod.resources) and NETWORKS in dict(pod.annotations)
    is_lost = context.is_cold and not context.is_rs and release.has_plug_keys
    fixed = _MAPS_COLD if is_lost else _MAPS_GUEST_KERNEL
    is_early = _MAPS_SINCE <= release.version < fixed and settings.vfio_mode == GUEST_KERNEL
    if is_early and (is_set or may_be):
        hot = f", or Kata {_MAPS_GUEST_KERNEL} or later with hot_plug_vfio" if is_lost else ""
        yield chain_break(
            "kata-pcidevice",
            release,
            f"in vfio_mode {GUEST_KERNEL} the agent of {release} cannot translate the host's "
            f"addresses in {_SRIOV}* (set by the SR-IOV device plugin): the container does not "
            "start ('Unable to translate host PCI address' or 'No PCI mapping found')",
            f"use Kata {fixed} or later{hot}",
            is_certain=is_set,
        )


def portless(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Network interfaces on VFs, which the Go runtime plugs without the port of the configuration.

    kata-containers/kata-containers#8552; cold_plug_vfio and this message came with 3.2.
    """
    release, is_set = context.release, context.cold_plug != NO_PORT
    has_network = bool(context.pod.resources) and NETWORKS in dict(context.pod.annotations)
    if has_network and is_set and not context.is_rs and release.version < _ENDPOINT_PORTS:
        yield chain_break(
            "kata-endpoint-port",
            release,
            f"{release} does not pass cold_plug_vfio to network interfaces (physical endpoints): a "
            "VF in the pod's network namespace fails with 'port is not set for device'",
            f"use Kata {_ENDPOINT_PORTS} or later",
            is_certain=False,
            evidence=(f"{settings.path}: cold_plug_vfio = {context.cold_plug}",),
        )


def mapped_twice(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """A device of an init container and a later container."""
    release = context.release
    is_mapped = settings.vfio_mode != GUEST_KERNEL or release.version >= _MAPS_GUEST_KERNEL
    if not is_mapped or not _MAPS_SINCE <= release.version < _MAPS_BY_CONTAINER:
        return
    first: dict[str, str] = {}
    for container in context.pod.containers:
        for name, _ in container.devices:
            if name in first:
                yield chain_break(
                    "kata-mapped-twice",
                    name,
                    f"the agent of {release} keeps the guest address of a stopped container's "
                    f"device: after init container {first[name]}, container {container.name} may "
                    f"not start with {name} ('Conflicting guest address')",
                    f"use Kata {_MAPS_BY_CONTAINER} or a later Kata, or request {name} in one "
                    "container only",
                    is_certain=False,
                )
            elif container.role == "init container" and not container.is_sidecar:
                first[name] = container.name


def dropped(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Block volumes, which vfio mode with cold plug drops."""
    first, fixed = _DROPS_DEVICES
    is_cold = context.cold_plug != NO_PORT and not context.is_rs
    has_fault = is_cold and first <= context.release.version < fixed
    if not has_fault or settings.vfio_mode == GUEST_KERNEL:
        return
    for container in context.pod.containers:
        if container.block_volumes:
            yield chain_break(
                "kata-block-volumes",
                container.name,
                f"with vfio_mode vfio and cold_plug_vfio {context.release} drops all other devices "
                f"of a container: volumeDevices of {container.name} "
                f"({', '.join(container.block_volumes)}) are missing in it",
                f"use Kata {fixed} or a later Kata, or set vfio_mode = {GUEST_KERNEL} or "
                f"cold_plug_vfio = {NO_PORT}",
            )


def shared_groups(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Devices of several containers behind one bridge of the guest, in one IOMMU group there."""
    ports = {context.cold_plug, settings.hot_plug if context.is_hot else NO_PORT}
    is_bridged = "bridge-port" in ports or not context.has_root_ports
    using = [container.name for container in context.pod.containers if container.devices]
    if settings.vfio_mode == GUEST_KERNEL or not is_bridged or len(using) < 2:  # noqa: PLR2004
        return
    count = sum(number for _, number in context.pod.resources)
    keys = f"hotplug_vfio_on_root_bus = true and pcie_root_port = {count}"
    if context.release.version >= OLDEST:
        keys = f"the port to root-port and pcie_root_port = {count}"
    yield chain_break(
        "kata-guest-group",
        settings.path,
        f"devices of {', '.join(using)} are plugged into one bridge and share one IOMMU group of "
        "the guest: with vfio_mode vfio only one of the containers can open its device",
        f"set {keys}: behind root ports each device has its own group",
        is_certain=False,
    )


def small_ports(context: PodContext, _settings: KataSettings) -> Iterator[Diagnostic]:
    """BARs that a root port of the guest has no addresses for."""
    first, fixed = _SMALL_PORTS
    if not context.is_on_root_bus or not first <= context.release.version < fixed:
        return
    for device in dict.fromkeys(device for each in context.picked for device in each.functions):
        largest = max((bar.size for bar in device.bars), default=0)
        if largest > _PORT_WINDOW:
            yield chain_break(
                "kata-port-window",
                device.address,
                f"{context.release} reserves no window in the root port for a BAR of "
                f"{size(largest)} ({device.address}): the guest cannot place it, and the device "
                "disappears again",
                f"use a later Kata: {fixed} reserves the window, {OLDEST} can also plug the device "
                "before the guest starts (cold_plug_vfio)",
            )
