"""The command `vfiomgr node simulate`; its output is golden."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.fakes.hosts import workstation
from tests.unit.node.made import A40, node_of
from tests.unit.node.simulation.made import claim, exactly, pods
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.source import HostSource

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.unit.conftest import Run


def test_the_extra_is_named_where_it_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("vfiomgr.node.simulation.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cel", None)
    path = tmp_path / "pods.yaml"
    path.write_text(claim(f"[{exactly()}]") + pods())
    result = run("node", "simulate", "node.json", "--pods", str(path))
    assert result.status == 2
    assert (
        "cannot simulate: the libraries of the extra 'simulate' are not installed" in result.stderr
    )
    assert f"{sys.prefix}/bin/pip install '.[simulate]'" in result.stderr


def test_pods_in_a_row_with_the_same_reasons_are_one_entry(run: Run, tmp_path: Path) -> None:
    node, path = tmp_path / "node.json", tmp_path / "pods.yaml"
    node.write_text(write_snapshot(node_of(A40)))
    two = claim(f"[{exactly('count: 2')}]", name="two")
    path.write_text(claim(f"[{exactly()}]") + pods(4) + two + pods(2, "pair", template="two"))
    result = run("node", "simulate", f"{node}=2", "--pods", str(path))
    assert result.status == 1
    allowed = run("node", "simulate", f"{node}=2", "--pods", str(path), "--allow-pending")
    assert (allowed.status, allowed.stdout) == (0, result.stdout)
    lines = [line for line in result.stderr.splitlines() if "pending" in line]
    assert lines == [
        "pending: default/guest-3 to default/guest-4 (2 pods)",
        "pending: default/pair-1 to default/pair-2 (2 pods)",
    ]
    assert "2 nodes (node-1, node-2): request gpu: only 1 of 2 devices" in result.stderr


def test_claims_get_devices_that_a_layout_lets_them_bind(run: Run, tmp_path: Path) -> None:
    node, path = tmp_path / "node.json", tmp_path / "pods.yaml"
    layout = tmp_path / "mixed.yaml"
    host = HostSource()
    host.root = workstation(tmp_path / "h").root
    node.write_text(write_snapshot(host.scan()))
    rule = "{select: {address: '0000:01:00.0'}, state: on-demand}"
    layout.write_text(f"{{version: vfiomgr/v1, layouts: {{a: {{devices: [{rule}]}}}}}}")
    selector = 'device.attributes["vfiomgr.io"].bound == false'
    chosen = exactly(f"selectors: [{{cel: {{expression: '{selector}'}}}}]")
    path.write_text(claim(f"[{chosen}]") + pods(2))
    command = ("node", "simulate", str(node), "--pods", str(path))
    assert run(*command).status == 1
    result = run(*command, "--with-layout", str(layout), "--layout", "a")
    assert "pci-0000-01-00-0" in result.stdout
    assert "pending: default/guest-2" in result.stderr
    assert run(*command, "--layout", "a").status == 2
