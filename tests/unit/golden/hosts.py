"""Hosts and words that golden files of several commands have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes import desktop
from tests.fakes.hosts import workstation
from tests.fakes.live_desktop import LiveDesktop
from tests.fakes.tunable import TunableHost
from tests.fakes.vgpu_hosts import a40_host, l40s_host, mig_host, xe_host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
MBOCHS = f"--parent mbochs --type mbochs-small {UUID}"
SYSTEMD = {
    "run/systemd/system/.keep": "",
    "etc/passwd": "qemu:x:64055:104::/:/bin/false\n",
    "etc/group": "kvm:x:107:\n",
}
PERSIST = "bind 02:00.0 --persist --owner 64055:107"


def small_a40_host(directory: Path) -> FakeKernel:
    """An A40 with four virtual functions."""
    return a40_host(directory, total_vfs=4)


def two_l40s_host(directory: Path) -> FakeKernel:
    """Two L40S with two virtual functions each."""
    return l40s_host(directory, gpus=2, total_vfs=2)


def divided_host(directory: Path) -> FakeKernel:
    """Two A100 with virtual functions, the first one in MIG mode."""
    kernel = mig_host(directory, gpus=2, total_vfs=4)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0000:21:00.0")
    for gpu in ("0000:21:00.0", "0000:41:00.0"):
        kernel.call("/usr/lib/nvidia/sriov-manage", "-e", gpu)
    return kernel


def small_divided_host(directory: Path) -> FakeKernel:
    """An A100 in MIG mode, with two virtual functions."""
    kernel = mig_host(directory, gpus=1, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", "0000:21:00.0")
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", "0000:21:00.0")
    return kernel


def arc_host(directory: Path) -> FakeKernel:
    """An Arc Pro GPU on xe of Linux 7.0."""
    return xe_host(directory, total_vfs=4, tells_vram=True)


def released_host(directory: Path) -> FakeKernel:
    """GNOME on the only card, an NVIDIA one."""
    return LiveDesktop(desktop.nvidia(directory)).kernel


def tunable_host(directory: Path) -> FakeKernel:
    """A host with systemd, on which huge pages can be allocated."""
    return TunableHost(workstation(directory)).kernel


def two_card_host(directory: Path) -> FakeKernel:
    """Plasma on two cards."""
    return LiveDesktop(desktop.kde(directory, cards=2)).kernel
