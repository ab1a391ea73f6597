"""The packages: built, installed and run in empty roots of Debian 12 and 13."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import click
import pytest

from tests.debian import root_archive
from tests.fakes.hosts import workstation
from tests.integration.installed import WHEELS, Built, Root
from tests.unit.devices import pci_device
from tests.unit.node.simulation.made import claim, exactly, pods
from tools.package import rpm, tree
from tools.package.__main__ import build
from tools.package.arch import run_makepkg
from tools.package.tree import HOME
from tools.package.wheels import libraries_of, own_architecture, unpack
from vfiomgr import __version__
from vfiomgr.main.program import cli
from vfiomgr.persistence.model import PersistedBinding, render_rule

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


def start_agent(root: Root) -> tuple[str, str]:
    """What the agent tells systemd when the unit of the package starts it, and what it prints."""
    unit = (root.place / "usr/lib/systemd/system/vfiomgr-node.service").read_text()
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    (root.place / "var/lib/kubelet/device-plugins").mkdir(parents=True, exist_ok=True)
    command = shlex.split(lines["ExecStart"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(root.place / "tmp/notify"))
        systemd.settimeout(300)
        agent = root.start_on("/tmp/host", "env", "NOTIFY_SOCKET=/tmp/notify", *command)
        try:
            told = systemd.recv(1000).decode()
        except TimeoutError:
            told = "no message"
        agent.terminate()
        _, said = agent.communicate()
    (root.place / "tmp/notify").unlink()
    for directory in ("var/lib/kubelet", "run/vfiomgr"):
        shutil.rmtree(root.place / directory)
    return told, said


def check_node(root: Root) -> None:
    """The agent starts, and the scheduler is simulated, without pip and without a network."""
    told, said = start_agent(root)
    assert "READY=1" in told, said
    (root.place / "tmp/pods.yaml").write_text(claim(f"[{exactly()}]") + pods())
    recorded = root.run("vfiomgr", "snapshot", "--root", "/tmp/host")
    (root.place / "tmp/node.json").write_text(recorded)
    command = "vfiomgr node simulate /tmp/node.json --pods /tmp/pods.yaml --allow-pending"
    simulated = root.run(*command.split())
    assert "guest" in simulated


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
    check_node(root)
    assert "vfiomgr - " in root.run("man", "vfiomgr")
    assert "--persist" in root.run("man", "vfiomgr-bind")
    assert "OK" in root.run("sh", "-c", "dpkg --verify vfiomgr && echo OK")
    root.run("dpkg", "-r", "vfiomgr")
    assert root.files() == before
    root.run("dpkg", "--purge", "vfiomgr")
    assert "vfiomgr" not in (root.place / "var/lib/dpkg/status").read_text()


@pytest.fixture
def installed(root: Root, built: Built) -> Iterator[Root]:
    """A system with the .deb, with systemd as it seems, whose systemctl always fails."""
    shutil.copy(built.deb, root.place / "tmp/vfiomgr.deb")
    root.run("dpkg", "-i", "/tmp/vfiomgr.deb")
    systemctl = root.place / "usr/bin/systemctl"
    assert not systemctl.exists()
    systemctl.write_text("#!/bin/sh\nexit 1\n")
    systemctl.chmod(0o755)
    (root.place / "run/systemd/system").mkdir(parents=True, exist_ok=True)
    yield root
    systemctl.unlink()
    root.run("dpkg", "--purge", "vfiomgr")
    for name in ("etc/udev", "etc/libvirt", "run/systemd", "sys/bus", "var/lib/vfiomgr"):
        shutil.rmtree(root.place / name, ignore_errors=True)


def put(root: Root, path: str, text: str = "") -> Path:
    place = root.place / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


RULE = f"/etc/udev/rules.d/05-vfiomgr-{GPU}.rules"
HOOK = "/etc/libvirt/hooks/qemu.d/50-vfiomgr"


def test_a_removal_succeeds_where_systemctl_fails_and_what_stays_has_a_remedy(
    installed: Root,
) -> None:
    """The remedy does not need the program, which is gone by then."""
    rule, hook = put(installed, RULE), put(installed, HOOK)
    said = installed.run("dpkg", "-r", "vfiomgr")
    assert "systemctl failed; stop its services: systemctl stop vfiomgr-" in said
    assert f"rm {RULE} {HOOK}" in said
    assert rule.exists()
    assert hook.exists()
    assert not (installed.place / "usr/bin/vfiomgr").exists()


def test_before_its_removal_the_package_names_uninstall(installed: Root) -> None:
    put(
        installed,
        RULE,
        render_rule(PersistedBinding(pci_device(GPU).identity, "vfio-pci", "vfio_pci")),
    )
    said = installed.run_on("/tmp/host", "dpkg", "-r", "vfiomgr")
    assert "install the package again, and run: vfiomgr uninstall" in said


def test_purge_keeps_the_journal_of_an_interrupted_operation(installed: Root) -> None:
    path = "/var/lib/vfiomgr/journal/000000000001.jsonl"
    journal = put(installed, path, '{"event":"plan"}\n{"event":"begin","step":0}\n')
    said = installed.run("dpkg", "--purge", "vfiomgr")
    assert f"{path} belongs to an interrupted operation" in said
    assert journal.exists()


@pytest.mark.parametrize(("driver", "stays"), [("vfio-pci", True), ("nvidia", False)])
def test_purge_keeps_the_original_driver_of_a_device_only_while_it_is_on_vfio(
    installed: Root, driver: str, *, stays: bool
) -> None:
    origin = put(installed, f"/var/lib/vfiomgr/origins/{GPU}.json", "{}\n")
    put(
        installed,
        "/var/lib/vfiomgr/journal/000000000001.jsonl",
        '{"event":"end","outcome":"done"}\n',
    )
    device = installed.place / "sys/bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "driver").symlink_to(f"../../drivers/{driver}")
    said = installed.run("dpkg", "--purge", "vfiomgr")
    assert (f"{GPU} is still on vfio-pci; to return it: echo > " in said) == stays
    assert origin.exists() == stays


def test_the_rpm(root: Root, built: Built) -> None:
    """Without the dependencies: rpm of Debian knows no package of the root."""
    before = root.files()
    command = ["rpm", "--root", str(root.place), "--nodeps"]
    subprocess.run([*command, "-i", str(built.rpm)], check=True, capture_output=True)
    check_installed(root, rpm.COMPLETIONS)
    rule = put(root, RULE)
    said = subprocess.run([*command, "-e", "vfiomgr"], check=True, capture_output=True, text=True)
    assert f"rm {RULE}" in said.stdout + said.stderr
    assert rule.exists()
    shutil.rmtree(root.place / "etc/udev")
    assert root.files() == before


def pacman(root: Root, place: Path, *command: str) -> str:
    """What pacman of this machine says, with its records in a directory outside of the root."""
    (place / "database").mkdir(exist_ok=True)
    (place / "pacman.conf").write_text("[options]\nArchitecture = auto\nSigLevel = Never\n")
    options = {
        "--root": root.place,
        "--dbpath": place / "database",
        "--cachedir": place,
        "--config": place / "pacman.conf",
        "--logfile": place / "log",
    }
    arguments = (str(word) for option in options.items() for word in option)
    whole = ["pacman", "--noconfirm", "--noprogressbar", *arguments, *command]
    ran = subprocess.run(whole, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_package_for_arch(
    root: Root, built: Built, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Without the dependencies, since pacman of Debian knows no package of the root.

    The libraries lie where packages of the system have theirs.
    """
    python = RELEASES[request.node.callspec.params["root"]].lower().replace(" ", "")
    site = root.place / "usr/local/lib" / python / "dist-packages"
    (root.place / "usr/share/doc/other").mkdir(parents=True, exist_ok=True)
    before = root.files()
    unpack(libraries_of(WHEELS, own_architecture()), site)
    pacman(root, tmp_path, "-U", "--nodeps", "--nodeps", str(built.arch))
    check_installed(root, rpm.COMPLETIONS)
    assert list((root.place / HOME).rglob("vfiomgr/__pycache__")), "compiled when it is installed"
    found = root.run(
        "/usr/lib/vfiomgr/bin/python", "-I", "-c", "print(__import__('click').__file__)"
    )
    assert found.startswith(f"/usr/local/lib/{python}")
    rule = put(root, RULE)
    said = pacman(root, tmp_path, "-R", "vfiomgr")
    assert f"rm {RULE}" in said
    assert rule.exists()
    shutil.rmtree(root.place / "etc/udev")
    shutil.rmtree(site)
    site.mkdir()
    assert root.files() == before


def test_the_pkgbuild_builds_and_checks_the_package_as_any_user(
    built: Built, tmp_path: Path
) -> None:
    """With makepkg's own checks of a PKGBUILD, and the unit tests of `check()`."""
    run_makepkg(built.arch.parent / "arch", tmp_path, tmp_path / "work", "--check")
    assert (tmp_path / built.arch.name).exists()


def test_what_the_package_for_arch_says(built: Built) -> None:
    asked = ["bsdtar", "-xOf", str(built.arch), ".PKGINFO"]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {"arch = any", "license = Apache-2.0", "depend = python<3.15"} <= set(said)
    assert "depend = python-ruamel-yaml>=0.18" in said
    listed = subprocess.run(
        ["bsdtar", "-tvf", str(built.arch)], check=True, capture_output=True, text=True
    ).stdout
    owners = {tuple(line.split()[2:4]) for line in listed.splitlines()}
    assert owners == {("root", "root")}
    assert ".so" not in listed, "no module is compiled for one Python or architecture"
    place = built.arch.parent / "arch"
    assert {one.name for one in place.iterdir()} == {
        "PKGBUILD",
        "vfiomgr.install",
        f"vfiomgr-{__version__}.tar.gz",
    }


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
    monkeypatch.setenv("DPKG_DEB_COMPRESSOR_LEVEL", "0")
    before = os.umask(0o077)
    try:
        again = build(tmp_path / "dist", tmp_path / "work", WHEELS)
    finally:
        os.umask(before)
    wheel, deb, rpm_again, arch, collection = again
    before_it = (built.wheel, built.deb, built.rpm, built.collection)
    for one, other in zip(before_it, (wheel, deb, rpm_again, collection), strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes(), one.name
    assert _contents(built.arch) == _contents(arch)


def _contents(arch: Path) -> list[str]:
    """The files of a package for Arch, with their hashes; .BUILDINFO names its directory."""
    command = ["bsdtar", "-xOf", str(arch), ".MTREE"]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    lines = gzip.decompress(packed).decode().splitlines()
    assert len(lines) > 500
    return [line for line in lines if not line.startswith("./.BUILDINFO ")]
