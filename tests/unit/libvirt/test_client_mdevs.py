"""Mediated devices of libvirts that are older than the one that is here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from vfiomgr.errors import LibvirtFailed, Refusal
from vfiomgr.libvirt.client.binding import library
from vfiomgr.libvirt.client.connection import Connection, MdevState, NodeMdev, parent_name
from vfiomgr.libvirt.xml.render import node_mdev
from vfiomgr.pci.model import PciAddress

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
            error.err = (55, 0, "mdevctl said no")
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
    told = f"--autostart of {UUID} needs .* which libvirt has since 7.8.0: this is 7.7.0"
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
    with pytest.raises(Refusal, match=r"since 7\.3\.0: this is 7\.2\.0"):
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
