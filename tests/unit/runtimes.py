"""Hosts with container runtimes, and entries that they are given."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from tests.fakes.containerd import CRI, RUNTIME, Containerd
from tests.fakes.hosts import network_adapter
from vfiomgr.containers.runtimes import entries
from vfiomgr.containers.runtimes.apply import apply_prepared
from vfiomgr.containers.runtimes.entries import prepare_entry
from vfiomgr.containers.runtimes.location import locate
from vfiomgr.containers.runtimes.model import ProgramName, RuntimeRequest
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.kata.model import handler_configuration
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.host.tree import HostTree

MAIN = HostPath("/etc/containerd/config.toml")
DROP_IN = HostPath("/etc/containerd/conf.d/50-vfiomgr.toml")
SHIM = "/opt/kata/bin/containerd-shim-kata-v2"
CONFIGURATION = handler_configuration("kata-vfio")
V2 = f"""\
# this node's containerd
version = 2  # of the configuration

[plugins]
  [plugins."{CRI}"]
    sandbox_image = "registry.example/pause:3.9"  # ours, and not k8s'
    [plugins."{CRI}".containerd]
      snapshotter = "nydus"
      [plugins."{CRI}".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [plugins."{CRI}".containerd.runtimes.runc.options]
          SystemdCgroup = true
  # the end of CRI
"""
V3 = f"""\
version = 3
# images come from the mirror
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "registry.example/pause:3.9"

[plugins.'{RUNTIME}'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins.'{RUNTIME}'.containerd.runtimes.runc.options]
    SystemdCgroup = true
"""


def host(
    tmp_path: Path, version: str | None, main: str | None, **files: str
) -> tuple[FakeKernel, Containerd]:
    """A host with Kata, a containerd of a version (or none), its main file, and drop-ins."""
    kernel = network_adapter(tmp_path)
    put(kernel, SHIM, "")
    put(kernel, CONFIGURATION, "[hypervisor.qemu]\n")
    put(kernel, MAIN, main)
    for name, text in files.items():
        put(kernel, f"{MAIN.parent}/conf.d/{name}.toml", text)
    containerd = Containerd(version or "2.1.9")
    if version is not None:
        containerd.install(kernel)
    return kernel, containerd


def put(kernel: FakeKernel, path: str, text: str | None, mode: int = 0o644) -> None:
    if text is not None:
        kernel.sysfs.put_bytes(path, text.encode(), mode)


def kata(
    program: ProgramName = "containerd", name: str = "kata-vfio", **more: Any
) -> RuntimeRequest:
    return RuntimeRequest(program, name, SHIM, config_path=CONFIGURATION, enable_cdi=True, **more)


def prepare(
    kernel: HostTree, wanted: RuntimeRequest | None = None, main: str | None = None
) -> Prepared:
    wanted = wanted or kata()
    place = locate(kernel, wanted.program, main)
    return prepare_entry(kernel, place, wanted, "the same command")


def prepare_removal(
    kernel: HostTree, name: str = "kata-vfio", program: ProgramName = "containerd"
) -> Prepared:
    place = locate(kernel, program)
    return entries.prepare_removal(kernel, place, name, "the same command")


def install(kernel: HostTree, wanted: RuntimeRequest | None = None) -> Prepared:
    prepared = prepare(kernel, wanted)
    apply_prepared(prepared, ApplyContext(kernel))
    return prepared


def uninstall(
    kernel: HostTree, name: str = "kata-vfio", program: ProgramName = "containerd"
) -> Prepared:
    prepared = prepare_removal(kernel, name, program)
    apply_prepared(prepared, ApplyContext(kernel))
    return prepared


def text(kernel: HostTree, path: str) -> str | None:
    return kernel.read_text(HostPath(path))


def data(kernel: HostTree, path: str) -> Any:
    return tomllib.loads(text(kernel, path) or "")


def dump(kernel: FakeKernel, containerd: Containerd) -> Any:
    """What containerd reads on the host, whose files are below its root."""
    from vfiomgr.containers.runtimes.apply import dump_containerd  # noqa: PLC0415

    assert kernel.programs.find("containerd") is containerd
    dumped = dump_containerd(kernel, MAIN, {}, containerd.version)
    assert dumped is not None
    return dumped.data


def configuration(kernel: FakeKernel) -> dict[str, str]:
    """All files below /etc, as texts."""
    return {path: str(text) for path, text in kernel.sysfs.picture("/etc").items() if text != "/"}
