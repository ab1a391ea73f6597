"""ResourceSlices of a node on an API server."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes_validate import utils
from msgspec.structs import replace

from tests.fakes.api_rules import ALPHA, EFFECTS, Refused
from tests.fakes.api_server import ApiServer, Request
from tests.unit.node.stories import until
from vfiomgr.node.api_server import Api
from vfiomgr.node.dra.model import Consumption, CounterSet, DraDevice, Pool, Taint, Target
from vfiomgr.node.dra.publisher import Publisher
from vfiomgr.node.dra.slices import slices
from vfiomgr.node.model import OnDemand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

NODE = "gpu-1"
KIND = "resourceslices"
LOST = Taint("vfiomgr.io/health", "lost", "NoExecute")
MEMORY = CounterSet("gpu", {"memory": 48 * 2**30})


def pool_of(count: int, name: str = NODE, *, memory: int = 8000, taint: bool = False) -> Pool:
    """A pool of so many devices; `memory` is what one has."""
    taints = (LOST,) if taint else ()
    devices = tuple(
        DraDevice(
            f"{name.rpartition('/')[2]}-{number}",
            Target(),
            {"vendor": "10de"},
            {"memory": memory},
            taints=taints,
        )
        for number in range(count)
    )
    return Pool(name, devices, (MEMORY,) if "/" in name else ())


def make(pool: Pool, node: str, generation: int, _before: object = ()) -> list[dict[str, Any]]:
    """The specs of a pool: its counters, and slices of 64 devices."""
    parts: list[dict[str, Any]] = []
    for sets in filter(None, (pool.counter_sets,)):
        counters = [{"name": each.name, "counters": amounts(each.counters)} for each in sets]
        parts.append({"sharedCounters": counters})
    begins = range(0, len(pool.devices), 64)
    parts += [{"devices": [device(each) for each in pool.devices[at : at + 64]]} for at in begins]
    stated = {"name": pool.name, "generation": generation, "resourceSliceCount": len(parts)}
    common = {"driver": "vfiomgr.io", "nodeName": node, "pool": stated}
    return [{**common, **part} for part in parts]


def device(one: DraDevice) -> dict[str, Any]:
    """A device as it is sent."""
    return {
        "name": one.name,
        "attributes": {name: {"string": value} for name, value in one.attributes.items()},
        "capacity": amounts(one.capacity),
        "taints": [
            {"key": each.key, "value": each.value, "effect": each.effect} for each in one.taints
        ],
    }


def amounts(numbers: dict[str, int]) -> dict[str, dict[str, str]]:
    """Quantities, in a form that the server changes."""
    return {name: {"value": str(number)} for name, number in numbers.items()}


class Node:
    """A publisher that can be restarted."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.told: list[str] = []
        self.learned: list[bool] = []
        """What it learned about compatibility groups."""
        self.make: Callable[..., list[dict[str, Any]]] = make
        self.awaits = False
        """Whether pods wait for devices that claims bind."""
        self._tasks: list[tuple[asyncio.Task[None], Api]] = []

    def start(self, *pools: Pool) -> Publisher:
        """Run a publisher."""
        api = Api(self.server.url, str(self.server.directory))
        publisher = Publisher(
            api,
            NODE,
            self.told.append,
            self.make,
            learn_groups=self.learned.append,
            awaits=self.awaits,
        )
        if pools:
            publisher.set(pools)
        self._tasks.append((asyncio.create_task(publisher.run()), api))
        return publisher

    async def stop(self) -> None:
        """End it, as a restart of the agent does."""
        for task, api in self._tasks:
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            await api.close()
        self._tasks = []

    async def until_published(self, *pools: Pool) -> None:
        """Wait until the scheduler sees exactly these pools."""
        wanted = {each.name: names_of(each) for each in pools}
        await until(lambda: view(self.server.objects(KIND)) == wanted)

    def slices(self) -> list[dict[str, Any]]:
        """The slices of this node and driver, by name."""
        own = [each for each in self.server.objects(KIND) if each["spec"]["nodeName"] == NODE]
        own = [each for each in own if each["spec"]["driver"] == "vfiomgr.io"]
        return sorted(own, key=lambda each: str(each["metadata"]["name"]))

    def generations(self) -> set[int]:
        """The generations of the slices."""
        return {each["spec"]["pool"]["generation"] for each in self.slices()}


@asynccontextmanager
async def a_node(place: Path) -> AsyncIterator[tuple[ApiServer, Node]]:
    """A server with the node, and no publisher yet."""
    server = ApiServer(place)
    server.put("nodes", {"metadata": {"name": NODE, "uid": "uid-1"}})
    node = Node(server)
    try:
        yield server, node
    finally:
        await node.stop()
        server.stop()


def names_of(pool: Pool) -> frozenset[str]:
    """Devices with their memory: what the scheduler sees of them."""
    return frozenset(f"{each.name}={each.capacity['memory'] // 1000}k" for each in pool.devices)


def view(slices: list[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """The complete pools of this node, as the scheduler sees them (structured/pools.go)."""
    pools: dict[str, list[dict[str, Any]]] = {}
    for spec in (each["spec"] for each in slices):
        if spec["nodeName"] == NODE and spec["driver"] == "vfiomgr.io":
            pools.setdefault(spec["pool"]["name"], []).append(spec)
    found = {}
    for name, specs in pools.items():
        newest = max(spec["pool"]["generation"] for spec in specs)
        current = [spec for spec in specs if spec["pool"]["generation"] == newest]
        if all(spec["pool"]["resourceSliceCount"] == len(current) for spec in current):
            found[name] = frozenset(
                f"{each['name']}={each['capacity']['memory']['value']}"
                for spec in current
                for each in spec.get("devices", ())
            )
    return found


def views(server: ApiServer) -> list[dict[str, frozenset[str]]]:
    """What the scheduler saw after each write, without repetitions."""
    slices: dict[str, dict[str, Any]] = {}
    seen: list[dict[str, frozenset[str]]] = []
    for change in server.log(KIND):
        if change.type == "DELETED":
            del slices[change.object["metadata"]["name"]]
        else:
            slices[change.object["metadata"]["name"]] = change.object
        now = view(list(slices.values()))
        if not seen or now != seen[-1]:
            seen.append(now)
    return seen


async def publish(node: Node, publisher: Publisher, *pools: Pool) -> None:
    """Set pools, and wait until the scheduler sees them."""
    publisher.set(pools)
    await node.until_published(*pools)


async def test_512_devices_take_eight_writes(place: Path) -> None:
    async with a_node(place) as (server, node):
        pool = pool_of(512)
        publisher = node.start(pool)
        await node.until_published(pool)
        for each in node.slices():
            utils.validate(each, utils.latest_version(), strict=True)
            assert each["metadata"]["name"].startswith("gpu-1-vfiomgr.io-")
            assert each["metadata"]["ownerReferences"] == [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": NODE,
                    "uid": "uid-1",
                    "controller": True,
                }
            ]
            assert each["spec"]["pool"]["resourceSliceCount"] == 8
        assert node.generations() == {1}
        more = pool_of(1, "gpu-1/gpu-a")
        await publish(node, publisher, pool, more)
        reads = [each.path for each in server.requests if each.method == "GET"]
        slices = "/apis/resource.k8s.io/v1/resourceslices"
        assert sorted(reads) == ["/api/v1/nodes/gpu-1", slices, slices]  # a list and a watch
        assert server.written() == ["POST"] * 10
        (list_, *_) = [each for each in server.requests if each.path == slices]
        assert list_.query["fieldSelector"] == "spec.driver=vfiomgr.io,spec.nodeName=gpu-1"
        assert node.told == []


async def test_a_change_is_complete_or_invisible(place: Path) -> None:
    async with a_node(place) as (server, node):
        steps = [
            pool_of(200),
            pool_of(300, memory=9000),
            pool_of(400),
            pool_of(100),
            pool_of(1),
        ]
        publisher = node.start(steps[0])
        for number, pool in enumerate(steps, 1):
            publisher.set([pool])
            await node.until_published(pool)
            await until(lambda number=number: node.generations() == {number})  # type: ignore[misc]
        shown = [seen[NODE] for seen in views(server) if seen]
        assert shown == [names_of(pool) for pool in steps]
        assert server.written()[:9] == ["POST"] * 4 + ["PUT"] * 4 + ["POST"]


def changed(pool: Pool, *numbers: int, **fields: Any) -> Pool:
    """The pool with other fields of some devices."""
    devices = [replace(d, **fields) if n in numbers else d for n, d in enumerate(pool.devices)]
    return replace(pool, devices=tuple(devices))


async def test_only_slices_with_a_device_that_changed_are_written(place: Path) -> None:
    async with a_node(place) as (server, node):
        node.make = slices
        pool = pool_of(1000)
        publisher = node.start(pool)
        await node.until_published(pool)
        assert server.written() == ["POST"] * 16
        fewer = replace(pool, devices=(*pool.devices[:3], *pool.devices[4:]))
        bigger = {"capacity": {"memory": 9000}}
        steps = (
            (changed(pool, 500, taints=(LOST,), **bigger), 1),
            (changed(pool, 500, capacity={"memory": 7000}), 1),
            (changed(pool, 7, 900, taints=(LOST,), **bigger), 3),
            (fewer, 2),
            (pool, 1),
        )
        for step, writes in steps:
            begun = len(server.written())
            await publish(node, publisher, step)
            assert server.written()[begun:] == ["PUT"] * writes
            assert node.generations() == {1}


async def test_pools_that_do_not_change_are_not_touched(place: Path) -> None:
    async with a_node(place) as (server, node):
        same, other = pool_of(100), pool_of(3, "gpu-1/gpu-a")
        publisher = node.start(same, other)
        await node.until_published(same, other)
        versions = [each["metadata"]["resourceVersion"] for each in node.slices()]
        publisher.set([other, same])
        changed = pool_of(4, "gpu-1/gpu-a")
        await publish(node, publisher, pool_of(100), changed)
        kept = [each["metadata"]["resourceVersion"] for each in node.slices()]
        assert len(set(versions) & set(kept)) == 3
        assert server.written() == ["POST"] * 4 + ["PUT"]


async def test_slices_that_the_kubelet_deleted_are_made_again(place: Path) -> None:
    async with a_node(place) as (server, node):
        pools = pool_of(100), pool_of(3, "gpu-1/gpu-a")
        publisher = node.start(*pools)
        await node.until_published(*pools)
        server.wipe()
        await node.until_published(*pools)
        assert node.generations() == {1}
        lost = node.slices()[0]["metadata"]["name"]
        server.remove(KIND, lost)
        await node.until_published(*pools)
        assert server.written() == ["POST"] * 9
        server.stop()
        server.wipe()
        changed = pool_of(101), pools[1]
        publisher.set(changed)
        server.start()
        await node.until_published(*changed)
        assert node.generations() == {1}
        assert {} in views(server)


async def test_slices_belong_to_the_node_object_that_exists(place: Path) -> None:
    async with a_node(place) as (server, node):
        pool = pool_of(1)
        node.start(pool)
        await node.until_published(pool)
        server.remove("nodes", NODE)
        server.put("nodes", {"metadata": {"name": NODE, "uid": "uid-2"}})
        server.wipe()  # what the garbage collector does
        await node.until_published(pool)
        (found,) = node.slices()
        assert found["metadata"]["ownerReferences"][0]["uid"] == "uid-2"


async def test_pools_that_are_gone_are_deleted_and_others_stay(place: Path) -> None:
    async with a_node(place) as (server, node):
        (spec,) = make(pool_of(1, "other"), NODE, 1)
        for name, change in (
            ("driver", {"driver": "gpu.nvidia.com"}),
            ("node", {"nodeName": "gpu-2"}),
        ):
            server.put(KIND, {"metadata": {"name": name}, "spec": {**spec, **change}})
        first, second = pool_of(100), pool_of(3, "gpu-1/gpu-a")
        publisher = node.start(first, second)
        await node.until_published(first, second)
        publisher.set([second])
        await node.until_published(second)
        publisher.set([])
        await until(lambda: not node.slices())
        left = [each["metadata"]["name"] for each in server.objects(KIND)]
        assert left == ["driver", "node"]
        assert node.told == []


async def test_a_device_is_never_in_two_pools(place: Path) -> None:
    async with a_node(place) as (server, node):
        moved, rest = pool_of(1, "gpu-1/gpu-a"), pool_of(2)
        publisher = node.start(moved, rest)
        await node.until_published(moved, rest)
        begun = len(server.log(KIND))
        publisher.set([pool_of(1, "gpu-1/a"), pool_of(3)])
        await node.until_published(pool_of(1, "gpu-1/a"), pool_of(3))
        done = [
            (each.type, each.object["spec"]["pool"]["name"]) for each in server.log(KIND)[begun:]
        ]
        assert done == [
            ("DELETED", "gpu-1/gpu-a"),
            ("DELETED", "gpu-1/gpu-a"),
            ("MODIFIED", NODE),
            ("ADDED", "gpu-1/a"),
            ("ADDED", "gpu-1/a"),
        ]


async def test_a_restarted_agent_takes_its_slices_over(place: Path) -> None:
    async with a_node(place) as (server, node):
        pools = pool_of(100, taint=True), pool_of(3, "gpu-1/gpu-a")
        node.start(*pools)
        await node.until_published(*pools)
        (stored, *_) = [each for each in node.slices() if "devices" in each["spec"]]
        assert stored["spec"]["devices"][0]["taints"][0]["timeAdded"]
        assert stored["spec"]["devices"][0]["capacity"]["memory"]["value"] == "8k"
        await node.stop()
        before = server.written()
        publisher = node.start()
        await until(lambda: len(server.watches()) == 2)
        publisher.set(pools)
        one = pool_of(1, "gpu-1/one")
        await publish(node, publisher, *pools, one)
        assert server.written()[len(before) :] == ["POST"] * 2
        assert node.generations() == {1}


async def test_a_default_of_the_server_is_no_change(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(place) as (server, node):
        answer = server.answer

        def with_default(request: Request) -> tuple[int, dict[str, Any]]:
            if request.method == "POST":
                request.body["spec"]["later"] = "a field of a newer server"
            return answer(request)

        monkeypatch.setattr(server, "answer", with_default)
        pool, more = pool_of(1), pool_of(1, "gpu-1/gpu-a")
        publisher = node.start(pool)
        await node.until_published(pool)
        await publish(node, publisher, pool, more)
        assert server.written() == ["POST"] * 3


async def test_without_pools_yet_nothing_is_deleted(place: Path) -> None:
    async with a_node(place) as (server, node):
        pool = pool_of(2)
        node.start(pool)
        await node.until_published(pool)
        await node.stop()
        publisher = node.start()
        await until(lambda: publisher._slices.is_complete)
        await until(lambda: not publisher._wake.is_set())  # the list was looked at
        assert server.written() == ["POST"]
        await publish(node, publisher, pool)
        assert server.written() == ["POST"]


async def test_a_change_that_a_restart_interrupts_is_finished(place: Path) -> None:
    async with a_node(place) as (server, node):
        old, new = pool_of(200), pool_of(260, memory=9000)
        publisher = node.start(old)
        await node.until_published(old)
        server.answers = [200, 200, *[503] * 100]
        publisher.set([new])
        await until(lambda: len(server.answers) < 100)
        assert node.generations() == {1, 2}
        await node.stop()
        server.answers = []
        begun = len(server.written())
        node.start(new)
        await node.until_published(new)
        assert server.written()[begun:] == ["PUT", "PUT", "POST"]
        await until(lambda: node.generations() == {2})
        assert [seen[NODE] for seen in views(server) if seen] == [names_of(old), names_of(new)]


async def test_a_change_of_mind_in_the_middle_has_a_generation_of_its_own(place: Path) -> None:
    async with a_node(place) as (server, node):
        steps = pool_of(200), pool_of(260, memory=9000), pool_of(260, memory=10000)
        publisher = node.start(steps[0])
        await node.until_published(steps[0])
        server.answers = [200, 503, 503]
        publisher.set([steps[1]])
        await until(lambda: len(server.answers) < 2)
        publisher.set([steps[2]])
        await node.until_published(steps[2])
        assert node.generations() == {3}
        seen = [each[NODE] for each in views(server) if each]
        assert seen == [names_of(steps[0]), names_of(steps[2])]


async def test_a_slice_that_another_client_changed_is_put_back(place: Path) -> None:
    async with a_node(place) as (server, node):
        pool = pool_of(100)
        node.start(pool)
        await node.until_published(pool)
        (one, _) = node.slices()
        one["spec"]["devices"] = one["spec"]["devices"][:1]
        server.put(KIND, one)
        await until(lambda: "PUT" in server.written())
        await node.until_published(pool)
        assert server.written() == ["POST", "POST", "PUT"]


async def test_a_slice_that_exists_twice_is_deleted_once(place: Path) -> None:
    async with a_node(place) as (server, node):
        pool = pool_of(100)
        node.start(pool)
        await node.until_published(pool)
        (one, _) = node.slices()
        server.put(KIND, {"metadata": {"name": "again"}, "spec": one["spec"]})
        await until(lambda: "DELETE" in server.written())
        await node.until_published(pool)
        assert (len(node.slices()), node.generations()) == (2, {1})


@pytest.mark.parametrize("status", [409, 500, 503])
async def test_a_failed_write_is_repeated_and_reported_once(status: int, place: Path) -> None:
    async with a_node(place) as (server, node):
        first, second = pool_of(100), pool_of(100, memory=9000)
        publisher = node.start(first)
        await node.until_published(first)
        server.answers = [200, status, status, status]
        publisher.set([second])
        begun = time.monotonic()
        await node.until_published(second)
        assert time.monotonic() - begun >= 0.1 + 0.2 + 0.4
        assert node.generations() == {1}
        (told,) = node.told
        assert told.startswith("cannot publish devices: cannot update resourceslices gpu-1-")
        assert told.endswith(": because")
        server.answers = [status]
        publisher.set([first])
        await node.until_published(first)
        assert len(node.told) == 2


async def test_a_slice_that_vanishes_before_its_update_is_created(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(place) as (server, node):
        first, second = pool_of(1), pool_of(2)
        publisher = node.start(first)
        await node.until_published(first)
        answer = server.answer

        def without_slices(request: Request) -> tuple[int, dict[str, Any]]:
            if request.method == "PUT":
                server.wipe()
            return answer(request)

        monkeypatch.setattr(server, "answer", without_slices)
        publisher.set([second])
        await node.until_published(second)
        assert server.written() == ["POST", "PUT", "POST"]
        assert node.told == []


async def test_a_pool_that_is_refused_does_not_hold_up_the_others(place: Path) -> None:
    async with a_node(place) as (server, node):
        bad, good = pool_of(1, "gpu-1/Bad_"), pool_of(2, "gpu-1/good")
        publisher = node.start(bad, good)
        await until(lambda: "gpu-1/good" in view(server.objects(KIND)))
        await until(lambda: node.told)
        (told,) = node.told
        assert told.endswith("ResourceSlice is invalid: spec.devices.name: must be a DNS label")
        publisher.set([good])
        await node.until_published(good)


async def test_a_pool_whose_counters_would_be_dropped_is_withheld_until_they_are_kept(
    place: Path,
) -> None:
    async with a_node(place) as (server, node):
        server.gates_off = ALPHA | {"DRAPartitionableDevices"}
        gpu, plain = pool_of(2, "gpu-1/gpu"), pool_of(1)
        node.start(gpu, plain)
        await node.until_published(plain)
        await until(lambda: node.told)
        (told,) = node.told
        assert told == (
            "cannot publish devices: the API server drops spec.sharedCounters of pool "
            "gpu-1/gpu; enable its feature gate DRAPartitionableDevices"
        )
        assert {each["spec"]["pool"]["name"] for each in node.slices()} == {"gpu-1"}
        server.gates_off = ALPHA
        await node.until_published(gpu, plain)


async def test_counters_are_tried_again_when_slices_were_deleted(place: Path) -> None:
    async with a_node(place) as (server, node):
        gpu = pool_of(2, "gpu-1/gpu")
        publisher = node.start(gpu)
        await node.until_published(gpu)
        assert len(server.trials()) == 3
        await publish(node, publisher, pool_of(2, "gpu-1/gpu", memory=9000))
        assert len(server.trials()) == 3
        server.gates_off = ALPHA | {"DRAPartitionableDevices"}
        await publish(node, publisher, gpu)  # the fields are in use: they are kept
        assert node.told == []
        server.wipe()
        await until(lambda: node.told)
        assert server.objects(KIND) == []


async def test_taints_that_are_dropped_are_reported_once(place: Path) -> None:
    async with a_node(place) as (server, node):
        server.gates_off = ALPHA | {"DRADeviceTaints"}
        publisher = node.start(pool_of(2, taint=True))
        await node.until_published(pool_of(2))
        await publish(node, publisher, pool_of(3, taint=True))
        remedy = "enable its feature gate DRADeviceTaints"
        assert node.told == [f"the API server drops spec.devices.taints; {remedy}"]


async def test_a_server_that_is_down_gets_growing_pauses(place: Path) -> None:
    async with a_node(place) as (server, node):
        server.read_answers = [503] * 4
        begun = time.monotonic()
        pool = pool_of(100)
        node.start(pool)
        await node.until_published(pool)
        assert time.monotonic() - begun >= 0.1 + 0.2 + 0.4 + 0.8
        lists = [each for each in server.requests if each.path.endswith(KIND)]
        assert len([each for each in lists if each.method == "GET"]) == 4 + 2
        assert node.told == ["cannot list resourceslices: because"]


async def test_a_new_token_ends_the_refusals(place: Path) -> None:
    async with a_node(place) as (server, node):
        server.bearers = {"second"}
        pool = pool_of(1)
        node.start(pool)
        await until(lambda: node.told)
        server.account("second")
        await node.until_published(pool)
        (told,) = node.told
        assert told.startswith("cannot list resourceslices: Unauthorized; ")


async def test_the_server_says_how_long_to_wait(place: Path) -> None:
    async with a_node(place) as (server, node):
        server.answers = [Refused(429, "too many requests", retry_after=2)]
        begun = time.monotonic()
        pool = pool_of(1)
        node.start(pool)
        await node.until_published(pool)
        assert time.monotonic() - begun >= 2
        assert server.written() == ["POST", "POST"]


async def test_a_taint_keeps_the_time_at_which_it_was_added(place: Path) -> None:
    async with a_node(place) as (server, node):
        first, second = pool_of(1, taint=True), pool_of(2, taint=True)
        publisher = node.start(first)
        await node.until_published(first)
        (stored,) = node.slices()
        stored["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-02T03:04:05Z"
        server.put(KIND, stored)
        await until(
            lambda: publisher._slices.objects.get(stored["metadata"]["name"]) == node.slices()[0]
        )
        publisher.set([second])
        await node.until_published(second)
        (found,) = node.slices()
        old, new = (each["taints"][0]["timeAdded"] for each in found["spec"]["devices"])
        assert old == "2026-01-02T03:04:05Z" != new


def grouped() -> Pool:
    """A pool whose devices have a compatibility group."""
    made = pool_of(2, "gpu-1/gpu")
    use = Consumption(MEMORY.name, dict.fromkeys(MEMORY.counters, 1), ("size-4096",))
    return replace(made, devices=tuple(replace(each, consumes=(use,)) for each in made.devices))


@pytest.mark.parametrize("is_on", [True, False])
async def test_whether_the_server_keeps_groups_is_learned_by_a_slice_that_is_not_kept(
    place: Path, *, is_on: bool
) -> None:
    async with a_node(place) as (server, node):
        server.gates_off = frozenset() if is_on else ALPHA
        node.start(pool_of(2, "gpu-1/gpu"))
        await node.until_published(pool_of(2, "gpu-1/gpu"))
        assert node.learned == [is_on]
        assert {each["spec"]["pool"]["name"] for each in node.slices()} == {"gpu-1/gpu"}


async def test_groups_that_would_be_dropped_are_not_published(place: Path) -> None:
    async with a_node(place) as (server, node):
        node.make = slices
        node.start(grouped())
        await until(lambda: node.told)
        assert server.objects(KIND) == []
        assert "drops spec.devices.consumesCounters.compatibilityGroups" in node.told[0]
        assert node.learned == [False]
        server.gates_off = frozenset()
        await until(lambda: len(server.objects(KIND)) == 2)
        (devices,) = (each["spec"].get("devices") for each in server.objects(KIND)[1:])
        assert devices[0]["consumesCounters"][0]["compatibilityGroups"] == ["size-4096"]


NEWER = DraDevice(
    "pci-0000-01-00-0",
    Target(unit="0000:01:00.0", on_demand=OnDemand()),
    {"resource.kubernetes.io/numaNode": (1, 0)},
    taints=(Taint("vfiomgr.io/correctable-errors", "", "None"),),
)


@pytest.mark.parametrize(
    ("off", "effects", "awaits", "expected"),
    [
        ((), EFFECTS, True, {"lists", "hints", "conditions"}),
        ((), EFFECTS, False, {"lists", "hints"}),
        (ALPHA, EFFECTS, True, {"hints", "conditions"}),
        (("DRADeviceBindingConditions",), EFFECTS, True, {"lists", "hints"}),
        (("DRADeviceTaints",), EFFECTS, True, {"lists", "conditions"}),
        (ALPHA, EFFECTS - {"None"}, True, set()),
    ],
)
async def test_newer_fields_are_published_where_the_server_stores_them(
    place: Path, *, off: tuple[str, ...], effects: frozenset[str], awaits: bool, expected: set[str]
) -> None:
    async with a_node(place) as (server, node):
        server.gates_off, server.effects = frozenset(off), effects
        node.make, node.awaits = slices, awaits
        node.start(Pool(NODE, (NEWER,)))
        await until(node.slices)
        ((device,),) = (each["spec"]["devices"] for each in node.slices())
        (value,) = device["attributes"].values()
        assert value == ({"ints": [1, 0]} if "lists" in expected else {"int": 1})
        assert bool(device.get("taints")) == ("hints" in expected)
        names = ("bindsToNode", "bindingConditions", "bindingFailureConditions")
        found = {name: device[name] for name in names if name in device}
        awaited = (True, ["vfiomgr.io/Bound"], ["vfiomgr.io/BindFailed"])
        assert found == (dict(zip(names, awaited, strict=True)) if "conditions" in expected else {})
        is_told = any("drops spec.devices.bindingConditions; enable" in text for text in node.told)
        assert is_told == (awaits and "conditions" not in expected)


async def test_a_right_that_comes_late_hides_no_newer_field(place: Path) -> None:
    async with a_node(place) as (server, node):
        node.make, node.awaits = slices, True
        server.answers = [Refused(403, "because"), Refused(403, "because")]
        node.start(Pool(NODE, (NEWER,)))
        await until(node.slices)
        ((device,),) = (each["spec"]["devices"] for each in node.slices())
        assert device["bindingConditions"] == ["vfiomgr.io/Bound"]
        assert ["cannot create resourceslices: because" in text for text in node.told] == [True]


async def test_a_server_is_asked_only_for_the_sake_of_a_field(place: Path) -> None:
    async with a_node(place) as (server, node):
        node.make, node.awaits = slices, True
        plain = replace(NEWER, target=Target(unit="x"), attributes={}, taints=())
        node.start(Pool(NODE, (plain,)))
        await until(node.slices)
        assert server.trials() == []
