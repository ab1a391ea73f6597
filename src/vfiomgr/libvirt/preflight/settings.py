"""Rules about what a domain sets for its devices: boot order, ROM, display, MAC address, token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, info, problem, warning
from vfiomgr.expressions import expression
from vfiomgr.guests.nvlink import nvlink_share
from vfiomgr.guests.vf_token import PROPERTY, owner_of
from vfiomgr.libvirt.build import vf_token
from vfiomgr.libvirt.model import KVM_IOAPIC, VENDOR_ID
from vfiomgr.libvirt.preflight.context import PreflightContext, sysfs
from vfiomgr.paths import MDEV_DEVICES
from vfiomgr.pci.model import CLASS_DISPLAY

if TYPE_CHECKING:
    from vfiomgr.vgpu.model import Vgpu

_CCW = "vfio-ccw"
_NVIDIA = "10de"
_WITH_BOOT_ROM = ("0100", "0104", "0107")
"""SCSI, RAID and SAS controllers."""
_CONSUMER = expression(r"GeForce|TITAN")
_BEFORE_465 = expression(r"\b(?:NV\d|G[89]\d|GT2\d\d|GF1\d\d)")
"""Chips whose last drivers are older than 465: GeForce 8 to 500."""


def wrong_model(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt compares it with the type's device_api (virMediatedDeviceCheckModel)."""
    for hostdev, vgpu in context.vgpus:
        api = _device_api(context, vgpu)
        if api is None or hostdev.model is None or api == hostdev.model:
            continue
        yield problem(
            "vgpu-model",
            f"{vgpu} is of {api}, but the domain has model='{hostdev.model}'",
            (
                context.cite(hostdev, f"model='{hostdev.model}'"),
                f"{MDEV_DEVICES}/{hostdev.name}/mdev_type/device_api: {api}",
            ),
            "libvirt compares them before it starts QEMU",
            f"write model='{api}' in line {hostdev.line}",
            subject=vgpu,
        )


def _device_api(context: PreflightContext, vgpu: Vgpu) -> str | None:
    for parent in context.host.vgpus.parents:
        if parent.name == vgpu.parent:
            return next((t.device_api for t in parent.types if t.id == vgpu.type), None)
    return None


def display_without_graphics(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt checks it when it reads the domain (qemuValidateDomainMdevDefVFIOPCI)."""
    if context.domain.has_graphics:
        return
    for hostdev in context.hostdevs:
        if hostdev.display:
            yield problem(
                "display-without-graphics",
                f"{hostdev.name} has display='on', but the domain has no graphics",
                (
                    context.cite(hostdev, "display='on'"),
                    f"{context.at(context.domain.line('devices'))}: no <graphics>",
                ),
                "QEMU shows the image of the device through VNC or SPICE",
                "add <graphics type='vnc'/> to <devices>, or write display='off' in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )


def several_ramfb(context: PreflightContext) -> Iterator[Diagnostic]:
    """The firmware has one configuration file for ramfb: etc/ramfb (hw/display/ramfb.c)."""
    with_ramfb = [hostdev for hostdev in context.hostdevs if hostdev.ramfb]
    if len(with_ramfb) > 1:
        names = ", ".join(hostdev.name for hostdev in with_ramfb)
        yield problem(
            "several-ramfb",
            f"{len(with_ramfb)} devices have ramfb='on': {names}",
            tuple(context.cite(hostdev, "ramfb='on'") for hostdev in with_ramfb),
            "the firmware of a guest supports only one ramfb framebuffer",
            context.fix(
                f"keep ramfb='on' only in line {with_ramfb[0].line}",
                f"omit ramfb for all but {with_ramfb[0].name}",
            ),
        )


def vgpu_boot_order(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "booting from assigned devices is not supported by mediated devices" (67).

    It allows an order for disks of s390 (vfio-ccw), which are not vGPUs.
    """
    for hostdev in context.hostdevs:
        is_vgpu = hostdev.kind == "mdev" and hostdev.model != _CCW
        if is_vgpu and hostdev.boot_order is not None:
            yield problem(
                "vgpu-boot-order",
                f"vGPU {hostdev.name} has a boot order",
                (context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),),
                f"{context.fix('libvirt rejects the domain: ', '')}a guest cannot boot from a "
                "mediated device, even with ramfb",
                context.fix(
                    f"remove <boot order='{hostdev.boot_order}'/> from the element in line "
                    f"{hostdev.line}",
                    f"omit boot-order of {hostdev.name}",
                ),
                subject=hostdev.name,
            )


def boot_order(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "per-device boot elements cannot be used together with os/boot elements" (67)."""
    if not context.domain.has_os_boot:
        return
    for hostdev in context.domain.hostdevs:
        if hostdev.boot_order is None:
            continue
        line = context.domain.line("os/boot")
        yield problem(
            "boot-order-twice",
            f"{hostdev.name} has a boot order, but <os> has one too",
            (
                context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),
                f"{context.at(line)}: <boot dev>",
            ),
            "libvirt rejects a domain with both",
            f"remove <boot dev> in line {line} and give the disk a <boot order> instead",
            subject=hostdev.name,
        )


def rom_file(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU reads it as it starts: "failed to find romfile"."""
    for hostdev in context.domain.hostdevs:
        path = hostdev.rom_file
        if path is None:
            continue
        if not path.startswith("/"):
            yield warning(
                "rom-relative",
                f"the ROM of {hostdev.name} has a relative path: {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"),),
                "QEMU looks for it among its own files and exits if it is missing"
                + context.fix("; libvirt's schema rejects it", ""),
                context.fix(
                    f"write an absolute path in line {hostdev.line}",
                    f"pass an absolute path for {hostdev.name}: rom=FILE",
                ),
                subject=hostdev.name,
            )
        elif context.files is not None and not context.files.get(path, True):
            yield problem(
                "rom-missing",
                f"the ROM of {hostdev.name} does not exist: {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"), f"no such file: {path}"),
                'QEMU exits with "failed to find romfile"',
                "install the ROM file, or "
                + context.fix(f"remove <rom file> in line {hostdev.line}", "omit rom=FILE")
                + " (most cards do not need it)",
                subject=hostdev.name,
            )


def option_rom(context: PreflightContext) -> Iterator[Diagnostic]:
    """A BIOS runs the option ROMs of all devices, which may wait for hardware."""
    for taken in context.seen:
        hostdev, device = taken.hostdev, taken.device
        is_storage = device.class_code.startswith(_WITH_BOOT_ROM)
        boots = hostdev.boot_order is not None or hostdev.rom_file is not None
        if context.domain.firmware == "efi" or not is_storage or boots or not hostdev.has_rom:
            continue
        yield info(
            "option-rom",
            f"the guest's BIOS runs the option ROM of {device}",
            (context.cite(hostdev, "no <rom>"), f"{sysfs(device)}/class: {device.class_code}"),
            "a guest needs it only to boot from these disks, and some of them wait for ever",
            context.fix(
                f"write <rom bar='off'/> into the element in line {hostdev.line}", "pass rombar=0"
            )
            + ", unless the guest boots from it",
            subject=device,
        )


def missing_token(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU cannot open such a function (EACCES)."""
    for taken in context.seen:
        owner = owner_of(context.host, taken.device)
        if owner is None or vf_token.is_in(context.domain, taken.hostdev):
            continue
        name = taken.hostdev.name
        yield problem(
            "vf-token-missing",
            f"{name} cannot be opened without a VF token",
            (context.cite(taken.hostdev), f"its physical function {owner} is on {owner.driver}"),
            "the user of the physical function sets the token, and the kernel asks for it",
            context.fix(
                f"write it with <qemu:override>: property {PROPERTY} of type string for the alias "
                "of the device",
                f"pass {name} with the option {PROPERTY}=UUID",
            )
            + f"; or return {owner.address} to its host driver: vfiomgr unbind {owner.address}",
            subject=name,
        )


def mac_addresses(context: PreflightContext) -> Iterator[Diagnostic]:
    """A pair with two MAC addresses: neither libvirt nor QEMU compares them.

    The guest pairs by them (failover_get_bymac in net/core/failover.c of Linux,
    docs/system/virtio-net-failover.rst of QEMU). libvirt sets that of `<interface type='hostdev'>`,
    and chooses one if none is written.
    """
    for hostdev in context.hostdevs:
        interface = context.domain.interface_of(hostdev)
        if interface is None:
            continue
        is_set = hostdev.element == "interface"
        if interface.mac is not None and (not is_set or hostdev.mac == interface.mac):
            continue
        own = hostdev.mac if is_set else None
        wanted = interface.mac or own or "ADDRESS"
        lines = [interface.line] if interface.mac is None else []
        lines += [hostdev.line] if is_set and own != wanted else []
        shown = interface.mac or "no <mac>"
        shown += f" and {own or 'no <mac>'}" if is_set else ""
        summary = f"{interface.alias} and the device that it replaces have different MAC addresses"
        fix = f"write <mac address='{wanted}'/> in line {' and '.join(map(str, lines))}"
        if interface.mac is None and own is None:
            summary = f"{interface.alias} has no <mac> that the device that it replaces could have"
            fix = f"write <mac> with the address of {hostdev.name} in line {interface.line}"
        yield warning(
            "teaming-mac",
            summary,
            (
                f"{context.at(interface.line)}: {interface.alias}, {shown}",
                context.cite(hostdev, f"persistent='{interface.alias}'"),
            ),
            "the guest pairs the two by their MAC address; otherwise it loses the connection "
            "during a migration",
            fix,
            subject=hostdev.name,
        )


def unseen_mac_addresses(context: PreflightContext) -> Iterator[str]:
    """Devices whose MAC address is set on the host, where the kernel does not show it in files."""
    for hostdev in context.hostdevs:
        interface = context.domain.interface_of(hostdev)
        mac = None if interface is None or hostdev.element == "interface" else interface.mac
        if mac is not None:
            yield f"whether {hostdev.name} has the MAC address of {hostdev.partner}: {mac}"


def nvlink(context: PreflightContext) -> Iterator[Diagnostic]:
    """GPUs behind NVSwitches: all with all switches, or a partition of the fabric manager."""
    share = nvlink_share(context.host, {taken.device.address for taken in context.seen})
    if share is None or not (share.own_gpus or share.own_switches):
        return
    own, gpus = len(share.own_gpus), len(share.gpus)
    evidence = (
        *(
            f"{sysfs(switch)}: NVSwitch"
            + (f", in {context.guest}" if switch in share.own_switches else "")
            for switch in share.switches
        ),
        f"{context.guest} has {own} of {gpus} GPUs",
    )
    if share.is_divided:
        yield warning(
            "fabric-divided",
            f"{context.guest} has only {len(share.own_switches)} of {len(share.switches)} "
            f"NVSwitches and {own} of {gpus} GPUs",
            evidence,
            "a fabric cannot be divided: with a part of it CUDA does not start (error 802)",
            "assign all GPUs and all NVSwitches, or only GPUs",
        )
    elif share.needs_partition:
        yield info(
            "fabric-partition",
            f"{own} GPUs of an NVLink fabric are assigned without its switches",
            evidence,
            "only the Fabric Manager knows whether they form a partition; without one CUDA does "
            "not start (error 802)",
            "activate their partition on the host before the start: fmpm -a ID (fmpm -l lists "
            "them)",
        )


def code_43(context: PreflightContext) -> Iterator[Diagnostic]:
    """Drivers before 465 stop in a guest that reports KVM.

    Where it is hidden, they also look for Hyper-V and, with q35 of QEMU 4.0 or later, for the
    interrupt controller.
    """
    domain = context.domain
    if domain.kind != "kvm":
        return
    if domain.cpu.hides_kvm:
        yield from _half_hidden(context)
        return
    for taken in context.functions:
        device = taken.device
        if device.vendor_id != _NVIDIA or not device.class_code.startswith(CLASS_DISPLAY):
            continue
        if "GeForce" not in device.name or not _BEFORE_465.search(device.name):
            continue
        yield info(
            "code-43",
            f"the driver of {device} may stop with Code 43 in a guest",
            (context.cite(taken.hostdev), f"{sysfs(device)}: {device.name}"),
            "all drivers for a GeForce of this generation refuse to run on KVM (fixed in 465)",
            context.fix(
                "write <kvm><hidden state='on'/></kvm> into <features>, like vfiomgr libvirt "
                "domain --hide-kvm",
                "add kvm=off to -cpu",
            ),
            subject=device,
        )


def _half_hidden(context: PreflightContext) -> Iterator[Diagnostic]:
    wanted = [VENDOR_ID, *([KVM_IOAPIC] if "q35" in (context.domain.machine or "") else [])]
    lacking = [element for element in wanted if element not in context.domain.cpu.hiding]
    for taken in context.functions if lacking else ():
        device = taken.device
        is_display = device.class_code.startswith(CLASS_DISPLAY)
        if device.vendor_id == _NVIDIA and is_display and _CONSUMER.search(device.name):
            yield info(
                "code-43",
                f"a guest driver of {device} before 465 may stop with Code 43",
                (context.cite(taken.hostdev), f"<features> lacks {' and '.join(lacking)}"),
                "such a driver finds the hypervisor although KVM is hidden",
                f"install driver 465 or later in the guest, or write {' and '.join(lacking)} into "
                "<features>",
                subject=device,
            )


def muxless(context: PreflightContext) -> Iterator[Diagnostic]:
    """GeForce of laptops without outputs: their video BIOS is in ACPI (_ROM), not in the card."""
    for taken in context.functions:
        device = taken.device
        if not device.is_muxless:
            continue
        yield info(
            "code-43-laptop",
            f"the driver of {device} may stop with Code 43 in a guest",
            (
                context.cite(taken.hostdev),
                f"{sysfs(device)}: {device.name}, class {device.class_code} (without outputs)",
            ),
            "drivers for such a GPU may need its ROM by ACPI, the subsystem IDs of the laptop, and "
            "a battery, which a guest does not have",
            "if it stops: pass an ACPI table (SSDT) with _ROM and one with a battery, and set "
            f"x-pci-sub-vendor-id and x-pci-sub-device-id to {device.subsystem_id or 'its own'}",
            subject=device,
        )
