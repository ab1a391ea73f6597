"""Confidential guests: what is written for TDX and SEV-SNP, what is refused, and what is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.devices import with_facts
from tests.unit.guest_hosts import GPU, planned, two_sockets
from tests.unit.libvirt.preflight.situations import found, host, judge, libvirt, troubles, xml
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.pci.guest_support import GuestSupport
from vfiomgr.units import Version

NEWEST = Version(12, 8)
INTEL = with_facts(two_sockets(), guest_support=GuestSupport(tdx=True))
AMD = with_facts(two_sockets(), guest_support=GuestSupport(sev_snp=True))
LAUNCH = "<launchSecurity type='tdx'/>"
SLOTS = "<maxMemory slots='4' unit='GiB'>32</maxMemory>"
VDPA = "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface></devices>"
MEMORY_DEVICE = "confidential-memory-device"
FEATURES = "<features><acpi/><pmu state='off'/><smm state='off'/><ioapic driver='qemu'/></features>"
TDX = xml(
    before=FEATURES + LAUNCH + "<numatune><memory nodeset='0'/></numatune>",
    firmware=" firmware='efi'",
).replace("<source>", "<driver iommufd='yes'/><source>")


def backing(elements: str) -> str:
    """Memory of a domain."""
    return f"<memoryBacking>{elements}</memoryBacking>"


def text(kind: str, *names: str, **changes: Any) -> str:
    """The domain with a kind of confidential guest."""
    seen = INTEL if kind == "tdx" else AMD
    plan = planned(*names, host=seen, libvirt=NEWEST, launch_security=kind, **changes)
    return render.domain(plan, with_reasons=True)


def refused(launch: str, /, **changes: Any) -> list[tuple[str, str]]:
    """The rules and messages of a refusal."""
    options: dict[str, Any] = {"host": INTEL if launch == "tdx" else AMD, "libvirt": NEWEST}
    for name in ("host", "libvirt", "qemu"):
        if name in changes:
            options[name] = changes.pop(name)
    with pytest.raises(Refusal) as caught:
        planned(GPU, launch_security=launch, **options, **changes)
    return [(found.rule, found.summary) for found in caught.value.diagnostics]


def test_a_trust_domain() -> None:
    written = text("tdx", GPU)
    assert "<launchSecurity type='tdx'/>" in written
    for part in ("<pmu state='off'/>", "<smm state='off'/>", "<ioapic driver='qemu'/>"):
        assert part in written
    assert "<os firmware='efi'>" in written
    assert "stateless" not in written
    assert "TDX has neither SMM nor PMU" in written
    launch = read_domain(written.encode(), "td").launch
    assert launch is not None
    assert (launch.kind, launch.has_smm, launch.has_pmu, launch.interrupts) == (
        "tdx",
        False,
        False,
        "qemu",
    )


def test_sev_snp() -> None:
    written = text("sev-snp", GPU)
    assert "<launchSecurity type='sev-snp'>\n    <policy>0x00030000</policy>" in written
    assert "<loader stateless='yes'/>" in written
    assert "<smm state='off'/>" in written
    assert "<pmu" not in written
    assert "<ioapic" not in written


def test_an_ordinary_guest_is_as_before() -> None:
    assert planned(GPU, libvirt=NEWEST).request.launch_security is None
    assert "launchSecurity" not in render.domain(planned(GPU, libvirt=NEWEST))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"kind": "qemu"}, "--virt-type qemu"),
        ({"firmware": "bios"}, "--firmware bios"),
        ({"viommu": "intel"}, "--viommu"),
        ({"is_locked": True}, "--locked"),
        ({"address_bits": 40}, "--address-bits"),
    ],
)
def test_what_contradicts(changes: dict[str, Any], option: str) -> None:
    (found,) = refused("tdx", **changes)
    assert found[0] == "confidential-conflict"
    assert found[1].startswith(f"cannot combine {option} with --launch-security tdx: ")


def test_many_cpus_need_an_iommu() -> None:
    ((rule, message),) = refused("tdx", vcpus=256)
    assert rule == "confidential-conflict"
    assert "256 CPUs" in message


def test_secure_boot() -> None:
    """The ROM for TDX has Microsoft's keys and needs no SMM; that for SEV-SNP has none."""
    written = text("tdx", GPU, has_secure_boot=True)
    assert "<smm state='off'/>" in written
    assert "name='secure-boot'" in written
    ((rule, message),) = refused("sev-snp", has_secure_boot=True)
    assert rule == "confidential-conflict"
    assert "cannot combine --secure-boot with --launch-security sev-snp: " in message


def test_what_the_host_lacks() -> None:
    off = with_facts(two_sockets(), guest_support=GuestSupport(tdx=False, sev_snp=False))
    assert [rule for rule, _ in refused("tdx", host=off)] == ["confidential-host"]
    assert [rule for rule, _ in refused("sev-snp", host=off)] == ["confidential-host"]
    assert refused("tdx", libvirt=Version(11, 5))[0][0] == "libvirt-too-old"
    assert refused("sev-snp", libvirt=Version(10, 4))[0][0] == "libvirt-too-old"
    assert refused("tdx", qemu=Version(10, 0))[0] == (
        "confidential-old-qemu",
        "QEMU 10.0.0 does not start guests with tdx and host devices (added in 10.1.0)",
    )
    assert refused("sev-snp", qemu=Version(9, 2))[0][0] == "confidential-old-qemu"


def test_notes() -> None:
    plan = planned(
        host=two_sockets(), libvirt=NEWEST, launch_security="tdx", hugepage_bytes=1 << 30
    )
    assert (
        "cannot check whether KVM starts guests with tdx: no /sys/module/kvm_intel"
        in (plan.notes[-2])
    )
    assert plan.notes[-1].startswith("huge pages only back memory that the guest shares")
    assert plan.notes[-1].endswith("the guest needs twice its memory")


def test_a_domain_that_fits_has_no_finding() -> None:
    assert troubles(judge(TDX)) == []
    assert troubles(judge(TDX.replace(FEATURES, "<features><acpi/></features>"))) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("<smm state='off'/>", "<smm state='on'/>", "confidential-features"),
        ("<pmu state='off'/>", "<pmu state='on'/>", "confidential-features"),
        ("<ioapic driver='qemu'/>", "<ioapic driver='kvm'/>", "confidential-features"),
        (" firmware='efi'", "", "confidential-firmware"),
        ("hvm</type>", "hvm</type><loader type='pflash'>/c.fd</loader>", "confidential-firmware"),
        ("mode='host-passthrough'", "mode='host-model'", "confidential-cpu"),
        (
            "<cpu mode='host-passthrough'/>",
            "<cpu mode='host-passthrough'><maxphysaddr mode='passthrough' limit='45'/></cpu>",
            "confidential-cpu",
        ),
        (LAUNCH, LAUNCH + "<memoryBacking><locked/></memoryBacking>", "confidential-locked"),
        ("  </devices>", "<iommu model='virtio'/></devices>", "confidential-viommu"),
        ("  </devices>", VDPA, "confidential-mapped"),
        (LAUNCH, LAUNCH + backing("<hugepages/>"), "confidential-preallocated"),
        (
            LAUNCH,
            LAUNCH + backing("<allocation mode='immediate'/>"),
            "confidential-preallocated",
        ),
        ("  </devices>", "<memory model='dimm'/></devices>", "confidential-memory-device"),
    ],
)
def test_what_a_domain_cannot_have(old: str, new: str, rule: str) -> None:
    assert old in TDX
    assert rule in troubles(judge(TDX.replace(old, new)))


def test_devices_of_a_confidential_guest_need_iommufd() -> None:
    """QEMU maps its memory by pages, and a container of VFIO allows 65535 mappings."""
    finding = found(judge(TDX.replace("<driver iommufd='yes'/>", "")), "confidential-iommufd")
    assert finding is not None
    assert (finding.severity, len(finding.evidence)) == ("warning", 3)
    assert finding.remedy == "write <driver iommufd='yes'/> into each <hostdev> (libvirt 12.1.0)"


def test_a_guest_that_is_not_confidential_has_none_of_it() -> None:
    plain = TDX.replace(LAUNCH, SLOTS + backing("<hugepages/><access mode='shared'/>"))
    report = judge(plain.replace("  </devices>", f"<memory model='virtio-mem'/>{VDPA}"))
    assert not [finding.rule for finding in report.findings if "confidential" in finding.rule]


@pytest.mark.parametrize(
    ("qemu", "severity"),
    [("10.0", "warning"), ("10.1", "blocker"), ("11.0", "blocker"), ("11.1", "warning")],
)
def test_virtio_mem(qemu: str, severity: str) -> None:
    """A dimm starts with each QEMU."""
    text = TDX.replace("  </devices>", "<memory model='virtio-mem'/></devices>")
    seen = libvirt(qemu=Version.parse(qemu))
    virtio_mem = found(judge(text, hypervisor=seen), "confidential-memory-device")
    assert virtio_mem is not None
    assert virtio_mem.severity == severity
    dimm = found(
        judge(text.replace("virtio-mem", "dimm"), hypervisor=seen), "confidential-memory-device"
    )
    assert dimm is not None
    assert dimm.severity == "warning"


def test_each_memory_device_is_judged_and_only_plain_memory_moves_into_the_domain() -> None:
    both = "<memory model='virtio-mem'/><memory model='nvdimm'/></devices>"
    seen = libvirt(qemu=Version(10, 1))
    finding = found(judge(TDX.replace("  </devices>", both), hypervisor=seen), MEMORY_DEVICE)
    assert finding is not None
    assert finding.severity == "blocker", "both are in one line"
    assert finding.remedy == (
        "remove the <memory> devices, and write the size of virtio-mem into <memory> of the domain"
    )
    for model in ("nvdimm", "virtio-pmem", "sgx-epc"):
        one = f"<memory model='{model}'/></devices>"
        finding = found(judge(TDX.replace("  </devices>", one), hypervisor=seen), MEMORY_DEVICE)
        assert finding is not None
        assert (finding.severity, finding.remedy) == ("warning", "remove the <memory> devices")


SHARED_CELL = "<numa><cell cpus='0-3' memory='8' memAccess='shared'/></numa>"


@pytest.mark.parametrize(
    "text",
    [
        TDX.replace(LAUNCH, LAUNCH + backing("<source type='memfd'/><access mode='shared'/>")),
        TDX.replace("passthrough'/>", f"passthrough'>{SHARED_CELL}</cpu>"),
    ],
    ids=["domain", "cell"],
)
def test_shared_memory_is_allowed(text: str) -> None:
    report = judge(text)
    assert troubles(report) == []
    told = found(report, "confidential-shared-memory")
    assert told is not None
    assert told.severity == "info"


def test_room_for_memory_is_allowed() -> None:
    report = judge(TDX.replace(LAUNCH, LAUNCH + SLOTS))
    assert troubles(report) == []
    told = found(report, "confidential-memory-hotplug")
    assert told is not None
    assert (told.severity, told.evidence[0]) == ("info", "gpu.xml:4: <maxMemory>")
    without = SLOTS.replace(" slots='4'", "")
    assert found(judge(TDX.replace(LAUNCH, LAUNCH + without)), told.rule) is None


def test_each_iommu_of_a_domain_is_named() -> None:
    both = "<iommu model='virtio'/><iommu model='intel'/></devices>"
    finding = found(judge(TDX.replace("</devices>", both)), "confidential-viommu")
    assert finding is not None
    assert [text.partition(": ")[2] for text in finding.evidence[:2]] == [
        "<iommu model='virtio'>",
        "<iommu model='intel'>",
    ]


def test_versions_and_the_host() -> None:
    assert "confidential-old-libvirt" in troubles(
        judge(TDX, hypervisor=libvirt(libvirt=Version(11, 5)))
    )
    assert "confidential-old-qemu" in troubles(judge(TDX, hypervisor=libvirt(qemu=Version(9, 2))))
    off = host(guest_support=GuestSupport(tdx=False))
    assert "confidential-host" in troubles(judge(TDX, off))
    snp = TDX.replace("type='tdx'/>", "type='sev-snp'><policy>0x30000</policy></launchSecurity>")
    off = host(guest_support=GuestSupport(sev_snp=False))
    assert "confidential-host" in troubles(judge(snp, off))
    assert troubles(judge(snp)) == []
