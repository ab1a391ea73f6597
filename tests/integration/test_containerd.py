"""The real containerds read every configuration that is written for them, and all else as before.

`containerd config dump` needs no daemon. This machine's is 1.6 on Debian 12; 1.7 and 2.1 are of
later releases. What no package offers is in tests/fakes/containerd.py.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.containerd import CRI, RUNTIME
from tests.integration.programs import Machine, ask
from tests.unit.runtimes import CONFIGURATION, MAIN, SHIM, kata
from vfiomgr.containers.runtimes.apply import apply_prepared
from vfiomgr.containers.runtimes.entries import prepare_entry, prepare_removal
from vfiomgr.containers.runtimes.location import locate
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.containers.runtimes.values import without_zeros
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.errors import HostError, Refusal
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.debian import Program
    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.containers.runtimes.location import RuntimeLocation

_CRI = CRI
_MERGES = Version(2, 0)

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


def default(program: Program) -> str:
    """The configuration that a containerd has without any file."""
    return ask(program, "config", "default").output


def commented(program: Program) -> str:
    """The default one, with each line commented, as some packages bring it."""
    first = next(line for line in default(program).splitlines() if line.startswith("version"))
    lines = (f"# {line}" if "=" in line else f"#{line}" for line in default(program).splitlines())
    return "\n".join([first, *lines]) + "\n"


MAINS: dict[str, Any] = {
    "none": None,
    "empty": "",
    "minimal": MINIMAL,
    "default": default,
    "commented": commented,
    "sparse": SPARSE,
    "kubernetes": KUBERNETES,
    "out-of-order": OUT_OF_ORDER,
    "nvidia": NVIDIA,
    "no-newline": SPARSE.rstrip("\n"),
    "crlf": SPARSE.replace("\n", "\r\n"),
}


@pytest.fixture(params=MAINS)
def main(request: pytest.FixtureRequest, containerd: Program) -> Any:
    """Each main file."""
    text = MAINS[request.param]
    return text(containerd) if callable(text) else text


class Node:
    """A host with Kata and a real containerd, whose files are in a directory."""

    def __init__(self, root: Path, program: Program, main: str | None, **drop_ins: str) -> None:
        self.program = program
        self.tree = Machine(root, program)
        self.main = HostPath(f"{self.tree.root}{MAIN}")
        self.put(self.main, main)
        self.put(SHIM, "")
        self.put(CONFIGURATION, "")
        for name, text in drop_ins.items():
            self.put(self.main.parent / f"conf.d/{name}.toml", text)

    def put(self, path: str, text: str | None) -> None:
        """Make a file."""
        if text is not None:
            place = HostPath(path)
            self.tree.make_directory(place.parent)
            self.tree.replace(place, text.encode(), durable=False)

    @property
    def place(self) -> RuntimeLocation:
        """Where its containerd reads its configuration."""
        return locate(self.tree, "containerd", self.main)

    @property
    def merges(self) -> bool:
        """Whether it has containerd 2."""
        assert self.place.version is not None
        return self.place.version >= _MERGES

    def prepare(self, wanted: RuntimeRequest | None = None) -> Prepared:
        """Have an entry made ready."""
        return prepare_entry(self.tree, self.place, wanted or kata(), "the same command")

    def prepare_removal(self, name: str = "kata-vfio") -> Prepared:
        """Have the removal of an entry made ready."""
        return prepare_removal(self.tree, self.place, name, "the same command")

    def install(self, wanted: RuntimeRequest | None = None) -> Prepared:
        """Give it an entry."""
        prepared = self.prepare(wanted)
        apply_prepared(prepared, ApplyContext(self.tree))
        return prepared

    def uninstall(self, name: str = "kata-vfio") -> None:
        """Remove an entry."""
        apply_prepared(self.prepare_removal(name), ApplyContext(self.tree))

    def read(self) -> dict[HostPath, bytes | None]:
        """The main file and the drop-ins."""
        directory = self.main.parent / "conf.d"
        drop_ins = (directory / name for name in self.tree.children(directory))
        return {path: self.tree.read_whole(path) for path in (self.main, *drop_ins)}

    def dump(self) -> dict[str, Any]:
        """What containerd reads of the files as they are on the disk."""
        asked: tuple[str, ...] = ("config", "default")
        if self.tree.exists(self.main):
            asked = ("--config", self.main, "config", "dump")
        answer = ask(self.program, *asked)
        assert answer.status == 0, answer.error
        unknown = [line for line in answer.error.splitlines() if "unknown key" in line]
        assert not [line for line in unknown if "kata-vfio" in line or "crun" in line]
        return tomllib.loads(answer.output)

    def cri(self) -> dict[str, Any]:
        """What containerd reads of CRI's table of containerd."""
        plugins = self.dump()["plugins"]
        found: dict[str, Any] = plugins[RUNTIME if self.merges else CRI]
        return found

    def runtimes(self) -> dict[str, Any]:
        """The runtimes that containerd reads."""
        found: dict[str, Any] = self.cri()["containerd"]["runtimes"]
        return found


def test_it_reads_the_handler_and_all_else_as_before(
    tmp_path: Path, containerd: Program, main: str | None
) -> None:
    node = Node(tmp_path, containerd, main)
    before = node.dump()
    prepared = node.prepare()
    assert prepared.unchecked == ()
    apply_prepared(prepared, ApplyContext(node.tree))
    entry = node.runtimes()["kata-vfio"]
    assert entry["runtime_type"] == "io.containerd.kata-vfio.v2"
    assert entry["runtime_path"] == SHIM
    assert entry["options"]["ConfigPath"] == CONFIGURATION
    assert entry["privileged_without_host_devices"] is True
    assert entry["pod_annotations"] == ["io.katacontainers.*", "cdi.k8s.io/*"]
    after = node.dump()
    plugin = RUNTIME if node.merges else CRI
    assert after["plugins"][plugin].get("enable_cdi", True) is True
    for document in (before, after):
        document["plugins"][plugin].pop("enable_cdi", None)
        document["plugins"][plugin]["containerd"]["runtimes"].pop("kata-vfio", None)
        document.pop("imports", None)
    # A table of options that says nothing is not shown.
    assert without_zeros(after) == without_zeros(before)


def test_a_second_time_nothing_is_written_and_taking_it_back_gives_the_same_bytes(
    tmp_path: Path, containerd: Program, main: str | None
) -> None:
    node = Node(tmp_path, containerd, main)
    before = node.read()
    node.install()
    once = node.read()
    assert once != before
    assert node.prepare().request.changes == ()
    assert node.read() == once
    node.uninstall()
    assert node.read() == before
    assert node.prepare_removal().request.changes == ()


@pytest.mark.parametrize("first", ["kata-vfio", "crun"])
@pytest.mark.parametrize("name", ["none", "minimal", "sparse", "kubernetes"])
def test_two_entries_come_and_go_and_leave_the_first_bytes(
    tmp_path: Path, containerd: Program, name: str, first: str
) -> None:
    node = Node(tmp_path, containerd, MAINS[name])
    before = node.read()
    node.install()
    node.install(RuntimeRequest("containerd", "crun", "/usr/bin/crun", set_default=True))
    assert node.cri()["containerd"]["default_runtime_name"] == "crun"
    assert {"runc", "crun", "kata-vfio"} <= node.runtimes().keys()
    last = ({"kata-vfio", "crun"} - {first}).pop()
    node.uninstall(first)
    assert last in node.runtimes()
    assert not node.prepare_removal(last).request.notes, "nobody else changed anything"
    node.uninstall(last)
    assert node.read() == before


def test_options_of_runc_go_along(tmp_path: Path, containerd: Program) -> None:
    node = Node(tmp_path, containerd, KUBERNETES)
    node.install(RuntimeRequest("containerd", "crun", "/usr/bin/crun"))
    options = without_zeros(node.runtimes()["crun"]["options"])
    assert options == {"BinaryName": "/usr/bin/crun", "SystemdCgroup": True}


@pytest.mark.parametrize("pattern", ["{}/conf.d/*.toml", "conf.d/99-nvidia.toml", "conf.d/*.toml"])
def test_the_handler_is_written_where_it_is_read_whatever_drop_ins_there_are(
    tmp_path: Path, containerd: Program, pattern: str
) -> None:
    directory = f"{tmp_path.resolve()}{MAIN.parent}"
    main = KUBERNETES.replace("conf.d/*.toml", pattern.format(directory))
    node = Node(tmp_path, containerd, main, **{"99-nvidia": NVIDIA})
    before = set(node.runtimes())
    is_read = "nvidia" in before
    assert is_read or (pattern == "conf.d/*.toml" and node.place.version == Version(1, 6, 20))
    node.install()
    assert set(node.runtimes()) == {*before, "kata-vfio"}
    changed = {path for path in node.read() if b"kata-vfio" in (node.read()[path] or b"")}
    theirs = HostPath(f"{directory}/conf.d/99-nvidia.toml")
    if node.merges:
        assert changed == {HostPath(f"{directory}/conf.d/50-vfiomgr.toml")}
    else:
        assert changed == {theirs if is_read else node.main}


def test_imports_of_a_main_file_that_is_a_link_are_relative_to_the_link(
    tmp_path: Path, containerd: Program
) -> None:
    node = Node(tmp_path, containerd, None, **{"99-nvidia": NVIDIA})
    main = 'version = 2\nimports = ["conf.d/99-nvidia.toml"]\n'
    node.put("/srv/containerd.toml", main)
    (tmp_path / str(MAIN).lstrip("/")).symlink_to(
        f"{'../' * str(MAIN.parent).count('/')}srv/containerd.toml"
    )
    assert "nvidia" in node.runtimes()
    node.install()
    assert {"nvidia", "runc", "kata-vfio"} == set(node.runtimes())
    node.uninstall()
    assert node.tree.read_text(HostPath("/srv/containerd.toml")) == main


def test_imports_of_imports_are_read_breadth_first(tmp_path: Path, containerd: Program) -> None:
    inner = "imports = ['../inner/last.toml']\n"
    node = Node(
        tmp_path,
        containerd,
        "version = 2\nimports = ['conf.d/a.toml', 'conf.d/b.toml']\n",
        a=f"version = 2\n{inner}",
        b=NVIDIA.replace('default_runtime_name = "nvidia"', 'default_runtime_name = "runc"'),
    )
    node.put(f"{node.main.parent}/inner/last.toml", NVIDIA)
    assert node.cri()["containerd"]["default_runtime_name"] == "nvidia"
    node.install()
    assert {"nvidia", "runc", "kata-vfio"} == set(node.runtimes())
    assert node.cri()["containerd"]["default_runtime_name"] == "nvidia"


def test_an_import_that_does_not_exist_is_named(tmp_path: Path, containerd: Program) -> None:
    """Containerd 2 exits with 0 where a file is missing, and prints what it has read by then."""
    node = Node(tmp_path, containerd, f'imports = ["gone.toml", "conf.d/*.toml"]\n{SPARSE}')
    before = node.read()
    with pytest.raises(Refusal, match=rf"{node.main} imports \S+/gone\.toml, which does not exist"):
        node.prepare()
    assert node.read() == before


def test_a_setting_that_an_entry_would_wake_up_is_told_with_the_reason(
    tmp_path: Path, containerd: Program
) -> None:
    """Releases 2.0 to 2.2 ignore a snapshotter of version 2 while there is no table of runtimes."""
    main = f'version = 2\n[plugins."{_CRI}".containerd]\nsnapshotter = "native"\n'
    node = Node(tmp_path, containerd, main)
    version = node.place.version
    assert version is not None
    if not _MERGES <= version < Version(2, 3):
        node.install()
        return
    before = node.read()
    with pytest.raises(Refusal) as refusal:
        node.prepare()
    assert f'ignores snapshotter = "native" in {node.main}' in refusal.value.message
    assert "report" not in refusal.value.hint
    assert node.read() == before
    node.put(node.main, main.replace('snapshotter = "native"\n', ""))  # the remedy
    node.install()
    runc = f'[plugins."{_CRI}".containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
    node.uninstall()
    node.put(node.main, f"{main}{runc}")  # the other one
    node.install()


def test_what_a_drop_in_does_before_2_0_is_seen_before_it_is_written(
    tmp_path: Path, containerd: Program
) -> None:
    """As for containerd 2, which merges: others would lose what the main file says of CRI."""
    node = Node(tmp_path, containerd, SPARSE)
    if node.merges:
        assert node.prepare().unchecked == ()
        return
    place = locate(node.tree, "containerd", node.main, Version(2, 1))
    assert place.other is not None, "another one is installed, and would not be asked"
    before = node.read()
    with pytest.raises(
        Refusal, match=r"also read other settings differently: .*(cni|sandbox_image)"
    ):
        prepare_entry(node.tree, replace(place, other=None), kata(), "")
    assert node.read() == before


def test_a_configuration_that_it_cannot_read_is_told_in_its_words(
    tmp_path: Path, containerd: Program
) -> None:
    node = Node(tmp_path, containerd, 'version = 2\nroot = ["no", "text"]\n')
    with pytest.raises(HostError, match=r"cannot read its configuration: .*(onvert|unmarshal)"):
        node.prepare()


def test_version_1_is_refused(tmp_path: Path, containerd: Program) -> None:
    node = Node(tmp_path, containerd, 'disabled_plugins = ["cri"]\n')
    with pytest.raises(Refusal, match="version 1"):
        node.prepare()
