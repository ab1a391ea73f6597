"""What nvidia-smi says of modes and types, with its oddities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type
from vfiomgr.vgpu.nvidia_smi import (
    parse_modes,
    read_log,
    read_mode,
    read_persistence,
    with_known_types,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GPU = pci_device("0000:41:00.0")
LOG = """\

==============NVSMI LOG==============

Timestamp                                 : Wed Jul 22 15:37:16 2026
Driver Version                            : 580.105.06
vGPU Driver Capability
        Heterogenous Multi-vGPU           : Not Supported

Attached GPUs                             : 4
GPU 00000000:41:00.0
    Product Name                          : NVIDIA L40S
    Persistence Mode                      : Enabled
    vGPU Device Capability
        Fractional Multi-vGPU             : Not Supported
        Heterogeneous Time-Slice Sizes    : Supported
    MIG Mode
        Current                           : N/A
        Pending                           : N/A
    GPU Virtualization Mode
        Virtualization Mode               : Host VGPU
        vGPU Heterogeneous Mode           : Enabled
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
GPU 00000001:C8:00.0
    Persistence Mode                      : Disabled
    vGPU Device Capability
        Heterogeneous Time-Slice Sizes    : Not Supported
    MIG Mode
        Current                           : Disabled
        Pending                           : Enabled
    GPU Virtualization Mode
        vGPU Heterogeneous Mode           : Disabled
GPU 00000000:61:00.0
    MIG Mode
        Current                           : Enabled
        Pending                           : Enabled
    GPU Virtualization Mode
        vGPU Heterogeneous Mode           : N/A
Unable to determine the device handle for GPU0000:06:00.0: Unknown Error
GPU is lost
"""
TYPES = """\
GPU 00000000:41:00.0
    vGPU Type ID                          : 0x47c
        Name                              : NVIDIA L40S-2Q
        Class                             : Quadro
        GPU Instance Profile ID           : N/A
        Max Instances                     : 24
        Max Instances Per VM              : 16
        FB Memory                         : 2048 MiB
        Display Heads                     : 4
    vGPU Type ID                          : 1561
        Name                              : NVIDIA RTX Pro 6000 Blackwell DC-1-24Q
        GPU Instance Profile ID           : 47
        Max Instances                     : 4
        FB Memory                         : 24576 MiB
    vGPU Type ID                          : N/A
        Name                              : none at all
GPU 00000000:61:00.0
    vGPU Type ID                          : 0x47c
        Name                              : something else
"""


class Machine(HostTree):
    """One on which nvidia-smi says something."""

    def __init__(self, root: Path, said: str | None = None) -> None:
        super().__init__(root)
        self.said = said
        self.asked: list[tuple[str, ...]] = []

    def run(self, command: Sequence[str], seconds: float = 0) -> str | None:
        """Answer, and remember it."""
        assert command[0] == "nvidia-smi"
        assert seconds >= 0
        self.asked.append(tuple(command))
        if self.said is not None:
            return self.said
        return TYPES if "vgpu" in command else LOG


def parents(*names: str) -> tuple[VgpuParent, ...]:
    creatable = (describe_type("1148", "NVIDIA L40S-2Q", None, "vfio-pci"),)
    return tuple(
        VgpuParent(name, HostPath("/sys"), "vendor-vfio", "nvidia", "0000:41:00.0", kinds, counts)
        for name, (kinds, counts) in zip(names, [((), ()), (creatable, (1,))], strict=True)
    )


def test_modes_are_read_by_section(tmp_path: Path) -> None:
    first, second, third = parse_modes(read_log(Machine(tmp_path), [GPU]))
    assert (first.gpu, first.heterogeneous, first.mig) == ("0000:41:00.0", True, None)
    assert (second.gpu, second.heterogeneous, second.mig) == ("0001:c8:00.0", False, False)
    assert (third.gpu, third.heterogeneous, third.mig) == ("0000:61:00.0", None, True)
    assert (second.pending_mig, third.pending_mig) == (True, True)


def test_what_is_not_supported_is_not_taken_for_supported(tmp_path: Path) -> None:
    """The device's own word counts; an older driver speaks for all, and misspells it."""
    found = parse_modes(read_log(Machine(tmp_path), [GPU]))
    assert [mode.mixes_sizes for mode in found] == [True, False, False]


def test_one_gpu_is_asked_for_by_its_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    mode = read_mode(machine, GPU.address)
    assert mode is not None
    assert mode.heterogeneous
    assert machine.asked == [("nvidia-smi", "-q", "-i", "0000:41:00.0")]
    assert read_persistence(machine, GPU.address) is True
    assert read_persistence(machine, pci_device("0001:c8:00.0").address) is False
    assert read_persistence(machine, pci_device("0000:99:00.0").address) is None


def test_the_vendors_table_completes_types_and_names(tmp_path: Path) -> None:
    vgpu = Vgpu(None, "vendor-vfio", "0000:41:00.4", "1148", None, "nvidia", 7, None, None)
    before = parents("0000:41:00.4", "0000:41:00.5")
    (taken, free), (named,) = with_known_types(Machine(tmp_path), [GPU], before, (vgpu,))
    assert named.type_name == "NVIDIA L40S-2Q"
    assert [kind.id for kind in taken.types] == [kind.id for kind in free.types] == ["1148", "1561"]
    assert (taken.available, free.available) == ((0, 0), (1, 0))
    first, second = free.types
    assert (first.max_instances, first.framebuffer, first.heads) == (24, 2048, 4)
    assert (first.instance_profile, second.instance_profile) == (None, 47)


def test_mediated_types_in_mig_mode_get_the_profile_that_they_live_in(tmp_path: Path) -> None:
    mdev = tuple(
        replace(
            p,
            family="mdev",
            types=tuple(replace(k, id="nvidia-1561", instance_profile=None) for k in p.types),
        )
        for p in parents("0000:41:00.4", "0000:41:00.5")
    )
    divided = frozenset({"0000:41:00.0"})
    (_, free), _ = with_known_types(Machine(tmp_path), [GPU], mdev, (), divided)
    assert [(kind.id, kind.instance_profile) for kind in free.types] == [("nvidia-1561", 47)]


def test_the_table_is_not_asked_for_where_nobody_needs_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    mdev = tuple(replace(p, family="mdev") for p in parents("0000:41:00.4", "0000:41:00.5"))
    assert with_known_types(machine, [GPU], mdev, ()) == (mdev, ())
    assert machine.asked == []


@pytest.mark.parametrize("said", ["", "No devices were found\n", "GPU x\n", "\0\n:\n::\n"])
def test_other_words_tell_nothing(tmp_path: Path, said: str) -> None:
    machine = Machine(tmp_path, said)
    before = parents("0000:41:00.4", "0000:41:00.5")
    assert parse_modes(read_log(machine, [GPU])) == ()
    assert with_known_types(machine, [GPU], before, ()) == (before, ())


def test_without_nvidia_smi_or_with_a_stuck_gpu_nothing_is_known(tmp_path: Path) -> None:
    before = parents("0000:41:00.4", "0000:41:00.5")
    assert parse_modes(read_log(HostTree(tmp_path), [GPU])) == ()
    assert with_known_types(HostTree(tmp_path), [GPU], before, ()) == (before, ())
    machine = Machine(tmp_path)
    assert parse_modes(read_log(machine, [GPU, replace(GPU, stuck="nvidia -> vfio-pci")])) == ()
    assert machine.asked == []
