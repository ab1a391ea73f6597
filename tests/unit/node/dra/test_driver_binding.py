"""Claims that bind: the agent, its kubelet and the kernel are in one process."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.cluster import NODE
from tests.fakes.dra_kubelet import PrepareError
from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet import Claimed, Container
from tests.unit.node.dra.test_driver_vgpus import node
from tests.unit.node.test_on_demand import LAYOUT
from vfiomgr.node.dra import driver
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.node.dra.test_driver_vgpus import Node

CARD, DEVICE = "0000:01:00.0", "pci-0000-01-00-0"
UUID = "GPU-5b1f5d1e-0a5c-4f43-9c3e-8c8f1a2b3c4d"


@pytest.fixture
def kernel(place: Path) -> FakeKernel:
    """A host with a card that claims may bind; its driver shows its UUID and number."""
    made = FakeKernel(place / "host")
    made.add_driver("nvidia", ids=[("10de", "*", "03")])
    made.add_driver("snd_hda_intel", ids=[("10de", "*", "0403")])
    made.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    for number, (kind, name) in enumerate((("030000", "nvidia"), ("040300", "snd_hda_intel"))):
        made.add_pci(
            f"0000:01:00.{number}",
            vendor="10de",
            device="2235",
            class_code=kind,
            header_type=0x80,
            group=10,
            driver=name,
            gives=[("drm", "drm/card1")] if number == 0 else [],
        )
    made.make_directory(FILE.parent)
    made.replace(FILE, LAYOUT.encode(), mode=0o644)
    text = f"Model: \t A40\nGPU UUID: \t {UUID}\nDevice Minor: \t 3\n"
    made.sysfs.put(f"/proc/driver/nvidia/gpus/{CARD}/information", text)
    return made


def driver_of(kernel: FakeKernel) -> str | None:
    return kernel.link_name(pci_device(PciAddress.parse(CARD)) / "driver")


def of_node(made: Node) -> list[Any]:
    """The slices of the devices that are no vGPUs."""
    found = made.server.objects("resourceslices")
    return [each for each in found if each["spec"]["pool"]["name"] == NODE]


async def until_known(made: Node) -> None:
    await made.until(lambda: DEVICE in made.published().get(NODE, ()))


async def test_a_claim_binds_a_device_and_status_says_from_which_driver(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        slices = of_node(made)
        made.allocate(DEVICE)
        (prepared,) = await made.prepare()
        assert prepared.device_name == DEVICE
        assert driver_of(kernel) == "vfio-pci"
        status = made.agent._pages.status()
        (claim,) = status.claims
        assert (claim.device, claim.claim, claim.driver) == (CARD, "ml/gpu", "nvidia")
        assert claim.returns
        assert claim.since
        assert status.claimed == dict.fromkeys((CARD, "0000:01:00.1"), "ml/gpu")
        await made.restart_agent()
        await made.until_published()
        assert driver_of(kernel) == "vfio-pci"
        await made.unprepare()
        assert driver_of(kernel) == "nvidia"
        assert of_node(made) == slices
        text = made.agent.metrics.text().decode()
        assert 'vfiomgr_claim_seconds_count{operation="return",result="done"} 1.0' in text
        assert f'vfiomgr_device_ready{{address="{CARD}",reason=""}} 1.0' in text
        assert made.agent._pages.status().claims == ()


async def test_a_claim_that_ended_while_the_agent_was_away_returns_its_device(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        made.allocate(DEVICE)
        await made.prepare()
        await made.end_agent()
        made.server.remove("resourceclaims", "ml/gpu")
        waiting = asyncio.create_task(made.claims.unprepare(DRIVER, "ml", "gpu", "uid-1"))
        await asyncio.sleep(0)
        assert driver_of(kernel) == "vfio-pci"
        await made.restart_agent()
        await waiting
        assert driver_of(kernel) == "nvidia"
        assert kernel.children(DIRECTORY) == []


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        ("nvidia.com/gpu", UUID),
        ("nvidia.com/gpu.shared", f"{UUID}::2"),
        ("gpu.intel.com/i915", "card1-0"),
        ("amd.com/gpu", CARD),
    ],
)
async def test_a_gpu_that_another_plugin_gave_to_a_pod_is_not_bound(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, resource: str, device: str
) -> None:
    monkeypatch.setattr(driver, "_HANDOVER", 0.0)
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        made.plugins.pods["ml/cuda"] = [Container(resource, (device,), None)]
        made.agent.ledger._called_at -= 60
        made.allocate(DEVICE)
        with pytest.raises(PrepareError, match="is assigned to pod ml/cuda/c0"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        assert driver_of(kernel) == "nvidia"
        made.plugins.pods["ml/cuda"] = [Container(resource, (f"other-{device}",), None)]
        made.agent.ledger._called_at -= 60
        await made.prepare()
        assert driver_of(kernel) == "vfio-pci"
        await made.unprepare()


async def test_a_gpu_of_a_claim_of_another_driver_is_not_bound(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_HANDOVER", 0.0)
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        own = made.plugins.claims
        other = Claimed("ml/cuda", "ml/other", "gpu.nvidia.com", [(NODE, "gpu-3")])
        made.plugins.claims = lambda: (*own(), other)
        made.agent.ledger._called_at -= 60
        made.allocate(DEVICE)
        with pytest.raises(PrepareError, match="is assigned to pod ml/cuda/"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        assert driver_of(kernel) == "nvidia"
        made.plugins.claims = own
        made.agent.ledger._called_at -= 60
        await made.prepare()
        await made.unprepare()


async def test_a_refusal_names_the_user_and_changes_nothing(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.dra.binding._PATIENCE", 0.0)
    kernel.sysfs.put("/proc/4711/comm", "python3\n")
    kernel.sysfs.link_absolute("/proc/4711/fd/7", "/dev/dri/card1")
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        made.creator.vgpus.binding._patience = 0.0
        made.allocate(DEVICE)
        with pytest.raises(PrepareError, match=r"is in use by: python3 \(PID 4711\)"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        assert driver_of(kernel) == "nvidia"
        text = made.agent.metrics.text().decode()
        assert 'vfiomgr_claim_seconds_count{operation="bind",result="refused"} 1.0' in text
        await made.unprepare()
        assert kernel.children(DIRECTORY) == []
        assert json.dumps(made.told).count("Traceback") == 0


async def test_without_an_answer_of_the_kubelet_nothing_is_bound(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_HANDOVER", 0.0)
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)

        async def no_answer() -> None:
            return None

        with monkeypatch.context() as patch:
            patch.setattr(made.agent.ledger, "ask", no_answer)
            made.allocate(DEVICE)
            with pytest.raises(PrepareError, match="does not report which pods have devices"):
                await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
            assert driver_of(kernel) == "nvidia"
        first = await made.prepare()
        monkeypatch.setattr(made.agent.ledger, "ask", no_answer)
        assert await made.prepare() == first  # a claim that is prepared gets the same answer
        await made.unprepare()
