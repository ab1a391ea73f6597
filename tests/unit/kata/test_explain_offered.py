"""`vfiomgr check pod`: what the agent of the node reports about the requested devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_nodes import KataNode
from vfiomgr.snapshot.node_agent import DeviceStatus, NodeStatus, ResourceStatus

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
