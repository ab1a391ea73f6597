"""`vfiomgr libvirt edit DOMAIN` changes what the real libvirt has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.fakes.hosts import workstation
from vfiomgr.errors import HostError, UsageError
from vfiomgr.libvirt.commands.edit import DomainPlace
from vfiomgr.main.program import cli
from vfiomgr.snapshot.session import Session

if TYPE_CHECKING:
    from pathlib import Path

DOMAIN = """
<node><domain type='test'>
  <name>guest</name><uuid>5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11</uuid><memory>65536</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><graphics type='vnc' passwd='s3cret'/></devices>
</domain></node>
"""


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A libvirt with one domain; each connection to it begins anew."""
    monkeypatch.setattr(Session, "is_live", True)
    node = tmp_path / "node.xml"
    node.write_text(DOMAIN)
    return f"test://{node}"


def edit(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    kernel = workstation(tmp_path)
    command = ["--root", kernel.root, "libvirt", "edit", *arguments]
    result = CliRunner().invoke(cli, command)
    return result.exit_code, result.output


def test_the_definition_gets_the_device(tmp_path: Path, uri: str) -> None:
    status, output = edit(tmp_path, "guest", "--connect", uri, "--add", "02:00.0")
    assert (status, "added root port 1 for 0000:02:00.0\n" in output) == (0, True)
    assert f"vfiomgr libvirt edit guest --connect {uri} --remove 0000:02:00.0" in output


def test_a_dry_run_reads_no_passwords(tmp_path: Path, uri: str) -> None:
    status, output = edit(tmp_path, "--dry-run", "guest", "--connect", uri, "--add", "02:00.0")
    assert (status, "+    <hostdev" in output, "s3cret" in output) == (0, True, False)


def test_passwords_are_kept_and_a_change_by_another_is_seen(uri: str) -> None:
    before = DomainPlace("guest", uri, with_secrets=True).read().text
    assert b"passwd='s3cret'" in before
    with pytest.raises(HostError, match="was changed meanwhile by another program"):
        DomainPlace("guest", uri, with_secrets=True).write(before + b" ", before + b"  ")
    DomainPlace("guest", uri, with_secrets=True).write(before, before)


def test_a_domain_that_is_not_there(tmp_path: Path, uri: str) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "--root",
            workstation(tmp_path).root,
            "libvirt",
            "edit",
            "none",
            "-c",
            uri,
            "--remove",
            "1:0.0",
        ],
    )
    assert isinstance(result.exception, UsageError)


def test_output_is_for_files(tmp_path: Path, uri: str) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "--root",
            workstation(tmp_path).root,
            "libvirt",
            "edit",
            "guest",
            "-c",
            uri,
            "--remove",
            "1:0.0",
            "--output",
            "-",
        ],
    )
    assert isinstance(result.exception, UsageError)
