"""The pod that binds devices for an agent that may not write /sys: two processes, one kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from socket import socketpair
from typing import TYPE_CHECKING

import pytest

from tests.fakes.cluster import NODE
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.unit.engine.faults import changes, kept
from tests.unit.node.dra import test_driver_vgpus
from tests.unit.node.dra.test_driver_binding import DEVICE, driver_of, until_known
from tests.unit.node.dra.test_driver_binding import kernel as kernel_of_agent
from tests.unit.node.dra.test_driver_vgpus import node
from tests.unit.node.stories import answer, until
from tests.unit.node.test_on_demand import CARD, DISK, LAYOUT, OWNER, drivers
from vfiomgr.errors import HostError, Refusal
from vfiomgr.library import Host
from vfiomgr.node.dra import binder, nominated
from vfiomgr.node.dra.binder import Binder, listen, of_node, serve
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.node.dra.model import BOUND
from vfiomgr.node.dra.vgpus import serve as carry_out
from vfiomgr.node.messages import BINDER, Order, Question, Result, Settings, read, write
from vfiomgr.node.model import OnDemand
from vfiomgr.node.on_demand import unit_of
from vfiomgr.node.processes import BinderAway, Creating
from vfiomgr.node.scanner import Scanner
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from tests.fakes.kernel import FakeKernel

kernel = kernel_of_agent


@pytest.fixture
def host(place: Path) -> FakeKernel:
    """A host whose layout names the card."""
    return host_of(place)


@pytest.fixture(autouse=True)
def _modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is in persistence mode."""
    monkeypatch.setattr(binder, "read_persistence", lambda _tree, _address: False)


def host_of(place: Path) -> FakeKernel:
    made = workstation(place)
    made.make_directory(FILE.parent)
    made.replace(FILE, LAYOUT.encode(), mode=0o644)
    return made


@contextmanager
def process_of(
    host: FakeKernel,
    before: Callable[[], object] = lambda: None,
    faults: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """The binding pod as a process, which ends like a killed one at a power cut."""
    with listen(host) as listening:
        faults()
        pid = os.fork()
        if pid == 0:
            _serve(host, listening, before)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(host: FakeKernel, listening: socket.socket, before: Callable[[], object]) -> None:
    def begin(connection: socket.socket) -> None:
        before()
        with connection.makefile("rb") as source:
            try:
                carry_out(Binder(Host(host)), source, connection.fileno())
            except BrokenPipeError:
                return

    try:
        serve(listening, begin)
    except PowerCut:
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def agent_of(host: FakeKernel) -> Creating:
    return Creating(host.root)


async def test_an_order_is_carried_out_by_the_other_process(host: FakeKernel) -> None:
    before = kept(host)
    agent = agent_of(host)
    with process_of(host):
        unit = await agent.bind(str(CARD), OnDemand(), OWNER)
        assert unit.nodes == ("/dev/vfio/10",)
        assert drivers(host) == ("vfio-pci", "vfio-pci")
        assert await agent.give_back(str(CARD), OWNER) == ""
    assert drivers(host) == ("nvidia", "snd_hda_intel")
    assert changes(before, kept(host)) == {}
    assert agent._idle == []


async def test_the_layout_decides_and_not_the_order(host: FakeKernel) -> None:
    agent = agent_of(host)
    with process_of(host):
        with pytest.raises(Refusal, match=f"cannot bind {DISK}: the layout of this node has no on"):
            await agent.bind(str(DISK), OnDemand(allow=("mounted-disk",)), OWNER)
        unit = await agent.bind(str(CARD), OnDemand(driver="nvidia", is_sticky=True), OWNER)
        assert unit.on_demand == OnDemand()
        await agent.give_back(str(CARD), OWNER)
    assert drivers(host) == ("nvidia", "snd_hda_intel")
    result = Binder(Host(host)).perform(Order("create", "a", "0000:01:00.0", "nvidia-222"))
    assert (result.is_refused, result.error) == (
        True,
        "cannot create: this pod only binds devices",
    )
    host.remove(FILE)
    result = Binder(Host(host)).perform(Order("bind", OWNER, addresses=(CARD,)))
    assert "has no on-demand rule for it" in result.error


def test_a_gpu_whose_persistence_mode_is_unknown_is_not_bound(
    host: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binder, "read_persistence", lambda _tree, _address: None)
    result = Binder(Host(host)).perform(Order("bind", OWNER, addresses=(CARD,)))
    assert result.is_refused
    assert "cannot tell whether 0000:01:00.0 " in result.error
    assert drivers(host) == ("nvidia", "snd_hda_intel")


def test_programs_are_those_of_the_node_or_of_its_driver_container(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("node", "driver")]
    smi = ("nvidia-smi", "-q")
    assert of_node(smi, roots) == smi
    (tmp_path / "driver/usr/bin").mkdir(parents=True)
    (tmp_path / "driver/usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia-smi")
    assert of_node(smi, roots) == ("chroot", roots[1], *smi)
    (tmp_path / "node/usr/sbin").mkdir(parents=True)
    (tmp_path / "node/usr/sbin/nvidia-smi").touch()
    assert of_node(smi, roots) == ("chroot", roots[0], *smi)


async def test_only_root_and_this_user_give_orders(
    host: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binder, "_user_of", lambda _connection: 12345)
    with process_of(host), pytest.raises(HostError, match="no answer of the pod vfiomgr-binder"):
        await agent_of(host).bind(str(CARD), OnDemand(), OWNER)
    assert stat.S_IMODE(os.stat(host.locate(BINDER.parent)).st_mode) == 0o700
    assert drivers(host) == ("nvidia", "snd_hda_intel")


async def test_a_pod_that_is_away_is_named(host: FakeKernel) -> None:
    listen(host).close()
    with pytest.raises(HostError, match="vfiomgr-binder on this node: Connection refused"):
        await agent_of(host).bind(str(CARD), OnDemand(), OWNER)


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_a_claim_waits_for_the_pod_before_its_own_is_placed(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    """The pod is away, or is being replaced, when the scheduler allocates the claim."""
    monkeypatch.setattr(test_driver_vgpus, "Creator", agent_of)
    monkeypatch.setattr("vfiomgr.node.verifying.may_reset", lambda _tree: False)
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _tree: False)
    monkeypatch.setattr(nominated, "_LATE", 0.2)
    listen(kernel).close()
    async with node(place, kernel, monkeypatch, binds_early=True) as made:
        await until_known(made)
        if is_replaced:
            kernel.remove(BINDER)
        made.scheduler.create("p")
        made.scheduler.nominate("p")
        made.scheduler.allocate(DEVICE)
        away = f"claim ml/gpu, before its pod is placed: cannot bind {CARD}: no answer of the pod"
        await made.until(
            lambda: made.scheduler.conditions() or any(away in text for text in made.told)
        )
        assert made.scheduler.conditions() == {}
        await made.scan()
        assert made.agent.driver is not None
        assert made.agent.driver._device(NODE, DEVICE) is not None  # it is not withdrawn meanwhile
        with process_of(kernel):
            await made.until(made.scheduler.conditions)
            assert made.scheduler.conditions().keys() == {BOUND}
            assert driver_of(kernel) == "vfio-pci"
            assert len([text for text in made.told if away in text]) == 1
            await made.end_agent()


def test_only_devices_that_were_bound_for_claims_are_reset(host: FakeKernel) -> None:
    pod = Binder(Host(host))
    order = Order("reset", addresses=(CARD,))
    assert pod.perform(order).note == f"{CARD} was not bound for a claim"
    assert not pod.perform(Order("bind", OWNER, addresses=(CARD,))).error
    host.operations.clear()
    result = pod.perform(order)
    assert (result.note, result.error) == ("", "")
    (write,) = (each for each in host.operations if each.path.name.startswith("reset"))
    assert str(write) == f"write /sys/bus/pci/devices/{CARD}/reset '1'"
    assert not pod.perform(Order("return", OWNER, addresses=(CARD,))).error
    assert pod.perform(order).note == f"{CARD} was not bound for a claim"


async def test_a_device_that_claims_bind_is_reset_by_the_other_process(host: FakeKernel) -> None:
    seen = unit_of(Host(host).scan(), CARD, OnDemand())
    agent = agent_of(host)
    with process_of(host):
        assert await agent.reset(seen) == f"{CARD} was not bound for a claim"
    host.remove(BINDER)
    with pytest.raises(BinderAway, match=r"orders.sock does not exist$") as away:
        await agent.reset(seen)
    assert away.value.hint == "wait for it, or add it: vfiomgr node manifests --dra --binder"


def test_the_layout_can_be_named(host: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Sequence[str]] = []

    def begin_once(_listening: object, begin: Callable[[socket.socket], object]) -> None:
        connection, other = socketpair()
        with connection, other:
            begin(connection)
        raise KeyboardInterrupt

    class Begun:
        def __init__(self, command: Sequence[str], **_pipes: object) -> None:
            begun.append(command)

        def wait(self) -> None:
            """Nothing runs."""

    monkeypatch.setattr(binder, "serve", begin_once)
    monkeypatch.setattr(subprocess, "Popen", Begun)
    binder.run(host, "other")
    monkeypatch.undo()
    host.replace(FILE, LAYOUT.replace("mixed", "other").encode(), mode=0o644)
    order = write(Order("bind", OWNER, addresses=(DISK,)))
    found = []
    for command in (begun[0], [*begun[0][:-1], "absent"]):
        result = subprocess.run(command, input=order, stdout=subprocess.PIPE, check=True)
        found.append(read(Result, result.stdout).error)
    assert "has no on-demand rule for it" in found[0]
    assert "absent" in found[1]


async def test_a_pod_of_another_version_is_named(
    host: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer has a field that is not known here."""

    def carry_out(_binder: object, source: BinaryIO, sink: int) -> None:
        source.readline()
        os.write(sink, b'{"newer": 1}\n')

    monkeypatch.setattr(f"{__name__}.carry_out", carry_out)
    message = "vfiomgr-binder on this node: it runs another version of vfiomgr"
    with process_of(host), pytest.raises(HostError, match=message):
        await agent_of(host).bind(str(CARD), OnDemand(), OWNER)


async def test_an_order_of_an_agent_that_was_killed_goes_on(host: FakeKernel, place: Path) -> None:
    agent = agent_of(host)
    begun, killed = place / "begun", place / "killed"

    def wait() -> None:
        begun.touch()
        while not killed.exists():
            time.sleep(0.01)

    with process_of(host, wait):
        bind = asyncio.create_task(agent._ask_binder(
            Order("bind", OWNER, addresses=(CARD,), on_demand=OnDemand()), "bind"
        ))  # fmt: skip
        await until(begun.exists)
        bind.cancel()
        await asyncio.gather(bind, return_exceptions=True)
        killed.touch()
        unit = await agent_of(host).bind(str(CARD), OnDemand(), OWNER)
        assert unit.nodes == ("/dev/vfio/10",)
        await agent_of(host).give_back(str(CARD), OWNER)
    assert host.children(DIRECTORY) == []


async def test_a_kill_of_this_process_at_any_operation_loses_nothing(place: Path) -> None:
    whole = host_of(place / "whole")
    with process_of(whole):
        first = len(whole.operations)
        await agent_of(whole).bind(str(CARD), OnDemand(), OWNER)
        bound = len(whole.operations) - first
        await agent_of(whole).give_back(str(CARD), OWNER)
    returned = len(whole.operations) - first - bound
    assert min(bound, returned) > 5
    for at in range(1, bound + returned + 1):
        host = host_of(place / str(at))
        before, agent = kept(host), agent_of(host)
        if at > bound:
            with process_of(host):
                await agent.bind(str(CARD), OnDemand(), OWNER)
        number = at if at <= bound else at - bound
        faults = partial(host.kill, at=number, after=at % 2 == 0)
        with (
            process_of(host, faults=faults),
            pytest.raises(HostError, match="no answer of the pod"),
        ):
            await (
                agent.bind(str(CARD), OnDemand(), OWNER)
                if at <= bound
                else agent.give_back(str(CARD), OWNER)
            )
        host.revive()
        with process_of(host):
            if at <= bound and at % 3:
                await agent.bind(str(CARD), OnDemand(), OWNER)
                assert drivers(host) == ("vfio-pci", "vfio-pci"), at
            await agent.give_back(str(CARD), OWNER)
        assert changes(before, kept(host)) == {}, at


async def test_a_claim_binds_by_the_other_process_and_outlives_the_agent(
    place: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_driver_vgpus, "Creator", agent_of)
    monkeypatch.setattr("vfiomgr.node.verifying.may_reset", lambda _tree: False)
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _tree: False)
    with process_of(kernel):
        async with node(place, kernel, monkeypatch) as made:
            await until_known(made)
            made.allocate(DEVICE)
            (prepared,) = await made.prepare()
            assert prepared.device_name == DEVICE
            assert driver_of(kernel) == "vfio-pci"
            await made.restart_agent()
            await made.until_published()
            assert driver_of(kernel) == "vfio-pci"
            await made.unprepare()
            assert driver_of(kernel) == "nvidia"


def test_devices_are_published_if_another_pod_can_bind_them(
    host: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.verifying.may_reset", lambda _tree: False)
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _tree: False)
    scanner = Scanner(Host(host))
    question = Question(settings=Settings(dra_node="gpu-1"), pods={})

    def units() -> set[str]:
        pools = answer(scanner, question).pools or ()
        return {device.target.unit for pool in pools for device in pool.devices}

    assert str(CARD) not in units()
    listen(host).close()
    assert str(CARD) in units()
    scanner.close()


def test_the_command_answers_on_its_socket_and_ends_with_sigterm(place: Path) -> None:
    (place / "sys").mkdir()
    command = (sys.executable, "-I", "-m", "vfiomgr", "--root", str(place), "node", "bind")
    path = f"{place}{BINDER}"
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while not os.path.exists(path) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(HostError, match="not a host root"):
            asyncio.run(Creating(str(place)).bind(str(CARD), OnDemand(), OWNER))
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in error) == (0, False)
    assert not os.path.exists(path)  # nobody binds devices any more
