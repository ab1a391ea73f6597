"""Domains of ARM servers: machine virt with GICv3 and SMMUv3.

The machine has up to 512 CPUs. An accelerated SMMUv3 serves one root complex of the guest, and
needs iommufd (hw/arm/smmuv3-accel.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.guests.arm import ARM
from vfiomgr.guests.model import GuestBus, Reason
from vfiomgr.libvirt.model import DomainIommu, GuestHostdev
from vfiomgr.libvirt.releases import SMMU_ACCEL

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.units import Version

_MOST_VCPUS = 512


def check_request(request: DomainRequest) -> None:
    """Refuse options that only PCs have.

    Windows for ARM runs in such a machine (win-11 of osinfo-db), with virtio drivers (issue 177 of
    virtio-win/kvm-guest-drivers-windows). The Hyper-V interfaces are properties of x86 CPUs
    (target/i386 of QEMU).

    Raises:
        UsageError: one of them is given.
        Refusal: there are too many CPUs.
    """
    wrong = {
        "--firmware bios": request.firmware == "bios",
        "--hide-kvm": request.hides_kvm,
        "--secure-boot": request.has_secure_boot,
        f"--launch-security {request.launch_security}": request.launch_security is not None,
        "--looking-glass": request.looking_glass is not None,
        "--audio": request.has_sound,
        "--graphics spice": request.graphics == "spice",
        "--fixed-aperture": request.has_fixed_aperture,
        "--address-bits": request.address_bits is not None,
        f"--viommu {request.viommu}": request.viommu in ("intel", "amd"),
        "--disk …,bus=sata": any(disk.bus == "sata" for disk in request.disks),
        "the device option vga": any(d.options.has_vga for d in request.devices),
    }
    for option in (option for option, is_given in wrong.items() if is_given):
        message = f"cannot use {option} for {ARM}: machine virt does not support it"
        raise UsageError(message, "omit it")
    if request.is_windows:
        message = (
            f"cannot use --os windows for {ARM}: it writes the Hyper-V interfaces, timers and SATA "
            "disks of PCs"
        )
        remedy = (
            "omit it: the domain also runs Windows for ARM, with the ARM64 drivers of virtio-win "
            "for disks and networks"
        )
        raise UsageError(message, remedy)
    if request.vcpus > _MOST_VCPUS:
        message = f"{request.vcpus} CPUs are too many: machine virt supports {_MOST_VCPUS}"
        refuse("too-many-cpus", request.name, message, f"pass --vcpus {_MOST_VCPUS}")


def smmus_of(
    request: DomainRequest,
    buses: Sequence[GuestBus],
    hostdevs: Sequence[GuestHostdev],
    libvirt: Version,
) -> tuple[tuple[DomainIommu, ...], tuple[Reason, ...]]:
    """An accelerated SMMUv3 for each expander; without devices, one that is emulated.

    Raises:
        Refusal: this libvirt has none that works with host devices.
    """
    if request.viommu != "smmuv3":
        return (), ()
    if not any(not planned.device.is_unassigned for planned in hostdevs):
        return (DomainIommu("smmuv3"),), ()
    SMMU_ACCEL.require(libvirt, "an SMMUv3 for host devices")
    expanders = [bus.number for bus in buses if bus.kind == "expander"]
    text = "accelerated by the host's SMMUv3, which must be that of all devices behind its bus"
    return (
        tuple(DomainIommu("smmuv3", bus=index, is_accelerated=True) for index in expanders),
        (Reason("iommu", text),),
    )
