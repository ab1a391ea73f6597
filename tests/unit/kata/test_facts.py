"""The installed Kata, found below a root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.kata.facts import read_configuration, read_installation
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

SHARED = "opt/kata/share/defaults/kata-containers"


def write(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Kata's own build, with a configuration of a host that links to it."""
    write(tmp_path, "opt/kata/VERSION", "4.1.0\n")
    write(tmp_path, "opt/kata/bin/containerd-shim-kata-v2")
    write(tmp_path, "opt/kata/runtime-rs/bin/containerd-shim-kata-v2")
    write(tmp_path, f"{SHARED}/configuration-qemu.toml", "[hypervisor.qemu]\n")
    write(tmp_path, f"{SHARED}/configuration-clh.toml", "[hypervisor.clh]\n")
    (tmp_path / SHARED / "configuration.toml").symlink_to("configuration-qemu.toml")
    (tmp_path / "etc/kata-containers").mkdir(parents=True)
    target = f"/{SHARED}/configuration.toml"
    (tmp_path / "etc/kata-containers/configuration.toml").symlink_to(target)
    return tmp_path


def test_version_shims_and_configurations_are_found(root: Path) -> None:
    found = read_installation(HostTree(root))
    assert (found.version, found.version_source) == (Version(4, 1), "/opt/kata/VERSION")
    assert found.runtimes == {"go", "rs"}
    assert found.default_runtime(Version(3, 31)) == "go"
    assert found.default_runtime(Version(4, 0)) == "rs"
    assert found.configurations[0].path == "/etc/kata-containers/configuration.toml"


def test_the_only_runtime_that_is_there_is_meant(root: Path) -> None:
    go = root / "opt/kata/bin/containerd-shim-kata-v2"
    go.unlink()
    assert read_installation(HostTree(root)).default_runtime(Version(3, 31)) == "rs"
    (root / "opt/kata/runtime-rs/bin/containerd-shim-kata-v2").rename(go)
    assert read_installation(HostTree(root)).default_runtime(Version(4, 1)) == "go"


def test_links_lead_on_within_the_tree_and_name_the_directory_of_the_drop_ins(root: Path) -> None:
    write(root, f"{SHARED}/config.d/50-x.toml", "x")
    write(root, f"{SHARED}/config.d/50-x.toml.bak", "y")
    found = read_configuration(HostTree(root), HostPath("/etc/kata-containers/configuration.toml"))
    assert found is not None
    assert found.resolved == f"/{SHARED}/configuration-qemu.toml"
    assert found.drop_in_directory == f"/{SHARED}/config.d"
    assert [path for path, _ in found.drop_ins] == [
        f"/{SHARED}/config.d/50-x.toml",
        f"/{SHARED}/config.d/50-x.toml.bak",
    ]
    assert found.neighbours == (f"/{SHARED}/configuration-clh.toml",)


def test_links_that_lead_nowhere_or_in_circles_are_no_configuration(tmp_path: Path) -> None:
    directory = tmp_path / "etc/kata-containers"
    directory.mkdir(parents=True)
    (directory / "configuration.toml").symlink_to("configuration.toml")
    (directory / "gone.toml").symlink_to("../../../../../nowhere")
    tree = HostTree(tmp_path)
    assert read_configuration(tree, HostPath("/etc/kata-containers/configuration.toml")) is None
    assert read_configuration(tree, HostPath("/etc/kata-containers/gone.toml")) is None


def test_where_nothing_is_installed_nothing_is_found(tmp_path: Path) -> None:
    found = read_installation(HostTree(tmp_path))
    assert (found.version, found.runtimes, found.configurations) == (None, frozenset(), ())
    assert found.default_runtime(Version(3, 2)) == "go"


def test_another_hosts_programs_are_never_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "opt/kata/VERSION").unlink()
    monkeypatch.setattr(HostTree, "run", lambda *_: pytest.fail("a program was run"))
    assert read_installation(HostTree(root)).version is None


@pytest.mark.parametrize(
    "told",
    [
        "kata-runtime  : 3.2.0\n   commit   : abc\n   OCI specs: 1.0.2-dev\n",
        'Kata Containers containerd shim (Golang): id: "io.containerd.kata.v2", version: 3.2.0, c',
        "Kata Containers containerd shim (Rust): id: io.containerd.kata.v2, version: 3.2.0-rc1",
    ],
)
def test_a_program_of_the_machine_tells_its_version(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    (root / "opt/kata/VERSION").unlink()
    monkeypatch.setattr(HostTree, "runs_programs", True)
    monkeypatch.setattr(HostTree, "run", lambda *_: told)
    found = read_installation(HostTree(root))
    assert found.version == Version(3, 2)
    assert found.version_source.endswith("containerd-shim-kata-v2 --version")
