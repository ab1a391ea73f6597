"""The program containerd, as far as it reads its configuration: how its releases merge files.

As recorded of real builds of 1.6.20, 1.7.28, 2.0.11, 2.1.9 and 2.3.4 with `containerd config dump`:

- before 2.0 the table of a plugin in an imported file takes the place of the one before it, and
  the map of runtimes that stands in files that of containerd's own (of 1.6 tests/integration asks
  the real one); 1.7 does not start where any file is of version 3;
- 2.0 and 2.1 merge tables of the same version; of a drop-in of version 2 for a main file of
  version 3 they take nothing, and one of version 3 for a main file of version 2 resets what that
  says of CRI;
- 2.3 takes a drop-in of version 2 for a main file of version 3, and does not start with the
  reverse; of a main file of version 2 it takes overlayfs for whatever snapshotter that names;
- since 2.2 the default configuration lists conf.d, and 2.3 shows it in each dump; what is read is
  what files import;
- a key that nobody knows is told on stderr alone, since 1.7.
"""

from __future__ import annotations

import copy
import glob
import os
import tempfile
import tomllib
from typing import TYPE_CHECKING, Any

import tomlkit

from tests.fakes.programs import Said
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fakes.kernel import FakeKernel

Data = dict[str, Any]
CRI, RUNTIME, IMAGES = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.runtime",
    "io.containerd.cri.v1.images",
)
PROGRAM = "/usr/bin/containerd"
CONF_D = "/etc/containerd/conf.d/*.toml"
_CRI_KEYS = {"sandbox_image", "containerd", "cni", "registry", "enable_cdi", "systemd_cgroup"}
_RUNTIME_KEYS = {
    "runtime_type",
    "runtime_path",
    "privileged_without_host_devices",
    "pod_annotations",
    "container_annotations",
    "options",
}


class _Stops(Exception):  # noqa: N818 - it names what happens
    """Containerd does not start."""


class Containerd:
    """One release of it."""

    def __init__(self, version: str) -> None:
        self.version = Version.parse(version)
        self._root = ""
        self.unknown: set[str] = set()
        """Keys that this one does not know, against all expectations."""
        self.forgets: tuple[str, ...] = ()
        """A key of the dump that is lost where there is a runtime besides runc."""

    def install(self, kernel: FakeKernel) -> None:
        """Put it on the PATH of a host."""
        self._root = kernel.root
        kernel.programs.install(PROGRAM)
        kernel.programs.known[PROGRAM] = self

    def changes(self, _arguments: Sequence[str]) -> bool:
        """It only tells."""
        return False

    def run(self, arguments: Sequence[str]) -> Said:
        """`--version`, `config default`, `--config FILE config dump`."""
        match list(arguments):
            case ["--version"]:
                module = "containerd/v2" if self._merges else "containerd"
                name = f"github.com/containerd/{module}"
                return Said(output=f"containerd {name} {self.version} 1234abcd\n")
            case ["config", "default"]:
                return Said(output=tomlkit.dumps(self._default()))
            case ["--config", path, "config", "dump"]:
                return self._dump(path)
        return Said(1, error=f"containerd: no such command: {arguments}\n")

    @property
    def _merges(self) -> bool:
        return self.version >= Version(2, 0)

    def _default(self) -> Data:
        runtimes = {
            "runc": {
                "runtime_type": "io.containerd.runc.v2",
                "runtime_path": "",
                "pod_annotations": [],
                "options": {"SystemdCgroup": False, "BinaryName": ""},
            }
        }
        inner: Data = {"default_runtime_name": "runc", "runtimes": runtimes}
        if self._merges:
            imports = [CONF_D] if self.version >= Version(2, 2) else []
            images = {"snapshotter": "overlayfs", "pinned_images": {"sandbox": "pause:3.10"}}
            plugins = {RUNTIME: {"enable_cdi": True, "containerd": inner}, IMAGES: images}
            return {"version": 3, "imports": imports, "plugins": plugins}
        cri: Data = {
            "sandbox_image": "pause:3.8",
            "containerd": {"snapshotter": "overlayfs", **inner},
        }
        if self.version >= Version(1, 7):
            cri["enable_cdi"] = False
        return {"version": 2, "imports": [], "plugins": {CRI: cri}}

    def _dump(self, path: str) -> Said:
        said: list[str] = []
        try:
            files = list(self._loaded(path, set()))
            data = self._merged(files)
        except (_Stops, OSError, tomllib.TOMLDecodeError) as error:
            return Said(1, error=f"containerd: failed to load TOML: {error}\n")
        self._drop_unknown(data, said)
        runtimes = self._cri(data)["containerd"]["runtimes"]
        if self.forgets and len(runtimes) > 1:
            inner = data
            for name in self.forgets[:-1]:
                inner = inner[name]
            inner.pop(self.forgets[-1], None)
        return Said(output=tomlkit.dumps(data), error="".join(said))

    def _cri(self, data: Data) -> Data:
        found: Data = data["plugins"][RUNTIME if self._merges else CRI]
        return found

    def _loaded(self, path: str, seen: set[str]) -> Iterator[Data]:
        """A file, and then all that it imports."""
        with open(path, "rb") as file:
            data = tomllib.load(file)
        seen.add(path)
        yield data
        imports = data.get("imports", [])
        if not isinstance(imports, list) or not all(isinstance(one, str) for one in imports):
            message = "toml: cannot decode imports into a Go value of type string"
            raise _Stops(message)
        for pattern in imports:
            place = self._real(os.path.join(os.path.dirname(path), pattern))
            for found in sorted(glob.glob(place)) if "*" in place else [place]:
                if found not in seen:
                    yield from self._loaded(found, seen)

    def _real(self, place: str) -> str:
        """Where a path of the host is; those that it is shown are elsewhere already."""
        is_shown = place.startswith((f"{self._root}/", f"{tempfile.gettempdir()}/vfiomgr-"))
        return place if is_shown else f"{self._root}{place}"

    def _merged(self, files: list[Data]) -> Data:
        main: int = files[0].get("version", 1)
        result = self._default()
        result["imports"] = list(result["imports"]) if self.version >= Version(2, 3) else []
        for data in files:
            version: int = data.get("version", main)
            self._require_readable(version, main)
            result["imports"] += [p for p in data.get("imports", []) if p not in result["imports"]]
            others = {k: v for k, v in data.items() if k not in ("plugins", "imports", "version")}
            _merge(result, others)
        plugins = self._together(files, main)
        for name, table in plugins.items():
            base = result["plugins"].setdefault(name, {})
            hidden = table.get("containerd", {}).get("runtimes")
            if hidden is not None and not self._merges:
                base["containerd"]["runtimes"] = {}
            _merge(base, table)
        return result

    def _require_readable(self, version: int, main: int) -> None:
        if version > (3 if self._merges else 2):
            message = f"expected containerd config version `2`, got `{version}`"
            raise _Stops(message)
        if self.version >= Version(2, 3) and version > main:
            message = f"drop-in config version {version} higher than root config version {main}"
            raise _Stops(message)

    def _together(self, files: list[Data], main: int) -> Data:
        """The tables of plugins, one file after the other."""
        plugins: Data = {}
        for data in files:
            version = data.get("version", main)
            tables = copy.deepcopy(data.get("plugins", {}))
            if not self._merges:
                plugins |= tables
                continue
            is_old = self.version < Version(2, 2)
            if is_old and version == 2 and main == 3:
                continue
            if is_old and version == 3 and main == 2:
                plugins.pop(RUNTIME, None)
                plugins.pop(IMAGES, None)
            _merge(plugins, self._migrated(tables, version))
        return plugins

    def _migrated(self, tables: Data, version: int) -> Data:
        """Tables of version 2 as those of version 3."""
        cri = tables.pop(CRI, None)
        if cri is None or (version == 3 and self.version < Version(2, 3)):
            return tables
        images = {}
        if "sandbox_image" in cri:
            images["pinned_images"] = {"sandbox": cri.pop("sandbox_image")}
        snapshotter = cri.get("containerd", {}).pop("snapshotter", None)
        if snapshotter is not None and self.version < Version(2, 3):
            images["snapshotter"] = snapshotter
        _merge(tables, {RUNTIME: cri, **({IMAGES: images} if images else {})})
        return tables

    def _drop_unknown(self, data: Data, said: list[str]) -> None:
        cri = self._cri(data)
        known = _CRI_KEYS - ({"enable_cdi"} if self.version < Version(1, 7) else set())
        self._drop(cri, known, "", said)
        for name, table in cri["containerd"]["runtimes"].items():
            where = f"containerd runtimes {name} "
            self._drop(table, _RUNTIME_KEYS - self.unknown, where, said)

    def _drop(self, table: Data, known: set[str], where: str, said: list[str]) -> None:
        for key in [key for key in table if key not in known]:
            del table[key]
            if self.version >= Version(1, 7):
                text = "Ignoring unknown key in TOML for plugin"
                said.append(f'level=warning msg="{text}" key="{where}{key}" plugin={RUNTIME}\n')


def _merge(base: Data, other: Data) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = copy.deepcopy(value)
