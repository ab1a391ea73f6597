"""Network devices that a virtio interface replaces during a migration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.guest_hosts import planned, two_sockets
from tests.unit.libvirt.migration.hosts import network, network_host
from tests.unit.libvirt.migration.test_migration import report, rules
from tests.unit.libvirt.preflight.situations import domain, function
from tests.unit.libvirt.preflight.situations import xml as domain_text
from tests.unit.libvirt.test_vf_token import MEMBER, OWNER, VF
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.libvirt.build.named import parse_device, parse_network
from vfiomgr.libvirt.xml import render
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.libvirt.build.model import DomainPlan

MAC = "52:54:00:12:34:56"
TEAM = f"default,model=virtio,alias=ua-net0,mac={MAC}"
ETHERNET = replace(OWNER, driver="mlx5_core", virtual_functions=(MEMBER.address,))
NIC = "0000:05:00.0"
VIRTUAL = "0000:05:10.0"


def guest(*devices: str, networks: tuple[str, ...] = (TEAM,), **changes: Any) -> DomainPlan:
    known = two_sockets(ETHERNET, MEMBER, function("0000:71:00.0", class_code="030000"))
    return planned(
        devices=tuple(map(parse_device, devices)),
        networks=tuple(map(parse_network, networks)),
        host=known,
        numa="off",
        **changes,
    )


def test_a_domain_has_both_halves_of_a_pair() -> None:
    made = guest(f"{VF},teaming=ua-net0")
    text = render.domain(made)
    assert "<teaming type='transient' persistent='ua-net0'/>" in text
    interface = text[text.index("<interface ") : text.index("</interface>")]
    assert [line.strip() for line in interface.splitlines()] == [
        "<interface type='network'>",
        f"<mac address='{MAC}'/>",
        "<source network='default'/>",
        "<model type='virtio'/>",
        "<teaming type='persistent'/>",
        "<alias name='ua-net0'/>",
        "",
    ]
    assert made.notes[-1] == (
        f"{VF} needs the MAC address of ua-net0 before the guest starts: "
        f"ip link set INTERFACE vf 0 mac {MAC}, with INTERFACE, the network interface of "
        "0000:61:00.0"
    )
    read = domain(text)
    assert [hostdev.partner for hostdev in read.hostdevs] == ["ua-net0"]
    assert [(one.alias, one.mac) for one in read.teamed] == [("ua-net0", MAC)]


def test_such_a_domain_can_migrate() -> None:
    """Its function on vfio-pci cannot, but is unplugged."""
    seen = network_host(network(VF, driver="vfio-pci"))
    made = planned(
        devices=(parse_device(f"{VF},teaming=ua-net0"),),
        networks=(parse_network(TEAM),),
        host=two_sockets(network(VF, driver="vfio-pci")),
        numa="off",
        graphics="none",
    )
    text = render.domain(made)
    assert rules(report(text, seen)) == []
    (left,) = report(text.replace(" persistent='ua-net0'", ""), seen).report.findings
    assert left.rule == "migration-device"
    assert "vfiomgr libvirt hostdev --teaming" in left.remedy


def test_an_interface_without_a_device_is_an_ordinary_one() -> None:
    text = render.domain(guest(VF))
    assert "teaming" not in text
    assert "<alias name='ua-net0'/>" in text
    plain = render.domain(guest(VF, networks=("default",)))
    interface = plain[plain.index("<interface ") : plain.index("</interface>")]
    assert "alias" not in interface
    assert "mac" not in interface


@pytest.mark.parametrize(
    ("device", "networks", "words", "hint"),
    [
        (
            f"{VF},teaming=ua-net0",
            (),
            "no network has the alias ua-net0",
            "--network default,model",
        ),
        (f"{VF},teaming=ua-net1", (TEAM,), "no network has the alias ua-net1", "alias=ua-net1"),
        (
            f"{VF},teaming=ua-net0",
            (TEAM.replace("virtio", "e1000e"),),
            "its model is not virtio",
            "add model=virtio to --network default",
        ),
        (
            f"{VF},teaming=ua-net0",
            ("default,model=virtio,alias=ua-net0",),
            "ua-net0 has no MAC address",
            "add mac=ADDRESS",
        ),
        (
            f"{VF},teaming=ua-net0",
            (TEAM, TEAM),
            "several networks have the alias ua-net0",
            "a different alias",
        ),
        (f"{VF},teaming=net0", (TEAM.replace("ua-", "ua-ua-"),), "no network has the alias", "add"),
    ],
)
def test_what_cannot_be_a_pair_is_refused(
    device: str, networks: tuple[str, ...], words: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        guest(device, networks=networks)
    assert hint in caught.value.hint


def test_a_device_that_qemu_does_not_replace_is_refused() -> None:
    with pytest.raises(Refusal, match="it is not an Ethernet device") as caught:
        guest("0000:71:00.0,teaming=ua-net0")
    assert caught.value.hint == "omit teaming: QEMU only replaces network devices"


def test_windows_has_no_virtio_interface_of_its_own() -> None:
    named = TEAM.replace("model=virtio,", "")
    with pytest.raises(UsageError, match="its model is not virtio"):
        guest(f"{VF},teaming=ua-net0", networks=(named,), system="windows")
    assert guest(f"{VF},teaming=ua-net0", networks=(named,)).partners == {"ua-net0"}


def test_two_devices_need_two_interfaces() -> None:
    second = replace(MEMBER, address=PciAddress.parse("0000:61:00.3"))
    known = two_sockets(ETHERNET, MEMBER, second)
    devices = tuple(parse_device(f"{d.address},teaming=ua-net0") for d in (MEMBER, second))
    with pytest.raises(UsageError, match="several devices have teaming with the alias ua-net0"):
        planned(devices=devices, networks=(parse_network(TEAM),), host=known, numa="off")


@pytest.mark.parametrize(
    "text",
    [
        "default,alias=net0",
        "default,alias=ua-",
        "default,mac=53:54:00:12:34:56",
        "default,mac=52:54:00:12:34",
        "default,mac=",
        "default,model=rtl8139",
        "default,port=1",
    ],
)
def test_networks_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid network") as caught:
        parse_network(text)
    assert "alias=ua-NAME,mac=" in caught.value.hint


def test_a_hostdev_names_its_partner_and_what_the_domain_needs(
    run: Run, kernel: FakeKernel
) -> None:
    assert run("sriov", "set", NIC, "2").status == 0
    assert run("bind", VIRTUAL).status == 0
    made = run("libvirt", "hostdev", VIRTUAL, "--teaming", "ua-net0", "--libvirt-version", "7.1")
    assert made.status == 0
    assert "<teaming type='transient' persistent='ua-net0'/>" in made.stdout
    needed = f"{VIRTUAL} needs a virtio interface with <alias name='ua-net0'/>, "
    assert made.stderr == f"{needed}<teaming type='persistent'/> and the same MAC address\n"
    plain = run("libvirt", "hostdev", VIRTUAL, "--libvirt-version", "7.1")
    assert "teaming" not in plain.stdout + plain.stderr
    old = run("libvirt", "hostdev", VIRTUAL, "--teaming", "ua-net0", "--libvirt-version", "7.0")
    assert old.status == 4
    assert "<teaming> of <hostdev> (libvirt 7.1.0 or later); this is 7.0.0" in old.stderr
    wrong = run("libvirt", "hostdev", VIRTUAL, "--teaming", "net0", "--libvirt-version", "7.1")
    assert wrong.status == 2
    assert "invalid alias for the teaming" in wrong.stderr
    assert kernel.driver_of(VIRTUAL) == "vfio-pci"


def test_a_gpu_with_its_audio_function_is_no_pair(run: Run) -> None:
    gpu = run("libvirt", "hostdev", "0000:01:00.0", "--teaming", "ua-net0")
    assert gpu.status == 4
    assert "it is not an Ethernet device" in gpu.stderr


def test_a_port_of_an_adapter_with_several_is_refused() -> None:
    first = replace(ETHERNET, virtual_functions=())
    known = two_sockets(first, replace(first, address=PciAddress.parse("0000:61:00.1")))
    devices = (parse_device(f"{OWNER.address},teaming=ua-net0"),)
    with pytest.raises(Refusal, match="QEMU replaces only one function"):
        planned(devices=devices, networks=(parse_network(TEAM),), host=known, numa="off")


def test_an_older_libvirt_is_refused() -> None:
    assert guest(f"{VF},teaming=ua-net0", libvirt=Version(9, 0)).partners
    with pytest.raises(Refusal, match="needs <teaming> of <hostdev>"):
        guest(f"{VF},teaming=ua-net0", libvirt=Version(7, 0))


def test_an_edited_domain_has_it_too(run: Run, tmp_path: Any) -> None:
    assert run("sriov", "set", NIC, "2").status == 0
    assert run("bind", VIRTUAL).status == 0
    file = tmp_path / "guest.xml"
    file.write_text(domain_text("", ports=""))
    words = ("--add", VIRTUAL, "--teaming", "ua-net0", "--libvirt-version", "9.0")
    answer = run("libvirt", "edit", str(file), *words)
    assert answer.status == 0, answer.stderr
    assert "<teaming type='transient' persistent='ua-net0'/>" in file.read_text()
    assert "needs a virtio interface with <alias name='ua-net0'/>" in answer.stderr
