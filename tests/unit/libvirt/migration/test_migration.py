"""Which devices migrate, what prevents the migration of a domain, and which hosts fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.libvirt.migration.hosts import (
    MLX5,
    OTHER_VF,
    PORT,
    UUID,
    VF,
    network,
    network_host,
    support,
    vgpu_host,
)
from tests.unit.libvirt.preflight.situations import (
    GPU,
    MLX5_VFIO,
    NODES,
    domain,
    host,
    judge,
    libvirt,
    pci_element,
    xml,
)
from tests.unit.libvirt.preflight.situations import VF as VENDOR_VF
from vfiomgr.libvirt.migration.devices import CONDITIONS, migratability_of, vgpu_migratability
from vfiomgr.libvirt.migration.plan import check
from vfiomgr.pci.drivers import VfioVariant
from vfiomgr.pci.guest_support import MigrationState
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.units import Version
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.libvirt.migration.plan import MigrationReport, MigrationTarget
    from vfiomgr.pci.memory import HostTopology
    from vfiomgr.snapshot.model import HostSnapshot

NVME = """<disk type='nvme' device='disk'>
<source type='pci' namespace='1'><address domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
</source><target dev='vda' bus='virtio'/></disk>"""
VGPU = f"""<hostdev mode='subsystem' type='mdev' model='vfio-pci'>
<source><address uuid='{UUID}'/></source></hostdev>"""
CREATE = "create a virtual function and assign it:"
ONE_VF = xml(pci_element(VF), ports="")
TWO_VFS = xml(pci_element(VF) + pci_element(OTHER_VF), ports="")
ONE_VGPU = xml(VGPU, ports="", before="")


def report(text: str, seen: HostSnapshot, **to: HostSnapshot) -> MigrationReport:
    """What is found of a domain on a host that could go to others."""
    return check(seen, domain(text), to)


def rules(found: MigrationReport | MigrationTarget) -> list[str]:
    """The rules of its findings but for information."""
    return [one.rule for one in found.report.findings if one.severity != "info"]


def target(text: str, seen: HostSnapshot, other: HostSnapshot) -> MigrationTarget:
    """The other host, named `b`."""
    (found,) = report(text, seen, b=other).targets
    return found


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ("mlx5_vfio_pci", "yes: mlx5_vfio_pci migrates it; the function must be migratable: "),
        ("xe-vfio-pci", "yes: xe-vfio-pci migrates it"),
        ("hisi_acc_vfio_pci", "yes: hisi_acc_vfio_pci migrates it"),
        ("nvgrace_gpu_vfio_pci", "no: nvgrace_gpu_vfio_pci does not migrate devices"),
        ("vfio-pci", "no: vfio-pci does not migrate devices"),
    ],
)
def test_without_debugfs_the_driver_tells(driver: str, text: str) -> None:
    device = network(VF, driver=driver)
    seen = network_host(device, guest_support=None)
    assert str(migratability_of(seen, device)).startswith(text)


def test_debugfs_is_believed_before_the_name() -> None:
    device = network(VF)
    lists = network_host()
    told = migratability_of(lists, device)
    assert str(told) == "yes: mlx5_vfio_pci migrates it (stop-copy, p2p, pre-copy, dirty-tracking)"
    assert told.has_p2p
    assert "/sys/kernel/debug/vfio/0000:81:00.2/migration/state: RUNNING" in told.evidence
    cannot = network_host(guest_support=support(migration=(MigrationState(VF),)))
    told = migratability_of(cannot, device)
    assert str(told) == "no: mlx5_vfio_pci does not migrate it"
    assert told.evidence[-1] == "/sys/kernel/debug/vfio/0000:81:00.2: no directory migration"


@pytest.mark.parametrize("driver", sorted(CONDITIONS))
def test_variant_drivers_migrate_virtual_functions_only(driver: str) -> None:
    port = network(PORT, driver=driver, physical_function=None)
    seen = network_host(port, guest_support=None)
    assert str(migratability_of(seen, port)) == f"no: {driver} migrates virtual functions only"
    shown = network_host(port, guest_support=support(migration=(MigrationState(PORT),)))
    told = migratability_of(shown, port)
    assert told.why == f"{driver} migrates virtual functions only"
    assert told.evidence[1:] == (
        "/sys/bus/pci/devices/0000:81:00.0: no physfn link",
        "/sys/kernel/debug/vfio/0000:81:00.0: no directory migration",
    )
    able = network_host(port, guest_support=support(migration=(MigrationState(PORT, "RUNNING"),)))
    assert migratability_of(able, port).is_possible, "debugfs is believed before the name"


@pytest.mark.parametrize(
    ("driver", "active", "remedy"),
    [
        ("mlx5_core", 0, f"{CREATE} vfiomgr sriov set {PORT} 1"),
        ("mlx5_vfio_pci", 0, f"{CREATE} vfiomgr unbind {PORT}, then vfiomgr sriov set {PORT} 1"),
        ("mlx5_core", 2, "assign one of its virtual functions"),
    ],
)
def test_a_physical_function_has_virtual_ones_that_migrate(
    driver: str, active: int, remedy: str
) -> None:
    port = network(
        PORT, driver=driver, physical_function=None, sriov_totalvfs=8, sriov_numvfs=active
    )
    seen = network_host(port, guest_support=None)
    told = migratability_of(seen, port)
    assert (told.is_possible, told.remedy) == (False, remedy)
    (found,) = report(xml(pci_element(PORT), ports=""), seen).report.findings
    assert found.rule == "migration-device"
    assert found.remedy.startswith(f"{remedy}; or before the migration: vfiomgr libvirt edit ")


def test_on_a_host_driver_its_best_variant_counts() -> None:
    device = network(VF, driver="mlx5_core")
    told = migratability_of(network_host(device), device)
    assert told.is_possible
    assert told.remedy == f"vfiomgr bind {VF} --driver mlx5_vfio_pci"
    assert str(told).startswith("not yet: ")
    plain = replace(GPU, driver="nvidia")
    assert str(migratability_of(host(plain), plain)) == (
        "no: only a variant driver of VFIO migrates devices, and this kernel has none for it"
    )


BUILT_IN = VfioVariant("vfio_pci:v000019E5d0000A250sv*sd*bc*sc*i*", "hisi_acc_vfio_pci", None)
LISTS = "modules.dep and modules.alias in /lib/modules/6.18.3"


@pytest.mark.parametrize(
    ("modules", "variants"),
    [
        (None, ()),
        (("mlx5_vfio_pci", "vfio_pci"), ()),
        (("mlx5_vfio_pci", "vfio_pci"), (BUILT_IN,)),
        (None, (MLX5_VFIO,)),
    ],
    ids=[
        "neither list",
        "no modules.alias",
        "modules.alias is absent, one built in",
        "no modules.dep",
    ],
)
def test_without_the_lists_of_modules_variant_drivers_are_unknown(
    modules: tuple[str, ...] | None, variants: tuple[VfioVariant, ...]
) -> None:
    plain = replace(GPU, driver="nvidia")
    bare = host(plain, kernel_release="6.18.3", variants=variants, vfio_modules=modules)
    told = migratability_of(bare, plain)
    assert told.is_possible is None
    assert str(told) == (
        f"unknown: cannot find variant drivers of VFIO without {LISTS}; create them as root: depmod"
    )
    found = report(xml(pci_element(str(GPU.address)), ports=""), bare).report.findings
    (unknown,) = (one for one in found if one.rule == "migration-unknown")
    assert unknown.remedy == "create them as root: depmod"


@pytest.mark.parametrize(
    ("release", "missing"),
    [
        ("6.18.3", f"{LISTS}; add them to the recording"),
        (None, "/proc/sys/kernel/osrelease; add it to the recording"),
    ],
)
def test_a_recording_without_the_lists_of_modules_is_told_to_add_them(
    release: str | None, missing: str
) -> None:
    plain = replace(GPU, driver="nvidia")
    recorded = host(plain, kernel_release=release, boot_id=None, variants=(), vfio_modules=None)
    assert str(migratability_of(recorded, plain)) == (
        f"unknown: cannot find variant drivers of VFIO without {missing}"
    )


def test_a_kernel_without_variant_drivers_is_known_to_have_none() -> None:
    plain = replace(GPU, driver="nvidia")
    none = host(plain, kernel_release="6.18.3", variants=(), vfio_modules=("vfio_pci",))
    assert migratability_of(none, plain).is_possible is False


def test_vgpus() -> None:
    seen = vgpu_host(2)
    (vgpu,) = (one for one in seen.vgpus.active if one.name == UUID)
    assert vgpu_migratability(seen, vgpu).is_possible
    old = with_facts(seen, kernel_release="5.15.0-91-generic")
    assert vgpu_migratability(old, vgpu).is_possible is False
    gvt = Vgpu(UUID, "mdev", "p", "i915-GVTg_V5_4", None, "vfio_mdev", 7, None, None)
    assert vgpu_migratability(seen, gvt).is_possible is False
    sample = Vgpu(UUID, "mdev", "mtty", "mtty-1", None, "mtty", 7, None, None)
    assert vgpu_migratability(seen, sample).is_possible is None
    vendor = host()
    assert migratability_of(vendor, vendor.devices[0]).is_possible is False
    function = next(d for d in vendor.devices if str(d.address) == VENDOR_VF)
    assert migratability_of(vendor, function).is_possible


def test_a_domain_that_can() -> None:
    found = report(ONE_VF, network_host(), b=network_host())
    assert rules(found) == []
    (other,) = found.targets
    assert other.fits
    assert not found.is_blocked
    assert [(place.target, place.is_ready) for place in other.places] == [(VF, True)]


def test_what_its_host_prevents() -> None:
    seen = network_host(network(VF, driver="mlx5_core"), network(OTHER_VF, driver="vfio-pci"))
    assert rules(report(ONE_VF, seen)) == ["migration-driver"]
    alone = xml(pci_element(OTHER_VF), ports="")
    assert rules(report(alone, seen)) == ["migration-device"]
    assert rules(report(xml(pci_element("0000:77:00.0"), ports=""), seen)) == [
        "migration-device-missing"
    ]
    assert rules(report(xml(NVME, ports=""), seen)) == ["migration-disk"]
    sample = vgpu_host(2)
    unknown = with_facts(sample, vgpus=tuple(replace(v, driver="new") for v in sample.vgpus.active))
    assert rules(report(ONE_VGPU, unknown)) == ["migration-unknown"]


def test_several_need_p2p() -> None:
    assert rules(report(TWO_VFS, network_host())) == []
    without = network_host(guest_support=support(VF, OTHER_VF, features=("stop-copy",)))
    assert rules(report(TWO_VFS, without)) == ["migration-several"]
    old = network_host(guest_support=support(VF, OTHER_VF, features=None))
    found = report(TWO_VFS, old)
    assert [(one.rule, one.severity) for one in found.report.findings] == [
        ("migration-several", "warning")
    ]


def test_a_virtual_iommu() -> None:
    iommu = "<iommu model='intel'/>"
    assert rules(report(xml(pci_element(VF) + iommu, ports=""), network_host())) == [
        "migration-viommu"
    ]
    modern = xml(pci_element(VF) + iommu, ports="", before="<iommufd enabled='yes'/>")
    seen = network_host(guest_support=support(VF, features=("stop-copy", "p2p")))
    (found,) = report(modern, seen).report.findings
    assert (found.rule, found.severity) == ("migration-viommu", "warning")
    assert found.why.endswith("an IOMMU of the host that tracks dirty pages")


def test_accelerated_smmus_do_not_migrate() -> None:
    one = "<iommu model='smmuv3'><driver pciBus='1'/></iommu>"
    iommus = one + one.replace("'1'", "'2' accel='on'")
    modern = xml(pci_element(VF) + iommus, ports="", before="<iommufd enabled='yes'/>")
    seen = network_host(guest_support=support(VF, features=("stop-copy", "p2p")))
    found = next(f for f in report(modern, seen).report.findings if f.rule == "migration-viommu")
    assert (found.severity, found.remedy) == ("blocker", "remove each <iommu>")
    assert found.why == "QEMU does not migrate an accelerated SMMUv3"
    assert [text.partition(", ")[2] for text in found.evidence] == ["pciBus='1'", "pciBus='2'"]


def test_a_device_that_tracks_dirty_pages_does_not_migrate_behind_a_virtual_iommu() -> None:
    seen = network_host(guest_support=support(VF, features=("stop-copy", "dirty-tracking")))
    iommu = "<iommu model='intel'/>"
    text = xml(pci_element(VF) + iommu, ports="", before="<iommufd enabled='yes'/>")
    (found,) = report(text, seen).report.findings
    assert (found.rule, found.severity) == ("migration-viommu", "blocker")
    assert found.why.endswith(f"with devices that track dirty pages themselves: {VF}")
    (found,) = report(xml(pci_element(VF) + iommu, ports=""), seen).report.findings
    assert found.severity == "blocker"
    assert found.why.startswith("it migrates only with iommufd, QEMU 11.0")


def test_confidential_guests_stay() -> None:
    launch = "<launchSecurity type='sev'/>"
    assert rules(report(xml(pci_element(VF), ports="", before=launch), network_host())) == [
        "migration-confidential"
    ]


TEAM = "<teaming type='transient' persistent='ua-team'/>"
MAC = "52:54:00:12:34:56"
PARTNER = f"""<interface type='network'><mac address='{MAC}'/><source network='default'/>
<model type='virtio'/>
<teaming type='persistent'/><alias name='ua-team'/></interface>"""


def test_teaming_lets_a_device_go_that_cannot_migrate() -> None:
    seen = network_host(network(VF, driver="vfio-pci"))
    team = xml(pci_element(VF, rest=TEAM) + PARTNER, ports="")
    assert domain(team).hostdevs[0].partner == "ua-team"
    assert [(one.alias, one.mac) for one in domain(team).teamed] == [("ua-team", MAC)]
    assert rules(report(team, seen)) == []
    alone = xml(pci_element(VF, rest=TEAM), ports="")
    assert rules(report(alone, seen)) == ["teaming-partner-missing"]
    assert rules(report(xml(interface(MAC.upper()) + PARTNER, ports=""), seen)) == []


def interface(mac: str | None) -> str:
    """The device as an interface, whose MAC address libvirt sets."""
    own = "" if mac is None else f"<mac address='{mac}'/>"
    return (
        f"<interface type='hostdev'>{own}<source><address type='pci' bus='0x81' function='0x2'/>"
        f"</source>{TEAM}</interface>"
    )


WITHOUT_MAC = PARTNER.replace(f"<mac address='{MAC}'/>", "")


@pytest.mark.parametrize(
    ("devices", "shown", "remedy"),
    [
        (
            interface("52:54:00:00:00:01") + PARTNER,
            f"{MAC} and 52:54:00:00:00:01",
            f"write <mac address='{MAC}'/> in line ",
        ),
        (
            interface(None) + PARTNER,
            f"{MAC} and no <mac>",
            f"write <mac address='{MAC}'/> in line ",
        ),
        (interface(MAC) + WITHOUT_MAC, f"no <mac> and {MAC}", f"write <mac address='{MAC}'/> in "),
        (
            pci_element(VF, rest=TEAM) + WITHOUT_MAC,
            "ua-team, no <mac>",
            f"write <mac> with the address of {VF} in line ",
        ),
    ],
)
def test_both_halves_of_a_pair_need_one_mac_address(devices: str, shown: str, remedy: str) -> None:
    seen = network_host(network(VF, driver="vfio-pci"))
    text = xml(devices, ports="")
    found = report(text, seen, b=network_host(network(VF, driver="vfio-pci"), boot_id="b"))
    (one,) = found.report.findings
    assert (one.rule, one.severity) == ("teaming-mac", "warning")
    assert one.evidence[0].endswith(shown)
    assert remedy in one.remedy
    assert ("different" in one.summary) is ("with the address of" not in remedy)
    assert "teaming-mac" not in rules(found.targets[0]), "it is the domain's, and not the host's"
    before = judge(text, seen)
    assert [f for f in before.findings if f.rule == "teaming-mac"] == [one]


def test_a_plain_device_needs_its_mac_address_set_on_both_hosts() -> None:
    seen = network_host(network(VF, driver="vfio-pci"))
    text = xml(pci_element(VF, rest=TEAM) + PARTNER, ports="")
    there = target(text, seen, network_host(network(VF, driver="vfio-pci"), boot_id="b"))
    (needed,) = [one for one in there.report.findings if one.rule == "migration-condition"]
    assert needed.summary.endswith(f"needs the MAC address of ua-team: {MAC}")
    assert needed.remedy.startswith(f"on that host, before the migration: set {MAC} with ")
    assert f"whether {VF} has the MAC address of ua-team: {MAC}" in judge(text, seen).not_checked
    there = target(xml(interface(MAC) + PARTNER, ports=""), seen, seen)
    assert not [one for one in there.report.findings if one.rule == "migration-condition"]


def test_an_old_qemu() -> None:
    found = check(network_host(), domain(ONE_VF), {}, libvirt(qemu=Version(7, 2)))
    assert rules(found) == ["migration-old-qemu"]
    there = network_host(guest_support=support(VF, qemu="7.2.0"))
    assert rules(target(ONE_VF, network_host(), there)) == ["migration-old-qemu"]
    newest = ONE_VF.replace("pc-q35-7.2", "pc-q35-10.1")
    old = network_host(guest_support=support(VF, qemu="10.0.2"))
    assert rules(target(newest, network_host(), old)) == ["migration-machine"]


def test_other_versions_and_cpus() -> None:
    there = network_host(guest_support=support(VF, libvirt="11.0.0"))
    assert rules(target(ONE_VF, network_host(), there)) == ["migration-older-libvirt"]
    amd = network_host(cpu_vendor="AuthenticAMD")
    assert rules(target(ONE_VF, network_host(), amd)) == ["migration-cpu"]
    narrow = target(ONE_VF, network_host(), network_host(cpu_address_bits=39))
    assert rules(narrow) == ["migration-cpu"]
    assert narrow.fits
    model = ONE_VF.replace("mode='host-passthrough'", "mode='host-model'")
    assert rules(target(model, network_host(), network_host(cpu_address_bits=39))) == []


def test_another_address_is_told() -> None:
    there = network_host(network(OTHER_VF))
    found = target(ONE_VF, network_host(), there)
    assert found.fits
    (place,) = found.places
    assert place.moves
    assert [one.rule for one in found.report.findings] == ["migration-address"]


UNBOUND = xml(pci_element(VF), ports="", before="")
PINNED = "<cputune><vcpupin vcpu='0' cpuset='8-11'/></cputune>"


def test_another_numa_node_is_told() -> None:
    here, far = network_host(), network_host(network(VF, numa_node=1))
    found = target(UNBOUND, here, far)
    assert found.fits
    (note,) = found.report.findings
    assert (note.rule, note.severity) == ("migration-numa", "info")
    assert note.summary == f"on b devices are on other NUMA nodes: {VF} on 1 instead of 0"
    assert note.evidence == (f"b: numa_node of {VF}: 1",)
    assert note.why.startswith("the domain is bound to no node: ")
    assert note.remedy.endswith(" a domain with <numatune> and <cputune> for node 1")
    bound = target(ONE_VF, here, far).report.findings
    assert [one.rule for one in bound] == ["far-memory", "migration-numa"]
    assert bound[1].why == "the domain is bound to nodes or CPUs by their numbers on this host"
    lost = target(UNBOUND, network_host(network(VF, numa_node=-1)), far).report.findings
    assert not lost, "whether it is another node is unknown"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (ONE_VF.replace("nodeset='0'", "nodeset='1'"), {}),
        (xml(pci_element(VF), ports="", before=PINNED), {}),
        (UNBOUND, {"topology": replace(NODES, nodes=NODES.nodes[1:])}),
    ],
)
def test_a_node_that_the_domain_is_bound_to_or_the_only_one_is_not_told(
    text: str, changes: dict[str, HostTopology]
) -> None:
    far = network_host(network(VF, numa_node=1), **changes)
    assert "migration-numa" not in [
        one.rule for one in target(text, network_host(), far).report.findings
    ]
    same = target(UNBOUND, far, network_host(network(VF, numa_node=1)))
    assert not same.report.findings


def test_the_numa_node_of_a_vgpu_is_that_of_its_gpu() -> None:
    here, there = vgpu_host(2), vgpu_host(2)
    far = with_facts(there, devices=tuple(replace(d, numa_node=1) for d in there.devices))
    (note,) = (f for f in target(ONE_VGPU, here, far).report.findings if f.rule == "migration-numa")
    assert f"{UUID} on 1 instead of " in note.summary


def test_a_counterpart_that_must_be_bound() -> None:
    there = network_host(network(VF, driver="mlx5_core"))
    found = target(ONE_VF, network_host(), there)
    assert rules(found) == ["migration-not-ready"]
    (finding,) = (one for one in found.report.findings if one.rule == "migration-not-ready")
    assert finding.remedy == f"on that host: vfiomgr bind {VF} --driver mlx5_vfio_pci"
    old = with_facts(there, variants=(), vfio_modules=("vfio_pci",))
    found = target(ONE_VF, network_host(), old)
    assert rules(found) == ["migration-no-place"]
    assert "needs mlx5_vfio_pci, which the kernel 6.18.3 does not have" in found.places[0].text
    unread = with_facts(there, variants=(), vfio_modules=("mlx5_vfio_pci", "vfio_pci"))
    assert rules(target(ONE_VF, network_host(), unread)) == ["migration-not-ready"]


def test_no_counterpart() -> None:
    none = target(ONE_VF, network_host(), host(topology=network_host().topology))
    assert "migration-no-place" in rules(none)
    assert "it has no virtual function of this model: 15b3:101e" in none.places[0].text
    other = network_host(network(VF, subsystem_id="15b3:0099"))
    assert rules(target(ONE_VF, network_host(), other)) == ["migration-no-place"]
    both = target(TWO_VFS, network_host(), network_host(network(VF)))
    assert [place.target for place in both.places] == [VF, None]
    assert "is for another device of the domain" in both.places[1].text


def test_what_an_absent_device_needs_elsewhere_is_unknown() -> None:
    absent = xml(pci_element("0000:77:00.0"), ports="")
    found = report(absent, network_host(), b=network_host())
    (there,) = found.targets
    (place,) = there.places
    assert (place.target, place.is_ready) == (None, None)
    assert place.text == "its counterpart is unknown: this host does not have it"
    assert not there.report.findings, "the place says it, and the report of the domain"
    missing = next(f for f in found.report.findings if f.rule == "migration-device-missing")
    assert missing.remedy == (
        "correct its address, or plug it in; or name the host that has it: --snapshot FILE"
    )
    vgpu = report(ONE_VGPU, network_host()).report.findings
    missing = next(f for f in vgpu if f.rule == "migration-device-missing")
    assert missing.remedy.startswith("correct its name, or start the vGPU: vfiomgr vgpu start; ")
    assert there.fits is None
    assert found.is_blocked
    assert target(absent, network_host(boot_id="1"), network_host(boot_id="1")).fits is False
    both = xml(pci_element("0000:77:00.0") + pci_element(VF), ports="")
    (_, second) = target(both, network_host(), network_host()).places
    assert (second.target, second.is_ready) == (VF, True)


def test_what_a_start_there_would_find_is_told() -> None:
    sound = network_host()
    apart = network_host(
        network(VF, iommu_group=7), network(OTHER_VF, driver="nvme", iommu_group=7)
    )
    assert "group-not-viable" in rules(target(ONE_VF, sound, apart))
    one_node = with_facts(sound, topology=replace(NODES, nodes=NODES.nodes[:1]))
    far = ONE_VF.replace("nodeset='0'", "nodeset='1'")
    assert rules(target(far, sound, one_node)) != []


def test_vgpus_of_the_type_there() -> None:
    here = vgpu_host(2)
    assert rules(target(ONE_VGPU, here, vgpu_host(2))) == []
    empty = target(ONE_VGPU, here, vgpu_host())
    assert rules(empty) == ["migration-not-ready"]
    assert empty.places[0].remedy == (
        f"vfiomgr vgpu create {UUID} --parent 0000:09:00.0 --type 'NVIDIA A40-2Q'"
    )
    full = target(ONE_VGPU, here, vgpu_host(48))
    assert rules(full) == ["migration-no-place"]
    newer = target(ONE_VGPU, here, vgpu_host(2, version="590.10"))
    assert set(rules(newer)) == {"migration-driver-version"}
    assert newer.fits


def test_a_mediated_device_becomes_a_virtual_function_from_11_0_on() -> None:
    here = vgpu_host(2)
    vendor = host(guest_support=support(migration=None), topology=here.topology, users=())
    made = Vgpu(None, "vendor-vfio", VENDOR_VF, "558", "NVIDIA A40-2Q", "nvidia", 66, "vfio7", None)
    there = with_facts(vendor, vgpus=(made,), cpu_vendor="AuthenticAMD")
    assert rules(target(ONE_VGPU, here, there)) == []
    old = with_facts(there, guest_support=support(migration=None, libvirt="10.10.0"))
    assert rules(target(ONE_VGPU, here, old)) == ["migration-family", "migration-older-libvirt"]


def test_a_snapshot_of_the_same_host_is_no_target() -> None:
    here = with_facts(network_host(), boot_id="e5a0")
    assert rules(target(ONE_VF, here, here)) == ["migration-same-host"]
    assert rules(target(ONE_VF, here, with_facts(here, boot_id="77c1"))) == []
    unknown = with_facts(here, boot_id=None)
    assert rules(target(ONE_VF, unknown, unknown)) == []


def test_one_target_that_fits_is_enough() -> None:
    found = report(ONE_VF, network_host(), a=host(), b=network_host())
    assert [other.fits for other in found.targets] == [False, True]
    assert not found.is_blocked
    assert report(ONE_VF, network_host(), a=host()).is_blocked


def test_a_snapshot_keeps_the_facts() -> None:
    seen = network_host()
    assert read_snapshot(write_snapshot(seen), "a").guest_support == seen.guest_support


def test_what_is_not_known_is_told() -> None:
    bare = network_host(guest_support=None, users=None)
    found = report(ONE_VF, bare, b=bare)
    assert any("debug/vfio" in text for text in found.report.not_checked)
    (other,) = found.targets
    assert "processes that use the devices of b: not in the snapshot" in other.report.not_checked
    assert MLX5 in bare.variants
