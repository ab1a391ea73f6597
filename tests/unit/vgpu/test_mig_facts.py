"""What nvidia-smi prints of GPU instances, on several cards and by several generations of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.devices import pci_device
from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.host.tree import HostTree
from vfiomgr.vgpu.instance_model import InstanceProfile
from vfiomgr.vgpu.nvidia_smi import (
    parse_instances,
    parse_processes,
    parse_profiles,
    read_instances,
    read_partitions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GPU = pci_device("0000:41:00.0")
DIVIDED = frozenset({str(GPU.address)})
A100_PROFILES = """\
+-----------------------------------------------------------------------------+
| GPU instance profiles:                                                      |
| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                              Free/Total   GiB              CE    JPEG  OFA  |
|=============================================================================|
|   0  MIG 1g.5gb        19     0/7        4.75       No     14     0     0   |
|                                                             1     0     0   |
+-----------------------------------------------------------------------------+
|   0  MIG 1g.5gb+me     20     0/1        4.75       No     14     1     0   |
|                                                             1     1     1   |
+-----------------------------------------------------------------------------+
|   0  MIG 1g.10gb       15     1/4        9.62       No     14     1     0   |
|                                                             1     0     0   |
+-----------------------------------------------------------------------------+
"""
A100_PLACES = """\
GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 20 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 15 Placements: {0,2,4,6}:2
GPU  0 Profile ID  0 Placement : {0}:8
"""
BLACKWELL_PROFILES = """\
+-------------------------------------------------------------------------------+
| GPU instance profiles:                                                        |
| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                                Free/Total   GiB              CE    JPEG  OFA  |
|===============================================================================|
|   2  MIG 1g.24gb+gfx     47     4/4        23.62      No     46     1     1   |
|                                                               1     1     0   |
+-------------------------------------------------------------------------------+
|   2  MIG 1g.24gb+me.all  65     1/1        23.62      No     46     4     4   |
|                                                               1     4     1   |
+-------------------------------------------------------------------------------+
|   2  MIG 1g.24gb-me      67     4/4        23.62      No     46     0     0   |
|                                                               1     0     0   |
+-------------------------------------------------------------------------------+
|   3  MIG 4g.96gb+gfx     32     1/1        95.00      No     188    4     4   |
|                                                               4     4     1   |
+-------------------------------------------------------------------------------+
"""
INSTANCES = """\
+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
|   0  MIG 1g.5gb            19        9          6:1     |
+---------------------------------------------------------+
|   0  MIG 2g.10gb           14        3          4:2     |
+---------------------------------------------------------+
|   1  MIG 1g.24gb+me.all    65        3          0:3     |
+---------------------------------------------------------+
"""
OLD_INSTANCES = """\
+----------------------------------------------------+
| GPU instances:                                     |
| GPU   Name          Profile  Instance   Placement  |
|                       ID       ID       Start:Size |
|====================================================|
||   0  MIG 3g.20gb       9        1          4:4     |
+----------------------------------------------------+
"""
COMPUTE = """\
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0      9       MIG 1g.5gb           0         0          0:1     |
+--------------------------------------------------------------------+
|   0      3       MIG 1c.2g.10gb       0         0          0:1     |
+--------------------------------------------------------------------+
|   0      3       MIG 1c.2g.10gb       0         1          1:1     |
+--------------------------------------------------------------------+
"""
OLD_COMPUTE = """\
+-------------------------------------------------------+
| Compute instances:                                    |
| GPU     GPU       Name             Profile   Instance |
|       Instance                       ID        ID     |
|         ID                                            |
|=======================================================|
|   0      1       MIG 3g.20gb          2         0     |
+-------------------------------------------------------+
"""
LOG = """\
GPU 00000000:41:00.0
    MIG Device
        Index                             : 0
        GPU Instance ID                   : 9
    Processes
        GPU instance ID                   : 9
        Compute instance ID               : 0
        Process ID                        : 4711
            Type                          : C
            Name                          : /usr/bin/python3
            Used GPU Memory               : 512 MiB
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 924
            Type                          : G
            Name                          : /usr/lib/xorg/Xorg
GPU 00000001:C8:00.0
    Processes
        GPU instance ID                   : 9
        Compute instance ID               : 0
        Process ID                        : 12
            Type                          : C
            Name                          :
"""


def test_profiles_with_their_places_and_engines() -> None:
    (profiles,) = parse_profiles(A100_PROFILES, A100_PLACES).values()
    assert profiles[0] == InstanceProfile(
        19, "1g.5gb", 4864, 0, 7, tuple(range(7)), 1, engines=(14, 0, 0, 0, 0)
    )
    assert profiles[1] == InstanceProfile(
        20, "1g.5gb+me", 4864, 0, 1, tuple(range(7)), 1, engines=(14, 1, 0, 1, 1)
    )
    assert (profiles[2].free, profiles[2].total, profiles[2].starts) == (1, 4, (0, 2, 4, 6))


def test_names_with_suffixes_that_fill_their_column() -> None:
    found = parse_profiles(BLACKWELL_PROFILES, "GPU  3 Profile ID 32 Placement : {0}:12\n")
    assert [profile.name for profile in found[2]] == [
        *("1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me")
    ]
    assert found[2][1].engines == (46, 4, 4, 4, 1)
    assert (found[2][0].starts, found[2][0].size) == ((), 0), "no place is told of these"
    assert (found[3][0].id, found[3][0].starts, found[3][0].size) == (32, (0,), 12)


def test_instances_by_the_memory_that_they_have_and_their_compute_instances() -> None:
    found = parse_instances(INSTANCES, COMPUTE)
    assert [(one.id, one.name, one.start, one.size) for one in found[0]] == [
        (3, "2g.10gb", 4, 2),
        (9, "1g.5gb", 6, 1),
    ]
    parts, whole = found[0]
    assert (parts.compute_instances, parts.is_whole) == (("1c.2g.10gb", "1c.2g.10gb"), False)
    assert (whole.compute_instances, whole.is_whole) == (("1g.5gb",), True)
    (bare,) = found[1]
    assert (bare.name, bare.compute_instances, bare.is_whole) == ("1g.24gb+me.all", (), True)
    assert bare.place.has_compute is False


def test_the_tables_of_older_drivers() -> None:
    (one,) = parse_instances(OLD_INSTANCES, OLD_COMPUTE)[0]
    assert (one.id, one.profile, one.start, one.compute_instances) == (1, 9, 4, ("3g.20gb",))


def test_processes_by_gpu_and_instance() -> None:
    assert parse_processes(LOG) == {
        ("0000:41:00.0", 9): ("python3 (PID 4711)",),
        ("0001:c8:00.0", 9): ("a process (PID 12)",),
    }


class Machine(HostTree):
    """One on which nvidia-smi answers as told; None is an end with a number that says nothing."""

    runs_programs = True

    def __init__(self, root: Path, answers: dict[str, str | int]) -> None:
        super().__init__(root)
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def run(self, command: Sequence[str], seconds: float = 0) -> str | None:
        """Answer, and remember it."""
        assert seconds >= 0
        self.asked.append(tuple(command))
        known = [answer for word, answer in self.answers.items() if word in command]
        return known[0] if known and isinstance(known[0], str) else None

    def call(self, *command: str, limit: float | None = None) -> None:  # noqa: ARG002
        """End with the number."""
        status = next(
            (a for word, a in self.answers.items() if word in command and isinstance(a, int)), 255
        )
        raise ProgramFailed("it failed", "", status=status, said="")  # noqa: EM101, TRY003


ANSWERS: dict[str, str | int] = {
    "--query-gpu=index,pci.bus_id": "0, 00000000:41:00.0\n1, 00000001:C8:00.0\nbad line\n",
    "-lgip": A100_PROFILES,
    "-lgipp": A100_PLACES,
    "-lgi": INSTANCES,
    "-lci": COMPUTE,
}


def test_a_partition_is_of_a_gpu_by_its_index(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ANSWERS)
    (found,) = read_partitions(machine, [GPU], DIVIDED, LOG)
    assert found.gpu == "0000:41:00.0"
    assert [one.id for one in found.instances] == [3, 9]
    assert found.instances[1].processes == ("python3 (PID 4711)",)
    assert found.called("MIG 1g.5gb") == found.called("19") == found.profile(19)
    assert found.called("1g.5gb+ME") == found.profile(20)
    assert found.called("9g.99gb") is None


def test_nothing_is_asked_where_no_gpu_has_mig(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ANSWERS)
    assert read_partitions(machine, [GPU], frozenset(), LOG) == ()
    assert machine.asked == []


def test_none_there_is_told_from_not_known(tmp_path: Path) -> None:
    """nvidia-smi ends with 6 where there is none, and with other numbers where it cannot say."""
    none = Machine(tmp_path, {**ANSWERS, "-lgi": 6, "-lci": 6})
    (empty,) = read_partitions(none, [GPU], DIVIDED, LOG)
    assert empty.instances == ()
    assert read_instances(none, GPU.address) == ()
    unknown = Machine(tmp_path, {**ANSWERS, "-lgi": 255})
    assert read_partitions(unknown, [GPU], DIVIDED, LOG) == ()
    with pytest.raises(HostError, match=r"cannot read the GPU instances of 0000:41:00\.0"):
        read_instances(unknown, GPU.address)
    assert read_partitions(HostTree(tmp_path), [GPU], DIVIDED, LOG) == ()
