"""Devices that are bound before the scheduler places their pods (BindingConditions)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.cluster import NODE, rights
from tests.unit.node.dra.test_driver_binding import (
    CARD,
    DEVICE,
    driver_of,
    kernel,
    of_node,
    until_known,
)
from tests.unit.node.dra.test_driver_vgpus import node
from vfiomgr.node.api_server import ApiError
from vfiomgr.node.dra import driver, nominated
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.node.dra.model import BIND_FAILED, BOUND, DRIVER
from vfiomgr.node.dra.nominated import claims_of
from vfiomgr.node.processes import StillRunning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.node.dra.test_driver_vgpus import Node
    from vfiomgr.node.dra.model import PreparedClaim

__all__ = ["kernel"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read claims more often than the scheduler does."""
    monkeypatch.setattr(nominated, "_SOON", 0.05)
    monkeypatch.setattr(nominated, "_LATE", 0.2)
    monkeypatch.setattr(driver, "_HANDOVER", 0.0)


@asynccontextmanager
async def waiting(
    place: Path, kernel: FakeKernel, patch: pytest.MonkeyPatch
) -> AsyncIterator[Node]:
    """A node whose pods wait for their devices."""
    async with node(place, kernel, patch, binds_early=True) as made:
        made.creator.vgpus.binding._patience = 0.0
        await until_known(made)
        yield made


def taints(made: Node) -> list[str]:
    """The taints of the card."""
    found = (each["spec"] for each in made.server.objects("resourceslices"))
    devices = [each for spec in found for each in spec.get("devices") or ()]
    (card,) = (each for each in devices if each["name"] == DEVICE)
    return [taint["key"] for taint in card.get("taints") or ()]


def early(made: Node) -> tuple[PreparedClaim, ...]:
    """The claims that were prepared before the kubelet asked."""
    assert made.agent.driver is not None
    return tuple(c for c in made.agent.driver._preparing.claims if c.is_early)


async def begin(made: Node, pod: str = "p") -> None:
    """Allocate the card to the claim of a pod, which then waits."""
    made.scheduler.create(pod)
    made.scheduler.nominate(pod)
    made.scheduler.allocate(DEVICE)


async def test_a_device_is_bound_before_its_pod_is_placed(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        slices = of_node(made)
        made.scheduler.create("p")
        made.scheduler.nominate("p")
        await made.until(lambda: any("resourceclaims" in r.path for r in made.server.requests))
        assert driver_of(kernel) == "nvidia"  # it is not allocated yet
        made.scheduler.allocate(DEVICE)
        await made.until(made.scheduler.conditions)
        assert made.scheduler.conditions() == {BOUND: "the device is on its VFIO driver"}
        assert driver_of(kernel) == "vfio-pci"
        assert of_node(made) == slices
        record = kernel.read_text(DIRECTORY / f"{CARD}.json")
        made.scheduler.place("p")
        (prepared,) = await made.prepare()
        assert prepared.device_name == DEVICE
        assert kernel.read_text(DIRECTORY / f"{CARD}.json") == record
        made.scheduler.deallocate()  # what the kubelet has, it releases
        await made.unprepare()
        assert driver_of(kernel) == "nvidia"
        assert kernel.children(DIRECTORY) == []
        assert not [text for text in made.told if "cannot" in text]


@pytest.mark.parametrize("end", ["deallocated", "deleted", "another"])
async def test_a_claim_that_ends_before_the_kubelet_asks_returns_its_device(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        await begin(made)
        await made.until(made.scheduler.conditions)
        made.server.remove("pods", "ml/p")
        if end == "deallocated":
            made.scheduler.deallocate()
        else:
            made.server.remove("resourceclaims", "ml/gpu")
        if end == "another":
            made.scheduler.create("q", uid="uid-2")
        await made.until(lambda: driver_of(kernel) == "nvidia")
        await made.until(lambda: not early(made))
        assert kernel.children(DIRECTORY) == []


async def test_a_bind_that_fails_is_a_condition_and_the_device_is_not_chosen_again(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        later: list[Callable[[], None]] = []
        monkeypatch.setattr(driver, "_call_later", lambda _seconds, call: later.append(call))
        kernel.sysfs.put("/proc/4711/comm", "python3\n")
        kernel.sysfs.link_absolute("/proc/4711/fd/7", "/dev/dri/card1")
        await begin(made)
        await made.until(made.scheduler.conditions)
        ((kind, message),) = made.scheduler.conditions().items()
        assert kind == BIND_FAILED
        assert "is in use by: python3 (PID 4711)" in message
        assert driver_of(kernel) == "nvidia"
        assert kernel.children(DIRECTORY) == []
        await made.until(lambda: "vfiomgr.io/bind-failed" in taints(made))
        assert made.creator.orders.count("bind") == 1  # it is not tried again for this allocation
        kernel.sysfs.drop("/proc/4711/fd/7")
        made.scheduler.nominate("p", "")
        made.scheduler.deallocate()
        assert made.agent.driver is not None
        made.agent.driver._withheld = dict.fromkeys(made.agent.driver._withheld, 0.0)
        (end,) = later
        end()
        await made.until(lambda: "vfiomgr.io/bind-failed" not in taints(made))
        made.scheduler.nominate("p")
        made.scheduler.allocate(DEVICE)
        await made.until(lambda: BOUND in made.scheduler.conditions())


async def test_an_agent_that_was_killed_completes_or_undoes_it(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        made.server.rights = rights("binding") - {("resourceclaims/status", "patch")}
        await begin(made)
        await made.until(lambda: driver_of(kernel) == "vfio-pci")
        await made.until(lambda: any("cannot patch resourceclaims/status" in t for t in made.told))
        await made.end_agent()
        made.server.rights = None
        await made.restart_agent()
        await made.until(made.scheduler.conditions)
        await made.end_agent()
        made.scheduler.deallocate()
        made.server.remove("pods", "ml/p")
        made.binds_early = False  # the option is gone, but not what it did
        await made.restart_agent()
        await made.until(lambda: driver_of(kernel) == "nvidia")
        assert kernel.children(DIRECTORY) == []


async def test_a_claim_that_changes_meanwhile_is_read_again(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        bind = made.creator.bind

        calls: list[None] = []

        async def slowly(*arguments: Any) -> Any:
            calls.append(None)
            if len(calls) == 1:
                message = "the kernel takes long"
                raise StillRunning(message)
            if len(calls) == 2:
                message = "cannot update nodes gpu-1: the server is down"
                raise ApiError(message, status=503)
            if len(calls) == 3:  # another driver reports its device
                (claim,) = made.server.objects("resourceclaims")
                other = {"driver": "nic.example", "pool": "p", "device": "d", "request": "nic"}
                claim["status"]["allocation"]["devices"]["results"].append(other)
                claim["status"]["devices"] = [{**other, "conditions": []}]
                made.server.put("resourceclaims", claim)
            return await bind(*arguments)

        monkeypatch.setattr(made.creator, "bind", slowly)
        await begin(made)
        await made.until(made.scheduler.conditions)
        assert made.scheduler.conditions().keys() == {BOUND}
        ((first, second),) = (c["status"]["devices"] for c in made.server.objects("resourceclaims"))
        assert (first["driver"], second["device"]) == ("nic.example", DEVICE)
        found = [text for text in made.told if "cannot" in text]
        down = "cannot update nodes gpu-1: the server is down"
        assert found == [f"claim ml/gpu, before its pod is placed: {down}"]


async def test_a_claim_of_the_same_name_is_another_one(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        await begin(made)
        await made.until(made.scheduler.conditions)
        made.server.remove("pods", "ml/p")
        made.server.remove("resourceclaims", "ml/gpu")
        made.scheduler.create("q", uid="uid-2")
        made.scheduler.nominate("q")
        made.scheduler.allocate(DEVICE)
        await made.until(made.scheduler.conditions)
        assert [claim.uid for claim in early(made)] == ["uid-2"]
        assert made.creator.orders.count("return") == 1


async def test_a_device_that_a_claim_is_about_to_return_is_waited_for(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        await begin(made)
        await made.until(made.scheduler.conditions)
        made.server.remove("pods", "ml/p")
        made.server.remove("resourceclaims", "ml/gpu")
        made.scheduler.create("q", "other", "uid-2")
        made.scheduler.nominate("q")
        made.scheduler.allocate(DEVICE, "other")
        await made.until(lambda: made.scheduler.conditions("other"))
        assert made.scheduler.conditions("other").keys() == {BOUND}
        assert [str(claim) for claim in early(made)] == ["ml/other"]


async def test_a_device_is_waited_for_until_the_kubelet_releases_a_pod_deleted_by_force(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        await begin(made)
        await made.until(made.scheduler.conditions)
        made.scheduler.place("p")
        await made.prepare()
        made.server.remove("pods", "ml/p")
        made.server.remove("resourceclaims", "ml/gpu")
        made.scheduler.create("q", "other", "uid-2")
        made.scheduler.nominate("q")
        made.scheduler.allocate(DEVICE, "other")
        known = len(made.server.requests)

        def looks() -> int:
            return sum(r.path.endswith("/other") for r in made.server.requests[known:])

        await made.until(lambda: made.scheduler.conditions("other") or looks() > 2)
        assert made.scheduler.conditions("other") == {}
        assert taints(made) == []
        await made.claims.unprepare(DRIVER, "ml", "gpu", "uid-1")
        await made.until(lambda: made.scheduler.conditions("other"))
        assert made.scheduler.conditions("other").keys() == {BOUND}


async def test_a_pod_of_another_node_or_without_conditions_binds_nothing(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:
        made.scheduler.create("p")
        made.scheduler.nominate("p", "gpu-2")
        made.scheduler.allocate(DEVICE)
        made.scheduler.create("q", "plain", "uid-2")
        made.scheduler.nominate("q")
        made.allocate(DEVICE, name="plain", uid="2")
        await made.until(lambda: any(r.path.endswith("plain") for r in made.server.requests))
        assert driver_of(kernel) == "nvidia"
        assert not [r for r in made.server.requests if r.path.endswith("resourceclaims/gpu")]
        made.scheduler.nominate("p")
        await made.until(made.scheduler.conditions)


async def test_without_the_option_no_pod_is_watched(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, kernel, monkeypatch) as made:
        await until_known(made)
        await begin(made)
        assert "bindingConditions" not in str(made.server.objects("resourceslices"))
        assert not [r for r in made.server.requests if r.path.endswith("/pods")]
        assert driver_of(kernel) == "nvidia"


async def test_without_the_right_to_see_pods_none_waits_for_its_device(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(place, kernel, monkeypatch) as made:

        def are_awaited() -> bool:
            return "bindingConditions" in str(made.server.objects("resourceslices"))

        await made.until(are_awaited)
        await made.end_agent()
        made.server.rights = rights()
        await made.restart_agent()
        await made.until(lambda: not are_awaited())
        assert any("node manifests --dra --binding-conditions" in text for text in made.told)
        made.allocate(DEVICE)
        await made.prepare()
        assert driver_of(kernel) == "vfio-pci"
        made.server.rights = rights("binding")
        await made.until(are_awaited)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["ml/made", "ml/named", "ml/extended"]),
        ({"spec": {"nodeName": NODE}}, []),
        ({"metadata": {"namespace": "ml", "deletionTimestamp": "2026-01-01T00:00:00Z"}}, []),
    ],
)
def test_the_claims_of_a_pod(more: dict[str, Any], expected: list[str]) -> None:
    pod = {
        "metadata": {"namespace": "ml", "name": "p"},
        "spec": {
            "resourceClaims": [
                {"name": "a", "resourceClaimTemplateName": "t"},
                {"name": "b", "resourceClaimName": "named"},
                {"name": "c", "resourceClaimTemplateName": "not-made-yet"},
            ]
        },
        "status": {
            "resourceClaimStatuses": [{"name": "a", "resourceClaimName": "made"}],
            "extendedResourceClaimStatus": {"resourceClaimName": "extended"},
        },
    }
    assert list(claims_of({**pod, **more})) == expected
