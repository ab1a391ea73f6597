"""The containerd of tests/fakes reads what the real ones read, from the same files."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.containerd import CRI, IMAGES, RUNTIME, Containerd
from tests.integration.programs import ask
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.debian import Program

_V2 = f"""\
version = 2
[plugins."{CRI}"]
  sandbox_image = "registry.example/pause:3.9"
  [plugins."{CRI}".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."{CRI}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."{CRI}".containerd.runtimes.runc.options]
        SystemdCgroup = true
"""
_V3 = f"""\
version = 3
[plugins.'{IMAGES}']
  snapshotter = "native"
[plugins.'{IMAGES}'.pinned_images]
  sandbox = "registry.example/pause:3.9"
[plugins.'{RUNTIME}'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins.'{RUNTIME}'.containerd.runtimes.runc.options]
    SystemdCgroup = true
"""
_DORMANT = f'version = 2\n[plugins."{CRI}".containerd]\nsnapshotter = "native"\n'
_HANDLER = {
    2: f"""\
version = 2
[plugins."{CRI}".containerd.runtimes.extra]
  runtime_type = "io.containerd.extra.v2"
  runtime_path = "/opt/extra"
  privileged_without_host_devices = true
  pod_annotations = ["a.*"]
""",
    3: f"""\
version = 3
[plugins.'{RUNTIME}'.containerd.runtimes.extra]
  runtime_type = "io.containerd.extra.v2"
  runtime_path = "/opt/extra"
""",
}
_NO_VERSION = f'[plugins."{CRI}".containerd.runtimes.extra]\nruntime_type = "x"\n'
_RELATIVE, _ONE = 'imports = ["conf.d/*.toml"]\n', 'imports = ["conf.d/one.toml"]\n'
_ALL = 'imports = ["{etc}/conf.d/*.toml"]\n'
_GONE = 'imports = ["conf.d/one.toml", "gone.toml", "conf.d/two.toml"]\n'
_WARNED = re.compile(r'key=("[^"]*"|\S+) plugin=\S+')
_CASES: dict[str, tuple[str, ...]] = {
    "version 2": (_V2,),
    "version 3": (_V3,),
    "only a version 2": ("version = 2\n",),
    "only a version 3": ("version = 3\n",),
    "dormant snapshotter": (_DORMANT,),
    "dormant snapshotter and a handler": (_ALL + _DORMANT, _HANDLER[2]),
    "same version 2": (_ALL + _V2, _HANDLER[2]),
    "same version 3": (_ALL + _V3, _HANDLER[3]),
    "newer drop-in": (_ALL + _V2, _HANDLER[3]),
    "older drop-in": (_ALL + _V3, _HANDLER[2]),
    "older drop-in, empty main": (_ALL + "version = 3\n", _HANDLER[2]),
    "relative pattern": (_RELATIVE + _V2, _HANDLER[2]),
    "relative path": (_ONE + _V2, _HANDLER[2]),
    "relative path, version 3": (_ONE + _V3, _HANDLER[3]),
    "later file wins": (_ALL + _V2, _V2, _V2.replace("native", "overlayfs")),
    "missing import": (_GONE + _V2, _HANDLER[2], "version = 2\n"),
    "missing import, version 3": (_GONE + _V3, _HANDLER[3], "version = 3\n"),
    "import of itself": ('imports = ["{etc}/config.toml"]\n' + _V2,),
    "imports of imports": (_ONE + _V2, 'imports = ["two.toml"]\n' + _HANDLER[2], _V2),
    "unknown key": (_V2.replace("SystemdCgroup", "systemd_cgroup").replace("sandbox_i", "i"),),
    "unknown key of a runtime": (_V2.replace("runtime_type", "runtime_tipe"),),
    "imports that are no list": ('imports = "conf.d"\n' + _V2,),
    "malformed": ("version = \n",),
    "CDI": (f'{_V2}[plugins."{CRI}".cni]\n'.replace("sandbox", "enable_cdi = true\nsandbox"),),
}


@pytest.mark.parametrize("case", _CASES)
def test_it_reads_what_the_real_one_reads(tmp_path: Path, containerd: Program, case: str) -> None:
    etc = tmp_path.resolve() / "containerd"
    (etc / "conf.d").mkdir(parents=True)
    names = ("config.toml", "conf.d/one.toml", "conf.d/two.toml")
    for name, text in zip(names, _CASES[case], strict=False):
        (etc / name).write_text(text.replace("{etc}", str(etc)))
    asked = ("--config", str(etc / "config.toml"), "config", "dump")
    real = ask(containerd, *asked)
    version = str(Version.parse(containerd.version))
    fake = Containerd(version).run(asked)
    assert (fake.code == 0) == (real.status == 0), real.error or fake.error
    if real.status:
        return
    by_default = ask(containerd, "config", "default").output
    fakes_default = Containerd(version).run(("config", "default")).output
    assert _reading(fake.output, fakes_default) == _reading(real.output, by_default)
    assert _unknown(fake.error) == _unknown(real.error)


def _reading(dump: str, default: str) -> dict[str, Any]:
    """What vfiomgr asks of a dump; values of the program's own are replaced by `its own`."""
    found, own = _told(dump), _told(default)
    return {key: "its own" if own.get(key) == value else value for key, value in found.items()}


def _told(dump: str) -> dict[str, Any]:
    data = tomllib.loads(dump)
    plugins = data["plugins"]
    runtime = plugins[RUNTIME if data["version"] > 2 else CRI]
    images = plugins.get(IMAGES, {}) if data["version"] > 2 else {}
    inner = runtime["containerd"]
    told = {
        "default": inner["default_runtime_name"],
        "snapshotter": images.get("snapshotter", inner.get("snapshotter")),
        "sandbox": images.get("pinned_images", {}).get("sandbox", runtime.get("sandbox_image")),
        "cdi": runtime.get("enable_cdi"),
        "runtimes": sorted(inner["runtimes"]),
    }
    keys = ("runtime_type", "runtime_path", "privileged_without_host_devices", "pod_annotations")
    for name, table in inner["runtimes"].items():
        told |= {f"{name} {key}": table.get(key) or None for key in keys}
        told[f"{name} cgroup"] = (table.get("options") or {}).get("SystemdCgroup") or None
    return told


def _unknown(error: str) -> set[str]:
    """The keys that it warns about, with the plugin."""
    lines = (line for line in error.splitlines() if "Ignoring unknown key" in line)
    return {found[0] for line in lines if (found := _WARNED.search(line))}
