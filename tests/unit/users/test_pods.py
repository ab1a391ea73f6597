"""Pods of Kata's sandboxes, as containerd and CRI-O keep them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.users.model import DeviceUser
from vfiomgr.users.processes import pod_of

if TYPE_CHECKING:
    from pathlib import Path

ID = "4f0e9a430e2f5a1b7c114f0e9a430e2f5a1b7c114f0e9a430e2f5a1b7c11abcd"
TASK = "io.containerd.runtime.v2.task/k8s.io"
CRI = {"io.kubernetes.cri.sandbox-namespace": "ml", "io.kubernetes.cri.sandbox-name": "train-0"}
CRIO = {"io.kubernetes.cri-o.Namespace": "ml", "io.kubernetes.cri-o.KubeName": "train-0"}


@pytest.mark.parametrize(
    ("place", "annotations"),
    [
        (f"run/containerd/{TASK}/{ID}", CRI),
        (f"run/k3s/containerd/{TASK}/{ID}", CRI),
        (f"run/containers/storage/overlay-containers/{ID}/userdata", CRIO),
    ],
)
def test_the_pod_of_a_sandbox_is_found(
    tmp_path: Path, place: str, annotations: dict[str, str]
) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    tree, file = HostTree(tmp_path), directory / "config.json"
    assert pod_of(tree, f"sandbox-{ID}") is None
    file.write_text(json.dumps({"ociVersion": "1.1.0", "annotations": annotations}))
    assert pod_of(tree, f"sandbox-{ID}") == "ml/train-0"
    assert pod_of(tree, "win") is None
    assert pod_of(tree, None) is None
    assert pod_of(tree, f"sandbox-../{ID}") is None
    for text in ("", "{", "[]", "{}", '{"annotations": 1}', '{"annotations": {}}'):
        file.write_text(text)
        assert pod_of(tree, f"sandbox-{ID}") is None


def test_a_pod_is_named_rather_than_its_sandbox() -> None:
    user = DeviceUser("/dev/vfio/8", 7, "qemu-system-x86", guest=f"sandbox-{ID}", pod="ml/train-0")
    assert str(user) == "pod ml/train-0 (qemu-system-x86, PID 7)"
