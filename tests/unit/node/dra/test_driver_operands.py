"""Pods of NVIDIA's GPU Operator, which leave the node while a claim binds a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.cluster import NODE, rights
from tests.fakes.dra_kubelet import PrepareError
from tests.unit.node.dra.test_driver_binding import (
    CARD,
    DEVICE,
    UUID,
    driver_of,
    kernel,
    until_known,
)
from tests.unit.node.dra.test_driver_vgpus import node
from tests.unit.node.test_on_demand import LAYOUT
from vfiomgr.engine.locks import hold
from vfiomgr.errors import HostError
from vfiomgr.node.dra import driver, operands
from vfiomgr.node.dra.binding import DIRECTORY, Bound, is_binding
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.messages import write_record
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci import facts
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.node.dra.test_driver_vgpus import Node
    from vfiomgr.node.model import NodeUnit

__all__ = ["kernel"]

DCGM, EXPORTER = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"
NVSM = "nvidia.com/gpu.deploy.nvsm"
LABELS = {DCGM: "true", EXPORTER: "true", NVSM: "false", "nvidia.com/gpu.deploy.driver": "true"}
PAUSED = {**LABELS, DCGM: "paused-for-vfiomgr", EXPORTER: "paused-for-vfiomgr"}
PERMITTING = LAYOUT + "        stop: gpu-operator\n"


class Operator:
    """The DaemonSet of the exporter: its pod has the card open while the node has the label."""

    def __init__(self, made: Node, labels: dict[str, str], delay: int = 2) -> None:
        self._made, self._delay = made, delay
        self.seen: list[dict[str, str]] = []
        self.label(labels)
        made.creator.vgpus.binding._sleep = lambda _seconds: self.follow()
        self.follow()

    def label(self, labels: dict[str, str]) -> None:
        """Set the labels of the node."""
        document = {"metadata": {"name": NODE, "uid": "uid-of-node", "labels": labels}}
        self._made.server.put("nodes", document)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the node."""
        (found,) = self._made.server.objects("nodes")
        labels: dict[str, str] = found["metadata"]["labels"]
        return labels

    def follow(self) -> None:
        """Start the pod, or end it some seconds after the label."""
        sysfs, place = self._made.kernel.sysfs, "/proc/4711"
        self.seen.append(self.labels)
        if self.labels[EXPORTER] == "true" and not sysfs.exists(place):
            sysfs.put(f"{place}/comm", "dcgm-exporter")
            uid = UUID.removeprefix("GPU-")
            sysfs.put(f"{place}/cgroup", f"0::/kubepods/besteffort/pod{uid}/{'4f' * 32}")
            sysfs.put(f"/var/log/pods/gpu-operator_nvidia-dcgm-exporter-x2x4z_{uid}/0.log", "")
            sysfs.link_absolute(f"{place}/fd/7", "/dev/dri/card1")
        if [each[EXPORTER] for each in self.seen[-self._delay :]] == [PAUSED[EXPORTER]] * 2:
            sysfs.drop(place)


def permit(kernel: FakeKernel) -> None:
    kernel.replace(FILE, PERMITTING.encode(), mode=0o644)


async def test_the_pods_are_away_for_the_bind_only(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit(kernel)
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        made.allocate(DEVICE)
        await made.prepare()
        assert driver_of(kernel) == "vfio-pci"
        assert PAUSED in operator.seen
        await made.until(lambda: operator.labels == LABELS)
        operator.seen.clear()
        await made.prepare()
        await made.unprepare()
        assert operator.seen == []
        assert driver_of(kernel) == "nvidia"


async def test_without_permission_the_pod_is_named_with_the_setting(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        operator = Operator(made, LABELS)
        made.allocate(DEVICE)
        with pytest.raises(PrepareError) as refused:
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        text = str(refused.value)
        assert f"{CARD} " in text
        assert "in use by: pod gpu-operator/nvidia-dcgm-exporter-x2x4z (dcgm-exporter, PID" in text
        assert "stop: [gpu-operator] in the layout's rule" in text
        assert operator.labels == LABELS
        assert driver_of(kernel) == "nvidia"


async def test_labels_that_a_killed_agent_left_are_restored(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        await made.end_agent()
        operator.label({**PAUSED, NVSM: "paused-for-mig-change"})
        await made.restart_agent()
        await made.until(lambda: operator.labels == {**LABELS, NVSM: "paused-for-mig-change"})


async def test_a_bind_that_goes_on_without_the_agent_has_the_pods_return_after_it(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []

    def look(tree: FakeKernel) -> bool:
        looks.append(is_binding(tree))
        return looks[-1]

    monkeypatch.setattr(driver, "is_binding", look)
    monkeypatch.setattr(operands, "_CLOSING", 0.1)
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        await made.end_agent()
        operator.label(PAUSED)
        boot = kernel.read(BOOT_ID) or ""
        address = PciAddress.parse(CARD)
        made_for = Bound("uid-1", address, is_sticky=False, boot=boot)
        write_record(kernel, DIRECTORY / f"{CARD}.json", made_for)
        with hold(kernel, [f"dra-{CARD}"], print):
            looks.clear()
            await made.restart_agent()
            await made.until(lambda: len(looks) > 1)
            assert all(looks)
            await made.end_agent()
            assert operator.labels == PAUSED
            await made.restart_agent()
        await made.until(lambda: operator.labels == LABELS)


async def test_a_device_that_the_kernel_does_not_return_from_keeps_no_pods_away(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit(kernel)
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        bind = made.creator.bind

        async def hang(*_arguments: object) -> NodeUnit:
            stuck = {CARD: facts.Locked(None, None, None, stuck="unbind (PID 7)")}
            monkeypatch.setattr(facts, "_read_locked", lambda *_arguments: stuck)
            message = f"the kernel has not returned from: unbind {CARD} (PID 7)"
            raise HostError(message)

        monkeypatch.setattr(made.creator, "bind", hang)
        made.allocate(DEVICE)
        with pytest.raises(PrepareError, match="has not returned"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        await made.until(lambda: operator.labels == LABELS)
        await made.scan()
        monkeypatch.setattr(made.creator, "bind", bind)
        updates = [r for r in made.server.requests if r.verb == "update" and "nodes" in r.path]
        with pytest.raises(PrepareError, match="is stuck in the kernel: unbind"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        again = [r for r in made.server.requests if r.verb == "update" and "nodes" in r.path]
        assert len(again) == len(updates) == 2


async def test_an_agent_that_ends_during_a_bind_restores_the_labels(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        assert made.agent.driver is not None
        async with made.agent.driver._operands.away():
            assert operator.labels == PAUSED
            await made.end_agent()
        assert operator.labels == LABELS


async def test_without_rights_a_claim_is_not_prepared_and_the_role_is_named(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit(kernel)
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        Operator(made, LABELS)
        made.allocate(DEVICE)
        with pytest.raises(PrepareError, match="cannot update nodes gpu-1") as refused:
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        assert "node manifests --dra --stop-gpu-operator" in str(refused.value)
        assert driver_of(kernel) == "nvidia"


async def test_a_change_of_the_node_in_the_meantime_is_kept(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit(kernel)
    async with node(place, kernel, monkeypatch) as made:
        made.server.rights = rights("gpu-operator")
        await until_known(made)
        operator = Operator(made, LABELS)
        assert made.agent.driver is not None
        api, others = made.agent.driver._api, iter(({**LABELS, DCGM: "false"},))
        update = api.update

        async def after_others(*arguments: Any) -> Any:
            for labels in others:
                operator.label(labels)
            return await update(*arguments)

        monkeypatch.setattr(api, "update", after_others)
        made.allocate(DEVICE)
        await made.prepare()
        await made.until(lambda: operator.labels == {**LABELS, DCGM: "false"})
        assert {**PAUSED, DCGM: "false"} in operator.seen


async def test_a_node_without_the_operator_is_not_changed(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit(kernel)
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        made.allocate(DEVICE)
        await made.prepare()
        await made.unprepare()
        assert not [
            each for each in made.server.requests if each.verb == "update" and "nodes" in each.path
        ]
