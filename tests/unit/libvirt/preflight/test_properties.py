"""Whatever the reader reads, a preflight answers; on hosts that are ready it finds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests import api
from tests.fakes import hosts
from tests.unit.libvirt.domains import hostdevs
from tests.unit.libvirt.preflight.situations import (
    MDEV_ELEMENT,
    PORTS,
    UUID,
    host,
    known,
    libvirt,
    of,
    troubles,
    xml,
)
from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.passthrough.steps import Bind
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy

    from tests.fakes.kernel import FakeKernel

ADDRESSES = ("0000:01:00.0", "0000:01:00.1", "0000:02:00.0", "0000:41:00.4", "0000:99:1f.7")
SMALL = some.integers(0, 5)


def attributes(**choices: SearchStrategy[str]) -> SearchStrategy[str]:
    """Some of these attributes, in XML."""
    present = some.fixed_dictionaries({}, optional=choices)
    return present.map(lambda found: "".join(f" {k}='{v}'" for k, v in found.items()))


ON = some.sampled_from(["yes", "no", "on", "off", "perhaps"])
PLACE = some.builds(
    "<address type='pci' bus='{}' slot='{}' function='{}'{}/>".format,
    SMALL,
    some.integers(0, 31),
    some.integers(0, 7),
    attributes(multifunction=ON),
)
PARTS = some.lists(
    some.sampled_from(
        [
            "<driver name='kvm'/>",
            "<driver name='vfio' model='xe' iommufd='yes'/>",
            "<rom file='x.rom'/>",
            "<rom file='/nowhere/x.rom' bar='off'/>",
            "<boot order='1'/>",
            "<alias name='ua-x'/>",
            "<acpi nodeset='1-8'/>",
        ]
    )
    | PLACE,
    max_size=3,
).map("".join)
FLAGS = attributes(managed=ON, display=ON, ramfb=ON)


def source(address: str) -> str:
    _, bus, rest = address.split(":")
    device, number = rest.split(".")
    return f"<source><address bus='0x{bus}' slot='0x{device}' function='{number}'/></source>"


PCI = some.builds(
    "<hostdev mode='subsystem' type='pci'{}>{}{}</hostdev>".format,
    FLAGS,
    some.sampled_from(ADDRESSES).map(source),
    PARTS,
)
INTERFACE = some.sampled_from(ADDRESSES).map(
    lambda address: f"<interface type='hostdev'>{source(address)}</interface>"
)
MDEV = some.builds(
    "<hostdev mode='subsystem' type='mdev'{}>{}{}</hostdev>".format,
    FLAGS,
    some.sampled_from([UUID, "22222222-0d00-4007-9c5a-b07b0c6c05de"]).map(
        lambda uuid: f"<source><address uuid='{uuid}'/></source>"
    ),
    PARTS,
)
OTHERS = some.sampled_from(
    [
        "<graphics type='vnc'/>",
        "<iommu model='intel'/>",
        "<iommu model='virtio'><driver aw_bits='39'/></iommu>",
        "<hostdev mode='subsystem' type='usb'/>",
        "<disk type='file'><target bus='virtio'/></disk>",
    ]
)
DEVICES = some.lists(PCI | MDEV | INTERFACE | OTHERS, max_size=6).map("".join)
CONTROLLER = some.builds(
    "<controller type='pci' index='{}' model='{}'>{}{}</controller>".format,
    SMALL,
    some.sampled_from(["pcie-root", "pcie-root-port", "pcie-expander-bus", "", "new-model"]),
    some.sampled_from(
        [
            "",
            "<target busNr='1'/>",
            "<target busNr='254'><node>3</node></target>",
            "<target hotplug='off'/>",
            "<pcihole64 unit='TiB'>9</pcihole64>",
        ]
    ),
    PLACE | some.just(""),
)
PORT_LISTS = some.lists(CONTROLLER, max_size=6).map("".join) | some.just(PORTS)
CPUS = some.sampled_from(
    [
        "",
        "<cpu/>",
        "<cpu mode='host-model'><maxphysaddr mode='passthrough' limit='39'/></cpu>",
        "<cpu><maxphysaddr mode='emulate' bits='64'/></cpu>",
        "<cpu><numa><cell memory='1'/><cell id='7' cpus='0-3'/></numa></cpu>",
    ]
)
BEFORE = some.lists(
    some.sampled_from(
        [
            "<memtune><hard_limit>1</hard_limit></memtune>",
            "<memoryBacking><hugepages/><locked/></memoryBacking>",
            "<numatune><memory mode='strict' nodeset='0-5,^1'/></numatune>",
            "<cputune><vcpupin vcpu='9' cpuset='3'/></cputune>",
            "<iommufd enabled='yes'/>",
        ]
    ),
    max_size=4,
).map("".join)


TEXTS = some.builds(
    xml,
    DEVICES,
    ports=PORT_LISTS,
    before=BEFORE,
    cpu=CPUS,
    memory=some.sampled_from(["0", "1", "8", "99999"]),
    system=some.sampled_from(["", "<boot dev='hd'/>"]),
    firmware=some.sampled_from(["", " firmware='efi'"]),
    kind=some.sampled_from(["kvm", "qemu", "xen", "test", ""]),
)


@settings(max_examples=200)
@given(
    text=TEXTS,
    others=DEVICES,
    libvirt_version=some.sampled_from([None, Version(1, 0), Version(9, 0), Version(99, 0)]),
)
def test_a_preflight_never_raises(text: str, others: str, libvirt_version: Version | None) -> None:
    read = read_domain(text.encode(), "some.xml")
    other = known(xml(others, name="other"), running=True)
    hypervisor = None
    if libvirt_version is not None:
        hypervisor = libvirt(other, libvirt=libvirt_version, offers_vfio=None, has_kvm=None)
    report = of(read, host(), hypervisor, {"/nowhere/x.rom": False})
    ranks = [SEVERITIES.index(finding.severity) for finding in report.findings]
    assert ranks == sorted(ranks)
    for finding in report.findings:
        assert finding.evidence
        assert finding.remedy
        assert "{" not in f"{finding.summary}{finding.why}{finding.remedy}"


@pytest.mark.parametrize("make", [hosts.workstation, hosts.mixed, hosts.dual_adapter])
def test_what_vfiomgr_binds_is_ready_for_a_domain(make: object, tmp_path: Path) -> None:
    """Each function that vfiomgr gives to guests, in the XML that vfiomgr prints for it."""
    assert callable(make)
    kernel: FakeKernel = make(tmp_path)
    judged = 0
    for device in api.scan(kernel, with_users=True).devices:
        intent = Bind((device.address,))
        try:
            api.apply(intent, tree=kernel)
        except Refusal:
            continue
        found = api.scan(kernel, with_users=True, with_readiness=True)
        elements = "".join(hostdevs(found, str(device.address), first_bus=1))
        report = of(read_domain(xml(elements, before="").encode(), "x"), found, libvirt())
        assert troubles(report) == []
        judged += 1
    assert judged


def test_a_vgpu_that_is_active_is_ready_for_a_domain() -> None:
    read = read_domain(xml(MDEV_ELEMENT).encode(), "x")
    assert troubles(of(read, host(), libvirt())) == []
