"""Safety checks: small rules over facts, each with its remedies.

A safety check examines one function that a plan would move, and yields the reasons to refuse. All
reasons are collected, so that an error names every obstacle at once.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import LEAVE_IT_OUT, Diagnostic, Option, Remedy, allow, blocker
from vfiomgr.passthrough.isolation import (
    iommu_off,
    isolation,
    missing_backend,
    reserved_region,
    separating,
    why_together,
)
from vfiomgr.pci.drivers import PLAIN, PLAIN_MODULE, best_variant
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import CLASS_DISPLAY, CLASS_VGA, pci_device
from vfiomgr.pci.slots import chipset_role
from vfiomgr.rules.runner import kernel_option
from vfiomgr.units import Version, counted, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Override
    from vfiomgr.passthrough.steps import Bind
    from vfiomgr.pci.model import Bar, PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder
    from vfiomgr.users.model import DeviceUser, HostUse

    Guard = Callable[[HostSnapshot, PciDevice], Iterator["Diagnostic"]]

IN_NETWORK = "network-in-use"
PERSISTENCE_MODE = "persistence-mode"
UNKNOWN = "users-unknown"
CHIPSET = "chipset-function"
"""Rule identifiers that other modules use."""
GIM = "gim"
"""AMD's driver. It creates virtual functions when it is loaded, at least one of each GPU (vf_num in
gim_config.c), and removes them when it is unloaded; sysfs cannot change them (gim_drv.c)."""
GIM_OPTIONS = (
    "set vf_num (and vf_fb in MiB in GIM for older GPUs) in /etc/gim_config, or as an option of "
    "the module gim in /etc/modprobe.d, which takes precedence; shut all guests down, then reboot "
    "and load gim early (loaded again later, it may find no contiguous memory); dmesg shows if "
    "this release of gim allows fewer, which a later release may raise"
)
"""How to change the virtual functions of GIM (amd/MxGPU-Virtualization#8)."""


def is_for_gim(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether GIM has an AMD GPU, or is loaded and it has no other driver."""
    is_free = device.driver is None and device.vendor_id == "1002" and GIM in host.pci_drivers
    return device.driver == GIM or is_free


def gim_without_ari(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse virtual functions of GIM that are addressed beyond the bridge's reach.

    GIM fails with "Fail to enable sriov, status = fffffffb" (GPUOpen-LibrariesAndSDKs/
    MxGPU-Virtualization#18); `ari_enabled` is that of the bridge (drivers/pci/pci-sysfs.c).
    """
    has_none = bool(device.sriov_totalvfs) and not device.sriov_numvfs
    if has_none and device.ari_enabled is False and is_for_gim(host, device):
        yield blocker(
            "gim-without-ari",
            device,
            f"GIM cannot create virtual functions of {device}: ARI is off on the port above it",
            "enable ARI forwarding in the firmware setup; if there is no such setting, update the "
            "firmware or use another slot",
        )


def bridge(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse bridges, which cannot be assigned (vfio_pci_core_register_device)."""
    if device.is_bridge:
        yield blocker(
            "bridge",
            device,
            f"{device} is a bridge ({device.class_name}) and cannot be assigned",
            "name the device behind the bridge; list them with: vfiomgr groups",
        )


INSTEAD = "use an add-in card or a USB device for the guest instead"
"""The remedy where a function of the chipset or the CPU cannot be assigned."""


def chipset(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse functions of the chipset with which a guest could harm the host's hardware."""
    role = chipset_role(device)
    if role is not None:
        yield blocker(
            CHIPSET, device, f"{device} is {role}, which must stay with the host", INSTEAD
        )


def stays_with_host(device: PciDevice) -> bool:
    """Whether a member of a group is never bound to VFIO: bridges, and what `chipset` refuses."""
    return device.is_bridge or chipset_role(device) is not None


def behind_controller(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function behind a VMD controller, which shares its IOMMU group and its DMA."""
    controller = host.controller_of(device)
    if controller is None:
        return
    others = [one for one in host.behind(controller) if one != device and not one.is_bridge]
    along = f", with {', '.join(str(one.address) for one in others)}" if others else ""
    is_free = next(_all(TAKING, host, (controller,)), None) is None
    yield blocker(
        "behind-controller",
        device,
        f"{device} is behind {controller} and cannot be assigned without it",
        *([f"assign the controller{along}: vfiomgr bind {controller.address}"] if is_free else []),
        "turn the controller off in the firmware setup (VMD), then bind the device",
    )


def denied(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse devices on vfio-pci's denylist, unless a variant driver accepts them."""
    is_served = host.vfio.is_denylist_off or best_variant(host.variants, device.modalias)
    if device.is_denied and not is_served:
        yield blocker(
            "denied-device",
            device,
            f"{device} is on vfio-pci's denylist: a guest could harm the host through it",
            "if the guest is trusted, load vfio-pci with disable_denylist=1 (modprobe.d)",
        )


def missing_driver(host: HostSnapshot, drivers: Iterable[str]) -> Iterator[Diagnostic]:
    """Refuse a kernel without vfio-pci, before host drivers are unbound.

    A built-in driver is registered; modules.dep lists what can be loaded. Xen's dom0 has no use
    for it, and is refused for its IOMMU.
    """
    is_known = bool(host.pci_drivers) and host.vfio_modules is not None
    if host.kernel.runs_on == "xen" and iommu_off(host) is not None:
        return
    if PLAIN in {*drivers}.difference(host.pci_drivers) and is_known:
        if PLAIN_MODULE in (host.vfio_modules or ()):
            return
        yield blocker(
            "vfio-pci",
            "",
            "this kernel has no vfio-pci: it is not loaded, and modules.dep does not list it",
            "install the package with this kernel's additional modules, or boot a generic kernel; "
            "to see what is missing: vfiomgr check",
        )


def silence(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function that fell off the bus, or is left of a removed card."""
    first, place = host.removed_first(device), pci_device(device.address)
    if first is not None:
        rule, what = "half-removed", f"is left of a card whose function {first} was removed"
        remedy = f"remove it too: echo 1 > {place}/remove; or find the card again: echo 1 > "
        remedy += "/sys/bus/pci/rescan"
    elif not device.is_responsive:
        rule, what = "silent-device", "does not answer: its configuration space reads as all ones"
        remedy = "check dmesg, then power-cycle the device or the host"
    else:
        return
    yield blocker(rule, device, f"{device} {what}", remedy)


def unassigned_bar(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function that the kernel cannot enable (pci_enable_resources, EINVAL)."""
    found = [bar for bar in device.bars if bar.is_unassigned]
    if found:
        names = ", ".join(f"BAR {bar.index} ({size(bar.size)})" for bar in found)
        yield blocker(
            "bar-not-assigned",
            device,
            f"{device} has no address for {names}, so the kernel cannot enable it",
            *_finding_room(host, max(found, key=lambda bar: bar.size)),
        )


def _finding_room(host: HostSnapshot, bar: Bar) -> Iterator[str | Remedy]:
    """What makes room for a BAR. It is aligned to its size, and memory occupies the first part."""
    bits = host.kernel.cpu_address_bits
    if bits is not None and bar.size * 2 >= 1 << bits:
        all_of_it = f"this CPU has {bits} address bits ({size(1 << bits)}) for memory and BARs"
        yield f"use another host, or less memory: {all_of_it}"
        return
    if host.kernel.runs_on == "guest":
        yield "give this virtual machine a larger window for BARs, on its host"
    elif bar.is_64bit:
        yield "enable above-4G decoding in the firmware setup"
    option = kernel_option("pci=realloc", host.kernel.words, then=" and reboot")
    if option.is_useful(host):
        yield option
    yield "remove other cards with large BARs"


_FIRST_EVICTING = Version(6, 0)
"""The first kernel whose vfio-pci removes the firmware's framebuffer (vfio_pci_vga_init), from VGA
functions only."""
_PLATFORM_DEVICE = "BOOTFB"
_PLATFORM_DRIVERS = {
    "efifb": "efi-framebuffer",
    "efidrm": "efi-framebuffer",
    "vesafb": "vesa-framebuffer",
    "vesadrm": "vesa-framebuffer",
    "simplefb": "simple-framebuffer",
    "simpledrm": "simple-framebuffer",
}
_SYSFB = "initcall_blacklist=sysfb_init"


def firmware_framebuffer(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function whose memory the firmware's framebuffer occupies.

    The kernel then refuses the BAR to vfio-pci (pci_request_selected_regions, EBUSY).
    """
    names = device.framebuffers
    version = host.kernel.version
    evicts = version is not None and version >= _FIRST_EVICTING and not device.is_on_vfio
    if not names or (evicts and device.class_code.startswith(CLASS_VGA)):
        return
    yield blocker(
        "firmware-framebuffer",
        device,
        f"{device} has the firmware's framebuffer in its memory ({', '.join(names)}), so no guest "
        "can use this memory",
        *freeing(host, device),
        override="boot-display",
    )


def freeing(host: HostSnapshot, device: PciDevice, how: str = "") -> Iterator[str | Remedy]:
    """How to free the memory of a framebuffer; `how` is how to change the kernel command line.

    A driver gives its memory back when it is unbound. BOOTFB belongs to the platform device
    (sysfb_create_simplefb in drivers/firmware/sysfb_simplefb.c), which stays.
    """
    names = device.framebuffers
    drivers = {_PLATFORM_DRIVERS[name] for name in names if name in _PLATFORM_DRIVERS}
    if drivers and _PLATFORM_DEVICE not in names:
        place = "/sys/bus/platform/drivers"
        yield "; ".join(f"echo {d}.0 > {place}/{d}/unbind" for d in sorted(drivers))
    option = kernel_option(_SYSFB, host.kernel.words, then=f"{how} and reboot")
    if option.is_useful(host):
        yield option
    elif _PLATFORM_DEVICE in names:
        yield f"boot a kernel without CONFIG_SYSFB_SIMPLEFB: {_SYSFB} has no effect on this one"
    displays = (d for d in host.devices if d.class_code.startswith(CLASS_DISPLAY))
    if any(other.address.slot != device.address.slot for other in displays):
        yield "make another display the primary one in the firmware setup"
    else:
        yield "add another display, and make it the primary one in the firmware setup"


def unusable(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Why no guest can use a function although it is on a VFIO driver and its group is viable."""
    yield from missing_backend(host)
    for guard in (silence, unassigned_bar, reserved_region, firmware_framebuffer):
        yield from guard(host, device)
    if device.has_lost_power:
        remedy = f"power-cycle the host; then: vfiomgr bind {device.address} --no-d3cold"
        yield blocker("stuck-in-d3cold", device, f"{device} does not wake up from D3cold", remedy)


def boot_display(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse the console's display: without it the host cannot show what went wrong."""
    if device.is_boot_display:
        signs = ", ".join(device.display_signs)
        yield blocker(
            "boot-display",
            device,
            f"{device} is the console's display ({signs})",
            "make another display the primary one in the firmware setup",
            f"see whether the desktop can release it: vfiomgr check console {device.address}",
            allow("boot-display", joint=", or, if you can reach this host over the network, "),
            override="boot-display",
        )


def active_virtual_functions(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a physical function with active VFs, as vfio_pci_core_register_device does."""
    count = len(device.virtual_functions)
    if not count:
        return
    vgpus = [v for v in host.vgpus.active if v.parent in {str(a) for a in device.virtual_functions}]
    first = (
        f"remove {counted(len(vgpus), 'vGPU')} (vfiomgr vgpu list), then " if vgpus else "remove "
    )
    instead = (
        f"create a vGPU on one: vfiomgr vgpu create --parent {device.address} --type TYPE"
        if any(
            host.vgpus.makes_vgpus(d) for d in host.devices if d.address in device.virtual_functions
        )
        else "bind a virtual function instead"
    )
    yield blocker(
        "has-virtual-functions",
        device,
        f"{device} has {counted(count, 'active virtual function')}"
        + (f" with {counted(len(vgpus), 'vGPU')}" if vgpus else ""),
        f"{first}the virtual functions: {removal(device)}; or {instead}",
    )


def removal(device: PciDevice) -> str:
    """The command that removes the virtual functions of a physical function."""
    if device.driver == GIM:
        return "modprobe -r gim (removes those of all GPUs on gim; shut their guests down first)"
    return f"vfiomgr sriov set {device.address} 0"


def carries_vgpus(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a vGPU parent: unbinding destroys its vGPUs, and blocks while a guest runs."""
    uuids = [vgpu.name for vgpu in host.vgpus.of(str(device.address))]
    if uuids:
        yield blocker(
            "carries-vgpus",
            device,
            f"{device} has {counted(len(uuids), 'active vGPU')}: {', '.join(uuids)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(uuids)}",
        )


def vgpu_parent(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function with vGPUs, and a VF that is usable only for vGPUs."""
    if not host.vgpus.makes_vgpus(device):
        yield from carries_vgpus(host, device)
        return
    made = next((vgpu.name for vgpu in host.vgpus.of(str(device.address))), None)
    is_whole = host.vgpus.is_vendor_function(device)
    if made is None:
        yield blocker(
            "vgpu-function",
            device,
            f"{device} is a virtual function for {device.driver or 'vendor'} vGPUs and cannot be "
            "passed through directly",
            *_assigning(
                f"vfiomgr vgpu create --parent {device.address} --type TYPE, then ",
                str(device.address) if is_whole else "UUID",
            ),
            allow(
                "vgpu-function",
                then=" (it can then host no vGPU until all virtual functions are created again)",
                joint="; or ",
            ),
            override="vgpu-function",
        )
    else:
        yield blocker(
            "carries-vgpus",
            device,
            f"{device} is an active vGPU and must stay on {device.driver}"
            if is_whole
            else f"{device} has the active vGPU {made}",
            *_assigning("assign the vGPU: ", made),
            Remedy(f"remove it: vfiomgr vgpu remove {made}", joint="; or "),
        )


def _assigning(before: str, name: str) -> tuple[Remedy, Remedy]:
    """The commands that write a vGPU for a guest, whatever monitor runs it."""
    return (
        Remedy(f"{before}vfiomgr libvirt hostdev {name}"),
        Remedy(f"vfiomgr qemu args {name}", joint=" or "),
    )


_OF_UNKNOWN: dict[str, Override] = {"disks": "mounted-disk", "input": "host-peripheral"}


def unknown_users(host: HostSnapshot, holder: Holder, *kinds: str) -> Iterator[Diagnostic]:
    """Refuse a holder whose users of these kinds could not be read."""
    for unknown in host.unknown_users_of(holder):
        if unknown.kind in kinds:
            override = _OF_UNKNOWN.get(unknown.kind, "in-use")
            yield blocker(
                UNKNOWN,
                holder,
                f"cannot tell whether {holder} is in use: {unknown.why}",
                unknown.lift,
                allow(override),
                override=override,
            )


def host_use(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse disks, interfaces and the seat of the host, and GPUs in persistence mode."""
    yield from unknown_users(host, device, "disks", "network", "input", PERSISTENCE_MODE)
    for use in _uses_of(host, device):
        yield _use_diagnostic(device, use)


def _uses_of(host: HostSnapshot, device: PciDevice) -> Iterator[HostUse]:
    """The uses of a function; a watchdog of the chipset is nothing that one could allow to take."""
    for use in host.users.host_uses or ():
        is_fixed = use.kind in _SERVING and stays_with_host(device)
        if use.address == device.address and not is_fixed:
            yield use


_USB = "connect a {} to another controller, or assign USB devices instead of the controller"
_SERVING = {
    "keyboard": ("host-keyboard", "has the host's keyboard", _USB.format("keyboard")),
    "mouse": ("host-mouse", "has the host's mouse", _USB.format("mouse")),
    "watchdog": (
        "host-watchdog",
        "has a watchdog of the host",
        "stop what keeps the watchdog running (RuntimeWatchdogSec= of systemd, or a daemon)",
    ),
    "tpm": (
        "host-tpm",
        "serves the host's TPM",
        "select a separate TPM in the firmware setup, if the mainboard has one",
    ),
    "console": (
        "host-console",
        "has a console of the host",
        "name another port in console= on the kernel command line, and reboot",
    ),
}
"""What serves the seat or the host: the rule, what the function is, and what changes that."""


def _use_diagnostic(device: PciDevice, use: HostUse) -> Diagnostic:
    match use.kind:
        case "mounted-disk":
            is_root = use.what.endswith(" on /")
            return blocker(
                "mounted-disk",
                device,
                f"{device} has a disk that the host uses: {use.what}",
                "use another disk controller for the guest"
                if is_root
                else use.lift or "unmount it",
                LEAVE_IT_OUT,
                *(() if is_root else (allow("mounted-disk"),)),
                override="mounted-disk",
            )
        case "default-route":
            return blocker(
                "default-route",
                device,
                f"{device} carries the default route: interface {use.what}",
                "move the route to another interface",
                LEAVE_IT_OUT,
                allow("default-route"),
                override="default-route",
            )
        case "network":
            return blocker(
                IN_NETWORK,
                device,
                f"{device} is in use by the host's network: {use.what}",
                use.lift or "remove it from the network configuration",
                LEAVE_IT_OUT,
                allow("in-use"),
                override="in-use",
            )
        case "persistence-mode":
            return blocker(
                PERSISTENCE_MODE,
                device,
                f"{device} is in persistence mode, so its driver never releases it: {use.what}",
                f"nvidia-smi -i {device.address} -pm 0, and stop nvidia-persistenced",
                allow("in-use"),
                override="in-use",
            )
        case kind:
            rule, said, remedy = _SERVING[kind]
            return blocker(
                rule,
                device,
                f"{device} {said}: {use.what}",
                remedy,
                LEAVE_IT_OUT,
                allow("host-peripheral"),
                override="host-peripheral",
            )


def open_nodes(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function with open nodes: its driver's unbind may wait forever for their users."""
    yield from unknown_users(host, device, "processes", "open-files")
    nodes = frozenset(node for one in (device, *host.behind(device)) for node in one.nodes)
    users = (*host.users.of_nodes(nodes), *host.users.below(device.address))
    if users:
        yield blocker(
            "in-use",
            device,
            f"{device} is in use by: {_named(users)}",
            _ending(users),
            allow("in-use"),
            override="in-use",
        )


def held_by_guest(host: HostSnapshot, holder: Holder) -> Iterator[Diagnostic]:
    """Refuse what a guest uses: unbinding from VFIO and removing a vGPU wait for the guest.

    See vfio_unregister_group_dev and mdev_device_remove in drivers/vfio.
    """
    users = host.users.of_nodes(host.guest_nodes(holder))
    if not users:
        return
    yield blocker(
        "held-by-guest",
        holder,
        f"{holder} is in use by: {_named(users)}",
        "shut the guest down or detach the device; with --allow in-use vfiomgr waits for the guest "
        "until --timeout, and the kernel without limit",
        override="in-use",
    )


def held_by_pod(host: HostSnapshot, holder: Holder) -> Iterator[Diagnostic]:
    """Refuse what the kubelet gave to a pod or a claim has, whether or not a pod has opened it.

    Also what a process may have open under another name, as a container can.
    """
    yield from unknown_users(host, holder, "pods", "open-files")
    pod = host.pod_of(holder)
    users = host.users.of_nodes(host.guest_nodes(holder)) if pod else ()
    if pod and all(user.pod != pod for user in users):
        yield blocker(
            "held-by-pod",
            holder,
            f"{holder} belongs to pod {pod}",
            _deleting(pod),
            allow("in-use"),
            override="in-use",
        )
    claim = host.claim_of(holder)
    if claim:
        namespace, _, name = claim.partition("/")
        yield blocker(
            "held-by-claim",
            holder,
            f"{holder} belongs to ResourceClaim {claim}",
            f"delete its pods, then: kubectl -n {quote(namespace)} delete resourceclaim "
            f"{quote(name)}",
            allow("in-use"),
            override="in-use",
        )
    age = host.allocated_ago(holder)
    if age is not None:
        yield blocker(
            "held-by-pod",
            holder,
            f"{holder} was given to a pod {age:.0f} s ago",
            "repeat the command in some seconds, when the name of the pod is known",
            allow("in-use"),
            override="in-use",
        )


def usable_by_pod(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function of a pod or a claim, unless the pod cannot use it on its present driver.

    A bind repairs such a function. On the vendor's own driver, it may be a vGPU.
    """
    if device.is_on_vfio or host.vgpus.is_vendor_function(device):
        yield from held_by_pod(host, device)


def assigned(host: HostSnapshot, holder: Holder) -> Iterator[Diagnostic]:
    """Refuse what a guest uses or a pod has."""
    yield from held_by_guest(host, holder)
    yield from held_by_pod(host, holder)


def stuck(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function that the kernel is still removing: every access to it would wait."""
    if device.stuck is not None:
        users = host.holders(device)
        yield blocker(
            "stuck-device",
            device,
            f"{device} is stuck in the kernel: {device.stuck} has not returned"
            + (f", in use by: {_named(users)}" if users else ""),
            f"{'stop these processes' if users else 'check dmesg, then reboot'}, "
            "then run: vfiomgr recover",
        )


def _deleting(pod: str) -> str:
    """How to delete a pod, NAMESPACE/NAME or a UID."""
    namespace, _, name = pod.partition("/")
    if name:
        return f"delete the pod: kubectl -n {quote(namespace)} delete pod {quote(name)}"
    columns = "UID:.metadata.uid,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
    find = f"kubectl get pods -A -o custom-columns={columns} | grep {quote(pod)}"
    return f"find the pod with this UID, and delete it: {find}"


def _ending(users: Iterable[DeviceUser]) -> str:
    """How to end processes: those of one pod, those of services, and others."""
    pods, services = {user.pod for user in users}, {_service(user) for user in users}
    if None not in services:
        return f"stop these services: systemctl stop {' '.join(sorted(filter(None, services)))}"
    only = pods.pop()
    return "stop these processes" if only is None or pods else _deleting(only)


def _service(user: DeviceUser) -> str | None:
    return user.unit if user.monitor == "services" else None


def _named(users: Iterable[DeviceUser]) -> str:
    return ", ".join(dict.fromkeys(str(user) for user in users))


TAKING: tuple[Guard, ...] = (
    bridge,
    chipset,
    behind_controller,
    denied,
    silence,
    unassigned_bar,
    isolation,
    reserved_region,
    boot_display,
    firmware_framebuffer,
    active_virtual_functions,
    vgpu_parent,
    host_use,
    open_nodes,
    held_by_guest,
    usable_by_pod,
)
"""Checks before a function leaves its host driver, by `bind` or by libvirt itself.

A reset uses its own selection (`passthrough/reset.py`).
"""

RELEASING: tuple[Guard, ...] = (bridge, assigned)
"""Checks before a function leaves a VFIO driver."""


def host_data(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function with disks or interfaces of the host, where none can be left out.

    Persistence mode is excluded, because NVIDIA's programs set it during a rollback.
    """
    yield from unknown_users(host, device, "disks", "network")
    for diagnostic in _uses_but(host, device, kept=False):
        yield diagnostic.without("only")


def kept_initialised(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse persistence mode only; it leaves a use count that no open file shows."""
    yield from _uses_but(host, device, kept=True)


def _uses_but(host: HostSnapshot, device: PciDevice, *, kept: bool) -> Iterator[Diagnostic]:
    """Return the diagnostics for persistence mode (`kept`), or for all other uses."""
    for use in _uses_of(host, device):
        if (use.kind == "persistence-mode") is kept:
            yield _use_diagnostic(device, use)


UNDOING: tuple[Guard, ...] = (assigned, open_nodes, host_data)
"""Checks before a rollback moves functions back or removes virtual functions."""


def taking(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Return all reasons not to take functions from their host drivers."""
    off = iommu_off(host)
    if off is not None and devices:
        yield off
        for device in devices:
            yield from _uses_but(host, device, kept=False)  # which an IOMMU does not change
        return
    yield from missing_backend(host) if devices else ()
    yield from _all(TAKING, host, devices)


def releasing(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Return all reasons not to return functions to the host."""
    yield from _all(RELEASING, host, devices)


TURNING_OFF: tuple[Guard, ...] = (
    boot_display,
    active_virtual_functions,
    vgpu_parent,
    host_use,
    open_nodes,
    assigned,
)
"""Checks before a function loses its power."""


def turning_off(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Return all reasons not to cut the power of functions."""
    yield from _all(TURNING_OFF, host, devices)


def undoing(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Return all reasons not to move functions back, in either direction."""
    yield from _all(UNDOING, host, devices)


def _all(
    guards: Sequence[Guard], host: HostSnapshot, devices: Sequence[PciDevice]
) -> Iterator[Diagnostic]:
    """Run the safety checks; for a stuck function only the check `stuck`."""
    for device in devices:
        for guard in (stuck,) if device.stuck else guards:
            yield from guard(host, device)


def foreign_members(
    host: HostSnapshot,
    devices: Sequence[PciDevice],
    request: Bind,
    going: frozenset[PciAddress] = frozenset(),
) -> Iterator[Diagnostic]:
    """Refuse groups with members that stay on host drivers: no guest could own such a group.

    What is behind one of the functions vanishes with its driver.

    `going` are members that other parts of a plan move to VFIO.
    """
    taken = {device.address for device in devices} | going
    taken |= {one.address for device in devices for one in host.behind(device)}
    along = {other.address for device in devices for other in host.slot(device)}
    for number in sorted({d.iommu_group for d in devices if d.iommu_group is not None}):
        own = [d for d in devices if d.iommu_group == number]
        staying = [d for d in blockers(host.group_members(number)) if d.address not in taken]
        fixed = [d for d in staying if stays_with_host(d)]
        others = [d for d in staying if d not in fixed]
        kept = {d.address: " and ".join(_kept(host, d, request)) for d in others}
        is_free = not fixed and not any(kept.values())
        lift = (_lift(staying, along, request),) if is_free else ()
        elsewhere = tuple(separating(host, own)) or (() if is_free else (INSTEAD,))
        for members in (fixed, others):
            if members:
                names = ", ".join(_staying(d, kept.get(d.address, "")) for d in members)
                if any(chipset_role(d) is not None for d in members):
                    names += ", which must stay with the host"
                yield blocker(
                    "group-not-viable",
                    f"IOMMU group {number}",
                    f"IOMMU group {number} also holds {names}",
                    *lift,
                    *elsewhere,
                    why=why_together(host, number),
                )


def _staying(device: PciDevice, reason: str) -> str:
    return f"{device} on {device.driver}{f', which {reason}' if reason else ''}"


def _kept(host: HostSnapshot, device: PciDevice, request: Bind) -> Iterator[str]:
    """Why --with-group would be refused for a member, apart from processes that can end."""
    for found in _all(TAKING, host, (device,)):
        ends = found.override == "in-use" and found.rule != IN_NETWORK
        is_its_own = found.summary.startswith(f"{device} ")
        if is_its_own and not ends and found.override not in request.allow:
            yield found.summary.removeprefix(f"{device} ")


def _lift(members: Iterable[PciDevice], along: set[PciAddress], request: Bind) -> Remedy:
    if request.only and all(device.address in along for device in members):
        return Remedy("", Option("not-only", "leave out --function-only"))
    return Remedy("", Option("with-group", "pass --with-group to bind them too"))
