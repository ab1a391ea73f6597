"""Devices of running domains of the real libvirtd: given, taken, and bound by the hook.

The nested guests have a firmware and no system. By ACPI, which is usual, they are asked for a
device, and nobody in them answers. Where slots are those of PCI Express alone, one that nobody has
powered gives its device back at once (pcie_cap_slot_unplug_request_cb in hw/pci/pcie.c).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import libvirtd as daemon
from tests.lab.command import VFIOMGR, document, vfiomgr
from tests.lab.nested import call
from vfiomgr.libvirt.hook import GUESTS
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("sriov")

PROGRAM = Path("/usr/local/bin/vfiomgr")
DOMAINS = ("open", "keeper", "full", "hooked")
PORT = "<controller type='pci' model='pcie-root-port'/>"


NATIVE = """\
<qemu:commandline>
    <qemu:arg value='-global'/>
    <qemu:arg value='ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off'/>
  </qemu:commandline>"""


def xml(name: str, *, ports: int, rest: str = "", devices: str = "") -> str:
    """A domain with root ports and nothing on them."""
    return f"""\
<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    {PORT * ports}
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    {devices}
  </devices>
  {rest}
</domain>
"""


def hostdev(address: PciAddress) -> str:
    place = f"bus='{address.bus:#x}' slot='{address.device:#x}' function='{address.function}'"
    source = f"<source><address domain='0' {place}/></source>"
    return (
        f"<hostdev mode='subsystem' type='pci' managed='no'><driver name='vfio'/>{source}</hostdev>"
    )


def driver(address: PciAddress) -> str | None:
    link = Path("/sys/bus/pci/devices", str(address), "driver")
    return link.resolve().name if link.exists() else None


def define(name: str, text: str, *, start: bool = True) -> None:
    file = Path(f"/run/lab/{name}.xml")
    file.write_text(text)
    vfiomgr("libvirt", "edit", str(file), "--define", "--connect", daemon.URI)
    if start:
        virsh("start", name)


def virsh(*arguments: str) -> str:
    answer = call("virsh", *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def libvirt(*arguments: str, status: int = 0) -> str:
    """What `vfiomgr libvirt …` says, on both of its streams."""
    answer = vfiomgr("libvirt", *arguments, "--connect", daemon.URI, status=status)
    return answer.stdout + answer.stderr


def devices_of(name: str) -> str:
    return virsh("qemu-monitor-command", name, "--hmp", "info qtree")


def install_hook() -> None:
    """Install the hook, and end libvirtd: it looks for hooks once, when it starts."""
    paths = [path for path in sys.path if path]
    PROGRAM.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {paths!r}\n"
        "from vfiomgr.main.program import main\nmain()\n"
    )
    PROGRAM.chmod(0o755)
    answer = call(str(PROGRAM), "libvirt", "hook", "install")
    assert answer.returncode == 0, answer.stderr
    assert f"{sys.executable} -I -m vfiomgr" in Path(SCRIPT).read_text()
    daemon.stop()


@pytest.fixture(scope="module")
def functions(topology: Topology) -> Iterator[tuple[PciAddress, ...]]:
    """Five virtual functions, of which three are bound, and a libvirtd with the hook."""
    install_hook()
    physical = PciAddress.parse(topology.addresses["nvme"])
    tree = api.HostTree("/")
    api.apply(SetVirtualFunctions(physical, 5), tree=tree)
    found = read_virtual_functions(tree, physical)
    vfiomgr("bind", *map(str, (found[0], found[1], found[4])))
    daemon.start()
    yield found
    vfiomgr("unbind", *map(str, found))
    vfiomgr("sriov", "set", str(physical), "0")


@pytest.fixture(autouse=True)
def _no_domain_is_left(functions: tuple[PciAddress, ...]) -> Iterator[None]:
    del functions
    yield
    for name in DOMAINS:
        call("virsh", "destroy", name)
        call("virsh", "undefine", name)


def test_a_running_guest_gets_a_function_and_gives_it_back(
    functions: tuple[PciAddress, ...],
) -> None:
    first = str(functions[0])
    define("open", xml("open", ports=2, rest=NATIVE))
    told = libvirt("attach", "open", first)
    assert f"attached: {first} (the running guest and the definition of open)" in told
    assert f'host = "{first}"' in devices_of("open")
    (item,) = document("libvirt", "list", "--connect", daemon.URI)["items"]
    assert (item["device"], item["kind"], item["domain"]) == (first, "vf", "open")
    assert item["running"]
    assert item["defined"]
    assert "nothing to do" in libvirt("attach", "open", first)

    told = libvirt("detach", "open", first, "--timeout", "30")
    assert f"detached: {first} (the running guest and the definition of open)" in told
    assert first not in devices_of("open")
    assert document("libvirt", "list", "--connect", daemon.URI)["items"] == []
    assert driver(functions[0]) == "vfio-pci"


@pytest.mark.thorough
def test_without_a_free_root_port_it_is_refused_and_the_remedy_helps(
    functions: tuple[PciAddress, ...],
) -> None:
    """There may be a port to spare: libvirt adds one to those that it adds itself."""
    define("full", xml("full", ports=0, devices=hostdev(functions[0])))
    for function in (functions[1], functions[4]):
        answer = call(VFIOMGR, "libvirt", "attach", "full", str(function), "-c", daemon.URI)
        if answer.returncode:
            break
    assert answer.returncode == 4
    assert "full has no free root port" in answer.stderr
    assert PORT in answer.stderr
    assert f'host = "{function}"' not in devices_of("full")
    libvirt("attach", "full", str(function), "--config")
    virsh("destroy", "full")
    virsh("start", "full")
    assert f'host = "{function}"' in devices_of("full")


@pytest.mark.thorough
def test_a_guest_that_never_releases_a_device_ends_at_the_deadline(
    functions: tuple[PciAddress, ...],
) -> None:
    first = str(functions[0])
    define("keeper", xml("keeper", ports=2))
    define("open", xml("open", ports=2, rest=NATIVE))
    libvirt("attach", "keeper", first, "--live")
    told = libvirt("detach", "keeper", first, "--live", "--timeout", "8", status=5)
    assert f"cannot detach {first}: guest keeper has not released it within 8 s" in told
    assert "the request stays pending" in told
    assert f'host = "{first}"' in devices_of("keeper")
    told = libvirt("attach", "open", first, "--live", status=4)
    assert f"{first} is in use by the running domain keeper" in told
    virsh("destroy", "keeper")
    libvirt("attach", "open", first, "--live")
    libvirt("detach", "open", first, "--live")


def test_the_hook_binds_for_the_guest_that_asked_for_it_and_gives_back(
    functions: tuple[PciAddress, ...],
) -> None:
    own = functions[2]
    assert driver(own) is None
    define("hooked", xml("hooked", ports=1, devices=hostdev(own)), start=False)
    refused = call("virsh", "start", "hooked")
    assert refused.returncode != 0
    assert "Failed" in refused.stderr or "error" in refused.stderr
    assert driver(own) is None
    assert "the hook is enabled" in libvirt("hook", "install", "hooked")
    assert "is already enabled" in libvirt("hook", "install", "hooked")
    virsh("start", "hooked")
    assert driver(own) == "vfio-pci"
    assert f'host = "{own}"' in devices_of("hooked")
    assert len(list(Path(GUESTS).iterdir())) == 1
    virsh("destroy", "hooked")
    assert driver(own) is None
    assert list(Path(GUESTS).glob("*")) == []
    assert "the hook is disabled" in libvirt("hook", "uninstall", "hooked")
    assert call("virsh", "start", "hooked").returncode != 0


@pytest.mark.thorough
def test_what_the_hook_refuses_does_not_start(
    functions: tuple[PciAddress, ...], topology: Topology
) -> None:
    own, console = functions[3], PciAddress.parse(topology.addresses["console"])
    define("hooked", xml("hooked", ports=2, devices=hostdev(own) + hostdev(console)), start=False)
    libvirt("hook", "install", "hooked")
    refused = call("virsh", "start", "hooked")
    assert refused.returncode != 0
    assert "is the console's display" in refused.stderr
    assert driver(own) is None
    assert list(Path(GUESTS).glob("*")) == []
