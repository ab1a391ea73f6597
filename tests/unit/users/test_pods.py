"""Pods of processes: of Kata's sandboxes, as containerd and CRI-O keep them, and by cgroups."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host.tree import HostTree
from vfiomgr.users.model import DeviceUser
from vfiomgr.users.processes import pod_of, read_users

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


UID = "6f4bde77-3ab7-4d6f-9c38-6bbf5e6e1ee1"
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
STATIC = "d1ed7e4e5b1b3fa0fd5d3c4d19f76b8f"
OF_CONTAINERS = {
    "containerd, systemd, v2": f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/"
    f"cri-containerd-{ID}.scope",
    "containerd, systemd, v1": f"11:devices:/kubepods.slice/kubepods-burstable.slice/{SLICE}/"
    f"cri-containerd-{ID}.scope\\n1:name=systemd:/system.slice/containerd.service",
    "containerd, cgroupfs, v2": f"0::/kubepods/besteffort/pod{UID}/{ID}",
    "containerd, cgroupfs, v1": f"4:memory:/kubepods/pod{UID}/{ID}\\n1:name=systemd:/",
    "containerd in kind": f"0::/../../kubelet.slice/kubelet-kubepods.slice/kubelet-{SLICE}/"
    f"cri-containerd-{ID}.scope",
    "CRI-O, systemd, v2": f"0::/kubepods.slice/{SLICE}/crio-{ID}.scope/container",
    "CRI-O, cgroupfs, v1": f"7:cpuset:/kubepods/burstable/pod{UID}/crio-{ID}",
    "runc with a systemd path": f"0::/{SLICE.replace('burstable-', '')}:cri-containerd:{ID}",
}


def with_process(directory: Path, cgroup: str, more: str = "") -> HostTree:
    return tree_of(
        directory,
        f"""
        proc/123/comm: python3
        proc/123/cgroup: {cgroup}
        proc/123/fd/3 -> /dev/nvidia0
        {more}
        """,
    )


def users(tree: HostTree) -> list[str]:
    return [str(user) for user in read_users(tree) or ()]


@pytest.mark.parametrize("cgroup", OF_CONTAINERS.values(), ids=OF_CONTAINERS)
def test_the_process_of_a_container_is_named_with_its_pod(tmp_path: Path, cgroup: str) -> None:
    log = f"var/log/pods/ml_train-0_{UID}/main/0.log: x"
    assert users(with_process(tmp_path, cgroup, log)) == ["pod ml/train-0 (python3, PID 123)"]


def test_static_pods_have_a_hash_for_a_uid(tmp_path: Path) -> None:
    log = f"var/log/pods/kube-system_dcgm-node-1_{STATIC}/main/0.log: x"
    tree = with_process(tmp_path, f"0::/kubepods/burstable/pod{STATIC}/{ID}", log)
    assert users(tree) == ["pod kube-system/dcgm-node-1 (python3, PID 123)"]


def test_the_pod_of_a_container_is_in_its_bundle_if_the_kubelet_logs_elsewhere(
    tmp_path: Path,
) -> None:
    tree = with_process(tmp_path, OF_CONTAINERS["containerd, systemd, v2"])
    assert users(tree) == [f"pod {UID} (python3, PID 123)"]
    file = tmp_path / "run/containerd" / TASK / ID / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"annotations": CRI}))
    assert users(tree) == ["pod ml/train-0 (python3, PID 123)"]


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/system.slice/docker-{ID}.scope",
        f"0::/machine.slice/libpod-{ID}.scope/container",
        "0::/system.slice/kubelet.service",
        "0::/system.slice/kubepods.service",
        f"0::/user.slice/pod{UID}/{ID}",
    ],
)
def test_other_processes_are_in_no_pod(tmp_path: Path, cgroup: str) -> None:
    tree = with_process(tmp_path, cgroup, f"var/log/pods/ml_train-0_{UID}/main/0.log: x")
    assert not any(user.pod for user in read_users(tree) or ())
