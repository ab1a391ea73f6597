"""Broken domains on a real libvirtd: found before, failing as told, and starting when mended."""

from __future__ import annotations

import shlex
import subprocess
import uuid as uuids
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests import api
from tests.lab import libvirtd as daemon
from tests.lab import nested
from tests.lab.command import vfiomgr
from tests.lab.libvirt_mistakes import (
    ADDRESSES,
    MISTAKES,
    NAME,
    PORT,
    RIGHT,
    ROOT,
    TWIN,
    VNC,
    Mistake,
    domain,
    mdev,
    pair,
    pci,
)
from vfiomgr.host.tree import HostTree
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

FILE = Path("/run/lab/preflight.xml")
PLACED = RIGHT["placed"]
_KNOWS_DRIVER_MODEL = 10_000_000
"""libvirt 10.0.0, as it writes its version."""
pytestmark = [
    pytest.mark.topology("workstation"),
    pytest.mark.usefixtures("libvirtd", "bound"),
]


@pytest.fixture(scope="module")
def bound(topology: Topology) -> Iterator[None]:
    """The twin on vfio-pci, and nothing else of what can be bound."""
    vfiomgr("bind", topology.addresses["twin"])
    yield
    vfiomgr("unbind", topology.addresses["twin"])


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    """What a test defined is gone after it."""
    yield
    with libvirt.open(daemon.URI) as connection:
        for found in connection.listAllDomains():
            if found.isActive():
                found.destroy()
            if found.isPersistent():
                found.undefine()


@pytest.fixture
def released() -> Iterator[None]:
    """What a test bound is on its host drivers after it."""
    yield
    vfiomgr("unbind", ADDRESSES["gpu"])


def troubles(text: str) -> dict[str, str]:
    """The remedies of blockers and warnings, by rule, as the command finds them.

    What the kernel logged during other tests does not count.
    """
    host = api.scan(HostTree("/"), with_users=True, with_readiness=True)
    read = read_domain(text.encode(), "guest.xml")
    files = {d.rom_file: Path(d.rom_file).is_file() for d in read.hostdevs if d.rom_file}
    with connect(daemon.URI) as connection:
        (report,) = preflight(host, [read], connection.hypervisor(), files)
    found = (f for f in report.findings if f.severity in ("blocker", "warning"))
    return {f.rule: f.remedy for f in found if f.rule != "kernel-log"}


def why_not(text: str) -> str:
    """What libvirt says when the domain is defined and started; nothing where it runs.

    It stays paused: QEMU has all devices by then, and firmware under emulation is slow.
    """
    with libvirt.open(daemon.URI) as connection:
        try:
            started = connection.defineXML(text)
            started.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
        except libvirt.libvirtError as error:
            return str(error)
        started.destroy()
    return ""


def breaks(text: str, rule: str, *said: str) -> str:
    """The remedy of the one thing that is found; libvirt or QEMU fail on it, with these words."""
    found = troubles(text)
    assert set(found) == {rule}
    why = why_not(text)
    assert why, "it started"
    assert any(words in why for words in said), why
    return found[rule]


def starts(text: str) -> None:
    """Nothing is found, and it starts."""
    assert troubles(text) == {}
    assert why_not(text) == ""


def follow(remedy: str, start: str) -> None:
    """Run the command that a remedy begins with."""
    command = shlex.split(remedy.partition(";")[0].partition(" (")[0].partition(",")[0])
    assert remedy.startswith(start)
    vfiomgr(*command[1:])


@pytest.mark.usefixtures("released")
def test_a_device_on_its_host_driver_in_a_domain_that_libvirt_knows() -> None:
    text = domain(ROOT + PORT + pair("gpu"))
    remedy = breaks(text, "on-host-driver", "must be manually detached from the host")
    answer = vfiomgr("check", "domain", NAME, status=1).stdout
    assert f"{NAME}: not ready: 1 blocker" in answer
    follow(remedy, f"vfiomgr bind {ADDRESSES['gpu']}")
    answer = vfiomgr("check", "domain", "--all").stdout
    assert f"{NAME}: no " in answer, "no problem, or no blocker"
    starts(text)


@pytest.mark.usefixtures("released")
def test_a_group_of_which_a_part_stays() -> None:
    text = domain(pci("gpu", managed="yes"))
    remedy = breaks(text, "group-not-viable", "not viable", "is not available")
    follow(remedy, f"vfiomgr bind {ADDRESSES['gpu_audio']}")
    starts(text)


def test_a_device_that_the_host_lacks() -> None:
    text = PLACED.replace("\n  </devices>", pci("0000:77:00.0") + "\n  </devices>")
    remedy = breaks(text, "device-missing", "0000:77:00.0", "the cause is unknown")
    assert remedy.endswith(": vfiomgr libvirt edit guest.xml --remove 0000:77:00.0")
    FILE.write_text(text)
    vfiomgr("libvirt", "edit", str(FILE), "--remove", "0000:77:00.0")
    assert FILE.read_text() == PLACED


def test_a_device_of_a_running_domain() -> None:
    with libvirt.open(daemon.URI) as connection:
        connection.createXML(domain(TWIN, name="other"), libvirt.VIR_DOMAIN_START_PAUSED)
    remedy = breaks(PLACED, "held-by-domain", "in use by driver QEMU, domain other")
    assert remedy.startswith("virsh shutdown other")
    with libvirt.open(daemon.URI) as connection:
        connection.lookupByName("other").destroy()
    assert troubles(PLACED) == {}


def test_a_device_that_a_qemu_of_nobody_has() -> None:
    with foreign_guest(ADDRESSES["twin"]):
        breaks(PLACED, "held-by-process", "busy", "Permission denied")
    starts(PLACED)


@contextmanager
def foreign_guest(address: str) -> Iterator[None]:
    """A QEMU with a device that libvirt does not know."""
    qemu = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35", "-m", "64"]
    process = subprocess.Popen([*qemu, "-device", f"vfio-pci,host={address}"])
    nested.await_open(process)
    yield
    process.kill()
    process.wait()


def test_a_vgpu_that_is_not_there_and_one_that_is_not_started() -> None:
    uuid = str(uuids.uuid4())
    text = domain(mdev(uuid))
    remedy = breaks(text, "vgpu-missing", "not found", uuid)
    assert remedy.startswith(f"vfiomgr vgpu create --type TYPE {uuid} ")
    vfiomgr("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small", uuid)
    assert troubles(text) == {}
    vfiomgr("vgpu", "define", uuid)
    vfiomgr("vgpu", "stop", uuid)
    follow(breaks(text, "vgpu-inactive", "not found", uuid), f"vfiomgr vgpu start {uuid}")
    starts(text)
    vfiomgr("vgpu", "stop", uuid)
    vfiomgr("vgpu", "undefine", uuid)


@pytest.fixture
def vgpus() -> Iterator[tuple[str, str]]:
    """Two small vGPUs with displays."""
    made = (str(uuids.uuid4()), str(uuids.uuid4()))
    for uuid in made:
        vfiomgr("vgpu", "create", "--parent", "mdpy", "--type", "mdpy-vga", uuid)
    yield made
    vfiomgr("vgpu", "remove", *made)


@pytest.mark.thorough
def test_displays_of_vgpus(vgpus: tuple[str, str]) -> None:
    one, other = vgpus
    shown, drawn = " display='on'", " display='on' ramfb='on'"
    right = domain(mdev(one, drawn) + mdev(other, shown) + VNC)
    breaks(right.replace(VNC, ""), "display-without-graphics", "graphics")
    breaks(right.replace(shown + ">", drawn + ">"), "several-ramfb", "ramfb")
    breaks(domain(mdev(one, model="vfio-ccw")), "vgpu-model", "CCW")
    starts(right)


def test_a_domain_behind_a_virtual_iommu_that_is_written_right() -> None:
    """As the other one does, which starts above: what each below is, once its mistake is mended."""
    starts(RIGHT["behind a virtual IOMMU"])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.rule)
def test_a_domain_that_is_written_wrong(mistake: Mistake) -> None:
    breaks(mistake.domain, mistake.rule, *mistake.said)


def test_too_few_huge_pages() -> None:
    text = domain(
        TWIN,
        "<memoryBacking><hugepages><page size='2' unit='MiB'/></hugepages></memoryBacking>",
    )
    remedy = breaks(text, "hugepages-too-few", "hugetlbfs", "allocate memory", "huge")
    subprocess.run(["sh", "-c", remedy.partition(",")[0]], check=True)
    assert troubles(text) == {}


def test_what_an_old_libvirt_drops() -> None:
    """It says nothing, and the domain has it no longer; a later one keeps it."""
    element = pci("twin", "<driver name='vfio' model='vfio-pci'/>")
    text = domain(element + pci("twin_audio"))
    found = set(troubles(text))
    with libvirt.open(daemon.URI) as connection:
        is_old = connection.getLibVersion() < _KNOWS_DRIVER_MODEL
        definition = connection.defineXML(text).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    assert found == ({"element-dropped"} if is_old else set())
    assert "<hostdev" in definition
    assert ("model='vfio-pci'" not in definition) == is_old
