"""What a newcomer names: a vGPU's UUID, a vendor with a mistake, many devices at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.cli.output import print_error
from vfiomgr.diagnostic import blocker, refusal

if TYPE_CHECKING:
    import pytest

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


def test_a_vgpu_is_shown_by_its_uuid(run: Run, kernel: FakeKernel) -> None:
    types = json.loads(run("vgpu", "list", "--types", "--format", "json").stdout)["items"]
    first = next(item for item in types if item["available_instances"])
    made = run("vgpu", "create", "--parent", first["gpu"], "--type", first["id"])
    assert made.status == 0, made
    (item,) = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
    shown = run("show", item["uuid"])
    assert shown.status == 0
    assert shown.stdout.startswith(f"vGPU {item['uuid']}\n")
    assert f"  type         {item['type']}\n" in shown.stdout
    assert json.loads(run("show", item["uuid"], "--format", "json").stdout)["items"] == [item]
    assert kernel.is_live


def test_a_vendor_or_driver_that_no_device_has_is_named(run: Run, kernel: FakeKernel) -> None:
    del kernel
    assert run("list", "--vendor", "nvidea").stderr.startswith("no device has vendor nvidea")
    assert run("groups", "--driver", "nvida").stderr == (
        "no device has driver nvida. Did you mean nvidia?\n"
    )


def test_many_reasons_have_a_line_each_and_a_name_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    devices = [f"0000:41:00.{number} (NVIDIA Corporation GA107GL)" for number in range(4, 8)]
    found = [blocker("vgpu-function", d, f"{d} is a vGPU function", "create one") for d in devices]
    print_error(refusal(found))
    assert capsys.readouterr().err.splitlines() == [
        "vfiomgr: refused: 4 reasons",
        "  0000:41:00.4 (NVIDIA Corporation GA107GL) is a vGPU function",
        *(f"  0000:41:00.{number} is a vGPU function" for number in range(5, 8)),
        "    remedy: create one",
        "  explain: vfiomgr explain vgpu-function",
    ]


def test_two_reasons_about_one_device_name_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    card, audio = "0000:01:00.0 (AMD Navi 31)", "0000:01:00.1 (AMD Navi 31 Audio)"
    found = [
        blocker("boot-display", card, f"{card} is the console's display", "choose another"),
        blocker("in-use", card, f"{card} is in use by: sway", "stop it"),
        blocker("in-use", audio, f"{audio} is in use by: pipewire", "stop it"),
    ]
    print_error(refusal(found))
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "vfiomgr: refused: 3 reasons",
        "  0000:01:00.0 (AMD Navi 31) is the console's display",
        "    remedy: choose another",
        "  0000:01:00.0 is in use by: sway",
        "  0000:01:00.1 (AMD Navi 31 Audio) is in use by: pipewire",
        "    remedy: stop it",
    ]


def test_pci_ids_are_noted_with_their_name_once(run: Run, kernel: FakeKernel) -> None:
    gpu = json.loads(run("show", "0000:01:00.0", "--format", "json").stdout)
    answer = run("bind", f"{gpu['vendor_id']}:{gpu['device_id']}", "--dry-run")
    note = answer.stderr.splitlines()[0]
    assert note.startswith(f"{gpu['vendor_id']}:{gpu['device_id']} ({gpu['name']}): 0000:01:00.0")
    assert note.count(gpu["name"]) == 1
    assert kernel.operations == []


def test_bind_completes_gpus_first_and_no_bridges(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_VFIOMGR_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "vfiomgr bind ")
    shown = [line.rpartition(",")[2].split("\t")[0] for line in run().stdout.splitlines()]
    monkeypatch.delenv("_VFIOMGR_COMPLETE")
    listed = json.loads(run("list", "--all", "--format", "json").stdout)["items"]
    codes = {item["address"]: item["class_code"] for item in listed}
    offered = [codes[word] for word in shown if word in codes]
    assert offered
    assert not any(code.startswith("06") for code in offered)
    is_gpu = [code.startswith(("03", "12")) for code in offered]
    assert is_gpu == sorted(is_gpu, reverse=True)
    assert kernel.is_live


def test_a_node_selector_does_not_part_a_comment_from_its_key(run: Run) -> None:
    text = run("node", "manifests", "--node-selector", "gpu=on").stdout
    comment = "      # Nodes with GPUs are often tainted"
    assert text.split(comment)[1].splitlines()[1] == "      tolerations:"
    assert "kubernetes.io/os: linux" in text.split("nodeSelector:")[1].splitlines()[2]
