"""The agent with its DRA driver, from the slices to a claim that is unprepared.

The kubelet, the API server and the kernel are those of the tests; sockets and processes are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests import pages
from tests.fakes.cluster import NODE, Cluster
from tests.fakes.dra_kubelet import PrepareError
from tests.fakes.kubelet import AdmissionError
from tests.unit.node.stories import gpu_node, start_guest
from vfiomgr.errors import Refusal
from vfiomgr.node.agent import Agent
from vfiomgr.node.commands import run as run_module
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.messages import AgentSettings, DraSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

RESOURCE = "vfiomgr.io/GA102GL_A40"
GPU, DEVICE = "0000:01:00.0", "pci-0000-01-00-0"
OTHER = "0000:02:00.0"
OTHERS = (OTHER, "0000:03:00.0")


class Running(Cluster):
    """A cluster, and an agent as a process of its own."""

    def __init__(self, place: Path, kernel: FakeKernel) -> None:
        super().__init__(place)
        self.kernel = kernel
        self.process: asyncio.subprocess.Process | None = None

    async def start_agent(self) -> None:
        """Start the agent."""
        metrics = f"--metrics=unix:{self.place / 'm'}"
        self.process = await self._start("node", "run", *self.options, metrics)

    async def end_agent(self) -> str:
        """End the agent; returns what it reported."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        _, error = await self.process.communicate()
        self.process = None
        return error.decode()

    async def status(self) -> Mapping[str, Any]:
        """What `node status` prints."""
        made = await self._start("node", "status", "--format", "json")
        output, error = await made.communicate()
        assert made.returncode == 0, error.decode()
        document: Mapping[str, Any] = json.loads(output)
        return document

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vfiomgr", "--root", self.kernel.root, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment},
        )


@asynccontextmanager
async def running(place: Path) -> AsyncIterator[Running]:
    """A node with three GPUs on vfio-pci, whose devices are published."""
    made = Running(place, gpu_node(place))
    await made.start()
    try:
        await made.start_agent()
        await made.until(lambda: made.claims.plugin(DRIVER) and made.published())
        await made.plugins.until_capacity(RESOURCE, 3, 3)
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            await made.process.communicate()
        await made.stop()


def claims_in(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(each["device"], each["claim"]) for each in status["claims"]]


async def test_a_gpu_is_published_prepared_and_given_back(place: Path) -> None:
    async with running(place) as node:
        names = {f"pci-0000-0{number}-00-0" for number in (1, 2, 3)}
        assert node.published() == {NODE: names}
        node.allocate(DEVICE)
        (device,) = await node.prepare()
        assert device.device_name == DEVICE
        assert any(name.startswith("vfiomgr.io/claim=") for name in device.cdi_device_ids)
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        assert node.published() == {NODE: names}
        await node.until(lambda: node.claims.state(DRIVER, NODE, DEVICE) == "Healthy")
        status = await node.status()
        assert claims_in(status) == [(GPU, "ml/gpu")]
        assert status["dra"] is True
        (resource,) = status["resources"]
        assert {d["id"]: d["used_by"] for d in resource["devices"]}[GPU] == "claim ml/gpu"
        await node.unprepare()
        await node.plugins.until_capacity(RESOURCE, 3, 3)
        assert (await node.status())["claims"] == []


async def test_a_device_of_a_prepared_claim_is_given_to_no_pod(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        for number in (1, 2):
            container = await node.plugins.admit(f"ml/pod-{number}", RESOURCE, 1)
            assert container.ids != (GPU,)
        with pytest.raises(AdmissionError):
            await node.plugins.admit("ml/pod-3", RESOURCE, 1)


async def test_the_agent_reads_only_the_claim_that_the_kubelet_names(place: Path) -> None:
    async with running(place) as node:
        for number in range(20):
            node.allocate(f"pci-{number}", pool="gpu-10", name=f"theirs-{number}", uid="0")
        node.allocate(DEVICE)
        await node.prepare()
        await node.unprepare()
        await node.plugins.until_capacity(RESOURCE, 3, 3)
        asked = [each for each in node.server.requests if "resourceclaims" in each.path]
        assert {(each.verb, each.path.rpartition("/")[2]) for each in asked} == {("get", "gpu")}


async def test_metrics_count_claims_by_result_and_failed_requests(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        with pytest.raises(PrepareError):
            await node.claims.prepare_once(DRIVER, "ml", "none", "uid-2")
        await node.unprepare()
        _, text = await pages.page(place / "m", "/metrics")
        counts = 'vfiomgr_claim_seconds_count{operation="%s",result="%s"} 1.0'
        for made in (("prepare", "done"), ("prepare", "failed"), ("unprepare", "done")):
            assert counts % made in text
        failed = 'vfiomgr_api_errors_total{resource="resourceclaims",status="404",verb="get"}'
        assert f"{failed} 1.0" in text


async def test_a_claim_that_was_deleted_while_the_agent_was_away_is_released(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        await node.end_agent()
        node.server.remove("resourceclaims", "ml/gpu")
        await node.start_agent()
        await node.until(lambda: node.claims.plugin(DRIVER))
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        await node.claims.unprepare(DRIVER, "ml", "gpu", "uid-1")
        await node.plugins.until_capacity(RESOURCE, 3, 3)


async def test_a_record_that_cannot_be_read_withholds_what_nobody_has(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        await node.end_agent()
        record = Path(node.kernel.root) / "run/vfiomgr/dra/uid-1.json"
        record.write_text(record.read_text().replace('"boot"', '"started"'))
        await node.plugins.until_capacity(RESOURCE, 3, 0)
        await node.start_agent()
        await node.until(lambda: node.claims.plugin(DRIVER))
        expected = {GPU: ["held-by-claim"], **{gpu: ["claim-unreadable"] for gpu in OTHERS}}
        found: dict[str, list[str]] = {}
        for _ in range(100):
            found = await _reasons(node)
            if found == expected:
                break
        assert found == expected
        answer = await node.claims.call(DRIVER, "Unprepare", ("ml", "gpu", "uid-1"))
        assert "cannot read /run/vfiomgr/dra/uid-1.json" in answer.claims["uid-1"].error
        assert record.exists()
        record.unlink()
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        await node.unprepare()
        await node.plugins.until_capacity(RESOURCE, 3, 3)
        assert "claim uid-1: cannot read /run/vfiomgr/dra/uid-1.json" in await node.end_agent()


async def _reasons(node: Running) -> dict[str, list[str]]:
    """The rules against each device, by `node status`."""
    devices = (each for found in (await node.status())["resources"] for each in found["devices"])
    return {each["id"]: [reason["id"] for reason in each["reasons"]] for each in devices}


async def test_a_claim_without_a_record_is_known_from_the_kubelet(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        await node.end_agent()
        shutil.rmtree(Path(node.kernel.root) / "run/vfiomgr/dra")
        await node.plugins.until_capacity(RESOURCE, 3, 0)
        await node.start_agent()
        await node.until(lambda: node.claims.plugin(DRIVER))
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        assert claims_in(await node.status()) == [(GPU, "ml/gpu")]


def taints(node: Cluster) -> dict[str, list[str]]:
    """The taints of each device."""
    return {
        device["name"]: [taint["key"] for taint in device.get("taints") or ()]
        for each in node.server.objects("resourceslices")
        for device in each["spec"].get("devices") or ()
    }


async def test_a_device_whose_guest_crashed_is_tainted(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        start_guest(node.kernel, GPU, f"sandbox-{'a' * 64}")
        await pages.until_guest_is_known(place / "m", GPU)
        start_guest(node.kernel, GPU, f"sandbox-{'b' * 64}")
        await node.until(lambda: taints(node)[DEVICE] == ["vfiomgr.io/sandbox-crashed"])
        await node.until(lambda: node.claims.state(DRIVER, NODE, DEVICE) == "Unhealthy")
        told = await node.end_agent()
        assert f"{GPU}: quarantined for 60 s: guest sandbox-aaaa" in told
        assert "aaaa of pod ml/train-0 ended while the pod had" in told


async def test_slices_come_back_after_the_kubelet_deleted_them(place: Path) -> None:
    async with running(place) as node:
        before = node.published()
        await node.claims.restart()
        await node.until(lambda: node.claims.plugin(DRIVER))
        await node.until(lambda: node.published() == before)


async def test_an_agent_that_restarts_knows_the_claims_of_before(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE)
        await node.prepare()
        written = len(node.server.written())
        await node.end_agent()
        await node.plugins.until_capacity(RESOURCE, 3, 0)
        await node.start_agent()
        await node.until(lambda: node.claims.plugin(DRIVER))
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        await node.unprepare()
        await node.plugins.until_capacity(RESOURCE, 3, 3)
        assert len(node.server.written()) == written  # the slices are as they were


async def test_a_claim_of_the_same_name_with_another_uid_is_not_prepared(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE, uid="2")
        with pytest.raises(PrepareError, match=r"its UID is .*, expected uid-1"):
            await node.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        with pytest.raises(PrepareError, match="cannot get resourceclaims ml/none"):
            await node.claims.prepare_once(DRIVER, "ml", "none", "uid-1")
        await node.claims.unprepare(DRIVER, "ml", "none", "uid-3")


async def test_claims_of_other_nodes_and_drivers_take_nothing_here(place: Path) -> None:
    async with running(place) as node:
        node.allocate(DEVICE, pool="gpu-10", name="theirs")
        node.server.put("resourceclaims", {"metadata": {"name": "new", "namespace": "ml"}})
        node.allocate("pci-0000-02-00-0", name="ours", uid="2")
        await node.prepare("ours", "2")
        await node.plugins.until_capacity(RESOURCE, 3, 2)
        assert claims_in(await node.status()) == [(OTHER, "ml/ours")]


async def test_a_container_does_not_start_with_a_device_of_a_claim(place: Path) -> None:
    settings = AgentSettings(str(place), str(place), f"{place}/s", f"{place}/c")
    agent: Any = Agent(settings, print)
    agent.driver = SimpleNamespace(claims={GPU: "ml/gpu"})
    with pytest.raises(Refusal, match=f"{GPU} belongs to ResourceClaim ml/gpu"):
        await agent._verify(RESOURCE, (GPU,))


def test_the_uid_of_the_agents_pod_is_in_the_names_of_its_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vfiomgr.node.credentials.require_usable", lambda *_: None)
    known = {"KUBERNETES_SERVICE_HOST": "::1", "NODE_NAME": NODE, "POD_UID": "0b7c"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    found = run_module._dra("/account", "/kubelet")
    assert found == DraSettings("/kubelet", "/account", "https://[::1]:443", NODE, "0b7c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"KUBERNETES_SERVICE_HOST": ""}, "--dra: the API server is unknown"),
        ({"KUBERNETES_SERVICE_PORT": "tcp://x"}, "KUBERNETES_SERVICE_PORT is not a number"),
        ({}, "--dra: cannot use token and ca.crt in /none"),
    ],
)
def test_what_claims_need_is_checked_at_the_start(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    known = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    for name, value in {**known, **changes}.items():
        monkeypatch.setenv(name, value)
    answer = run("node", "run", "--dra", "--credentials", "/none")
    assert answer.status == 2
    assert message in answer.stderr
