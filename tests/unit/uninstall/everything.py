"""Hosts on which vfiomgr has written each of its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests import api
from tests.fakes.containerd import Containerd
from tests.unit.defined_vgpus import DOCUMENT as GPU_DEFINITION
from tests.unit.defined_vgpus import UUID
from tests.unit.layout.test_apply import GPU
from tests.unit.layout.test_boot import OTHER, host, installing
from tests.unit.runtimes import SHIM, V3, install, put
from vfiomgr.containers.cdi.model import OfferRequest
from vfiomgr.containers.cdi.requests import WriteCdi
from vfiomgr.definitions.model import gpu_file, render_gpu_definition
from vfiomgr.definitions.requests import DefineVgpu
from vfiomgr.documents.text import sealed
from vfiomgr.kata.model import handler_configuration
from vfiomgr.libvirt.hook import InstallHook
from vfiomgr.metrics.model import DEVICES
from vfiomgr.metrics.timer import DIRECTORIES, NAME, installation
from vfiomgr.node.model import FEATURES
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.persistence.model import HOOKS, SWEPT, render_hook
from vfiomgr.persistence.reservation import Reservation, render_reservation, reservation_file
from vfiomgr.tuning.model import TUNED, TunedGuest, render_tuned
from vfiomgr.uninstall.found import find

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.uninstall.requests import Uninstall

PROGRAM = "/usr/bin/vfiomgr"
SPECIFICATION = HostPath("/etc/cdi/vfiomgr-vfiomgr.io_vfio.json")
RESOURCE = HostPath("/run/cdi/vfiomgr-vfiomgr.io_gpu.json")
KATA_DROP_IN = "/etc/kata-containers/config.d/50-vfiomgr.toml"
KATA_TEXT = sealed(
    "# For Kata 4.1.0 (Go runtime): belongs into config.d beside configuration.toml\n"
)
FILES = Path(__file__).parents[3] / "docs/files.md"
_WORD = re.compile(r"[A-Z][A-Z_]+")


def prepared(tmp_path: Path) -> FakeKernel:
    """A host with systemd and initramfs-tools, which no command has changed yet."""
    kernel = host(tmp_path)
    put(kernel, "/etc/containerd/config.toml", V3)
    put(kernel, SHIM, "")
    Containerd("2.1.9").install(kernel)
    put(kernel, "/etc/kata-containers/configuration.toml", "[hypervisor.qemu]\n")
    return kernel


def everything(tmp_path: Path) -> FakeKernel:
    """The host after each command that writes files, and after a node agent that was killed."""
    kernel = prepared(tmp_path)
    for request in (
        Bind((GPU,), persist=True, program=PROGRAM),
        installing(OTHER, enforce=True),
        InstallHook(PROGRAM),
        DefineVgpu(UUID, "mtty", "mtty-1", autostart=True, program=PROGRAM),
        WriteCdi(OfferRequest()),
    ):
        api.apply(request, tree=kernel)
    put(kernel, DIRECTORIES[0] / NAME, "# metrics\n")
    kernel.forget()
    api.apply(installation(kernel, None, PROGRAM), tree=kernel)
    put(kernel, DEVICES, "{}\n")
    put(kernel, TUNED, render_tuned((TunedGuest(UUID, "win"),)))
    put(kernel, handler_configuration("kata-vfio"), sealed("[hypervisor.qemu]\n"))
    install(kernel)
    put(kernel, KATA_DROP_IN, KATA_TEXT)
    put(kernel, gpu_file(GPU_DEFINITION.gpu.address), render_gpu_definition(GPU_DEFINITION))
    put(kernel, RESOURCE, kernel.read_text(SPECIFICATION) or "")
    persisted = api.host_at(kernel).scan().files.bindings
    put(kernel, reservation_file(GPU), render_reservation(Reservation(persisted[0].device)))
    tools: tuple[str, ...] = ("dracut", "mkinitcpio")
    for tool in tools:
        put(kernel, HOOKS[tool], render_hook(tool, persisted))
    for path in (
        SWEPT,
        RUNTIME / "node-quarantine.json",
        RUNTIME / "node-cdi.json",
        FEATURES / "vfiomgr",
    ):
        put(kernel, path, "{}\n")
    return kernel


def request_for(
    kernel: FakeKernel, *, unbind: bool = False, keep: tuple[str, ...] = ()
) -> Uninstall:
    """The request, without the initramfs: no tool rebuilds that of a fake host."""
    host = api.host_at(kernel)
    return find(host, unbind=unbind, keep=keep, update_initramfs=False).request


def documented() -> Iterator[tuple[str, str]]:
    """The paths of docs/files.md as expressions, and what it says of their removal."""
    for line in FILES.read_text().splitlines():
        if line.startswith("| `"):
            cell, _, fate = (part.strip() for part in line.strip("|").split(" | "))
            first, *others = re.findall(r"`([^`]+)`", cell)
            yield _expression(first), fate
            above = first.rpartition("/")[0]
            for other in others:
                if other[0].isalnum() and fate == "removes":
                    yield _expression(f"{above}/{other}"), fate


def _expression(path: str) -> str:
    return _WORD.sub("[^/]+", re.escape(path)).replace(r"\*", "[^/]*")


def paths(kernel: FakeKernel) -> set[str]:
    """All files of the host that vfiomgr may have written."""
    found = (kernel.sysfs.picture(place) for place in ("/etc", "/run", "/var"))
    return {path for each in found for path, text in each.items() if text != "/"}
