"""sriov-manage and nvidia-smi of the fake host, and the modes that they set."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import PowerCut, WouldBlockForEver
from tests.fakes.nvidia.cards import RTX_PRO_6000
from tests.fakes.nvidia.driver import NVIDIA_SMI, SRIOV_MANAGE
from tests.fakes.vgpu_hosts import GPUS, a40_host, l40s_host, mig_host, t4_host
from tests.unit.fakes.vgpu_deeds import available, create, uuid, written
from vfiomgr.errors import HostError
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES, PCI_DRIVERS, HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = GPUS[0]
SMI_GPU = "00000000:21:00.0"
ONE, TWO, THREE = (f"0000:21:00.{n}" for n in (4, 5, 6))
NUMVFS = PCI_DEVICES / GPU / "sriov_numvfs"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return l40s_host(tmp_path, total_vfs=4)


def fails(kernel: FakeKernel, *command: str) -> str:
    """What a program that ends badly says."""
    with pytest.raises(HostError) as failed:
        kernel.call(*command)
    return str(failed.value)


def set_type(kernel: FakeKernel, address: str, number: int) -> int:
    return written(kernel, PCI_DEVICES / address / "nvidia/current_vgpu_type", str(number))


def nvidia(kernel: FakeKernel, address: str, name: str) -> str | None:
    return kernel.read(PCI_DEVICES / address / "nvidia" / name)


def creatable(kernel: FakeKernel, address: str) -> set[int]:
    lines = (nvidia(kernel, address, "creatable_vgpu_types") or "").split("\n")
    return {int(line.split(" ")[0]) for line in lines[1:]}


def shown(kernel: FakeKernel, key: str) -> str:
    """One value of `nvidia-smi -q`."""
    output = kernel.run(["nvidia-smi", "-q", "-i", "0"]) or ""
    (value,) = [line.split(": ")[1] for line in output.split("\n") if line.strip().startswith(key)]
    return value


# ---- what can be run at all


def test_only_what_is_installed_can_be_run(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, has_programs=False)
    assert kernel.run(["nvidia-smi", "-q"]) is None
    assert "No such file" in fails(kernel, SRIOV_MANAGE, "-e", "ALL")
    assert kernel.operations == []
    kernel.programs.install(NVIDIA_SMI)
    assert kernel.run(["nvidia-smi", "-L"])
    assert kernel.run([NVIDIA_SMI, "-L"])
    kernel.reboot()
    assert kernel.run(["nvidia-smi", "-L"]), "a package outlasts a reboot"


def test_a_file_of_another_program_is_none(kernel: FakeKernel) -> None:
    kernel.programs.install("/usr/bin/update-initramfs")
    assert kernel.run(["update-initramfs"]) is None


def test_what_changes_counts_as_an_operation_and_what_asks_does_not(kernel: FakeKernel) -> None:
    kernel.run(["nvidia-smi", "-q"])
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    kernel.call(SRIOV_MANAGE, "-d", GPU)
    assert [str(o) for o in kernel.operations] == [
        "run-program nvidia-smi 'vgpu -shm 1 -i 0'",
        f"run-program {SRIOV_MANAGE} '-d {GPU}'",
    ]


def test_faults_and_deaths_strike_at_programs(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    kernel.fail(at=1, errno=errno.EIO)
    assert "ended with 1" in fails(kernel, SRIOV_MANAGE, "-e", GPU)
    assert kernel.read(NUMVFS) == "0"
    kernel.fail(at=1, errno=errno.EIO)
    assert kernel.run(["nvidia-smi", "vgpu", "-shm", "1"]) is None
    kernel.fail_after(at=1, errno=errno.EIO)
    assert "ended with 1" in fails(kernel, SRIOV_MANAGE, "-e", GPU)
    assert kernel.read(NUMVFS) == "2"
    kernel.kill(at=1)
    with pytest.raises(PowerCut):
        kernel.call(SRIOV_MANAGE, "-d", GPU)
    kernel.revive()
    assert kernel.read(NUMVFS) == "2"


# ---- sriov-manage


@pytest.mark.parametrize("meant", [GPU, "ALL", "all", SMI_GPU])
def test_functions_are_made_and_taken_away(tmp_path: Path, meant: str) -> None:
    kernel = l40s_host(tmp_path, total_vfs=4, is_enabled=False)
    before = kernel.state()
    assert kernel.run([SRIOV_MANAGE, "-e", meant]) == f"Enabling VFs on {GPU}\n"
    assert kernel.read(NUMVFS) == "4"
    assert kernel.driver_of(GPU) == "nvidia"
    assert kernel.driver_of(THREE) == "nvidia"
    assert set_type(kernel, ONE, 1148) == 0
    assert "already has VFs enabled" in (kernel.run([SRIOV_MANAGE, "-e", meant]) or "")
    assert nvidia(kernel, ONE, "current_vgpu_type") == "1148"
    kernel.call(SRIOV_MANAGE, "-d", meant)
    assert "already has VFs disabled" in (kernel.run([SRIOV_MANAGE, "-d", meant]) or "")
    assert kernel.state() == before


def test_all_gpus_at_once(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, gpus=2, total_vfs=2, is_enabled=False)
    kernel.call(SRIOV_MANAGE, "-e", "ALL")
    assert create(kernel, "0000:41:00.5", "nvidia-558", uuid(1)) == 0
    kernel.call(SRIOV_MANAGE, "-d", GPUS[1])
    assert kernel.children(MDEV_DEVICES) == []
    assert kernel.read(NUMVFS) == "2"


@pytest.mark.parametrize("arguments", [(), ("-e",), ("-x", "ALL"), ("-e", "0000:99:00.0")])
def test_what_it_does_not_know_it_refuses(kernel: FakeKernel, arguments: tuple[str, ...]) -> None:
    assert "ended with 1" in fails(kernel, SRIOV_MANAGE, *arguments)


def test_a_gpu_in_use_gives_no_lock(kernel: FakeKernel) -> None:
    kernel.hold(GPU)
    assert f"Cannot obtain unbindLock for {GPU}" in fails(kernel, SRIOV_MANAGE, "-d", GPU)
    kernel.let_go(GPU)
    set_type(kernel, ONE, 1148)
    kernel.guest_opens(int(kernel.link_name(PCI_DEVICES / ONE / "iommu_group") or ""))
    assert "Cannot obtain unbindLock" in fails(kernel, SRIOV_MANAGE, "-d", "ALL")
    assert kernel.driver_of(GPU) == "nvidia"
    assert nvidia(kernel, ONE, "current_vgpu_type") == "1148"


def test_it_leaves_a_gpu_without_driver_that_the_driver_does_not_take(kernel: FakeKernel) -> None:
    kernel.driver("nvidia").probe_error = errno.EIO
    assert "write error: " in fails(kernel, SRIOV_MANAGE, "-d", GPU)
    assert kernel.driver_of(GPU) is None
    kernel.driver("nvidia").probe_error = None
    kernel.call(SRIOV_MANAGE, "-e", GPU)
    assert kernel.driver_of(GPU) == "nvidia"


def test_wedged_functions_are_well_again_after_a_cycle(kernel: FakeKernel) -> None:
    for name in ("unbind", "bind"):
        kernel.write(PCI_DRIVERS / "nvidia" / name, ONE)
    assert set_type(kernel, ONE, 1148) == errno.EINVAL
    for option in ("-d", "-e"):
        kernel.call(SRIOV_MANAGE, option, GPU)
    assert set_type(kernel, ONE, 1148) == 0


# ---- persistence mode


def test_a_gpu_in_persistence_mode_is_never_let_go(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    with pytest.raises(WouldBlockForEver, match="persistence mode"):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)


def test_a_gpu_that_is_bound_anew_is_not_in_persistence_mode(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    kernel.call("nvidia-smi", "-pm", "0", "-i", GPU)
    for name in ("unbind", "bind", "unbind", "bind"):
        kernel.write(PCI_DRIVERS / "nvidia" / name, GPU)
    assert shown(kernel, "Persistence Mode") == "Disabled"


@pytest.mark.parametrize("option", ["-e", "-d"])
def test_the_program_takes_a_gpu_out_of_it_and_leaves_it_in_it(tmp_path: Path, option: str) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=option == "-d")
    for before in ("Enabled", "Disabled"):
        assert shown(kernel, "Persistence Mode") == before
        kernel.call(SRIOV_MANAGE, option, GPU)
        assert shown(kernel, "Persistence Mode") == "Enabled"
        kernel.call(SRIOV_MANAGE, {"-e": "-d", "-d": "-e"}[option], GPU)
        kernel.call("nvidia-smi", "-pm", "0", "-i", GPU)


# ---- heterogeneous mode


def test_heterogeneous_mode_lets_sizes_be_mixed(kernel: FakeKernel) -> None:
    assert shown(kernel, "vGPU Heterogeneous Mode") == "Disabled"
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", SMI_GPU)
    assert shown(kernel, "vGPU Heterogeneous Mode") == "Enabled"
    assert set_type(kernel, ONE, 1155) == 0
    assert nvidia(kernel, ONE, "placement_id") == "0"
    assert 1156 not in creatable(kernel, TWO), "48 GB fit no more"
    assert set_type(kernel, TWO, 1152) == 0
    assert nvidia(kernel, TWO, "placement_id") == "24"
    assert set_type(kernel, THREE, 1152) == 0
    assert nvidia(kernel, THREE, "placement_id") == "40", "8 GB lie at the ends of a half"
    assert creatable(kernel, "0000:21:00.7") == {
        1145, 1146, 1147, 1148, 1149, 1150, 1157, 1158, 1159, 1160, 2164,
    }  # fmt: skip
    assert set_type(kernel, "0000:21:00.7", 1151) == errno.EIO, "6 GB start at 30 or at 36"


def test_a_placement_can_be_chosen_before_the_vgpu_is_used(kernel: FakeKernel) -> None:
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    set_type(kernel, ONE, 1152)
    set_type(kernel, TWO, 1152)
    placement = PCI_DEVICES / ONE / "nvidia/placement_id"
    assert written(kernel, placement, "8") == errno.EINVAL, "8 GB do not start there"
    assert written(kernel, placement, "16") == errno.EINVAL, "the other has it"
    assert written(kernel, placement, "40") == 0
    assert kernel.read(placement) == "40"
    assert written(kernel, PCI_DEVICES / THREE / "nvidia/placement_id", "0") == errno.ENXIO


def test_it_cannot_be_set_beside_a_vgpu(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, 1148)
    said = fails(kernel, "nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    assert "ended with 19" in said
    assert "In use by another client" in said


@pytest.mark.parametrize("option", ["-e", "-d"])
def test_it_is_lost_silently_when_functions_come_or_go(tmp_path: Path, option: str) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=option == "-d")
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    assert shown(kernel, "vGPU Heterogeneous Mode") == "Enabled"
    kernel.call(SRIOV_MANAGE, option, GPU)
    assert shown(kernel, "vGPU Heterogeneous Mode") == "Disabled"


def test_it_is_lost_at_a_reboot(kernel: FakeKernel) -> None:
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    kernel.reboot()
    assert shown(kernel, "vGPU Heterogeneous Mode") == "Disabled"


def test_a_gpu_that_cannot_says_so_in_words_that_hold_the_opposite(tmp_path: Path) -> None:
    kernel = t4_host(tmp_path)
    assert shown(kernel, "Heterogeneous Time-Slice Sizes") == "Not Supported"
    assert shown(kernel, "Heterogenous Multi-vGPU") == "Supported", "of the driver, and misspelt"
    assert shown(kernel, "vGPU Heterogeneous Mode") == "N/A"
    assert "ended with 3" in fails(kernel, "nvidia-smi", "vgpu", "-shm", "1", "-i", "0")


def test_mediated_devices_follow_the_mode_too(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=3)
    kernel.call("nvidia-smi", "vgpu", "-shm", "1", "-i", "0")
    assert create(kernel, ONE, "nvidia-565", uuid(1)) == 0
    assert available(kernel, TWO)["nvidia-562"] == 1
    assert create(kernel, TWO, "nvidia-562", uuid(2)) == 0
    assert kernel.read(MDEV_DEVICES / uuid(2) / "nvidia/placement_id") == "24"


# ---- MIG


def test_mig_backed_vgpus_need_a_gpu_instance(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, total_vfs=4)
    assert shown(kernel, "Current") == "Disabled"
    kernel.call("nvidia-smi", "-i", "0", "-mig", "1")
    assert shown(kernel, "Current") == "Enabled"
    kernel.call(SRIOV_MANAGE, "-e", GPU)
    assert creatable(kernel, ONE) == set()
    assert set_type(kernel, ONE, 474) == errno.EIO
    kernel.call("nvidia-smi", "mig", "-i", "0", "-cgi", "19,3g.20gb", "-C")
    assert creatable(kernel, ONE) == {474, 476}
    assert set_type(kernel, ONE, 474) == 0
    assert nvidia(kernel, ONE, "gpu_instance_id") == "7"
    assert nvidia(kernel, ONE, "placement_id") == "0"
    assert creatable(kernel, TWO) == {476}, "each instance holds one"
    assert set_type(kernel, TWO, 468) == errno.EIO, "no time-sliced one beside them"
    assert "ended with 19" in fails(kernel, "nvidia-smi", "-i", "0", "-mig", "0")
    assert "ended with 3" in fails(kernel, "nvidia-smi", "vgpu", "-shm", "1", "-i", "0")


def test_several_vgpus_of_one_size_share_an_instance(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, card=RTX_PRO_6000, total_vfs=12)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call(SRIOV_MANAGE, "-e", GPU)
    kernel.call("nvidia-smi", "mig", "-cgi", "47", "-C", "-i", "0")
    vfs = kernel.nvidia.gpus.virtual(kernel.nvidia.gpus.known[GPU])
    assert set_type(kernel, vfs[0], 1549) == 0
    assert set_type(kernel, vfs[1], 1561) == errno.EIO, "another size needs another instance"
    for address in vfs[1:8]:
        assert set_type(kernel, address, 1549) == 0
    assert nvidia(kernel, vfs[7], "placement_id") == "21"
    assert set_type(kernel, vfs[8], 1549) == errno.EIO, "eight of 3 GB fill 24 GB"
    kernel.call("nvidia-smi", "mig", "-cgi", "1g.24gb+gfx", "-C", "-i", "0")
    assert set_type(kernel, vfs[8], 1561) == 0
    assert nvidia(kernel, vfs[8], "gpu_instance_id") == "4"


def test_making_functions_wipes_instances_but_not_the_mode(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-cgi", "7g.40gb", "-C", "-i", "0")
    kernel.call(SRIOV_MANAGE, "-e", GPU)
    assert kernel.run(["nvidia-smi", "mig", "-lgi", "-i", "0"]) is None
    assert shown(kernel, "Current") == "Enabled"
    kernel.reboot()
    assert shown(kernel, "Current") == "Enabled", "MIG outlasts a reboot, functions do not"
    assert kernel.read(NUMVFS) == "0"


def test_instances_are_listed_with_their_places(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path)
    assert "ended with 6" in fails(kernel, "nvidia-smi", "mig", "-cgi", "19", "-i", "0")
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-cgi", "9,14", "-C", "-i", "0")
    assert kernel.run(["nvidia-smi", "mig", "-lgi", "-i", "0"]) == (
        "+---------------------------------------------------------+\n"
        "| GPU instances:                                          |\n"
        "| GPU   Name               Profile  Instance   Placement  |\n"
        "|                            ID       ID       Start:Size |\n"
        "|=========================================================|\n"
        "|   0  MIG 3g.20gb            9        2          0:4     |\n"
        "+---------------------------------------------------------+\n"
        "|   0  MIG 2g.10gb           14        5          4:2     |\n"
        "+---------------------------------------------------------+\n"
    )


def test_an_instance_goes_after_its_vgpu_and_its_compute_instances(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call(SRIOV_MANAGE, "-e", GPU)
    kernel.call("nvidia-smi", "mig", "-cgi", "19", "-C", "-i", "0")
    set_type(kernel, ONE, 474)
    said = fails(kernel, "nvidia-smi", "mig", "-dci", "-i", "0")
    assert "In use by another client" in said
    set_type(kernel, ONE, 0)
    assert "ended with 19" in fails(kernel, "nvidia-smi", "mig", "-dgi", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-dci", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-dgi", "-gi", "7", "-i", "0")
    assert creatable(kernel, ONE) == set()
    kernel.call(SRIOV_MANAGE, "-d", GPU)
    kernel.call("nvidia-smi", "-mig", "0", "-i", "0")
    assert shown(kernel, "Current") == "Disabled"


def test_more_instances_than_fit_are_refused(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-cgi", "5", "-i", "0")
    said = fails(kernel, "nvidia-smi", "mig", "-cgi", "14,14", "-i", "0")
    assert "ended with 23" in said
    assert "Insufficient Resources" in said
    assert "ended with 2" in fails(kernel, "nvidia-smi", "mig", "-cgi", "9g.99gb", "-i", "0")
    listed = kernel.run(["nvidia-smi", "mig", "-lgip", "-i", "0"]) or ""
    assert "MIG 1g.5gb" in listed
    assert " 1/7 " in listed


def test_an_instance_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    places = kernel.run(["nvidia-smi", "mig", "-lgipp", "-i", "0"]) or ""
    assert "GPU  0 Profile ID 14 Placements: {0,2,4}:2\n" in places
    assert "GPU  0 Profile ID  5 Placement : {0}:4\n" in places
    kernel.call("nvidia-smi", "mig", "-cgi", "19:5,9:0", "-i", "0")
    listed = kernel.run(["nvidia-smi", "mig", "-lgi", "-i", "0"]) or ""
    assert "|   0  MIG 1g.5gb            19       12          5:1     |" in listed
    assert "ended with 23" in fails(kernel, "nvidia-smi", "mig", "-cgi", "14:4", "-i", "0")
    assert "ended with 2" in fails(kernel, "nvidia-smi", "mig", "-cgi", "14:3", "-i", "0")


def test_compute_instances_come_and_go_by_themselves(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-cgi", "9:0", "-i", "0")
    assert "ended with 6" in fails(kernel, "nvidia-smi", "mig", "-lci", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-cci", "-gi", "2", "-i", "0")
    listed = kernel.run(["nvidia-smi", "mig", "-lci", "-i", "0"]) or ""
    assert "|   0      2       MIG 3g.20gb" in listed
    assert "ended with 23" in fails(kernel, "nvidia-smi", "mig", "-cci", "-gi", "2", "-i", "0")
    kernel.call("nvidia-smi", "mig", "-dci", "-gi", "2", "-i", "0")
    assert "ended with 6" in fails(kernel, "nvidia-smi", "mig", "-dci", "-gi", "2", "-i", "0")


def test_a_gpu_without_mig_has_none(kernel: FakeKernel) -> None:
    assert shown(kernel, "Current") == "N/A"
    assert "ended with 3" in fails(kernel, "nvidia-smi", "-mig", "1", "-i", "0")


# ---- what nvidia-smi tells


def test_fields_are_queried_as_csv(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, gpus=2, total_vfs=0)
    fields = "--query-gpu=pci.bus_id,persistence_mode,name,memory.total,mig.mode.current"
    assert kernel.run(["nvidia-smi", fields, "--format=csv,noheader"]) == (
        "00000000:21:00.0, Enabled, NVIDIA L40S, 46068 MiB, [N/A]\n"
        "00000000:41:00.0, Enabled, NVIDIA L40S, 46068 MiB, [N/A]\n"
    )
    assert (
        kernel.run(
            ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,nounits", "-i", "1"]
        )
        == "index, memory.total\n1, 46068\n"
    )
    assert "memory.total [MiB]" in (
        kernel.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv"]) or ""
    )
    assert "ended with 2" in fails(kernel, "nvidia-smi", "--query-gpu=cost", "--format=csv")


@pytest.mark.parametrize("wanted", ["0", GPU, SMI_GPU, "00000000:21:00.0"])
def test_a_gpu_is_named_in_many_ways(kernel: FakeKernel, wanted: str) -> None:
    found = kernel.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", wanted])
    assert found is not None
    assert kernel.run(["nvidia-smi", "-L", "-i", found.strip()]) is not None


def test_one_that_is_not_there_is_6(kernel: FakeKernel) -> None:
    for wanted in ("7", "0000:99:00.0", "GPU-no"):
        said = fails(kernel, "nvidia-smi", "-q", "-i", wanted)
        assert said.endswith("ended with 6: No devices were found")


def test_a_gpu_on_vfio_is_invisible(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    kernel.call("nvidia-smi", "-pm", "0")
    kernel.write(PCI_DEVICES / GPU / "driver_override", "vfio-pci")
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    kernel.write(PCI_DRIVERS / "vfio-pci/bind", GPU)
    assert "ended with 6" in fails(kernel, "nvidia-smi", "-L")


def test_without_the_driver_it_is_9(kernel: FakeKernel) -> None:
    kernel.sysfs.drop(PCI_DRIVERS / "nvidia")
    assert "ended with 9" in fails(kernel, "nvidia-smi", "-L")


def test_a_stuck_gpu_makes_it_wait_for_ever(kernel: FakeKernel) -> None:
    kernel.hold(GPU)
    with pytest.raises(WouldBlockForEver):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    assert kernel.run(["nvidia-smi", "-q"]) is None
    assert "timed out" in fails(kernel, "nvidia-smi", "-q")


def test_types_are_told_with_their_limits(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, card=RTX_PRO_6000, total_vfs=2, is_enabled=True)
    output = kernel.run(["nvidia-smi", "vgpu", "-s", "-v", "-i", "0"]) or ""
    assert output.startswith(
        "GPU 00000000:21:00.0\n"
        "    vGPU Type ID                          : 0x5ee\n"
        "        Name                              : NVIDIA RTX Pro 6000 Blackwell DC-2B\n"
        "        Class                             : NVS\n"
        "        GPU Instance Profile ID           : N/A\n"
        "        Max Instances                     : 32\n"
        "        Max Instances Per VM              : 1\n"
        "        Max Instances Per GI              : N/A\n"
        "        FB Memory                         : 2048 MiB\n"
    )
    assert "        GPU Instance Profile ID           : 47\n" in output
    creatable_now = kernel.run(["nvidia-smi", "vgpu", "-c", "-i", "0"]) or ""
    assert "DC-1-24Q" not in creatable_now
    set_type(kernel, ONE, 1519)
    assert kernel.run(["nvidia-smi", "vgpu", "-c", "-i", "0"]) == (
        "GPU 00000000:21:00.0\n    NVIDIA RTX Pro 6000 Blackwell DC-3Q\n"
    )


def test_the_tree_says_who_can_be_run(kernel: FakeKernel) -> None:
    assert kernel.exists(HostPath(SRIOV_MANAGE))
    assert kernel.exists(HostPath(NVIDIA_SMI))
