"""Rules about single functions: no answer, duplicates, reset, D3cold, firmware framebuffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vfiomgr.check.driver_rules import gpus, of_containers
from vfiomgr.check.model import Readiness, command_line, rebuild_initramfs
from vfiomgr.diagnostic import Diagnostic, Remedy, finding, info, problem, warning
from vfiomgr.documents.text import parse_toml
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.readiness_hints import bind_remedy
from vfiomgr.passthrough.reset import LOST_BY_RESET, LOST_SOURCE, VENDOR_RESET_GPUS
from vfiomgr.paths import IOMMU_UNITS
from vfiomgr.pci.model import CLASS_VGA, PciDevice
from vfiomgr.snapshot.named import UNIDENTIFIED
from vfiomgr.units import counted, size
from vfiomgr.value import values_by_key

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


_AMD, _NVIDIA = "1002", "10de"
_OWN_RESET = "device_specific"
_VENDOR_RESET = "vendor_reset"
_FAILED = "vendor-reset-failed"
_PAGE = "https://github.com/gnif/vendor-reset"
_OOPS_AT_UNBIND = frozenset({"7550"})
"""Navi 48: Radeon RX 9070 and 9070 XT."""
_OOPS_SOURCE = "https://github.com/CachyOS/linux-cachyos/issues/1023"
_ARI_SOURCE = "https://github.com/GPUOpen-LibrariesAndSDKs/MxGPU-Virtualization/issues/18"
_DEVICES = "/sys/bus/pci/devices"
SMALL_BAR = 256 << 20
"""BAR 0 of a graphics card without Resizable BAR."""


def _is_amd(device: PciDevice) -> bool:
    is_gpu = device.vendor_id == _AMD and device.is_graphics_or_accelerator
    return is_gpu and device.physical_function is None


def _of(host: HostSnapshot, ids: frozenset[str]) -> list[PciDevice]:
    """GPUs that could be assigned; the console's display on a host driver is excluded."""
    return [
        d
        for d in host.devices
        if _is_amd(d) and d.device_id in ids and (d.is_on_vfio or not d.is_boot_display)
    ]


def reset_trouble(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs that may not start again after the kernel's resets."""
    found = _of(host, frozenset(VENDOR_RESET_GPUS))
    devices = [d for d in found if _OWN_RESET not in d.reset_method]
    if devices:
        yield warning(
            "amd-reset",
            "an AMD GPU may not start in a guest a second time",
            (*map(_family, devices), f"{_PAGE} lists these device IDs"),
            "after the kernel's resets these GPUs may not initialize again until a power cycle",
            _own_reset(devices, is_loaded=facts.module(_VENDOR_RESET).is_present),
        )
    logged = {one.address: one.text for one in facts.kernel_log or () if one.name == _FAILED}
    failed = [d for d in found if d not in devices and str(d.address) in logged]
    if failed:
        yield warning(
            "amd-reset",
            "vendor-reset failed to reset an AMD GPU",
            (*map(_family, failed), *(f"kernel log: {logged[str(d.address)]}" for d in failed)),
            "it may need the SMU of the GPU (BACO reset), which the guest halts at shutdown",
            f"update vendor-reset to a newer state ({_PAGE}: since May 2026 it resets Vega 10 by "
            "its PSP, without the SMU), or reboot the host between guests",
        )


def _family(device: PciDevice) -> str:
    methods = f"; {_place(device)}: {' '.join(device.reset_method)}" if device.reset_method else ""
    return f"{device} is {VENDOR_RESET_GPUS[device.device_id]}, {_ids(device)}{methods}"


def _place(device: PciDevice) -> str:
    return f"{_DEVICES}/{device.address}/reset_method"


def _own_reset(devices: Sequence[PciDevice], *, is_loaded: bool) -> str:
    """Return the remedy; since Linux 5.15 reset_method must be set, too."""
    places = " ".join(_place(d) for d in devices if d.reset_method)
    tell = f"echo {_OWN_RESET} | tee {places}" if places else ""
    if is_loaded:
        again = " (again at each boot: in a unit of systemd for example)" if tell else "check dmesg"
        return f"use the loaded module vendor_reset before the first guest: {tell}{again}"
    commands = f"modprobe vendor-reset{' && ' if tell else ''}{tell}"
    return f"install the module vendor-reset ({_PAGE}); at boot before the first guest: {commands}"


def lost_by_reset(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs whose configuration space reads as all ones after a reset by VFIO."""
    devices = _of(host, LOST_BY_RESET)
    if devices:
        yield warning(
            "amd-lost-by-reset",
            "an AMD Instinct GPU may be lost after its guest ends, until the host reboots",
            (*(f"{d}, {_ids(d)}" for d in devices), f"{LOST_SOURCE} reports it"),
            "after a reset by VFIO the configuration space of MI300X and MI355X reads as all ones, "
            "and neither removing the function nor a rescan restores it",
            "assign virtual functions of AMD's driver gim, which are not affected; for an entire "
            "GPU, plan a reboot of the host after each guest",
        )


def oops_at_unbind(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs for which a kernel failure on unbind from vfio-pci was reported."""
    devices = _of(host, _OOPS_AT_UNBIND)
    if devices:
        names = " ".join(str(d.address) for d in devices)
        yield warning(
            "amd-unbind",
            "the kernel may fail when this AMD GPU is unbound from vfio-pci",
            (
                *(f"{d}, {_ids(d)}" for d in devices),
                f"{_OOPS_SOURCE} reports it for Linux 7.2.2",
                *((f"this host runs Linux {host.kernel.release}",) if host.kernel.release else ()),
            ),
            "a fault in vfio_pci_core_sriov_configure leaves the function unusable until a reboot; "
            "libvirt unbinds it when a guest with managed='yes' stops",
            "use managed='no' in the guest",
            bind_remedy(f"vfiomgr bind --persist {names}", devices, persist=True, joint=", and: "),
        )


def gim_without_ari(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs of which AMD's GIM cannot create virtual functions."""
    for device in host.devices:
        for found in guards.gim_without_ari(host, device):
            yield warning(
                found.rule,
                found.summary,
                (f"{_DEVICES}/{device.address}/ari_enabled: 0", f"{_ARI_SOURCE} reports it"),
                "without ARI the host does not find the virtual functions on their bus",
                *found.remedies,
                subject=device,
            )


@cache
def _faults() -> tuple[dict[str, Any], ...]:
    text = (files(__package__) / "gpu_faults.toml").read_text(encoding="utf-8")
    return tuple(parse_toml(text).values())


def reported_faults(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs of models with a fault that was reported in public."""
    for fault in _faults():
        devices = [
            d
            for d in gpus(host)
            if _ids(d) in fault["ids"]
            and d.physical_function is None
            and (not fault.get("large_bar") or any(bar.size > SMALL_BAR for bar in d.bars))
        ]
        cold = [d for d in devices if fault.get("d3cold") and d.d3cold_allowed]
        command = f"vfiomgr bind {' '.join(str(d.address) for d in cold)} --no-d3cold"
        without = bind_remedy(f"bind it with: {command}", cold, no_d3cold=True, joint="; ")
        if devices:
            yield finding(
                "gpu-fault",
                fault.get("severity", "warning"),
                fault["fault"],
                (*(f"{d}, {_ids(d)}" for d in devices), f"{fault['source']} reports it"),
                fault["why"],
                fault["remedy"],
                *((without,) if cold else ()),
            )


def _ids(device: PciDevice) -> str:
    return f"{device.vendor_id}:{device.device_id}"


_WEAK = frozenset({"bus", "pm"})


def none(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report a host without PCI functions, e.g. in a container or an empty recording."""
    unidentified = host.pci_unidentified
    if host.devices:
        return
    if unidentified:
        count = counted(len(unidentified), "function")
        yield problem(
            "no-devices",
            "no PCI function can be identified",
            (f"{_DEVICES}: {count}, e.g. {unidentified[0]}: {UNIDENTIFIED}",),
            "vfiomgr cannot determine which of them can be assigned",
            "record these files of each function too, or run vfiomgr on the host itself",
        )
    else:
        yield problem(
            "no-devices",
            "no PCI function found",
            (f"{_DEVICES}: {host.pci_unlisted or 'it is empty'}",),
            "there is no device to assign",
            "run vfiomgr with access to the host's /sys; in a virtual machine, add a PCI device",
        )


def silence(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report functions that fell off the bus."""
    for device in host.devices:
        for diagnostic in guards.silence(host, device):
            yield warning(
                "silent-device",
                f"{device} does not answer",
                (f"{_DEVICES}/{device.address}/config reads as all ones",),
                "it fell off the bus: no driver and no guest can use it",
                diagnostic.remedy,
                subject=device,
            )


def unassigned_bars(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report functions with BARs for which the kernel found no address."""
    for device in host.devices:
        for found in () if device.is_bridge else guards.unassigned_bar(host, device):
            place = f"{_DEVICES}/{device.address}/resource"
            shown = (
                f"{place}: flag 20000000 (unset) of {b.index}"
                for b in device.bars
                if b.is_unassigned
            )
            why = "neither a driver of the host nor a guest can use it"
            yield warning(
                found.rule,
                found.summary,
                tuple(shown),
                why,
                *found.remedies,
                subject=device,
            )


def same_identifiers(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report identical GPUs, including the console's display."""
    alike: dict[tuple[str, str], list[PciDevice]] = defaultdict(list)
    for device in host.devices:
        is_whole = device.physical_function is None
        if device.is_graphics_or_accelerator and is_whole and not device.is_nvswitch:
            alike[device.vendor_id, device.device_id].append(device)
    for (vendor, model), devices in alike.items():
        if len(devices) > 1:
            yield info(
                "same-pci-ids",
                f"{len(devices)} GPUs have the PCI IDs {vendor}:{model}",
                tuple(f"{d}{', the console' if d.is_boot_display else ''}" for d in devices),
                "binding by PCI IDs (vfio-pci.ids=, new_id) binds all of them",
                "bind by address: vfiomgr bind ADDRESS",
            )


def no_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs for which the kernel has no reset method."""
    devices = [d for d in _resettable_gpus(host) if not d.reset_method]
    by_place = values_by_key((host.is_integrated(d), d) for d in devices)
    for is_of_cpu, alike in by_place.items():
        why = (
            "VFIO can only reset all functions below the port together, if all are on VFIO drivers"
        )
        remedy = "bind the entire slot, as vfiomgr does by default; then start, stop and start a "
        remedy += "guest as a test"
        if is_of_cpu:
            why = "a reset of its bus is not possible, because it has other functions of the CPU; "
            why += "a second start, or a reboot of the guest, may hang guest and host"
            remedy = "reboot the host between two starts, and do not reboot the guest; or let the "
            remedy += "guest disable the GPU before it shuts down (RadeonResetBugFix in Windows)"
        yield warning(
            "no-reset",
            f"{_counted(alike)} no reset method",
            tuple(f"{_DEVICES}/{d.address}/reset_method is absent or empty" for d in alike),
            f"the next guest may fail to initialize it; {why}",
            remedy,
        )


def weak_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs with only a bus or power-management reset."""
    facts = host.readiness
    is_loaded = facts is not None and facts.module(_VENDOR_RESET).is_present
    devices = [d for d in _resettable_gpus(host) if d.reset_method and set(d.reset_method) <= _WEAK]
    if devices:
        yield info(
            "weak-reset",
            f"{_counted(devices)} no function-level reset",
            tuple(
                f"{_DEVICES}/{d.address}/reset_method: {' '.join(d.reset_method)}"
                + (f"; vendor_reset does not support {_ids(d)}" if is_loaded and _is_amd(d) else "")
                for d in devices
            ),
            "a bus reset affects all functions below the port, and a power-management reset may "
            "keep state: some GPUs do not start a second time",
            "start, stop and start a guest as a test; if the second start fails, reboot the host "
            "between guests, or disable the GPU in the guest before it shuts down",
        )


def _counted(devices: Sequence[PciDevice]) -> str:
    return "1 GPU has" if len(devices) == 1 else f"{len(devices)} GPUs have"


def _resettable_gpus(host: HostSnapshot) -> list[PciDevice]:
    """GPUs whose reset methods are known; none before Linux 5.15 or without the attribute.

    GPUs with known reset problems are excluded (`amd_resets`).
    """
    if not any(d.reset_method for d in host.devices):
        return []
    whole = (d for d in gpus(host) if d.physical_function is None and d.is_responsive)
    known = VENDOR_RESET_GPUS.keys() | LOST_BY_RESET | _OOPS_AT_UNBIND
    return [d for d in whole if not (_is_amd(d) and d.device_id in known)]


def fabric(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs for guests that an NVLink fabric connects: without it CUDA does not start."""
    own = [d for d in gpus(host) if d.vendor_id == _NVIDIA and d.is_on_vfio]
    switches = host.nvswitches
    if not own or not switches:
        return
    place = "on the host, and activate a partition of the GPUs before a guest starts (fmpm -a)"
    if all(switch.is_on_vfio for switch in switches):
        guests = {user.pid for device in own for user in host.holders(device)}
        shared = "leave the NVSwitches to the driver nvidia of the host, set FABRIC_MODE=1 (shared "
        shared += f"NVSwitch mode) in fabricmanager.cfg, and run nvidia-fabricmanager {place}"
        one = "run nvidia-fabricmanager in the guest, which needs all NVSwitches and all GPUs"
        remedy = shared if len(guests) > 1 else f"{one}; for several guests, {shared}"
    else:
        remedy = f"run nvidia-fabricmanager {place}"
    yield info(
        "fabric-manager",
        f"{counted(len(own), 'GPU')} for guests of an NVLink fabric",
        tuple(f"{switch} is on {switch.driver or 'no driver'}" for switch in switches),
        "several of these GPUs start CUDA only after the Fabric Manager has initialized the fabric "
        "(error 802); one GPU alone does not need it",
        remedy,
    )


def without_node(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs whose NUMA node the firmware of a host with several does not report."""
    nodes = host.topology.nodes if host.topology is not None else ()
    devices = [d for d in gpus(host) if d.numa_node is None]
    is_read = any(device.numa_node is not None for device in host.devices)
    if devices and is_read and len(nodes) > 1 and host.kernel.runs_on is None:
        yield info(
            "numa-unknown",
            f"the NUMA node of {counted(len(devices), 'GPU')} is unknown",
            (
                *(f"{_DEVICES}/{device.address}/numa_node: -1" for device in devices),
                f"this host has {len(nodes)} NUMA nodes",
            ),
            "guests and pods cannot be placed near it; a kubelet with topologyManagerPolicy "
            "single-numa-node places pods without regard to it, and an old one may refuse them",
            "update the firmware, or look for settings of NUMA nodes in its setup; if a kubelet "
            "refuses pods (TopologyAffinityError), update the kubelet",
        )


def i915_vfs(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report i915-sriov-dkms with parameters that leave the GPU without virtual functions."""
    given = facts.module("i915").parameters or {}
    line = host.kernel.command_line
    refusing = [name for name in ("enable_guc", "max_vfs") if given.get(name) == "0"]
    ones = [one for name in refusing for one in facts.parameter(line, "i915", name)]
    in_force = [one for one in ones if not one.ignored]
    files = [one.place for one in in_force if not one.place.startswith("/proc/")]
    is_set = len(in_force) == len(refusing) and all(one.value != "0" for one in in_force)
    for device in host.devices:
        is_able = device.driver == "i915" and device.sriov_totalvfs and not device.sriov_numvfs
        if not is_able or not refusing:
            continue
        if "max_vfs" in given:
            yield info(
                "i915-vfs",
                f"the parameters of i915 give {device} no virtual functions",
                (*(f"/sys/module/i915/parameters/{n}: {given[n]}" for n in given), *files),
                "i915 with SR-IOV creates none with max_vfs=0, or without GuC (enable_guc=3)",
                f"{rebuild_initramfs(host)}, which may have the files without them, and reboot"
                if files and is_set
                else i915_words(host, device),
            )


def i915_words(host: HostSnapshot, device: PciDevice) -> str:
    """The parameters of i915-sriov-dkms (README of strongtz/i915-sriov-dkms)."""
    return (
        f"add i915.enable_guc=3 i915.max_vfs={device.sriov_totalvfs} module_blacklist=xe to the "
        f"kernel command line{command_line(host)}, and reboot"
    )


def d3cold(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs that the kernel may power off while they are idle."""
    if (facts.module("vfio_pci").parameters or {}).get("disable_idle_d3") == "Y":
        return
    whole = (d for d in gpus(host) if d.d3cold_allowed and d.physical_function is None)
    devices = [
        d for d in whole if d.driver not in of_containers(facts) and not guards.is_for_gim(host, d)
    ]
    if devices:
        yield info(
            "d3cold",
            "D3cold is allowed for idle GPUs",
            tuple(
                f"{_DEVICES}/{d.address}/d3cold_allowed: 1"
                + (f", power_state {d.power_state}" if d.power_state else "")
                for d in devices
            ),
            "vfio-pci lets idle functions sleep; if the port cuts their power, a few devices do "
            "not wake up until the host is power-cycled",
            bind_remedy(
                "if a GPU disappears this way, bind it with: "
                f"vfiomgr bind {devices[0].address} --no-d3cold",
                devices[:1],
                no_d3cold=True,
            ),
            Remedy("if it is on VFIO already, write 0 to its d3cold_allowed", joint="; "),
        )


def address_width(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report IOMMUs that are narrower than the CPU, whose width QEMU gives to guests."""
    own, widths = host.kernel.cpu_address_bits, facts.iommu_widths
    narrow = min(widths.values(), default=None)
    if own is None or narrow is None or own <= narrow or not gpus(host):
        return
    yield info(
        "address-width",
        f"the CPU has {own} address bits, but the IOMMU translates only {narrow}",
        (
            f"/proc/cpuinfo: {own} bits physical",
            *(
                f"{IOMMU_UNITS}/{unit}/intel-iommu/cap: {width} bits"
                for unit, width in widths.items()
            ),
        ),
        "guests with the CPU's width place 64-bit BARs where VFIO cannot map them "
        '("VFIO_MAP_DMA failed", -22)',
        f"limit the addresses of guests: <maxphysaddr mode='passthrough' limit='{narrow}'/> "
        f"(libvirt 9.3), or -cpu host,host-phys-bits-limit={narrow}; vfiomgr libvirt domain and "
        "qemu args do",
    )


def resizable_bar(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report AMD's cards whose BAR 0 the firmware made larger, as guests may not expect it."""
    for device in host.devices:
        yield from large_bar(host, device)


def large_bar(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Report a card of AMD whose BAR 0 is larger than without Resizable BAR."""
    bar = next((one for one in device.bars if not one.index), None)
    if bar is None or bar.size <= SMALL_BAR or not device.class_code.startswith(CLASS_VGA):
        return
    if not _is_amd(device) or host.is_integrated(device):
        return
    fix = "turn Resizable BAR off in the firmware setup, which applies to all cards"
    if bar.sizes is None or SMALL_BAR in bar.sizes:
        unbound = f"vfiomgr unbind {device.address}; " if device.is_on_vfio else ""
        smaller = f"{unbound}vfiomgr bind --bar 0=256M {device.address}"
        fix = f"bind it with a smaller BAR: {smaller}; or {fix}"
    yield info(
        "resizable-bar",
        f"Resizable BAR is on for {device}",
        (f"{_DEVICES}/{device.address}/resource: BAR 0 of {size(bar.size)}",),
        "with a BAR larger than 256 MiB some guests (macOS, Windows) show nothing, or report "
        "Code 43",
        f"if a guest shows nothing: {fix}",
        subject=device,
    )


def gvt_g(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GVT-g, which newer GPUs do not have: is_supported_device of i915/intel_gvt.c."""
    for parent in host.vgpus.parents:
        if parent.family != "mdev" or parent.driver != "i915":
            continue
        yield info(
            "gvt-g",
            f"vGPUs of {parent.name} use GVT-g, which Intel no longer develops",
            (f"{_DEVICES}/{parent.name}/mdev_supported_types", "MAINTAINERS: S: Odd Fixes"),
            "GVT-g is only for GPUs up to the 10th generation of Core CPUs (Comet Lake); intel/gvt-"
            "linux is archived since October 2024",
            "for new hosts choose GPUs with SR-IOV, whose virtual functions vfiomgr sriov creates",
            subject=parent.name,
        )


def without_mdevctl(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report libvirt without the program that it creates mediated devices with."""
    tools = facts.distribution.tools if facts.distribution is not None else ()
    daemons = [tool for tool in ("libvirtd", "virtqemud") if tool in tools]
    parents = [parent for parent in host.vgpus.parents if parent.family == "mdev"]
    if daemons and parents and "mdevctl" not in tools:
        yield info(
            "mdevctl-missing",
            "libvirt cannot create mediated devices: mdevctl is not installed",
            (*(f"{daemon} is installed" for daemon in daemons), "mdevctl: no such program"),
            "libvirt runs mdevctl for them (virsh nodedev-create, OpenStack); vGPUs that vfiomgr "
            "or the kernel created do not need it",
            "install the package mdevctl, and restart libvirt's daemon; or create them with: "
            "vfiomgr vgpu create",
        )


def firmware_framebuffer(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report a framebuffer that vfio-pci does not remove."""
    for device in host.devices:
        for found in guards.firmware_framebuffer(host, device):
            names = ", ".join(device.framebuffers)
            is_vga = device.class_code.startswith(CLASS_VGA)
            is_later = is_vga and not device.is_on_vfio
            kept = "" if is_vga else "; vfio-pci removes it from VGA functions only"
            yield finding(
                found.rule,
                "info" if is_later else "warning",
                f"the firmware's framebuffer uses the memory of {device}",
                (f"/proc/iomem: {names} below {device.address}", f"class {device.class_code}"),
                f"the framebuffer occupies the function's BAR (\"can't reserve\" in dmesg){kept}",
                *guards.freeing(host, device, command_line(host)),
                subject=device,
            )
