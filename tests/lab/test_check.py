"""`vfiomgr check` on a real kernel, with and without an IOMMU, and with nouveau loaded."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab.command import vfiomgr
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.rules.runner import Report


def check() -> Report:
    """All findings about the guest that this runs in."""
    return api.check(api.scan(HostTree("/"), with_readiness=True))


def by_rule(report: Report) -> dict[str, Diagnostic]:
    """The findings; each rule has at most one here, except that about the kernel log."""
    found = [finding for finding in report.findings if finding.rule != "kernel-log"]
    assert len({finding.rule for finding in found}) == len(found)
    return {finding.rule: finding for finding in report.findings}


@pytest.fixture
def nouveau() -> Iterator[None]:
    """The real nouveau, with its driver registered; there is no NVIDIA device for it to take."""
    subprocess.run(["modprobe", "nouveau"], check=True)
    yield
    subprocess.run(["rmmod", "nouveau"], check=True)


@pytest.mark.topology("workstation")
def test_a_host_with_an_iommu_is_ready_and_each_finding_is_true(topology: Topology) -> None:
    at = topology.addresses
    found = by_rule(check())
    severities = {rule: finding.severity for rule, finding in found.items()}
    assert [r for r, s in severities.items() if s in ("blocker", "warning")] == ["kvm"]
    assert found["kvm"].evidence[0] == "/dev/kvm does not exist"
    fine, told = ({r for r, s in severities.items() if s == kind} for kind in ("ok", "info"))
    assert {"iommu", "interrupt-remapping", "vfio-pci"} <= fine
    assert {"no-isolation", "same-pci-ids", "weak-reset", "host-driver"} <= told
    assert "IR-" in found["interrupt-remapping"].evidence[0]
    assert found["no-isolation"].evidence[1].startswith(at["bridge"])
    assert [line.split()[0] for line in found["same-pci-ids"].evidence] == [
        at["console"],
        at["gpu"],
        at["twin"],
    ]
    held = [line for line in found["host-driver"].evidence if line.endswith("is on bochs-drm")]
    assert [line.split()[0] for line in held] == [at["gpu"], at["twin"]]
    assert all(finding.remedy for finding in found.values() if finding.severity != "ok")


@pytest.mark.topology("workstation")
@pytest.mark.usefixtures("nouveau")
def test_nouveau_is_told_with_its_module_and_a_remedy() -> None:
    finding = by_rule(check())["nouveau"]
    assert finding.severity == "warning"
    assert finding.evidence[0] == "/sys/module/nouveau"
    assert Path(finding.evidence[0]).is_dir()
    assert "blacklist nouveau" in finding.remedy


@pytest.mark.topology("workstation")
def test_nouveau_without_modesetting_takes_nothing_and_is_not_told() -> None:
    subprocess.run(["modprobe", "nouveau", "modeset=0"], check=True)
    try:
        assert Path("/sys/module/nouveau").is_dir()
        assert "nouveau" not in by_rule(check())
    finally:
        subprocess.run(["rmmod", "nouveau"], check=True)


@pytest.mark.topology("no-iommu")
def test_a_host_without_an_iommu_is_blocked_and_the_command_says_so() -> None:
    text = vfiomgr("check", status=1).stdout
    assert text.startswith("blocker: the IOMMU is off: this host is itself a virtual machine\n")
    assert "  evidence  /proc/cmdline: intel_iommu=off\n" in text
    assert "remove intel_iommu=off from the kernel command line" in text
    assert "not ready: 1 blocker" in text
