"""Faults of other drivers that bind for claims, as reported in public: what happens here.

Numbers are those of kubernetes-sigs/dra-driver-nvidia-gpu.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import workstation
from tests.fakes.vgpu_hosts import a40_host
from tests.unit.engine.faults import changes, kept
from tests.unit.node.dra_claims import UID, claim_for
from tests.unit.node.test_dra_preparing import (
    FIRST,
    ONE,
    OTHER,
    SECOND_UID,
    drivers,
    on_demand_node,
    prepare,
    unprepare,
)
from tests.unit.node.test_on_demand import CARD, OWNER, SOUND, binding_of
from vfiomgr.errors import HostError, Refusal
from vfiomgr.library import Host
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.node.model import OnDemand
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

ON_HOST = ["nvidia", "snd_hda_intel"] * 2
ON_VFIO = ["vfio-pci"] * 4


def test_1255_a_bind_that_fails_after_the_unbind_leaves_the_host_driver(tmp_path: Path) -> None:
    """There: no driver, no rollback for any device, and persistence mode off."""
    node = on_demand_node(tmp_path)
    node.kernel.drivers.known["vfio-pci"].probe_error = errno.EINVAL
    before = kept(node.kernel)
    with pytest.raises(HostError, match="vfio-pci"):
        prepare(node, claim_for(ONE, OTHER))
    assert drivers(node) == ON_HOST
    assert changes(before, kept(node.kernel)) == {}
    node.kernel.drivers.known["vfio-pci"].probe_error = None
    prepare(node, claim_for(ONE, OTHER))
    assert drivers(node) == ON_VFIO
    unprepare(node)
    assert changes(before, kept(node.kernel)) == {}


def test_1255_of_several_devices_one_that_fails_returns_the_others(tmp_path: Path) -> None:
    node = on_demand_node(tmp_path)
    node.kernel.sysfs.put("/proc/4711/comm", "train\n")
    node.kernel.sysfs.link_absolute("/proc/4711/fd/7", "/dev/dri/card2")
    node.creating.vgpus.binding._patience = 0.0
    with pytest.raises(Refusal, match=re.escape("train (PID 4711)")):
        prepare(node, claim_for(ONE, OTHER))
    assert drivers(node) == ON_HOST
    assert node.files == {}


def test_1255_of_several_devices_one_that_does_not_return_holds_up_no_other(
    tmp_path: Path,
) -> None:
    node = on_demand_node(tmp_path)
    prepare(node, claim_for(ONE, OTHER))
    group = api.scan(node.kernel).device(CARD).iommu_group
    assert group is not None
    node.kernel.guest_opens(group)
    node.creating.vgpus.binding._patience = 0.0
    with pytest.raises(Refusal, match="is in use by"):
        unprepare(node)
    assert drivers(node) == ["vfio-pci", "vfio-pci", "nvidia", "snd_hda_intel"]
    node.kernel.guest_closes(group)
    unprepare(node)
    assert drivers(node) == ON_HOST
    assert node.files == {}


def test_1330_a_device_whose_claim_has_lost_its_record_returns_with_the_claim(
    tmp_path: Path,
) -> None:
    node = on_demand_node(tmp_path)
    before = kept(node.kernel)
    prepare(node, claim_for(ONE))
    node.kernel.remove(HostPath(f"/run/vfiomgr/dra/{UID}.json"))
    node.restart()
    assert node.preparing.held == {}
    node.kernel.replace(DIRECTORY / "0000:09:00.0.json", b"{", mode=0o600)  # of another device
    unprepare(node)
    assert changes(before, kept(node.kernel)) == {}
    node.kernel.remove(DIRECTORY / "0000:09:00.0.json")
    prepare(node, claim_for(ONE, uid=SECOND_UID, name="next"))


def test_1089_a_device_that_was_on_vfio_before_stays_there(tmp_path: Path) -> None:
    """There: it was bound to nvidia at the end of the claim, and hung."""
    node = on_demand_node(tmp_path)
    for address in (CARD, SOUND):
        directory = HostPath(f"/sys/bus/pci/devices/{address}")
        node.kernel.write(directory / "driver/unbind", str(address))
        node.kernel.write(directory / "driver_override", "vfio-pci")
    node.kernel.drivers.load("vfio-pci")
    for address in (CARD, SOUND):
        node.kernel.write(HostPath("/sys/bus/pci/drivers_probe"), str(address))
    before = kept(node.kernel)
    assert drivers(node)[:2] == ["vfio-pci"] * 2
    prepare(node, claim_for(ONE))
    unprepare(node)
    assert changes(before, kept(node.kernel)) == {}


def test_1292_a_device_without_a_driver_is_bound_and_has_none_afterwards(tmp_path: Path) -> None:
    """There: a host driver was required."""
    node = on_demand_node(tmp_path)
    node.kernel.write(HostPath(f"/sys/bus/pci/devices/{FIRST}/driver/unbind"), FIRST)
    assert drivers(node)[:2] == [None, "snd_hda_intel"]
    prepare(node, claim_for(ONE))
    assert drivers(node)[:2] == ["vfio-pci"] * 2
    unprepare(node)
    assert drivers(node)[:2] == [None, "snd_hda_intel"]


def test_1037_persistence_mode_of_each_gpu_is_as_before(tmp_path: Path) -> None:
    """There: once all GPUs had left the driver, it was on again for the first one only."""
    kernel = a40_host(tmp_path, gpus=2, is_enabled=False)
    before = kept(kernel)
    gpus = [PciAddress.parse(gpu.address) for gpu in kernel.nvidia.gpus.visible()]
    assert len(gpus) == 2
    binding = binding_of(kernel)
    for number, gpu in enumerate(gpus):
        binding.bind(gpu, OnDemand(), f"{number}/node/gpu")
    assert kernel.nvidia.gpus.visible() == []
    for number, gpu in enumerate(gpus):
        binding.give_back(gpu, f"{number}/node/gpu")
    assert changes(before, kept(kernel)) == {}


def test_1330_a_claim_keeps_its_device_over_a_restart_and_returns_it(tmp_path: Path) -> None:
    """There: NVML did not see the GPU on vfio-pci, and it was lost."""
    node = on_demand_node(tmp_path)
    before = kept(node.kernel)
    prepare(node, claim_for(ONE))
    node.restart()
    node.scan()
    assert node.units[FIRST].nodes == ("/dev/vfio/10",)
    assert node.preparing.held == {FIRST: "ml/gpu"}
    with pytest.raises(Refusal, match="belongs to claim ml/gpu"):  # after a forced deletion
        prepare(node, claim_for(ONE, uid=SECOND_UID, name="next"))
    unprepare(node, UID)
    prepare(node, claim_for(ONE, uid=SECOND_UID, name="next"))
    unprepare(node, SECOND_UID)
    assert changes(before, kept(node.kernel)) == {}


def test_1268_names_of_drivers_with_dashes_and_of_modules_with_underscores(tmp_path: Path) -> None:
    """There: each `_` of a name became `-`, so a driver was not found."""
    kernel = workstation(tmp_path)
    kernel.add_driver("nvgrace-gpu-vfio-pci", module="nvgrace_gpu_vfio_pci", is_vfio=True)
    binding = binding_of(kernel)
    before = kept(kernel)
    unit = binding.bind(CARD, OnDemand(driver="nvgrace-gpu-vfio-pci"), OWNER)
    assert unit.driver == "nvgrace-gpu-vfio-pci"
    host = api.scan(kernel)
    assert [host.device(a).driver for a in (CARD, SOUND)] == ["nvgrace-gpu-vfio-pci"] * 2
    binding.give_back(CARD, OWNER)
    assert changes(before, kept(kernel)) == {}
    assert Host(kernel).recover() == ()
