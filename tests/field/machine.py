"""What a typical machine has besides its PCI functions: firmware, kernel, distribution, memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from vfiomgr.paths import PCI_DEVICES
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fakes.sysfs import Sysfs
    from tests.field.situation import Listed, Machine

_CAP = 0xD2008C40400462
"""intel-iommu/cap of a desktop: 48 bits of page tables; bits 21:16 are the width less one."""
_ECAP_REMAPPING, _ECAP_PLAIN = "f050da", "f050d2"
_FLAGS = {"i": "fpu vmx", "v": "fpu hypervisor vmx", "a": "fpu svm"}
FIRST_WITH_CDEVS = (6, 6)
"""Linux in which distributions switch CONFIG_VFIO_DEVICE_CDEV on."""
_TOOLS = {
    "debian": ("update-initramfs", "update-grub", "apt-get"),
    "ubuntu": ("update-initramfs", "update-grub", "apt-get"),
    "pop": ("update-initramfs", "kernelstub", "bootctl", "apt-get"),
    "proxmox": ("update-initramfs", "update-grub", "proxmox-boot-tool", "apt-get"),
    "fedora": ("dracut", "grubby", "grub2-mkconfig", "dnf"),
    "bazzite": ("dracut", "grubby", "grub2-mkconfig", "rpm-ostree"),
    "centos": ("dracut", "grubby", "grub2-mkconfig", "dnf"),
    "rhel": ("dracut", "grubby", "grub2-mkconfig", "dnf"),
    "almalinux": ("dracut", "grubby", "grub2-mkconfig", "dnf"),
    "rocky": ("dracut", "grubby", "grub2-mkconfig", "dnf"),
    "opensuse-tumbleweed": ("dracut", "grub2-mkconfig", "zypper"),
    "arch": ("mkinitcpio", "grub-mkconfig", "bootctl", "pacman"),
    "garuda": ("dracut", "grub-mkconfig", "pacman"),
    "endeavouros": ("dracut", "bootctl", "pacman"),
    "gentoo": ("dracut", "grub-mkconfig"),
}
_LIKE = {
    "ubuntu": "debian",
    "pop": "ubuntu debian",
    "bazzite": "fedora",
    "centos": "rhel fedora",
    "almalinux": "rhel centos fedora",
    "rocky": "rhel centos fedora",
    "garuda": "arch",
    "endeavouros": "arch",
}
_VFIO_MODULES = {
    "vfio": "drivers/vfio/vfio.ko",
    "vfio_iommu_type1": "drivers/vfio/vfio_iommu_type1.ko",
    "vfio_pci_core": "drivers/vfio/pci/vfio-pci-core.ko",
    "vfio_pci": "drivers/vfio/pci/vfio-pci.ko",
    "mdev": "drivers/vfio/mdev/mdev.ko",
    "iommufd": "drivers/iommu/iommufd/iommufd.ko",
    "mlx5_vfio_pci": "drivers/vfio/pci/mlx5/mlx5-vfio-pci.ko",
    "nouveau": "drivers/gpu/drm/nouveau/nouveau.ko",
}
_ALIASES = ("alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci",)
_GRACE = "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci"
_DIRECTORIES = (
    "/etc/modprobe.d",
    "/etc/udev/rules.d",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/sys/firmware",
    "/usr/lib/systemd/system",
)
_PROCESS_ROOT = "/proc/sys/kernel"


def lay_out(sysfs: Sysfs, machine: Machine, listed: Sequence[Listed]) -> None:
    """Put the files of a machine in their places."""
    for path, text in (
        *_kernel(machine),
        *_processors(machine),
        *_memory(machine),
        *_distribution(machine),
    ):
        sysfs.put(path, text, 0o755 if "/sbin/" in path else 0o644)
    for path in (
        "/etc/modprobe.d",
        "/etc/udev/rules.d",
        "/etc/systemd/system",
        "/run/systemd/system",
    ):
        sysfs.make(path)
    sysfs.make("/sys/firmware")
    sysfs.make("/usr/lib/systemd/system")
    sysfs.put("/dev/null", "")
    sysfs.put("/dev/kvm", "")
    _lay_out_iommu(sysfs, machine, listed)


def _is_x86(machine: Machine) -> bool:
    return machine.kind.startswith(("intel", "amd", "virtual"))


def _is_intel(machine: Machine) -> bool:
    return machine.kind.startswith(("intel", "virtual"))


def _kernel(machine: Machine) -> Iterator[tuple[str, str]]:
    release = machine.kernel
    yield f"{_PROCESS_ROOT}/osrelease", release
    switch = "intel_iommu=on" if _is_intel(machine) and machine.iommu else ""
    usual = f"BOOT_IMAGE=/boot/vmlinuz-{release} root=/dev/mapper/root ro quiet {switch}".strip()
    yield "/proc/cmdline", usual if machine.cmdline is None else machine.cmdline
    library = f"/lib/modules/{release}"
    builtin = {"pci_stub": "drivers/pci/pci-stub.ko", "efifb": "drivers/video/fbdev/efifb.ko"}
    modules = dict(_VFIO_MODULES)
    if Version.parse(release) < Version(6, 2):
        modules["vfio_virqfd"] = "drivers/vfio/vfio_virqfd.ko"
    aliases = list(_ALIASES)
    if machine.kind.startswith("arm"):
        builtin["kvm"] = "arch/arm64/kvm/kvm.ko"
        modules["nvgrace_gpu_vfio_pci"] = "drivers/vfio/pci/nvgrace-gpu/nvgrace-gpu-vfio-pci.ko"
        aliases.append(_GRACE)
    if machine.vfio in ("built-in", "missing"):
        ours = {name: file for name, file in modules.items() if "vfio" in name}
        modules = {name: file for name, file in modules.items() if name not in ours}
        if machine.vfio == "built-in":
            builtin |= ours
    yield f"{library}/modules.dep", "\n".join(f"kernel/{file}:" for file in modules.values())
    yield f"{library}/modules.builtin", "\n".join(f"kernel/{file}" for file in builtin.values())
    yield f"{library}/modules.alias", "\n".join(aliases)
    yield f"/boot/config-{release}", "\n".join(_config(machine))
    yield "/sys/kernel/security/lockdown", "[none] integrity confidentiality"
    devices = "Character devices:\n  1 mem\n 10 misc\n195 nvidia-frontend\n"
    vfio = "510 vfio\n" + "511 vfio-dev\n" * (version_of(release) >= FIRST_WITH_CDEVS)
    yield "/proc/devices", f"{devices}{vfio}\nBlock devices:\n259 blkext"
    yield "/proc/iomem", "00001000-0009ffff : System RAM\n00100000-7fffffff : System RAM"


def version_of(release: str) -> tuple[int, ...]:
    """Major and minor number of a kernel release."""
    numbers = release.partition("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdecimal())


def _config(machine: Machine) -> Iterator[str]:
    how = {"built-in": "y", "missing": ""}.get(machine.vfio, "m")
    for option in ("VFIO", "VFIO_PCI"):
        yield f"CONFIG_{option}={how}" if how else f"# CONFIG_{option} is not set"
    if version_of(machine.kernel) >= FIRST_WITH_CDEVS:
        yield from ("CONFIG_IOMMUFD=m", "CONFIG_VFIO_DEVICE_CDEV=y")
    if _is_x86(machine):
        yield "CONFIG_IRQ_REMAP=y"


def _processors(machine: Machine) -> Iterator[tuple[str, str]]:
    if _is_x86(machine):
        vendor = "GenuineIntel" if _is_intel(machine) else "AuthenticAMD"
        lines = [
            "processor\t: 0",
            f"vendor_id\t: {vendor}",
            f"flags\t\t: {_FLAGS[machine.kind[0]]}",
            f"address sizes\t: {machine.cpu_bits} bits physical, 48 bits virtual",
        ]
        prefix = "IR-" * (machine.iommu and machine.remaps_interrupts)
        chips = (f"{prefix}IO-APIC    9-fasteoi   acpi", f"{prefix}PCI-MSI 520192-edge   eth0")
        rows = [f"{120 + n:4}:          0  {chip}" for n, chip in enumerate(chips)]
        yield "/proc/interrupts", "            CPU0\n" + "\n".join(rows)
    elif machine.kind == "power":
        lines = ["processor\t: 0", "cpu\t\t: POWER9, altivec supported", "platform\t: PowerNV"]
    else:
        lines = ["processor\t: 0", "CPU implementer\t: 0x41", "CPU part\t: 0xd4f"]
    yield "/proc/cpuinfo", "\n".join(lines)


def _memory(machine: Machine) -> Iterator[tuple[str, str]]:
    size, nodes = machine.memory << 20, machine.nodes
    pages = "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB"
    yield "/proc/meminfo", f"{_meminfo('', size)}\n{pages}"
    each = machine.cpus // nodes
    yield "/sys/devices/system/cpu/online", f"0-{machine.cpus - 1}"
    yield "/sys/devices/system/cpu/isolated", ""
    yield "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0"
    for node in range(nodes):
        place = f"/sys/devices/system/node/node{node}"
        yield f"{place}/cpulist", f"{node * each}-{(node + 1) * each - 1}"
        yield f"{place}/meminfo", _meminfo(f"Node {node} ", size // nodes)
        yield f"{place}/distance", " ".join("10" if n == node else "20" for n in range(nodes))
        for pages in ("2048", "1048576") if _is_x86(machine) else ():
            for name in ("nr_hugepages", "free_hugepages"):
                yield f"{place}/hugepages/hugepages-{pages}kB/{name}", "0"


def _meminfo(prefix: str, size: int) -> str:
    rows = {"MemTotal": size, "MemFree": size // 2, "MemAvailable": size * 3 // 4}
    more = {"Inactive(file)": size // 5, "SReclaimable": size // 50}
    return "\n".join(f"{prefix}{name}:{number:>15} kB" for name, number in (rows | more).items())


def _distribution(machine: Machine) -> Iterator[tuple[str, str]]:
    name, _, version = machine.os.partition(" ")
    identifier = "debian" if name == "proxmox" else name
    lines = [f"ID={identifier}", f'PRETTY_NAME="{name.title()} {version}"']
    if version:
        lines.append(f'VERSION_ID="{version}"')
    if name in _LIKE:
        lines.append(f'ID_LIKE="{_LIKE[name]}"')
    yield "/etc/os-release", "\n".join(lines)
    yield "/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:108::/:/bin/false"
    yield "/etc/group", "root:x:0:\nkvm:x:108:"
    for tool in (*_TOOLS.get(name, ()), *machine.programs):
        yield f"/usr/sbin/{tool}", "#!/bin/sh"
    if name == "proxmox":
        yield "/etc/pve/.version", version


def _lay_out_iommu(sysfs: Sysfs, machine: Machine, listed: Sequence[Listed]) -> None:
    """The tables of the firmware, and the units of the IOMMU with their attributes."""
    tables = "/sys/firmware/acpi/tables"
    sysfs.drop(tables)
    sysfs.drop("/sys/class/iommu")
    sysfs.drop("/sys/devices/virtual/iommu")
    sysfs.make("/sys/class/iommu")
    x86 = {"i": "DMAR", "v": "DMAR", "a": "IVRS"}
    table = x86[machine.kind[0]] if _is_x86(machine) else "IORT"
    if machine.kind not in ("power", "arm-board"):
        sysfs.put_bytes(f"{tables}/FACP", b"FACP", 0o400)
    if machine.firmware_iommu and machine.kind not in ("power", "arm-board"):
        sysfs.put_bytes(f"{tables}/{table}", _table(machine, table), 0o400)
    if machine.kind in ("power", "arm-board") and not sysfs.exists("/proc/device-tree"):
        sysfs.put("/proc/device-tree/model", "a board")
    if not machine.iommu:
        return
    unit, attributes = _unit(machine)
    for name, text in attributes.items():
        sysfs.put(f"{unit}/{name}", text)
    for each in listed:
        place = sysfs.target(PCI_DEVICES / each.address)
        if place is not None:
            sysfs.link(f"{unit}/devices/{each.address}", place)
            sysfs.link(f"{place}/iommu", unit)
    sysfs.link(f"/sys/class/iommu/{unit.rpartition('/')[2]}", unit)


def _table(machine: Machine, name: str) -> bytes:
    """DMAR or IVRS with width and flags; IORT with an ITS, and an SMMUv3 if that is enabled."""
    if name != "IORT":
        flags = 1 if machine.remaps_interrupts else 0
        return struct.pack("<4s32xBB", name.encode(), machine.iommu_bits - 1, flags).ljust(
            64, b"\0"
        )
    kinds = (0, 4) if machine.iommu else (0,)
    nodes = b"".join(struct.pack("<BH", kind, 24).ljust(24, b"\0") for kind in kinds)
    return struct.pack("<4s32xII4x", b"IORT", len(kinds), 48) + nodes


def _unit(machine: Machine) -> tuple[str, dict[str, str]]:
    """The first unit of the IOMMU: its directory and attributes."""
    if machine.kind.startswith("amd"):
        unit = "/sys/devices/pci0000:00/0000:00:00.2/iommu/ivhd0"
        return unit, {"amd-iommu/cap": "40f", "amd-iommu/features": "f77ef22294ada"}
    if _is_intel(machine):
        cap = _CAP | (machine.iommu_bits - 1) << 16
        ecap = _ECAP_REMAPPING if machine.remaps_interrupts else _ECAP_PLAIN
        unit = "/sys/devices/virtual/iommu/dmar0"
        return unit, {"intel-iommu/cap": f"{cap:x}", "intel-iommu/ecap": ecap}
    if machine.kind == "power":
        return "/sys/devices/virtual/iommu/iommu-phb0000", {"name": "iommu-phb0000"}
    return "/sys/devices/platform/arm-smmu-v3.0.auto/iommu/smmu3.0x0000000005000000", {}
