"""What is known of a host: which of its GPUs are free, and which are not, or perhaps not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.servers import dgx
from tests.unit.devices import with_facts
from tests.unit.fleet.hosts import a_card, a_snapshot
from tests.unit.partitions import partition
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.documents.text import TextFile
from vfiomgr.fleet.summary import Drift, drift_of, installed_drift, summarize
from vfiomgr.pci.iommu import IommuState
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import FILE, RECORD, InstalledLayout, render_record
from vfiomgr.snapshot.created import UNKNOWN, Created
from vfiomgr.snapshot.scan import scan
from vfiomgr.users.model import DeviceUser, UnknownUsers

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.fleet.model import HostSummary
    from vfiomgr.snapshot.model import HostSnapshot

AUDIO = replace(
    a_card(0), address=PciAddress.parse("0000:01:00.1"), class_code="040300", device_id="1"
)
LAYOUT = {
    "version": "vfiomgr/v1",
    "layouts": {"guests": {"devices": [{"select": {"id": "10de:2235"}, "state": "passthrough"}]}},
}

A40_8Q = a40_type(8)


def summary(host: HostSnapshot) -> HostSummary:
    return summarize(host, UNKNOWN, "/srv/gpu7.json.gz")


def states(host: HostSnapshot) -> list[tuple[str, str]]:
    return [(gpu.state, gpu.why) for gpu in summary(host).gpus]


def test_a_host_has_the_name_and_time_of_its_snapshot() -> None:
    host = a_snapshot(a_card(0))
    assert summary(host).name == "gpu7"
    named = summarize(host, Created("2026-11-29T08:00:00Z", "far", "1"), "/srv/x.json")
    assert (named.name, named.time, named.kernel) == ("far", "2026-11-29T08:00:00Z", "6.1.0")
    assert named.models == "NVIDIA A40"
    assert [(node.number, node.cpus) for node in named.nodes] == [(0, 16), (1, 16)]
    assert named.nodes[0].free_pages == {1 << 30: 64 << 30}


def test_a_gpu_is_free_only_if_it_has_no_user() -> None:
    host = a_snapshot(a_card(0), a_card(1), win=1)
    assert states(host) == [("free", ""), ("used", "win")]
    assert summary(host).guests == ("win",)


def test_a_user_of_the_audio_function_uses_the_card() -> None:
    host = a_snapshot(replace(a_card(0), iommu_group=9), AUDIO)
    users = (DeviceUser("/dev/vfio/1", 7, "qemu", None, (), "win"),)
    assert states(with_facts(host, users=users)) == [("used", "win")]


def test_a_gpu_on_its_host_driver_is_judged_by_bind() -> None:
    card = replace(a_card(0), driver="nvidia", nodes=("/dev/nvidia0",))
    host = a_snapshot(card)
    assert states(host) == [("free", "")]
    users = (DeviceUser("/dev/nvidia0", 7, "python"),)
    assert states(with_facts(host, users=users)) == [("used", "python")]
    display = a_snapshot(replace(card, is_boot_display=True))
    assert [(state, "console's display" in why) for state, why in states(display)] == [
        ("unavailable", True)
    ]


def test_without_root_a_gpu_is_unknown() -> None:
    host = with_facts(a_snapshot(a_card(0)), users=None)
    ((state, why),) = states(host)
    assert (state, why.partition(" (")[0]) == ("unknown", "its users are not in the snapshot")
    dead = with_facts(a_snapshot(a_card(0, is_responsive=False, driver="nvidia")), users=None)
    assert [state for state, _ in states(dead)] == ["unavailable"]


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia"])
def test_a_source_that_could_name_a_user_makes_it_unknown(driver: str) -> None:
    card = replace(a_card(0), driver=driver, nodes=("/dev/nvidia0",))
    unknown = (UnknownUsers("open-files", "cannot read /proc/7/fd", "run as root"),)
    ((state, why),) = states(with_facts(a_snapshot(card), unknown_users=unknown))
    assert state == "unknown"
    assert "cannot read /proc/7/fd" in why


def test_gpus_of_one_group_are_a_unit() -> None:
    together = [replace(a_card(number), iommu_group=5) for number in (0, 1)]
    host = a_snapshot(*together, a_card(2), win=0)
    found = summary(host).gpus
    assert [gpu.unit for gpu in found] == [0, 0, 1]
    assert [gpu.state for gpu in found] == ["used", "used", "free"]


def test_a_group_with_a_device_of_the_host_is_unavailable() -> None:
    disk = replace(a_card(4, "27b8"), class_code="010802", driver="nvme", iommu_group=1)
    ((state, why),) = states(a_snapshot(a_card(0), disk))
    assert state == "unavailable"
    assert why.startswith("IOMMU group 1 also holds 0000:05:00.0")


def test_without_iommu_nothing_is_free() -> None:
    card = replace(a_card(0), iommu_group=None)
    off = replace(a_snapshot(card), iommu=IommuState((), (), has_groups=False))
    ((state, why),) = states(off)
    assert (state, "the IOMMU is off" in why) == ("unavailable", True)
    unknown = replace(off, iommu=replace(off.iommu, is_known=False))
    assert [state for state, _ in states(unknown)] == ["unknown"]


def test_vgpus_and_their_capacity_are_counted() -> None:
    (gpu,) = summary(vgpu_host((A40_8Q, A40_8Q))).gpus
    assert (gpu.state, gpu.vgpus) == ("used", 2)
    assert {one.name: one.more for one in gpu.types}["A40-8Q"] == 4


def test_gpu_instances_are_counted() -> None:
    host = with_facts(a_snapshot(a_card(0)), gpu_partitions=(partition(gpu="0000:01:00.0"),))
    (gpu,) = summary(host).gpus
    assert {one.name: one.more for one in gpu.instances}["1g.5gb"] == 7


def test_the_switches_of_a_fabric_are_no_gpus(tmp_path: Path) -> None:
    kernel = dgx(tmp_path)
    assert summary(scan(kernel, kernel)).models == "8 x NVIDIA A100 SXM4 40GB"


def test_drift_is_that_from_the_installed_layout() -> None:
    host = a_snapshot(a_card(0), replace(a_card(1), driver="nvidia"))
    assert installed_drift(host) == (None, None, None)
    record = TextFile(RECORD, render_record(InstalledLayout("guests")))
    installed = with_facts(host, files=(TextFile(FILE, json.dumps(LAYOUT)), record))
    name, drift, unknown = installed_drift(installed)
    assert unknown is None
    assert name == "guests"
    assert drift is not None
    assert ["0000:02:00.0" in text for text in drift] == [True]
    damaged = with_facts(host, files=(TextFile(FILE, "{"), record))
    assert installed_drift(damaged)[1] is None
    assert (installed_drift(damaged)[2] or "").startswith(f"cannot read {FILE}: ")


def test_drift_from_a_file_is_that_of_each_host() -> None:
    text = json.dumps(LAYOUT)
    first, second = a_snapshot(a_card(0)), a_snapshot(replace(a_card(0), driver="nvidia"))
    found = [drift_of(text, "x", None, host, UNKNOWN, "/a/gpu1.json") for host in (first, second)]
    assert found[0] == Drift("gpu1", None, (), cards={"0000:01:00.0": ""})
    assert len(found[1].drift or ()) == 1
