"""Hosts that guests migrate between: virtual functions of ConnectX, and vGPUs of an A40."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.libvirt.preflight.situations import NODES, function, host
from tests.unit.vgpus import a40_type, add_divided_gpu
from vfiomgr.pci.drivers import VfioVariant
from vfiomgr.pci.guest_support import GuestSupport, MigrationState, ModuleVersion
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

PORT = "0000:81:00.0"
VF = "0000:81:00.2"
OTHER_VF = "0000:81:00.3"
ALIAS = "vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*"
MLX5 = VfioVariant(ALIAS, "mlx5_vfio_pci", "mlx5_vfio_pci")
FEATURES = ("stop-copy", "p2p", "pre-copy", "dirty-tracking")
UUID = "00000000-0000-4000-8000-000000009000"
"""Of the first vGPU at bus 9."""
_BOOTS = count()
"""Each host is another one."""


def network(address: str, **changes: Any) -> PciDevice:
    """A virtual function of a ConnectX-6 on its variant driver."""
    common = {
        "vendor_id": "15b3",
        "device_id": "101e",
        "subsystem_id": "15b3:0008",
        "class_code": "020000",
        "class_name": "Ethernet controller",
        "name": "Mellanox ConnectX Family mlx5Gen Virtual Function",
        "modalias": "pci:v000015B3d0000101Esv000015B3sd00000008bc02sc00i00",
        "driver": "mlx5_vfio_pci",
        "driver_module": "mlx5_vfio_pci",
        "physical_function": PciAddress.parse(PORT),
        "iommu_group": 100 + int(address[-1]),
        "numa_node": 0,
    }
    return function(address, **{**common, **changes})


def support(
    *names: str, features: tuple[str, ...] | None = FEATURES, **changes: Any
) -> GuestSupport:
    """A host with current programs, whose kernel lists these devices as able to migrate."""
    states = tuple(MigrationState(name, "RUNNING", features) for name in names)
    plain = GuestSupport("12.4.0", "11.0.0", (), states)
    return replace(plain, **changes)


def network_host(*functions: PciDevice, **changes: Any) -> HostSnapshot:
    """A host with two such virtual functions, or with these."""
    found = functions or (network(VF), network(OTHER_VF))
    names = [str(one.address) for one in found if one.driver == "mlx5_vfio_pci"]
    common = {
        "variants": (MLX5,),
        "vfio_modules": ("mlx5_vfio_pci", "vfio_pci"),
        "topology": NODES,
        "guest_support": support(*names),
        "users": (),
        "cpu_vendor": "GenuineIntel",
        "architecture": "x86_64",
        "cpu_address_bits": 46,
        "kernel_release": "6.18.3",
        "boot_id": f"boot {next(_BOOTS)}",
    }
    return host(*found, **{**common, **changes})


def vgpu_host(*sizes: int, version: str = "580.65", **changes: Any) -> HostSnapshot:
    """A host with an A40 and a vGPU of each of these sizes."""
    bare = with_facts(host(), vgpu_parents=(), vgpus=())
    known = add_divided_gpu(bare, 9, tuple(map(a40_type, sizes)), functions=4)
    modules = (ModuleVersion("nvidia", version), ModuleVersion("nvidia_vgpu_vfio", version))
    common = {
        "guest_support": support(modules=modules, migration=None),
        "users": (),
        "kernel_release": "6.8.0",
        "topology": NODES,
        "cpu_vendor": "AuthenticAMD",
        "boot_id": f"boot {next(_BOOTS)}",
    }
    return with_facts(known, **{**common, **changes})
