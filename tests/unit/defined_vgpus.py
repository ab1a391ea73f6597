"""vGPUs that are to be, as values: for tests that vary a field or two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.definitions.model import (
    DefinitionFacts,
    FunctionDefinition,
    GpuDefinition,
    MdevctlRule,
    VgpuDefinition,
    render_definition,
    render_gpu_definition,
)
from vfiomgr.documents.text import TextFile
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
TYPES = (describe_type("mtty-1", "Single port serial"), describe_type("mtty-2"))
MTTY = VgpuParent("mtty", "/sys/devices/virtual/mtty/mtty", "mdev", "mtty", "mtty", TYPES, (24, 12))
DEFINITION = VgpuDefinition("mtty", UUID, "mtty-1")
AUTO = replace(DEFINITION, autostart=True)
WORKING = MdevctlRule("/usr/lib/udev/rules.d/60-mdevctl.rules", "/usr/sbin/mdevctl", True)  # noqa: FBT003 - as it is read
BROKEN = replace(WORKING, has_program=False)


def definition_text(definition: VgpuDefinition, text: str | None = None) -> TextFile:
    """The file of a definition."""
    return TextFile(definition.path, text or render_definition(definition))


def host_with(*files: TextFile, **facts: Any) -> HostSnapshot:
    """A host on which mtty makes mediated devices and mdevctl starts them; and these files."""
    known = {"mdevctl": WORKING} | facts
    host = with_facts(host_of(pci_device()), vgpu_parents=(MTTY,), has_systemd=True)
    return with_facts(host, definitions=DefinitionFacts(files, **known))


def with_active(host: HostSnapshot, kind: str = "mtty-1", parent: str = "mtty") -> HostSnapshot:
    """The same host, on which the defined one is active."""
    vgpu = Vgpu(UUID, "mdev", parent, kind, None, None, 7, None, None)
    return with_facts(host, vgpus=(vgpu,))


def vendor_host(*files: TextFile, mode: GpuMode | None = None, **facts: Any) -> HostSnapshot:
    """A GPU with two virtual functions: the first one is a vGPU, the second one is free."""
    physical = PciAddress.parse("0000:41:00.0")
    addresses = (PciAddress.parse("0000:41:00.4"), PciAddress.parse("0000:41:00.5"))
    gpu = replace(
        pci_device(str(physical)), virtual_functions=addresses, sriov_numvfs=2, sriov_totalvfs=32
    )
    functions = [replace(pci_device(str(a)), physical_function=physical) for a in addresses]
    kind = describe_type("1148", "NVIDIA L40S-2Q", None, "vfio-pci")
    parents = [
        VgpuParent(
            str(address),
            f"/sys/devices/{address}",
            "vendor-vfio",
            "nvidia",
            str(physical),
            (kind,) * free,
            (1,) * free,
        )
        for free, address in enumerate(addresses)
    ]
    active = Vgpu(
        None, "vendor-vfio", "0000:41:00.4", "1148", "NVIDIA L40S-2Q", "nvidia", 4, None, None
    )
    return with_facts(
        host_of(gpu, *functions),
        vgpu_parents=tuple(parents),
        vgpus=(active,),
        gpu_modes=(mode,) if mode else (),
        has_systemd=True,
        definitions=DefinitionFacts(files, **({"mdevctl": WORKING} | facts)),
    )


GPU = vendor_host().device(PciAddress.parse("0000:41:00.0"))
FIRST = FunctionDefinition(PciAddress.parse("0000:41:00.4"), "1148", "NVIDIA L40S-2Q")
DOCUMENT = GpuDefinition("vfiomgr/v1", GPU.identity, 2, (FIRST,))


def document(definition: GpuDefinition) -> TextFile:
    """The file of a GPU's definition."""
    return TextFile(definition.path, render_gpu_definition(definition))
