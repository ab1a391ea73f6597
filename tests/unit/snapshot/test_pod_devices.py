"""Devices of pods without a node agent: the kubelet's own record names them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.snapshot.pod_devices import RECORD, find_pods

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.node_agent import NodeStatus
    from vfiomgr.snapshot.unknown import UnknownUsers

GPU, VGPU = "0000:08:00.0", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
UID, ENDED = "0b9c-1", "0b9c-2"
LIVING = f"var/lib/kubelet/pods/{UID}/etc-hosts: x\nvar/log/pods/ml_train-0_{UID}/c0/0.log: x"


def entry(devices: Any, uid: str = UID) -> dict[str, Any]:
    return {
        "PodUID": uid,
        "ContainerName": "c0",
        "ResourceName": "vfiomgr.io/A40",
        "DeviceIDs": devices,
        "AllocResp": "GgA=",
    }


def record(*entries: dict[str, Any]) -> str:
    """What the kubelet writes (pkg/kubelet/cm/devicemanager/checkpoint)."""
    registered = {"vfiomgr.io/A40": [GPU, VGPU]}
    data = {"PodDeviceEntries": [*entries], "RegisteredDevices": registered}
    return json.dumps({"Data": data, "Checksum": 3190172867})


def found_in(
    tmp_path: Path, content: str, files: str = LIVING
) -> tuple[NodeStatus | None, list[UnknownUsers]]:
    tree = tree_of(tmp_path, f"{files}\n{RECORD.lstrip('/')}: {content}")
    return asked(tree)


def asked(tree: HostTree) -> tuple[NodeStatus | None, list[UnknownUsers]]:
    unknown: list[UnknownUsers] = []
    return find_pods(tree, unknown.append, 1.0), unknown


def test_the_kubelet_record_names_the_pods_of_functions_and_vgpus(tmp_path: Path) -> None:
    found, unknown = found_in(tmp_path, record(entry({"-1": [VGPU], "0": [GPU], "1": None})))
    assert (found and found.pods, unknown) == ({GPU: "ml/train-0", VGPU: "ml/train-0"}, [])


def test_all_functions_of_an_iommu_group_belong_to_the_pod_of_one(tmp_path: Path) -> None:
    group = f"sys/bus/pci/devices/{GPU}/iommu_group/devices/0000:08:00.1: x"
    found, _ = found_in(tmp_path, record(entry({"0": [GPU]})), f"{LIVING}\n{group}")
    assert found is not None
    assert found.pods == {GPU: "ml/train-0", "0000:08:00.1": "ml/train-0"}


def test_a_pod_that_has_ended_has_no_device_although_the_record_still_names_it(
    tmp_path: Path,
) -> None:
    found, unknown = found_in(tmp_path, record(entry({"0": [GPU]}, ENDED)))
    assert (found, unknown) == (None, [])


def test_a_pod_of_which_nothing_else_is_known_may_have_devices(tmp_path: Path) -> None:
    found, unknown = found_in(tmp_path, record(entry({"0": [GPU]}, ENDED)), "")
    (why,) = unknown
    assert (found, why.kind) == (None, "pods")
    assert why.why == f"pod {ENDED} has devices by {RECORD}, and /var/log/pods does not name it"
    assert "systemctl start vfiomgr-node" in why.lift


@pytest.mark.parametrize("name", ["ml_-x", "ml_train-0;reboot"])
def test_a_pod_whose_name_is_not_one_of_kubernetes_is_unknown(tmp_path: Path, name: str) -> None:
    living = f"var/log/pods/{name}_{UID}/c0/0.log: x"
    found, unknown = found_in(tmp_path, record(entry({"0": [GPU]})), living)
    assert (found, len(unknown)) == (None, 1)


def test_devices_of_other_plugins_have_other_names(tmp_path: Path) -> None:
    others = {"0": ["GPU-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "12", "eth0"]}
    assert found_in(tmp_path, record(entry(others, "no-such-pod")), "") == (None, [])
    assert found_in(tmp_path, '{"Data": {"PodDeviceEntries": null}, "Checksum": 0}', "") == (
        None,
        [],
    )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"Data": {"PodDeviceEntries": {}}}', record(entry([GPU]))]
)
def test_a_record_of_another_form_leaves_the_pods_unknown(tmp_path: Path, content: str) -> None:
    found, unknown = found_in(tmp_path, content)
    (why,) = unknown
    assert (found, why.kind) == (None, "pods")
    assert why.why.startswith(f"cannot read from {RECORD} which pods have devices: ")
    assert f"if no kubelet should run here: rm {tmp_path}{RECORD}" in why.lift


def test_a_record_that_cannot_be_opened_leaves_the_pods_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, LIVING)
    os.makedirs(tmp_path / RECORD.lstrip("/"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (why,) = asked(tree)[1]
    assert "it cannot be opened" in why.why
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert asked(tree) == (None, [])  # it says nothing about pods to other users


def test_a_host_without_a_kubelet_has_no_pods(tmp_path: Path) -> None:
    assert asked(tree_of(tmp_path, "")) == (None, [])
