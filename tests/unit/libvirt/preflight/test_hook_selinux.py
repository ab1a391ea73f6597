"""SELinux and the hook: a wrong type of the script, and the boolean that is off by default."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from tests.unit.libvirt.preflight.situations import domain, found, host, libvirt, xml
from tests.unit.libvirt.preflight.test_hook import INSTALLED, WAITING, marked
from vfiomgr.libvirt.preflight.host_files import NO_FILES, read_files
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.paths import SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.documents.text import TextFile
    from vfiomgr.rules.runner import Report

ENFORCING = "sys/fs/selinux/enforce: 1"
BOOLEAN = "sys/fs/selinux/booleans/virt_hooks_unconfined"
OFF, ON = f"{BOOLEAN}: 0 0", f"{BOOLEAN}: 1 1"
DIVIDED = "run/libvirt/libvirt-sock:\nrun/libvirt/virtqemud-sock:"
RULES = {"hook-label", "hook-boolean"}


def labelled(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Give every file a type; None where labels are not readable."""

    def read(_path: str, _name: str, **_: object) -> bytes:
        if kind is None:
            raise PermissionError
        return f"system_u:object_r:{kind}:s0\0".encode()

    monkeypatch.setattr(os, "getxattr", read)


def judge(
    root: Path,
    *lines: str,
    text: str | None = None,
    installed: tuple[TextFile, ...] = INSTALLED,
) -> Report:
    """What is found of a domain on a host with these files."""
    files = read_files(tree_of(root, "\n".join(lines)), [])
    one = domain(marked() if text is None else text)
    (report,) = preflight(host(*WAITING, files=installed), [one], libvirt(), {}, files)
    return report


def rules(report: Report) -> set[str]:
    """The rules about SELinux and the hook that have findings."""
    return RULES & {finding.rule for finding in report.findings}


def test_a_wrong_type_blocks_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(monkeypatch, "virt_etc_t")
    report = judge(tmp_path, ENFORCING, ON, DIVIDED)
    assert rules(report) == {"hook-label"}
    finding = found(report, "hook-label")
    assert finding is not None
    assert finding.severity == "blocker"
    assert f"{SCRIPT}: virt_etc_t" in finding.evidence
    assert finding.remedy == f"restorecon -v /etc/libvirt/hooks /etc/libvirt/hooks/qemu.d {SCRIPT}"


def test_the_boolean_blocks_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(monkeypatch, "virt_hook_t")
    report = judge(tmp_path / "off", ENFORCING, OFF, DIVIDED)
    assert rules(report) == {"hook-boolean"}
    finding = found(report, "hook-boolean")
    assert finding is not None
    assert finding.severity == "blocker"
    assert f"/{BOOLEAN}: 0" in finding.evidence
    assert finding.remedy == "setsebool -P virt_hooks_unconfined on"
    assert rules(judge(tmp_path / "on", ENFORCING, ON, DIVIDED)) == set()


def test_both_are_found_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled(monkeypatch, "etc_t")
    assert rules(judge(tmp_path, ENFORCING, OFF)) == RULES


@pytest.mark.parametrize(
    "lines",
    [
        ("sys/fs/selinux/enforce: 0", OFF, DIVIDED),
        (OFF, DIVIDED),
        (ENFORCING, DIVIDED),
        (ENFORCING, OFF, "run/libvirt/libvirt-sock:"),
    ],
    ids=["permissive", "no SELinux", "a policy without the boolean", "libvirtd is unconfined"],
)
def test_where_nothing_is_denied_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    labelled(monkeypatch, "etc_t")
    report = judge(tmp_path, *lines)
    assert rules(report) == set()
    assert not any("SELinux" in text for text in report.not_checked)


def test_a_domain_without_the_hook_or_a_hook_that_is_absent_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(monkeypatch, "etc_t")
    assert rules(judge(tmp_path / "a", ENFORCING, OFF, text=xml())) == set()
    report = judge(tmp_path / "b", ENFORCING, OFF, installed=())
    assert rules(report) == set()
    assert found(report, "hook-not-installed") is not None


def test_what_cannot_be_read_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(monkeypatch, None)
    report = judge(tmp_path, ENFORCING, f"{BOOLEAN}:")
    assert rules(report) == set()
    assert f"the SELinux label of {SCRIPT}: not readable" in report.not_checked
    assert "the SELinux boolean virt_hooks_unconfined: not readable" in report.not_checked


def test_rules_of_the_policy_for_virtqemud_are_never_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(monkeypatch, "virt_hook_t")
    (line,) = (
        text for text in judge(tmp_path, ENFORCING, ON).not_checked if "SELinux policy" in text
    )
    assert "ausearch -m avc -c rpc-virtqemud" in line


def test_a_guest_that_libvirt_does_not_start_has_no_hook() -> None:
    assert NO_FILES.hook_security is None
