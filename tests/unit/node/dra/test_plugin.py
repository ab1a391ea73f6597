"""The DRA plugin over real sockets, with a kubelet that behaves as Kubernetes 1.36 does."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.dra_kubelet import DraKubelet, Manners, PrepareError
from vfiomgr.errors import HostError, Refusal, UsageError, VfiomgrError
from vfiomgr.node.dra.model import DRIVER, PreparedClaim, PreparedDevice
from vfiomgr.node.dra.plugin import VERSIONS, Answers, DeviceHealth, DraPlugin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

CLAIM = ("default", "gpu", "uid-1")
BUSY = HostError("0000:41:00.0 is in use", "end its user first")
SHORT = 0.3
"""Seconds of a deadline or a delay that a test waits for."""


class Claims:
    """What prepares claims in these tests; a gate or an error holds it up."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.finished: list[str] = []
        self.errors: dict[str, VfiomgrError] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def prepare(self, namespace: str, name: str, uid: str) -> PreparedClaim:
        """A claim with one device."""
        self.calls.append((namespace, name, uid))
        await self._work(uid)
        device = PreparedDevice(
            request="gpu/large",
            pool="node-1",
            device="pci-0000-41-00-0",
            unit="0000:41:00.0",
            nodes=("/dev/vfio/8",),
            cdi_devices=("vfiomgr.io/gpu=0000:41:00.0",),
        )
        return PreparedClaim(namespace, name, uid, "boot", (device,))

    async def unprepare(self, _namespace: str, _name: str, uid: str) -> None:
        """Unprepare a claim."""
        self.calls.append((uid,))
        await self._work(uid)

    async def _work(self, uid: str) -> None:
        await self.gate.wait()
        if uid in self.errors:
            raise self.errors[uid]
        self.finished.append(uid)


class Node:
    """A directory of a kubelet with plugins, and the slices that the kubelet deletes."""

    def __init__(self, place: Path, manners: Manners) -> None:
        self.place = place
        self.claims = Claims()
        self.wiped: list[str] = []
        self.told: list[str] = []
        self.kubelet = DraKubelet(place, self.wiped.append, manners)
        self.plugins: list[DraPlugin] = []
        self.answers: list[Answers] = []

    def plugin(self, instance: str = "") -> DraPlugin:
        """A plugin that is not started yet."""
        answers = Answers(self.claims.prepare, self.claims.unprepare)
        self.answers.append(answers)
        self.plugins.append(DraPlugin(str(self.place), answers, self.told.append, instance))
        return self.plugins[-1]

    async def started(self, instance: str = "") -> DraPlugin:
        """A plugin that the kubelet has registered, and is connected to."""
        plugin = self.plugin(instance)
        await plugin.start()
        await until(lambda: plugin.is_registered)
        await until(lambda: all(p.is_connected for p in self.kubelet.plugins.values()))
        return plugin

    async def prepare(self, claim: tuple[str, str, str] = CLAIM) -> list[Any]:
        """Prepare a claim until it works."""
        return await self.kubelet.prepare(DRIVER, *claim)

    def sockets(self) -> list[str]:
        """The paths of all sockets, hidden ones too, relative to the directory."""
        found = [p for p in self.place.rglob("*") if stat.S_ISSOCK(p.lstat().st_mode)]
        return sorted(str(path.relative_to(self.place)) for path in found)


@asynccontextmanager
async def node(place: Path, **manners: Any) -> AsyncIterator[Node]:
    """A node whose kubelet runs."""
    made = Node(place, Manners(**manners))
    await made.kubelet.start()
    try:
        yield made
    finally:
        made.claims.gate.set()
        await asyncio.gather(*(plugin.close() for plugin in made.plugins))
        await made.kubelet.stop()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - files and other tasks have no events
            await asyncio.sleep(0.01)


SOCKETS = [f"plugins/{DRIVER}/dra.sock", f"plugins_registry/{DRIVER}-reg.sock"]


# ---- registration


async def test_the_kubelet_finds_the_plugin_and_takes_the_newest_service(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        info = made.kubelet.infos[-1]
        assert (info.type, info.name) == ("DRAPlugin", DRIVER)
        assert info.endpoint == str(place / SOCKETS[0])
        assert tuple(info.supported_versions) == VERSIONS
        plugin = made.kubelet.plugin(DRIVER)
        assert plugin is not None
        assert (plugin.service, plugin.health_service) == (VERSIONS[0], VERSIONS[2])
        assert made.told == [f"{DRIVER}: registered with the kubelet"]


async def test_a_kubelet_without_v1_uses_the_older_services(place: Path) -> None:
    old = {"supported": ("v1beta1.DRAPlugin",), "health": ("v1alpha1.DRAResourceHealth",)}
    async with node(place, **old) as made:
        await made.started()
        (device,) = await made.prepare()
        assert device.device_name == "pci-0000-41-00-0"
        await made.kubelet.unprepare(DRIVER, *CLAIM)
        made.answers[0].set_health([DeviceHealth("node-1", "a")], 60)
        await until(lambda: made.kubelet.state(DRIVER, "node-1", "a") == "Healthy")


async def test_why_a_kubelet_does_not_register_the_plugin_is_reported(place: Path) -> None:
    async with node(place, supported=("v2.DRAPlugin",)) as made:
        plugin = made.plugin()
        await plugin.start()
        await until(lambda: made.told)
        assert "none of the versions are supported" in made.told[0]
        assert not plugin.is_registered


async def test_a_kubelet_that_did_not_register_the_plugin_finds_it_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(place, supported=("v2.DRAPlugin",)) as made:
        plugin = made.plugin()
        await plugin.start()
        await until(lambda: made.told)
        await plugin.tend()
        assert len(made.kubelet.infos) == 1  # not at once
        made.kubelet._manners = Manners()
        monkeypatch.setattr(plugin, "_again", 0.0)
        await plugin.tend()
        await until(lambda: plugin.is_registered)
        await made.prepare()
        await plugin.tend()
        assert len(made.kubelet.infos) == 2


async def test_a_kubelet_that_restarts_asks_again(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        await made.kubelet.restart()
        assert made.wiped == ["", ""]  # all slices of the node
        await until(lambda: made.kubelet.plugin(DRIVER))
        assert len(made.kubelet.infos) == 2
        await made.prepare()


# ---- claims


async def test_a_claim_is_prepared_and_unprepared(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        (device,) = await made.prepare()
        assert list(device.request_names) == ["gpu"]  # the alternative is not named
        assert (device.pool_name, device.device_name) == ("node-1", "pci-0000-41-00-0")
        assert list(device.cdi_device_ids) == ["vfiomgr.io/gpu=0000:41:00.0"]
        await made.kubelet.unprepare(DRIVER, *CLAIM)
        assert made.claims.calls == [CLAIM, (CLAIM[2],)]
        assert not made.kubelet.failures


async def test_a_claim_that_cannot_be_prepared_is_tried_again(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        made.claims.errors["uid-1"] = BUSY
        preparing = asyncio.create_task(made.prepare())
        await until(lambda: len(made.kubelet.failures) > 1)
        assert set(made.kubelet.failures) == {f"{BUSY.message}; {BUSY.hint}"}
        made.claims.errors.clear()
        assert len(await preparing) == 1


async def test_the_error_of_a_claim_is_cut_to_a_kibibyte(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        made.claims.errors["uid-1"] = HostError("x" * 100_000)
        entries = (await made.kubelet.call(DRIVER, "Prepare", CLAIM)).claims
        assert len(entries["uid-1"].error.encode()) == 1024


@pytest.mark.parametrize("verb", ["Prepare", "Unprepare"])
async def test_each_claim_of_a_call_has_its_own_entry(place: Path, verb: str) -> None:
    async with node(place) as made:
        await made.started()
        made.claims.errors["uid-2"] = BUSY
        others = (("default", "gpu", f"uid-{n}") for n in (1, 2, 3))
        entries = (await made.kubelet.call(DRIVER, verb, *others)).claims
        errors = {uid: entry.error for uid, entry in entries.items()}
        assert errors == {"uid-1": "", "uid-2": f"{BUSY.message}; {BUSY.hint}", "uid-3": ""}
        if verb == "Prepare":
            assert [len(entries[f"uid-{n}"].devices) for n in (1, 2, 3)] == [1, 0, 1]


async def test_unprepare_is_repeated_until_the_driver_is_back(place: Path) -> None:
    async with node(place) as made:
        plugin = await made.started()
        await made.prepare()
        await plugin.close()
        ending = asyncio.create_task(made.kubelet.unprepare(DRIVER, *CLAIM))
        await until(lambda: len(made.kubelet.failures) > 1)
        await made.started()
        await ending
        assert made.claims.calls[-1] == ("uid-1",)
        assert not made.kubelet.prepared


async def test_a_call_is_repeated_if_its_connection_ends(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        await made.prepare()
        made.claims.gate.clear()
        ending = asyncio.create_task(made.kubelet.unprepare(DRIVER, *CLAIM))
        await until(lambda: len(made.claims.calls) > 1)
        (place / SOCKETS[1]).unlink()
        await until(lambda: made.kubelet.failures)
        assert made.kubelet.failures[0].startswith("CANCELLED")
        made.claims.gate.set()
        await made.plugins[0].tend()
        await ending
        assert not made.kubelet.prepared


async def test_work_that_outlasts_the_kubelets_patience_is_finished_once(place: Path) -> None:
    async with node(place, deadline=SHORT) as made:
        await made.started()
        made.claims.gate.clear()
        preparing = asyncio.create_task(made.prepare())
        await until(lambda: len(made.kubelet.failures) > 1)
        assert made.kubelet.failures[0].startswith("DEADLINE_EXCEEDED")
        assert made.claims.calls == [CLAIM]  # the other attempts wait for the first
        assert not made.claims.finished
        made.claims.gate.set()
        assert len(await preparing) == 1
        assert made.claims.finished[0] == "uid-1"


async def test_a_claim_is_not_unprepared_while_it_is_prepared(place: Path) -> None:
    async with node(place, deadline=SHORT) as made:
        await made.started()
        made.claims.gate.clear()
        with pytest.raises(PrepareError):
            await made.kubelet.prepare_once(DRIVER, *CLAIM)
        ending = asyncio.create_task(made.kubelet.unprepare(DRIVER, *CLAIM))
        await until(lambda: len(made.kubelet.failures) > 0)
        assert made.claims.calls == [CLAIM]
        made.claims.gate.set()
        await ending
        assert made.claims.calls[:2] == [CLAIM, ("uid-1",)]


async def test_a_slow_claim_holds_up_no_other(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        made.claims.gate.clear()
        slow = asyncio.create_task(made.prepare())
        await until(lambda: made.claims.calls)
        other = asyncio.create_task(made.prepare(("default", "other", "uid-2")))
        await until(lambda: ("default", "other", "uid-2") in made.claims.calls)
        made.claims.gate.set()
        await asyncio.gather(slow, other)


# ---- the end of a connection


async def test_slices_are_deleted_some_time_after_the_last_connection(place: Path) -> None:
    async with node(place, wiping_delay=SHORT) as made:
        plugin = await made.started()
        await plugin.close()
        await until(lambda: made.wiped == ["", DRIVER])


async def test_slices_stay_if_the_driver_returns_in_time(place: Path) -> None:
    async with node(place, wiping_delay=5) as made:
        plugin = await made.started()
        await plugin.close()
        await until(lambda: made.kubelet.is_wiping(DRIVER))
        await made.started()
        await until(lambda: not made.kubelet.is_wiping(DRIVER))
        assert made.wiped == [""]


async def test_a_rolling_update_leaves_no_gap(place: Path) -> None:
    async with node(place, wiping_delay=0) as made:
        old = await made.started("0b7c-old")
        await made.started("9d2e-new")
        assert len(made.sockets()) == 4
        await old.close()
        await until(lambda: len(made.kubelet.plugins) == 1)
        await made.prepare()
        assert not made.kubelet.failures
        assert made.wiped == [""]
        assert made.sockets() == [
            f"plugins/{DRIVER}/dra-9d2e-new.sock",
            f"plugins_registry/{DRIVER}-9d2e-new-reg.sock",
        ]


# ---- health


async def test_pods_show_the_health_of_their_devices(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        state = made.kubelet.state
        assert state(DRIVER, "node-1", "a") == "Unknown"
        made.answers[0].set_health(
            [DeviceHealth("node-1", "a"), DeviceHealth("node-1", "b", "x" * 2000)], 60
        )
        await until(lambda: state(DRIVER, "node-1", "a") == "Healthy")
        assert state(DRIVER, "node-1", "b") == "Unhealthy"
        plugin = made.kubelet.plugin(DRIVER)
        assert plugin is not None
        assert len(plugin.health["node-1", "b"].message) == 1024
        made.answers[0].set_health([DeviceHealth("node-1", "a", "it is gone")], 60)
        await until(lambda: state(DRIVER, "node-1", "a") == "Unhealthy")
        assert state(DRIVER, "node-1", "b") == "Unknown"


async def test_health_that_is_not_repeated_becomes_unknown(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        made.answers[0].set_health([DeviceHealth("node-1", "a")], 1)
        plugin = made.kubelet.plugin(DRIVER)
        assert plugin is not None
        await until(lambda: plugin.health)
        await until(lambda: made.kubelet.state(DRIVER, "node-1", "a") == "Unknown")


async def test_a_kubelet_that_restarts_learns_the_health_again(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        made.answers[0].set_health([DeviceHealth("node-1", "a")], 60)
        await made.kubelet.restart()
        await until(lambda: made.kubelet.state(DRIVER, "node-1", "a") == "Healthy")


# ---- sockets


async def test_sockets_are_for_their_owner_and_are_removed_at_the_end(place: Path) -> None:
    async with node(place) as made:
        plugin = await made.started()
        assert made.sockets() == SOCKETS
        for path in SOCKETS:
            assert stat.S_IMODE((place / path).stat().st_mode) == 0o600
        await plugin.close()
        assert made.sockets() == []


def dead_socket(path: Path) -> None:
    """The socket of a process that was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()


async def test_sockets_of_killed_processes_are_removed_and_no_others(place: Path) -> None:
    async with node(place) as made:
        registry, plugins = place / "plugins_registry", place / "plugins" / DRIVER
        for name in (f"{DRIVER}-reg.sock", f"{DRIVER}-1-reg.sock", ".vfiomgr-1", "csi.sock"):
            dead_socket(registry / name)
        dead_socket(plugins / "dra-1.sock")
        (plugins / "dra-device-metadata").mkdir()
        await made.started()
        assert made.sockets() == [SOCKETS[0], "plugins_registry/csi.sock", SOCKETS[1]]
        assert (plugins / "dra-device-metadata").is_dir()


async def test_sockets_of_another_process_are_left_alone(place: Path) -> None:
    async with node(place) as made:
        await made.started()
        with pytest.raises(Refusal, match="another process serves"):
            await made.plugin().start()
        await made.prepare()


async def test_the_end_of_a_process_leaves_the_sockets_of_the_next(place: Path) -> None:
    async with node(place) as made:
        old = await made.started()
        for path in SOCKETS:
            (place / path).unlink()
        await made.started()
        await old.tend()  # the paths are those of the other process now
        assert any("another process serves" in text for text in made.told)
        await old.close()
        assert made.sockets() == SOCKETS
        await made.prepare()


@pytest.mark.parametrize("path", SOCKETS)
async def test_a_socket_that_was_removed_is_served_again(place: Path, path: str) -> None:
    async with node(place) as made:
        plugin = await made.started()
        (place / path).unlink()
        await plugin.tend()
        assert made.sockets() == SOCKETS
        await until(lambda: len(made.kubelet.infos) > 1 and made.kubelet.plugin(DRIVER))
        await made.prepare()


async def test_work_that_has_begun_is_finished_at_the_end(place: Path) -> None:
    async with node(place) as made:
        plugin = await made.started()
        made.claims.gate.clear()
        preparing = asyncio.create_task(made.prepare())
        await until(lambda: made.claims.calls)
        closing = asyncio.create_task(plugin.close())
        await until(lambda: made.sockets() == [])
        made.claims.gate.set()
        await closing
        assert made.claims.finished == ["uid-1"]
        preparing.cancel()


async def test_a_kubelet_directory_that_cannot_be_used_is_a_usage_error(place: Path) -> None:
    made = Node(place / "none", Manners())
    with pytest.raises(UsageError, match="No such file"):
        await made.plugin().start()
    long = place / ("x" * 90)
    (long / "plugins_registry").mkdir(parents=True)
    with pytest.raises(UsageError, match="more than 107 bytes"):
        await Node(long, Manners()).plugin().start()
    assert os.listdir(long / "plugins_registry") == []
