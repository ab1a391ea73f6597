"""Devices go to a domain all or none: what is taken back when one fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from vfiomgr.errors import (
    GuestKeepsDevice,
    LibvirtFailed,
    LibvirtSilent,
    RollbackIncomplete,
    RolledBack,
    VfiomgrError,
)
from vfiomgr.libvirt.attach.claims import Scope
from vfiomgr.libvirt.attach.named import DeviceChange, attach_all, detach_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.libvirt.client.connection import Connection
    from vfiomgr.libvirt.client.domains import Removal

BOTH, LIVE = Scope(live=True, config=True), Scope(live=True, config=False)
CONFIG = Scope(live=False, config=True)
BROKEN = LibvirtFailed("it broke", "mend it")
KEPT = GuestKeepsDevice("it stays", "wait")


def element_of(device: str) -> str:
    address = f"<address uuid='{name_of(device)}'/>"
    return f"<hostdev type='mdev' managed='yes'><source>{address}</source></hostdev>"


def name_of(device: str) -> str:
    return f"{device * 8}-0d00-4007-9c5a-b07b0c6c05de"


@dataclass
class FakeConnection:
    """A domain as sets of devices, and the calls that fail."""

    running: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    failures: dict[tuple[str, str], BaseException] = field(default_factory=dict)
    late: set[tuple[str, str]] = field(default_factory=set)
    """Calls that fail for who waits, and are done all the same."""
    calls: list[str] = field(default_factory=list)

    def domain_xml(self, _name: str, *, secure: bool = False, inactive: bool = True) -> bytes:
        """The definition, as its devices; the running guest, as libvirt prints it."""
        if not inactive:
            hostdevs = "".join(map(element_of, sorted(self.running)))
            return f"<domain type='kvm'><devices>{hostdevs}</devices></domain>".encode()
        assert secure
        return " ".join(sorted(self.defined)).encode()

    def redefine(self, xml: bytes) -> None:
        """Take the definition back."""
        self._may("redefine", "")
        self.defined = set(xml.decode().split())

    def has(self, _name: str, device: str) -> bool:
        """Whether the running guest has it."""
        self._may("has", device[0])
        return device[0] in self.running

    def attach(self, _name: str, element: str, scope: Scope) -> None:
        """Add it."""
        call = ("attach", element)
        if call not in self.late:
            self._may(*call)
        if element.startswith("<"):
            (element,) = (name for name in "abcd" if element == element_of(name))
        self.running |= {element} if scope.live else set()
        self.defined |= {element} if scope.config else set()
        if call in self.late:
            self._may(*call)

    def detach(self, _name: str, element: str, scope: Scope, removal: Removal) -> None:
        """Remove it."""
        assert (removal.device, removal.deadline) == (name_of(element), 5)
        call = ("detach", element)
        if call not in self.late:
            self._may(*call)
        self.running -= {element} if scope.live else set()
        self.defined -= {element} if scope.config else set()
        if call in self.late:
            self._may(*call)

    def _may(self, call: str, element: str) -> None:
        self.calls.append(f"{call} {element}".strip())
        if (call, element) in self.failures:
            raise self.failures[call, element]


def exchange(
    act: Callable[..., None], connection: FakeConnection, *devices: str, scope: Scope = BOTH
) -> list[str]:
    done: list[str] = []
    exchanges = [DeviceChange(name_of(device), device, scope) for device in devices]
    act(cast("Connection", connection), "win", exchanges, 5, lambda one: done.append(one.element))
    return done


def test_all_are_attached() -> None:
    connection = FakeConnection(defined={"a"})
    assert exchange(attach_all, connection, "b", "c") == ["b", "c"]
    assert (connection.running, connection.defined) == ({"b", "c"}, {"a", "b", "c"})


@pytest.mark.parametrize("scope", [BOTH, LIVE, CONFIG], ids=str)
@pytest.mark.parametrize("error", [BROKEN, KeyboardInterrupt()], ids=["failure", "interrupt"])
def test_one_that_fails_takes_the_others_back(scope: Scope, error: BaseException) -> None:
    connection = FakeConnection({"a"}, {"a"}, {("attach", "d"): error})
    with pytest.raises(RolledBack, match="win is unchanged") as caught:
        exchange(attach_all, connection, "b", "c", "d", scope=scope)
    assert (connection.running, connection.defined) == ({"a"}, {"a"})
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("act", "undone"), [(attach_all, "detach"), (detach_all, "attach")], ids=["attach", "detach"]
)
def test_the_last_is_taken_back_first(act: Callable[..., None], undone: str) -> None:
    """A guest's functions of one slot go in the opposite order to that in which they came."""
    given = set() if act is attach_all else set("bcd")
    call = act.__name__.partition("_")[0]
    connection = FakeConnection(given, set(), {(call, "d"): BROKEN})
    with pytest.raises(RolledBack):
        exchange(act, connection, "b", "c", "d", scope=LIVE)
    shown = element_of if act is detach_all else str
    assert connection.calls[-2:] == [f"{undone} {shown('c')}", f"{undone} {shown('b')}"]


@pytest.mark.parametrize("devices", [["b"], ["b", "c"]], ids=["first", "second"])
@pytest.mark.parametrize("scope", [BOTH, LIVE, CONFIG], ids=str)
def test_what_libvirt_did_after_an_interrupt_is_taken_back(
    scope: Scope, devices: list[str]
) -> None:
    call = ("attach", devices[-1])
    connection = FakeConnection({"a"}, {"a"}, {call: KeyboardInterrupt()}, {call})
    with pytest.raises(RolledBack, match="interrupted; win is unchanged"):
        exchange(attach_all, connection, *devices, scope=scope)
    assert (connection.running, connection.defined) == ({"a"}, {"a"})


@pytest.mark.parametrize("devices", [["a"], ["b", "a"]], ids=["first", "second"])
@pytest.mark.parametrize("scope", [BOTH, LIVE, CONFIG], ids=str)
def test_what_a_guest_released_after_an_interrupt_it_gets_again(
    scope: Scope, devices: list[str]
) -> None:
    call = ("detach", "a")
    connection = FakeConnection({"a", "b"}, {"a", "b"}, {call: KeyboardInterrupt()}, {call})
    with pytest.raises(RolledBack, match="win is unchanged"):
        exchange(detach_all, connection, *devices, scope=scope)
    assert (connection.running, connection.defined) == ({"a", "b"}, {"a", "b"})


def test_a_request_to_a_guest_that_was_interrupted_is_told_to_stand() -> None:
    interrupt: dict[tuple[str, str], BaseException] = {("detach", "a"): KeyboardInterrupt()}
    connection = FakeConnection({"a", "b"}, {"a", "b"}, interrupt)
    told = f"interrupted; win has {name_of('a')}, and may have been asked to release it"
    with pytest.raises(RollbackIncomplete, match=told):
        exchange(detach_all, connection, "b", "a")
    assert (connection.running, connection.defined) == ({"a", "b"}, {"a", "b"})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "interrupted twice"),
        (LibvirtSilent("no answer for 9 s", "look"), "no answer for 9 s"),
    ],
    ids=["twice", "silent"],
)
def test_where_libvirt_does_not_tell_after_an_interrupt_both_devices_are_named(
    error: BaseException, told: str
) -> None:
    failures: dict[tuple[str, str], BaseException] = {
        ("attach", "c"): KeyboardInterrupt(),
        ("has", "c"): error,
    }
    connection = FakeConnection(failures=failures)
    left = (
        f"{told}: cannot tell whether win has {name_of('c')}, and {name_of('b')} was not restored"
    )
    with pytest.raises(RollbackIncomplete, match=left) as caught:
        exchange(attach_all, connection, "b", "c")
    assert "check with: vfiomgr libvirt list --domain win" in caught.value.hint


def test_a_second_interrupt_does_not_say_that_all_is_as_before() -> None:
    interrupts: dict[tuple[str, str], BaseException] = {
        ("attach", "c"): KeyboardInterrupt(),
        ("detach", "b"): KeyboardInterrupt(),
    }
    with pytest.raises(
        RollbackIncomplete, match="cannot undo the earlier changes: interrupted again"
    ):
        exchange(attach_all, FakeConnection(failures=interrupts), "b", "c")


def test_the_first_that_fails_is_told_plainly() -> None:
    connection = FakeConnection(failures={("attach", "b"): BROKEN})
    with pytest.raises(LibvirtFailed, match="it broke"):
        exchange(attach_all, connection, "b", "c")
    assert connection.calls == ["attach b"]


@pytest.mark.parametrize("act", [attach_all, detach_all])
def test_a_call_that_was_given_up_may_have_been_done(act: Callable[..., None]) -> None:
    silent = LibvirtSilent("no answer for 9 s", "look at it")
    verb = act.__name__.removesuffix("_all")
    connection = FakeConnection(failures={(verb, "b"): silent})
    left = f"no answer for 9 s: cannot tell whether win has {name_of('b')}"
    with pytest.raises(RollbackIncomplete, match=left) as caught:
        exchange(act, connection, "b", "c")
    assert caught.value.hint == "look at it; then check with: vfiomgr libvirt list --domain win"


def test_what_cannot_be_taken_back_is_told() -> None:
    connection = FakeConnection(failures={("attach", "c"): BROKEN, ("detach", "b"): KEPT})
    with pytest.raises(
        RollbackIncomplete, match=r"it broke; cannot undo the earlier changes: it stays"
    ):
        exchange(attach_all, connection, "b", "c")


def test_all_are_detached() -> None:
    connection = FakeConnection({"a", "b"}, {"a", "b"})
    assert exchange(detach_all, connection, "a", "b") == ["a", "b"]
    assert (connection.running, connection.defined) == (set(), set())


@pytest.mark.parametrize("scope", [BOTH, LIVE, CONFIG], ids=str)
def test_one_that_libvirt_refuses_gives_the_others_again(scope: Scope) -> None:
    connection = FakeConnection({"a", "b"}, {"a", "b"}, {("detach", "b"): BROKEN})
    with pytest.raises(RolledBack):
        exchange(detach_all, connection, "a", "b", scope=scope)
    assert (connection.running, connection.defined) == ({"a", "b"}, {"a", "b"})


def test_a_guest_that_keeps_one_ends_it_and_the_request_stands() -> None:
    connection = FakeConnection({"a", "b"}, {"a", "b"}, {("detach", "b"): KEPT})
    with pytest.raises(GuestKeepsDevice):
        exchange(detach_all, connection, "a", "b")
    assert connection.running == {"b"}
    assert connection.calls == ["detach a", "detach b"]


def test_what_libvirt_does_not_give_again_is_told() -> None:
    connection = FakeConnection(
        {"a", "b"}, {"a"}, {("detach", "b"): BROKEN, ("redefine", ""): KEPT}
    )
    with pytest.raises(RollbackIncomplete):
        exchange(detach_all, connection, "a", "b")


def test_all_of_these_errors_are_told_to_users() -> None:
    assert GuestKeepsDevice.exit_code == RollbackIncomplete.exit_code == 5
    assert issubclass(GuestKeepsDevice, VfiomgrError)
