"""Handlers of MicroK8s, whose containerd reads a file that a template renders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.kata.explain.facts import read_handlers
from vfiomgr.kata.explain.pod_to_shim import _another

if TYPE_CHECKING:
    from pathlib import Path

ARGS = "var/snap/microk8s/current/args"
CONFIG = r"""version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n"""


def test_the_template_gets_a_handler_that_the_rendered_file_lacks(tmp_path: Path) -> None:
    facts = read_handlers(tree_of(tmp_path, f"{ARGS}/containerd.toml: {CONFIG}"), None)
    assert [entry.name for entry in facts.handlers] == ["runc"]
    (remedy,) = _another(facts, "nvidia", "containerd")
    assert f"/{ARGS}/containerd-template.toml" in remedy
    assert "microk8s.daemon-containerd" in remedy


@pytest.mark.parametrize("name", ["nvidia", "crun"])
def test_containerd_of_the_host_comes_first(tmp_path: Path, name: str) -> None:
    files = f"{ARGS}/containerd.toml: {CONFIG}\netc/containerd/config.toml: {CONFIG}"
    facts = read_handlers(tree_of(tmp_path, files), None)
    assert not any("microk8s" in remedy for remedy in _another(facts, name, "containerd"))
