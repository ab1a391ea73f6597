"""Definitions of the real libvirt: changed, listed, and never less than what was written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import network_adapter, workstation
from tests.fakes.libvirt_node import node_uri
from tests.integration.embed import Embed, embedded
from vfiomgr.errors import InvalidDocument, LibvirtFailed, UsageError
from vfiomgr.libvirt.client.connection import Connection, connect
from vfiomgr.libvirt.client.errors import Code
from vfiomgr.libvirt.commands.hook import read_guest
from vfiomgr.libvirt.model import NAMESPACE
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPU, AUDIO = "0000:01:00.0", "0000:01:00.1"
UUID = "5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11"
QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"


def domain(name: str, devices: str = "", *, kind: str = "qemu", rest: str = "") -> str:
    uuid = f"{UUID[:-2]}{sum(name.encode()) % 90 + 10}"
    return f"""\
<domain type='{kind}' {QEMU}>
  <!-- a remark -->
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <graphics type='vnc' passwd='secret'/>
    {devices}
  </devices>
  {rest}
</domain>
"""


def hostdev(address: str, inner: str = "", driver: str = "") -> str:
    bus, slot, function = re.split("[:.]", address)[1:]
    place = f"bus='0x{bus}' slot='0x{slot}' function='0x{function}'"
    return (
        "<hostdev mode='subsystem' type='pci' managed='no'>"
        f"<driver name='vfio'{driver}/><source><address domain='0' {place}/></source>{inner}"
        "</hostdev>"
    )


@pytest.fixture
def embed(tmp_path: Path) -> Iterator[Embed]:
    """A libvirt without domains, on a host whose GPU and audio are bound."""
    kernel = workstation(tmp_path)
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    with embedded(kernel.root) as started:
        yield started


@pytest.fixture
def defined(embed: Embed, tmp_path: Path) -> Embed:
    """With a domain `win`."""
    file = tmp_path / "win.xml"
    file.write_text(domain("win"))
    answer = embed.run("edit", str(file), "--define")
    assert (answer.returncode, answer.stdout) == (0, "defined: win\n"), answer.stderr
    return embed


@pytest.fixture
def test_driver(tmp_path: Path) -> Iterator[Connection]:
    """The test driver, with one domain of its own."""
    with connect(node_uri(tmp_path)) as connection:
        yield connection


# ---- define


def test_a_definition_that_is_there_is_told(defined: Embed, tmp_path: Path) -> None:
    answer = defined.run("edit", str(tmp_path / "win.xml"), "--define")
    assert (answer.returncode, answer.stdout) == (0, "win already has this definition\n"), (
        answer.stderr
    )


def test_xml_without_a_uuid_is_about_the_domain_of_its_name(defined: Embed, tmp_path: Path) -> None:
    """What `libvirt domain` prints has none, and a second run of a pipe changes nothing."""
    file = tmp_path / "win.xml"
    before = defined.xml("win")
    file.write_text(re.sub("<uuid>.*</uuid>", "", domain("win")))
    again = defined.run("edit", str(file), "--define")
    assert (again.returncode, again.stdout) == (0, "win already has this definition\n"), (
        again.stderr
    )
    assert defined.xml("win") == before
    file.write_text(file.read_text().replace(">64<", ">128<"))
    assert defined.run("edit", str(file), "--define").stdout == "defined: win\n"
    assert re.findall(b"<uuid>.*</uuid>", defined.xml("win")) == re.findall(
        b"<uuid>.*</uuid>", before
    )


def test_interfaces_without_a_mac_address_keep_theirs(embed: Embed, tmp_path: Path) -> None:
    file = tmp_path / "win.xml"
    first = "<interface type='user'/>"
    other = "<interface type='bridge'><source bridge='br0'/></interface>"
    file.write_text(re.sub("<uuid>.*</uuid>", "", domain("win", first + other)))
    assert embed.run("edit", str(file), "--define").stdout == "defined: win\n"
    before = embed.xml("win")
    assert embed.run("edit", str(file), "--define").stdout == "win already has this definition\n"
    assert embed.xml("win") == before
    macs = re.findall(b"<mac address='.*'/>", before)
    file.write_text(re.sub("<uuid>.*</uuid>", "", domain("win", other + first)))
    assert embed.run("edit", str(file), "--define").stdout == "defined: win\n"
    assert re.findall(b"<mac address='.*'/>", embed.xml("win")) == macs[::-1]


def test_a_dry_run_of_define_tells_what_libvirt_has(defined: Embed, tmp_path: Path) -> None:
    file = tmp_path / "win.xml"
    before = defined.xml("win")

    def forecast(text: str) -> str:
        file.write_text(text)
        answer = defined.run("edit", str(file), "--define", "--dry-run")
        return answer.stdout or answer.stderr

    assert forecast(domain("new")) == f"would define new from {file} at {defined.uri}\n"
    other = domain("win").replace(">64<", ">128<")
    anew = f"would redefine win from {file}: it exists at {defined.uri}\n"
    assert forecast(other) == forecast(re.sub("<uuid>.*</uuid>", "", other)) == anew
    assert forecast(before.decode()) == "win already has this definition\n"
    assert "domain win already exists, with UUID" in forecast(
        re.sub("<uuid>.*</uuid>", f"<uuid>{UUID}</uuid>", other)
    )
    assert "virsh domrename win NEW" in forecast(other.replace(">win<", ">lin<"))
    assert defined.xml("win") == before


def test_what_this_libvirt_does_not_know_is_no_definition(embed: Embed, tmp_path: Path) -> None:
    file = tmp_path / "new.xml"
    file.write_text(domain("new", hostdev(GPU, driver=" newer='yes'")))
    answer = embed.run("edit", str(file), "--define")
    assert answer.returncode == InvalidDocument.exit_code
    assert "libvirt's schema rejects" in answer.stderr
    assert "misspelled, misplaced or newer elements" in answer.stderr
    assert "no such domain: new" in embed.run("list", "--domain", "new").stderr


def test_what_is_dropped_without_a_word_is_told_and_nothing_is_defined(
    test_driver: Connection,
) -> None:
    """The test driver does not read QEMU's namespace, which the schema accepts."""
    rest = "<qemu:commandline><qemu:arg value='-s'/></qemu:commandline>"
    text = domain("new", kind="test", rest=rest)
    with pytest.raises(
        InvalidDocument, match=r"cannot define new\.xml: .* would drop parts of it"
    ) as caught:
        test_driver.define(text.encode(), "new.xml")
    assert caught.value.details == ("new.xml: dropped: domain/qemu:commandline",)
    assert "new" not in test_driver.domain_names()


def test_the_definition_of_before_stands_with_its_secrets(test_driver: Connection) -> None:
    rest = "<qemu:commandline><qemu:arg value='-s'/></qemu:commandline>"
    assert test_driver.define(domain("win", kind="test").encode(), "win.xml")
    before = test_driver.domain_xml("win", secure=True)
    assert b"secret" in before
    with pytest.raises(InvalidDocument, match="would drop"):
        test_driver.define(domain("win", kind="test", rest=rest).encode(), "win.xml")
    assert test_driver.domain_xml("win", secure=True) == before


def test_comments_and_metadata_do_not_count_as_dropped(test_driver: Connection) -> None:
    rest = "<metadata><a:b xmlns:a='urn:a'><a:c/></a:b></metadata>"
    assert test_driver.define(domain("meta", kind="test", rest=rest).encode(), "f")


# ---- attach and detach


def test_a_gpu_is_attached_with_its_audio_as_one_device(defined: Embed) -> None:
    answer = defined.run("attach", "win", GPU)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == (
        f"attached: {GPU} (the definition of win)\nattached: {AUDIO} (the definition of win)\n"
    )
    first, second = read_domain(defined.xml("win"), "win").hostdevs
    assert first.guest is not None
    assert second.guest is not None
    assert (first.name, second.name) == (GPU, AUDIO)
    assert first.guest.multifunction
    assert (first.guest.bus, first.guest.slot) == (second.guest.bus, second.guest.slot)
    assert (first.guest.function, second.guest.function) == (0, 1)

    again = defined.run("attach", "win", GPU)
    assert again.stdout == f"win already has {GPU} and {AUDIO}\nnothing to do\n"
    listed = defined.json("list")["items"]
    assert [(item["device"], item["domain"], item["defined"]) for item in listed] == [
        (GPU, "win", True),
        (AUDIO, "win", True),
    ]

    gone = defined.run("detach", "win", GPU)
    assert gone.stdout == (
        f"detached: {GPU} (the definition of win)\ndetached: {AUDIO} (the definition of win)\n"
    )
    assert read_domain(defined.xml("win"), "win").hostdevs == ()
    assert defined.run("detach", "win", GPU).stdout == f"win does not have {GPU}\nnothing to do\n"


def test_a_plan_shows_xml_and_calls_and_changes_nothing(defined: Embed) -> None:
    before = defined.xml("win")
    answer = defined.run("attach", "win", GPU, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    assert "virsh attach-device win /dev/stdin --config <<'END'" in answer.stdout
    assert "multifunction='on'" in answer.stdout
    assert defined.xml("win") == before
    plan = defined.json("attach", "win", GPU, "--dry-run")
    assert [item["device"] for item in plan["items"]] == [GPU, AUDIO]
    assert plan["kind"] == "AttachPlan"


def test_what_another_domain_claims_is_refused(defined: Embed, tmp_path: Path) -> None:
    file = tmp_path / "lin.xml"
    file.write_text(domain("lin", hostdev(GPU)))
    assert defined.run("edit", str(file), "--define").returncode == 0
    answer = defined.run("attach", "win", GPU)
    assert answer.returncode == 4
    assert f"{GPU} is claimed by domain lin" in answer.stderr
    assert defined.run("attach", "win", GPU, "--allow", "claimed").returncode == 0


def test_a_device_on_its_host_driver_is_refused(defined: Embed) -> None:
    answer = defined.run("attach", "win", "0000:02:00.0")
    assert answer.returncode == 4
    assert "vfiomgr bind 0000:02:00.0" in answer.stderr


def test_a_guest_that_is_off_takes_nothing_live(defined: Embed) -> None:
    answer = defined.run("attach", "win", GPU, "--live")
    assert answer.returncode == 4
    assert "domain win is not running" in answer.stderr


# ---- what libvirt says


def test_what_is_asked_of_libvirt_and_is_not_there(test_driver: Connection) -> None:
    with pytest.raises(UsageError, match="no such domain: nobody"):
        test_driver.domain_xml("nobody")
    with pytest.raises(LibvirtFailed, match="libvirt does not support the operation:") as caught:
        test_driver.define_mdev(
            "<device/>", "f715f63c-0d00-4007-9c5a-b07b0c6c05de", autostart=False
        )
    assert caught.value.code == Code.NO_SUPPORT
    with pytest.raises(InvalidDocument, match=r"twice|Hostdev already exists"):
        test_driver.define(domain("two", hostdev(GPU) * 2, kind="test").encode(), "two.xml")
    with pytest.raises(LibvirtFailed, match="domain test already exists, with UUID"):
        test_driver.define(domain("test", kind="test").encode(), "test.xml")
    with pytest.raises(InvalidDocument, match=r"bad\.xml"):
        test_driver.define(b"<domain", "bad.xml")


def test_a_connection_for_reading_changes_nothing(tmp_path: Path) -> None:
    with (
        connect(node_uri(tmp_path), read_only=True) as connection,
        pytest.raises(LibvirtFailed, match=": the connection is read-only"),
    ):
        connection.define(domain("reader", kind="test").encode(), "reader.xml")


def test_a_libvirt_that_does_not_answer() -> None:
    with (
        pytest.raises(LibvirtFailed, match=r"cannot connect to libvirt at 127.0.0.1:1"),
        connect("qemu+tcp://127.0.0.1:1/system"),
    ):
        pass


def test_nothing_of_libvirt_goes_to_stderr_by_itself(
    test_driver: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        test_driver.domain_xml("nobody")
    assert capfd.readouterr().err == ""


def test_hundred_domains_in_one_hypervisor(tmp_path: Path) -> None:
    domains = "".join(
        f"<domain type='test'><name>d{number}</name><memory>65536</memory><os><type>hvm</type></os>"
        f"<devices>{hostdev(f'0000:{number:02x}:00.0')}</devices></domain>"
        for number in range(100)
    )
    file = tmp_path / "node.xml"
    file.write_text(f"<node>{domains}</node>")
    with connect(f"test://{file}", read_only=True) as connection:
        found = connection.hypervisor()
    assert len(found.domains) == 100
    assert found.qemu is None
    assert found.libvirt >= Version(7, 0)
    assert all(known.is_active and known.running and known.defined for known in found.domains)
    names = {known.running.hostdevs[0].name for known in found.domains if known.running}
    assert len(names) == 100


def test_metadata_is_kept_and_taken_away(test_driver: Connection) -> None:
    test_driver.set_metadata("test", "<mark kind='x'/>", "v", "urn:v")
    assert "kind" in (test_driver.metadata("test", "urn:v") or "")
    test_driver.set_metadata("test", None, "v", "urn:v")
    assert test_driver.metadata("test", "urn:v") is None


def test_a_virtual_function_needs_no_address_of_its_own(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    parent = PciAddress.parse("0000:05:00.0")
    api.apply(SetVirtualFunctions(parent, 2), tree=kernel)
    api.apply(Bind((PciAddress.parse("0000:05:10.0"),)), tree=kernel)
    file = tmp_path / "win.xml"
    file.write_text(domain("win"))
    with embedded(kernel.root) as embed:
        assert embed.run("edit", str(file), "--define").returncode == 0
        items = embed.json("attach", "win", "05:10.0")["items"]
    assert [item["device"] for item in items] == ["0000:05:10.0"]
    assert "multifunction" not in items[0]["xml"]


# ---- the hook


def test_a_domain_asks_for_the_hook_and_no_longer(defined: Embed) -> None:
    answer = defined.hook("install", "win")
    assert answer.stdout == "win: the hook is enabled\n", answer.stderr
    assert (
        "the hook is not installed yet; install it with: vfiomgr libvirt hook install"
        in answer.stderr
    )
    assert (
        "the hook has nothing to do for win: no device with managed='no', no vGPU; add one "
        "with: vfiomgr libvirt edit"
    ) in answer.stderr
    assert read_guest(defined.xml("win"), "win") is not None
    assert defined.hook("install", "win").stdout == "win: the hook is already enabled\n"
    assert defined.hook("uninstall", "win", "--dry-run").stdout == (
        "win: the hook would be disabled\n"
    )
    assert read_guest(defined.xml("win"), "win") is not None
    assert defined.hook("uninstall", "win").stdout == "win: the hook is disabled\n"
    assert read_guest(defined.xml("win"), "win") is None


def test_a_domain_that_says_no_to_the_hook_is_disabled_and_can_be_enabled(
    embed: Embed, tmp_path: Path
) -> None:
    no = f"<metadata><v:devices xmlns:v='{NAMESPACE}' bind='no'/></metadata>"
    file = tmp_path / "win.xml"
    file.write_text(domain("win", rest=no))
    assert embed.run("edit", str(file), "--define").returncode == 0
    assert embed.hook("uninstall", "win").stdout == "win: the hook is already disabled\n"
    assert embed.hook("install", "win").stdout == "win: the hook is enabled\n"
    assert read_guest(embed.xml("win"), "win") is not None
