from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.containers.cdi_cases import spec
from tests.unit.containers.test_cdi_generate import AUDIO, GPU, ON_HOST, at, with_nodes
from tests.unit.devices import host_of, with_facts
from vfiomgr.containers.cdi.devices import entries
from vfiomgr.containers.cdi.model import STATIC as ETC
from vfiomgr.containers.cdi.model import CdiFile, OfferRequest, own_file
from vfiomgr.containers.cdi.requests import RemoveCdi, WriteCdi
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.passthrough.steps import Unbind
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ReplaceFile

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.snapshot.model import HostSnapshot

PGPU = OfferRequest("nvidia.com/pgpu")
OWN = "/etc/cdi/vfiomgr-nvidia.com_pgpu.json"
OTHER = at(GPU, 5)


def done(host: HostSnapshot, intent: WriteCdi | RemoveCdi) -> HostSnapshot:
    """The host once a plan about its files is carried out."""
    files = {file.path: file for file in host.cdi_files}
    for step in plan(host, intent).steps:
        assert isinstance(step, ReplaceFile)
        assert step.before == (files[step.path].text if step.path in files else None)
        files.pop(step.path, None)
        if step.after is not None:
            files[step.path] = CdiFile(step.path, step.after)
    return with_facts(host, cdi_files=tuple(files[path] for path in sorted(files)))


def written(host: HostSnapshot, *wanted: OfferRequest) -> HostSnapshot:
    for each in wanted:
        host = done(host, WriteCdi(each))
    return host


def names(host: HostSnapshot, path: str = OWN) -> list[str]:
    text = next(file.text for file in host.cdi_files if file.path == path)
    return [device["name"] for device in json.loads(text or "")["devices"]]


def changed(host: HostSnapshot, now: HostSnapshot) -> HostSnapshot:
    """Another state of the devices, with the files that were there."""
    return with_facts(now, cdi_files=host.cdi_files)


HOST = with_nodes(host_of(GPU, AUDIO, OTHER))
LESS = with_nodes(host_of(GPU, AUDIO, replace(OTHER, **ON_HOST)))
NONE = with_nodes(host_of(replace(GPU, **ON_HOST), replace(AUDIO, **ON_HOST)))


def test_a_second_run_changes_nothing_and_says_so() -> None:
    host = written(HOST, PGPU)
    assert own_file(ETC, PGPU.kind) == OWN
    assert names(host) == ["0000:04:00.0", "0000:05:00.0"]
    again = plan(host, WriteCdi(PGPU))
    assert again.is_empty
    assert again.already == (f"{OWN} is already up to date",)


def test_without_addresses_the_file_has_what_is_ready_and_nothing_else() -> None:
    host = changed(written(HOST, PGPU), LESS)
    made = plan(host, WriteCdi(PGPU))
    assert made.notes[1:] == ("nvidia.com/pgpu=0000:05:00.0 is removed",)
    assert names(done(host, WriteCdi(PGPU))) == ["0000:04:00.0"]


def test_addresses_come_to_what_is_there() -> None:
    first, second = (replace(PGPU, addresses=(d.address,)) for d in (GPU, OTHER))
    host = written(HOST, second)
    assert names(host) == ["0000:05:00.0"]
    assert names(written(host, first)) == ["0000:04:00.0", "0000:05:00.0"]
    assert names(written(changed(host, LESS), first)) == ["0000:04:00.0"], "the other is stale"


def test_numbers_are_those_of_all_that_is_ready_so_that_none_takes_anothers() -> None:
    wanted = [replace(PGPU, addresses=(d.address,), name_by="index") for d in (GPU, OTHER)]
    host = written(HOST, *wanted)
    assert names(host) == ["0", "1"]
    assert plan(host, WriteCdi(replace(PGPU, name_by="index"))).is_empty


def test_the_order_of_a_file_does_not_depend_on_who_came_first() -> None:
    wide = replace(GPU, address=moved(GPU.address, domain=0x10000), iommu_group=99)
    host = with_nodes(host_of(GPU, AUDIO, wide))
    named = [replace(PGPU, addresses=(d.address,)) for d in (wide, GPU)]
    assert plan(written(host, *named), WriteCdi(PGPU)).is_empty


def test_a_name_that_comes_to_mean_another_device_is_told() -> None:
    wanted = replace(PGPU, name_by="index")
    host = changed(written(HOST, wanted), with_nodes(host_of(OTHER)))
    assert plan(host, WriteCdi(wanted)).notes == (
        "nvidia.com/pgpu=0 is another device",
        "nvidia.com/pgpu=1 is removed",
    )


def test_one_group_under_another_name_takes_the_place_of_the_first() -> None:
    wanted = replace(PGPU, addresses=(GPU.address,))
    host = written(HOST, wanted, replace(wanted, name_by="group"))
    assert names(host) == ["4"]


def test_an_empty_file_is_not_left_behind() -> None:
    host = changed(written(HOST, PGPU), NONE)
    made = plan(host, WriteCdi(PGPU))
    assert made.steps == (ReplaceFile(OWN, host.cdi_files[0].text, None),)
    assert any("without devices" in note for note in made.notes)
    assert done(host, WriteCdi(PGPU)).cdi_files == ()


def test_nothing_to_write_is_refused() -> None:
    with pytest.raises(
        Refusal,
        match="no device is available, and container runtimes reject",
    ) as caught:
        plan(NONE, WriteCdi(PGPU))
    assert "vfiomgr bind" in caught.value.hint


def test_a_name_that_another_file_has_is_refused() -> None:
    foreign = CdiFile("/etc/cdi/plugin.json", spec(kind=PGPU.kind, devices=_devices(4)))
    with pytest.raises(Refusal, match=r"already has nvidia\.com/pgpu=0000:04:00\.0") as caught:
        plan(with_facts(HOST, cdi_files=(foreign,)), WriteCdi(PGPU))
    assert "remove it from /etc/cdi/plugin.json" in caught.value.hint
    dynamic = done(HOST, WriteCdi(PGPU, "dynamic"))
    with pytest.raises(Refusal) as caught:
        plan(dynamic, WriteCdi(PGPU))
    assert "vfiomgr cdi remove --all --kind nvidia.com/pgpu" in caught.value.hint


def _devices(group: int) -> list[dict[str, object]]:
    nodes = [{"path": f"/dev/vfio/{group}"}]
    return [{"name": "0000:04:00.0", "containerEdits": {"deviceNodes": nodes}}]


def test_one_device_is_never_published_as_group_and_as_cdev() -> None:
    host = written(HOST, PGPU)
    other = OfferRequest("example.com/gpu", node="cdev")
    with pytest.raises(Refusal, match="the same device could be assigned twice") as caught:
        plan(host, WriteCdi(other))
    assert "--node group" in caught.value.hint
    assert plan(host, WriteCdi(replace(other, node="group"))).steps


def test_consumers_that_do_not_read_a_dotted_class_are_told() -> None:
    made = plan(HOST, WriteCdi(OfferRequest("nvidia.com/gpu.vfio")))
    assert "containerd 1.7 and Podman 4.3 cannot read it" in made.notes[0]


# ---- what is in the place of the file


def test_no_two_kinds_have_one_file() -> None:
    kinds = ("nvidia.com/a-bb", "nvidia.com-a/bb", "nvidia.com_a/bb", "nvidia.com/a_bb")
    assert len({own_file(ETC, kind) for kind in kinds}) == len(kinds)


def test_a_file_of_another_kind_is_not_replaced() -> None:
    host = with_facts(HOST, cdi_files=(CdiFile(OWN, spec(kind="example.com/gpu")),))
    with pytest.raises(Refusal, match=r"contains example\.com/gpu, not nvidia\.com/pgpu"):
        plan(host, WriteCdi(PGPU))


def test_kinds_that_are_too_long_are_refused_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match="the class of the CDI kind is too long: 300 characters"):
        plan(HOST, WriteCdi(OfferRequest(f"nvidia.com/{'a' * 300}")))
    with pytest.raises(Refusal, match="the file name for kind") as caught:
        plan(HOST, WriteCdi(OfferRequest(f"{'a' * 240}/gpu")))
    assert "--output" in caught.value.hint


def test_a_file_that_is_none_any_more_is_told_and_never_replaced() -> None:
    host = with_facts(HOST, cdi_files=(CdiFile(OWN, "{broken"),))
    with pytest.raises(Refusal, match="is no longer a valid specification") as caught:
        plan(host, WriteCdi(replace(PGPU, addresses=(GPU.address,))))
    assert f"vfiomgr cdi remove --all --kind {PGPU.kind}" in caught.value.hint
    stale = plan(host, RemoveCdi(stale=True))
    assert stale.is_empty
    assert f"{OWN} is no longer a valid specification" in stale.notes[0]
    removed = plan(host, RemoveCdi(every=True, of_kind=PGPU.kind))
    assert of(removed) == [f"remove {OWN}"]
    assert plan(host, RemoveCdi(every=True, of_kind="example.com/gpu")).is_empty
    binary = with_facts(HOST, cdi_files=(CdiFile(OWN, None, "not UTF-8 text in line 1"),))
    assert f"rm {OWN}" in plan(binary, RemoveCdi(every=True)).notes[0]


def test_what_was_put_into_a_file_by_hand_is_told_before_it_goes() -> None:
    host = written(HOST, PGPU)
    document = json.loads(host.cdi_files[0].text or "")
    document["comment"] = "ours"
    document["containerEdits"]["env"] = ["A=1"]
    document["devices"][0]["containerEdits"]["env"] = ["B=1"]
    host = with_facts(host, cdi_files=(CdiFile(OWN, json.dumps(document)),))
    told = plan(host, WriteCdi(PGPU)).notes
    assert any("comment is not a CDI key: a manual change that is removed" in n for n in told)
    assert any(": containerEdits was changed manually and is overwritten" in note for note in told)
    assert any("0000:04:00.0 was changed manually" in note for note in told)
    wanted = RemoveCdi(("0000:05:00.0",))
    assert any("comment is not a CDI key" in note for note in plan(host, wanted).notes)
    (file,) = done(host, wanted).cdi_files
    assert json.loads(file.text or "")["containerEdits"]["env"] == ["A=1"]
    (file,) = done(host, WriteCdi(replace(PGPU, addresses=(OTHER.address,)))).cdi_files
    assert json.loads(file.text or "")["containerEdits"]["env"] == ["A=1"]
    assert plan(written(HOST, PGPU), RemoveCdi(("0000:05:00.0",))).notes == (
        "nvidia.com/pgpu=0000:05:00.0 is removed",
    )


def test_numbers_that_are_published_stay_and_others_take_free_ones() -> None:
    first = at(GPU, 1)
    wanted = replace(PGPU, name_by="index")
    host = changed(written(HOST, wanted), with_nodes(host_of(first, GPU, AUDIO, OTHER)))
    host = written(host, replace(wanted, addresses=(first.address, OTHER.address)))
    (file,) = host.cdi_files
    groups = {
        device["name"]: device["containerEdits"]["deviceNodes"][0]["path"]
        for device in json.loads(file.text or "")["devices"]
    }
    assert groups == {"0": "/dev/vfio/4", "1": "/dev/vfio/5", "2": "/dev/vfio/1"}


def test_one_group_under_two_kinds_is_told() -> None:
    made = plan(written(HOST, PGPU), WriteCdi(OfferRequest("example.com/gpu")))
    assert f"which is also nvidia.com/pgpu=0000:04:00.0 in {OWN}" in made.notes[0]
    assert len(made.notes) == 2
    again = plan(written(HOST, PGPU, OfferRequest("example.com/gpu")), WriteCdi(PGPU))
    assert again.is_empty
    assert len(again.notes) == 3


def test_devices_that_nvidias_plugin_does_not_offer_are_noted() -> None:
    other = replace(OTHER, vendor_id="144d", class_code="010802")
    host = with_nodes(host_of(GPU, AUDIO, other))
    made = plan(host, WriteCdi(replace(PGPU, name_by="group")))
    assert made.notes == ("0000:05:00.0 is not an NVIDIA device; name the devices to leave it out",)
    assert not plan(host, WriteCdi(OfferRequest("example.com/gpu"))).notes


def test_whoever_is_to_read_it_must_be_able_to() -> None:
    wanted = OfferRequest("nvidia.com/gpu.vfio", consumer="containerd-1.7")
    with pytest.raises(
        Refusal, match=r"containerd-1\.7 cannot read the specification: .*0\.6"
    ) as caught:
        plan(HOST, WriteCdi(wanted))
    assert caught.value.hint
    assert plan(HOST, WriteCdi(replace(wanted, consumer="kata"))).steps
    with pytest.raises(Refusal, match=r"podman-4\.3 cannot"):
        plan(HOST, WriteCdi(replace(wanted, consumer="podman")))


# ---- taking out


def of(made: Plan) -> list[str]:
    return [step.describe() for step in made.steps]


def test_devices_are_taken_out_by_name_and_the_last_takes_the_file_along() -> None:
    host = written(HOST, PGPU)
    less = done(host, RemoveCdi(("0000:05:00.0",)))
    assert names(less) == ["0000:04:00.0"]
    gone = plan(less, RemoveCdi(("nvidia.com/pgpu=0000:04:00.0",)))
    assert of(gone) == [f"remove {OWN}"]
    assert plan(less, RemoveCdi(("0000:05:00.0",))).already == (
        "no specification of vfiomgr has 0000:05:00.0",
    )


def test_what_is_stale_goes_and_what_is_ready_stays() -> None:
    host = changed(written(HOST, PGPU), LESS)
    assert names(done(host, RemoveCdi(stale=True))) == ["0000:04:00.0"]
    assert plan(written(HOST, PGPU), RemoveCdi(stale=True)).is_empty


def test_a_group_that_is_another_device_by_now_is_stale() -> None:
    """Numbers of groups may change with a boot."""
    host = changed(written(HOST, PGPU), with_nodes(host_of(at(GPU, 4, 5), at(GPU, 5, 4))))
    assert plan(host, RemoveCdi(stale=True)).steps[0] == ReplaceFile(
        OWN, host.cdi_files[0].text, None
    )


def test_all_goes_of_one_kind_or_of_every() -> None:
    host = written(HOST, PGPU, OfferRequest("example.com/gpu"))
    assert len(plan(host, RemoveCdi(every=True)).steps) == 2
    assert of(plan(host, RemoveCdi(every=True, of_kind=PGPU.kind))) == [f"remove {OWN}"]


def test_devices_of_others_are_theirs_to_remove() -> None:
    foreign = CdiFile("/etc/cdi/plugin.json", spec())
    host = with_facts(HOST, cdi_files=(foreign,))
    with pytest.raises(Refusal, match="which vfiomgr did not write"):
        plan(host, RemoveCdi(("one",)))
    assert plan(host, RemoveCdi(every=True)).is_empty


def test_own_files_are_those_of_the_name_that_vfiomgr_gives() -> None:
    own = {
        "/etc/cdi/vfiomgr-a-b.json": True,
        "/run/cdi/vfiomgr-a-b.json": True,
        "/var/run/cdi/vfiomgr-a-b.json": True,
        "/etc/cdi/vfiomgr-a-b.yaml": False,
        "/etc/cdi/vfiomgr.json": False,
        "/etc/cdi/old/vfiomgr-a-b.json": False,
        "/home/vfiomgr-a-b.json": False,
    }
    assert {path: CdiFile(HostPath(path), "").is_own for path in own} == own


def test_an_unbind_says_which_file_names_the_device() -> None:
    made = plan(written(HOST, PGPU), Unbind((GPU.address,)))
    assert f"{OWN} contains it, and is updated afterwards" in made.notes
    assert not any(OWN in note for note in plan(HOST, Unbind((GPU.address,))).notes)


# ---- listing


def test_each_device_has_its_state() -> None:
    host = written(HOST, PGPU)
    assert [(e.name, e.state) for e in entries(host, {})] == [
        ("nvidia.com/pgpu=0000:04:00.0", "ready"),
        ("nvidia.com/pgpu=0000:05:00.0", "ready"),
    ]
    (first, second) = entries(changed(host, LESS), {})
    assert (first.state, second.state) == ("ready", "stale")
    assert "0000:05:00.0 is on nvidia" in (second.problem or "")
    (node,) = first.nodes
    assert (node.iommu_group, [str(f.address) for f in node.functions]) == (
        4,
        ["0000:04:00.0", "0000:04:00.1"],
    )


def test_conflicts_shadows_and_nodes_of_others_are_told() -> None:
    twice = (CdiFile("/etc/cdi/a.json", spec()), CdiFile("/etc/cdi/b.json", spec()))
    states = [e.state for e in entries(with_facts(HOST, cdi_files=twice), {})]
    assert states == ["conflict", "conflict"]
    both = (CdiFile("/etc/cdi/a.json", spec()), CdiFile("/run/cdi/b.json", spec()))
    host = with_facts(HOST, cdi_files=both)
    assert [e.state for e in entries(host, {"/dev/null": True})] == ["shadowed", "ready"]
    assert [e.state for e in entries(host, {"/dev/null": False})] == ["shadowed", "missing"]
    assert [e.state for e in entries(host, {})] == ["shadowed", "unknown"]
