"""The packages: built, installed and run in empty roots of Debian 12 and 13."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import click
import pytest

from tests.debian import root_archive
from tests.fakes.hosts import workstation
from tests.integration.installed import Built, Root
from tools.package import rpm, tree
from tools.package.__main__ import build
from vfiomgr import __version__
from vfiomgr.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root directory")
GPU = "0000:01:00.0"
RELEASES = {"bookworm": "Python 3.11", "trixie": "Python 3.13"}


@pytest.fixture(scope="module", params=RELEASES)
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Root]:
    """An empty system of a release, with a recorded host in /tmp/host."""
    place = tmp_path_factory.mktemp(request.param)
    archive = root_archive(request.param, "python3", "man-db")
    subprocess.run(["tar", "-C", place, "--exclude=./dev/*", "-xf", archive], check=True)
    (place / "dev/null").touch()  # a file will do: the roots may lie where no device may
    kernel = workstation(tmp_path_factory.mktemp("host"), vfio_loaded=True)
    shutil.copytree(kernel.root, place / "tmp/host", symlinks=True)
    (place / "tmp/host/run/systemd/system").mkdir(parents=True, exist_ok=True)
    yield Root(place)
    shutil.rmtree(place)


def check_installed(root: Root, completions: Mapping[str, str]) -> None:
    """What a user does first; `completions` are the scripts of the shells, if there are any."""
    assert root.run("vfiomgr", "--version") == f"vfiomgr, version {__version__}\n"
    listed = root.run("vfiomgr", "list", "--root", "/tmp/host", "--format", "json")
    assert GPU in [item["address"] for item in json.loads(listed)["items"]]
    plan = root.run("vfiomgr", "bind", GPU, "--persist", "--root", "/tmp/host", "--dry-run")
    assert "/usr/lib/vfiomgr/bin/python -I -m vfiomgr persist watch" in plan
    has_completion = (
        cli.get_command(click.Context(cli, **cli.context_settings), "completion") is not None
    )
    assert [(root.place / path).exists() for path in completions.values()] == [has_completion] * 3


def test_the_deb(root: Root, built: Built, request: pytest.FixtureRequest) -> None:
    before = root.files()
    shutil.copy(built.deb, root.place / "tmp/vfiomgr.deb")
    root.run("dpkg", "-i", "/tmp/vfiomgr.deb")
    python = root.run("/usr/lib/vfiomgr/bin/python", "--version")
    assert python.startswith(RELEASES[request.node.callspec.params["root"]])
    searched = root.run("/usr/lib/vfiomgr/bin/python", "-I", "-c", "print(*__import__('sys').path)")
    own = searched.index(RELEASES[request.node.callspec.params["root"]][-4:] + "/site-packages")
    assert own < searched.index("/usr/lib/python3/dist-packages"), "where python3-libvirt is"
    check_installed(root, tree.COMPLETIONS)
    assert "vfiomgr - " in root.run("man", "vfiomgr")
    assert "--persist" in root.run("man", "vfiomgr-bind")
    assert "OK" in root.run("sh", "-c", "dpkg --verify vfiomgr && echo OK")
    root.run("dpkg", "-r", "vfiomgr")
    assert root.files() == before
    root.run("dpkg", "--purge", "vfiomgr")
    assert "vfiomgr" not in (root.place / "var/lib/dpkg/status").read_text()


def test_what_stays_is_named(root: Root, built: Built) -> None:
    """Rules that commands wrote do not work without the package that is removed."""
    shutil.copy(built.deb, root.place / "tmp/vfiomgr.deb")
    root.run("dpkg", "-i", "/tmp/vfiomgr.deb")
    rule = root.place / f"etc/udev/rules.d/05-vfiomgr-{GPU}.rules"
    rule.parent.mkdir(parents=True, exist_ok=True)
    rule.touch()
    said = root.run("dpkg", "--purge", "vfiomgr")
    rule.unlink()
    assert f"05-vfiomgr-{GPU}.rules stays" in said


def test_the_rpm(root: Root, built: Built) -> None:
    """Without the dependencies: rpm of Debian knows no package of the root."""
    before = root.files()
    command = ["rpm", "--root", str(root.place), "--nodeps"]
    subprocess.run([*command, "-i", str(built.rpm)], check=True, capture_output=True)
    check_installed(root, rpm.COMPLETIONS)
    subprocess.run([*command, "-e", "vfiomgr"], check=True, capture_output=True)
    assert root.files() == before


def test_what_the_rpm_says(built: Built) -> None:
    asked = ["rpm", "--query", "--package", str(built.rpm)]
    files = subprocess.run([*asked, "--list"], check=True, capture_output=True, text=True)
    names = files.stdout.splitlines()
    assert {"/usr/bin/vfiomgr", "/usr/share/man/man1/vfiomgr-bind.1.gz"} <= set(names)
    assert "/usr/share/man/man1" not in names, "a directory of the system"
    needs = subprocess.run([*asked, "--requires"], check=True, capture_output=True, text=True)
    assert {"python3 >= 3.11", "python3 < 3.15"} <= set(needs.stdout.splitlines())


def test_lintian_finds_no_error(built: Built) -> None:
    command = ["lintian", "--allow-root", "--fail-on", "error", str(built.deb)]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_manual_has_no_warnings(built: Built) -> None:
    pages = sorted((built.work / "tree/usr/share/man/man1").iterdir())
    text = subprocess.run(["zcat", *pages], check=True, capture_output=True).stdout
    for command in (["groff", "-man", "-ww", "-z", "-Tutf8"], ["mandoc", "-Tlint", "-Wwarning"]):
        said = subprocess.run(command, check=False, input=text, capture_output=True)
        assert (said.stdout, said.stderr) == (b"", b""), said


def test_packages_are_reproducible(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes come out in another place, for a user of another umask."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", os.environ["SOURCE_DATE_EPOCH"])
    before = os.umask(0o077)
    try:
        again = build(tmp_path / "dist", tmp_path / "work")
    finally:
        os.umask(before)
    for one, other in zip((built.wheel, built.deb, built.rpm), again, strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes(), one.name
