"""`vfiomgr check migration`: two recorded hosts, what it prints, and with which status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

import vfiomgr
from tests.fakes.libvirt_node import node_uri
from tests.unit.libvirt.migration.hosts import OTHER_VF, VF, network, network_host, vgpu_host
from tests.unit.libvirt.migration.test_migration import ONE_VF, ONE_VGPU, TWO_VFS
from vfiomgr.libvirt.client.binding import _Guarded
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Matches, Run

TWO = ("check", "migration", "two.xml", "--snapshot", "host1.json")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Snapshots of three hosts, and domains."""
    bound = network_host(network(VF), network(OTHER_VF, driver="mlx5_core"))
    for name, host in (
        ("host1.json", network_host()),
        ("host2.json", network_host(network(VF, driver="mlx5_core"))),
        ("host3.json", bound),
        ("gpu1.json", vgpu_host(2)),
        ("gpu2.json", vgpu_host(version="590.10")),
    ):
        (tmp_path / name).write_text(write_snapshot(host))
    (tmp_path / "one.xml").write_text(ONE_VF)
    (tmp_path / "two.xml").write_text(TWO_VFS)
    (tmp_path / "vgpu.xml").write_text(ONE_VGPU)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("directory")
def test_golden(run: Run, matches: Matches) -> None:
    answer = run(*TWO, "--to", "host2.json", "--to", "host3.json")
    matches("check-migration.txt", answer.stdout)
    assert answer.status == 1
    assert "not checked: disks, networks and other devices" in answer.stderr
    words = ("check", "migration", "vgpu.xml", "--snapshot", "gpu1.json")
    answer = run(*words, "--to", "gpu2.json", "--format", "json")
    matches("check-migration.json", answer.stdout)
    assert answer.status == 1


@pytest.mark.usefixtures("directory")
def test_a_target_that_fits(run: Run) -> None:
    words = ("check", "migration", "one.xml", "--snapshot", "host1.json")
    alone = run(*words)
    assert (alone.status, alone.stdout) == (0, "one.xml: no problem found\n")
    both = run(*words, "--to", "host2.json", "--to", "host3.json")
    assert both.status == 0
    assert "host2.json: does not fit" in both.stdout
    assert "host3.json: fits" in both.stdout


@pytest.mark.usefixtures("directory")
def test_a_target_of_a_device_that_is_absent_here(run: Run) -> None:
    words = ("check", "migration", "two.xml", "--snapshot", "host2.json", "--to", "host1.json")
    text = run(*words)
    assert text.status == 1
    assert "0000:81:00.3 -> -: its counterpart is unknown: this host does not have it\n" in (
        text.stdout
    )
    assert "host1.json: unknown whether it fits\n" in text.stdout
    (_, of_target) = text.stdout.split("0000:81:00.2 -> ")
    assert of_target.count("0000:81:00.3") == 1, "once in the target"
    (target,) = json.loads(run(*words, "--format", "json").stdout)["targets"]
    assert target["fits"] is None
    assert [place["is_ready"] for place in target["places"]] == [True, None]


@pytest.mark.usefixtures("directory")
def test_the_same_in_python(run: Run) -> None:
    host, other = (vfiomgr.Host.from_snapshot(name) for name in ("host1.json", "host2.json"))
    report = vfiomgr.libvirt.check_migration(host, "two.xml", {"host2.json": other})
    printed = json.loads(run(*TWO, "--to", "host2.json", "--format", "json").stdout)
    (target,) = printed["targets"]
    assert report.is_blocked == printed["is_blocked"]
    assert [one.rule for one in report.targets[0].report.findings] == [
        finding["id"] for finding in target["findings"]
    ]
    assert str(vfiomgr.libvirt.migratability(host, VF)).startswith("yes: mlx5_vfio_pci")


ASK = ("check", "migration", "test", "--snapshot", "host1.json", "--ask-qemu")


def answer_of_qemu(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
    """Let QEMU answer this; libvirt's test driver has no QEMU."""
    monkeypatch.setattr(_Guarded, "ask_qemu", lambda _domain, _text: json.dumps(answer))


def test_what_qemu_refuses(directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*ASK, "--connect", node_uri(directory))
    answer_of_qemu(monkeypatch, **{"return": {"blocked-reasons": ["non-migratable device: x"]}})
    blocked = run(*words)
    assert blocked.status == 1
    assert "blocker: QEMU refuses to migrate test: non-migratable device: x\n" in blocked.stdout
    answer_of_qemu(monkeypatch, **{"return": {}})
    assert run(*words).status == 0
    answer_of_qemu(monkeypatch, error={"class": "CommandNotFound", "desc": "not found"})
    failed = run(*words)
    assert "error: cannot ask QEMU of test: not found\n" in failed.stderr
    unasked = run(*words[:-3], *words[-2:], "-v")
    assert "refuses: pass --ask-qemu (it taints the domain)" in unasked.stderr


def test_the_test_driver_has_no_qemu(directory: Path, run: Run) -> None:
    answer = run(*ASK, "--connect", node_uri(directory))
    assert answer.status != 0
    assert "libvirt does not support the operation: " in answer.stderr


def test_only_qemu_of_a_running_domain_is_asked(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run("check", "migration", "one.xml", "--snapshot", "host1.json", "--ask-qemu")
    assert file.status == 2
    assert "cannot ask QEMU of one.xml: not a running domain of libvirt" in file.stderr
    uri = node_uri(directory)
    with connect(uri) as connection:
        known = connection.hypervisor()
    old = replace(known, qemu=Version(5, 2))
    monkeypatch.setattr("vfiomgr.libvirt.commands.migration.asked", lambda *_, **__: (old, ""))
    answer_of_qemu(monkeypatch, **{"return": {}})
    refused = run(*ASK, "--connect", uri)
    assert refused.status == 2
    assert "QEMU 5.2.0 does not list why it refuses to migrate (added in 6.0.0)" in refused.stderr
    off = replace(known, domains=tuple(replace(one, is_active=False) for one in known.domains))
    monkeypatch.setattr("vfiomgr.libvirt.commands.migration.asked", lambda *_, **__: (off, ""))
    assert "cannot ask QEMU of test: not a running" in run(*ASK, "--connect", uri).stderr


@pytest.mark.usefixtures("directory")
def test_mistakes(run: Run) -> None:
    missing = run("check", "migration", "one.xml", "--to", "none.json", "--snapshot", "host1.json")
    assert missing.status == 2
    assert "none.json" in missing.stderr
    named = run("check", "migration", "win11", "--snapshot", "host1.json")
    assert named.status == 2
    assert "virsh dumpxml" in named.stderr
    wrong = run("check", "migration", "one.xml", "--to", "one.xml", "--snapshot", "host1.json")
    assert wrong.status != 0
