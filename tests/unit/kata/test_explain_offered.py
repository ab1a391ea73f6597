"""`vfiomgr check pod`: what the agent of the node reports about the requested devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_nodes import KataNode
from tests.unit.runtimes import put
from vfiomgr.users.node_agent import RECORD, DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

NAME = "vfiomgr.io/GA102GL_A40"
FIRST, SECOND = "0000:41:00.0", "0000:42:00.0"


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    """On which all is right for Kata."""
    return KataNode(tmp_path / "node", "go")


@pytest.fixture
def kernel(node: KataNode) -> FakeKernel:
    """What `run` runs on."""
    return node.kernel


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have an agent report resources."""

    def report_it(*resources: ResourceStatus) -> None:
        status = NodeStatus(7, "/p", has_kubelet=True, resources=resources)
        monkeypatch.setattr("vfiomgr.kata.explain.pods.find_status", lambda _: status)

    return report_it


def resource(
    devices: dict[str, str], name: str = NAME, *, is_registered: bool = True
) -> ResourceStatus:
    """A resource, with the pod of each of its devices."""
    found = (
        DeviceStatus(
            device, (device,), (), is_healthy=True, used_by="", pod=f"{pod}/main" if pod else ""
        )
        for device, pod in devices.items()
    )
    return ResourceStatus(name, "kata", is_registered, tuple(found))


def manifest(kind: str, name: str, count: int = 1, namespace: str = "") -> str:
    """An object with pods that request devices."""
    container = {"name": "main", "image": "x", "resources": {"limits": {NAME: str(count)}}}
    spec: Any = {"runtimeClassName": "kata-vfio", "containers": [container]}
    if kind == "CronJob":
        spec = {"jobTemplate": {"spec": {"template": {"spec": spec}}}}
    elif kind != "Pod":
        spec = {"template": {"spec": spec}}
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return json.dumps({"kind": kind, "metadata": metadata, "spec": spec})


@pytest.fixture
def problems(run: Run, node: KataNode) -> Callable[..., list[Any]]:
    """Why the pods of an object, or one that only requests a device, stay Pending."""

    def found(text: str, *arguments: str) -> list[Any]:
        subject = text
        if text.startswith("{"):
            node.pod.write_text(text)
            subject = str(node.pod)
        answer = run("check", "pod", subject, *arguments, "--format", "json")
        (item,) = json.loads(answer.stdout)["items"]
        (step,) = [step for step in item["steps"] if step["name"] == "request"]
        return [each for each in step["breaks"] if each["id"].startswith("pod-")]

    return found


@pytest.mark.parametrize(
    ("owner", "pod", "is_own"),
    [
        ("Pod", "default/train", True),
        ("Pod ml", "ml/train", True),
        ("Pod", "other/train", False),
        ("Pod ml", "default/train", False),
        ("Pod ml", "ml/train-0", False),
        ("Deployment ml", "ml/train-6d4cf56db6-x7k2p", True),
        ("Deployment ml", "dev/train-6d4cf56db6-x7k2p", False),
        ("Deployment ml", "ml/train-eval-0", False),
        ("Deployment ml", "ml/train-eval-6d4cf56db6-x7k2p", False),
        ("ReplicaSet ml", "ml/train-x7k2p", True),
        ("StatefulSet ml", "ml/train-12", True),
        ("StatefulSet ml", "ml/train-eval-0", False),
        ("DaemonSet ml", "ml/train-x7k2p", True),
        ("DaemonSet ml", "ml/train-eval-x7k2p", False),
        ("Job ml", "ml/train-x7k2p", True),
        ("Job ml", "ml/train-3-x7k2p", True),
        ("Job ml", "ml/train-eval-x7k2p", False),
        ("CronJob ml", "ml/train-29401230-x7k2p", True),
        ("CronJob ml", "ml/train-x7k2p", False),
    ],
)
def test_only_the_own_pods_of_an_object_keep_their_devices(
    problems: Callable[..., list[Any]],
    report: Callable[..., None],
    owner: str,
    pod: str,
    is_own: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    kind, _, namespace = owner.partition(" ")
    report(resource({FIRST: pod}))
    found = problems(manifest(kind, "train", namespace=namespace))
    assert [each["id"] for each in found] == ([] if is_own else ["pod-devices-taken"])


def test_the_name_of_an_object_is_no_pattern(
    problems: Callable[..., list[Any]], report: Callable[..., None]
) -> None:
    report(resource({FIRST: "default/trainx1"}))
    assert problems(manifest("Pod", "train.1"))


def test_an_assumed_pod_has_no_devices(
    problems: Callable[..., list[Any]], report: Callable[..., None], node: KataNode
) -> None:
    node.add_gpus(1)
    report(resource({FIRST: "default/example"}))
    assert problems(manifest("Pod", "example")) == []
    (found,) = problems(FIRST, "--resource", NAME)
    assert found["id"] == "pod-devices-taken"


def test_a_single_device_and_a_missing_one_are_counted_in_words(
    problems: Callable[..., list[Any]], report: Callable[..., None]
) -> None:
    report(resource({}))
    (found,) = problems(manifest("Pod", "cuda"))
    assert found["title"] == f"the pod requests 1 device of {NAME}, and this node has none"
    bind = "bind a device for it: vfiomgr bind ADDRESS"
    assert found["remedy"] == f"{bind}, or use a node with more"
    report(resource({FIRST: ""}))
    (found,) = problems(manifest("Pod", "cuda", 2))
    assert found["title"] == f"the pod requests 2 devices of {NAME}, and this node has 1"
    assert found["remedy"] == "request at most 1, or use a node with more"


def test_a_named_device_of_another_resource_is_named(
    problems: Callable[..., list[Any]], report: Callable[..., None], node: KataNode
) -> None:
    node.add_gpus(2)
    report(resource({FIRST: ""}))
    assert problems(FIRST, "--resource", NAME) == []
    (found,) = problems(SECOND, "--resource", NAME)
    assert found["id"] == "pod-resource-not-offered"
    assert found["title"] == f"{SECOND} is not a device of {NAME}"
    listed = "vfiomgr node status lists the devices of each resource"
    assert found["remedy"] == f"bind it: vfiomgr bind {SECOND}; {listed}"
    node.publish(kind=NAME, names=["gpu7"])
    (found,) = problems(f"{NAME}=gpu7")
    assert found["title"] == f"gpu7 is not a device of {NAME}"
    assert found["remedy"] == listed


def test_a_resource_that_the_kubelet_does_not_list_names_the_log(
    problems: Callable[..., list[Any]], report: Callable[..., None]
) -> None:
    report(resource({FIRST: ""}, is_registered=False))
    (found,) = problems(manifest("Pod", "cuda"))
    assert found["remedy"] == (
        "start the kubelet; read the log of the agent: journalctl -u vfiomgr-node, or of its pod: "
        "kubectl --namespace vfiomgr logs daemonset/vfiomgr-node"
    )


def test_a_snapshot_of_a_node_without_an_agent_says_nothing_of_what_is_offered(
    run: Run, node: KataNode, tmp_path: Path
) -> None:
    node.add_gpus(1)
    given = {"ContainerName": "c", "ResourceName": "intel.com/x", "DeviceIDs": {"0": [FIRST]}}
    data = {"PodDeviceEntries": [{"PodUID": "0b9c-1", **given}]}
    put(node.kernel, RECORD, json.dumps({"Data": data}))
    file = tmp_path / "node.json"
    file.write_text(run("snapshot").stdout)
    assert "intel.com/x" in file.read_text()
    node.pod.write_text(manifest("Pod", "x").replace(NAME, "intel.com/x"))
    answer = run("check", "pod", str(node.pod), "--snapshot", str(file), "--format", "json")
    (item,) = json.loads(answer.stdout)["items"]
    (step,) = [step for step in item["steps"] if step["name"] == "request"]
    assert [each["id"] for each in step["breaks"] if each["id"].startswith("pod-")] == []


def test_a_wrong_resource_has_separate_remedies(
    problems: Callable[..., list[Any]], report: Callable[..., None]
) -> None:
    bind = "bind a device for it: vfiomgr bind ADDRESS, or use another node"
    report(resource({FIRST: ""}, f"{NAME}s"), resource({}, "vfiomgr.io/other"))
    (found,) = problems(manifest("Pod", "cuda"))
    assert found["title"] == f"no such resource on this node: {NAME}"
    assert found["evidence"] == [f"this node offers {NAME}s, vfiomgr.io/other"]
    assert found["remedy"] == f"did you mean {NAME}s? {bind}"
    report()
    (found,) = problems(manifest("Pod", "cuda"))
    assert found["evidence"] == ["this node offers no resource"]
    assert found["remedy"] == bind


@pytest.mark.parametrize(
    ("pods", "end", "remedy"),
    [
        (
            ("ml/a",),
            "1 of 1 device of NAME, and none is available: 1 belongs to pod ml/a",
            "wait until pod ml/a ends, delete it, or use another node",
        ),
        (
            ("ml/a", "ml/a", ""),
            "2 of 3 devices of NAME, and 1 is available: 2 belong to pod ml/a",
            "wait until pod ml/a ends, delete it, or use another node",
        ),
        (
            ("ml/a", "ml/b", "", ""),
            "3 of 4 devices of NAME, and 2 are available: 2 belong to pods ml/a, ml/b",
            "wait until one of these pods ends, delete one, or use another node",
        ),
    ],
)
def test_pods_with_the_devices_are_counted(
    problems: Callable[..., list[Any]],
    report: Callable[..., None],
    pods: tuple[str, ...],
    end: str,
    remedy: str,
) -> None:
    report(resource({f"0000:{0x41 + bus:x}:00.0": pod for bus, pod in enumerate(pods)}))
    (found,) = problems(manifest("Pod", "cuda", int(end[0])))
    assert found["title"] == f"the pod requests {end.replace('NAME', NAME)}"
    assert found["remedy"] == remedy
