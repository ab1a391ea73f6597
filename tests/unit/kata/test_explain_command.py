"""`vfiomgr check pod`: a node on which all is right, and one break after the other."""

from __future__ import annotations

import contextlib
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import CASES, breaks, is_certain, said
from tests.unit.kata_nodes import (
    CONFIGURATION,
    CONTAINERD,
    DROP_INS,
    GROUP,
    HANDLER,
    KUBELET,
    SPECIFICATION,
    KataNode,
)
from vfiomgr.kata.explain.context import NUMBERS, SILENT
from vfiomgr.rules.runner import all_texts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Answer, Run
    from tests.unit.kata_breaks import Case

GPU = "0000:41:00.0"


def document(answer: Answer) -> Any:
    (item,) = json.loads(answer.stdout)["items"]
    return item


def test_steps_that_say_the_same_share_a_line(run: Run, tmp_path: Path) -> None:
    node = KataNode(tmp_path / "node", "go")
    node.change(node.pod, "pgpu", "nosuch")
    answer = run("--root", str(node.root), "check", "pod", str(node.pod))
    line = "unknown  node, functions, root ports, guest  no candidate device is known\n"
    assert answer.stdout.count("no candidate device") == answer.stdout.count(line) == 1


@pytest.mark.parametrize("runtime", ["go", "rs"])
@pytest.mark.parametrize("form", ["group", "cdev"])
def test_a_right_pod_has_its_chain_up_to_the_index_in_the_guest(
    run: Run, tmp_path: Path, runtime: str, form: str
) -> None:
    node = KataNode(tmp_path / "node", runtime)
    node.add_gpus()
    path = f"/dev/vfio/{GROUP}" if form == "group" else "/dev/vfio/devices/vfio0"
    node.publish(nodes=[path])
    line = ("--root", str(node.root), "check", "pod", str(node.pod))
    answer = run(*line)
    assert answer.status == 0, answer.stdout
    name = path.rpartition("/")[2]
    key = f"cdi.k8s.io/vfio{name}" + (".0" if runtime == "rs" else "")
    assert answer.stdout.splitlines()[-5:] == [
        "the device:",
        f"  nvidia.com/pgpu={name} -> /{SPECIFICATION} -> {path} -> group {GROUP}",
        f"    {GPU} on vfio-pci -> rp0 -> nvidia.com/gpu=0",
        f"    annotation for the agent: {key}: nvidia.com/gpu=0",
        "no problem found",
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
    line = ("--root", str(node.root), "check", "pod", str(node.pod), *case.options)
    answer = run(*line, "--format", "json")
    item = document(answer)
    (found,) = [found for found in breaks(item) if case.what in said(found)]
    assert found["number"] == case.number
    assert found["id"] in {rule.name for rule in all_texts()}
    assert case.remedy in found["remedy"]
    assert (found["is_silent"], is_certain(found)) == (case.is_silent, case.is_certain)
    assert answer.status == (1 if case.is_certain else 0)
    assert item["is_broken"] == case.is_certain
    told = run(*line).stdout
    number = "" if case.number is None else f" {case.number}"
    silent = ", silent" if case.is_silent else ""
    assert f"{'break' if case.is_certain else 'may break'}{number}{silent}: " in told
    assert f"remedy: {found['remedy']}" in told


def test_all_twelve_breaks_have_a_case() -> None:
    assert {case.number for case in CASES} >= set(range(1, 13)) == set(NUMBERS.values())


def test_what_is_numbered_or_silent_is_a_rule() -> None:
    assert {*NUMBERS, *SILENT} <= {rule.name for rule in all_texts()}


@pytest.mark.parametrize("seed", range(25))
def test_several_breaks_at_once_are_told_without_a_crash(
    run: Run, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - a choice of cases
    node = KataNode(tmp_path / "node", chance.choice(("go", "rs")))
    node.add_gpus(2, with_audio=chance.random() < 0.5)
    node.publish()
    for case in chance.sample(CASES, 5):
        with contextlib.suppress(
            AssertionError, FileNotFoundError
        ):  # what it changes, another one has
            case.spoil(node)
    answer = run("--root", str(node.root), "check", "pod", str(node.pod), "--format", "json")
    if answer.status == 65:
        assert str(node.pod) in answer.stderr
        return
    item = document(answer)
    assert len(item["steps"]) == 10
    certain = [found for found in breaks(item) if is_certain(found)]
    assert answer.status == (1 if certain else 0)
    assert all(said(found) and found["remedy"] for found in breaks(item))
    for step in item["steps"]:
        assert (step["state"] == "broken") == any(is_certain(b) for b in step["breaks"])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CONTAINERD, "version = 'x'\nplugins = 5\n"),
        (CONTAINERD, "imports = 'a'\n"),
        (CONTAINERD, 'imports = ["/etc/**/[", "../../x", 5, "/", "*"]\n'),
        (CONTAINERD, "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes]\nkata-vfio = 1\n"),
        (CONTAINERD, "\0"),
        (CONTAINERD, HANDLER.format(shim="../kata")),
        (CONTAINERD, HANDLER.format(shim="kata\\u0000")),
        (CONTAINERD, HANDLER.replace("configuration.toml", "a\\u0000b").format(shim="")),
        (CONTAINERD, 'imports = ["a\\u0000/*"]\n'),
        ("etc/systemd/system/containerd.service", "[Service]\nEnvironment=KATA_CONF_FILE=a\0b\n"),
        (KUBELET, "- a\n"),
        (KUBELET, "runtimeRequestTimeout: [1]\nfeatureGates: {KubeletPodResourcesGet: true}\n"),
        (KUBELET, "a: [\n"),
        (CONFIGURATION, "hypervisor = 5\nruntime = 'x'\n"),
        (CONFIGURATION, "[hypervisor]\nqemu = 1\n"),
        (CONFIGURATION, "[hypervisor.qemu]\ncold_plug_vfio = 3\ndefault_memory = 'x'\n"),
        (CONFIGURATION, ""),
        (CONFIGURATION, "x ="),
        (f"{DROP_INS}/a.toml", "x ="),
        (f"{DROP_INS}/a.toml", "hypervisor = 1\n"),
        (SPECIFICATION, "5"),
        (SPECIFICATION, "[]"),
        (SPECIFICATION, '{"devices": 5}'),
        (SPECIFICATION, '{"kind": "a/bb", "devices": [{}]}'),
    ],
)
@pytest.mark.parametrize("runtime", ["go", "rs"])
def test_odd_files_are_no_crash(
    run: Run, tmp_path: Path, path: str, text: str, runtime: str
) -> None:
    node = KataNode(tmp_path / "node", runtime)
    node.add_gpus()
    node.publish()
    node.write(path, text)
    line = ("--root", str(node.root), "check", "pod", str(node.pod))
    answer = run(*line)
    assert (answer.status in (0, 1), answer.stderr) == (True, "")
    is_malformed = text == "x ="
    answer = run("--root", str(node.root), "kata", "pod", "--runtimeclass")
    assert answer.status == (65 if is_malformed else 0)
    assert is_malformed == (f"/{path}:1: not valid TOML: " in answer.stderr)
