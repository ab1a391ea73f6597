"""Scans of the fake kernel's trees: what a recorded host must not lose."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests import api
from tests.api import scan
from tests.fakes.hosts import without_iommu, workstation
from vfiomgr.host.tree import HostTree
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, pci_device

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


def test_a_workstation(tmp_path: Path) -> None:
    host = scan(workstation(tmp_path))
    gpu = host.device(PciAddress.parse("0000:01:00.0"))
    assert (gpu.driver, gpu.iommu_group, gpu.numa_node) == ("nvidia", 10, None)
    assert gpu.bridge_path == "pci0000:00/0000:00:01.0"
    assert gpu.nodes == ("/dev/dri/card1", "/dev/dri/renderD129", "/dev/nvidiactl")
    assert [str(d.address) for d in host.devices if d.is_boot_display] == ["0000:00:02.0"]
    disk = host.device(PciAddress.parse("10000:01:00.0"))
    assert disk.bridge_path == "pci10000:00/10000:00:06.0"
    assert host.devices[-1] is disk
    endpoints = {
        (use.kind, str(use.address))
        for use in host.users.host_uses or ()
        if not host.device(use.address).is_bridge
    }
    assert endpoints == {("mounted-disk", "0000:04:01.0"), ("default-route", "0000:04:00.0")}


def test_virtual_functions_are_linked_both_ways_and_alive(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    physical = PciAddress.parse("0000:05:00.0")
    kernel.write(kernel_path(kernel, physical, "sriov_numvfs"), "3")
    host = scan(kernel)
    functions = host.device(physical).virtual_functions
    assert len(functions) == 3
    for address in functions:
        virtual = host.device(address)
        assert virtual.physical_function == physical
        assert virtual.is_responsive  # though its vendor reads as ones


def test_a_device_that_fell_off_the_bus_is_seen(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    kernel.fall_off_bus("0000:02:00.0")
    assert not scan(kernel).device(PciAddress.parse("0000:02:00.0")).is_responsive


def test_without_an_iommu_vgpus_make_no_iommu(tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path)
    assert not scan(kernel).iommu.is_on
    other = workstation(tmp_path / "other")
    create = "/sys/devices/virtual/mbochs/mbochs/mdev_supported_types/mbochs-small/create"
    other.write(HostPath(create), UUID)
    (group,) = [g for g in scan(other).groups if UUID in g.members]
    assert not group.is_noiommu


def test_a_recording_without_the_class_of_parents_still_shows_them(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    create = "/sys/devices/virtual/mbochs/mbochs/mdev_supported_types/mbochs-small/create"
    kernel.write(HostPath(create), UUID)
    shutil.rmtree(f"{kernel.root}/sys/class/mdev_bus")
    host = scan(HostTree(kernel.root))
    assert [parent.name for parent in host.vgpus.parents] == ["0000:06:00.0", "mbochs"]
    assert [vgpu.parent for vgpu in host.vgpus.active] == ["mbochs"]


def kernel_path(kernel: HostTree, address: PciAddress, name: str) -> HostPath:
    path = pci_device(address) / name
    assert kernel.exists(path)
    return path


def test_sound_and_nvidia_nodes_belong_to_their_functions(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    root = Path(kernel.root)
    audio = root / "sys/bus/pci/devices/0000:01:00.1/sound/card1"
    for name in ("controlC1", "pcmC1D0p", "id"):
        (audio / name).mkdir()
    information = root / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t A2\nDevice Minor: \t 3\n")
    host = scan(kernel)
    gpu, sound = (host.device(PciAddress.parse(f"0000:01:00.{n}")) for n in (0, 1))
    assert gpu.nodes[-1] == "/dev/nvidia3"
    assert sound.nodes == ("/dev/snd/controlC1", "/dev/snd/pcmC1D0p")


def test_nodes_of_infiniband_belong_to_their_adapter(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    adapter = Path(kernel.root, "sys/bus/pci/devices/0000:05:00.0")
    for name in ("verbs/uverbs3", "verbs/abi_version", "mad/umad3", "mad/issm3"):
        (adapter / f"infiniband_{name}").mkdir(parents=True)
    nodes = scan(kernel).device(PciAddress.parse("0000:05:00.0")).nodes
    assert nodes == tuple(f"/dev/infiniband/{name}" for name in ("uverbs3", "issm3", "umad3"))


def test_one_odd_function_hides_no_other(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    devices = Path(kernel.root, "sys/bus/pci/devices")
    before = len(scan(HostTree(kernel.root)).devices)
    odd = devices / "0000:01:00.0"
    for name, text in {"resource": "0x1 0x2\n", "numa_node": "²\n", "revision": ""}.items():
        (odd / name).chmod(0o644)
        (odd / name).write_text(text)
    (odd / "physfn").symlink_to("../nonsense")
    (devices / "0000:09:00.0").symlink_to("/")
    (devices / "0000:zz:00.0").symlink_to("nowhere")
    with pytest.warns(UserWarning, match=r"cannot identify 0000:09:00\.0, omitted"):
        host = scan(HostTree(kernel.root))
    assert len(host.devices) == before
    assert host.device(PciAddress.parse("0000:01:00.0")).numa_node is None


def test_a_pipe_in_place_of_an_attribute_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vendor")
    assert HostTree(tmp_path).read(HostPath("/vendor")) in (None, "")


def test_a_record_that_is_none_hides_no_other(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    api.apply(Bind((PciAddress.parse("0000:01:00.0"),)), tree=kernel)
    origins = Path(kernel.root, "var/lib/vfiomgr/origins")
    for name, address in {"a": '"zz"', "b": "5"}.items():
        text = '{"api_version": "vfiomgr/v1", "device": {"address": ' + address + "}}"
        (origins / f"{name}.json").write_text(text)
    with pytest.warns(UserWarning, match="not a record of vfiomgr"):
        assert len(scan(kernel).origins) == 2
