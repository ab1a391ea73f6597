"""`vfiomgr libvirt domain`: what it prints for whom, and what it says besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lxml import etree
from msgspec.structs import replace

from tests.fakes.hosts import workstation
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, two_sockets
from tests.unit.host_files import put_topology
from tests.unit.libvirt.preflight.test_viommu import DESKTOP, SERVER
from vfiomgr.errors import UsageError
from vfiomgr.guests.iommufd import with_iommufd
from vfiomgr.guests.model import AttachOptions, DeviceRequest
from vfiomgr.libvirt.build.model import GuestDisk, GuestNetwork
from vfiomgr.libvirt.build.named import parse_device, parse_disk, parse_network
from vfiomgr.pci.memory import HostTopology, NumaNode
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.units import GIB
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
SMALL = ("guest", "--memory", "2G", "--vcpus", "2")


@pytest.fixture
def servers(tmp_path: Path) -> tuple[str, str]:
    """Options that select the host of two sockets, with a vGPU."""
    vgpu = Vgpu(UUID, "mdev", NEAR, "nvidia-1", "A2-1Q", "nvidia", 40, None, None)
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(with_facts(two_sockets(), vgpus=(vgpu,))))
    return ("--snapshot", str(file))


def test_a_guest_on_two_nodes(run: Run, servers: tuple[str, str], matches: Matches) -> None:
    wanted = ("ml", "--memory", "64G", "--vcpus", "8", "--hugepages", "1G", "--disk", "/dev/vg/ml")
    devices = ("--device", GPU, "--device", FAR, "--network", "bridge=br0", "--graphics", "none")
    options = (*servers, "libvirt", "domain", *wanted, *devices, "--libvirt-version", "9.0")
    explained = run(*options, "--explain")
    assert (explained.status, explained.stderr) == (0, "")
    matches("libvirt-domain-two-nodes.xml", explained.stdout)
    plain = "".join(
        line
        for line in explained.stdout.splitlines(keepends=True)
        if "<!--" not in line or "GA107" in line
    )
    assert run(*options).stdout == plain
    matches("libvirt-domain-two-nodes.json", run(*options, "--format", "json").stdout)


@pytest.mark.parametrize("option", ["", ",managed"])
@pytest.mark.parametrize("regions", [("f4000-f4fff",), (), None])
def test_memory_of_the_firmware_is_noted_for_a_device_that_is_bound(
    run: Run, tmp_path: Path, regions: tuple[str, ...] | None, option: str
) -> None:
    host = two_sockets()
    own = {d.iommu_group for d in host.devices if str(d.address) == GPU}
    groups = tuple(
        replace(g, direct_regions=regions if g.number in own else ("0-fff",)) for g in host.groups
    )
    file = tmp_path / "reserved.json"
    file.write_text(write_snapshot(with_facts(host, groups=groups, kernel_release="6.12.0")))
    options = ("--snapshot", str(file), "libvirt", "domain", *SMALL, "--libvirt-version", "9.0")
    done = run(*options, "--device", f"{GPU}{option}")
    said = "has memory that the firmware requires mapped 1:1 (f4000-f4fff)"
    assert (done.status, done.stderr.count(said)) == (0, 1 if regions else 0)
    assert "(0-fff)" not in done.stderr, "the group of another device"


def test_a_newer_libvirt_gets_what_it_can_read(
    run: Run, servers: tuple[str, str], matches: Matches
) -> None:
    wanted = (
        "fd",
        "--memory",
        "16G",
        "--vcpus",
        "4",
        "--disk",
        "/vm/a.qcow2",
        "--viommu",
        "virtio",
    )
    device = f"{GPU},managed,model=nvgrace_gpu_vfio_pci,rom=off"
    options = (*servers, "libvirt", "domain", *wanted, "--device", device, "--iommufd")
    made = run(*options, "--libvirt-version", "12.2", "--firmware", "bios")
    assert made.status == 0
    first, second, *_ = made.stderr.splitlines()
    assert first == (
        "the version of QEMU is unknown: what depends on it is not checked (set --qemu-version)"
    )
    assert second.startswith(
        f"{GPU}, {AUDIO} share an IOMMU group, so behind a virtual IOMMU they share a bridge"
    )
    matches("libvirt-domain-12.2.xml", made.stdout)
    each = run(*options, "--libvirt-version", "12.1").stdout
    assert (each.count("iommufd='yes'"), each.count("<iommufd")) == (2, 0)
    refused = run(*options, "--libvirt-version", "12.0")
    assert refused.status == 4
    assert "<driver iommufd> (libvirt 12.1.0 or later); this is 12.0.0" in refused.stderr


def test_a_preference_is_of_one_node_alone(run: Run, servers: tuple[str, str]) -> None:
    """Libvirt starts no domain that as a whole prefers two (virNumaSetupMemoryPolicy)."""
    options = (*servers, "libvirt", "domain", *SMALL, "--numa", "preferred", "--device", GPU)
    assert "<memory mode='preferred' nodeset='0'/>" in run(*options).stdout
    both = run(*options, "--device", FAR).stdout
    assert "<memory mode=" not in both
    assert "<memnode cellid='1' mode='preferred' nodeset='1'/>" in both


def test_a_vgpu_with_its_display(run: Run, servers: tuple[str, str], matches: Matches) -> None:
    wanted = ("desk", "--memory", "8G", "--vcpus", "4", "--cdrom", "/iso/a b & c.iso")
    options = (*servers, "libvirt", "domain", *wanted, "--network", "default", "--boot", "network")
    made = run(*options, "--device", f"{UUID},display,ramfb", "--fixed-aperture")
    assert made.status == 0
    assert made.stderr.splitlines()[0].startswith("libvirt not found; assuming")
    matches("libvirt-domain-vgpu.xml", made.stdout)
    refused = run(*options, "--device", f"{UUID},display", "--graphics", "none")
    assert (refused.status, refused.stdout) == (2, "")


def test_devices_that_wait_are_told(run: Run) -> None:
    made = run("libvirt", "domain", *SMALL, "--device", "0000:01:00.0")
    assert made.status == 0
    assert "bind it with: vfiomgr bind 0000:01:00.0" in made.stderr
    run("bind", "0000:01:00.0")
    told = run("libvirt", "domain", *SMALL, "--device", "01:00.0", "--libvirt-version", "9.0")
    assert "vfiomgr bind" not in told.stderr
    managed = run("libvirt", "domain", *SMALL, "--device", "0000:00:02.0,managed")
    assert managed.status == 4
    assert "is the console's display" in managed.stderr
    assert (
        "bind it yourself with: vfiomgr bind 0000:00:02.0 --allow boot-display, and omit the "
        "device option managed"
    ) in managed.stderr


def test_a_node_without_room_is_refused(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    nodes = (NumaNode(0, (0, 1), 4 * GIB, GIB), NumaNode(1, (2, 3), 4 * GIB, 3 * GIB))
    put_topology(tmp_path / "host", HostTopology(nodes))
    kernel.sysfs.put("/sys/bus/pci/devices/0000:01:00.0/numa_node", "0")
    refused = run("libvirt", "domain", *SMALL, "--device", "0000:01:00.0")
    assert (refused.status, refused.stdout) == (4, "")
    assert "only 1 GiB free (node 0 has 1 GiB, node 1 has 3 GiB)" in refused.stderr
    there = run("libvirt", "domain", *SMALL, "--device", "0000:01:00.0", "--numa", "off")
    assert there.status == 0
    assert "numatune" not in there.stdout


def test_the_document_has_the_plan_and_its_reasons(run: Run, servers: tuple[str, str]) -> None:
    options = (*servers, "libvirt", "domain", "a", "--memory", "1G", "--vcpus", "1")
    document = json.loads(run(*options, "--device", GPU, "--format", "json").stdout)
    assert (document["kind"], document["libvirt_version"]) == ("DomainPlan", "9.0.0")
    assert document["xml"].startswith("<domain type='kvm'>")
    assert {"part": "device 0000:17:00.0", "text": f"bound by vfiomgr: vfiomgr bind {GPU}"} in (
        document["plan"]["reasons"]
    )
    assert document["plan"]["memory"]["locked_bytes"] == 2 * GIB


@pytest.mark.parametrize(
    "words",
    [
        ("--disk", "/a/\x01.qcow2"),
        ("--cdrom", "/a/\x1b.iso"),
        ("--network", "a\x7f"),
        ("--kernel", "/vmlinuz", "--kernel-arguments", "quiet\nroot=/dev/vda"),
    ],
)
def test_characters_that_xml_does_not_have_are_refused(
    run: Run, servers: tuple[str, str], words: tuple[str, ...]
) -> None:
    answer = run(*servers, "libvirt", "domain", *SMALL, *words)
    assert (answer.status, answer.stdout) == (2, "")
    assert "is not allowed in a domain's XML" in answer.stderr


def test_a_device_named_twice_has_one_set_of_options(run: Run) -> None:
    words = ("libvirt", "domain", *SMALL, "--device", "0000:01:00.0")
    answer = run(*words, "--device", "0000:01:00.0,managed")
    assert (answer.status, answer.stdout) == (2, "")
    assert "0000:01:00.0 is named twice with different options" in answer.stderr
    assert run(*words, "--device", "0000:01:00.0").stdout == run(*words).stdout != ""


def test_many_disks_have_names(run: Run, servers: tuple[str, str]) -> None:
    disks = [word for n in range(28) for word in ("--disk", f"/vm/{n}.img")]
    made = run(*servers, "libvirt", "domain", *SMALL, *disks).stdout
    for name in ("vda", "vdz", "vdaa", "vdab"):
        assert made.count(f"<target dev='{name}' bus='virtio'/>") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0000:04:00.0", DeviceRequest("0000:04:00.0")),
        (
            "04:00.0,only,rom=off",
            DeviceRequest("04:00.0", AttachOptions(rom="off"), is_alone=True),
        ),
        (
            "x,managed,model=y",
            DeviceRequest("x", AttachOptions(is_managed=True, driver_model="y")),
        ),
        ("x,display,ramfb", DeviceRequest("x", AttachOptions(display=True, ramfb=True))),
    ],
)
def test_devices_are_written_with_their_options(text: str, wanted: DeviceRequest) -> None:
    assert parse_device(text) == wanted


def test_what_stays_outside_is_opened_in_no_way() -> None:
    assert with_iommufd(parse_device("x")).options == AttachOptions(has_iommufd=True)
    outside = with_iommufd(parse_device("x,unassigned,managed")).options
    assert outside == AttachOptions(is_managed=True, is_unassigned=True)
    card = parse_device("x,vga,subsystem=17aa:3aff").options
    assert card == AttachOptions(has_vga=True, subsystem="17aa:3aff")


@pytest.mark.parametrize("text", ["x,", "x,fast", "x,rom=", "x,rom", "x,display=on"])
def test_a_word_that_says_nothing_about_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="invalid option in --device") as raised:
        parse_device(text)
    assert "rom=FILE|off" in (raised.value.hint or "")


def test_disks_tell_their_format() -> None:
    assert parse_disk("/a.qcow2") == GuestDisk("/a.qcow2", "qcow2")
    assert parse_disk("/dev/vg/a") == GuestDisk("/dev/vg/a", "raw")
    assert parse_disk("/a,format=raw") == GuestDisk("/a", "raw")
    assert parse_disk("a.img").path.startswith("/")
    assert parse_disk("/a.vdi") == GuestDisk("/a.vdi", "vdi")
    with pytest.raises(
        UsageError, match="libvirt does not support disk format vhdx: --disk"
    ) as raised:
        parse_disk("/a b.vhdx,format=vhdx")
    assert "qemu-img convert -O qcow2 '/a b.vhdx'" in (raised.value.hint or "")
    for text in ("/a", "/a,raw", "/a.img,format=", "/a.vhdx"):
        with pytest.raises(UsageError, match="--disk /a"):
            parse_disk(text)


def test_a_kernel_of_the_hosts_is_started_with_what_it_gets(
    run: Run, servers: tuple[str, str]
) -> None:
    boot = ("--initrd", "/boot/i", "--kernel-arguments", "console=ttyS0 a='<b>'")
    options = (*servers, "libvirt", "domain", *SMALL)
    made = run(*options, "--kernel", "/boot/k", *boot).stdout
    for text in ("<kernel>/boot/k</kernel>", "<initrd>/boot/i</initrd>", "a=&#39;&lt;b&gt;&#39;<"):
        assert text in made
    assert "<initrd>" not in run(*options, "--kernel", "/boot/k").stdout
    refused = run(*options, *boot)
    assert (refused.status, "--initrd does nothing without --kernel" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--memory", "16"), "missing unit: --memory 16\n  remedy: write 16G or 16M\n"),
        (
            ("--memory", "16G", "--hard-limit", "20"),
            "missing unit: --hard-limit 20\n  remedy: write 20G or 20M\n",
        ),
        (
            ("--memory", "16G", "--boot", "cd"),
            (
                "invalid boot device: --boot cd\n  remedy: use disk, cdrom, network, or the name "
                "of a --device"
            ),
        ),
    ],
)
def test_what_could_mean_two_things_is_asked(run: Run, options: tuple[str, ...], said: str) -> None:
    version = ("--libvirt-version", "10.0")
    refused = run("libvirt", "domain", "a", "--vcpus", "1", *version, *options)
    assert refused.status == 2
    assert said in refused.stderr


def test_windows_gets_what_it_knows_and_linux_none_of_it(run: Run) -> None:
    wanted = ("--disk", "/a.qcow2", "--disk", "/b.qcow2,bus=virtio", "--cdrom", "/c.iso")
    networks = ("--network", "default", "--network", "bridge=br0,model=virtio")
    options = ("libvirt", "domain", *SMALL, *wanted, *networks, "--libvirt-version", "9.0")
    made = run(*options, "--os", "windows", "--tpm").stdout
    for text in (
        "<clock offset='localtime'>",
        "<timer name='hypervclock' present='yes'/>",
        "<timer name='hpet' present='no'/>",
        "<spinlocks state='on' retries='8191'/>",
        "<target dev='sdb' bus='sata'/>",
        "<target dev='vda' bus='virtio'/>",
        "<target dev='sda' bus='sata'/>",
        "<model type='e1000e'/>",
        "<model type='virtio'/>",
        "<backend type='emulator' version='2.0'/>",
    ):
        assert text in made, text
    emulated = run(*options, "--os", "windows", "--virt-type", "qemu").stdout
    assert "localtime" in emulated
    assert "hyperv" not in emulated
    plain = run(*options).stdout
    for text in ("<clock", "<hyperv>", "<tpm", "e1000e", "sdb"):
        assert text not in plain
    refused = run(*options, "--disk", "/d.raw,bus=ide")
    assert (
        refused.status,
        "invalid option in --disk /d.raw,bus=ide: 'bus=ide'" in refused.stderr,
    ) == (2, True)


def test_every_cdrom_is_written_in_its_order(run: Run) -> None:
    media = ("--cdrom", "/w11.iso", "--cdrom", "/virtio-win.iso", "--disk", "/a.raw,bus=sata")
    made = run("libvirt", "domain", *SMALL, *media, "--libvirt-version", "9.0").stdout
    disks = [
        tuple(
            disk.xpath(f"string({path})") for path in ("source/@file", "target/@dev", "boot/@order")
        )
        for disk in etree.fromstring(made).findall("devices/disk")
    ]
    assert disks == [
        ("/a.raw", "sdc", "1"),
        ("/w11.iso", "sda", "2"),
        ("/virtio-win.iso", "sdb", "3"),
    ]


def test_secure_boot_has_keys_and_for_windows_a_tpm(run: Run) -> None:
    options = ("libvirt", "domain", *SMALL, "--secure-boot", "--libvirt-version")
    windows = run(*options, "9.0", "--os", "windows").stdout
    root = etree.fromstring(windows)
    features = {f.get("name"): f.get("enabled") for f in root.findall("os/firmware/feature")}
    assert features == {"secure-boot": "yes", "enrolled-keys": "yes"}
    assert root.xpath("string(os/@firmware)") == "efi"
    assert root.xpath("string(features/smm/@state)") == "on"
    assert "<tpm" in windows
    assert "<tpm" not in run(*options, "9.0").stdout
    refused = run(*options, "9.0", "--firmware", "bios")
    assert refused.status == 2
    assert "cannot use Secure Boot with SeaBIOS" in refused.stderr
    old = run(*options, "7.1")
    assert (old.status, "install libvirt 7.2.0 or later" in old.stderr) == (4, True)


def test_networks_are_libvirts_or_bridges() -> None:
    assert parse_network("default") == GuestNetwork("network", "default")
    assert parse_network("bridge=br0") == GuestNetwork("bridge", "br0")
    assert parse_network("n,model=e1000e") == GuestNetwork("network", "n", "e1000e")
    odd = ("bridge=a b", "a/b", "a\nb", " a")
    for text in ("", "bridge=", "vlan=3", "n,model=ne2k", "n,", *odd):
        with pytest.raises(UsageError, match="invalid network: --network"):
            parse_network(text)


def test_a_recorded_host_answers_like_the_machine(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    there = run("--snapshot", str(file), "libvirt", "domain", *SMALL, "--device", "0000:01:00.0")
    other = workstation(tmp_path / "other")
    assert (
        there.stdout
        == run(
            *("--root", other.root, "libvirt", "domain", *SMALL, "--device", "0000:01:00.0")
        ).stdout
    )


def test_a_virtual_iommu_is_not_wider_than_that_of_the_host(run: Run, tmp_path: Path) -> None:
    root = workstation(tmp_path / "host").root
    unit = Path(root, "sys/class/iommu/dmar0/intel-iommu")
    unit.mkdir(parents=True)
    unit.joinpath("cap").write_text(f"{DESKTOP:x}\n")
    wanted = ("--root", root, "libvirt", "domain", *SMALL, "--libvirt-version", "10.7")
    assert "aw_bits='39'" in run(*wanted, "--viommu", "intel").stdout
    unit.joinpath("cap").write_text(f"{SERVER:x}\n")
    assert "aw_bits='48'" in run(*wanted, "--viommu", "intel").stdout
