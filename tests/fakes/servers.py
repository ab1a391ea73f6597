"""Servers as people draw them: one with vGPUs, and one with GPUs behind PCIe switches.

They have links, NUMA nodes and names of hardware, of which the other hosts have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.functions import Link
from tests.fakes.kernel import FakeKernel
from tests.fakes.nvidia.cards import A40
from tests.fakes.nvidia.driver import NVIDIA_SMI, SRIOV_MANAGE
from tests.fakes.nvidia.gpus import DRIVER, Gpu
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_PCI_IDS = """\
# as in pci.ids
1000  Broadcom / LSI
\tc010  PEX880xx PCIe Gen 4 Switch
102b  Matrox Electronics Systems Ltd.
\t0533  MGA G200EH
103c  Hewlett-Packard Company
\t3306  Integrated Lights-Out Standard Slave Instrumentation & System Support
1022  Advanced Micro Devices, Inc. [AMD]
\t1480  Starship/Matisse Root Complex
\t1483  Starship/Matisse GPP Bridge
10de  NVIDIA Corporation
\t1af1  GA100 [A100 NVSwitch]
\t20b0  GA100 [A100 SXM4 40GB]
\t2235  GA102GL [A40]
\t2236  GA102GL [A10]
144d  Samsung Electronics Co Ltd
\ta808  NVMe SSD Controller SM981/PM981/PM983
15b3  Mellanox Technologies
\t101b  MT28908 Family [ConnectX-6]
\t101c  MT28908 Family [ConnectX-6 Virtual Function]
8086  Intel Corporation
\t10ed  82599 Ethernet Controller Virtual Function
\t10fb  82599ES 10-Gigabit SFI/SFP+ Network Connection
\t2f00  Xeon E7 v3/Xeon E5 v3/Core i7 DMI2
\t2f04  Xeon E7 v3/Xeon E5 v3/Core i7 PCI Express Root Port 2
\t2f28  Xeon E7 v3/Xeon E5 v3/Core i7 Address Map
\t8d10  C610/X99 series chipset PCI Express Root Port
\t8d31  C610/X99 series chipset USB xHCI Host Controller
\t8d44  C610/X99 series chipset LPC Controller
C 02  Network controller
\t00  Ethernet controller
\t07  Infiniband controller
C 03  Display controller
\t00  VGA compatible controller
\t02  3D controller
C 06  Bridge
\t04  PCI bridge
\t80  Bridge
C 08  Generic system peripheral
\t80  System peripheral
"""
"""In the format of pci.ids; the words are those of pci-ids.ucw.cz."""
_ROOT_BRIDGE, _PORT, _VGA, _3D = "060000", "060400", "030000", "030200"
_NETWORK, _DISK, _USB, _ISA, _PERIPHERAL = "020000", "010802", "0c0330", "060100", "088000"
_INFINIBAND, _OTHER_BRIDGE = "020700", "068000"
_GEN2_X8 = Link("5.0", 8, "5.0", 8)
_GEN3_X4 = Link("8.0", 4, "8.0", 4)
_GEN3_X16 = Link("8.0", 16, "8.0", 16)
_GEN4_X16 = Link("16.0", 16, "16.0", 16)
_DOWN = Link("", 0, "8.0", 8)
VGPUS = {
    "0000:08:00.4": ("nvidia-560", "5b3c1f0e-6a43-4f0b-9d43-0a5a0e0c1c01"),
    "0000:08:00.6": ("nvidia-560", "5b3c1f0e-6a43-4f0b-9d43-0a5a0e0c1c02"),
    "0000:08:02.0": ("nvidia-560", "5b3c1f0e-6a43-4f0b-9d43-0a5a0e0c1c03"),
}
"""Of `vgpu_server`: the virtual function, the type and the UUID of each."""


ADAPTERS = tuple(f"0000:{bus}:00.0" for bus in ["06", "0a", "46", "4a", "86", "8a", "c6", "ca"])
"""The network adapters of `dgx`."""


def vgpu_server(tmp_path: Path) -> FakeKernel:
    """Two sockets, an A40 with 16 virtual functions and three vGPUs, an A10 that a guest has.

    | where | what |
    |---|---|
    | 0000:00:01.0 | 0000:03:00.0, an NVMe disk that is mounted on / |
    | 0000:00:02.0 | 0000:04:00.0, which has the default route, and .1 with 4 virtual functions |
    | 0000:00:03.0 | 0000:08:00.0, the A40, on half of the lanes |
    | 0000:00:1c.0 | 0000:01:00.0 and .1, the management processor and boot display, one group |
    | 0000:80:02.0 | 0000:82:00.0, the A10, in the guest win |
    """
    kernel = _server(tmp_path, "0-5,12-17", "6-11,18-23")
    for name, ids in (
        ("ixgbe", ("8086", "10fb")),
        ("ixgbevf", ("8086", "10ed")),
        ("nvme", ("144d", "*")),
        ("mgag200", ("102b", "*")),
        ("hpwdt", ("103c", "3306")),
        ("xhci_hcd", ("8086", "8d31")),
    ):
        kernel.add_driver(name, ids=[ids])
    _add_chipset(kernel)
    _add_port(kernel, "0000:00:01.0", "2f04", group=1, link=_GEN3_X4)
    kernel.add_pci(
        "0000:03:00.0",
        vendor="144d",
        device="a808",
        class_code=_DISK,
        group=34,
        numa_node=0,
        bridge="0000:00:01.0",
        driver="nvme",
        gives=[("nvme", "nvme/nvme0"), ("block", "nvme/nvme0/nvme0n1")],
        link=_GEN3_X4,
    )
    _add_network(kernel)
    _add_port(kernel, "0000:00:03.0", "2f04", group=7, link=Link("8.0", 8, "8.0", 16))
    gpu = Gpu("0000:08:00.0", A40, "mdev-sriov", total_vfs=16)
    half = Link("8.0", 8, "16.0", 16)
    kernel.add_gpu(gpu, group=38, bridge="0000:00:03.0", numa_node=0, link=half)
    _add_port(kernel, "0000:80:02.0", "2f04", group=40, node=1, link=_GEN3_X16)
    kernel.add_pci(
        "0000:82:00.0",
        vendor="10de",
        device="2236",
        class_code=_3D,
        group=41,
        numa_node=1,
        bridge="0000:80:02.0",
        driver="vfio-pci",
        driver_override="vfio-pci",
        link=Link("8.0", 16, "16.0", 16),
    )
    _add_virtual(kernel, gpu.address, 16, DRIVER)
    for function, (kind, uuid) in VGPUS.items():
        types = PCI_DEVICES / function / "mdev_supported_types"
        kernel.store(types / kind / "create", uuid)
    _add_virtual(kernel, "0000:04:00.1", 4, "ixgbevf")
    kernel.mount("/dev/nvme0n1", "/").default_route("eno1")
    _add_guest(kernel, "win", 41)
    return kernel


def dgx(tmp_path: Path) -> FakeKernel:
    """Two sockets, 8 GPUs and 8 network adapters behind four PCIe switches, and 6 NVSwitches.

    Each network adapter has 8 virtual functions. One GPU runs on half of its lanes, one is on
    vfio-pci in a guest, and one fell off the bus.
    """
    kernel = _server(tmp_path, "0-63,128-191", "64-127,192-255")
    kernel.add_driver("mlx5_core", ids=[("15b3", "*")])
    kernel.add_driver("nvidia-nvswitch", ids=[("10de", "1af1")])
    groups = iter(range(1, 200))
    for index, bus in enumerate((0x00, 0x40, 0x80, 0xC0)):
        node = index // 2
        below = _add_switch(kernel, bus, node, groups, ports=4)
        for place, port in enumerate(below):
            number = 2 * index + place // 2
            if place % 2:
                _add_adapter(kernel, port, node, next(groups))
            else:
                _add_sxm_gpu(kernel, port, node, next(groups), number)
    for port in _add_switch(kernel, 0xE0, 1, groups, ports=6):
        kernel.add_pci(
            _behind(port),
            vendor="10de",
            device="1af1",
            class_code=_OTHER_BRIDGE,
            group=next(groups),
            numa_node=1,
            bridge=port,
            driver="nvidia-nvswitch",
            link=Link("16.0", 2, "16.0", 2),
        )
    for address in ADAPTERS:
        _add_virtual(kernel, address, 8, "mlx5_core")
    kernel.fall_off_bus("0000:c8:00.0")
    _add_guest(kernel, "train", _group_of(kernel, "0000:88:00.0"))
    return kernel


def _server(tmp_path: Path, *cpus: str) -> FakeKernel:
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver(DRIVER, ids=[("10de", "*", "03")], configures_sriov=False)
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    for program in (SRIOV_MANAGE, NVIDIA_SMI):
        kernel.programs.install(program)
    kernel.sysfs.put("/proc/sys/kernel/osrelease", "6.12.57")
    kernel.sysfs.put("/usr/share/misc/pci.ids", _PCI_IDS)
    for number, text in enumerate(cpus):
        node = f"/sys/devices/system/node/node{number}"
        kernel.sysfs.put(f"{node}/cpulist", text)
        kernel.sysfs.put(f"{node}/meminfo", f"Node {number} MemTotal: {64 << 20} kB")
    return kernel


def _add_chipset(kernel: FakeKernel) -> None:
    """What is on the root buses beside the ports."""
    for bus, node in (("00", 0), ("80", 1)):
        kernel.add_pci(
            f"0000:{bus}:00.0",
            vendor="8086",
            device="2f00",
            class_code=_ROOT_BRIDGE,
            numa_node=node,
            group=0 if node == 0 else 39,
        )
        for function in range(3):
            kernel.add_pci(
                f"0000:{bus}:05.{function}",
                vendor="8086",
                device="2f28",
                class_code=_PERIPHERAL,
                numa_node=node,
                group=20 + 4 * node + function,
            )
    kernel.add_pci(
        "0000:00:14.0",
        vendor="8086",
        device="8d31",
        class_code=_USB,
        group=30,
        numa_node=0,
        driver="xhci_hcd",
    )
    kernel.add_pci(
        "0000:00:1f.0", vendor="8086", device="8d44", class_code=_ISA, group=31, numa_node=0
    )
    _add_port(kernel, "0000:00:1c.0", "8d10", group=32, link=Link("2.5", 1, "5.0", 1))
    _add_port(kernel, "0000:00:1c.4", "8d10", group=29, link=_DOWN)
    for function, vendor, device, code, driver in (
        (0, "102b", "0533", _VGA, "mgag200"),
        (1, "103c", "3306", _PERIPHERAL, "hpwdt"),
    ):
        kernel.add_pci(
            f"0000:01:00.{function}",
            vendor=vendor,
            device=device,
            class_code=code,
            group=33,
            numa_node=0,
            bridge="0000:00:1c.0",
            driver=driver,
            boot_vga=True if code == _VGA else None,
            link=Link("2.5", 1, "2.5", 1),
        )


def _add_network(kernel: FakeKernel) -> None:
    _add_port(kernel, "0000:00:02.0", "2f04", group=5, link=Link("5.0", 8, "8.0", 8))
    for function in (0, 1):
        kernel.add_pci(
            f"0000:04:00.{function}",
            vendor="8086",
            device="10fb",
            class_code=_NETWORK,
            group=35 + function,
            numa_node=0,
            bridge="0000:00:02.0",
            driver="ixgbe",
            total_vfs=63,
            vf_device="10ed",
            vf_offset=0x80,
            vf_stride=2,
            gives=[("net", f"net/eno{function + 1}")],
            link=_GEN2_X8,
        )


def _add_port(  # noqa: PLR0913 - each is a fact of its own
    kernel: FakeKernel,
    address: str,
    device: str,
    *,
    group: int,
    node: int = 0,
    vendor: str = "8086",
    bridge: str | None = None,
    link: Link | None = None,
) -> None:
    kernel.add_pci(
        address,
        vendor=vendor,
        device=device,
        class_code=_PORT,
        header_type=1,
        group=group,
        numa_node=node,
        driver="pcieport",
        bridge=bridge,
        reset_methods="",
        link=link,
    )


def _add_switch(
    kernel: FakeKernel, bus: int, node: int, groups: Iterable[int], *, ports: int
) -> list[str]:
    """A root complex with a host bridge, a root port, a switch; its downstream ports."""
    numbers = iter(groups)
    kernel.add_pci(
        f"0000:{bus:02x}:00.0",
        vendor="1022",
        device="1480",
        class_code=_ROOT_BRIDGE,
        group=next(numbers),
        numa_node=node,
    )
    root, above = f"0000:{bus:02x}:01.1", f"0000:{bus + 1:02x}:00.0"
    _add_port(kernel, root, "1483", group=next(numbers), node=node, vendor="1022", link=_GEN4_X16)
    switch = {"vendor": "1000", "device": "c010", "node": node, "link": _GEN4_X16}
    _add_port(kernel, above, group=next(numbers), bridge=root, **switch)  # type: ignore[arg-type]
    below = [f"0000:{bus + 2:02x}:{4 * number:02x}.0" for number in range(ports)]
    for port in below:
        _add_port(kernel, port, group=next(numbers), bridge=above, **switch)  # type: ignore[arg-type]
    return below


def _behind(port: str) -> str:
    """The first function on the bus behind a downstream port of `_add_switch`."""
    _, bus, rest = port.split(":")
    place = int(rest.partition(".")[0], 16) // 4
    return f"0000:{int(bus, 16) + 2 + 2 * place:02x}:00.0"


def _add_sxm_gpu(kernel: FakeKernel, port: str, node: int, group: int, number: int) -> None:
    is_given = number == _PASSED_THROUGH
    kernel.add_pci(
        _behind(port),
        vendor="10de",
        device="20b0",
        class_code=_3D,
        group=group,
        numa_node=node,
        bridge=port,
        driver="vfio-pci" if is_given else DRIVER,
        driver_override="vfio-pci" if is_given else None,
        link=Link("16.0", 8, "16.0", 16) if number == _DEGRADED else _GEN4_X16,
    )


_DEGRADED, _PASSED_THROUGH = 2, 5
"""Which of the eight GPUs of `dgx`."""


def _add_virtual(kernel: FakeKernel, address: str, number: int, driver: str) -> None:
    """Virtual functions, when all others are there: their groups have the next free numbers."""
    for name in kernel.sriov.make(PCI_DEVICES / address, number):
        kernel.drivers.attach(driver, name)


def _add_adapter(kernel: FakeKernel, port: str, node: int, group: int) -> None:
    address = _behind(port)
    kernel.add_pci(
        address,
        vendor="15b3",
        device="101b",
        class_code=_INFINIBAND,
        group=group,
        numa_node=node,
        bridge=port,
        driver="mlx5_core",
        total_vfs=16,
        vf_device="101c",
        vf_offset=1,
        vf_stride=1,
        link=_GEN4_X16,
    )


def _group_of(kernel: FakeKernel, address: str) -> int:
    group = kernel.groups.of(PCI_DEVICES / address)
    assert group is not None
    return group


def _add_guest(kernel: FakeKernel, guest: str, group: int) -> None:
    """A QEMU that has a group open."""
    kernel.guest_opens(group)
    process = f"/proc/{kernel.vfio.guests[group].pid}"
    kernel.sysfs.put(f"{process}/cmdline", f"qemu-system-x86_64\0-name\0guest={guest}\0")
