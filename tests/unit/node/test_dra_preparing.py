"""Claims on a kernel that reacts: what pods receive, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.fakes.nvidia.gpus import DRIVER
from tests.fakes.vgpu_hosts import a40_host, l40s_host, mig_host
from tests.unit.node.dra_claims import (
    GPU,
    UID,
    Node,
    claim_for,
    creatable,
    passthrough,
    with_reset,
)
from tests.unit.node.stories import gpu_node, unit
from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.document import parse_specification
from vfiomgr.containers.cdi.rules import CONSUMERS
from vfiomgr.diagnostic import blocker
from vfiomgr.errors import HostError, Refusal
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node.dra import preparing
from vfiomgr.node.dra.model import Target
from vfiomgr.node.dra.preparing import Preparing
from vfiomgr.node.model import NodeSettings, OnDemand
from vfiomgr.node.plan import inventory
from vfiomgr.node.processes import BinderAway, Creating, StillRunning
from vfiomgr.paths import PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.node.dra.model import Claim, DraDevice, PreparedClaim
    from vfiomgr.node.model import NodeUnit

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
ONE, OTHER = "pci-0000-01-00-0", "pci-0000-02-00-0"
RECORD = f"/run/vfiomgr/dra/{UID}.json"
CDI = f"/run/cdi/vfiomgr-vfiomgr.io_claim-{UID}.json"
TYPE = {"mdev": "nvidia-558", "vendor": "1148"}
IN_INSTANCE = "474"
"""GRID A100-1-5C, which needs a GPU instance."""
SECOND_UID = UID.replace("5b1f", "6c2e")


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(60):
            return await story

    return asyncio.run(within())


def prepare(node: Node, claim: Claim) -> PreparedClaim:
    made: PreparedClaim = run(node.preparing.prepare(claim))
    return made


def unprepare(node: Node, uid: str = UID) -> None:
    run(node.preparing.unprepare(uid))


def passthrough_node(place: Path, *, group: int = 11) -> Node:
    return Node(gpu_node(place, 2, group=group), passthrough(FIRST), passthrough(SECOND))


def on_demand_node(place: Path, **fields: Any) -> Node:
    """Two graphics cards with audio on their host drivers."""
    how = OnDemand(**fields)
    return Node(
        workstation(place),
        *(replace(passthrough(a), target=Target(a, on_demand=how)) for a in (FIRST, SECOND)),
    )


def drivers(node: Node) -> list[str | None]:
    """The drivers of both cards and their audio functions, where there are some."""
    host = api.scan(node.kernel)
    slots = (host.slot(device) for a in (FIRST, SECOND) if (device := host.device_named(a)))
    return [each.driver for slot in slots if len(slot) > 1 for each in slot]


def vgpu_host(place: Path, family: str) -> FakeKernel:
    return a40_host(place, total_vfs=2) if family == "mdev" else l40s_host(place, total_vfs=2)


def vgpu_node(place: Path, family: str) -> Node:
    return Node(vgpu_host(place, family), *(creatable(TYPE[family], k) for k in range(3)))


def mig_node(place: Path) -> Node:
    """A node whose GPU is in MIG mode, without GPU instances."""
    kernel = mig_host(place, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", GPU)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", GPU)
    return Node(kernel, creatable(IN_INSTANCE))


def vgpu_claim(family: str, *numbers: int, **fields: Any) -> Claim:
    return claim_for(*(creatable(TYPE[family], n).name for n in numbers), **fields)


def cdi(node: Node) -> dict[str, Any]:
    text = node.files[CDI]
    assert parse_specification(text).oddities == ()
    found: dict[str, Any] = json.loads(text)
    return found


def paths(edits: dict[str, Any]) -> list[str]:
    return [each["path"] for each in edits["deviceNodes"]]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return passthrough_node(tmp_path)


def test_a_claim_has_a_specification_and_a_record(node: Node) -> None:
    made = prepare(node, claim_for(ONE, OTHER))
    first, second = made.devices
    assert first.unit == FIRST
    assert first.nodes == ("/dev/vfio/11",)
    assert first.cdi_devices == (
        f"vfiomgr.io/claim={UID}-{ONE}",
        f"vfiomgr.io/metadata={UID}-r0",
    )
    written = cdi(node)
    assert written["kind"] == "vfiomgr.io/claim"
    assert [each["name"] for each in written["devices"]] == [f"{UID}-{ONE}", f"{UID}-{OTHER}"]
    assert paths(written["devices"][1]["containerEdits"]) == list(second.nodes) == ["/dev/vfio/12"]
    assert paths(written["containerEdits"]) == ["/dev/vfio/vfio"]
    assert node.kernel.status(HostPath(RECORD)).st_mode & 0o777 == 0o600  # type: ignore[union-attr]
    assert node.preparing.held == {FIRST: "ml/gpu", SECOND: "ml/gpu"}
    assert node.preparing.created == {}
    assert node.creating.orders == []


@pytest.mark.parametrize("form", ["group", "cdev"])
def test_every_consumer_reads_the_specifications(tmp_path: Path, form: str) -> None:
    node = vgpu_node(tmp_path, "vendor")
    prepare(node, with_reset(vgpu_claim("vendor", 0), form=form))
    host = api.scan(node.kernel)
    assert len(host.cdi_files) == 2
    report = check(host.cdi_files, CONSUMERS, host)
    assert report.findings == ()
    notes = inventory(host, NodeSettings()).notes
    assert "twice-published" not in {note.rule for note in notes}


def test_a_device_that_does_not_answer_is_not_prepared(node: Node) -> None:
    """All devices of a claim are asked at once, and only for a new claim."""
    node.silent.add(SECOND)
    with pytest.raises(HostError, match=f"{SECOND} does not answer"):
        prepare(node, claim_for(ONE, OTHER))
    assert node.files == {}
    node.silent.clear()
    for _ in range(2):
        prepare(node, claim_for(ONE, OTHER))
    assert node.woken == [(FIRST, SECOND)] * 2


def test_the_same_claim_gets_the_same_again(node: Node) -> None:
    claim = claim_for(ONE)
    made, before = prepare(node, claim), node.files
    assert prepare(node, claim) == made
    node.restart()
    assert node.preparing.held == {FIRST: "ml/gpu"}
    assert prepare(node, claim) == made
    assert node.files == before


def test_files_that_others_removed_are_written_again(node: Node) -> None:
    prepare(node, claim_for(ONE))
    before = node.files
    for path in before:
        if path != RECORD:
            node.kernel.remove(HostPath(path))
    prepare(node, claim_for(ONE))
    assert node.files == before


def rebooted(tmp_path: Path, claim: Claim) -> Node:
    """A node with a claim that was prepared before a reboot that changed the groups."""
    before = passthrough_node(tmp_path / "before")
    prepare(before, claim)
    after = passthrough_node(tmp_path / "after", group=31)
    after.kernel.reboot()
    after.kernel.reboot()
    for path, text in before.files.items():
        after.kernel.make_directory(HostPath(path).parent)
        after.kernel.replace(HostPath(path), text.encode())
    after.scan()
    after.restart()
    assert after.preparing.held == {FIRST: "ml/gpu"}
    return after


def test_after_a_reboot_the_present_groups_are_used(tmp_path: Path) -> None:
    after = rebooted(tmp_path, claim_for(ONE))
    made = prepare(after, claim_for(ONE))
    assert made.devices[0].nodes == ("/dev/vfio/31",)
    assert paths(cdi(after)["devices"][0]["containerEdits"]) == ["/dev/vfio/31"]
    unprepare(after)
    assert after.files == {}


def test_after_a_reboot_nothing_old_is_kept(tmp_path: Path) -> None:
    claim = with_reset(claim_for(ONE), reset=True)
    after = rebooted(tmp_path, claim)
    unprepare(after)
    assert (after.files, after.creating.orders) == ({}, [])
    after = rebooted(tmp_path / "again", claim)
    after.units.clear()
    with pytest.raises(Refusal):
        prepare(after, claim)
    assert (after.files, after.preparing.held) == ({}, {})


def test_a_second_claim_for_a_device_is_refused(node: Node) -> None:
    prepare(node, claim_for(ONE, OTHER))
    node.restart()
    before = node.files
    with pytest.raises(Refusal) as told:
        prepare(node, claim_for(OTHER, uid=SECOND_UID, name="late"))
    assert told.value.message == (
        f"cannot prepare claim ml/late: device {OTHER} belongs to claim ml/gpu"
    )
    assert "kubectl -n ml describe resourceclaim gpu" in told.value.hint
    assert node.files == before
    unprepare(node)
    prepare(node, claim_for(OTHER, uid=SECOND_UID, name="late"))


def test_a_unit_under_another_name_is_refused_too(node: Node) -> None:
    alias = replace(passthrough(FIRST), name="alias")
    node.published["alias"] = alias
    prepare(node, claim_for(ONE))
    with pytest.raises(Refusal, match="device alias belongs to claim ml/gpu"):
        prepare(node, claim_for("alias", uid=SECOND_UID))


def test_a_device_that_cannot_be_opened_is_refused(node: Node) -> None:
    node.kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), SECOND)
    known = node.units[SECOND]
    reason = blocker("wrong-driver", SECOND, f"{SECOND} is on no driver", f"vfiomgr bind {SECOND}")
    node.units[SECOND] = replace(known, reasons=(reason,))
    with pytest.raises(Refusal) as told:
        prepare(node, claim_for(ONE, OTHER))
    assert told.value.message == f"{SECOND} is on no driver"
    assert told.value.hint == f"vfiomgr bind {SECOND}"
    assert node.files == {}
    assert node.preparing.held == {}


def test_an_unhealthy_device_is_not_prepared_but_a_prepared_one_is_kept(node: Node) -> None:
    healthy = node.units[FIRST]
    reasons = [
        blocker(rule, FIRST, f"{rule} is the reason", "reseat it")
        for rule in ("link-down", "held-by-claim")
    ]
    node.units[FIRST] = replace(healthy, reasons=tuple(reasons))
    with pytest.raises(Refusal, match="link-down is the reason"):
        prepare(node, claim_for(ONE))
    node.units[FIRST] = replace(healthy, reasons=(reasons[1],))
    assert prepare(node, claim_for(ONE)).devices[0].unit == FIRST
    node.units[FIRST] = replace(healthy, reasons=tuple(reasons))
    assert prepare(node, claim_for(ONE)).devices[0].unit == FIRST


def test_a_new_claim_keeps_its_files_when_the_old_one_of_its_name_is_released(node: Node) -> None:
    old, new = claim_for(ONE), replace(claim_for(OTHER), uid="uid-of-the-new-claim")
    prepare(node, old)
    prepare(node, new)
    before = {path for path in node.files if new.uid in path or "metadata.json" in path}
    assert before
    unprepare(node, old.uid)
    assert before <= {*node.files}


def test_devices_that_are_not_published_or_not_there_are_refused(node: Node) -> None:
    with pytest.raises(Refusal, match="does not publish device pci-x in pool node-1"):
        prepare(node, claim_for("pci-x"))
    del node.units[FIRST]
    with pytest.raises(Refusal, match=f"{FIRST} is not on this node"):
        prepare(node, claim_for(ONE))
    assert node.files == {}


def test_a_failure_leaves_what_a_running_pod_has(node: Node) -> None:
    claim = claim_for(ONE)
    made = prepare(node, claim)
    before, known = node.files, node.units.pop(FIRST)
    with pytest.raises(Refusal):
        prepare(node, claim)
    assert node.files == before
    assert node.preparing.held == {FIRST: "ml/gpu"}
    node.units[FIRST] = known
    assert prepare(node, claim) == made


def test_a_claim_that_is_allocated_again_loses_its_old_devices(node: Node) -> None:
    prepare(node, claim_for(ONE))
    made = prepare(node, claim_for(OTHER))
    assert [device.unit for device in made.devices] == [SECOND]
    assert node.preparing.held == {SECOND: "ml/gpu"}


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "x" * 200])
def test_a_uid_never_leaves_the_directory(uid: str, node: Node) -> None:
    with pytest.raises(HostError, match="the UID of a claim is not valid"):
        prepare(node, claim_for(ONE, uid=uid))
    unprepare(node, uid)
    assert node.files == {}


def test_files_that_cannot_be_written_are_reported(node: Node) -> None:
    node.kernel.fail(at=2, errno=28)
    with pytest.raises(HostError, match="cannot change the files of claim ml/gpu: "):
        prepare(node, claim_for(ONE))
    assert node.files == {}


def test_the_form_of_the_parameters_is_used(tmp_path: Path) -> None:
    node = Node(l40s_host(tmp_path, total_vfs=2), *(creatable(TYPE["vendor"], k) for k in range(2)))
    claim = with_reset(vgpu_claim("vendor", 0), form="cdev")
    made = prepare(node, claim)
    assert [path.rpartition("/")[0] for path in made.devices[0].nodes] == ["/dev/vfio/devices"]
    assert paths(cdi(node)["containerEdits"]) == ["/dev/iommu"]
    claim = with_reset(claim, form="group")
    assert prepare(node, claim).devices[0].nodes == ("/dev/vfio/2",)


def test_a_form_that_the_host_does_not_have_is_refused(node: Node) -> None:
    with pytest.raises(Refusal) as told:
        prepare(node, with_reset(claim_for(ONE), form="cdev"))
    assert told.value.message == f"{FIRST} has no VFIO node of the form cdev"
    assert "group" in told.value.hint


# ---- unprepare


def test_nothing_is_left_of_a_claim(node: Node) -> None:
    prepare(node, claim_for(ONE, OTHER))
    unprepare(node)
    assert node.files == {}
    assert node.preparing.held == {}
    unprepare(node)


def test_unknown_claims_and_vanished_devices_are_no_error(node: Node) -> None:
    unprepare(node, SECOND_UID)
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.kernel.unplug(FIRST)
    node.scan()
    unprepare(node)
    assert node.files == {}
    assert node.creating.orders == []


OLD_RECORD = """{
  "namespace": "ml",
  "name": "gpu",
  "uid": "5b1f5d1e-0a5c-4f43-9c3e-8c8f1a2b3c4d",
  "boot": "00000000-0000-4000-8000-000000000001",
  "devices": [
    {
      "request": "r0",
      "pool": "node-1",
      "device": "pci-0000-01-00-0",
      "unit": "0000:01:00.0",
      "nodes": [
        "/dev/vfio/11"
      ],
      "cdi_devices": [
        "vfiomgr.io/claim=5b1f5d1e-0a5c-4f43-9c3e-8c8f1a2b3c4d-pci-0000-01-00-0",
        "vfiomgr.io/metadata=5b1f5d1e-0a5c-4f43-9c3e-8c8f1a2b3c4d-r0"
      ],
      "is_created": false,
      "target": {
        "unit": "0000:01:00.0",
        "parent": "",
        "type": ""
      },
      "reset": true,
      "access": {
        "uid": 0,
        "gid": 0,
        "mode": 384
      }
    }
  ],
  "reset": true,
  "is_ready": true
}
"""
"""As written by the first agents."""
DAMAGED = ("", "[]", "{}", '{"uid": 7}', "[" * 10_000, OLD_RECORD.replace('"boot"', '"started"'))


def test_the_form_of_a_record_stays(node: Node) -> None:
    claim = with_reset(claim_for(ONE), reset=True)
    made = prepare(node, claim)
    record = node.files[RECORD]
    for newer in ('        "on_demand": null', '      "functions": []', '  "is_early": false'):
        record = record.replace(f",\n{newer}", "")
    assert record == OLD_RECORD
    node.kernel.replace(HostPath(RECORD), OLD_RECORD.encode(), mode=0o600)
    node.restart()
    assert (node.preparing.held, node.preparing.unreadable) == ({FIRST: "ml/gpu"}, {})
    assert prepare(node, claim) == made
    with pytest.raises(Refusal, match="belongs to claim ml/gpu"):
        prepare(node, claim_for(ONE, uid=SECOND_UID, name="late"))
    unprepare(node)
    assert (node.creating.orders, node.files) == (["reset"], {})


@pytest.mark.parametrize("text", DAMAGED)
def test_nothing_is_removed_of_a_claim_whose_record_cannot_be_read(text: str, node: Node) -> None:
    prepare(node, claim_for(ONE))
    node.kernel.replace(HostPath(RECORD), text.encode(), mode=0o600)
    node.restart()
    before = node.files
    for refused in (
        lambda: unprepare(node),
        lambda: prepare(node, claim_for(ONE)),
        lambda: prepare(node, claim_for(ONE, uid=SECOND_UID, name="late")),
        lambda: prepare(node, claim_for(OTHER, uid=SECOND_UID, name="late")),
    ):
        with pytest.raises(Refusal) as told:
            refused()
        assert f"cannot read {RECORD}: " in told.value.message
        assert f"rm {node.kernel.locate(HostPath(RECORD))}" in told.value.hint
        assert node.files == before
    (note,) = node.notes
    assert note.startswith(f"claim {UID}: cannot read {RECORD}: ")
    assert {d.rule for d in node.preparing.unreadable.values()} == {"claim-unreadable"}


def test_without_the_file_that_cannot_be_read_all_is_as_usual(node: Node) -> None:
    prepare(node, claim_for(ONE))
    node.kernel.replace(HostPath(RECORD), b"", mode=0o600)
    node.restart()
    node.kernel.remove(HostPath(RECORD))
    assert node.preparing.unreadable == {}
    prepare(node, claim_for(OTHER, uid=SECOND_UID, name="late"))
    prepare(node, claim_for(ONE))
    unprepare(node)
    unprepare(node, SECOND_UID)
    assert node.files == {}


def test_other_claims_that_are_prepared_go_on_beside_a_record_that_cannot_be_read(
    node: Node,
) -> None:
    made = prepare(node, claim_for(ONE))
    prepare(node, claim_for(OTHER, uid=SECOND_UID))
    node.kernel.replace(HostPath(RECORD.replace(UID, SECOND_UID)), b"", mode=0o600)
    node.restart()
    assert prepare(node, claim_for(ONE)) == made
    unprepare(node)
    assert node.preparing.held == {}
    # The claim whose name is unknown may have the same one, and so the same files of metadata.
    assert [path for path in node.files if UID in path] == []
    assert any("metadata.json" in path for path in node.files)


@pytest.mark.parametrize("name", ["notes.txt", "a b.json", ".x.json.7", "copy.json"])
def test_files_that_are_no_records_hold_nothing(node: Node, name: str) -> None:
    file = HostPath(f"/run/vfiomgr/dra/{name}")
    node.kernel.make_directory(file.parent)
    node.kernel.replace(file, OLD_RECORD.encode(), mode=0o600)
    node.restart()
    assert (node.preparing.unreadable, node.preparing.held) == ({}, {})


def test_a_link_in_the_place_of_a_record_is_one_that_cannot_be_read(node: Node) -> None:
    node.kernel.make_directory(HostPath(RECORD).parent)
    os.symlink("other", node.kernel.locate(HostPath(RECORD)))
    node.restart()
    assert node.preparing.unreadable.keys() == {UID}


def test_devices_are_reset_if_the_parameters_say_so(node: Node) -> None:
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.restart()
    unprepare(node)
    assert node.creating.orders == ["reset"]
    assert [str(o) for o in node.kernel.operations if o.path.name == "reset"] == [
        f"write /sys/bus/pci/devices/{FIRST}/reset '1'"
    ]
    assert (node.quarantined, node.notes) == ([], [])


def test_a_reset_that_fails_quarantines_the_device(node: Node) -> None:
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.kernel.fail_writes(f"{FIRST}/reset", 25)
    unprepare(node)
    assert node.quarantined == [FIRST]
    assert node.files == {}


def test_a_reset_that_is_forbidden_quarantines_nothing(node: Node) -> None:
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.kernel.fail_writes(f"{FIRST}/reset", 30)
    unprepare(node)
    assert node.quarantined == []
    assert len(node.notes) == 1
    assert node.files == {}


def test_a_device_that_a_guest_still_has_is_not_reset(node: Node) -> None:
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.kernel.guest_opens(11)
    with pytest.raises(Refusal, match="is in use by"):
        unprepare(node)
    assert node.quarantined == []
    assert node.preparing.held == {FIRST: "ml/gpu"}
    node.kernel.guest_closes(11)
    unprepare(node)
    assert node.files == {}


# ---- vGPUs


@pytest.mark.parametrize("family", ["mdev", "vendor"])
def test_a_vgpu_is_created_and_removed_with_its_claim(tmp_path: Path, family: str) -> None:
    node = vgpu_node(tmp_path, family)
    claim = vgpu_claim(family, 0, 1)
    made = prepare(node, claim)
    units = [device.unit for device in made.devices]
    assert sorted(node.vgpus) == sorted((name, TYPE[family]) for name in units)
    pairs = [("node-1", device.device) for device in claim.devices]
    assert node.preparing.created == dict(zip(units, pairs, strict=True))
    node.restart()
    assert prepare(node, claim) == made
    assert len(node.vgpus) == 2
    node.restart()
    assert node.preparing.created == dict(zip(units, pairs, strict=True))
    unprepare(node)
    assert (node.vgpus, node.files, node.preparing.created) == ([], {}, {})


@pytest.mark.parametrize("family", ["mdev", "vendor"])
def test_what_was_created_is_removed_if_a_later_device_fails(tmp_path: Path, family: str) -> None:
    node = vgpu_node(tmp_path, family)
    with pytest.raises(Refusal):
        prepare(node, vgpu_claim(family, 0, 1, 2))  # two functions
    assert (node.vgpus, node.files) == ([], {})
    assert node.creating.orders == ["create", "create", "create", "remove", "remove", "remove"]


@pytest.mark.parametrize("family", ["mdev", "vendor"])
def test_a_vgpu_that_vanished_is_no_error(tmp_path: Path, family: str) -> None:
    node = vgpu_node(tmp_path, family)
    prepare(node, vgpu_claim(family, 0))
    api.host_at(node.kernel).remove_vgpu(every=True, allow=("in-use",))
    unprepare(node)
    assert node.files == {}


def test_a_vgpu_of_somebody_else_at_the_place_stays(tmp_path: Path) -> None:
    node = vgpu_node(tmp_path, "vendor")
    (device,) = prepare(node, vgpu_claim("vendor", 0)).devices
    host = api.host_at(node.kernel)
    host.remove_vgpu(device.unit, allow=("in-use",))
    host.create_vgpu(type="1146", parent=device.unit)
    unprepare(node)
    assert node.vgpus == [(device.unit, "1146")]
    assert node.files == {}


@pytest.mark.parametrize("family", ["mdev", "vendor"])
def test_a_vgpu_with_a_guest_is_not_removed(tmp_path: Path, family: str) -> None:
    node = vgpu_node(tmp_path, family)
    (device,) = prepare(node, vgpu_claim(family, 0)).devices
    group = int(device.nodes[0].rpartition("/")[2])
    node.kernel.guest_opens(group)
    with pytest.raises(Refusal, match="is in use by"):
        unprepare(node)
    assert len(node.vgpus) == 1
    assert node.preparing.created == {device.unit: ("node-1", device.device)}
    node.kernel.guest_closes(group)
    unprepare(node)
    assert (node.vgpus, node.files) == ([], {})


def test_after_a_reboot_vgpus_are_created_again(tmp_path: Path) -> None:
    node = vgpu_node(tmp_path, "vendor")
    made = prepare(node, vgpu_claim("vendor", 0))
    kept = node.files
    node.kernel.reboot()
    for path, text in kept.items():
        node.kernel.make_directory(HostPath(path).parent)
        node.kernel.replace(HostPath(path), text.encode(), mode=0o600)
    assert node.vgpus == []
    for name in node.kernel.sriov.make(PCI_DEVICES / GPU, 2):
        node.kernel.drivers.attach(DRIVER, name)
    node.restart()
    again = prepare(node, vgpu_claim("vendor", 0))
    assert again.boot != made.boot
    assert node.vgpus == [(again.devices[0].unit, TYPE["vendor"])]
    unprepare(node)
    assert (node.vgpus, node.files) == ([], {})


def test_a_device_whose_reset_failed_is_not_returned_to_its_driver(tmp_path: Path) -> None:
    node = on_demand_node(tmp_path)
    prepare(node, with_reset(claim_for(ONE, OTHER), reset=True))
    node.scan()

    async def reset(unit: NodeUnit) -> str:
        if unit.id == FIRST:
            message = "it does not answer"
            raise HostError(message)
        return ""

    node.creating.reset = reset  # type: ignore[method-assign]
    unprepare(node)
    assert node.quarantined == [FIRST]
    assert drivers(node) == ["vfio-pci", "vfio-pci", "nvidia", "snd_hda_intel"]
    assert node.files == {}


# ---- kills

HOSTS: dict[str, Callable[[Path], tuple[Node, Claim]]] = {
    "passthrough": lambda place: (
        passthrough_node(place),
        with_reset(claim_for(ONE, OTHER), reset=True),
    ),
    "mdev": lambda place: (vgpu_node(place, "mdev"), vgpu_claim("mdev", 0)),
    "vendor": lambda place: (vgpu_node(place, "vendor"), vgpu_claim("vendor", 0)),
    "mig": lambda place: (mig_node(place), claim_for(creatable(IN_INSTANCE).name)),
    "on demand": lambda place: (on_demand_node(place), claim_for(ONE, OTHER)),
}


def operations(node: Node, act: Callable[[], object]) -> int:
    before = len(node.kernel.operations)
    act()
    return len(node.kernel.operations) - before


def nothing_is_left(node: Node) -> None:
    assert node.files == {}
    assert node.vgpus == []
    assert node.preparing.held == {}
    assert drivers(node) in ([], ["nvidia", "snd_hda_intel"] * 2)
    left = api.recover(tree=node.kernel)
    assert all(run.summary.startswith("reset ") for run in left)


@pytest.mark.parametrize(
    ("host", "after"),
    [
        *(
            (host, after)
            for host in ("passthrough", "mdev", "vendor", "on demand")
            for after in (False, True)
        ),
        ("mig", False),
    ],
)
def test_a_kill_at_any_step_of_prepare(tmp_path: Path, host: str, *, after: bool) -> None:
    whole, claim = HOSTS[host](tmp_path / "whole")
    count = operations(whole, lambda: prepare(whole, claim))
    assert count > 5
    for at in range(1, count + 1):
        node, claim = HOSTS[host](tmp_path / str(at))
        node.kernel.kill(at=at, after=after)
        with pytest.raises(PowerCut):
            prepare(node, claim)
        node.kernel.revive()
        node.restart()
        if at % 2:
            made = prepare(node, claim)
            assert made.is_ready
            assert api.recover(tree=node.kernel) == ()
            assert [vgpu for vgpu, _ in node.vgpus] == list(node.preparing.created)
        unprepare(node)
        nothing_is_left(node)


@pytest.mark.parametrize("host", HOSTS)
def test_a_kill_at_any_step_of_unprepare(tmp_path: Path, host: str) -> None:
    whole, claim = HOSTS[host](tmp_path / "whole")
    prepare(whole, claim)
    count = operations(whole, lambda: unprepare(whole))
    assert count > 5
    for at in range(1, count + 1):
        node, claim = HOSTS[host](tmp_path / str(at))
        prepare(node, claim)
        node.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            unprepare(node)
        node.kernel.revive()
        node.restart()
        unprepare(node)
        nothing_is_left(node)


def end_early(node: Node) -> None:
    """Release the claims that no kubelet asked for, as the agent does after its start."""
    for claim in node.preparing.claims:
        assert claim.is_early
        assert run(node.preparing.unprepare(claim.uid, only_early=True))


def test_a_kill_at_any_step_before_the_kubelet_asks(tmp_path: Path) -> None:
    def prepare_early(node: Node) -> None:
        run(node.preparing.prepare(claim_for(ONE), is_early=True))

    whole = on_demand_node(tmp_path / "whole")
    bound = operations(whole, lambda: prepare_early(whole))
    count = bound + operations(whole, lambda: end_early(whole))
    nothing_is_left(whole)
    for at in range(1, count + 1):
        node = on_demand_node(tmp_path / str(at))
        killed = prepare_early if at <= bound else end_early
        if killed is end_early:
            prepare_early(node)
        node.kernel.kill(at=at if at <= bound else at - bound, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            killed(node)
        node.kernel.revive()
        node.restart()
        end_early(node)
        nothing_is_left(node)


def test_a_claim_that_the_kubelet_asked_for_is_not_released_as_an_early_one(
    tmp_path: Path,
) -> None:
    node, claim = HOSTS["on demand"](tmp_path)
    run(node.preparing.prepare(claim, is_early=True))
    before = json.loads(node.files[RECORD])
    assert prepare(node, claim).is_ready
    assert json.loads(node.files[RECORD]) == {**before, "is_early": False}
    run(node.preparing.prepare(claim, is_early=True))  # a pod that shares it is about to be placed
    node.restart()
    assert [claim.is_early for claim in node.preparing.claims] == [False]
    assert not run(node.preparing.unprepare(UID, only_early=True))
    assert drivers(node) == ["vfio-pci", "vfio-pci"] * 2
    unprepare(node)
    nothing_is_left(node)


def test_a_device_that_no_pod_had_is_not_reset(tmp_path: Path) -> None:
    node = on_demand_node(tmp_path)
    run(node.preparing.prepare(with_reset(claim_for(ONE), reset=True), is_early=True))
    end_early(node)
    assert "reset" not in node.creating.orders
    nothing_is_left(node)


def test_a_device_is_returned_only_after_the_pod_that_resets_it_is_back(tmp_path: Path) -> None:
    node = on_demand_node(tmp_path)
    prepare(node, with_reset(claim_for(ONE), reset=True))
    node.scan()
    reset, asked = node.creating.reset, []

    async def away(unit: NodeUnit) -> str:
        asked.append(unit.on_demand)
        message = f"cannot reset {unit.id}: no answer"
        raise BinderAway(message)

    node.creating.reset = away  # type: ignore[method-assign]
    with pytest.raises(BinderAway):
        unprepare(node)
    assert asked == [OnDemand()]
    assert (node.quarantined, node.creating.orders) == ([], ["bind"])
    node.creating.reset = reset  # type: ignore[method-assign]
    unprepare(node)
    assert node.creating.orders == ["bind", "reset", "return"]
    nothing_is_left(node)


def test_a_device_that_is_bound_needs_nobody_who_binds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = on_demand_node(tmp_path)
    Host(node.kernel).bind(FIRST)
    node.scan()
    monkeypatch.setattr(preparing, "may_bind", lambda _tree: False)
    (device,) = prepare(node, with_reset(claim_for(ONE), reset=True)).devices
    assert device.nodes
    assert "bind" not in node.creating.orders
    asked: list[OnDemand | None] = []

    async def reset(unit: NodeUnit) -> str:
        asked.append(unit.on_demand)
        return "/sys is not writable"

    node.creating.reset = reset  # type: ignore[method-assign]
    unprepare(node)
    assert asked == [None]  # it is not an order for the pod that binds devices
    assert node.notes == [f"{FIRST}: /sys is not writable"]
    assert Host(node.kernel).device(FIRST).driver == "vfio-pci"


# ---- many


def test_many_claims_leave_nothing(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    (tmp_path / "run").mkdir()
    units = {found.id: found for found in map(unit, range(1, 501))}
    devices = {device.name: device for device in map(passthrough, units)}
    preparing = quiet(tree, devices, units)
    claims = [claim_for(name, uid=f"u-{name}", name=name) for name in devices]

    async def story() -> None:
        await asyncio.gather(*map(preparing.prepare, claims))
        assert sorted(preparing.held) == sorted(units)
        assert len(list((tmp_path / "run/cdi").iterdir())) == 1000
        assert len(list((tmp_path / "run/vfiomgr/dra").iterdir())) == 500
        again = quiet(tree, devices, units)
        assert again.held == preparing.held
        await asyncio.gather(*(preparing.unprepare(claim.uid) for claim in claims))

    run(story())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert preparing.held == {}
    assert not preparing._locks


def quiet(tree: HostTree, devices: dict[str, DraDevice], units: dict[str, NodeUnit]) -> Preparing:
    """What prepares devices that answer, and reports nothing."""

    async def trust(_units: tuple[str, ...]) -> None:
        """Take devices to answer."""

    return Preparing(
        tree,
        lambda _pool, name: devices[name],
        units.get,
        NoCreator("/"),
        quarantine=lambda _unit, _text: None,
        note=lambda _unit, _text: None,
        require_answer=trust,
    )


class NoCreator(Creating):
    """A creator that is never needed."""

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Fail."""
        raise AssertionError(parent, type_id, owner)

    async def remove(self, owner: str) -> None:
        """Fail."""
        raise AssertionError(owner)

    async def reset(self, unit: NodeUnit) -> str:
        """Fail."""
        raise AssertionError(unit)


class Waiting:
    """A creator whose orders for one GPU wait."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.running = 0

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU when it may end."""
        self.running += 1
        assert self.running == 1
        self.begun.set()
        await self.may_end.wait()
        self.running -= 1
        return await self._node.creating.create(parent, type_id, owner)


def test_a_creation_that_takes_longer_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = vgpu_node(tmp_path, "vendor")
    create = node.creating.create

    async def take_long(parent: str, type_id: str, owner: str) -> NodeUnit:
        await create(parent, type_id, owner)
        message = "the kernel did not finish"
        raise StillRunning(message)

    with monkeypatch.context() as patch:
        patch.setattr(node.creating, "create", take_long)
        with pytest.raises(StillRunning):
            prepare(node, vgpu_claim("vendor", 0))
    ((name, _),) = node.vgpus
    assert prepare(node, vgpu_claim("vendor", 0)).devices[0].unit == name
    assert len(node.vgpus) == 1
    assert "remove" not in node.creating.orders


def test_claims_do_not_wait_for_vgpus_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = vgpu_node(tmp_path, "mdev")
    node.published[ONE] = passthrough(FIRST)
    node.units[FIRST] = passthrough_node(tmp_path / "x").units[FIRST]

    async def story() -> None:
        waiting = Waiting(node)
        monkeypatch.setattr(node.preparing, "_creating", waiting)
        slow = [
            asyncio.create_task(node.preparing.prepare(vgpu_claim("mdev", 0))) for _ in range(2)
        ]
        await waiting.begun.wait()
        await node.preparing.prepare(claim_for(ONE, uid=SECOND_UID, name="quick"))
        assert not any(task.done() for task in slow)
        with pytest.raises(Refusal, match="belongs to claim ml/gpu"):
            await node.preparing.prepare(vgpu_claim("mdev", 0, uid="third"))
        waiting.may_end.set()
        first, second = await asyncio.gather(*slow)
        assert first == second
        assert len(node.vgpus) == 1

    run(story())
