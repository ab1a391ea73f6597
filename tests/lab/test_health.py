"""Links, PCIe errors and a device that vanishes, on a real kernel: found, named, and gone again."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import tty
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab.gpusim import MODULE_VARIABLE
from vfiomgr.check.health_rules import OF_DEVICES
from vfiomgr.host.tree import HostTree
from vfiomgr.libvirt.checks import check_domain
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.health import RECORD, keep_health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.diagnostic import Diagnostic

pytestmark = [pytest.mark.topology("health"), pytest.mark.thorough]

TREE = HostTree("/")
NIC, PORT = "0000:01:00.0", "0000:00:02.0"
UPSTREAM = Path("/sys/bus/pci/devices", PORT)
DEVICE = Path("/sys/bus/pci/devices", NIC)
_MONITOR = Path("/dev/ttyS1")
_PROMPT = b"(qemu) "
_DEADLINE = 30.0
_CAP_X16_5GT = 16 << 4 | 2
"""Link Capabilities; of a device without Link Capabilities 2, the kernel knows two speeds."""
_BRIDGE_CONTROL, _SERR = 0x3E, 2
DOMAIN = """\
<domain type='kvm'><name>win</name><memory>4194304</memory><vcpu>2</vcpu>
<os><type machine='q35'>hvm</type></os><devices><hostdev mode='subsystem' type='pci' managed='no'>
<source><address domain='0' bus='1' slot='0' function='0'/></source></hostdev></devices></domain>
"""


class Monitor:
    """QEMU's monitor of the guest that this runs in."""

    def __init__(self) -> None:
        self._port = os.open(_MONITOR, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        os.set_blocking(self._port, True)
        tty.setraw(self._port)
        self.ask("info version")

    def ask(self, command: str) -> str:
        """The answer to a command, which the monitor repeats after each character."""
        os.write(self._port, command.encode() + b"\n")
        read, answer = b"", b""
        while not answer.endswith(_PROMPT):
            assert select.select([self._port], [], [], _DEADLINE)[0], read
            read += os.read(self._port, 1 << 12)
            _, is_repeated, answer = read.rpartition(command.encode())
            answer = answer if is_repeated else b""
        return answer.decode(errors="replace")

    def inject(self, *words: str) -> None:
        """Have an error reported."""
        self.ask(f"pcie_aer_inject_error {' '.join(words)}")


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for what another process does; the laboratory ends a test that computes for ever."""
    while not condition():
        time.sleep(0.05)


def pass_messages_on() -> None:
    """Let the port report errors: QEMU's firmware leaves SERR# of its bridge control off.

    Then QEMU passes no message on (pcie_aer_msg_vbridge in hw/pci/pcie_aer.c).
    """
    with (UPSTREAM / "config").open("r+b", buffering=0) as file:
        (bridge,) = os.pread(file.fileno(), 1, _BRIDGE_CONTROL)
        os.pwrite(file.fileno(), bytes([bridge | _SERR]), _BRIDGE_CONTROL)


def total(kind: str) -> int:
    """The number of errors of the port."""
    return int((UPSTREAM / f"aer_dev_{kind}").read_text().split()[-1])


@pytest.fixture(scope="module")
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture(autouse=True)
def given() -> Iterator[None]:
    """The NIC on vfio-pci, awake as with a guest; no readings of before."""
    api.apply(Bind((PciAddress.parse(NIC),)), tree=TREE)
    (DEVICE / "power/control").write_text("on")
    pass_messages_on()
    RECORD_FILE.unlink(missing_ok=True)
    yield
    api.apply(Unbind((PciAddress.parse(NIC),)), tree=TREE)


RECORD_FILE = Path(RECORD)


@contextmanager
def better_card() -> Iterator[None]:
    """The NIC supports 16 lanes of 5 GT/s; its port supports more."""
    subprocess.run(["modprobe", "--all", "vfio-pci-core", "mdev", "vfio_iommu_type1"], check=True)
    options = [f"link_bus={1}", f"link_cap={_CAP_X16_5GT:#x}"]
    subprocess.run(["insmod", os.environ[MODULE_VARIABLE], *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["rmmod", "gpusim"], check=True)


def found() -> dict[str, Diagnostic]:
    """The findings of a check; the domain with the NIC has the same, but for devices gone."""
    report = api.check(api.scan(TREE, with_readiness=True, with_health=True))
    names = (*OF_DEVICES, "device-gone")
    of_host = {one.rule: one for one in report.findings if one.rule in names}
    of_domain = check_domain(api.host_at(TREE), DOMAIN).findings
    assert {one.rule for one in of_domain if one.rule in names} == of_host.keys() - {"device-gone"}
    return of_host


def keep_as_of(seconds_ago: float) -> None:
    """Note a reading, and let it be so long ago."""
    keep_health(TREE, api.scan(TREE))
    record = json.loads(RECORD_FILE.read_text())
    for reading in record["readings"]:
        reading["seconds"] -= seconds_ago
    RECORD_FILE.write_text(json.dumps(record))


def test_a_link_that_is_worse_than_both_ends_support() -> None:
    assert found() == {}
    with better_card():
        worse = found()
        assert worse.keys() == {"narrow-link", "slow-link"}
        assert f"between {PORT} and {NIC}" in worse["narrow-link"].summary
        assert "has 1 of 16 lanes" in worse["narrow-link"].summary
        assert "runs at 2.5 of 5 GT/s" in worse["slow-link"].summary
    assert found() == {}


def test_an_injected_error_is_found_until_a_later_reading(monitor: Monitor) -> None:
    keep_as_of(60)
    monitor.inject("first", "POISON_TLP")
    wait_for(lambda: total("nonfatal"))
    one = found()["nonfatal-errors"]
    assert (one.severity, one.subject.startswith(PORT)) == ("warning", True)
    keep_as_of(70)
    assert "nonfatal-errors" not in found()


def test_a_device_that_vanished_is_found_until_it_is_back(monitor: Monitor) -> None:
    monitor.ask("device_del nic")
    wait_for(lambda: not DEVICE.exists())
    report = api.check(api.scan(TREE, with_readiness=True, with_health=True))
    (gone,) = (one for one in report.findings if one.rule == "device-gone")
    assert gone.subject == NIC
    of_domain = check_domain(api.host_at(TREE), DOMAIN).findings
    assert "device-missing" in {one.rule for one in of_domain}
    monitor.ask("device_add e1000e,id=nic,bus=first,addr=0,romfile=")
    wait_for((DEVICE / "driver").exists)
    api.apply(Bind((PciAddress.parse(NIC),)), tree=TREE)
    (DEVICE / "power/control").write_text("on")
    keep_as_of(60)
    assert found() == {}
