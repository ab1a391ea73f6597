"""A domain's check has what is wrong with its devices and the ports above them, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import api
from tests.fakes.functions import Link
from tests.unit.check.test_health_rules import (
    DOWN,
    GPU,
    NIC,
    NIC_PORT,
    ROOT,
    UP,
    at,
    errors,
    kernel,
    set_link,
)
from vfiomgr.check.health_rules import OF_DEVICES
from vfiomgr.libvirt.checks import check_domain
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

__all__ = ["kernel"]

NARROW = Link("16.0", 4, "16.0", 16)
DOMAIN = """\
<domain type='kvm'><name>win</name><memory>4194304</memory><vcpu>2</vcpu>
<os><type machine='q35'>hvm</type></os><devices><hostdev mode='subsystem' type='pci' managed='no'>
<source><address domain='0' bus='0x43' slot='0' function='0'/></source></hostdev></devices></domain>
"""


def rules(kernel: FakeKernel) -> list[str]:
    report = check_domain(api.host_at(kernel), DOMAIN)
    return [one.rule for one in report.findings if one.rule in (*OF_DEVICES, "kernel-log")]


def test_a_domain_has_the_findings_of_its_devices_alone(kernel: FakeKernel) -> None:
    set_link(kernel, NARROW, NIC_PORT, NIC)
    errors(kernel, NIC, correctable=10_000)
    assert rules(kernel) == []
    set_link(kernel, NARROW, ROOT, UP)
    errors(kernel, DOWN, correctable=10_000)
    assert rules(kernel) == ["narrow-link", "corrected-errors"]


def test_a_domain_has_what_the_kernel_logged_of_its_devices_and_ports(kernel: FakeKernel) -> None:
    line = "vfio-pci {}: not ready 65535ms after bus reset; giving up"
    log = "/var/log/dmesg"
    kernel.sysfs.put(log, f"[   99.000000] {line.format(NIC)}\n[  100.000000] usb 1-1: new device")
    assert rules(kernel) == []
    for address in (GPU, ROOT):
        kernel.sysfs.update(log, f"[  120.000000] {line.format(address)}")
        assert rules(kernel) == ["kernel-log"]


def test_devices_that_still_wait_for_their_binding_count_too(kernel: FakeKernel) -> None:
    kernel.store(PCI_DEVICES / GPU / "driver/unbind", GPU)
    at(kernel, 3000)
    errors(kernel, GPU, fatal=1)
    assert rules(kernel) == ["fatal-errors"]
