"""A connection to libvirt; the only importer of libvirt-python, which is an optional dependency.

Where a method raises an error of libvirt, it is one of vfiomgr's by then:
`vfiomgr.adapters.libvirt.causes`.
"""

from __future__ import annotations

import functools
import shlex
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from vfiomgr.adapters.libvirt.capabilities import has_kvm, offers_vfio
from vfiomgr.adapters.libvirt.causes import Code, explain
from vfiomgr.adapters.libvirt.drops import find_drops
from vfiomgr.adapters.libvirt.identity import with_identity
from vfiomgr.adapters.libvirt.nodedev import MdevState, read_mdev
from vfiomgr.adapters.libvirt.read import read_domain
from vfiomgr.adapters.libvirt.uri import split_uri
from vfiomgr.errors import (
    GuestKeepsDevice,
    HostError,
    InvalidDocument,
    LibvirtFailed,
    UsageError,
    VfiomgrError,
)
from vfiomgr.model.domain import Hypervisor, KnownDomain
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.adapters.libvirt.nodedev import NodeMdev
    from vfiomgr.model.attachment import Scope
    from vfiomgr.model.domain import Domain

_EMBEDDED = "/embed"
"""The path of a driver inside this process, which needs the loop itself (drvqemu.html)."""
_TICK = 0.25
"""Seconds between two looks at a domain whose event may have been missed."""
_LOOP_TICK = 200
"""Milliseconds after which the event loop wakes up without an event."""
_LACKING = frozenset(
    {Code.NO_SUPPORT, Code.INVALID_ARG, Code.CONFIG_UNSUPPORTED, Code.OPERATION_DENIED}
)
"""A driver, a host, or a connection for reading, that does not have a call."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DomainState:
    """A domain as a change needs to know it."""

    name: str
    uuid: str
    is_active: bool
    is_persistent: bool


class DefineForecast(Enum):
    """What a definition would be to libvirt."""

    NEW = "new"
    SAME = "same"
    ANOTHER = "another"
    """There is a domain of its name; libvirt alone knows whether it would be as it is."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Which device a running guest is to release, and how many seconds it has for it."""

    device: str
    """Its address or its UUID."""
    deadline: float


@contextmanager
def connect(
    uri: str, *, read_only: bool = False, with_events: bool = False
) -> Iterator[Connection]:
    """A connection to the libvirt at a URI; events of domains are heard `with_events` alone.

    Raises:
        HostError: libvirt-python is not installed, or no libvirt answers.
        UsageError: it is no URI, or no driver of libvirt knows it.

    """
    libvirt = _library()
    path = split_uri(uri).path
    needs_loop = with_events or path == _EMBEDDED
    with _event_loop() if needs_loop else nullcontext():
        with _explaining(uri):
            handle = (libvirt.openReadOnly if read_only else libvirt.open)(uri)
        try:
            yield Connection(handle, uri)
        finally:
            handle.close()


class Connection:
    """An open connection; `connect` makes one."""

    def __init__(self, handle: Any, uri: str) -> None:  # noqa: ANN401 - libvirt is untyped
        self._handle = handle
        self.uri = uri

    # ---- reading

    def version(self) -> Version:
        """Of libvirt, on the other side."""
        with _explaining(self.uri):
            return Version.from_number(self._handle.getLibVersion())

    def hypervisor(self) -> Hypervisor:
        """The versions, what the host offers, and all domains, running and defined.

        A domain that goes meanwhile is left out; one whose XML cannot be read is without it.
        """
        return Hypervisor(
            uri=self.uri,
            libvirt=self.version(),
            qemu=self._qemu_version(),
            offers_vfio=self._if_supported(lambda: offers_vfio(self._domain_capabilities())),
            has_kvm=self._if_supported(lambda: has_kvm(self._handle.getCapabilities())),
            domains=tuple(self._known_domains()),
        )

    def domain(self, name: str) -> KnownDomain:
        """One domain, by its name or its UUID.

        Raises:
            UsageError: there is none.

        """
        handle = self._lookup(name)
        with _explaining(handle.name()):
            return self._known(handle, handle.isActive(), handle.isPersistent())

    def state(self, name: str) -> DomainState:
        """Whether a domain runs and is defined, by its name or its UUID.

        Raises:
            UsageError: there is none.

        """
        handle = self._lookup(name)
        with _explaining(name):
            return DomainState(
                handle.name(),
                handle.UUIDString(),
                bool(handle.isActive()),
                bool(handle.isPersistent()),
            )

    def domain_names(self) -> tuple[str, ...]:
        """The names of all domains, sorted."""
        with _explaining(self.uri):
            return tuple(sorted(handle.name() for handle in self._handle.listAllDomains(0)))

    def domain_xml(self, name: str, *, inactive: bool = True, secure: bool = False) -> bytes:
        """The XML of a domain: as it is defined, or as it runs; passwords only where `secure`.

        Raises:
            UsageError: there is no such domain.

        """
        libvirt = _library()
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE if inactive else 0
        flags |= libvirt.VIR_DOMAIN_XML_SECURE if secure else 0
        handle = self._lookup(name)
        with _explaining(name):
            text: str = handle.XMLDesc(flags)
        return text.encode()

    # ---- definitions

    def define(self, xml: bytes, source: str) -> bool:
        """Define a domain, checked by libvirt's schema; whether its definition is another now.

        What libvirt prints afterwards must hold all that was written; else what was defined before
        is put back. XML without a UUID is about the domain of its name, where there is one, and
        interfaces without a MAC address keep theirs.

        Raises:
            InvalidDocument: libvirt cannot read it, or would drop a part of it.

        """
        wanted = read_domain(xml, source)
        previous = self._definition(wanted.uuid, wanted.name)
        text = self._completed(xml, wanted, previous)
        handle = self._define(text, source, validate=True)
        printed = self.domain_xml(handle.name(), secure=True)
        drops = find_drops(xml, printed)
        if not drops:
            return printed != previous
        message = f"libvirt {self.version()} at {self.uri} would drop parts of {source}"
        left = self._put_back(handle, previous)
        hint = f"leave them out, or use a libvirt that reads them; {left}"
        raise InvalidDocument(message, hint, tuple(f"{source}: dropped: {drop}" for drop in drops))

    def redefine(self, xml: bytes) -> None:
        """Put a definition back that libvirt printed itself, with its secrets."""
        self._define(xml.decode(), "the definition of before", validate=False)

    def would_define(self, xml: bytes, source: str) -> DefineForecast:
        """What `define` would come upon; libvirt is asked for nothing but what it has.

        Raises:
            InvalidDocument: it is no domain's XML.
            LibvirtFailed: the name is that of a domain with another UUID, or the other way round.

        """
        wanted = read_domain(xml, source)
        for key, taken in ((wanted.uuid, "is already defined"), (wanted.name, "already exists")):
            handle = self._find(key) if key is not None else None
            if handle is None:
                continue
            state = self.state(handle.UUIDString())
            if state.name != wanted.name or wanted.uuid not in {None, state.uuid}:
                text = f"domain '{state.name}' {taken} with uuid {state.uuid}"
                raise explain(Code.OPERATION_FAILED, text, source)
            if not state.is_persistent:
                continue
            printed = self.domain_xml(state.uuid)
            is_same = self._completed(xml, wanted, printed) == printed.decode()
            return DefineForecast.SAME if is_same else DefineForecast.ANOTHER
        return DefineForecast.NEW

    def _completed(self, xml: bytes, wanted: Domain, previous: bytes | None) -> str:
        """As libvirt is to read it: of the domain of that name, where there is one."""
        known = self._find(wanted.name) if wanted.name else None
        uuid = None if known is None else known.UUIDString()
        return _text(with_identity(xml, wanted.source, uuid, previous), wanted.source)

    def _define(self, text: str, source: str, *, validate: bool) -> Any:  # noqa: ANN401
        flags = _library().VIR_DOMAIN_DEFINE_VALIDATE if validate else 0
        with _explaining(source):
            return self._handle.defineXMLFlags(text, flags)

    def _definition(self, uuid: str | None, name: str | None) -> bytes | None:
        """What is defined under a UUID, or else a name."""
        for key in (uuid, name):
            if key is not None and (handle := self._find(key)) is not None:
                with _explaining(key):
                    is_defined = handle.isPersistent()
                return self.domain_xml(handle.UUIDString(), secure=True) if is_defined else None
        return None

    def _put_back(self, handle: Any, previous: bytes | None) -> str:  # noqa: ANN401
        """Undo a definition, and say what is defined now; what was dropped is told in any case."""
        try:
            if previous is not None:
                self.redefine(previous)
                return "the definition of before stands"
            self._undefine(handle)
        except VfiomgrError as error:
            name = shlex.quote(handle.name())
            return f"{name} stays defined without them ({error.message}): {error.hint}"
        return "nothing is defined"

    def _undefine(self, handle: Any) -> None:  # noqa: ANN401
        """Forget a domain; its NVRAM, which may be older than this definition, stays."""
        keep = _library().VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
        if self._if_supported(lambda: handle.undefineFlags(keep)) is None:
            with _explaining(handle.name()):  # drivers without NVRAM do not know the flag
                handle.undefine()

    # ---- devices of domains

    def attach(self, name: str, element: str, scope: Scope) -> None:
        """Give a device to a domain; libvirt does all of the scope or nothing."""
        handle = self._lookup(name)
        with _explaining(name):
            handle.attachDeviceFlags(element, _flags(scope))

    def detach(self, name: str, element: str, scope: Scope, removal: Removal) -> None:
        """Take a device from a domain; a running guest must release it.

        Raises:
            GuestKeepsDevice: it refused, or did not until the deadline; the definition is changed.

        """
        handle = self._lookup(name)
        if not scope.live:
            with _explaining(name):
                handle.detachDeviceFlags(element, _flags(scope))
            return
        with self._removals(handle) as news:
            alias = self._alias(name, removal.device)
            with _explaining(name):
                handle.detachDeviceFlags(element, _flags(scope))
            end = time.monotonic() + removal.deadline
            while self._has(name, removal.device):
                if alias in news.refused:
                    raise _kept(name, removal.device, "refused to release it", scope)
                left = end - time.monotonic()
                if left <= 0:
                    late = f"has not released it within {removal.deadline:g} s"
                    raise _kept(name, removal.device, late, scope)
                news.wait(min(_TICK, left))

    def _alias(self, name: str, device: str) -> str | None:
        found = read_domain(self.domain_xml(name, inactive=False), name).hostdev(device)
        return found.alias if found else None

    def _has(self, name: str, device: str) -> bool:
        """Whether the running guest has it; one that is off by now has not."""
        try:
            if not self.state(name).is_active:
                return False
            running = read_domain(self.domain_xml(name, inactive=False), name)
        except UsageError:
            return False
        return running.hostdev(device) is not None

    @contextmanager
    def _removals(self, handle: Any) -> Iterator[_Removals]:  # noqa: ANN401
        libvirt = _library()
        removals = _Removals()
        register = functools.partial(self._handle.domainEventRegisterAny, handle)
        with _explaining(handle.name()):
            ids = [
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, removals.removed, None),
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED, removals.failed, None),
            ]
        try:
            yield removals
        finally:
            with _explaining(handle.name()):
                for number in ids:
                    self._handle.domainEventDeregisterAny(number)

    # ---- what a domain keeps for other programs

    def metadata(self, name: str, namespace: str) -> str | None:
        """The element of a namespace in a domain's definition."""
        libvirt = _library()
        handle = self._lookup(name)
        try:
            found: str = handle.metadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT, namespace, libvirt.VIR_DOMAIN_AFFECT_CONFIG
            )
        except libvirt.libvirtError as error:
            if error.get_error_code() == Code.NO_DOMAIN_METADATA:
                return None
            raise _explained(error, name) from None
        return found

    def set_metadata(self, name: str, element: str | None, prefix: str, namespace: str) -> None:
        """Keep an element in a domain's definition, in place of that of its namespace; or none."""
        libvirt = _library()
        handle = self._lookup(name)
        with _explaining(name):
            handle.setMetadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                element,
                prefix,
                namespace,
                libvirt.VIR_DOMAIN_AFFECT_CONFIG,
            )

    # ---- mediated devices that libvirt owns

    def mdevs(self) -> tuple[NodeMdev, ...]:
        """Those that are active or defined, by their UUIDs."""
        libvirt = _library()
        active = libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV
        every = active | libvirt.VIR_CONNECT_LIST_NODE_DEVICES_INACTIVE
        every |= libvirt.VIR_CONNECT_LIST_NODE_DEVICES_ACTIVE
        handles = self._if_supported(lambda: self._handle.listAllDevices(every))
        with _explaining(self.uri):
            if handles is None:  # before 7.3, and in the test driver, there are the active alone
                handles = self._handle.listAllDevices(active)
            found = [self._mdev(handle) for handle in handles]
        return tuple(sorted(filter(None, found), key=lambda mdev: mdev.uuid))

    def define_mdev(self, element: str, uuid: str, *, autostart: bool) -> None:
        """Have libvirt keep a mediated device, and start it with its parent where that is asked.

        libvirt has mdevctl do it, in whose files it is kept.
        """
        with _explaining(uuid):
            handle = self._handle.nodeDeviceDefineXML(element, 0)
        try:
            with _explaining(uuid):
                handle.setAutostart(int(autostart))
        except LibvirtFailed:
            with _explaining(uuid):
                handle.undefine()
            raise

    def set_mdev_autostart(self, mdev: NodeMdev, *, autostart: bool) -> None:
        """Whether it starts with its parent."""
        with _explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).setAutostart(int(autostart))

    def start_mdev(self, mdev: NodeMdev) -> None:
        """Make one that is defined."""
        with _explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).create(0)

    def stop_mdev(self, mdev: NodeMdev) -> None:
        """Remove an active one; a definition stays."""
        with _explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).destroy()

    def undefine_mdev(self, mdev: NodeMdev) -> None:
        """Forget one; it stays active where it is."""
        with _explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).undefine(0)

    # ---- helpers

    def _mdev(self, handle: Any) -> NodeMdev | None:  # noqa: ANN401
        """Without an answer (of a driver that has one state alone) it is active, and no more."""
        autostart = self._if_supported(handle.autostart)
        state = MdevState(
            is_active=self._if_supported(handle.isActive) != 0,
            is_defined=bool(self._if_supported(handle.isPersistent)),
            starts_by_itself=None if autostart is None else bool(autostart),
        )
        return read_mdev(handle.XMLDesc(0), state)

    def _known_domains(self) -> Iterator[KnownDomain]:
        libvirt = _library()
        with _explaining(self.uri):
            handles = self._handle.listAllDomains(0)
            active, persistent = (
                {handle.UUIDString() for handle in self._handle.listAllDomains(flag)}
                for flag in (
                    libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE,
                    libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT,
                )
            )
        for handle in sorted(handles, key=lambda handle: str(handle.name())):
            uuid = handle.UUIDString()
            try:
                yield self._known(handle, uuid in active, uuid in persistent)
            except libvirt.libvirtError as error:
                if error.get_error_code() != Code.NO_DOMAIN:
                    raise _explained(error, handle.name()) from None

    def _known(self, handle: Any, is_active: bool, is_persistent: bool) -> KnownDomain:  # noqa: ANN401, FBT001
        name, inactive = handle.name(), _library().VIR_DOMAIN_XML_INACTIVE
        running = _read(handle.XMLDesc(0), name) if is_active else None
        defined = _read(handle.XMLDesc(inactive), name) if is_persistent else None
        return KnownDomain(
            name=name,
            uuid=handle.UUIDString(),
            is_active=bool(is_active),
            running=running,
            defined=defined,
            autostarts=bool(is_persistent and handle.autostart()),
            is_unreadable=bool((is_active and not running) or (is_persistent and not defined)),
        )

    def _qemu_version(self) -> Version | None:
        """None of a driver without a hypervisor; that of the tests has the version 2."""
        number = self._if_supported(self._handle.getVersion)
        with _explaining(self.uri):
            is_qemu = str(self._handle.getType()).upper() == "QEMU"
        return Version.from_number(number) if is_qemu and number else None

    def _domain_capabilities(self) -> str:
        text: str = self._handle.getDomainCapabilities()
        return text

    def _if_supported(self, call: Callable[[], _Result | None]) -> _Result | None:
        """What a call gives; None where there is no such call here."""
        libvirt = _library()
        try:
            return call()
        except libvirt.libvirtError as error:
            lacking = (
                Code.NO_SUPPORT,
                Code.INVALID_ARG,
                Code.CONFIG_UNSUPPORTED,
                Code.OPERATION_DENIED,
            )
            if error.get_error_code() in lacking:
                return None
            raise _explained(error, self.uri) from None

    def _find(self, name: str) -> Any | None:  # noqa: ANN401
        """A domain by its name or its UUID."""
        libvirt = _library()
        for look in (self._handle.lookupByName, self._handle.lookupByUUIDString):
            try:
                return look(name)
            except libvirt.libvirtError as error:
                if error.get_error_code() not in (Code.NO_DOMAIN, Code.INVALID_ARG):
                    raise _explained(error, name) from None
        return None

    def _lookup(self, name: str) -> Any:  # noqa: ANN401
        handle = self._find(name)
        if handle is None:
            raise explain(Code.NO_DOMAIN, "", name)
        return handle


class _Removals:
    """What QEMU tells of devices that a guest was asked to release; filled by the event loop."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._news = threading.Event()

    def removed(self, _connection: object, _domain: object, _alias: str, _data: object) -> None:
        """DEVICE_REMOVED: the domain's XML is without it."""
        self._news.set()

    def failed(self, _connection: object, _domain: object, alias: str, _data: object) -> None:
        """DEVICE_REMOVAL_FAILED: the guest said no."""
        self.refused.add(alias)
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Return at news, or when so much time has passed."""
        self._news.wait(seconds)
        self._news.clear()


def _kept(name: str, device: str, what: str, scope: Scope) -> GuestKeepsDevice:
    rest = "; its definition has it no longer" if scope.config else ""
    message = f"the guest {name} {what}: {device} is still with it{rest}"
    hint = (
        "the request stands: it is released when the guest's system answers (is it up, and is its "
        "driver unloaded?), or when the guest is shut down"
    )
    return GuestKeepsDevice(message, hint)


def _flags(scope: Scope) -> int:
    libvirt = _library()
    live: int = libvirt.VIR_DOMAIN_AFFECT_LIVE if scope.live else 0
    config: int = libvirt.VIR_DOMAIN_AFFECT_CONFIG if scope.config else 0
    return live | config


def _read(xml: str, name: str) -> Domain | None:
    """A domain of libvirt's own XML; None of what vfiomgr cannot make sense of."""
    try:
        return read_domain(xml.encode(), name)
    except InvalidDocument:
        return None


def _text(xml: bytes, source: str) -> str:
    try:
        return xml.decode()
    except UnicodeDecodeError:
        message = f"{source} is no text in UTF-8"
        raise InvalidDocument(message, "libvirt reads XML in UTF-8") from None


# ---- the library


@functools.cache
def _library() -> Any:  # noqa: ANN401
    """libvirt-python, told not to print its errors by itself."""
    try:
        import libvirt  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        message = f"this needs libvirt-python, which is not there: {error}"
        hint = (
            f"{sys.executable} -m pip install libvirt-python (it is built with gcc, pkg-config, "
            "python3-dev and libvirt-dev)"
        )
        raise HostError(message, hint) from None
    libvirt.registerErrorHandler(_be_silent, None)
    return libvirt


def _be_silent(_context: object, _error: object) -> None:
    """Libvirt's default handler prints on stderr."""


@contextmanager
def _event_loop() -> Iterator[None]:
    """Hear events within; begun before a connection is opened, and ended after it is closed.

    The thread must not be in libvirt when the interpreter ends, which frees what it works with.
    """
    _register_event_loop()
    stop = threading.Event()
    thread = threading.Thread(target=_loop, args=(stop,), name="libvirt-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@functools.cache
def _register_event_loop() -> None:
    """Once a process. The timeout wakes the loop, which else sleeps until a descriptor is ready."""
    libvirt = _library()
    with _explaining("the event loop"):
        libvirt.virEventRegisterDefaultImpl()
        libvirt.virEventAddTimeout(_LOOP_TICK, _do_nothing, None)


def _do_nothing(_timer: int, _data: object) -> None:
    """The loop needed to wake up, no more."""


def _loop(stop: threading.Event) -> None:
    libvirt = _library()
    while not stop.is_set():
        libvirt.virEventRunDefaultImpl()


@contextmanager
def _explaining(subject: str) -> Iterator[None]:
    libvirt = _library()
    try:
        yield
    except libvirt.libvirtError as error:
        raise _explained(error, subject) from None


def _explained(error: Any, subject: str) -> Exception:  # noqa: ANN401
    code = error.get_error_code()
    if code is None:
        return LibvirtFailed(f"libvirt failed: {error}", "see its log: journalctl -u libvirtd")
    return explain(code, error.get_error_message() or "", subject)
