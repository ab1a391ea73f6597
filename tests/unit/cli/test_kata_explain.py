"""`vfiomgr kata explain`: a node on which all is right, and one break after the other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import CASES
from tests.unit.kata_nodes import GROUP, SPECIFICATION, KataNode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Answer, Run
    from tests.unit.kata_breaks import Case

GPU = "0000:41:00.0"


def document(answer: Answer) -> Any:
    (item,) = json.loads(answer.stdout)["items"]
    return item


def breaks(item: Any) -> list[Any]:
    return [found for step in item["steps"] for found in step["breaks"]]


@pytest.mark.parametrize("runtime", ["go", "rs"])
@pytest.mark.parametrize("form", ["group", "cdev"])
def test_a_right_pod_has_its_chain_up_to_the_index_in_the_guest(
    run: Run, tmp_path: Path, runtime: str, form: str
) -> None:
    node = KataNode(tmp_path / "node", runtime)
    node.add_gpus()
    path = f"/dev/vfio/{GROUP}" if form == "group" else "/dev/vfio/devices/vfio0"
    node.publish(nodes=[path])
    line = ("--root", str(node.root), "kata", "explain", str(node.pod))
    answer = run(*line)
    assert answer.status == 0, answer.stdout
    name = path.rpartition("/")[2]
    key = f"cdi.k8s.io/vfio{name}" + (".0" if runtime == "rs" else "")
    assert answer.stdout.splitlines()[-5:] == [
        "the device:",
        f"  nvidia.com/pgpu={name} -> /{SPECIFICATION} -> {path} -> group {GROUP}",
        f"    {GPU} on vfio-pci -> rp0 -> nvidia.com/gpu=0",
        f"    the agent is told {key}: nvidia.com/gpu=0",
        "the chain is complete",
    ]
    item = document(run(*line, "--format", "json"))
    assert [step["state"] for step in item["steps"]] == ["ok"] * 10
    assert breaks(item) == []
    shim = "runtime-rs" if runtime == "rs" else "Go runtime"
    assert (item["release"], item["release_source"]) == (
        f"Kata 4.1.0 ({shim})",
        "/opt/kata/VERSION",
    )
    (chain,) = item["devices"]
    assert chain["annotations"] == [[key, "nvidia.com/gpu=0"]]
    assert chain["functions"][0]["guest_index"] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}: {case.name}")
def test_each_break_is_named_with_its_remedy(run: Run, tmp_path: Path, case: Case) -> None:
    node = KataNode(tmp_path / "node", case.runtime)
    node.add_gpus(2)
    node.publish()
    case.spoil(node)
    line = ("--root", str(node.root), "kata", "explain", str(node.pod), *case.options)
    answer = run(*line, "--format", "json")
    item = document(answer)
    (found,) = [found for found in breaks(item) if case.what in found["what"]]
    assert found["number"] == case.number
    assert case.remedy in found["remedy"]
    assert (found["is_silent"], found["is_certain"]) == (case.is_silent, case.is_certain)
    assert answer.status == (1 if case.is_certain else 0)
    assert item["is_broken"] == case.is_certain
    told = run(*line).stdout
    number = "" if case.number is None else f" {case.number}"
    silent = ", silent" if case.is_silent else ""
    assert f"{'break' if case.is_certain else 'may break'}{number}{silent}: " in told
    assert f"remedy: {found['remedy']}" in told


def test_all_twelve_breaks_have_a_case() -> None:
    assert {case.number for case in CASES} >= set(range(1, 13))
