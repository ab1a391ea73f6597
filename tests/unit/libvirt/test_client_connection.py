"""The connection where there is no library, no libvirt, or an older one than the one here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from tests.fakes.libvirt_node import node_uri
from vfiomgr.errors import HostError, InvalidDocument, LibvirtFailed, Refusal, UsageError
from vfiomgr.host import installation
from vfiomgr.libvirt.client.binding import library
from vfiomgr.libvirt.client.connection import Connection, MdevState, NodeMdev, connect, parent_name
from vfiomgr.libvirt.client.errors import Code
from vfiomgr.libvirt.commands.attach import attach
from vfiomgr.libvirt.commands.connection import complete_domain
from vfiomgr.libvirt.xml.render import node_mdev
from vfiomgr.main.program import cli
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A node of libvirt's test driver with a domain `test`."""
    return node_uri(tmp_path)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "libvirt", None)
    yield
    library.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_the_optional_dependency_is_named_where_it_is_missing() -> None:
    with (
        pytest.raises(HostError, match="cannot import libvirt-python:") as caught,
        connect("test:///x"),
    ):
        pass
    assert f"{sys.executable} -m pip install libvirt-python" in caught.value.hint


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("beside", "name"), [("/usr/bin", "python3-libvirt"), ("/usr/no-library", "libvirt-python")]
)
def test_the_packages_take_libvirt_python_from_the_system(
    monkeypatch: pytest.MonkeyPatch, beside: str, name: str
) -> None:
    """That of Arch Linux, which has no libraries of its own, names the package there."""
    monkeypatch.setattr(sys, "prefix", "/usr/lib/vfiomgr")  # without pip
    monkeypatch.setattr(installation, "BESIDE", Path(beside))
    with pytest.raises(HostError) as caught, connect("test:///x"):
        pass
    assert caught.value.hint == f"install the system's package {name}"


def test_a_connection_is_closed_also_where_its_use_fails(uri: str) -> None:
    seen: list[Connection] = []

    def use() -> None:
        with connect(uri) as opened:
            seen.append(opened)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    with pytest.raises(LibvirtFailed, match="invalid connection"):
        seen[0].domain_names()


def test_events_can_be_heard_more_than_once_in_a_process(uri: str) -> None:
    for _ in range(2):
        with connect(uri, with_events=True) as opened:
            assert opened.domain_names() == ("test",)


def test_names_of_domains_are_completed_and_silence_is_no_error(uri: str) -> None:
    context = click.Context(attach)
    context.params["uri"] = uri
    parameter = attach.params[0]
    assert complete_domain(context, parameter, "te") == ["test"]
    assert complete_domain(context, parameter, "x") == []
    context.params["uri"] = "qemu+tcp://127.0.0.1:1/system"
    assert complete_domain(context, parameter, "te") == []


def test_no_daemon_is_told_with_its_socket() -> None:
    with (
        pytest.raises(LibvirtFailed, match="cannot connect to libvirt at"),
        connect("qemu+tcp://127.0.0.1:1/"),
    ):
        pass


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("foo:///bar", "no such libvirt driver: 'foo' in foo:///bar"),
        ("bogus+ssh://x/system", "no such libvirt driver: 'bogus'"),
        ("qemu://[::1/system", r"invalid URI: --connect qemu://\[::1/system"),
        ("qemu+tcp://x:port/system", "invalid URI: --connect"),
        ("foo", "no libvirt driver for URI"),
    ],
)
def test_a_uri_that_no_libvirt_knows_is_told_as_such(uri: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught, connect(uri):
        pass
    assert "https://libvirt.org/uri.html" in caught.value.hint


def test_a_host_that_nobody_knows_is_told_as_such() -> None:
    with (
        pytest.raises(LibvirtFailed, match=r"cannot resolve host nohost\.invalid of qemu\+tcp://"),
        connect("qemu+tcp://nohost.invalid/system"),
    ):
        pass


@pytest.mark.parametrize("inactive", [True, False])
def test_what_of_a_domain_cannot_be_read_is_known(
    monkeypatch: pytest.MonkeyPatch, uri: str, *, inactive: bool
) -> None:
    """The other XML of it is read all the same, and it stays as persistent as it is."""
    real = library().virDomain.XMLDesc

    def describe(domain: object, flags: int = 0) -> str:
        is_odd = bool(flags & library().VIR_DOMAIN_XML_INACTIVE) == inactive
        return "<odd/>" if is_odd else str(real(domain, flags))

    monkeypatch.setattr(library().virDomain, "XMLDesc", describe)
    with connect(uri) as opened:
        (known,) = opened.hypervisor().domains
    assert (known.is_definition_unread, known.is_running_unread) == (inactive, not inactive)
    assert (known.defined is None, known.running is None) == (inactive, not inactive)
    assert (known.is_unread, known.is_persistent) == (True, True)
    result = CliRunner().invoke(cli, ["check", "domain", "test", "-c", uri])
    if inactive:
        assert isinstance(result.exception, HostError)
        assert "virsh dumpxml --inactive test" in result.exception.hint
    else:
        assert "not checked: cannot read the XML of domain test" in result.output


DROPPED = b"""\
<domain type='test' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>new</name><memory>65536</memory><os><type>hvm</type></os>
  <qemu:commandline><qemu:arg value='-s'/></qemu:commandline>
</domain>
"""


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ({"undefineFlags": 0}, "nothing is defined"),
        ({"undefineFlags": Code.INVALID_ARG, "undefine": 0}, "nothing is defined"),
        ({"undefineFlags": Code.OPERATION_INVALID}, "new stays defined without them"),
    ],
)
def test_a_definition_of_which_a_part_was_dropped_goes_without_its_nvram(
    monkeypatch: pytest.MonkeyPatch, uri: str, answers: dict[str, int], left: str
) -> None:
    """With NVRAM of its name left over, libvirt undefines no domain but where told to keep it."""
    called = []

    def answer(call: str) -> Callable[..., int]:
        def act(_handle: object, *flags: int) -> int:
            called.append((call, *flags))
            if answers[call]:
                error = library().libvirtError("no")
                error.err = (answers[call], 0, "no", 2, None, None, None, -1, -1)
                raise error
            return 0

        return act

    with connect(uri) as opened:
        with monkeypatch.context() as patch:
            for call in ("undefine", "undefineFlags"):
                patch.setattr(library().virDomain, call, answer(call))
            with pytest.raises(InvalidDocument, match="would drop") as caught:
                opened.define(DROPPED, "new.xml")
        opened._lookup("new").undefine()
    assert caught.value.details == ("new.xml: dropped: domain/qemu:commandline",)
    assert left in caught.value.hint
    assert called[0] == ("undefineFlags", library().VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
    assert [call for call, *_ in called] == list(answers)


UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
PARENT = PciAddress.parse("0000:65:00.0")
ELEMENT = node_mdev(UUID, parent_name(PARENT), "nvidia-468")
STATE = MdevState(is_active=False, is_defined=True, starts_by_itself=None)


@dataclass
class OldDevice:
    """Without isActive, isPersistent and autostart, which libvirt-python has since 7.3 and 7.8."""

    calls: list[str]

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802 - libvirt's own name
        """As it was defined."""
        return ELEMENT

    def undefine(self) -> None:
        """Forget it."""
        self.calls.append("undefine")


@dataclass
class Device(OldDevice):
    """With them."""

    fails: bool = False

    def setAutostart(self, value: int) -> None:  # noqa: N802
        """Since 7.8."""
        self.calls.append(f"autostart {value}")
        if self.fails:
            error = library().libvirtError("no")
            error.err = (55, 0, "mdevctl said no", 2, None, None, None, -1, -1)
            raise error


@dataclass
class Libvirt:
    """A connection's own handle, of a release."""

    number: int
    device: OldDevice | None = None
    calls: list[str] = field(default_factory=list)

    def getLibVersion(self) -> int:  # noqa: N802
        """Its release."""
        return self.number

    def nodeDeviceDefineXML(self, _xml: str, _flags: int) -> OldDevice:  # noqa: N802
        """Since 7.3."""
        self.calls.append("define")
        return self.device or Device(self.calls)

    def nodeDeviceLookupByName(self, _name: str) -> OldDevice:  # noqa: N802
        """The one."""
        return self.device or Device(self.calls)

    def listAllDevices(self, _flags: int) -> list[OldDevice]:  # noqa: N802
        """All there are."""
        return [OldDevice(self.calls)]


def connection(handle: Libvirt) -> Connection:
    return Connection(handle, "qemu:///system")


def test_nothing_is_said_of_autostart_where_it_is_not_asked_for() -> None:
    handle = Libvirt(7_003_000)
    connection(handle).define_mdev(ELEMENT, UUID, autostart=False)
    assert handle.calls == ["define"]


def test_autostart_is_refused_before_anything_is_defined_where_libvirt_lacks_it() -> None:
    handle = Libvirt(7_007_000)
    told = f"--autostart of {UUID} needs .* \\(libvirt 7.8.0 or later\\); this is 7.7.0"
    with pytest.raises(Refusal, match=told):
        connection(handle).define_mdev(ELEMENT, UUID, autostart=True)
    known = NodeMdev("mdev_x", UUID, "nvidia-468", str(PARENT), STATE)
    with pytest.raises(Refusal, match=told):
        connection(handle).set_mdev_autostart(known, autostart=True)
    assert handle.calls == []


def test_autostart_is_set_where_libvirt_has_it() -> None:
    handle = Libvirt(7_008_000)
    connection(handle).define_mdev(ELEMENT, UUID, autostart=True)
    assert handle.calls == ["define", "autostart 1"]


def test_a_definition_whose_autostart_fails_goes_again() -> None:
    handle = Libvirt(9_000_000)
    handle.device = Device(handle.calls, fails=True)
    with pytest.raises(LibvirtFailed, match="mdevctl said no"):
        connection(handle).define_mdev(ELEMENT, UUID, autostart=True)
    assert handle.calls == ["define", "autostart 1", "undefine"]


def test_a_libvirt_that_defines_none_is_refused() -> None:
    handle = Libvirt(7_002_000)
    with pytest.raises(Refusal, match=r"libvirt 7\.3\.0 or later\); this is 7\.2\.0"):
        connection(handle).define_mdev(ELEMENT, UUID, autostart=False)
    assert handle.calls == []


def test_a_library_that_knows_no_states_lists_what_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for state in ("INACTIVE", "ACTIVE"):
        monkeypatch.delattr(library(), f"VIR_CONNECT_LIST_NODE_DEVICES_{state}")
    (mdev,) = connection(Libvirt(7_000_000)).mdevs()
    assert mdev.uuid == UUID
    assert mdev.state == MdevState(is_active=True, is_defined=False, starts_by_itself=None)
