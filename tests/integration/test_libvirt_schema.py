"""The schema of the newest libvirt in Debian accepts what vfiomgr writes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree
from msgspec.structs import replace

from tests.debian import unpacked
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import GPU, planned, two_sockets
from tests.unit.libvirt.test_arm import GRACE, OTHER, grace
from tests.unit.libvirt.test_vf_token import MEMBER, OWNER, TOKEN, VF
from vfiomgr.guests.iommufd import with_iommufd
from vfiomgr.libvirt.build.model import GuestDisk
from vfiomgr.libvirt.build.named import parse_device, parse_network
from vfiomgr.libvirt.xml import render
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan

NEWEST = Version(12, 8)


@pytest.fixture(scope="module")
def schema() -> etree.RelaxNG:
    """The schema of domains, of the package libvirt-common."""
    place = unpacked("sid", "libvirt-common") / "usr/share/libvirt/schemas/domain.rng"
    return etree.RelaxNG(etree.parse(str(place)))


def arm_guest(*names: str, **changes: Any) -> DomainPlan:
    devices = tuple(with_iommufd(parse_device(name)) for name in names)
    return planned(devices=devices, host=grace(), libvirt=NEWEST, **changes)


def pc_with_token() -> DomainPlan:
    host = grace()
    known = (*host.devices, OWNER, MEMBER)
    pc = with_facts(host, devices=known, architecture="x86_64")
    return planned(
        devices=(parse_device(f"{VF},vf-token={TOKEN}"),), host=pc, libvirt=NEWEST, numa="off"
    )


def pc_with_teaming() -> DomainPlan:
    team = parse_network("default,model=virtio,alias=ua-net0,mac=52:54:00:12:34:56")
    device = parse_device(f"{VF},teaming=ua-net0")
    host = two_sockets(replace(OWNER, driver="mlx5_core"), MEMBER)
    return planned(devices=(device,), networks=(team,), host=host, libvirt=NEWEST, numa="off")


GUESTS = {
    "arm": lambda: arm_guest(GRACE, cdroms=("/iso",), disks=(GuestDisk("/a", "raw"),)),
    "arm-smmu": lambda: arm_guest(GRACE, OTHER, viommu="smmuv3"),
    "arm-pasid": lambda: arm_guest(GRACE, viommu="smmuv3", has_ats=True, pasid_bits=20),
    "arm-bare": lambda: arm_guest(viommu="smmuv3", has_tpm=True),
    "many-cpus": lambda: planned(GPU, vcpus=300, numa="off", libvirt=NEWEST),
    "iommufd": lambda: planned(
        devices=(with_iommufd(parse_device(GPU)),), numa="off", libvirt=NEWEST
    ),
    "vf-token": pc_with_token,
    "teaming": pc_with_teaming,
}


@pytest.mark.parametrize("name", GUESTS)
def test_the_schema_accepts_a_domain(schema: etree.RelaxNG, name: str) -> None:
    document = etree.fromstring(render.domain(GUESTS[name]()))
    assert schema.validate(document), schema.error_log


def test_the_schema_refuses_an_attribute_that_libvirt_does_not_have(schema: etree.RelaxNG) -> None:
    text = render.domain(arm_guest(GRACE, OTHER, viommu="smmuv3"))
    assert not schema.validate(etree.fromstring(text.replace("accel=", "accelerated=")))
