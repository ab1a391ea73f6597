"""Graphviz draws what `vfiomgr topology --format dot` prints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from tests.unit.topology.hosts import dgx, vgpu_server
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import rows, view
from vfiomgr.topology.render import render_dot

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

DOT = shutil.which("dot")
pytestmark = pytest.mark.skipif(DOT is None, reason="Graphviz is not installed (Debian: graphviz)")


def drawn(host: HostSnapshot, form: str) -> str:
    return subprocess.run(
        [str(DOT), f"-T{form}"],
        input=render_dot(view(tree_of(host))),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize("host", [vgpu_server(), dgx()], ids=["vgpu", "dgx"])
def test_graphviz_draws_every_item(host: HostSnapshot) -> None:
    shown = list(rows(view(tree_of(host)), unfold=False))
    plain = drawn(host, "plain")
    assert len(re.findall(r"^node ", plain, re.MULTILINE)) == len(shown)
    assert len(re.findall(r"^edge ", plain, re.MULTILINE)) == len(shown) - 1


@pytest.mark.parametrize(
    "name", ['a"]; x [label="b', "a\\", r"\N \G \l", "<b>x</b>", "a\n}", "{a|b}", "&amp;"]
)
def test_a_name_is_a_text_and_nothing_else(name: str) -> None:
    document = json.loads(drawn(host_of(replace(pci_device(), name=name)), "json"))
    assert len(document["objects"]) == 4
    (label,) = (o["label"] for o in document["objects"] if "driver nvidia" in o["label"])
    shown = name.replace("\n", r"\n").replace("\\", "\\\\")
    assert f"\\n{shown}\\n" in label
