"""The device plugin over real sockets, with a kubelet that behaves as Kubernetes 1.36 does."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.fakes.kubelet import AdmissionError, Kubelet
from tests.unit.node.stories import (
    NAME,
    Agent,
    node,
    resource,
    unit,
    with_unhealthy,
)
from vfiomgr.errors import HostError, UsageError
from vfiomgr.node.kubelet import DEVICES, SOCKET, NoAnswer, pod_devices, register
from vfiomgr.node.model import NodeResource
from vfiomgr.node.serving import socket_name
from vfiomgr.node.sockets import PREFIX, stamp_of

if TYPE_CHECKING:
    from pathlib import Path

OTHER = "vfiomgr.io/A16"


def sockets(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(PREFIX)]


async def test_the_kubelet_connects_back_before_it_accepts_a_registration(place: Path) -> None:
    async with node(place, resource(4)) as (kubelet, agent):
        assert kubelet.registrations == [(NAME, socket_name(NAME))]
        assert agent.served[NAME].is_registered
        assert kubelet.capacity(NAME) == (4, 4)


async def test_a_kubelet_that_ends_before_it_answers_is_not_waited_for(place: Path) -> None:
    path = place / SOCKET
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()  # connections wait for the server that has ended
        call = asyncio.create_task(register(str(place), "any.sock", NAME))
        await asyncio.sleep(0.3)
        assert not call.done()
        path.unlink()
        with pytest.raises(NoAnswer, match="the kubelet restarted before it answered"):
            async with asyncio.timeout(10):
                await call


async def test_a_plugin_that_does_not_serve_yet_is_refused_with_the_kubelets_text(
    place: Path,
) -> None:
    kubelet = Kubelet(place, dial=0.2)
    await kubelet.start()
    with pytest.raises(NoAnswer, match="failed to dial device plugin"):
        await register(str(place), "none.sock", NAME)
    await kubelet.stop()


@pytest.mark.parametrize("name", ["A40", "kubernetes.io/A40", f"vfiomgr.io/{'A' * 64}"])
async def test_a_name_that_the_kubelet_refuses_is_repeated_with_pauses(
    name: str, place: Path
) -> None:
    kubelet, agent = Kubelet(place), Agent(place)
    await kubelet.start()
    agent.offer(resource(1, name))
    agent.start()
    await kubelet.until(lambda: len(kubelet.rejected) == 3)
    first, second, third = kubelet.rejected
    assert second - first >= 0.25
    assert third - second >= 0.5
    (told,) = [text for text in agent.told if "next attempt" in text]
    assert "is invalid" in told
    await agent.stop()
    await kubelet.stop()


async def test_an_agent_that_starts_first_registers_when_the_kubelet_comes(place: Path) -> None:
    agent = Agent(place)
    agent.offer(resource(2))
    agent.start()
    await asyncio.sleep(0.1)
    kubelet = Kubelet(place)
    await kubelet.start()
    await kubelet.until_capacity(NAME, 2, 2)
    await agent.stop()
    await kubelet.stop()


async def test_a_restarted_kubelet_removes_the_sockets_and_gets_the_devices_again(
    place: Path,
) -> None:
    async with node(place, resource(3), resource(2, OTHER)) as (kubelet, agent):
        for _ in range(3):
            await kubelet.restart()
            assert kubelet.capacity(NAME) == (0, 0)
            await kubelet.until_capacity(NAME, 3, 3)
            await kubelet.until_capacity(OTHER, 2, 2)
        assert sorted(sockets(agent.directory)) == sorted(map(socket_name, (NAME, OTHER)))
        assert len(kubelet.registrations) == 2 * 4


async def test_a_kubelet_that_keeps_the_sockets_is_noticed_by_its_own(place: Path) -> None:
    async with node(place, resource(1)) as (kubelet, agent):
        path = agent.directory / socket_name(NAME)
        before = stamp_of(str(path))
        await kubelet.stop()
        os.unlink(kubelet.socket)
        kept = agent.directory / "kept"
        os.rename(path, kept)
        starting = asyncio.create_task(kubelet.start())
        os.rename(kept, path)
        await starting
        await kubelet.until_capacity(NAME, 1, 1)
        assert before is not None


async def test_a_kubelet_that_has_stopped_is_reported_once(place: Path) -> None:
    async with node(place, resource(1)) as (kubelet, agent):
        await kubelet.stop()
        text = f"{NAME}: no kubelet answers on {kubelet.socket}; next attempt in 0.25 s"
        await kubelet.until(lambda: text in agent.told)
        await asyncio.sleep(1.5)
        assert [told for told in agent.told if "attempt" in told] == [text]
        await kubelet.start()
        await kubelet.until_capacity(NAME, 1, 1)
        await kubelet.stop()
        await kubelet.until(lambda: agent.told.count(text) == 2)


async def test_a_kubelet_that_restarts_ends_pods_only_without_an_agent(place: Path) -> None:
    """Those that run and have an init container with a device (Kubernetes 1.36.3)."""
    async with node(place, resource(2)) as (kubelet, agent):
        await kubelet.admit("default/plain", NAME, 1)
        await kubelet.admit("default/init", NAME, 1, init=1)
        await kubelet.restart()
        assert await kubelet.readmit() == {}
        await agent.stop()
        await kubelet.restart()
        assert set(await kubelet.readmit()) == {"default/init"}


async def test_a_kubelet_that_boots_without_an_agent_rejects_its_pods(place: Path) -> None:
    async with node(place, resource(1)) as (kubelet, agent):
        await kubelet.admit("default/cuda", NAME, 1)
        await agent.stop()
        await kubelet.stop()
        why = f"no healthy devices present; cannot allocate unhealthy devices {NAME}"
        assert await kubelet.boot() == {"default/cuda": why}


async def test_a_stream_that_the_kubelet_ends_leads_to_another_registration(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, _):
        task = kubelet.endpoints[NAME].task
        assert task is not None
        task.cancel()
        await kubelet.until(lambda: len(kubelet.registrations) == 2)
        await kubelet.until_capacity(NAME, 2, 2)


async def test_a_lost_socket_is_made_again_and_registered(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, agent):
        os.unlink(agent.directory / socket_name(NAME))
        await kubelet.until(lambda: len(kubelet.registrations) == 2)
        await kubelet.until_capacity(NAME, 2, 2)
        assert sockets(agent.directory) == [socket_name(NAME)]


async def test_a_stable_registration_is_not_repeated(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, _):
        await asyncio.sleep(0.5)
        assert len(kubelet.registrations) == 1


async def test_an_unhealthy_device_stays_in_the_list(place: Path) -> None:
    made = resource(4)
    async with node(place, made) as (kubelet, agent):
        agent.offer(with_unhealthy(made, made.units[1].id))
        await kubelet.until_capacity(NAME, 4, 3)
        agent.offer(made)
        await kubelet.until_capacity(NAME, 4, 4)
        agent.offer(NodeResource(NAME, made.units[:3]))
        await kubelet.until_capacity(NAME, 3, 3)


async def test_an_unchanged_list_is_not_sent_again(place: Path) -> None:
    made = resource(4)
    async with node(place, made) as (kubelet, agent):
        for _ in range(5):
            agent.offer(resource(4))
        await asyncio.sleep(0.1)
        assert len(kubelet.endpoints[NAME].lists) == 1


async def test_all_streams_get_each_list(place: Path) -> None:
    made = resource(2)
    async with node(place, made) as (kubelet, agent):
        path = agent.directory / socket_name(NAME)
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stream = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch",
                request_serializer=DEVICES.Empty.SerializeToString,
                response_deserializer=DEVICES.ListAndWatchResponse.FromString,
            )(DEVICES.Empty())
            first: Any = await stream.read()
            agent.offer(with_unhealthy(made, made.units[0].id))
            second: Any = await stream.read()
            await kubelet.until_capacity(NAME, 2, 1)
            stream.cancel()
        assert [d.health for d in first.devices] == ["Healthy", "Healthy"]
        assert [d.health for d in second.devices] == ["Unhealthy", "Healthy"]
        await kubelet.until(lambda: agent.served[NAME].plugin.streams == 1)
        assert len(kubelet.registrations) == 1  # one stream is left


async def test_a_device_without_a_numa_node_has_no_topology(place: Path) -> None:
    made = NodeResource(NAME, (unit(1, numa=None), unit(2, numa=0), unit(3, numa=1)))
    async with node(place, made) as (kubelet, _):
        devices = kubelet.endpoints[NAME].devices.values()
        found = [
            [n.ID for n in d.topology.nodes] if d.HasField("topology") else None for d in devices
        ]
        assert found == [None, [0], [1]]
        zero = list(devices)[1].topology.nodes[0].SerializeToString()
        assert zero == b""  # node 0 arrives as an empty message


async def test_a_pod_gets_the_names_of_its_devices(place: Path) -> None:
    async with node(place, resource(4)) as (kubelet, agent):
        container = await kubelet.admit("default/cuda", NAME, 2)
        names = [device.name for device in container.answer.cdi_devices]
        assert names == sorted(f"{NAME}={device}" for device in container.ids)
        assert agent.verified == [(NAME, container.ids)]
        assert len(agent.seconds) == 1
        assert kubelet.calls[0] == ("Allocate", container.ids)


async def test_an_init_container_and_the_container_get_the_same_device(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, _):
        container = await kubelet.admit("default/cuda", NAME, 1, init=1)
        first, second = (ids for call, ids in kubelet.calls if call == "Allocate")
        assert first == second == container.ids
        assert len(kubelet.preferences) == 1  # none is asked for a device that is used again


async def test_a_container_gets_more_devices_close_to_those_of_an_init_container(
    place: Path,
) -> None:
    units = (unit(1), unit(2, numa=1), unit(3), unit(4, numa=1))
    async with node(place, NodeResource(NAME, units)) as (kubelet, _):
        container = await kubelet.admit("default/cuda", NAME, 2, init=1)
        first = kubelet.calls[0][1]
        (asked,) = kubelet.preferences[1].container_requests
        assert tuple(asked.must_include_deviceIDs) == first
        assert asked.allocation_size == 2
        assert set(container.ids) > set(first)
        assert len({u.numa_nodes for u in units if u.id in container.ids}) == 1


async def test_the_preference_is_followed_and_concerns_free_devices_only(place: Path) -> None:
    units = (unit(1), unit(2, numa=1), unit(3), unit(4, numa=1))
    async with node(place, NodeResource(NAME, units)) as (kubelet, _):
        first = await kubelet.admit("default/a", NAME, 2)
        nodes = {u.numa_nodes for u in units if u.id in first.ids}
        assert len(nodes) == 1
        second = await kubelet.admit("default/b", NAME, 2)
        asked = kubelet.preferences[1].container_requests[0].available_deviceIDs
        assert set(asked) == set(second.ids) == {u.id for u in units} - set(first.ids)


async def test_a_restarted_container_is_verified_with_the_stored_answer(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, agent):
        container = await kubelet.admit("default/cuda", NAME, 1)
        await kubelet.restart_containers("default/cuda")
        await kubelet.restart()
        await kubelet.until_capacity(NAME, 2, 2)
        await kubelet.restart_containers("default/cuda")
        calls = [call for call, _ in kubelet.calls]
        assert calls == ["Allocate", *["PreStartContainer"] * 3]
        assert agent.verified == [(NAME, container.ids)] * 3


async def test_a_container_does_not_start_with_a_device_that_is_not_as_it_was(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, agent):
        await kubelet.admit("default/cuda", NAME, 1)
        agent.refusal = HostError("0000:01:00.0 is on nvidia", "vfiomgr bind 0000:01:00.0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kubelet.restart_containers("default/cuda")
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == ("0000:01:00.0 is on nvidia; vfiomgr bind 0000:01:00.0")
        agent.refusal = None
        await kubelet.restart_containers("default/cuda")


async def test_an_unknown_device_fails_the_pod_with_our_text(place: Path) -> None:
    made = resource(1)
    async with node(place, made) as (kubelet, agent):
        stale = kubelet.endpoints[NAME].devices
        agent.offer(NodeResource(NAME, (unit(7),)))
        await kubelet.until(lambda: kubelet.endpoints[NAME].devices is not stale)
        kubelet.endpoints[NAME].devices = stale
        with pytest.raises(AdmissionError, match=f"{NAME} has no device 0000:01:00.0"):
            await kubelet.admit("default/cuda", NAME, 1)


async def test_a_device_that_no_container_could_open_fails_the_pod_with_the_reason(
    place: Path,
) -> None:
    made = resource(1)
    async with node(place, made) as (kubelet, agent):
        stale = kubelet.endpoints[NAME].devices
        agent.offer(with_unhealthy(made, made.units[0].id))
        await kubelet.until_capacity(NAME, 1, 0)
        kubelet.endpoints[NAME].devices = stale
        why = "Allocate failed due to it is on nvidia; bind it, which is unexpected"
        with pytest.raises(AdmissionError, match=why):
            await kubelet.admit("default/cuda", NAME, 1)


async def test_kubevirt_gets_its_environment_and_nodes(place: Path) -> None:
    async with node(place, resource(1, consumer="kubevirt")) as (kubelet, _):
        container = await kubelet.admit("default/vm", NAME, 1)
        assert dict(container.answer.envs) == {"PCI_RESOURCE_VFIOMGR_IO_A40": "0000:01:00.0"}
        nodes = [(d.container_path, d.permissions) for d in container.answer.devices]
        assert nodes == [("/dev/vfio/vfio", "rw"), ("/dev/vfio/1", "rw")]
        assert not container.answer.cdi_devices


async def test_an_agent_that_leaves_sends_no_empty_list_and_removes_its_sockets(
    place: Path,
) -> None:
    async with node(place, resource(4)) as (kubelet, agent):
        await agent.stop()
        await kubelet.until_capacity(NAME, 4, 0)  # as for a plugin that died
        assert len(kubelet.endpoints[NAME].lists) == 1
        assert sockets(agent.directory) == []


async def test_the_next_agent_takes_over_while_the_old_ones_socket_goes(place: Path) -> None:
    """The end of a server removes the path of its socket, even if another one listens there.

    The kubelet ends the stream of the newest agent when an older one leaves.
    """
    async with node(place, resource(2)) as (kubelet, agent):
        name = f"{socket_name(NAME)[:-5]}-next.sock"
        following = Agent(agent.directory)
        served = following.offer(resource(2))
        served._path = str(agent.directory / name)
        following.start()
        await kubelet.until(lambda: (NAME, name) in kubelet.registrations)
        await agent.stop()
        await kubelet.until(lambda: kubelet.registrations.count((NAME, name)) == 2)
        await kubelet.until_capacity(NAME, 2, 2)
        assert sockets(agent.directory) == [name]
        await kubelet.admit("default/cuda", NAME, 1)
        await following.stop()


def test_one_process_has_a_socket_for_each_resource() -> None:
    assert socket_name(NAME) != socket_name(OTHER)
    assert socket_name(NAME) == socket_name(NAME)
    assert len(f"/var/lib/kubelet/device-plugins/{socket_name(NAME)}") < 80


def test_a_path_that_is_too_long_for_a_socket_is_refused(place: Path) -> None:
    longest = 107 - len(f"/{socket_name(NAME)}")
    directory = place / ("x" * (longest - len(str(place)) - 1))
    Agent(directory).offer(resource(1))
    with pytest.raises(UsageError, match="has more than 107 bytes"):
        Agent(directory.with_name(f"{directory.name}x")).offer(resource(1))


async def test_a_directory_without_room_for_a_socket_is_named(place: Path) -> None:
    agent = Agent(place / "absent")
    agent.offer(resource(1))
    (served,) = agent.served.values()
    with pytest.raises(HostError, match=r"cannot serve .*/absent/.*: No such file"):
        await served.tend()


async def test_a_kubelet_that_sends_the_path_as_authority_is_served(place: Path) -> None:
    authority = str(place / "device-plugins" / "x.sock")
    async with node(place, resource(1), authority=authority) as (kubelet, _):
        await kubelet.admit("default/cuda", NAME, 1)


async def test_pods_are_known_by_device_and_the_rate_of_questions_is_limited(place: Path) -> None:
    async with node(place, resource(2)) as (kubelet, _):
        container = await kubelet.admit("default/cuda", NAME, 1)
        found, _ = await pod_devices(kubelet.pod_resources)
        assert found == {(NAME, container.ids[0]): "default/cuda/c0"}
        kubelet._tokens = 0.0
        kubelet._refilled = time.monotonic() + 60
        with pytest.raises(NoAnswer, match="rate limit"):
            await pod_devices(kubelet.pod_resources)


async def test_a_list_of_pods_may_be_larger_than_what_grpc_allows_by_default(place: Path) -> None:
    async with node(place, resource(1)) as (kubelet, _):
        container = await kubelet.admit("default/cuda", NAME, 1)
        for number in range(50_000):
            kubelet.pods[f"default/{'x' * 80}-{number}"] = [container]
        assert len((await pod_devices(kubelet.pod_resources))[0]) == 1


async def test_a_thousand_devices_are_offered_and_allocated(place: Path) -> None:
    """`make bench` measures how long that takes."""
    made = resource(1000)
    async with node(place, made) as (kubelet, agent):
        assert kubelet.capacity(NAME) == (1000, 1000)
        for number in range(10):
            await kubelet.admit(f"default/p{number}", NAME, 1)
        assert len(agent.seconds) == 10
        agent.offer(with_unhealthy(made, made.units[-1].id))
        await kubelet.until_capacity(NAME, 1000, 999)
