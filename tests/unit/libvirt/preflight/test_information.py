"""What is told without being a mistake, and where rules must be silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.check.test_rules import facts
from tests.unit.devices import host_of, with_facts
from tests.unit.libvirt.preflight import situations as good
from tests.unit.libvirt.preflight.guest_cases import CELLS, MEMNODES
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GIB,
    GPU,
    GPU_ELEMENT,
    MDEV_ELEMENT,
    NIC,
    NIC_ELEMENT,
    NUMA,
    PORTS,
    SOUND,
    UUID,
    VF_ELEMENT,
    bar,
    domain,
    function,
    host,
    judge,
    known,
    libvirt,
    of,
    pci_element,
    troubles,
    xml,
)
from vfiomgr.check.model import DeviceNode
from vfiomgr.libvirt.preflight.plan import OF_LIBVIRT
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.iommu import VfioState
from vfiomgr.pci.memory import HostTopology, HugepagePool
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

WHOLE = "vfiomgr libvirt edit gpu.xml --remove 0000:01:00.0 --add 0000:01:00.0"
ORIGIN = OriginalState(GPU.identity, DriverState("nvidia", None), "nvidia", "boot")
APART = BOTH.replace(
    "bus='0x01' slot='0x00' function='0x1'/>\n    </h", "bus='0x02' slot='0x00'/>\n    </h"
)
OLD = function(
    "0000:05:00.0", name="NVIDIA Corporation GF114 [GeForce GTX 560 Ti]", class_code="030000"
)
MOBILE = replace(OLD, name="NVIDIA GP107M [GeForce GTX 1050 Mobile]", class_code="030200")
RAID = replace(OLD, name="HP Smart Array P222", class_code="010400", vendor_id="103c")
OLD_ELEMENT = NIC_ELEMENT.replace("bus='0x02'", "bus='0x05'")
SWITCH = function("0000:08:00.0", class_code="068000", name="NVIDIA GA100 [A100 NVSwitch]")


def information(text: str, snapshot: HostSnapshot | None = None) -> dict[str, str]:
    """The remedies of what is merely told, by rule."""
    report = judge(text, snapshot)
    assert troubles(report) == []
    return {f.rule: f.remedy for f in report.findings if good.found(report, f.rule)}


def test_a_good_domain_on_a_good_host_has_no_finding_at_all() -> None:
    assert judge().findings == ()
    assert judge().not_checked == (
        OF_LIBVIRT,
        "limits on locked memory, the kernel log: not in the snapshot",
        "links and PCIe errors of devices: not in the snapshot",
    )


def test_domains_that_cannot_be_read_are_told_for_what_they_may_claim() -> None:
    odd = replace(known(xml("")), name="odd", defined=None, is_definition_unread=True)
    assert judge(hypervisor=libvirt(odd)).not_checked[0] == (
        "cannot read the XML of domain odd, so its devices are unknown"
    )


def test_a_vendor_function_with_a_type_is_ready_for_guests() -> None:
    assert troubles(judge(xml(VF_ELEMENT))) == []


def test_a_domain_without_devices_of_the_host_is_none_of_our_business() -> None:
    report = judge(xml(""))
    assert (report.findings, report.not_checked) == ((), (OF_LIBVIRT,))


def test_devices_of_other_hypervisors_are_not_judged() -> None:
    report = judge(xml(kind="xen"))
    assert report.findings == ()
    assert report.not_checked == ("a domain of type xen: its devices do not use VFIO",)


@pytest.mark.parametrize(
    ("rule", "text", "snapshot", "remedy"),
    [
        (
            "managed-and-bound",
            xml(BOTH.replace("managed='no'", "managed='yes'", 1)),
            host(origins=(ORIGIN,)),
            "write managed='no' in line 13",
        ),
        ("binding-not-kept", xml(), host(origins=(ORIGIN,)), "bind 0000:01:00.0 --persist"),
        ("vgpu-not-kept", xml(MDEV_ELEMENT), None, f"vgpu define {UUID} --autostart"),
        (
            "multifunction-missing",
            xml(BOTH.replace(" multifunction='on'", "")),
            None,
            "write multifunction='on' in the address of line 13",
        ),
        ("companion-left-out", xml(GPU_ELEMENT), None, f"{WHOLE}; missing: 0000:01:00.1"),
        ("companions-apart", xml(APART), None, WHOLE),
        (
            "no-free-port",
            xml(
                ports=PORTS.replace("index='2'", "index='4'")
                .replace(
                    "index='1' model='pcie-root-port'/>", "index='1' model='pcie-root-port'/>", 1
                )
                .replace("    <controller type='pci' index='4' model='pcie-root-port'/>\n", "")
                .replace("    <controller type='pci' index='3' model='pcie-root-port'/>\n", "")
            ),
            None,
            "model='pcie-root-port'/>",
        ),
        (
            "memory-too-little",
            xml(memory="56"),
            None,
            "give the domain less memory, or stop another guest",
        ),
        ("numa-unbound", xml(before=""), None, "nodeset='0'"),
        (
            "fabric-partition",
            xml(BOTH + OLD_ELEMENT.replace("0x05", "0x06")),
            host(SWITCH, function("0000:06:00.0", numa_node=0)),
            "fmpm",
        ),
        ("code-43", xml(OLD_ELEMENT), host(OLD), "<hidden state='on'/>"),
        ("option-rom", xml(OLD_ELEMENT), host(RAID), "write <rom bar='off'/>"),
        ("code-43-laptop", xml(OLD_ELEMENT), host(MOBILE), "an ACPI table (SSDT) with _ROM"),
    ],
)
def test_what_is_worth_knowing_is_told(
    rule: str, text: str, snapshot: HostSnapshot | None, remedy: str
) -> None:
    assert remedy in information(text, snapshot)[rule]


COMPLETE = (
    "<ioapic driver='kvm'/>",
    "<hyperv><vendor_id state='on' value='x'/></hyperv>",
)


def hiding(*elements: str) -> str:
    """A domain that hides KVM, with these elements in its features."""
    features = f"<features><kvm><hidden state='on'/></kvm>{''.join(elements)}</features>"
    return xml(OLD_ELEMENT, system="").replace("<cpu", features + "<cpu")


def test_what_hides_only_a_part_is_told_with_the_rest() -> None:
    bare = information(hiding(), host(OLD))["code-43"]
    assert "<ioapic driver='kvm'/>" in bare
    assert "<vendor_id" in bare
    half = information(hiding(COMPLETE[0]), host(OLD))["code-43"]
    assert "<ioapic" not in half
    assert "install driver 465 or later" in half
    other = replace(OLD, name="NVIDIA TU104GL [Tesla T4]")
    assert "code-43" not in information(hiding(), host(other))


def test_code_43_is_told_of_old_cards_alone_that_see_kvm() -> None:
    assert "code-43" not in information(hiding(*COMPLETE), host(OLD))
    assert "code-43" not in information(xml())


def test_an_option_rom_is_told_of_storage_in_a_guest_with_bios_alone() -> None:
    off = OLD_ELEMENT.replace("</hostdev>", "<rom bar='off'/></hostdev>")
    first = OLD_ELEMENT.replace("</hostdev>", "<boot order='1'/></hostdev>")
    for text, there in (
        (xml(off), RAID),
        (xml(first), RAID),
        (xml(OLD_ELEMENT, firmware=" firmware='efi'"), RAID),
        (xml(OLD_ELEMENT), replace(RAID, class_code="020000")),
    ):
        assert "option-rom" not in information(text, host(there))


def test_a_gpu_with_outputs_or_for_servers_is_not_that_of_a_laptop() -> None:
    for changes in ({"class_code": "030000"}, {"name": "NVIDIA TU104GL [Tesla T4]"}):
        other = replace(MOBILE, **changes)
        assert "code-43-laptop" not in information(xml(OLD_ELEMENT), host(other))


def test_a_running_domain_does_not_hold_its_own_devices_against_itself() -> None:
    own = DeviceUser("/dev/vfio/1", 4711, "qemu-system-x86", None, (), "win")
    itself = known(xml(), running=True)
    assert troubles(judge(snapshot=host(users=(own,)), hypervisor=libvirt(itself))) == []
    assert of(domain(), host(users=(own,))).count("blocker") == 0


def test_a_guest_of_the_same_name_that_libvirt_does_not_know_is_another() -> None:
    foreign = DeviceUser("/dev/vfio/1", 4711, "qemu-system-x86", None, (), "win")
    assert "held-by-process" in troubles(judge(snapshot=host(users=(foreign,))))


def test_a_running_domain_is_told_once_not_by_its_process_too() -> None:
    other = DeviceUser("/dev/vfio/1", 4711, "qemu-system-x86", None, (), "other")
    report = judge(
        snapshot=host(users=(other,)), hypervisor=libvirt(known(xml(name="other"), running=True))
    )
    assert set(troubles(report)) == {"held-by-domain"}


def test_a_running_domain_has_its_memory_and_huge_pages_already() -> None:
    text = xml(before=f"<memoryBacking><hugepages/></memoryBacking>{NUMA}", memory="14")
    itself = known(text, running=True)
    assert troubles(judge(text)) == ["hugepages-too-few"]
    assert troubles(judge(text, hypervisor=libvirt(itself))) == []
    running = judge(xml(memory="56"), hypervisor=libvirt(known(xml(), running=True)))
    assert good.found(running, "memory-too-little") is None


def test_memory_of_nodes_that_is_unknown_is_not_too_little() -> None:
    first, second = good.NODES.nodes
    silent = replace(good.NODES, nodes=(replace(first, memory_bytes=None, free_bytes=0), second))
    for memory, number in (("64", "0"), ("128", "0-1")):
        text = xml(memory=memory, before=NUMA.replace("'0'", f"'{number}'"))
        assert good.found(judge(text), "memory-too-little") is not None
        assert good.found(judge(text, host(topology=silent)), "memory-too-little") is None


def test_huge_pages_without_a_size_are_of_the_default_size() -> None:
    text = xml(before=f"<memoryBacking><hugepages/></memoryBacking>{NUMA}", memory="12")
    known_size = host(topology=replace(good.NODES, default_page_bytes=1 << 21))
    told = good.found(judge(text, known_size), "hugepages-too-few")
    assert told is not None
    assert "echo 6144 > /sys/devices/system/node/node0/hugepages/hugepages-2048kB" in told.remedy
    assert "<numatune>" not in told.remedy  # no other node has more
    assert troubles(judge(text, host(topology=replace(good.NODES, default_page_bytes=GIB)))) == []


def test_another_node_with_enough_huge_pages_is_offered() -> None:
    near, far = good.NODES.nodes
    free = replace(far, hugepages=(HugepagePool(GIB, 32, 32),))
    pages = "<hugepages><page size='1' unit='GiB'/></hugepages>"
    text = xml(before=f"<memoryBacking>{pages}</memoryBacking>{NUMA}", memory="14")
    told = good.found(judge(text, host(topology=HostTopology((near, free)))), "hugepages-too-few")
    assert told is not None
    assert "another node into <numatune>: node 1 has enough" in told.remedy


def test_ports_are_counted_without_a_host_device_too() -> None:
    disk = "<interface type='x'><address type='pci' bus='{}' slot='0' function='0'/></interface>"
    assert "no-free-port" in information(xml("".join(map(disk.format, (1, 2, 3)))))
    assert "no-free-port" not in information(xml("".join(map(disk.format, (1, 2)))))


def test_members_of_the_group_that_libvirt_will_bind_are_no_obstacle() -> None:
    text = xml(BOTH.replace("managed='no'", "managed='yes'"))
    snapshot = host(replace(GPU, driver="nvidia"), replace(SOUND, driver="snd_hda_intel"))
    assert troubles(judge(text, snapshot)) == []


def test_harmless_drivers_of_bridges_do_not_spoil_a_group() -> None:
    port = function(
        "0000:00:01.0", class_code="060400", header_type=1, driver="pcieport", iommu_group=1
    )
    assert troubles(judge(snapshot=host(port))) == []


CHIPSET: dict[str, Any] = {"bridge_path": "pci0000:00", "vendor_id": "8086", "iommu_group": 2}
ON_BOARD = function("0000:02:00.0", class_code="040300", **CHIPSET)
SMBUS = function("0000:02:00.4", class_code="0c0500", driver="i801_smbus", **CHIPSET)


def test_what_the_host_needs_of_its_chipset_is_not_to_be_bound() -> None:
    report = judge(xml(NIC_ELEMENT), host(ON_BOARD, SMBUS))
    finding = good.found(report, "group-not-viable")
    assert finding is not None
    assert "0000:02:00.4: on i801_smbus" in finding.evidence[-1]
    assert "vfiomgr bind" not in finding.remedy
    assert "slot" not in finding.remedy
    assert "USB device" in finding.remedy
    assert troubles(judge(xml(NIC_ELEMENT), host(ON_BOARD, replace(SMBUS, driver=None)))) == []


def test_of_the_chipset_libvirt_unbinds_nothing_that_the_host_needs() -> None:
    text = xml(pci_element("0000:02:00.4", managed="yes"))
    finding = good.found(judge(text, host(ON_BOARD, SMBUS)), "managed-in-use")
    assert finding is not None
    assert "is the SMBus of the chipset" in finding.summary
    assert "USB device" in finding.remedy


def test_a_function_of_the_chipset_is_no_part_of_the_gpu() -> None:
    gpu = replace(GPU, vendor_id="1002", class_code="030000")
    others = [
        replace(SOUND, vendor_id="1022", class_code="108000", iommu_group=3, driver="ccp"),
        function("0000:01:00.3", vendor_id="1022", class_code="0c0300", iommu_group=4),
    ]
    report = judge(xml(GPU_ELEMENT), host(gpu, *others))
    assert good.found(report, "companion-left-out") is None


def test_of_a_domain_of_libvirt_the_remedy_is_a_change_of_its_definition() -> None:
    itself = known(xml(pci_element("0000:77:00.0"), name="win"))
    assert itself.defined is not None
    finding = good.found(of(itself.defined, host(), libvirt(itself)), "device-missing")
    assert finding is not None
    assert finding.remedy.endswith(": vfiomgr libvirt detach win 0000:77:00.0 --config")
    spaced = known(xml(pci_element("0000:77:00.0"), name="win 11"))
    assert spaced.defined is not None
    finding = good.found(of(spaced.defined, host(), libvirt(spaced)), "device-missing")
    assert finding is not None
    assert finding.remedy.endswith(": vfiomgr libvirt detach 'win 11' 0000:77:00.0 --config")
    part = known(xml(GPU_ELEMENT, name="win"))
    assert part.defined is not None
    told = good.found(of(part.defined, host(), libvirt(part)), "companion-left-out")
    assert told is not None
    assert "then vfiomgr libvirt attach win 0000:01:00.0 --config" in told.remedy


def test_a_bridge_is_no_device_to_reset() -> None:
    port = replace(NIC, header_type=1, class_code="060400", driver="pcieport", reset_method=())
    behind = function("0000:02:01.0", driver="e1000", iommu_group=21)
    assert troubles(judge(xml(NIC_ELEMENT), host(port, behind))) == ["bridge"]


def test_a_virtual_function_without_companions_is_whole() -> None:
    virtual = replace(NIC, physical_function=GPU.address)
    rules = {found.rule for found in judge(xml(NIC_ELEMENT), host(virtual)).findings}
    assert rules == {"vf-token-missing"}  # its physical function is on vfio-pci


def test_missing_functions_of_an_adapter_are_told_with_what_makes_them() -> None:
    adapter = replace(NIC, sriov_totalvfs=8, sriov_offset=1, sriov_stride=2)
    second = replace(adapter, address=PciAddress.parse("0000:02:00.1"), iommu_group=99)
    element = NIC_ELEMENT.replace("function='0x0'", "function='0x3'")
    found = good.found(judge(xml(element), host(adapter, second)), "device-missing")
    assert found is not None
    assert "vfiomgr sriov set 0000:02:00.0 2; otherwise" in found.remedy
    some = replace(adapter, sriov_numvfs=4)
    found = good.found(judge(xml(element), host(some, second)), "device-missing")
    assert found is not None
    told = "vfiomgr sriov set 0000:02:00.0 4, which removes the other 4 first; otherwise"
    assert told in found.remedy, "never fewer than there are"


@pytest.mark.parametrize(
    ("devices", "size", "is_found"),
    [(GPU_ELEMENT, 4, True), (GPU_ELEMENT, 8, False), (MDEV_ELEMENT, 4, False)],
)
def test_a_balloon_gives_nothing_back(devices: str, size: int, *, is_found: bool) -> None:
    current = f"<currentMemory unit='GiB'>{size}</currentMemory>"
    found = good.found(judge(xml(devices, before=NUMA + current)), "balloon")
    assert (found is not None) is is_found
    assert found is None or found.severity == "info"


def test_the_limit_of_a_vgpu_alone_is_no_blocker() -> None:
    """A vendor's driver locks what the guest uses for it, not all."""
    limits = f"{NUMA}<memtune><hard_limit unit='GiB'>4</hard_limit></memtune>"
    found = good.found(judge(xml(MDEV_ELEMENT, before=limits)), "hard-limit-too-low")
    assert found is not None
    assert found.severity == "warning"
    above = limits.replace("'GiB'>4<", "'MiB'>8200<")
    tight = good.found(judge(xml(before=above)), "hard-limit-too-low")
    assert tight is not None
    assert tight.severity == "warning"


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"machine": "pc-q35-rhel9.4.0"}, []),
        ({"machine": "pc-q35-noble-hpb"}, []),
        ({"architecture": "aarch64"}, []),
        ({}, ["aperture-too-small"]),
    ],
)
def test_machines_that_have_the_hosts_width_have_its_window(
    changes: dict[str, Any], rules: list[str]
) -> None:
    text = xml(firmware=" firmware='efi'", cpu="<cpu mode='host-model'/>")
    plain = replace(domain(text), **changes)
    own = host(replace(GPU, bars=bar(128)), architecture=plain.architecture)
    assert troubles(of(plain, own, libvirt())) == rules


@pytest.mark.parametrize(
    ("mode", "kind", "qemu", "is_like_host"),
    [
        ("host-passthrough", "kvm", Version(7, 2), True),
        ("maximum", "kvm", Version(6, 0), True),
        ("host-passthrough", "kvm", None, True),
        ("host-passthrough", "kvm", Version(5, 2), False),
        ("host-model", "kvm", Version(7, 2), False),
        ("custom", "kvm", Version(7, 2), False),
        ("maximum", "qemu", Version(7, 2), False),
    ],
)
def test_a_cpu_that_is_the_hosts_is_as_wide(
    mode: str, kind: str, qemu: Version | None, *, is_like_host: bool
) -> None:
    """A guest of 1.5 TiB, which 40 bits cannot reach, on a host that has 46."""
    text = xml(firmware=" firmware='efi'", cpu=f"<cpu mode='{mode}'/>", memory="1536", kind=kind)
    snapshot = host(replace(GPU, bars=bar(128)), topology=None)
    found = {f.rule for f in of(domain(text), snapshot, libvirt(qemu=qemu)).findings}
    is_silent = qemu is not None and qemu < Version(7, 1)
    assert ("address-space-too-small" in found) == (not is_like_host and not is_silent)
    if is_like_host:
        assert "aperture-too-small" not in found


def test_seabios_takes_what_lies_above_the_memory() -> None:
    def judged(gibibytes: int) -> list[str]:
        text = xml(cpu="<cpu mode='host-model'/>")
        return troubles(judge(text, host(replace(GPU, bars=bar(gibibytes)))))

    assert judged(512) == []
    assert judged(1024) == ["aperture-too-small"]


@pytest.mark.parametrize(("memory", "is_wrong"), [(988, False), (992, True)])
def test_memory_and_hole_of_an_amd_host_stay_below_its_reserved_range(
    memory: int, *, is_wrong: bool
) -> None:
    plain = domain(xml(cpu="<cpu mode='host-model'/>"))
    large = replace(plain, memory=replace(plain.memory, total_bytes=memory * GIB))

    def found(vendor: str, *version: int) -> list[str]:
        snapshot = host(cpu_vendor=vendor, topology=None)
        return troubles(of(large, snapshot, libvirt(qemu=Version(*version))))

    assert found("GenuineIntel", 11, 0) == (["address-space-too-small"] if is_wrong else [])
    assert found("AuthenticAMD", 11, 0) == ["address-space-too-small"]
    assert found("AuthenticAMD", 7, 0) == []


def test_nothing_is_said_of_versions_where_libvirt_was_not_asked() -> None:
    text = xml(
        NIC_ELEMENT.replace("<source>", "<driver model='mlx5_vfio_pci' iommufd='yes'/><source>")
    )
    report = of(domain(text), host())
    assert troubles(report) == []
    assert "libvirt was not queried" in report.not_checked[0]


@pytest.mark.parametrize(("qemu", "is_old"), [(Version(8, 2, 5), True), (Version(9, 0), False)])
def test_iommufd_needs_a_qemu_that_has_it(qemu: Version, *, is_old: bool) -> None:
    text = xml(NIC_ELEMENT.replace("<source>", "<driver name='vfio' iommufd='yes'/><source>"))
    found = good.found(judge(text, hypervisor=libvirt(qemu=qemu)), "iommufd-missing")
    assert (found is not None) is is_old
    if found is not None:
        assert "install QEMU 9.0.0 or later" in found.remedy


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "the guest's root has 4 buses, but the first expander has busNr"),
        (3, "busNr='4' or more"),
        (4, None),
        (252, None),
        (253, "busNr='252' or less"),
        (254, "needs 4 bus numbers"),
    ],
)
def test_an_expander_has_bus_numbers_for_its_ports(number: int, words: str | None) -> None:
    expander = (
        f"<controller type='pci' index='4' model='pcie-expander-bus'><target busNr='{number}'/>"
        "</controller>"
    )
    ports = "".join(
        f"<controller type='pci' index='{5 + slot}' model='pcie-root-port'>"
        f"<address type='pci' bus='4' slot='{slot}' function='0'/></controller>"
        for slot in range(3)
    )
    found = good.found(judge(xml(ports=PORTS + expander + ports)), "expander-buses")
    assert (found is None) is (words is None)
    if found is not None and words is not None:
        assert words in f"{found.summary} {found.remedy}"


def test_what_could_not_be_looked_at_is_told() -> None:
    text = xml(
        NIC_ELEMENT.replace("<source>", "<rom file='/x.rom'/><source>"),
        cpu="<cpu mode='host-passthrough'><maxphysaddr mode='passthrough'/></cpu>",
    )
    blind = with_facts(
        host_of(NIC), users=None, host_uses=None, topology=None, cpu_address_bits=None
    )
    report = of(domain(text), blind)
    for words in ("other domains", "limits", "NUMA", "BARs", "ROM"):
        assert words in " ".join(report.not_checked)
    for words in ("vfio-pci", "processes", "routes"):
        assert words in " ".join(report.unknown)


def test_an_unknown_node_of_a_device_is_no_distance() -> None:
    snapshot = host(replace(GPU, numa_node=-1), replace(SOUND, numa_node=None))
    assert troubles(judge(xml(before=NUMA.replace("'0'", "'1'")), snapshot)) == []


def test_a_device_that_has_cells_of_its_own_needs_no_expander() -> None:
    """`<acpi nodeset>`, and a guest whose cells are all on one node."""
    lost = xml(NIC_ELEMENT, cpu=CELLS, before=MEMNODES.format(1))
    assert troubles(judge(lost)) == ["device-without-cell"]
    told = NIC_ELEMENT.replace("<source>", "<acpi nodeset='1'/><source>")
    assert troubles(judge(xml(told, cpu=CELLS, before=MEMNODES.format(1)))) == []
    assert troubles(judge(xml(NIC_ELEMENT, cpu=CELLS, before=MEMNODES.format(0)))) == []


def test_a_vgpu_is_near_what_its_parent_is() -> None:
    report = judge(
        xml(MDEV_ELEMENT, cpu=CELLS, before=MEMNODES.format(1)),
        host(function("0000:42:00.4", numa_node=1)),
    )
    finding = good.found(report, "device-without-cell")
    assert finding is not None
    assert "<node>1</node>" in finding.remedy
    assert "/sys/bus/pci/devices/0000:42:00.4/numa_node: 1" in finding.evidence


ARM = ("arch='x86_64' machine='pc-q35-7.2'", "arch='aarch64' machine='virt'")


def test_of_another_architecture_it_is_told_what_nobody_judges() -> None:
    large = replace(GPU, bars=bar(1 << 14))
    on_pc = xml(firmware=" firmware='efi'").replace("<vcpu>4<", "<vcpu>300<")
    text = on_pc.replace(*ARM)
    old = good.libvirt(libvirt=Version(10, 9))
    assert troubles(judge(on_pc, host(large), old)) == ["too-many-cpus", "aperture-too-small"]
    report = judge(text, host(large, architecture="aarch64"))
    assert troubles(report) == []
    assert any("(aarch64 machine)" in line for line in report.not_checked)
    assert not any("addresses, BAR windows" in line for line in judge().not_checked)


@pytest.mark.parametrize(
    ("host_is", "is_found"), [("x86_64", True), ("aarch64", False), (None, False)]
)
def test_kvm_runs_guests_of_its_own_architecture(host_is: str | None, *, is_found: bool) -> None:
    text = xml().replace(*ARM)
    report = judge(text, host(architecture=host_is))
    assert ("other-architecture" in troubles(report)) is is_found
    emulated = xml(kind="qemu").replace(*ARM)
    assert good.found(judge(emulated, host(architecture=host_is)), "other-architecture") is None
    small = xml().replace("arch='x86_64'", "arch='i686'")
    on_pc = judge(small, host(architecture="x86_64"))
    assert good.found(on_pc, "other-architecture") is None


MIXED = {"0xd05": (0, 1, 2, 3), "0xd0b": (4, 5)}
PIN = "<cputune><vcpupin vcpu='{}' cpuset='{}'/></cputune>"
ONE_PIN, OTHER_PIN = PIN.format(0, 4), PIN.format(0, 1)


@pytest.mark.parametrize(
    ("parts", "vcpu", "is_found"),
    [
        (MIXED, "<vcpu>", True),
        (MIXED, "<vcpu cpuset='4-5'>", False),
        (MIXED, "<vcpu cpuset='3-4'>", True),
        (MIXED, f"{ONE_PIN}<vcpu>", True),
        (MIXED, f"{ONE_PIN}<vcpu cpuset='4-5'>", False),
        (MIXED, f"{OTHER_PIN}<vcpu cpuset='4-5'>", True),
        ({"0xd0b": (0, 1)}, "<vcpu>", False),
        ({}, "<vcpu>", False),
    ],
)
def test_a_guest_of_arm_stays_on_one_kind_of_cores(
    parts: dict[str, tuple[int, ...]], vcpu: str, *, is_found: bool
) -> None:
    text = xml().replace(*ARM).replace("<vcpu>", vcpu)
    report = judge(text, host(architecture="aarch64", cpu_parts=parts))
    finding = good.found(report, "mixed-cores")
    assert (finding is not None) is is_found
    assert finding is None or "<vcpu cpuset='4-5'>" in finding.remedy
    assert good.found(judge(xml(), host(cpu_parts=parts)), "mixed-cores") is None


def test_what_the_guest_does_not_get_takes_no_room_and_no_address_space() -> None:
    kept = pci_element("0000:01:00.1", managed="no", rest="      <address type='unassigned'/>\n")
    nested = GPU_ELEMENT + kept + "<iommu model='intel'><driver caching_mode='on'/></iommu>"
    assert troubles(judge(xml(nested))) == []
    assert troubles(judge(xml(nested.replace("unassigned", "none")))) == ["viommu-group-apart"]
    huge = replace(GPU, bars=bar(1 << 16))
    lone = pci_element("0000:01:00.0", rest="      <address type='unassigned'/>\n")
    assert "aperture-too-small" in troubles(judge(xml(BOTH), host(huge)))
    assert "aperture-too-small" not in troubles(judge(xml(lone), host(huge)))
    lost = xml(lone, cpu=CELLS, before=MEMNODES.format(1))
    assert troubles(judge(lost)) == []
    apart = BOTH.replace("<address type='pci' bus='0x01' slot='0x00' function='0x1'/>", "")
    assert good.found(judge(xml(apart)), "companions-apart") is not None
    assert good.found(judge(xml(GPU_ELEMENT + kept)), "companions-apart") is None


def test_an_index_of_acpi_is_no_set_of_cells() -> None:
    numbered = NIC_ELEMENT.replace("<source>", "<acpi index='1'/><source>")
    report = judge(xml(numbered, cpu=CELLS, before=MEMNODES.format(1)))
    assert troubles(report) == ["device-without-cell"]


MANY = xml(NIC_ELEMENT).replace("<vcpu>4<", "<vcpu>256<")


@pytest.mark.parametrize(
    ("minor", "iommu", "is_found"),
    [
        (9, "", True),
        (10, "", False),
        (10, "<iommu model='intel'><driver caching_mode='on'/></iommu>", False),
        (10, "<iommu model='intel'><driver caching_mode='on' eim='off'/></iommu>", True),
        (10, "<iommu model='virtio'/>", True),
    ],
)
def test_libvirt_10_10_adds_extended_interrupt_mode_itself(
    minor: int,
    iommu: str,
    is_found: bool,  # noqa: FBT001
) -> None:
    text = MANY.replace("</devices>", f"{iommu}</devices>")
    found = troubles(judge(text, hypervisor=good.libvirt(libvirt=Version(10, minor))))
    assert ("too-many-cpus" in found) is is_found


def test_disks_of_s390_have_a_boot_order() -> None:
    element = MDEV_ELEMENT.replace("vfio-pci", "vfio-ccw").replace(
        "</hostdev>", "<boot order='1'/></hostdev>"
    )
    assert "vgpu-boot-order" not in troubles(judge(xml(element)))


GROUPS = NIC_ELEMENT.replace("<source>", "<driver name='vfio'/><source>")


def with_iommufd(**changes: Any) -> HostSnapshot:
    """A host whose kernel has /dev/iommu and device nodes of VFIO."""
    node = DeviceNode("/dev/iommu", 0o660, "root:root")
    known = facts(has_dev=True, nodes=(node,), config={"VFIO_DEVICE_CDEV": "y"})
    return host(replace(NIC, vfio_device="vfio0", vfio_cdev=True), readiness=known, **changes)


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        (Version(12, 4), "write <iommufd enabled='yes'/> in the domain"),
        (Version(12, 1), "write <driver name='vfio' iommufd='yes'/> in each hostdev"),
        (Version(12, 0), None),
    ],
)
def test_iommufd_is_advised_where_all_have_it(release: Version, remedy: str | None) -> None:
    report = judge(xml(GROUPS), with_iommufd(), libvirt(libvirt=release))
    found = good.found(report, "iommufd-possible")
    assert (found is not None) is (remedy is not None)
    if found is not None:
        assert found.severity == "info"
        assert found.remedy.startswith(remedy or "?")


FD_GROUP = "<iommufd enabled='yes' fdgroup='iommu'/>"


@pytest.mark.parametrize(
    ("text", "release", "severity"),
    [
        (xml(GROUPS, before=FD_GROUP), Version(12, 2), "info"),
        (xml(GROUPS, before=FD_GROUP), Version(12, 1), None),
        (xml(GROUPS, before=FD_GROUP.replace("yes", "no")), Version(12, 2), None),
        (xml(GROUPS.replace("'vfio'/>", "'vfio' iommufd='no'/>"), before=FD_GROUP), None, None),
        (xml("", before=FD_GROUP), None, None),
    ],
    ids=["program", "dropped", "disabled", "groups", "no-device"],
)
def test_a_passed_descriptor_is_named(
    text: str, release: Version | None, severity: str | None
) -> None:
    hypervisor = libvirt() if release is None else libvirt(libvirt=release)
    found = good.found(judge(text, with_iommufd(), hypervisor), "iommufd-fdgroup")
    assert (found and found.severity) == severity


NO_GROUPS = VfioState(has_groups=False, has_cdevs=True)
IN_DEVICE = GROUPS.replace("'vfio'/>", "'vfio' iommufd='yes'/>")


@pytest.mark.parametrize(
    ("rule", "snapshot", "release"),
    [
        ("element-dropped", with_iommufd(vfio=NO_GROUPS), Version(11, 3)),
        ("iommufd-missing", host(NIC, readiness=facts(has_dev=True), vfio=NO_GROUPS), None),
    ],
)
def test_iommufd_is_not_to_be_removed_on_a_kernel_without_groups(
    rule: str, snapshot: HostSnapshot, release: Version | None
) -> None:
    hypervisor = libvirt() if release is None else libvirt(libvirt=release)
    found = good.found(judge(xml(IN_DEVICE), snapshot, hypervisor), rule)
    assert found is not None
    assert "remove" not in found.remedy
    assert "boot a kernel with CONFIG_VFIO_GROUP" in found.remedy


NVME = (
    "<disk type='nvme' device='disk'><driver name='qemu' type='raw'/>"
    "<source type='pci' managed='no' namespace='1'>"
    "<address domain='0x0000' bus='0x02' slot='0x00' function='0x0'/></source>"
    "<target dev='vda' bus='virtio'/></disk>"
)


@pytest.mark.parametrize(
    ("text", "release", "expected"),
    [
        (xml(IN_DEVICE), Version(11, 3), True),
        (xml(IN_DEVICE), Version(12, 1), False),
        (xml(GROUPS, before="<iommufd enabled='yes'/>"), Version(12, 2), False),
        (xml(GROUPS, before="<iommufd enabled='yes'/>"), Version(12, 1), True),
        (xml(MDEV_ELEMENT, before="<iommufd enabled='yes'/>"), Version(12, 8), True),
        (xml(NVME, before="<iommufd enabled='yes'/>"), Version(12, 8), True),
    ],
)
def test_without_vfio_groups_only_iommufd_of_pci_devices_starts(
    text: str, release: Version, *, expected: bool
) -> None:
    snapshot = with_iommufd(vfio=NO_GROUPS)
    report = judge(text, snapshot, libvirt(libvirt=release))
    assert (good.found(report, "vfio-groups-missing") is not None) is expected
    assert good.found(report, "iommufd-possible") is None


@pytest.mark.parametrize("config", [{}, {"VFIO_DEVICE_CDEV": "n"}])
def test_a_cdev_counts_before_the_kernels_configuration(config: dict[str, str]) -> None:
    snapshot = with_iommufd()
    assert snapshot.readiness is not None
    known = replace(snapshot.readiness, config=config, config_source="/boot/config")
    report = judge(xml(GROUPS), with_facts(snapshot, readiness=known), libvirt())
    found = good.found(report, "iommufd-possible")
    assert found is not None
    assert "/dev/vfio/devices/vfio0 exists" in found.evidence


@pytest.mark.parametrize(
    ("text", "snapshot", "qemu"),
    [
        (xml(GROUPS), host(NIC, readiness=facts(has_dev=True)), Version(11, 0)),
        (xml(GROUPS), with_iommufd(), Version(8, 2)),
        (xml(GROUPS), with_iommufd(), None),
        (xml(GROUPS.replace("'vfio'/>", "'vfio' iommufd='no'/>")), with_iommufd(), Version(11, 0)),
        (xml(GROUPS.replace("'vfio'/>", "'vfio' iommufd='yes'/>")), with_iommufd(), Version(11, 0)),
        (xml(GROUPS + BOTH), with_iommufd(), Version(11, 0)),
    ],
    ids=["kernel", "qemu", "unknown", "opted-out", "has-it", "peers"],
)
def test_iommufd_is_not_advised_where_one_lacks_it_or_it_would_cost(
    text: str, snapshot: HostSnapshot, qemu: Version | None
) -> None:
    assert good.found(judge(text, snapshot, libvirt(qemu=qemu)), "iommufd-possible") is None
