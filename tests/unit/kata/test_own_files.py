"""Configurations with the keys of those that Kata ships, release by release."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.kata_nodes import CONFIGURATION, KataNode
from vfiomgr.kata.check import check_keys
from vfiomgr.kata.model import KataRelease
from vfiomgr.units import Version

if TYPE_CHECKING:
    from tests.unit.conftest import Answer, Run

FILES = Path(__file__).parents[1] / "kata_files"
NAMES = sorted(path.stem for path in FILES.iterdir())
FOR_GPUS = [name for name in NAMES if name.endswith("-gpu")]
IGNORED = {"rs-3.29-qemu": ["msize_9p in [hypervisor.qemu]"]}
"""Of those that the release ships: runtime-rs lost this key with 3.29, its file kept it."""


def text_of(name: str) -> str:
    return (FILES / f"{name}.toml").read_text()


def release(name: str) -> KataRelease:
    runtime, version, _ = name.split("-")
    return KataRelease(Version.parse(version), "rs" if runtime == "rs" else "go")


@pytest.mark.parametrize("name", NAMES)
def test_its_release_takes_it(name: str) -> None:
    found = check_keys(tomllib.loads(text_of(name)), release(name))
    assert [each for each in found if each.severity == "blocker"] == []
    ignored = [each.summary for each in found if each.severity == "warning"]
    assert [title.rpartition(" know ")[2] for title in ignored] == IGNORED.get(name, [])


@pytest.mark.parametrize(
    ("name", "version", "key"),
    [
        ("rs-4.1-gpu", "3.31", "visible_cdi_devices in [agent.kata]"),
        ("rs-3.31-gpu", "3.28", None),
        ("go-4.1-gpu", "3.5", None),
    ],
)
def test_an_older_one_refuses_it_only_where_it_looks(
    name: str, version: str, key: str | None
) -> None:
    older = KataRelease(Version.parse(version), release(name).runtime)
    found = check_keys(tomllib.loads(text_of(name)), older)
    refused = [each.summary for each in found if each.severity == "blocker"]
    assert [title.rpartition(" know ")[2] for title in refused] == ([key] if key else [])
    assert any(each.severity == "warning" for each in found)


def node(directory: Path, name: str, run: Run, *line: str) -> Answer:
    made = KataNode(directory / "node", release(name).runtime)
    made.add_gpus()
    made.publish()
    made.write("opt/kata/VERSION", str(release(name).version))
    made.write(CONFIGURATION, text_of(name))
    words = (str(made.pod) if word == "POD" else word for word in line)
    return run("--root", str(made.root), *words)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_explain_has_nothing_against_it(run: Run, tmp_path: Path, name: str) -> None:
    answer = node(tmp_path, name, run, "check", "pod", "POD", "--format", "json")
    (item,) = json.loads(answer.stdout)["items"]
    (step,) = [each for each in item["steps"] if each["name"] == "configuration"]
    assert (step["state"], step["breaks"]) == ("ok", [])
    assert str(release(name)) == item["release"]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_it_is_a_base_without_a_word_about_its_keys(run: Run, tmp_path: Path, name: str) -> None:
    answer = node(
        tmp_path, name, run, "kata", "config", "0000:41:00.0", "--whole", f"/{CONFIGURATION}"
    )
    assert answer.status == 0, answer.stderr
    assert "ignores" not in answer.stderr
    assert tomllib.loads(answer.stdout)["hypervisor"]["qemu"]["cold_plug_vfio"] == "root-port"
