"""Functions that get their IOMMU group with their driver: on ARM before Linux 6.15."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import arm_server
from vfiomgr.host.owners import NodeAccess
from vfiomgr.paths import vfio_group_node
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, AUDIO, NIC, LONE = "0000:01:00.0", "0000:01:00.1", "0000:02:00.0", "0000:03:00.0"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return arm_server(tmp_path)


def states(kernel: FakeKernel) -> dict[str, tuple[str | None, int | None]]:
    return {str(d.address): (d.driver, d.iommu_group) for d in scan(kernel, kernel).devices}


def test_a_plan_waits_for_a_node_whose_number_nobody_knows_yet(run: Run) -> None:
    answer = run("bind", GPU, "--dry-run", "--owner", "12:34")
    planned = answer.stdout
    node = f"/dev/vfio/$(basename $(readlink /sys/bus/pci/devices/{GPU}/iommu_group))"
    assert f"{GPU}: wait for its VFIO node\n       ls -l {node}\n" in planned
    assert f"chown 12:34 {node}\n       chmod 0660 {node}\n" in planned
    assert f"not checked: the IOMMU group of {GPU}: this kernel assigns it" in answer.stderr


def test_the_node_gets_its_owner_and_loses_it_again(kernel: FakeKernel, run: Run) -> None:
    done = run("bind", GPU, "--owner", "12:34")
    assert done.status == 0, done.stderr
    assert f"{GPU} is on vfio-pci, VFIO node: /dev/vfio/10\n" in done.stdout
    assert states(kernel)[GPU] == states(kernel)[AUDIO] == ("vfio-pci", 10)
    assert kernel.access(vfio_group_node(10)) == NodeAccess(12, 34, 0o660)
    assert run("unbind", GPU).status == 0
    assert states(kernel)[GPU] == (None, 10), "the kernel keeps the group"


def test_a_group_that_turns_out_not_to_be_viable_is_undone(kernel: FakeKernel, run: Run) -> None:
    failed = run("bind", LONE)
    assert failed.status == 1
    said = f"IOMMU group 11, which the kernel assigned to {LONE}, also holds {NIC} on igb"
    assert said in failed.stderr
    assert "everything is as it was before" in failed.stderr
    assert states(kernel)[LONE] == (None, 11)
    again = run("bind", LONE)
    assert again.status == 4
    assert "IOMMU group 11 also holds" in again.stderr
    assert run("bind", LONE, "--with-group").status == 0
    assert states(kernel)[LONE] == states(kernel)[NIC] == ("vfio-pci", 11)


def test_of_its_own_slot_too_nothing_may_stay_on_a_host_driver(
    kernel: FakeKernel, run: Run
) -> None:
    failed = run("bind", GPU, "--function-only")
    assert failed.status == 1
    assert f"the kernel assigned to {GPU}, also holds {AUDIO} on snd_hda_intel" in failed.stderr
    assert states(kernel)[GPU] == (None, 10)


def test_functions_of_one_late_group_are_moved_before_it_is_examined(
    kernel: FakeKernel, run: Run
) -> None:
    assert run("bind", LONE, NIC).status == 0
    assert states(kernel)[LONE] == states(kernel)[NIC] == ("vfio-pci", 11)


def test_a_command_line_needs_the_node_whose_name_nobody_knows_yet(run: Run) -> None:
    command = ("kata", "run-command", GPU, "--kata-runtime", "go", "--kata-version", "3.20")
    refused = run(*command)
    assert (refused.status, refused.stdout) == (4, "")
    assert f"remedy: vfiomgr bind {GPU}\n" in refused.stderr
    assert run("bind", GPU).status == 0
    assert "--device /dev/vfio/10 " in run(*command).stdout
