"""Machines that the laboratory can boot: which PCI devices, and at which addresses.

The firmware numbers buses depth first, in the order of the slots on the root bus, so every
address below is known before the boot. Slots of the root bus: 00 host bridge, 01 the
console's display, 02-08 what a topology adds, 10 and up what carries the laboratory itself,
1f the chipset.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.lab.architectures import Architecture

CURRENT_VARIABLE = "VFIOMGR_LAB_TOPOLOGY"  # set in a guest
EVERY_MOMENT_VARIABLE = "VFIOMGR_LAB_EVERY_MOMENT"  # set by `make lab-faults`
WIDTH = re.compile(r"aw-bits=\d+")
JOB = "{job}"  # stands for the job directory of the guest
NODE_MEMORY = "{memory}"  # stands for half of the guest's memory, in MiB
_DISPLAY_DRIVERS = {"gpu": "bochs-drm", "gpu_audio": "snd_hda_intel"}
_TWIN_DRIVERS = {"twin": "bochs-drm", "twin_audio": "snd_hda_intel"}
_NO_GROUPS = "cgroup_disable=memory,cpuset"
_MDEV_MODULES = ("mtty", "mdpy", "mbochs")


@dataclass(frozen=True)
class Topology:
    """One machine. `addresses` names its devices; `drivers` is by those names.

    With `has_gpusim`, its guests can load gpusim (see tests/lab/gpusim), with `has_desktop` start a
    display manager (see tests/lab/desktop.py), with `has_cpusets` limit the CPUs of control groups
    (see tests/lab/cores.py).
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    addresses: Mapping[str, str]
    drivers: Mapping[str, str]
    modules: tuple[str, ...] = ()
    iommu: bool = True
    arguments: tuple[str, ...] = ()
    """Other arguments of QEMU, e.g. the memory of NUMA nodes."""
    address_bits: int | None = None
    """Of the IOMMU, where it is narrower than the processor's 48."""
    drives: tuple[str, ...] = ()
    has_gpusim: bool = False
    has_desktop: bool = False
    has_cpusets: bool = False
    processors: int = 1
    """One emulates faster than two, which wait for each other."""

    def qemu_arguments(self, memory: int, architecture: Architecture) -> list[str]:
        """Return the arguments that give QEMU these devices, with `memory` MiB in all."""
        nodes = [text.replace(NODE_MEMORY, str(memory // 2)) for text in self.arguments]
        iommu = architecture.iommu if self.iommu else ()
        if self.address_bits is not None:
            iommu = tuple(WIDTH.sub(f"aw-bits={self.address_bits}", text) for text in iommu)
        devices = [part for device in self.devices for part in ("-device", device)]
        drives = [part for drive in self.drives for part in ("-drive", drive)]
        return [*nodes, "-vga", "none", *drives, *iommu, *devices]

    def kernel_arguments(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the kernel's arguments that belong to these devices.

        The first group with a controller of CPUs or memory has the kernel patch its own allocator;
        with two emulated CPUs in it, both may execute the breakpoint of before for ever (exc_int3).
        """
        own = ("cgroup_disable=memory", "maxcpus=1") if self.has_cpusets else (_NO_GROUPS,)
        return (*own, *(architecture.iommu_on if self.iommu else architecture.iommu_off))

    @property
    def expected_drivers(self) -> dict[str, str]:
        """The driver by address, as every command finds them."""
        return {self.addresses[name]: driver for name, driver in self.drivers.items()}


def _root_port(name: str, slot: int, bus: str = "pcie.0", **properties: str) -> str:
    """Return a root port; `name` is what a device's bus= refers to."""
    more = "".join(f",{key.replace('_', '-')}={value}" for key, value in properties.items())
    return f"pcie-root-port,id={name},bus={bus},addr={slot:#x},chassis={slot},slot={slot}{more}"


def _display_pair(port: str) -> tuple[str, str]:
    """Return a display function and its audio, as one device behind a root port."""
    return (
        f"bochs-display,bus={port},addr=0.0,multifunction=on",
        f"intel-hda,bus={port},addr=0.1",
    )


def _nvme(port: str) -> tuple[str, str]:
    """Return an NVMe controller with virtual functions, behind a root port.

    Each of them needs queues and vectors of its own: 60 take the flexible ones.
    """
    room = "max_ioqpairs=130,msix_qsize=70,sriov_vq_flexible=120,sriov_vi_flexible=60"
    place = f"bus={port},addr=0"
    return (
        "nvme-subsys,id=subsystem",
        f"nvme,serial=lab,subsys=subsystem,{place},sriov_max_vfs=60,{room}",
    )


_CONSOLE = "VGA,bus=pcie.0,addr=0x1"

# A disk without an image: what is written to it is in a temporary file of QEMU's.
_EMPTY_DISK = (
    "if=none,id=disk,format=raw,file.driver=null-co,file.size=64M,file.read-zeroes=on,snapshot=on"
)

_WORKSTATION_DEVICES = (
    _CONSOLE,
    _root_port("first", 2),
    *_display_pair("first"),
    _root_port("second", 3),
    *_display_pair("second"),
    _root_port("third", 4),
    "pcie-pci-bridge,id=bridge,bus=third,addr=0",
    "edu,bus=bridge,addr=1",
    "e1000,bus=bridge,addr=2,romfile=",
    "pci-ohci,bus=bridge,addr=3",
    _root_port("fourth", 5),
    "e1000e,bus=fourth,addr=0,romfile=",
    _root_port("fifth", 6),
    "nvme,serial=disk,drive=disk,bus=fifth,addr=0",
)
_WORKSTATION_ADDRESSES = {
    "console": "0000:00:01.0",
    "gpu": "0000:01:00.0",
    "gpu_audio": "0000:01:00.1",
    "twin": "0000:02:00.0",
    "twin_audio": "0000:02:00.1",
    "bridge": "0000:03:00.0",
    "edu": "0000:04:01.0",
    "peer": "0000:04:02.0",
    "peer2": "0000:04:03.0",
    "nic": "0000:05:00.0",
    "disk": "0000:06:00.0",
}
_WORKSTATION_DRIVERS = {
    "console": "bochs-drm",
    **_DISPLAY_DRIVERS,
    **_TWIN_DRIVERS,
    "peer": "e1000",
    "peer2": "ohci-pci",
    "nic": "e1000e",
    "disk": "nvme",
}

WORKSTATION = Topology(
    name="workstation",
    summary="two identical display+audio pairs, functions behind a bridge, a NIC, a disk, mdev "
    "parents",
    devices=_WORKSTATION_DEVICES,
    drives=(_EMPTY_DISK,),
    addresses=_WORKSTATION_ADDRESSES,
    drivers=_WORKSTATION_DRIVERS,
    modules=_MDEV_MODULES,
)

NO_IOMMU = Topology(
    name="no-iommu",
    summary="the workstation without an IOMMU",
    devices=_WORKSTATION_DEVICES,
    drives=(_EMPTY_DISK,),
    addresses=_WORKSTATION_ADDRESSES,
    drivers=_WORKSTATION_DRIVERS,
    modules=_MDEV_MODULES,
    iommu=False,
)

SRIOV = Topology(
    name="sriov",
    summary="an NVMe controller with 60 virtual functions, none enabled at boot",
    devices=(
        _CONSOLE,
        _root_port("first", 2),
        *_nvme("first"),
    ),
    addresses={"console": "0000:00:01.0", "nvme": "0000:01:00.0"},
    drivers={"console": "bochs-drm", "nvme": "nvme"},
    has_gpusim=True,
)

MIXED = Topology(
    name="mixed",
    summary="a display+audio pair on each of two root complexes, one per NUMA node, the NVMe "
    "controller with virtual functions, and mdev parents",
    arguments=(
        "-object",
        f"memory-backend-ram,id=memory0,size={NODE_MEMORY}M",
        "-object",
        f"memory-backend-ram,id=memory1,size={NODE_MEMORY}M",
        "-numa",
        "node,nodeid=0,cpus=0,memdev=memory0",
        "-numa",
        "node,nodeid=1,cpus=1,memdev=memory1",
    ),
    devices=(
        _CONSOLE,
        _root_port("third", 2),
        *_display_pair("third"),
        _root_port("first", 3),
        *_nvme("first"),
        "pxb-pcie,id=root100,bus=pcie.0,addr=0x7,bus_nr=100,numa_node=1",
        _root_port("second", 4, bus="root100"),
        *_display_pair("second"),
    ),
    addresses={
        "console": "0000:00:01.0",
        "gpu": "0000:01:00.0",
        "gpu_audio": "0000:01:00.1",
        "nvme": "0000:02:00.0",
        "twin": "0000:65:00.0",
        "twin_audio": "0000:65:00.1",
    },
    drivers={"console": "bochs-drm", **_DISPLAY_DRIVERS, **_TWIN_DRIVERS, "nvme": "nvme"},
    modules=_MDEV_MODULES,
    processors=2,
)

ALL = Topology(
    name="all",
    summary="the workstation with the NVMe controller: one boot for tests of either",
    devices=(*_WORKSTATION_DEVICES, _root_port("sixth", 7), *_nvme("sixth")),
    drives=(_EMPTY_DISK,),
    addresses={**_WORKSTATION_ADDRESSES, "nvme": "0000:07:00.0"},
    drivers={**_WORKSTATION_DRIVERS, "nvme": "nvme"},
    modules=_MDEV_MODULES,
    has_gpusim=True,
)

PLAIN = Topology(
    name="plain",
    summary="the workstation without mdev parents, functions without a driver, and ports without "
    "ACS",
    devices=(
        *_WORKSTATION_DEVICES,
        _root_port("sixth", 7),
        "edu,bus=sixth,addr=0",
        _root_port("seventh", 8, multifunction="on", disable_acs="on"),
        "e1000e,bus=seventh,addr=0,romfile=",
        "pcie-root-port,id=eighth,bus=pcie.0,addr=0x8.1,chassis=9,slot=9,disable-acs=on",
        "edu,bus=eighth,addr=0",
    ),
    drives=(_EMPTY_DISK,),
    addresses={
        **_WORKSTATION_ADDRESSES,
        "lone": "0000:07:00.0",
        "neighbour": "0000:08:00.0",
        "joining": "0000:09:00.0",
    },
    drivers={**_WORKSTATION_DRIVERS, "neighbour": "e1000e"},
)

NARROW = Topology(
    name="narrow",
    summary="a processor of 46 address bits with an IOMMU of 39, and a BAR of 1 GiB",
    arguments=(
        *("-global", "max-x86_64-cpu.phys-bits=46"),
        *("-object", "memory-backend-memfd,id=bar,size=1G"),
    ),
    address_bits=39,
    devices=(_CONSOLE, _root_port("first", 2), "ivshmem-plain,memdev=bar,bus=first,addr=0"),
    addresses={"console": "0000:00:01.0", "large": "0000:01:00.0"},
    drivers={"console": "bochs-drm"},
)

SERVICES = Topology(
    name="services",
    summary="the workstation without mdev parents, for tests of services: their first one starts "
    "systemd",
    devices=_WORKSTATION_DEVICES,
    drives=(_EMPTY_DISK,),
    addresses=_WORKSTATION_ADDRESSES,
    drivers=_WORKSTATION_DRIVERS,
    has_desktop=True,
)

HEALTH = Topology(
    name="health",
    summary="a NIC below a port with 16 lanes, and QEMU's monitor on the second serial port",
    arguments=(
        *("-chardev", f"socket,id=monitor,path={JOB}/monitor,server=on,wait=off"),
        *("-mon", "chardev=monitor,mode=readline"),
        *("-chardev", f"socket,id=guest,path={JOB}/monitor"),
        *("-serial", "chardev:guest"),
    ),
    devices=(
        _CONSOLE,
        _root_port("first", 2, x_speed="16", x_width="16"),
        "e1000e,id=nic,bus=first,addr=0,romfile=",
    ),
    addresses={"console": "0000:00:01.0", "nic": "0000:01:00.0"},
    drivers={"console": "bochs-drm", "nic": "e1000e"},
    has_gpusim=True,
)

CORES = Topology(
    name="cores",
    summary="four CPUs, one of them online, in groups that can be limited to some of them",
    devices=(_CONSOLE, _root_port("first", 2), *_display_pair("first")),
    addresses={
        "console": "0000:00:01.0",
        "gpu": "0000:01:00.0",
        "gpu_audio": "0000:01:00.1",
    },
    drivers={"console": "bochs-drm", **_DISPLAY_DRIVERS},
    has_cpusets=True,
    processors=4,
)

TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology
    for topology in (
        *(WORKSTATION, SRIOV, MIXED, ALL, NO_IOMMU, PLAIN, NARROW, SERVICES, HEALTH, CORES),
    )
}
DEFAULT = WORKSTATION


def current() -> Topology | None:
    """Return the topology of the guest that this process runs in, or None on the machine."""
    name = os.environ.get(CURRENT_VARIABLE)
    return TOPOLOGIES[name] if name else None
