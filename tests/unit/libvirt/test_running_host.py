"""A snapshot or a recorded host does not change the libvirt of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import t4_host
from vfiomgr.errors import LibvirtFailed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
CHANGES = (
    "libvirt hook install test",
    "libvirt hook uninstall test",
    "libvirt attach test 0000:21:00.0 --config",
    "libvirt detach test 0000:21:00.0 --config",
    "libvirt edit test --add 0000:21:00.0",
    "libvirt edit test.xml --define",
    f"vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-231",
    f"vgpu start {UUID} --libvirt",
    f"vgpu stop {UUID} --libvirt",
    f"vgpu undefine {UUID} --libvirt",
)


@pytest.fixture
def _place(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded host, its snapshot and a domain; libvirt must not be asked."""

    def never(*_: object, **__: object) -> None:
        pytest.fail("libvirt was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vfiomgr.libvirt.commands.connection.connect", never)
    t4_host(tmp_path)
    (tmp_path / "host.json").write_text(run("--root", "host", "snapshot").stdout)
    (tmp_path / "test.xml").write_text("<domain type='test'><name>test</name></domain>")


@pytest.mark.usefixtures("kernel", "_place")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--root=host", "a recorded host has no libvirt: "),
        ("--snapshot=host.json", "a snapshot has no libvirt"),
    ],
)
@pytest.mark.parametrize("change", CHANGES)
def test_the_libvirt_of_this_machine_is_not_changed(
    run: Run, change: str, option: str, message: str
) -> None:
    answer = run(option, *change.split())
    assert (answer.status, answer.stdout) == (2, "")
    assert message in answer.stderr
    assert f"remedy: omit {option.partition('=')[0]}, or pass --dry-run" in answer.stderr


@pytest.mark.usefixtures("kernel", "_place")
@pytest.mark.parametrize(
    ("option", "message"),
    [("--root=host", "a recorded host has no"), ("--snapshot=host.json", "a snapshot has no")],
)
@pytest.mark.parametrize("change", [change for change in CHANGES if "vgpu" not in change])
def test_a_dry_run_for_another_host_does_not_ask_the_libvirt_of_this_machine(
    run: Run, change: str, option: str, message: str
) -> None:
    answer = run(option, *change.split(), "--dry-run")
    assert (answer.status, answer.stdout) == (2, "")
    assert f"{message} libvirt" in answer.stderr
    assert "remedy: pass the --connect URI of its libvirt" in answer.stderr


@pytest.mark.usefixtures("kernel", "_place")
def test_a_dry_run_for_another_host_asks_a_libvirt_that_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(uri: str, **_: object) -> None:
        asked.append(uri)
        message = "no answer"
        raise LibvirtFailed(message, "none")

    monkeypatch.setattr("vfiomgr.libvirt.commands.connection.connect", refuse)
    words = ("libvirt", "detach", "test", "21:00.0", "--dry-run", "--connect", "test:///default")
    assert run("--root=host", *words).status != 0
    assert asked == ["test:///default"]
