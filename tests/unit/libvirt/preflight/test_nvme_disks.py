"""A `<disk type='nvme'>` takes a controller from the host as a `<hostdev>` does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.libvirt.domains import EMPTY, hypervisor, with_ports
from tests.unit.libvirt.domains import known as known_domain
from tests.unit.libvirt.preflight.situations import (
    GIB,
    NIC_ELEMENT,
    OTHER,
    domain,
    found,
    function,
    host,
    judge,
    known,
    libvirt,
    troubles,
    xml,
)
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.guests.model import AttachOptions
from vfiomgr.libvirt.attach.claims import Scope, claims_of
from vfiomgr.libvirt.attach.domain_edit import plan_removals, refuse_contradictions
from vfiomgr.libvirt.attach.plan import AttachRequest, plan_attach, plan_detach
from vfiomgr.libvirt.hook import GuestRecord, needs_of
from vfiomgr.pci.model import PciAddress

ADDRESS = "0000:05:00.0"
SSD = function(ADDRESS, class_code="010802", class_name="NVMe", name="Samsung PM9A3")
ON_HOST = replace(SSD, driver="nvme", driver_module="nvme")
VIOMMU = "<iommu model='intel'><driver caching_mode='on'/></iommu>"


def disk(namespace: int = 1, managed: str = "no", target: str = "vda") -> str:
    return f"""\
    <disk type='nvme' device='disk'>
      <driver name='qemu' type='raw'/>
      <source type='pci' managed='{managed}' namespace='{namespace}'>
        <address domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>
      </source>
      <target dev='{target}' bus='virtio'/>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>
    </disk>
"""


BACKING = f"""\
    <disk type='file'>
      <source file='/vm/overlay.qcow2'/>
      <backingStore type='file'><source file='/vm/middle.qcow2'/>{
    disk().replace("<disk", "<backingStore").replace("</disk", "</backingStore")
}</backingStore>
      <target dev='vdb' bus='virtio'/>
    </disk>
"""


def test_it_is_read_as_a_function_of_the_host() -> None:
    (read,) = domain(xml(disk(managed="yes"))).hostdevs
    assert (read.element, read.kind, str(read.address)) == ("disk", "pci", ADDRESS)
    assert (read.managed, read.guest, read.disk_target) == (True, None, "vda")
    assert not read.is_seen


def test_it_is_read_below_other_images() -> None:
    (read,) = domain(xml(BACKING)).hostdevs
    assert (str(read.address), read.disk_target) == (ADDRESS, "vdb")


def test_one_without_an_address_is_refused_at_its_line() -> None:
    text = xml("    <disk type='nvme'><source type='pci'/></disk>\n")
    with pytest.raises(InvalidDocument, match=r"gpu\.xml:13:5: <disk type='nvme'> has no source"):
        domain(text)


def test_a_controller_on_its_host_driver_is_found() -> None:
    finding = found(judge(xml(disk()), host(ON_HOST)), "on-host-driver")
    assert finding is not None
    assert f"gpu.xml:13: <disk> of {ADDRESS}, managed='no'" in finding.evidence
    assert troubles(judge(xml(disk()), host(SSD))) == []


def test_a_controller_that_is_not_there_is_found() -> None:
    finding = found(judge(xml(disk())), "device-missing")
    assert finding is not None
    assert "virsh detach-disk win vda --config" in finding.remedy


def test_another_domain_that_has_it_is_found() -> None:
    other = known(xml(disk(), name="other"), running=True)
    report = judge(xml(disk()), host(SSD), libvirt(other))
    assert troubles(report) == ["held-by-domain"]


def test_namespaces_of_one_controller_are_no_contradiction_and_a_hostdev_is() -> None:
    two = disk(1) + disk(2, target="vdb").replace("bus='0x02'", "bus='0x03'")
    assert troubles(judge(xml(two), host(SSD))) == []
    hostdev = NIC_ELEMENT.replace("bus='0x02'", "bus='0x05'")
    assert "device-twice" in troubles(judge(xml(disk() + hostdev), host(SSD)))


def test_the_guests_iommu_does_not_concern_it() -> None:
    mate = function("0000:05:00.1", iommu_group=SSD.iommu_group)
    both = disk() + NIC_ELEMENT.replace("bus='0x02'", "bus='0x05'").replace(
        "0x0'/></s", "0x1'/></s"
    )
    assert "viommu-group-apart" not in troubles(judge(xml(both + VIOMMU), host(SSD, mate)))
    bare = "<iommu model='intel'/>"
    assert "viommu-caching-mode" not in troubles(judge(xml(disk() + bare), host(SSD)))


@pytest.mark.parametrize(("gibibytes", "is_enough"), [(2, False), (3, True)])
def test_it_locks_all_memory_once_more(gibibytes: int, is_enough: bool) -> None:  # noqa: FBT001
    """Libvirt allows 3 GiB for a guest of 1 GiB that has a hostdev and an NVMe disk."""
    limit = f"<memtune><hard_limit unit='GiB'>{gibibytes}</hard_limit></memtune>"
    report = judge(xml(NIC_ELEMENT + disk(), before=limit, memory="1"), host(SSD))
    finding = found(report, "hard-limit-too-low")
    assert (finding is None) is is_enough
    if finding is not None:
        assert f"<hard_limit unit='KiB'>{3 * GIB // 1024}</hard_limit>" in finding.remedy


def test_vdpa_interfaces_lock_it_once_more_too() -> None:
    limit = "<memtune><hard_limit unit='GiB'>2</hard_limit></memtune>"
    vdpa = "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>"
    report = judge(xml(NIC_ELEMENT + vdpa, before=limit, memory="1"))
    assert found(report, "hard-limit-too-low") is not None


def test_it_is_listed_with_its_domain() -> None:
    (claim,) = claims_of(host(SSD), libvirt(known(xml(disk(), name="db"), running=True)))
    assert (claim.device, claim.domain, claim.state) == (ADDRESS, "db", "both")


def test_it_comes_and_goes_as_a_disk_alone() -> None:
    given = replace(with_ports(EMPTY, 1, 2), hostdevs=domain(xml(disk())).hostdevs)
    owner = known_domain(None, given)
    snapshot = with_facts(host(SSD), users=())
    scope = Scope(live=False, config=True)
    said = f"{ADDRESS} is the NVMe controller of the disk vda of win"
    with pytest.raises(Refusal, match=said) as refused:
        plan_attach(snapshot, hypervisor(owner), owner, AttachRequest((ADDRESS,), scope))
    assert refused.value.hint == "remove the disk first: virsh detach-disk win vda --config"
    with pytest.raises(Refusal, match=said):
        plan_detach(owner, [ADDRESS], scope, only=False)
    with pytest.raises(Refusal, match=said):
        plan_removals(given, [ADDRESS], None, only=False)
    with pytest.raises(Refusal, match=said):
        refuse_contradictions(given, [(ADDRESS, AttachOptions())])


def test_a_function_that_another_domain_has_as_a_disk_is_claimed() -> None:
    other = replace(EMPTY, name="db", uuid=OTHER, hostdevs=domain(xml(disk())).hostdevs)
    owner = known_domain(with_ports(EMPTY, 1, 2), with_ports(EMPTY, 1, 2))
    snapshot = with_facts(host(SSD), users=())
    busy = known_domain(other, other, name="db")
    with pytest.raises(Refusal, match=f"{ADDRESS} is in use by the running domain db"):
        plan_attach(
            snapshot,
            hypervisor(owner, busy),
            owner,
            AttachRequest((ADDRESS,), Scope(live=True, config=False)),
        )


@pytest.mark.parametrize(("managed", "taken"), [("no", [ADDRESS]), ("yes", [])])
def test_the_hook_binds_a_controller_that_libvirt_does_not(managed: str, taken: list[str]) -> None:
    needs = needs_of(host(ON_HOST), domain(xml(disk(managed=managed))), GuestRecord(OTHER, "db"))
    assert needs.functions == tuple(map(PciAddress.parse, taken))
