"""Devices of pods without a node agent: the kubelet's own record names them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.users.node_agent import RECORD, find_pods

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.host.tree import HostTree
    from vfiomgr.users.model import UnknownUsers
    from vfiomgr.users.node_agent import NodeStatus

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


@pytest.mark.parametrize(
    "files",
    [
        "",
        "var/lib/kubelet/pods/:",
        "var/log/pods/:",
        "var/log/pods/ml_train-0_0b9c-1/c0/0.log: x",
        "var/lib/kubelet/pods/0b9c-0/etc-hosts: x\nvar/log/pods/ml_train-0_0b9c-1/c0/0.log: x",
    ],
)
def test_a_pod_has_its_devices_unless_the_directory_of_pods_is_known_to_be_in_use(
    tmp_path: Path, files: str
) -> None:
    for line in files.splitlines():
        os.makedirs(tmp_path / line.partition(":")[0].rpartition("/")[0])
    kept = "\n".join(line for line in files.splitlines() if not line.endswith("/:"))
    found, unknown = found_in(tmp_path, record(entry({"0": [GPU]}, ENDED)), kept)
    assert (found and found.pods, unknown) == ({GPU: ENDED}, [])


@pytest.mark.parametrize("name", ["ml_-x", "ml_train-0;reboot"])
def test_a_pod_whose_name_is_not_one_of_kubernetes_is_named_by_its_uid(
    tmp_path: Path, name: str
) -> None:
    living = f"var/log/pods/{name}_{UID}/c0/0.log: x"
    found, unknown = found_in(tmp_path, record(entry({"0": [GPU]})), living)
    assert (found and found.pods, unknown) == ({GPU: UID}, [])


def test_a_number_is_an_iommu_group_that_can_be_opened_as_the_plugin_of_kubevirt_names_it(
    tmp_path: Path,
) -> None:
    groups = "\n".join(
        f"sys/kernel/iommu_groups/{number}/devices/{name}: x"
        for number, name in ((12, GPU), (12, "0000:08:00.1"), (13, VGPU), (14, "0000:00:1f.0"))
    )
    nodes = "dev/vfio/12: x\ndev/vfio/13: x"
    content = record(entry({"0": ["12", "13", "14"]}))
    found, unknown = found_in(tmp_path, content, f"{LIVING}\n{groups}\n{nodes}")
    pods = dict.fromkeys((GPU, "0000:08:00.1", VGPU), "ml/train-0")
    assert (found and found.pods, unknown) == (pods, [])


def test_devices_of_other_plugins_have_other_names(tmp_path: Path) -> None:
    others = {"0": ["GPU-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "12", "eth0"]}
    assert found_in(tmp_path, record(entry(others, "no-such-pod")), "") == (None, [])
    assert found_in(tmp_path, '{"Data": {"PodDeviceEntries": null}, "Checksum": 0}', "") == (
        None,
        [],
    )


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", '{"Data": {"PodDeviceEntries": {}}}', record(entry([GPU]))),
        '{"Data": ' + "[" * 20_000,
        '{"x": ' + "[" * 20_000,
        record(entry({"0": [GPU]}, "$(reboot)")),
    ],
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
