"""The program containerd, as far as it reads its configuration: how its releases merge files.

As recorded of real builds of 1.7.28, 2.0.11, 2.2.0 and 2.3.4 with `containerd config dump`; what it
makes of 1.6, 1.7 and 2.1 is compared with those of Debian (tests/integration):

- before 2.0 the table of a plugin in an imported file takes the place of the one before it, and
  the map of runtimes that stands in files that of containerd's own; of a file of version 3 nothing
  is known, and later releases do not start where the last version that is stated is 3;
- from 2.0 to 2.2 tables are merged as they are written, and migrated if the last version that is
  stated is 2: what a file of version 3 says stays. If that is 3, tables of version 2 count for
  nothing. A snapshotter of version 2 counts where there is a table of runtimes;
- 2.3 takes a drop-in of version 2 for a main file of version 3, and does not start with the
  reverse; of a main file of version 2 it takes overlayfs for whatever snapshotter that names;
- since 2.2 the default configuration lists conf.d, and 2.3 shows it in each dump; what is read is
  what files import. Since 2.0 `config dump` passes over a file that is missing, and the rest;
- a key that nobody knows is told on stderr alone, since 2.0.
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
from vfiomgr.units import Version

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
            data = self._merged(list(self._loaded(path)))
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

    def _loaded(self, path: str) -> Iterator[Data]:
        """A file, and then all that it imports: breadth first, and each once."""
        pending = [path]
        for file in pending:
            try:
                data = self._read(file)
            except FileNotFoundError:
                if self._merges:
                    return  # `config dump` passes over the error, and the rest is not read
                raise
            yield data
            imports = data.get("imports", [])
            if not isinstance(imports, list) or not all(isinstance(one, str) for one in imports):
                message = "toml: cannot decode imports into a Go value of type string"
                raise _Stops(message)
            found = (place for pattern in imports for place in self._found(pattern, file))
            pending += [place for place in found if place not in pending]

    def _found(self, pattern: str, importer: str) -> list[str]:
        directory = os.path.dirname(importer)
        if "*" in pattern and (
            self.version < Version(1, 6, 29) or Version(1, 7) <= self.version < Version(1, 7, 16)
        ):
            directory = self._root or "/"
        place = self._real(os.path.join(directory, pattern))
        return sorted(glob.glob(place)) if "*" in pattern else [os.path.normpath(place)]

    def _read(self, path: str) -> Data:
        """A file; links lead on within the host."""
        place = path
        while self._root and os.path.islink(place):
            target = os.readlink(place)
            place = self._real(os.path.join(os.path.dirname(place), target))
        with open(place, "rb") as file:
            return tomllib.load(file)

    def _real(self, place: str) -> str:
        """Where a path of the host is; those that it is shown are elsewhere already."""
        is_shown = place.startswith((f"{self._root}/", f"{tempfile.gettempdir()}/vfiomgr-"))
        return place if is_shown else f"{self._root}{place}"

    def _merged(self, files: list[Data]) -> Data:
        self._require_readable(files)
        result = self._default()
        result["imports"] = list(result["imports"]) if self.version >= Version(2, 3) else []
        for data in files:
            result["imports"] += [p for p in data.get("imports", []) if p not in result["imports"]]
            others = {k: v for k, v in data.items() if k not in ("plugins", "imports", "version")}
            _merge(result, others)
        for name, table in self._together(files).items():
            base = result["plugins"].setdefault(name, {})
            hidden = table.get("containerd", {}).get("runtimes")
            if hidden is not None and name == CRI and not self._merges:
                base["containerd"]["runtimes"] = {}
            _merge(base, table)
        return result

    def _require_readable(self, files: list[Data]) -> None:
        main = files[0].get("version", 1)
        versions = [data["version"] for data in files if "version" in data] or [1]
        last = versions[-1]
        is_lenient = self.version < Version(1, 6, 32) or (
            Version(1, 7) <= self.version < Version(1, 7, 17)
        )
        if last > (3 if self._merges else 2) and not is_lenient:
            message = f"unsupported config version `{last}`"
            raise _Stops(message)
        if self.version >= Version(2, 3) and max(versions) > main:
            message = (
                f"drop-in config version {max(versions)} higher than root config version {main}"
            )
            raise _Stops(message)

    def _together(self, files: list[Data]) -> Data:
        """The tables of plugins, one file after the other.

        From 2.0 to 2.2 all are merged as they are written, and then migrated if the last file that
        states a version has an old one; since 2.3 each file is migrated by itself.
        """
        plugins: Data = {}
        version = 3
        for data in files:
            tables = copy.deepcopy(data.get("plugins", {}))
            version = data.get("version", version)
            if not self._merges:
                plugins |= tables
            elif self.version >= Version(2, 3):
                _merge(plugins, self._migrated(tables, version))
            else:
                _merge(plugins, tables)
        is_late = self._merges and self.version < Version(2, 3)
        return self._migrated(plugins, version) if is_late else plugins

    def _migrated(self, tables: Data, version: int) -> Data:
        """Tables of version 2 as those of version 3, which keep what they have (migrateConfig)."""
        if CRI not in tables or (version == 3 and self.version < Version(2, 3)):
            return tables
        cri = tables.pop(CRI)
        images = {}
        if "sandbox_image" in cri:
            images["pinned_images"] = {"sandbox": cri.pop("sandbox_image")}
        if "registry" in cri:
            images["registry"] = cri.pop("registry")
        inner = cri.get("containerd", {})
        has_runtimes = "runtimes" in inner
        snapshotter = inner.pop("snapshotter", None)
        if snapshotter is not None and has_runtimes and self.version < Version(2, 3):
            images["snapshotter"] = snapshotter
        there = tables.setdefault(RUNTIME, {})
        containerd = {**cri.pop("containerd", {}), **there.get("containerd", {})}
        tables[RUNTIME] = {**cri, **there, "containerd": containerd}
        _merge(tables, {IMAGES: images} if images else {})
        return tables

    def _drop_unknown(self, data: Data, said: list[str]) -> None:
        cri = self._cri(data)
        known = _CRI_KEYS - ({"enable_cdi"} if self.version < Version(1, 7) else set())
        self._drop(cri, known, "", said)
        for name, table in cri["containerd"]["runtimes"].items():
            where = f"containerd runtimes {name} "
            self._drop(table, _RUNTIME_KEYS - self.unknown, where, said)
        if self._merges:  # of a configuration that was not migrated
            self._warn(data["plugins"].get(CRI, {}), "", said)

    def _drop(self, table: Data, known: set[str], where: str, said: list[str]) -> None:
        for key in [key for key in table if key not in known]:
            del table[key]
            self._say(f"{where}{key}", RUNTIME, said)

    def _warn(self, table: Data, where: str, said: list[str]) -> None:
        """Of a table that is not known, and of all tables in it."""
        for key, value in table.items():
            if isinstance(value, dict) or not where:
                self._say(f"{where}{key}", CRI, said)
            if isinstance(value, dict):
                self._warn(value, f"{where}{key} ", said)

    def _say(self, key: str, plugin: str, said: list[str]) -> None:
        if self._merges:
            quoted = f'"{key}"' if " " in key else key
            text = "Ignoring unknown key in TOML for plugin"
            said.append(f'level=warning msg="{text}" key={quoted} plugin={plugin}\n')


def _merge(base: Data, other: Data) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = copy.deepcopy(value)
