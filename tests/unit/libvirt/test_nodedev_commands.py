"""`vgpu start`, `stop` and `undefine --libvirt`: what is asked of libvirt, and what is not."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.fakes.vgpu_hosts import t4_host
from tests.unit.libvirt.preflight.situations import MDEV_ELEMENT, UUID, known, libvirt, xml
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.libvirt.client.connection import MdevState, NodeMdev
from vfiomgr.main.program import cli
from vfiomgr.snapshot.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

    from vfiomgr.libvirt.model import Hypervisor

PARENT, TYPE = "0000:21:00.0", "nvidia-231"
IDLE = MdevState(is_active=False, is_defined=True, starts_by_itself=False)
ACTIVE = replace(IDLE, is_active=True)
TRANSIENT = replace(ACTIVE, is_defined=False)


@dataclass
class Libvirt:
    """A connection that has one mediated device."""

    state: MdevState
    users: Hypervisor = field(default_factory=libvirt)
    type: str = TYPE
    calls: list[str] = field(default_factory=list)

    def mdevs(self) -> tuple[NodeMdev, ...]:
        """The one."""
        return (NodeMdev("mdev_x", UUID, self.type, PARENT, self.state),)

    def hypervisor(self) -> Hypervisor:
        """Its domains."""
        return self.users

    def start_mdev(self, mdev: NodeMdev) -> None:
        """Asked for."""
        self.calls.append(f"start {mdev.uuid}")

    def stop_mdev(self, mdev: NodeMdev) -> None:
        """Asked for."""
        self.calls.append(f"stop {mdev.uuid}")

    def undefine_mdev(self, mdev: NodeMdev) -> None:
        """Asked for."""
        self.calls.append(f"undefine {mdev.uuid}")


def run(
    monkeypatch: pytest.MonkeyPatch, host: Path, fake: Libvirt, *arguments: str, uuid: str = UUID
) -> Result:
    @contextmanager
    def connected(_uri: str) -> Iterator[Libvirt]:
        yield fake

    monkeypatch.setattr("vfiomgr.libvirt.commands.nodedev.connected", connected)
    monkeypatch.setattr(Session, "is_live", True)
    command, *rest = arguments
    root = t4_host(host).root
    words = ["--root", root, "vgpu", command, uuid, "--libvirt", *rest]
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize(
    ("verb", "state", "word"),
    [("start", IDLE, "started"), ("stop", ACTIVE, "stopped"), ("undefine", IDLE, "undefined")],
)
def test_what_is_not_so_yet_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, state: MdevState, word: str
) -> None:
    fake = Libvirt(state)
    result = run(monkeypatch, tmp_path, fake, verb)
    assert (result.output, fake.calls) == (f"{word}: {UUID}\n", [f"{verb} {UUID}"])
    fake = Libvirt(state)
    result = run(monkeypatch, tmp_path / "dry", fake, verb, "--dry-run")
    assert (result.output, fake.calls) == (f"would be {word}: {UUID}\n", [])


@pytest.mark.parametrize(
    ("verb", "state", "word"),
    [("start", ACTIVE, "started"), ("stop", IDLE, "stopped"), ("undefine", TRANSIENT, "undefined")],
)
def test_what_is_so_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, state: MdevState, word: str
) -> None:
    fake = Libvirt(state)
    result = run(monkeypatch, tmp_path, fake, verb, "--format", "json")
    answer = json.loads(result.output)
    assert (answer["state"], answer["changed"], fake.calls) == (word, False, [])


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_one_that_a_guest_has_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    user = replace(known(xml(MDEV_ELEMENT), running=True), name="win 11")
    fake = Libvirt(ACTIVE, libvirt(user))
    result = run(monkeypatch, tmp_path, fake, "stop", *options)
    assert isinstance(result.exception, Refusal)
    assert f"{UUID} is in use by the running domain win 11" in result.exception.message
    assert result.exception.hint == f"vfiomgr libvirt detach 'win 11' {UUID} --live"
    assert fake.calls == []


def test_one_without_room_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Libvirt(IDLE, type="nvidia-9")
    result = run(monkeypatch, tmp_path, fake, "start")
    assert isinstance(result.exception, Refusal)
    assert "has no capacity for another vGPU of type nvidia-9" in result.exception.message
    assert fake.calls == []


@pytest.mark.parametrize("verb", ["start", "stop", "undefine"])
def test_one_that_nobody_knows_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    fake = Libvirt(IDLE)
    result = run(monkeypatch, tmp_path, fake, verb, uuid=UUID.replace("f", "0"))
    assert isinstance(result.exception, UnknownDevice)
    assert "vfiomgr vgpu list --libvirt shows the devices" in result.exception.hint
    result = run(monkeypatch, tmp_path / "other", fake, verb, uuid="x")
    assert isinstance(result.exception, UsageError)
    assert fake.calls == []


@pytest.mark.parametrize("verb", ["start", "stop", "undefine"])
def test_libvirt_is_asked_for_one_vgpu_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    fake = Libvirt(IDLE)
    result = run(monkeypatch, tmp_path, fake, verb, UUID.replace("f", "0"))
    assert isinstance(result.exception, UsageError)
    assert result.exception.message == "--libvirt takes one UUID"
    assert fake.calls == []


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("start --parent 21:00.0", "--parent"),
        ("stop --allow in-use", "--allow"),
        ("undefine --parent 21:00.0", "--parent"),
        ("define --attribute a=b", "--attribute"),
        ("define --jsonfile x.json", "--jsonfile"),
    ],
)
def test_what_libvirt_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, option: str
) -> None:
    fake = Libvirt(IDLE)
    result = run(monkeypatch, tmp_path, fake, *line.split())
    assert isinstance(result.exception, UsageError)
    words = f"--libvirt and {option} contradict each other: libvirt does not support it"
    assert result.exception.message == words
    assert fake.calls == []


@pytest.mark.parametrize(
    ("words", "uri"),
    [
        (("--libvirt",), "qemu:///session"),
        (("--connect", "qemu+ssh://node7/system"), "qemu+ssh://node7/system"),
        ((), None),
    ],
)
def test_a_libvirt_that_is_named_is_asked_and_the_environment_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], uri: str | None
) -> None:
    asked: list[str | None] = []
    monkeypatch.setenv("LIBVIRT_DEFAULT_URI", "qemu:///session")
    monkeypatch.setattr(
        "vfiomgr.main.commands.vgpu.list_mdevs", lambda _session, uri: asked.append(uri)
    )
    root = t4_host(tmp_path).root
    result = CliRunner().invoke(cli, ["--root", root, "vgpu", "list", *words])
    assert result.exception is None
    assert asked == ([] if uri is None else [uri])
