"""Ready-made hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes import samples
from tests.fakes.kernel import FakeKernel
from tests.fakes.mdevs import MdevType

if TYPE_CHECKING:
    from pathlib import Path

_BRIDGE = "060400"
_ROOT_PORT_HEADER = 1
_MULTIFUNCTION = 0x80


def workstation(
    tmp_path: Path,
    *,
    vfio_loaded: bool = False,
    has_cdev: bool = False,
    has_override: bool = True,
    network_driver: str = "igb",
) -> FakeKernel:
    """A host with an IOMMU and one of each kind of trouble.

    | group | what |
    |---|---|
    | 0-2 | host bridge, root ports 0000:00:01.0 and .1 |
    | 3 | 0000:00:02.0, the console's display (i915, boot_vga 1) |
    | 10, 11 | 0000:01:00.0/.1 and its twin 0000:02:00.0/.1: GPU (nvidia), audio (snd_hda_intel) |
    | 12 | VMD 0000:00:0e.0, without disks |
    | 13 | 10000:01:00.0 (nvme), in a PCI domain of five digits |
    | 20 | root port 0000:00:1c.0, bridge 0000:03:00.0, and behind: 0000:04:00.0 (e1000e, default
      route), 0000:04:01.0 (nvme, mounted on /), 0000:04:02.0 (xhci_hcd, module xhci_pci) |
    | 21 | 0000:05:00.0 (igb), up to 4 VFs from 0000:05:10.0 (igbvf) |
    | 22 | 0000:06:00.0 (nvidia), an mdev parent with 16 GB for instances of one size |

    And a virtual mdev parent `mbochs` with 256 MB for instances of three sizes.
    """
    kernel = FakeKernel(tmp_path / "host", has_cdev=has_cdev, has_override=has_override)
    _add_drivers(kernel, vfio_loaded=vfio_loaded, network_driver=network_driver)
    _add_root_complex(kernel)
    _add_gpu(kernel, 1, "0000:00:01.0", group=10)
    _add_gpu(kernel, 2, "0000:00:01.1", group=11)
    _add_volume_management(kernel)
    _add_shared_group(kernel)
    _add_network_adapter(kernel, network_driver)
    _add_vgpu_parents(kernel)
    return kernel


def without_iommu(tmp_path: Path) -> FakeKernel:
    """The console's display and a GPU with audio, and no IOMMU group at all."""
    kernel = FakeKernel(tmp_path / "host", has_iommu=False)
    _add_drivers(kernel, vfio_loaded=True)
    _add_root_complex(kernel)
    _add_gpu(kernel, 1, "0000:00:01.0", group=10)
    return kernel


def network_adapter(tmp_path: Path, driver: str = "igb") -> FakeKernel:
    """The workstation's network adapter with its VFs, and nothing else: quick to build."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver(driver, ids=[("8086", "1521")])
    kernel.add_driver("igbvf", ids=[("8086", "1520")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    _add_network_adapter(kernel, driver)
    return kernel


def arm_server(tmp_path: Path) -> FakeKernel:
    """A host with an SMMU and Linux 6.12, where the first driver brings a function into its group.

    | group | what |
    |---|---|
    | 10 | 0000:01:00.0, a GPU without a driver, and its audio function on snd_hda_intel |
    | 11 | 0000:02:00.0 on igb, and later 0000:03:00.0, which has no driver |
    """
    kernel = FakeKernel(tmp_path / "host")
    kernel.sysfs.drop("/sys/firmware/acpi/tables/DMAR")
    kernel.sysfs.put_bytes("/sys/firmware/acpi/tables/IORT", b"IORT", 0o400)
    _add_drivers(kernel, vfio_loaded=True)
    for bus in (1, 2, 3):
        _add_root_port(kernel, f"0000:00:0{bus}.0", group=bus)
    _add_gpu(kernel, 1, "0000:00:01.0", late_group=10)
    kernel.add_pci(
        "0000:02:00.0",
        vendor="8086",
        device="1521",
        class_code="020000",
        bridge="0000:00:02.0",
        driver="igb",
        group=11,
    )
    return kernel.add_pci(
        "0000:03:00.0",
        vendor="10de",
        device="20b5",
        class_code="030200",
        bridge="0000:00:03.0",
        late_group=11,
    )


def vector_adapter(tmp_path: Path) -> FakeKernel:
    """A network adapter with up to 4 VFs, whose driver distributes 64 MSI-X vectors among them."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("mlx5_core", ids=[("15b3", "*", "02")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    _add_root_port(kernel, "0000:00:1d.0", group=14)
    return kernel.add_pci(
        "0000:05:00.0",
        vendor="15b3",
        device="1021",
        class_code="020000",
        group=21,
        bridge="0000:00:1d.0",
        driver="mlx5_core",
        total_vfs=4,
        vf_device="101e",
        vf_vectors=(64, 8),
    )


def mixed(tmp_path: Path) -> FakeKernel:
    """One GPU with audio, the network adapter with its VFs, and the sample parent mtty."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_driver("snd_hda_intel", ids=[("*", "*", "0403")])
    kernel.add_driver("igb", ids=[("8086", "1521")])
    kernel.add_driver("igbvf", ids=[("8086", "1520")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    _add_root_port(kernel, "0000:00:01.0", group=1)
    _add_gpu(kernel, 1, "0000:00:01.0", group=10)
    _add_network_adapter(kernel)
    return kernel.add_parent(samples.mtty())


def dual_adapter(tmp_path: Path) -> FakeKernel:
    """A network adapter with two ports in one slot, each in a group of its own with up to 4 VFs."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("igb", ids=[("8086", "1521")])
    kernel.add_driver("igbvf", ids=[("8086", "1520")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    _add_root_port(kernel, "0000:00:1d.0", group=14)
    for port in (0, 1):
        kernel.add_pci(
            f"0000:05:00.{port}",
            vendor="8086",
            device="1521",
            class_code="020000",
            header_type=_MULTIFUNCTION,
            group=21 + port,
            bridge="0000:00:1d.0",
            driver="igb",
            total_vfs=4,
            vf_device="1520",
            vf_offset=0x80,
        )
    return kernel


def _add_drivers(kernel: FakeKernel, *, vfio_loaded: bool, network_driver: str = "igb") -> None:
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("i915", ids=[("8086", "*", "03")])
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_driver("snd_hda_intel", ids=[("*", "*", "0403")])
    kernel.add_driver("e1000e", ids=[("8086", "10d3")])
    kernel.add_driver("nvme", ids=[("*", "*", "010802")])
    kernel.add_driver("xhci_hcd", module="xhci_pci", ids=[("*", "*", "0c0330")])
    kernel.add_driver("vmd", ids=[("8086", "467f")])
    kernel.add_driver(network_driver, ids=[("8086", "1521")])
    kernel.add_driver("igbvf", ids=[("8086", "1520")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True, loaded=vfio_loaded)


def _add_root_port(kernel: FakeKernel, address: str, group: int, bridge: str | None = None) -> None:
    kernel.add_pci(
        address,
        vendor="8086",
        device="460d",
        class_code=_BRIDGE,
        header_type=_ROOT_PORT_HEADER | _MULTIFUNCTION,
        group=group,
        driver="pcieport",
        bridge=bridge,
        reset_methods="",
    )


def _add_root_complex(kernel: FakeKernel) -> None:
    kernel.add_pci(
        "0000:00:00.0",
        vendor="8086",
        device="4660",
        class_code="060000",
        group=0,
        reset_methods="",
    )
    _add_root_port(kernel, "0000:00:01.0", group=1)
    _add_root_port(kernel, "0000:00:01.1", group=2)
    kernel.add_pci(
        "0000:00:02.0",
        vendor="8086",
        device="4680",
        class_code="030000",
        group=3,
        driver="i915",
        boot_vga=True,
        gives=[("drm", "drm/card0"), ("drm", "drm/renderD128")],
    )


def _add_gpu(
    kernel: FakeKernel,
    bus: int,
    bridge: str,
    *,
    group: int | None = None,
    late_group: int | None = None,
) -> None:
    kernel.add_pci(
        f"0000:{bus:02x}:00.0",
        vendor="10de",
        device="2684",
        class_code="030000",
        header_type=_MULTIFUNCTION,
        subsystem="10de:167c",
        group=group,
        late_group=late_group,
        bridge=bridge,
        driver=None if late_group else "nvidia",
        boot_vga=False,
        gives=[("drm", f"drm/card{bus}"), ("drm", f"drm/renderD{128 + bus}")],
    )
    kernel.add_pci(
        f"0000:{bus:02x}:00.1",
        vendor="10de",
        device="22ba",
        class_code="040300",
        header_type=_MULTIFUNCTION,
        subsystem="10de:167c",
        group=group or late_group,
        bridge=bridge,
        driver="snd_hda_intel",
        reset_methods="bus",
        gives=[("sound", f"sound/card{bus}")],
    )


def _add_volume_management(kernel: FakeKernel) -> None:
    kernel.add_pci(
        "0000:00:0e.0",
        vendor="8086",
        device="467f",
        class_code="010400",
        group=12,
        driver="vmd",
    )
    _add_root_port(kernel, "10000:00:06.0", group=14)
    kernel.add_pci(
        "10000:01:00.0",
        vendor="144d",
        device="a80a",
        class_code="010802",
        group=13,
        bridge="10000:00:06.0",
        driver="nvme",
        gives=[("nvme", "nvme/nvme1"), ("block", "nvme/nvme1/nvme1n1")],
    )


def _add_shared_group(kernel: FakeKernel) -> None:
    _add_root_port(kernel, "0000:00:1c.0", group=20)
    kernel.add_pci(
        "0000:03:00.0",
        vendor="1b21",
        device="1080",
        class_code=_BRIDGE,
        header_type=_ROOT_PORT_HEADER,
        group=20,
        bridge="0000:00:1c.0",
        reset_methods="",
    )
    kernel.add_pci(
        "0000:04:00.0",
        vendor="8086",
        device="10d3",
        class_code="020000",
        group=20,
        bridge="0000:03:00.0",
        driver="e1000e",
        gives=[("net", "net/enp4s0")],
    )
    kernel.add_pci(
        "0000:04:01.0",
        vendor="144d",
        device="a808",
        class_code="010802",
        group=20,
        bridge="0000:03:00.0",
        driver="nvme",
        gives=[
            ("nvme", "nvme/nvme0"),
            ("block", "nvme/nvme0/nvme0n1"),
            ("block", "nvme/nvme0/nvme0n1/nvme0n1p2"),
        ],
    )
    kernel.add_pci(
        "0000:04:02.0",
        vendor="1912",
        device="0014",
        class_code="0c0330",
        group=20,
        bridge="0000:03:00.0",
        driver="xhci_hcd",
    )
    kernel.mount("/dev/nvme0n1p2", "/").default_route("enp4s0")


def _add_network_adapter(kernel: FakeKernel, driver: str = "igb") -> None:
    _add_root_port(kernel, "0000:00:1d.0", group=14)
    kernel.add_pci(
        "0000:05:00.0",
        vendor="8086",
        device="1521",
        class_code="020000",
        group=21,
        bridge="0000:00:1d.0",
        driver=driver,
        total_vfs=4,
        vf_device="1520",
        gives=[("net", "net/enp5s0")],
    )


def _add_vgpu_parents(kernel: FakeKernel) -> None:
    _add_root_port(kernel, "0000:00:1e.0", group=15)
    kernel.add_pci(
        "0000:06:00.0",
        vendor="10de",
        device="1eb8",
        class_code="030200",
        group=22,
        bridge="0000:00:1e.0",
        driver="nvidia",
        numa_node=0,
    )
    kernel.add_mdev_parent(
        "0000:06:00.0",
        driver="nvidia",
        mdev_driver="nvidia-vgpu-vfio",
        pool=16384,
        same_cost_only=True,
        types=[
            _nvidia_type("nvidia-222", "GRID T4-1B", 1024, 16),
            _nvidia_type("nvidia-231", "GRID T4-2Q", 2048, 8),
            _nvidia_type("nvidia-234", "GRID T4-16Q", 16384, 1),
        ],
    )
    kernel.add_mdev_parent(
        "/sys/devices/virtual/mbochs/mbochs",
        mdev_driver="mbochs",
        pool=256,
        types=[
            MdevType("mbochs-small", 4, "mbochs-small", "virtual display, 4 MB video memory"),
            MdevType("mbochs-medium", 16, "mbochs-medium", "virtual display, 16 MB video memory"),
            MdevType("mbochs-large", 64, "mbochs-large", "virtual display, 64 MB video memory"),
        ],
    )


def _nvidia_type(type_id: str, name: str, megabytes: int, instances: int) -> MdevType:
    description = (
        f"num_heads=4, frl_config=60, framebuffer={megabytes}M, "
        f"max_resolution=4096x2160, max_instance={instances}"
    )
    return MdevType(type_id, megabytes, name, description)
