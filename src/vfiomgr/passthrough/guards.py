"""What is refused, and what would lift the refusal: small rules over facts.

A guard looks at one function that a plan is about to take from the host and yields what speaks
against it. All findings are collected, so that a refusal names every obstacle at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import LEAVE_IT_OUT, Diagnostic, Option, Remedy, allow, blocker
from vfiomgr.passthrough.iommu_hints import iommu_remedy
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.vfio_drivers import best_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vfiomgr.passthrough.requests import Bind
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import DeviceUser, HostSnapshot, HostUse
    from vfiomgr.vgpu.model import Vgpu

    Guard = Callable[[HostSnapshot, PciDevice], Iterator["Diagnostic"]]

IN_NETWORK = "network-in-use"
PERSISTENCE_MODE = "persistence-mode"
"""Rules that others ask for by name."""


def bridge(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Bridges carry other devices and never go to a guest (vfio_pci_core_register_device)."""
    if device.is_bridge:
        yield blocker(
            "bridge",
            device,
            f"{device} is a bridge ({device.class_name}) and stays with the host",
            "name the device behind it instead; vfiomgr groups shows them",
        )


def iommu_off(host: HostSnapshot) -> Diagnostic | None:
    """What is to be said of a host that isolates no device, as far as can be seen."""
    if host.iommu.is_on:
        return None
    if not host.iommu.is_known:
        return blocker(
            "iommu",
            "",
            f"cannot tell whether the IOMMU is on: the recording has neither {IOMMU_GROUPS} nor "
            f"{IOMMU_UNITS}",
            "run vfiomgr on the host itself, or on a snapshot of it: vfiomgr snapshot > host.json",
        )
    unsafe = (
        "; no-IOMMU mode, which is switched on, would let a guest write to all of the memory"
        if host.vfio.is_noiommu_on
        else ""
    )
    return blocker(
        "iommu",
        "",
        "the IOMMU is off: this kernel has no IOMMU groups, so no device can go to a guest"
        + unsafe,
        iommu_remedy(host),
    )


def denied(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Devices that let a guest attack the host: vfio-pci refuses them, a variant need not."""
    is_served = host.vfio.is_denylist_off or best_variant(host.variants, device.modalias)
    if device.is_denied and not is_served:
        yield blocker(
            "denied-device",
            device,
            f"{device} is on the list of devices that vfio-pci denies, since a guest could "
            "harm the host through it",
            "if its guest is trusted, load vfio-pci with disable_denylist=1 (modprobe.d)",
        )


def silence(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """A function that fell off the bus serves nobody."""
    if not device.is_responsive:
        yield blocker(
            "silent-device",
            device,
            f"{device} does not answer: its configuration space reads as all ones",
            "power-cycle the device or the host; see dmesg",
        )


def isolation(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Without an IOMMU group a guest could write to all of the host's memory."""
    if host.iommu.is_on and device.iommu_group is None:
        yield blocker(
            "no-group",
            device,
            f"{device} is in no IOMMU group, so it cannot go to a guest",
            "no IOMMU covers this device; move it to another slot",
        )


def boot_display(_host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """The console's display: taken away, the host has no screen to tell what went wrong."""
    if device.is_boot_display:
        signs = ", ".join(device.display_signs)
        yield blocker(
            "boot-display",
            device,
            f"{device} is the console's display ({signs})",
            "make another display the primary one in the firmware",
            allow("boot-display", joint=", or, if this host is reached over the network, "),
            override="boot-display",
        )


def active_virtual_functions(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """vfio-pci refuses a physical function whose VFs exist (vfio_pci_core_register_device)."""
    count = len(device.virtual_functions)
    if not count:
        return
    vgpus = [v for v in host.vgpus if v.parent in {str(a) for a in device.virtual_functions}]
    first = (
        f"remove {_counted(len(vgpus), 'vGPU')} (vfiomgr vgpu list), then " if vgpus else "remove "
    )
    sriov = f"vfiomgr sriov set {device.address} 0"
    instead = (
        f"make a vGPU on one: vfiomgr vgpu create --parent {device.address} --type TYPE"
        if any(host.makes_vgpus(d) for d in host.devices if d.address in device.virtual_functions)
        else "bind a virtual function instead"
    )
    yield blocker(
        "has-virtual-functions",
        device,
        f"{device} has {_counted(count, 'active virtual function')}"
        + (f" that carry {_counted(len(vgpus), 'vGPU')}" if vgpus else ""),
        f"{first}the virtual functions with {sriov}, or {instead}",
    )


def carries_vgpus(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Unbinding a vGPU parent destroys its instances, and blocks while a guest runs."""
    uuids = [vgpu.name for vgpu in host.vgpus_of(str(device.address))]
    if uuids:
        yield blocker(
            "carries-vgpus",
            device,
            f"{device} carries {_counted(len(uuids), 'vGPU')}: {', '.join(uuids)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(uuids)}",
        )


def vgpu_parent(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Of a function that makes vGPUs, and of a virtual one that is good for nothing else."""
    if not host.makes_vgpus(device):
        yield from carries_vgpus(host, device)
        return
    made = next((vgpu.name for vgpu in host.vgpus_of(str(device.address))), None)
    is_whole = host.is_vendor_function(device)
    if made is None:
        yield blocker(
            "vgpu-function",
            device,
            f"{device} is a virtual function that {device.driver or 'its driver'} makes vGPUs of, "
            "and on a VFIO driver no guest can use it",
            f"vfiomgr vgpu create --parent {device.address} --type TYPE, then vfiomgr libvirt "
            f"hostdev {device.address if is_whole else 'UUID'}",
            allow(
                "vgpu-function",
                then=", after which it can be no vGPU until all virtual functions are made anew",
                joint="; or ",
            ),
            override="vgpu-function",
        )
    else:
        yield blocker(
            "carries-vgpus",
            device,
            f"{device} is a vGPU on its driver {device.driver}, from where it goes to the guest"
            if is_whole
            else f"{device} carries the vGPU {made}",
            f"{'give it' if is_whole else 'its vGPU goes to the guest'}: vfiomgr libvirt hostdev "
            f"{made}; or end the vGPU first: vfiomgr vgpu remove {made}",
        )


def host_use(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Disks and interfaces that the host uses, and GPUs that their driver keeps."""
    for use in host.host_uses or ():
        if use.address == device.address:
            yield _use_diagnostic(device, use)


def _use_diagnostic(device: PciDevice, use: HostUse) -> Diagnostic:
    match use.kind:
        case "mounted-disk":
            return blocker(
                "mounted-disk",
                device,
                f"{device} holds a disk that the host uses: {use.what}",
                use.lift or "unmount it",
                LEAVE_IT_OUT,
                allow("mounted-disk"),
                override="mounted-disk",
            )
        case "default-route":
            return blocker(
                "default-route",
                device,
                f"{device} carries the default route: interface {use.what}",
                "move the route",
                LEAVE_IT_OUT,
                allow("default-route"),
                override="default-route",
            )
        case "network":
            return blocker(
                IN_NETWORK,
                device,
                f"{device} is in use by the network: {use.what}",
                use.lift or "move what uses it",
                LEAVE_IT_OUT,
                allow("in-use"),
                override="in-use",
            )
        case "persistence-mode":
            return blocker(
                PERSISTENCE_MODE,
                device,
                f"{device} is in persistence mode, so its driver would never let it go: {use.what}",
                f"nvidia-smi -i {device.address} -pm 0, and stop nvidia-persistenced",
                allow("in-use"),
                override="in-use",
            )


def open_nodes(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """A driver's unbind may wait for ever for the last user of its nodes."""
    users = (*host.users_of(frozenset(device.nodes)), *host.users_below(device))
    if users:
        yield blocker(
            "in-use",
            device,
            f"{device} is open in {_named(users)}",
            "stop these processes",
            allow("in-use"),
            override="in-use",
        )


def held_by_guest(host: HostSnapshot, holder: PciDevice | Vgpu) -> Iterator[Diagnostic]:
    """A VFIO driver's unbind, and a vGPU's remove, block until the guest is gone.

    See vfio_unregister_group_dev and mdev_device_remove below drivers/vfio.
    """
    users = host.users_of(host.guest_nodes(holder))
    if not users:
        return
    yield blocker(
        "held-by-guest",
        holder,
        f"{holder} is held by {_named(users)}",
        "shut the guest down or detach it from the guest first; with --allow in-use the kernel "
        "waits for it, and vfiomgr until its --timeout",
        override="in-use",
    )


def stuck(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Whoever touches a function whose removal has not returned waits for it too."""
    if device.stuck is not None:
        users = host.holders(device)
        yield blocker(
            "stuck-device",
            device,
            f"{device} is stuck in the kernel: {device.stuck} has not returned"
            + (f", held by {_named(users)}" if users else ""),
            f"{'end what holds it' if users else 'see dmesg; a reboot ends it'}, "
            "then vfiomgr recover",
        )


def _named(users: Iterable[DeviceUser]) -> str:
    return ", ".join(dict.fromkeys(str(user) for user in users))


TAKING: tuple[Guard, ...] = (
    bridge,
    denied,
    silence,
    isolation,
    boot_display,
    active_virtual_functions,
    vgpu_parent,
    host_use,
    open_nodes,
    held_by_guest,
)
"""Before a function is taken from its host driver; by bind, and by libvirt itself.

A reset, which takes none, asks its own choice of them (`passthrough/reset.py`).
"""

RELEASING: tuple[Guard, ...] = (bridge, held_by_guest)
"""Before a function is taken from a VFIO driver."""


def host_data(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """What the host keeps on a function, or reaches through it, where no part can be left out.

    Persistence mode is none of it: NVIDIA's programs, which the undoing of a run calls, set it.
    """
    for diagnostic in _uses_but(host, device, kept=False):
        yield diagnostic.without("only")


def kept_initialised(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Persistence mode alone, of which a use count is left that no open file shows."""
    yield from _uses_but(host, device, kept=True)


def _uses_but(host: HostSnapshot, device: PciDevice, *, kept: bool) -> Iterator[Diagnostic]:
    """Diagnostics of the host's uses that are persistence mode, or those that are not."""
    for use in host.host_uses or ():
        if use.address == device.address and (use.kind == "persistence-mode") is kept:
            yield _use_diagnostic(device, use)


UNDOING: tuple[Guard, ...] = (held_by_guest, open_nodes, host_data)
"""Before functions are put back where a run had them from, or go with their number."""


def taking(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """All that speaks against taking functions from their host drivers."""
    off = iommu_off(host)
    if off is not None and devices:
        yield off  # and nothing else matters until it is on
        return
    yield from _all(TAKING, host, devices)


def releasing(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """All that speaks against giving functions back."""
    yield from _all(RELEASING, host, devices)


def undoing(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """All that speaks against putting functions back where they were, either way."""
    yield from _all(UNDOING, host, devices)


def _all(
    guards: Sequence[Guard], host: HostSnapshot, devices: Sequence[PciDevice]
) -> Iterator[Diagnostic]:
    """What the guards say; of a function that is stuck, nothing else matters."""
    for device in devices:
        for guard in (stuck,) if device.stuck else guards:
            yield from guard(host, device)


def foreign_members(
    host: HostSnapshot,
    devices: Sequence[PciDevice],
    request: Bind,
    going: frozenset[PciAddress] = frozenset(),
) -> Iterator[Diagnostic]:
    """Members of the groups that would stay on host drivers: no guest could own such a group.

    Those that are `going` to guests too, by other parts of a plan, do not stay.
    """
    taken = {device.address for device in devices} | going
    slots = {device.address.slot for device in devices}
    for number in sorted({d.iommu_group for d in devices if d.iommu_group is not None}):
        staying = [d for d in blockers(host.group_members(number)) if d.address not in taken]
        for members, lift in (
            ([d for d in staying if d.is_bridge], ()),
            ([d for d in staying if not d.is_bridge], (_lift(staying, slots, request),)),
        ):
            if members:
                names = ", ".join(f"{d} on {d.driver}" for d in members)
                yield blocker(
                    "group-not-viable",
                    f"IOMMU group {number}",
                    f"IOMMU group {number} also holds {names}",
                    *lift,
                    "move the device to a slot that has a group of its own",
                    why="all of a group goes to one guest",
                )


def _lift(members: Iterable[PciDevice], slots: set[tuple[int, int, int]], request: Bind) -> Remedy:
    if request.only and all(device.address.slot in slots for device in members):
        return Remedy("", Option("not-only", "leave out --function-only"))
    return Remedy("", Option("with-group", "pass --with-group to take them too"))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
