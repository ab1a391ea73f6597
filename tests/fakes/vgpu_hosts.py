"""Ready-made hosts with vGPUs of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tests.fakes import samples
from tests.fakes.gvtg import gvtg
from tests.fakes.intel_vfs import IntelGpu
from tests.fakes.kernel import FakeKernel
from tests.fakes.nvidia.cards import A40, A100, L40S, T4
from tests.fakes.nvidia.driver import NVIDIA_SMI, SRIOV_MANAGE
from tests.fakes.nvidia.gpus import DRIVER, SHIPPED, Gpu
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.fakes.nvidia.cards import Card
    from tests.fakes.nvidia.gpus import Family, Manners

GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in (0x21, 0x41, 0x61, 0x81, 0xA1, 0xC1, 0xE1, 0xF1))
"""Where the GPUs of a host are, as many as there are."""

INTEGRATED = "0000:00:02.0"


def samples_host(tmp_path: Path) -> FakeKernel:
    """The kernel's sample drivers mtty, mdpy and mbochs, and no PCI function."""
    kernel = FakeKernel(tmp_path / "host")
    for parent in (samples.mtty(), samples.mdpy(), samples.mbochs()):
        kernel.add_parent(parent)
    return kernel


def gvtg_host(tmp_path: Path, *, aperture: int = 256, has_names: bool = False) -> FakeKernel:
    """0000:00:02.0 on i915 with GVT-g, and `aperture` MB."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("i915", ids=[("8086", "*", "03")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    kernel.add_pci(
        INTEGRATED,
        vendor="8086",
        device="591b",
        class_code="030000",
        group=1,
        driver="i915",
        boot_vga=True,
        gives=[("drm", "drm/card0"), ("drm", "drm/renderD128")],
    )
    return kernel.add_parent(gvtg(INTEGRATED, aperture=aperture, has_names=has_names))


def nvidia_host(  # noqa: PLR0913 - each is a fact of its own, with a default
    tmp_path: Path,
    card: Card,
    family: Family,
    *,
    gpus: int = 1,
    total_vfs: int | None = None,
    is_enabled: bool = True,
    rejects_raw: bool = True,
    manners: Manners = SHIPPED,
    has_cdev: bool = False,
    has_programs: bool = True,
    has_header: bool = True,
    is_persistent: bool = True,
    prefix: str = DRIVER,
) -> FakeKernel:
    """GPUs of one model behind root ports, on NUMA nodes 0 and 1 in turn, and vfio-pci.

    nvidia-smi and sriov-manage are installed where it `has_programs`; for the rest see Gpu.
    `total_vfs` virtual functions each (the model's own number unless told) are there where it
    `is_enabled`, until the host is booted again. `rejects_raw` as in reality: a write to
    sriov_numvfs is ENOENT, since the driver configures no SR-IOV itself.
    """
    kernel = FakeKernel(tmp_path / "host", has_cdev=has_cdev)
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver(DRIVER, ids=[("10de", "*", "03")], configures_sriov=not rejects_raw)
    kernel.sysfs.make("/sys/module/nvidia_vgpu_vfio")
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    for program in (SRIOV_MANAGE, NVIDIA_SMI) if has_programs else ():
        kernel.programs.install(program)
    count = card.total_vfs if total_vfs is None else total_vfs
    for index, address in enumerate(GPUS[:gpus]):
        port = _add_port(kernel, index)
        gpu = Gpu(
            address,
            card,
            family,
            total_vfs=count if card.total_vfs else 0,
            manners=manners,
            prefix=prefix,
            is_persistent=is_persistent,
            has_header=has_header,
        )
        kernel.add_gpu(gpu, group=2 * index + 1, bridge=port, numa_node=index % 2)
    for address in GPUS[:gpus]:
        if is_enabled and card.total_vfs and count:
            for name in kernel.sriov.make(PCI_DEVICES / address, count):
                kernel.drivers.attach(DRIVER, name)
    return kernel


def t4_host(tmp_path: Path, *, gpus: int = 1) -> FakeKernel:
    """T4s, which are mdev parents themselves."""
    return nvidia_host(tmp_path, T4, "mdev", gpus=gpus)


def a40_host(
    tmp_path: Path,
    *,
    gpus: int = 1,
    total_vfs: int = 32,
    is_enabled: bool = True,
    rejects_raw: bool = True,
) -> FakeKernel:
    """A40s, whose virtual functions are mdev parents with room for one each."""
    return nvidia_host(
        tmp_path,
        A40,
        "mdev-sriov",
        gpus=gpus,
        total_vfs=total_vfs,
        is_enabled=is_enabled,
        rejects_raw=rejects_raw,
    )


def l40s_host(  # noqa: PLR0913 - each is a fact of its own, with a default
    tmp_path: Path,
    *,
    gpus: int = 1,
    total_vfs: int = 32,
    is_enabled: bool = True,
    rejects_raw: bool = True,
    manners: Manners = SHIPPED,
    has_programs: bool = True,
) -> FakeKernel:
    """L40S's, whose virtual functions take a type each, on a kernel with VFIO's cdevs."""
    return nvidia_host(
        tmp_path,
        L40S,
        "vendor",
        gpus=gpus,
        total_vfs=total_vfs,
        is_enabled=is_enabled,
        rejects_raw=rejects_raw,
        manners=manners,
        has_programs=has_programs,
        has_cdev=True,
    )


def mig_host(
    tmp_path: Path,
    *,
    card: Card = A100,
    gpus: int = 1,
    total_vfs: int | None = None,
    is_enabled: bool = False,
) -> FakeKernel:
    """GPUs with MIG, switched off: A100, or RTX_PRO_6000, whose instances hold several vGPUs."""
    return nvidia_host(
        tmp_path,
        card,
        "vendor",
        gpus=gpus,
        total_vfs=total_vfs,
        is_enabled=is_enabled,
        has_cdev=True,
    )


def xe_host(  # noqa: PLR0913 - each is a fact of its own, with a default
    tmp_path: Path,
    *,
    gpus: int = 1,
    total_vfs: int = 7,
    vfs: int = 0,
    vram: int = 24 << 30,
    has_vram_quota: bool = True,
    firmware_refuses: Iterable[str] = (),
    tiles: int = 1,
    shows_in: Literal["sysfs", "debugfs", "gt"] = "sysfs",
    tells_vram: bool = False,
    shares_time: int = 0,
) -> FakeKernel:
    """Arc Pro GPUs on xe with `vfs` virtual functions of `total_vfs`, which xe has too."""
    kernel = _intel_host(tmp_path, "xe")
    for index, address in enumerate(GPUS[:gpus]):
        gpu = IntelGpu(
            address,
            total_vfs=total_vfs,
            vram=vram,
            has_vram_quota=has_vram_quota,
            firmware_refuses=frozenset(firmware_refuses),
            tiles=tiles,
            shows_in=shows_in,
            tells_vram=tells_vram,
            shares_time=shares_time,
        )
        _add_intel(kernel, gpu, index, device="e211", vfs=vfs)
    return kernel


def i915_host(
    tmp_path: Path, *, gpus: int = 1, total_vfs: int = 7, vfs: int = 0, tiles: int = 1
) -> FakeKernel:
    """Flex 170 GPUs (or, with two tiles, Max 1550) on Intel's own i915."""
    kernel = _intel_host(tmp_path, "i915")
    for index, address in enumerate(GPUS[:gpus]):
        gpu = IntelGpu(address, "i915", total_vfs=total_vfs, vram=16 << 30, tiles=tiles)
        device = "56c0" if tiles == 1 else "0bd5"
        _add_intel(kernel, gpu, index, device=device, vfs=vfs)
    return kernel


def gim_host(tmp_path: Path, *, vfs: int = 4) -> FakeKernel:
    """A Radeon Pro V710 on AMD's GIM, which made `vfs` virtual functions as it was loaded."""
    kernel = _intel_host(tmp_path, "xe")
    kernel.add_driver("gim", ids=[("1002", "*", "03")], configures_sriov=False)
    kernel.add_pci(
        GPUS[0],
        vendor="1002",
        device="7461",
        class_code="038000",
        group=1,
        bridge=_add_port(kernel, 0),
        driver="gim",
        total_vfs=12,
        vf_device="7460",
        vf_offset=1,
        vf_stride=1,
    )
    kernel.sriov.make(PCI_DEVICES / GPUS[0], vfs)
    return kernel


def _intel_host(tmp_path: Path, driver: str) -> FakeKernel:
    kernel = FakeKernel(tmp_path / "host", has_cdev=True)
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver(driver, ids=[("8086", "*", "03")])
    return kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)


def _add_intel(kernel: FakeKernel, gpu: IntelGpu, index: int, *, device: str, vfs: int) -> None:
    port = _add_port(kernel, index)
    kernel.add_intel_gpu(gpu, device=device, group=2 * index + 1, bridge=port)
    directory = kernel.sysfs.target(PCI_DEVICES / gpu.address)
    if vfs and directory is not None:
        kernel.sriov.set_number(directory, str(vfs))


def _add_port(kernel: FakeKernel, index: int) -> str:
    """The root port of the `index`-th GPU; tells its address."""
    address = f"0000:00:{index + 1:02x}.0"
    kernel.add_pci(
        address,
        vendor="8086",
        device="347a",
        class_code="060400",
        header_type=1,
        group=2 * index,
        driver="pcieport",
        reset_methods="",
    )
    return address
