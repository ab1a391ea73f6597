"""Tasks on a host: what they change, that a second one changes nothing, check mode, failures."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.faults import PowerCut
from tests.unit.golden.cases import LAYOUT, cut_off
from tests.unit.golden.hosts import UUID
from tests.unit.golden.transcripts import Place, as_installed
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.collection.conftest import Play

GPU = "0000:02:00.0"
AUDIO = "0000:02:00.1"
GUESTS: dict[str, Any] = {
    "version": "vfiomgr/v1",
    "layouts": {"guests": {"devices": [{"select": {"address": GPU}, "state": "passthrough"}]}},
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    as_installed(monkeypatch)


def driver(kernel: FakeKernel, address: str = GPU) -> str | None:
    return kernel.drivers.driver_of(address)


def test_a_layout_is_applied_once(play: Play, kernel: FakeKernel) -> None:
    first = play("layout", content=GUESTS)
    assert (first["changed"], first["layout"]) == (True, "guests")
    assert driver(kernel) == "vfio-pci"
    second = play("layout", content=GUESTS)
    assert (second["changed"], second["steps"], second["diff"]) == (False, [], [])


def test_check_mode_shows_the_difference_of_a_layout_and_changes_nothing(
    play: Play, kernel: FakeKernel
) -> None:
    planned = play("layout", check=True, content=GUESTS)
    assert planned["changed"]
    (shown,) = planned["diff"]
    assert shown["before"] == f"{GPU} (Device 10de:2684): host (nvidia)\n"
    assert shown["after"] == f"{GPU} (Device 10de:2684): passthrough (VFIO)\n"
    assert driver(kernel) == "nvidia"


def test_a_layout_is_read_as_text_and_from_a_file_of_the_host(play: Play, tmp_path: Path) -> None:
    text = LAYOUT["layout.yaml"]
    (tmp_path / "layout.yaml").write_text(text)
    from_text = play("layout", check=True, content=text, name="lab")
    from_file = play("layout", check=True, src=str(tmp_path / "layout.yaml"))
    assert from_text["steps"] == from_file["steps"]
    assert from_text["steps"]


def test_drift_fails_on_request_and_is_named(play: Play, kernel: FakeKernel) -> None:
    failed = play("layout", content=GUESTS, fail_on_drift=True)
    assert failed["failed"]
    assert f"{GPU}: host (nvidia), not passthrough (VFIO)" in failed["msg"]
    assert failed["remedy"]
    assert driver(kernel) == "nvidia"
    play("layout", content=GUESTS)
    met = play("layout", content=GUESTS, fail_on_drift=True)
    assert (met["changed"], met["differences"], met["unknown"]) == (False, [], [])


def test_a_malformed_layout_fails_with_its_line(play: Play) -> None:
    failed = play("layout", content=LAYOUT["bad.yaml"])
    assert failed["rc"] == 65
    assert ":4:15: layout a, rule 1: state is missing" in failed["msg"]


def test_a_refusal_has_its_cause_and_remedy(play: Play) -> None:
    failed = play("layout", content=LAYOUT["absent.yaml"])
    assert failed["rc"] == 4
    assert "requires at least 1 device, but this host has none. Remedy: " in failed["msg"]
    assert [one["id"] for one in failed["diagnostics"]] == ["layout-too-few"]


def test_a_layout_completes_the_run_of_its_own_that_was_interrupted(
    play: Play, kernel: FakeKernel
) -> None:
    kernel.kill(at=8)
    with pytest.raises(PowerCut):
        play("layout", content=GUESTS)
    kernel.revive()
    assert play("layout", content=GUESTS)["changed"]
    assert driver(kernel) == driver(kernel, AUDIO) == "vfio-pci"
    assert not play("layout", content=GUESTS)["changed"]


def test_a_layout_is_installed_and_removed_once(play: Play, kernel: FakeKernel) -> None:
    for check in (True, False):
        assert play("layout", check=check, content=GUESTS, state="installed")["changed"]
    assert not play("layout", content=GUESTS, state="installed")["changed"]
    assert driver(kernel) == "nvidia"
    removed = play("layout", state="absent")
    rule = f"/etc/udev/rules.d/05-vfiomgr-{GPU}.rules"
    assert rule in {one["before_header"] for one in removed["diff"]}
    assert removed["changed"]
    assert not play("layout", state="absent")["changed"]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"content": GUESTS, "src": "/layout.yaml"},
        {"content": GUESTS, "state": "installed", "fail_on_drift": True},
    ],
)
def test_a_task_without_a_clear_meaning_fails(play: Play, parameters: dict[str, Any]) -> None:
    assert play("layout", **parameters)["failed"]


def test_a_vgpu_of_another_tool_is_adopted(play: Play, kernel: FakeKernel) -> None:
    play("vgpu", name=UUID, parent="mbochs", type="mbochs-small")
    shutil.rmtree(kernel.locate(RUNTIME))
    vgpus = [{"type": "mbochs-small", "count": 1}]
    rule = {"select": {"parent": "mbochs"}, "state": "vgpu", "vgpus": vgpus}
    content = {"version": "vfiomgr/v1", "layouts": {"guests": {"devices": [rule]}}}
    assert not play("layout", content=content)["changed"]
    assert play("layout", check=True, content=content, adopt=True)["changed"]
    assert play("layout", content=content, adopt=True)["changed"]
    assert not play("layout", content=content, adopt=True)["changed"]
    (vgpu,) = play("host_info", gather=["vgpus"])["vgpus"]
    assert (vgpu["name"], vgpu["made_by_vfiomgr"]) == (UUID, True)


def test_devices_are_bound_and_unbound_once(play: Play, kernel: FakeKernel) -> None:
    planned = play("bind", check=True, devices=[GPU])
    assert planned["changed"]
    assert planned["diff"][0]["before"] == f"{GPU}: nvidia\n{AUDIO}: snd_hda_intel\n"
    assert planned["diff"][0]["after"] == f"{GPU}: vfio-pci\n{AUDIO}: vfio-pci\n"
    assert driver(kernel) == "nvidia"
    bound = play("bind", devices=[GPU])
    assert [one["driver"] for one in bound["devices"]] == ["vfio-pci", "vfio-pci"]
    assert not play("bind", devices=[GPU])["changed"]
    assert play("bind", devices=[GPU], state="unbound")["changed"]
    assert not play("bind", devices=[GPU], state="unbound")["changed"]
    assert driver(kernel) == "nvidia"


def test_options_of_a_bind_reach_the_host(play: Play, kernel: FakeKernel) -> None:
    parameters: dict[str, Any] = {"devices": [GPU], "persist": True, "reset_method": "flr"}
    parameters |= {"d3cold": False, "timeout": 20}
    first = play("bind", **parameters)
    assert first.get("changed"), first["msg"]
    assert not play("bind", **parameters)["changed"]
    assert kernel.sysfs.get(f"/sys/bus/pci/devices/{GPU}/reset_method") == "flr"
    rules = play("host_info", gather=["persistent"])["persistent"]
    assert [(one["address"], one["driver"]) for one in rules] == [
        (GPU, "vfio-pci"),
        (AUDIO, "vfio-pci"),
    ]
    play("bind", devices=[GPU], state="unbound", forget=True)
    assert play("host_info", gather=["persistent"])["persistent"] == []


def test_a_host_is_returned_as_documented(play: Play, kernel: FakeKernel) -> None:
    found = play("host_info", gather=["devices", "groups", "vgpus", "vgpu_types", "definitions"])
    assert not found["changed"]
    assert "ansible_facts" not in found
    assert {one["address"]: one["driver"] for one in found["devices"]}[GPU] == driver(kernel)
    assert any(one["name"] == "mbochs-small" for one in found["vgpu_types"])
    assert found["groups"]
    assert found["vgpus"] == found["definitions"] == []
    shown = play("host_info", gather=["snapshot"])["snapshot"]
    assert shown["kind"] == "HostSnapshot"


def test_all_devices_are_returned_on_request(play: Play, kernel: FakeKernel) -> None:  # noqa: ARG001
    gpus, every = (
        {one["address"] for one in play("host_info", all_devices=every)["devices"]}
        for every in (False, True)
    )
    assert gpus < every
    assert AUDIO in every - gpus


def test_a_vgpu_is_created_defined_undefined_and_removed_once(
    play: Play,
    kernel: FakeKernel,  # noqa: ARG001
) -> None:
    attributes = {"power/control": "on"}
    for parameters in (
        {"state": "active", "parent": "mbochs", "type": "mbochs-small"},
        {"state": "defined", "autostart": True, "attributes": attributes},
        {"state": "undefined"},
        {"state": "absent"},
    ):
        assert play("vgpu", check=True, name=UUID, **parameters)["changed"], parameters
        assert play("vgpu", name=UUID, **parameters)["changed"], parameters
        assert not play("vgpu", name=UUID, **parameters)["changed"], parameters


def test_a_check_fails_for_a_blocker_with_its_remedy(play: Play) -> None:
    fine = play("check")
    assert not fine.get("failed"), fine
    assert {one["severity"] for one in fine["findings"]} <= {"warning", "info"}


def test_uninstall_removes_files_once(play: Play, kernel: FakeKernel) -> None:
    play("bind", devices=[GPU], persist=True)
    planned = play("uninstall", check=True, unbind=True)
    assert planned["changed"]
    assert any(one["before_header"].endswith(f"{GPU}.rules") for one in planned["diff"])
    assert play("uninstall", unbind=True)["changed"]
    assert driver(kernel) == "nvidia"
    assert not play("uninstall", unbind=True)["changed"]


def test_an_interrupted_operation_of_another_kind_is_a_failure_with_its_remedy(
    play: Play, kernel: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(Place(tmp_path, kernel, monkeypatch))
    failed = play("uninstall")
    assert failed["failed"]
    assert "vfiomgr recover" in failed["msg"]


def test_a_host_without_the_command_is_told_how_to_get_it(play: Play) -> None:
    failed = play("host_info", executable="/opt/none")
    assert failed["msg"].startswith("cannot find the command /opt/none. Remedy: install")
