"""A plain PCI function and a plain host, for tests that vary a field or two."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from vfiomgr.host.kernel import KernelFacts
from vfiomgr.pci.iommu import IommuGroup, IommuState
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.users.facet import UserFacts
from vfiomgr.users.node_agent import ClaimStatus, DeviceStatus, NodeStatus, ResourceStatus
from vfiomgr.vgpu.model import VgpuFacts


def pci_device(address: str = "0000:04:00.0") -> PciDevice:
    """A GPU on its host driver, alone in group 4."""
    return PciDevice(
        address=PciAddress.parse(address),
        name="NVIDIA Corporation GA107GL [A2 / A16]",
        vendor_id="10de",
        device_id="25b6",
        subsystem_id="10de:157e",
        class_code="030200",
        class_name="3D controller",
        revision="a1",
        header_type=0,
        bridge_path="pci0000:00/0000:00:01.0",
        driver="nvidia",
        driver_override=None,
        driver_module="nvidia",
        modalias=None,
        iommu_group=4,
        numa_node=0,
        physical_function=None,
        virtual_functions=(),
        sriov_totalvfs=None,
        sriov_numvfs=None,
        sriov_drivers_autoprobe=None,
        is_boot_display=False,
        is_responsive=True,
        vfio_device=None,
        vfio_cdev=False,
        reset_method=("flr", "bus"),
        power_state="D0",
        power_control="on",
        runtime_status="active",
        d3cold_allowed=True,
        nodes=(),
        bars=(),
    )


def host_of(*devices: PciDevice) -> HostSnapshot:
    """A host with these functions, in the groups that they name."""
    numbers = sorted({d.iommu_group for d in devices if d.iommu_group is not None})
    return HostSnapshot(
        kernel=KernelFacts("6.1.0", "quiet", "boot", "GenuineIntel", architecture="x86_64"),
        iommu=IommuState(units=("dmar0",), firmware_tables=("DMAR",), has_groups=bool(numbers)),
        pci_drivers=("nvidia", "snd_hda_intel", "vfio-pci"),
        devices=tuple(sorted(devices, key=lambda d: d.address)),
        groups=tuple(
            IommuGroup(
                number=number,
                members=tuple(str(d.address) for d in devices if d.iommu_group == number),
                name=None,
                type="DMA",
                has_node=False,
                direct_regions=(),
            )
            for number in numbers
        ),
        vgpus=VgpuFacts((), ()),
        users=UserFacts(processes=()),
    )


def with_facts(host: HostSnapshot, **facts: Any) -> HostSnapshot:
    """The host with these facts, by their names in documents."""
    changed: dict[str, Any] = {}
    for name, kind in HostSnapshot.facets.items():
        fields = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        own = {field: facts.pop(key) for key, field in fields if key in facts}
        if own:
            changed[name] = replace(getattr(host, name), **own)
    return replace(host, **facts, **changed)


def agent_of(
    *addresses: str, pod: str = "", ago: float | None = None, claim: str = ""
) -> NodeStatus:
    """The state of a node agent that offers a device, which a pod or a claim has."""
    device = DeviceStatus(addresses[0], addresses, (), True, pod, pod, (), ago)  # noqa: FBT003
    resource = ResourceStatus("vfiomgr.io/A40", "default", is_registered=True, devices=(device,))
    claims = (ClaimStatus(addresses[0], claim),) if claim else ()
    return NodeStatus(1, "/p", has_kubelet=True, resources=(resource,), claims=claims)
