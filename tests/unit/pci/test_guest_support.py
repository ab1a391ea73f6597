"""The facts for guests: debugfs, versions of modules, parameters of KVM, security managers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.devices import pci_device
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.function import Function, security_of
from vfiomgr.pci.guest_support import (
    GuestSupport,
    MigrationState,
    ModuleVersion,
    read_guest_support,
)
from vfiomgr.pci.model import DeviceSecurity

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, path: str, text: str) -> None:
    """A file of the host with its directories."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_debugfs(tmp_path: Path) -> None:
    debugfs = "/sys/kernel/debug/vfio"
    write(tmp_path, f"{debugfs}/0000:81:00.2/migration/state", "RUNNING\n")
    write(tmp_path, f"{debugfs}/0000:81:00.2/migration/features", "stop-copy\np2p\n")
    write(tmp_path, f"{debugfs}/0000:81:00.3/migration/state", "STOP_COPY\n")
    (tmp_path / debugfs.lstrip("/") / "0000:04:00.0").mkdir()
    support = read_guest_support(HostTree(tmp_path), ())
    assert support.migration == (
        MigrationState("0000:04:00.0"),
        MigrationState("0000:81:00.2", "RUNNING", ("stop-copy", "p2p")),
        MigrationState("0000:81:00.3", "STOP_COPY"),
    )
    assert support.migration_of("0000:81:00.3") == support.migration[2]


def test_versions_and_kvm(tmp_path: Path) -> None:
    write(tmp_path, "/sys/module/nvidia/version", "580.65.06\n")
    write(tmp_path, "/sys/module/kvm_amd/parameters/sev_snp", "Y\n")
    write(tmp_path, "/sys/module/kvm_intel/parameters/tdx", "N\n")
    support = read_guest_support(HostTree(tmp_path), (pci_device(),), with_programs=True)
    assert support.modules == (ModuleVersion("nvidia", "580.65.06"),)
    assert support.version_of("nvidia") == "580.65.06"
    assert (support.sev_snp, support.tdx, support.migration) == (True, False, None)
    assert (support.libvirt, support.qemu) == (None, None)  # no programs of another host


def test_an_empty_host(tmp_path: Path) -> None:
    assert read_guest_support(HostTree(tmp_path), ()) == GuestSupport()


def test_security_managers(tmp_path: Path) -> None:
    def read() -> DeviceSecurity | None:
        return security_of(Function(HostTree(tmp_path), PCI_DEVICES / "0000:04:00.0"))

    base = f"{PCI_DEVICES}/0000:04:00.0"
    write(tmp_path, f"{base}/vendor", "0x10de\n")
    assert read() is None
    write(tmp_path, f"{base}/tsm/connect", "\n")
    assert read() == DeviceSecurity()
    assert str(read()) == "not connected"
    write(tmp_path, f"{base}/tsm/connect", "tsm0\n")
    write(tmp_path, f"{base}/tsm/bound", "tsm0\n")
    write(tmp_path, f"{base}/tsm/dsm", "0000:04:00.0\n")
    assert read() == DeviceSecurity("tsm0", "tsm0", "0000:04:00.0")
    assert str(read()) == "connected to tsm0, bound to a confidential guest"
