"""The agent as its unit and its DaemonSet start it: with their words, and default options."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from tests.unit.golden.transcripts import PROGRAM, as_installed
from tests.unit.node.stories import until
from tests.unit.node.test_agent import GPUS, NAME, running
from tests.unit.node.test_manifests import pods
from vfiomgr.paths import HostPath
from vfiomgr.users.node_agent import CONTROL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Run
    from tests.unit.node.test_agent import Running

COMMAND = str(Path(sys.executable).with_name("vfiomgr"))


def of_unit(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of the agent's unit."""
    as_installed(monkeypatch)
    text = run("node", "manifests", "--unit", "vfiomgr-node.service").stdout
    (line,) = (each for each in text.splitlines() if each.startswith("ExecStart="))
    program, *words = shlex.split(line.removeprefix("ExecStart="))
    assert program == PROGRAM
    return [sys.executable, *words]


def of_daemon_set(run: Run, _monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command in the container of the agent; only its port is any that is free."""
    objects = YAML(typ="safe", pure=True).load_all(run("node", "manifests").stdout)
    (agent,) = pods([*objects])["vfiomgr-node"]["containers"]
    return [COMMAND, *("127.0.0.1:0" if word == "0.0.0.0:9478" else word for word in agent["args"])]


async def start(node: Running, words: list[str], directory: Path | None = None) -> None:
    """Start an agent for the host by its environment, so that its options are the usual ones."""
    words = [word.replace("unix:/", f"unix:{node.kernel.root}/") for word in words]
    node.process = await asyncio.create_subprocess_exec(
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=directory,
        env={**os.environ, "VFIOMGR_ROOT": node.kernel.root},
    )


async def unbind(node: Running, *options: str) -> tuple[int | None, str]:
    """Plan to return the first GPU to the host; the status, and the messages."""
    status, _, error = await node.command("unbind", "--dry-run", *options, GPUS[0])
    return status, error


@pytest.mark.parametrize("command_of", [of_unit, of_daemon_set])
async def test_the_device_of_a_pod_is_not_unbound_if_the_agent_runs_hangs_or_was_killed(
    place: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    command_of: Callable[[Run, pytest.MonkeyPatch], list[str]],
) -> None:
    words = command_of(run, monkeypatch)

    async with running(place) as node:
        await start(node, words)
        assert node.process is not None
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.kubelet.admit("ml/train-0", NAME, 3)
        await node.until_used_by(GPUS[0], "ml/train-0/c0")
        assert (await node.status())["plugin_directory"] == str(node.directory)
        status, error = await unbind(node)
        assert (status, "held-by-pod" in error) == (4, True), error

        node.process.send_signal(signal.SIGSTOP)
        status, error = await unbind(node)
        assert (status, "users-unknown" in error) == (4, True), error
        assert "cannot ask the node agent" in error
        assert "timed out" in error
        assert "systemctl restart vfiomgr-node" in error

        node.process.kill()
        await node.process.communicate()
        node.process = None
        socket = f"{node.kernel.root}{CONTROL}"
        status, error = await unbind(node)
        assert (status, "users-unknown" in error) == (4, True), error
        assert f"if no agent should run here: rm {socket}" in error
        assert "warning" not in error
        assert (await unbind(node, "--allow", "in-use"))[0] == 0
        _, output, error = await node.command("list", "--columns", "address,used-by")
        assert [line.split() for line in output.splitlines()[1:]] == [
            [gpu, "unknown"] for gpu in GPUS
        ]
        assert "cannot ask the node agent" in error
        _, output, _ = await node.command("list", GPUS[0], "--format", "json")
        assert json.loads(output)["items"][0]["pods"] is None
        os.unlink(socket)
        assert (await unbind(node))[0] == 0


async def test_an_agent_that_has_no_answer_of_the_kubelet_yet_does_not_say_that_devices_are_free(
    place: Path,
) -> None:
    async with running(place) as node:
        await node.kubelet.stop()
        for path in (node.kubelet.socket, node.kubelet.pod_resources):
            os.unlink(path)
        await node.start()
        await until(partial(node.kernel.exists, CONTROL))
        why = f"the kubelet has not answered on {node.kubelet.pod_resources}"
        for _ in range(100):
            if (await node.status())["pods_unknown"] == why:
                break
        status, error = await unbind(node)
        assert (status, why in error) == (4, True), error
        await node.kubelet.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert (await node.status())["pods_unknown"] is None
        assert (await unbind(node))[0] == 0


async def test_an_agent_removes_its_socket_when_it_ends_and_when_it_cannot_start(
    place: Path,
) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert node.kernel.exists(CONTROL)
        assert (await node.stop())[0] == 0
        assert not node.kernel.exists(CONTROL)
        (place / "m").write_text("")
        refused = await node.agent(f"--metrics=unix:{place / 'm'}")
        _, error = await refused.communicate()
        assert (refused.returncode, b"is not a socket" in error) == (2, True)
        assert not node.kernel.exists(CONTROL)


async def test_the_device_of_a_pod_is_not_unbound_after_the_agent_was_stopped(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert (await node.stop())[0] == 0
        kept = HostPath("/var/lib/kubelet")
        record = kept / "device-plugins/kubelet_internal_checkpoint"
        entry = {"PodUID": "u-1", "ContainerName": "c0", "ResourceName": NAME}
        data = {"PodDeviceEntries": [{**entry, "DeviceIDs": {"0": [GPUS[0]]}}]}
        for directory in (kept / "pods/u-1", HostPath("/var/log/pods/ml_train-0_u-1")):
            node.kernel.make_directory(directory)
        node.kernel.make_directory(record.parent)
        node.kernel.replace(record, json.dumps({"Data": data}).encode())
        status, error = await unbind(node)
        assert (status, "held-by-pod" in error) == (4, True), error
        assert "kubectl -n ml delete pod train-0" in error
        _, output, _ = await node.command("list", "--columns", "address,used-by")
        assert output.splitlines()[1].split() == [GPUS[0], "pod", "ml/train-0"]
        node.kernel.replace(record, b"{")
        status, error = await unbind(node)
        assert (status, "users-unknown" in error) == (4, True), error
        assert (await unbind(node, "--allow", "in-use"))[0] == 0


@pytest.mark.parametrize("words", [("run",), ("status",), ("release", GPUS[0])])
def test_the_socket_of_an_agent_cannot_be_moved_from_where_other_commands_look(
    run: Run, words: tuple[str, ...]
) -> None:
    refused = run("node", *words, "--socket", "/run/other.sock")
    assert (refused.status, "no such option: --socket" in refused.stderr.lower()) == (2, True)


async def test_claims_that_an_agent_prepared_before_it_ended_keep_devices(place: Path) -> None:
    async with running(place) as node:
        assert (await unbind(node))[0] == 0
        record = HostPath("/run/vfiomgr/dra/uid-1.json")
        node.kernel.make_directory(record.parent)
        node.kernel.replace(record, b"{}")
        status, error = await unbind(node)
        assert (status, "ResourceClaims are prepared" in error) == (4, True), error


def test_the_state_of_an_agent_of_this_machine_is_a_document() -> None:
    """Only below `/` its places are paths of the host, and no plain strings."""
    code = (
        "import asyncio, sys\n"
        "from vfiomgr.node import agent\n"
        "async def show(settings):\n"
        "    print((await agent.Agent(settings, print)._pages._show_status('')).body.decode())\n"
        "agent.run = lambda settings, tell: asyncio.run(show(settings))\n"
        "sys.argv = ['vfiomgr', 'node', 'run']\n"
        "from vfiomgr.main.program import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plugin_directory"] == "/var/lib/kubelet/device-plugins"


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory with a package that another user calls vfiomgr."""
    package = tmp_path / "trap/vfiomgr"
    package.mkdir(parents=True)
    text = f"open({str(tmp_path / 'sprung')!r}, 'w').close()\nraise SystemExit('sprung')\n"
    (package / "__init__.py").write_text(text)
    return package.parent


async def test_an_agent_started_by_hand_runs_no_package_of_the_current_directory(
    place: Path, trap: Path
) -> None:
    async with running(place) as node:
        await start(node, [COMMAND, "node", "run"], trap)
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.stop()
    assert not (trap.parent / "sprung").exists()


@pytest.mark.parametrize("name", ["scan", "create"])
@pytest.mark.parametrize("is_led", [False, True])
def test_a_process_of_the_agent_runs_no_package_of_the_current_directory(
    trap: Path, name: str, *, is_led: bool
) -> None:
    """Neither if vfiomgr is installed, nor if PYTHONPATH or a script leads to it."""
    own = str(Path(__file__).parents[3] / "src")
    lead = f"sys.path[:] = [p for p in sys.path if p != {own!r}]; sys.path.insert(1, {own!r})"
    code = (
        f"import os, sys; {lead if is_led else 'pass'}\n"
        "from vfiomgr.node.processes import own_command\n"
        f"os.chdir({str(trap)!r})\n"
        f"command = own_command('/', {name!r})\n"
        f"os.execv(command[0], [*command, '--help'])"
    )
    environment = {**os.environ, "PYTHONPATH": own} if is_led else None
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "for an agent, which starts this command itself" in " ".join(done.stdout.split())
    assert not (trap.parent / "sprung").exists()
