"""The module vgpu on hosts of each family: a name by which a second run finds the vGPU again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.nvidia.cards import RTX_PRO_6000
from tests.fakes.vgpu_hosts import a40_host, l40s_host, mig_host, xe_host
from tests.unit.golden.hosts import UUID
from tests.unit.golden.transcripts import as_installed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.collection.conftest import Play

GPU = "0000:21:00.0"
FUNCTION = "0000:21:00.4"


def divided_host(directory: Path, *, total_vfs: int) -> FakeKernel:
    """An RTX Pro 6000 Blackwell in MIG mode."""
    kernel = mig_host(directory, card=RTX_PRO_6000, total_vfs=total_vfs)
    kernel.call("nvidia-smi", "-mig", "1", "-i", GPU)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", GPU)
    return kernel


_HOSTS: dict[str, Callable[..., FakeKernel]] = {
    "l40s": l40s_host,
    "a40": a40_host,
    "xe": xe_host,
    "divided": divided_host,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    as_installed(monkeypatch)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> FakeKernel:
    """The host of the test, with two virtual functions."""
    return _HOSTS[request.param](tmp_path, total_vfs=2)


def on(host: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", [host], indirect=True)


def vgpus(play: Play) -> list[tuple[str, str]]:
    return [(one["name"], one["type"]) for one in play("host_info", gather=["vgpus"])["vgpus"]]


@on("l40s")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", [FUNCTION, "21:00.4"])
@pytest.mark.parametrize("kind", ["L40S-8Q", "NVIDIA_L40S-8Q", "1152"])
def test_a_virtual_function_is_a_vgpu_after_the_first_run(play: Play, name: str, kind: str) -> None:
    for check in (True, False):
        assert play("vgpu", check=check, name=name, type=kind)["changed"]
    for check in (True, False):
        again = play("vgpu", check=check, name=name, type=kind)
        assert (again["changed"], again["steps"], again["diff"]) == (False, [], [])
        assert again["notes"] == [f"vGPU {FUNCTION} already exists"]
    assert vgpus(play) == [(FUNCTION, "1152")]


@on("divided")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["DC-1-24QGFX", "RTX Pro 6000 Blackwell DC-1-24Q"])
def test_a_type_is_found_by_the_names_that_vfiomgr_reads(play: Play, kind: str) -> None:
    assert play("vgpu", name=FUNCTION, type=kind)["changed"]
    assert not play("vgpu", name=FUNCTION, type=kind)["changed"]


@on("l40s")
@pytest.mark.usefixtures("kernel")
def test_a_virtual_function_of_another_type_is_refused_with_the_remedy(play: Play) -> None:
    play("vgpu", name=FUNCTION, type="L40S-8Q")
    failed = play("vgpu", name=FUNCTION, type="L40S-4Q")
    assert f"{FUNCTION}: it already is a vGPU of type 1152 (NVIDIA L40S-8Q)" in failed["msg"]
    assert failed["remedy"] == "remove that vGPU first, with state: absent"
    assert vgpus(play) == [(FUNCTION, "1152")]


@on("l40s")
@pytest.mark.usefixtures("kernel")
def test_a_virtual_function_is_defined_once(play: Play) -> None:
    assert play("vgpu", name=FUNCTION, state="defined", type="L40S-8Q")["changed"]
    assert not play("vgpu", name=FUNCTION, state="defined", type="L40S-8Q")["changed"]
    assert not play("vgpu", name=FUNCTION, state="defined")["changed"]


@on("l40s")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("name", "state", "cause"),
    [
        (UUID, "active", "vGPUs of type L40S-8Q are virtual functions"),
        (GPU, "active", "it is a GPU whose vGPUs are virtual functions"),
        (GPU, "defined", "it is a GPU whose vGPUs are virtual functions"),
    ],
)
def test_a_name_of_no_virtual_function_is_refused(
    play: Play, name: str, state: str, cause: str
) -> None:
    failed = play("vgpu", name=name, state=state, type="L40S-8Q")
    assert failed["msg"].startswith(f"cannot use the name {name}: {cause}. Remedy: name ")
    assert vgpus(play) == []


@on("a40")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", [GPU, FUNCTION])
@pytest.mark.parametrize("state", ["active", "defined"])
def test_a_mediated_device_needs_a_uuid(play: Play, name: str, state: str) -> None:
    failed = play("vgpu", name=name, state=state, type="A40-4Q")
    uuid = f"\"{{{{ '{name}' | ansible.builtin.to_uuid }}}}\""
    assert failed["remedy"] == f"name a UUID, with its parent, e.g. name: {uuid}, parent: {name}"
    found = play("host_info", gather=["vgpus", "definitions"])
    assert (found["vgpus"], found["definitions"]) == ([], [])


@on("l40s")
@pytest.mark.usefixtures("kernel")
def test_uninstall_keeps_only_definitions_in_mdevctls_format(play: Play) -> None:
    play("vgpu", name=FUNCTION, state="defined", type="L40S-8Q")
    play("vgpu", name=UUID, state="defined", parent="mtty", type="mtty-2")
    notes = play("uninstall")["notes"]
    assert any(note.startswith(f"definitions in mdevctl's format stay: {UUID}") for note in notes)
    left = play("host_info", gather=["definitions"])["definitions"]
    assert [one["name"] for one in left] == [UUID]


@on("a40")
@pytest.mark.usefixtures("kernel")
def test_a_uuid_is_created_and_defined_once(play: Play) -> None:
    created: dict[str, Any] = {"name": UUID.upper(), "type": "A40-4Q"}
    defined = {**created, "name": UUID, "parent": FUNCTION, "state": "defined"}
    for parameters in (created, defined):
        assert play("vgpu", **parameters)["changed"]
        assert not play("vgpu", **parameters)["changed"]
    assert [name for name, _ in vgpus(play)] == [UUID]


@on("xe")
@pytest.mark.usefixtures("kernel")
def test_virtual_functions_that_are_created_together_are_refused(play: Play) -> None:
    failed = play("vgpu", name=GPU, type="vf")
    assert "creates and removes all virtual functions at once" in failed["msg"]
    failed = play("vgpu", name=GPU, type="vf", state="defined")
    assert failed["msg"].startswith(f"cannot use the name {GPU}: ")
    assert play("host_info", gather=["definitions"])["definitions"] == []
