"""The processors that the laboratory emulates, and QEMU's machine around each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests import debian

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Emulator:
    """A QEMU of another Debian release, unpacked in the cache: the machine has none for these."""

    release: str
    package: str
    path: str

    def command(self) -> tuple[str, ...]:
        """Return its first arguments; fetched first if it is not in the cache."""
        program = debian.program(self.release, self.package, self.path)
        data = debian.unpacked(self.release, self.package) / "usr/share/qemu"
        return (*program.command, "-L", str(data))


@dataclass(frozen=True)
class Architecture:
    """A kind of processor, by its name in Debian's archive."""

    name: str
    machine: tuple[str, ...]
    """QEMU's arguments for machine and processor."""
    iommu: tuple[str, ...]
    """QEMU's arguments that add an IOMMU to it."""
    iommu_on: tuple[str, ...]
    iommu_off: tuple[str, ...]
    """Arguments of a kernel that has an IOMMU, or none."""
    kernel_arguments: tuple[str, ...]
    packages: Path
    """The list of the packages of its roots."""
    foreign: Emulator | None = None
    """Its emulator, where the machine's own processor does not run its programs."""
    wheels: tuple[str, ...] = ()
    """The platforms of Python wheels for it, if they are not those of the machine."""

    @property
    def emulator(self) -> tuple[str, ...]:
        """The first arguments of QEMU."""
        return self.foreign.command() if self.foreign else ("qemu-system-x86_64",)


AMD64 = Architecture(
    name="amd64",
    machine=(
        *("-machine", "q35,kernel-irqchip=split"),
        # Without the quick string instructions, which the emulator carries out byte by byte: the
        # kernel clears and copies pages by words then, an eighth of a guest's time. Without the
        # extended states and checks of accesses that each switch to the kernel has to emulate: 7 %.
        *("-cpu", "max,la57=off,-erms,-fsrm,-xsave,-avx,-avx2,-f16c,-fma,-vaes,-smap,-smep,-pku"),
    ),
    # As wide as the virtual IOMMU of a domain is by default from QEMU 9.2 on, which opens no device
    # behind one that is wider than the host's (vtd_check_hiod in hw/i386/intel_iommu.c).
    iommu=("-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"),
    iommu_on=("intel_iommu=on", "iommu=pt"),
    iommu_off=("intel_iommu=off",),
    kernel_arguments=(
        "console=ttyS0",
        "no_timer_check",
        "tsc=reliable",
    ),
    packages=_HERE / "packages-root.txt",
)
ARM64 = Architecture(
    name="arm64",
    # A server's processor without pointer authentication, which takes the emulator long.
    machine=("-machine", "virt,gic-version=3", "-cpu", "neoverse-n1"),
    iommu=("-machine", "iommu=smmuv3"),
    iommu_on=("iommu.passthrough=1",),
    iommu_off=(),
    kernel_arguments=("console=ttyAMA0",),
    packages=_HERE / "packages-root-arm64.txt",
    foreign=Emulator("trixie", "qemu-system-arm", "/usr/bin/qemu-system-aarch64"),
    wheels=("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64"),
)
