"""The real containerd reads every configuration that is written for it, and nothing else otherwise.

`containerd config dump` needs no daemon. Debian's is 1.6; how later ones merge files is in
tests/fakes/containerd.py.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.runtimes import (
    CONFIGURATION,
    MAIN,
    SHIM,
    install,
    kata,
    prepare,
    prepare_removal,
    uninstall,
)
from vfiomgr import api
from vfiomgr.errors import Refusal
from vfiomgr.host.tree import HostTree
from vfiomgr.model.runtime import Wish
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vfiomgr.host.tree import ProgramAnswer

_CONTAINERD = shutil.which("containerd") or "containerd"  # tests/lab/packages.txt
_CRI = "io.containerd.grpc.v1.cri"
_SECONDS = 20

MINIMAL = "version = 2\n"
SPARSE = f"""\
# a node's own
version = 2
[plugins]
  [plugins."{_CRI}"]
    sandbox_image = "registry.example/pause:3.9"  # of our mirror
    [plugins."{_CRI}".cni]
      bin_dir = "/usr/lib/cni"
# the end
"""
KUBERNETES = f"""\
version = 2
imports = ["conf.d/*.toml"]
[plugins."{_CRI}".containerd]
  snapshotter = "native"
  default_runtime_name = "runc"
  [plugins."{_CRI}".containerd.runtimes]
    [plugins."{_CRI}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."{_CRI}".containerd.runtimes.runc.options]
        SystemdCgroup = true
[plugins."{_CRI}".registry]
  config_path = "/etc/containerd/certs.d"
"""
OUT_OF_ORDER = f"""\
version = 2
[plugins."{_CRI}".registry]
  config_path = "/x" # first
[timeouts]
  "io.containerd.timeout.shim.load" = "7s"
[plugins."{_CRI}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[debug]
  level = "info"
"""
NVIDIA = f"""\
version = 2

[plugins]

  [plugins."{_CRI}"]

    [plugins."{_CRI}".containerd]
      default_runtime_name = "nvidia"

      [plugins."{_CRI}".containerd.runtimes]

        [plugins."{_CRI}".containerd.runtimes.nvidia]
          privileged_without_host_devices = false
          runtime_engine = ""
          runtime_root = ""
          runtime_type = "io.containerd.runc.v2"

          [plugins."{_CRI}".containerd.runtimes.nvidia.options]
            BinaryName = "/usr/bin/nvidia-container-runtime"
            SystemdCgroup = true

        [plugins."{_CRI}".containerd.runtimes.runc]
          runtime_type = "io.containerd.runc.v2"

          [plugins."{_CRI}".containerd.runtimes.runc.options]
            SystemdCgroup = true
"""


class Machine(HostTree):
    """A host in a directory, whose containerd is the one of the machine."""

    @property
    def runs_programs(self) -> bool:
        """Its programs are shown files at their real places."""
        return True

    def ask(self, command: Sequence[str], seconds: float = _SECONDS) -> ProgramAnswer | None:
        """Have a program of the machine run."""
        return HostTree("/").ask(command, seconds)


def default() -> str:
    """The configuration that this containerd has without any file."""
    answer = subprocess.run(
        [_CONTAINERD, "config", "default"], capture_output=True, text=True, check=True
    )
    return answer.stdout


def commented() -> str:
    """The default one, with each line commented, as some packages bring it."""
    lines = (f"# {line}" if "=" in line else f"#{line}" for line in default().splitlines())
    return "\n".join(["version = 2", *lines]) + "\n"


MAINS: dict[str, Any] = {
    "none": lambda: None,
    "empty": lambda: "",
    "minimal": lambda: MINIMAL,
    "default": default,
    "commented": commented,
    "sparse": lambda: SPARSE,
    "kubernetes": lambda: KUBERNETES,
    "out-of-order": lambda: OUT_OF_ORDER,
    "nvidia": lambda: NVIDIA,
    "no-newline": lambda: SPARSE.rstrip("\n"),
    "crlf": lambda: SPARSE.replace("\n", "\r\n"),
}


@pytest.fixture(params=MAINS)
def main(request: pytest.FixtureRequest) -> Any:
    """Each main file."""
    return MAINS[request.param]()


def host(tmp_path: Path, main: str | None, **drop_ins: str) -> Machine:
    """A host with a main file, and others beside it."""
    for name, content in {
        MAIN: main,
        SHIM: "",
        CONFIGURATION: "",
        **{f"{MAIN.parent}/conf.d/{name}.toml": text for name, text in drop_ins.items()},
    }.items():
        if content is not None:
            place = tmp_path / str(name).lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode())
    return Machine(tmp_path)


def dump(tree: Machine) -> dict[str, Any]:
    """What containerd reads of the files as they are on the disk."""
    place = tree.locate(MAIN)
    command = [_CONTAINERD, "config", "default"]
    if tree.exists(MAIN):
        command = [_CONTAINERD, "--config", place, "config", "dump"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "unknown key" not in answer.stderr
    return tomllib.loads(answer.stdout)


def read(tree: Machine) -> bytes | None:
    return tree.read_whole(MAIN)


def test_it_reads_the_handler_and_all_else_as_before(tmp_path: Path, main: str | None) -> None:
    tree = host(tmp_path, main)
    before = dump(tree)
    prepared = prepare(tree)
    assert prepared.unchecked == ()
    api.apply_prepared(prepared, tree=tree)
    after = dump(tree)
    runtimes = after["plugins"][_CRI]["containerd"]["runtimes"]
    entry = runtimes.pop("kata-vfio")
    assert entry["runtime_type"] == "io.containerd.kata-vfio.v2"
    assert entry["runtime_path"] == SHIM
    assert entry["options"]["ConfigPath"] == CONFIGURATION
    assert entry["privileged_without_host_devices"] is True
    assert entry["pod_annotations"] == ["io.katacontainers.*", "cdi.k8s.io/*"]
    old = before["plugins"][_CRI]["containerd"]["runtimes"]
    assert runtimes.keys() == old.keys()
    for name, table in old.items():  # a table of options that says nothing is not shown
        zeros = {key for key, value in table["options"].items() if not value}
        table["options"] = {k: v for k, v in table["options"].items() if k not in zeros}
        shown = runtimes[name]["options"]
        runtimes[name]["options"] = {k: v for k, v in shown.items() if k not in zeros}
    before.pop("imports")
    after.pop("imports")
    assert after == before


def test_a_second_time_nothing_is_written_and_taking_it_back_gives_the_same_bytes(
    tmp_path: Path, main: str | None
) -> None:
    tree = host(tmp_path, main)
    install(tree)
    once = read(tree)
    assert prepare(tree).intent.changes == ()
    assert read(tree) == once
    uninstall(tree)
    assert read(tree) == (None if main is None else main.encode())
    assert prepare_removal(tree).intent.changes == ()


@pytest.mark.parametrize("first", ["kata-vfio", "crun"])
@pytest.mark.parametrize("name", ["none", "minimal", "kubernetes"])
def test_two_entries_come_and_go(tmp_path: Path, name: str, first: str) -> None:
    main = MAINS[name]()
    tree = host(tmp_path, main)
    install(tree)
    install(tree, Wish("containerd", "crun", "/usr/bin/crun", set_default=True))
    read_now = dump(tree)["plugins"][_CRI]["containerd"]
    assert read_now["default_runtime_name"] == "crun"
    assert {"runc", "crun", "kata-vfio"} <= read_now["runtimes"].keys()
    last = ({"kata-vfio", "crun"} - {first}).pop()
    uninstall(tree, first)
    assert last in dump(tree)["plugins"][_CRI]["containerd"]["runtimes"]
    uninstall(tree, last)
    assert tomllib.loads((read(tree) or b"").decode()) == tomllib.loads(main or "")


def test_options_of_runc_go_along(tmp_path: Path) -> None:
    tree = host(tmp_path, KUBERNETES)
    install(tree, Wish("containerd", "crun", "/usr/bin/crun"))
    entry = dump(tree)["plugins"][_CRI]["containerd"]["runtimes"]["crun"]
    assert entry["options"] == {"BinaryName": "/usr/bin/crun", "SystemdCgroup": True}


@pytest.mark.parametrize("pattern", ["/etc/containerd/conf.d/*.toml", "conf.d/99-nvidia.toml"])
def test_a_drop_in_that_holds_the_table_of_cri_is_where_the_handler_goes(
    tmp_path: Path, pattern: str
) -> None:
    pattern = pattern.replace("/etc", f"{tmp_path}/etc", 1)
    main = KUBERNETES.replace("conf.d/*.toml", pattern)
    tree = Machine("/")
    place = host(tmp_path, main, **{"99-nvidia": NVIDIA}).locate(MAIN)
    prepared = api.prepare_entry(tree, api.locate_runtime(tree, "containerd", place), kata(), "")
    (written,) = (c for c in prepared.intent.changes if c.path.endswith("toml"))
    assert written.path == f"{tmp_path}/etc/containerd/conf.d/99-nvidia.toml"
    (tmp_path / "etc/containerd/conf.d/99-nvidia.toml").write_text(written.after or "")
    runtimes = dump(host(tmp_path, main))["plugins"][_CRI]["containerd"]["runtimes"]
    assert set(runtimes) == {"nvidia", "runc", "kata-vfio"}


def test_before_2_0_a_relative_pattern_finds_nothing_beside_the_file(tmp_path: Path) -> None:
    tree = host(tmp_path, KUBERNETES, **{"99-nvidia": NVIDIA})
    assert set(dump(tree)["plugins"][_CRI]["containerd"]["runtimes"]) == {"runc"}
    install(tree)
    assert b"kata-vfio" in (read(tree) or b"")
    runtimes = dump(tree)["plugins"][_CRI]["containerd"]["runtimes"]
    assert set(runtimes) == {"runc", "kata-vfio"}


def test_what_a_drop_in_does_to_1_6_is_seen_before_it_is_written(tmp_path: Path) -> None:
    """As for containerd 2, which merges: this one would lose what the main file says of CRI."""
    tree = host(tmp_path, SPARSE)
    place = api.locate_runtime(tree, "containerd", None, Version(2, 1))
    assert place.other is not None, "1.6 is installed, and would not be asked"
    place = replace(place, other=None)
    before = read(tree)
    with pytest.raises(Refusal, match=r"would read other settings differently too: .*cni"):
        api.prepare_entry(tree, place, kata(), "")
    assert read(tree) == before


def test_a_configuration_that_it_cannot_read_is_told_in_its_words(tmp_path: Path) -> None:
    tree = host(tmp_path, 'version = 2\nroot = ["no", "text"]\n')
    with pytest.raises(
        Exception, match=r"containerd cannot read its configuration: .*Can't convert"
    ):
        prepare(tree)


def test_version_1_is_refused(tmp_path: Path) -> None:
    tree = host(tmp_path, 'disabled_plugins = ["cri"]\n')
    with pytest.raises(Refusal, match="version 1"):
        prepare(tree)
