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
from typing import TYPE_CHECKING

import pytest

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
from vfiomgr.node.dra import binder
from vfiomgr.node.dra.binder import Binder, listen, of_node, serve
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.node.dra.vgpus import serve as carry_out
from vfiomgr.node.messages import BINDER, Order, Question, Settings
from vfiomgr.node.model import OnDemand
from vfiomgr.node.processes import Creating
from vfiomgr.node.scanner import Scanner
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
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
