"""Calls about domains, and about what the host offers them (formatdomain.html, formatcaps.html).

A domain is given by name or UUID; every call raises UsageError if there is no such domain. A
running guest must release a device that is detached.
"""

from __future__ import annotations

import functools
import json
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.errors import (
    GuestKeepsDevice,
    InvalidDocument,
    LibvirtFailed,
    UsageError,
    VfiomgrError,
)
from vfiomgr.libvirt.client.binding import Caller, explained, explaining, library
from vfiomgr.libvirt.client.define import find_drops, with_identity
from vfiomgr.libvirt.client.errors import Code, ReportedError, explain
from vfiomgr.libvirt.model import Domain, Hypervisor, KnownDomain
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.attach.claims import Scope


def offers_vfio(capabilities: str) -> bool | None:
    """Whether libvirt supports VFIO passthrough of PCI devices; None if it does not say."""
    hostdev = ET.fromstring(capabilities).find("devices/hostdev")  # noqa: S314 - of the daemon
    if hostdev is None:
        return None
    if hostdev.get("supported") != "yes":
        return False
    backends = hostdev.find("enum[@name='pciBackend']")
    if backends is None:
        return None
    return any(value.text == "vfio" for value in backends.findall("value"))


def has_kvm(capabilities: str) -> bool:
    """Whether the host can run guests of type kvm, by its capabilities (formatcaps.html)."""
    root = ET.fromstring(capabilities)  # noqa: S314 - of the daemon that runs the guests
    return any(domain.get("type") == "kvm" for domain in root.iter("domain"))


_TICK = 0.25
"""Seconds between checks of a domain, in case an event was missed."""


class Removal(Value):
    """The device that a running guest must release, and how many seconds it has."""

    device: str
    """Its address or its UUID."""
    deadline: float


class DefineForecast(Enum):
    """What a definition would change in libvirt."""

    NEW = "new"
    SAME = "same"
    ANOTHER = "another"
    """A domain of this name exists; only libvirt can tell whether its definition would change."""


class DomainState(Value):
    """The facts about a domain that a change needs."""

    name: str
    uuid: str
    is_active: bool
    is_persistent: bool


class DomainCalls(Caller):
    """The calls that query and change domains."""

    def hypervisor(self) -> Hypervisor:
        """The versions, what the host offers, and all domains, running and defined.

        A domain that disappears meanwhile is omitted; one whose XML cannot be read has no XML.
        """
        return Hypervisor(
            uri=self.uri,
            libvirt=self.version(),
            qemu=self._qemu_version(),
            offers_vfio=self._if_supported(
                lambda: offers_vfio(self._handle.getDomainCapabilities())
            ),
            has_kvm=self._if_supported(lambda: has_kvm(self._handle.getCapabilities())),
            domains=tuple(self._known_domains()),
        )

    @contextmanager
    def _asking(self, name: str) -> Iterator[Any]:
        """Look up a domain, and explain the errors of its calls."""
        handle = self._lookup(name)
        with explaining(name):
            yield handle

    def domain(self, name: str) -> KnownDomain:
        """One domain, by name or UUID."""
        handle = self._lookup(name)
        with explaining(handle.name()):
            return self._known(handle, handle.isActive(), handle.isPersistent())

    def state(self, name: str) -> DomainState:
        """Whether a domain runs and is defined, by name or UUID."""
        with self._asking(name) as handle:
            return DomainState(
                handle.name(),
                handle.UUIDString(),
                bool(handle.isActive()),
                bool(handle.isPersistent()),
            )

    def blocked_reasons(self, name: str) -> tuple[str, ...]:
        """Why QEMU refuses to migrate a running domain (query-migrate, QEMU 6.0).

        libvirt marks the domain as tainted: custom-monitor.

        Raises:
            LibvirtFailed: QEMU does not answer, or the domain is off.
        """
        with self._asking(name) as handle:
            answer = json.loads(handle.ask_qemu(json.dumps({"execute": "query-migrate"})))
        if "return" not in answer:
            message = f"cannot ask QEMU of {name}: {answer.get('error', {}).get('desc', answer)}"
            raise LibvirtFailed(message, f"see /var/log/libvirt/qemu/{name}.log")
        return tuple(answer["return"].get("blocked-reasons", ()))

    def domain_names(self) -> tuple[str, ...]:
        """The names of all domains, sorted."""
        with explaining(self.uri):
            return tuple(sorted(handle.name() for handle in self._handle.listAllDomains(0)))

    def domain_xml(self, name: str, *, inactive: bool = True, secure: bool = False) -> bytes:
        """The XML of a domain, defined or running; with passwords only if `secure`."""
        libvirt = library()
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE if inactive else 0
        flags |= libvirt.VIR_DOMAIN_XML_SECURE if secure else 0
        with self._asking(name) as handle:
            text: str = handle.XMLDesc(flags)
        return text.encode()

    def metadata(self, name: str, namespace: str) -> str | None:
        """The element of a namespace in the metadata of a domain's definition."""
        libvirt = library()
        handle = self._lookup(name)
        try:
            found: str = handle.metadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT, namespace, libvirt.VIR_DOMAIN_AFFECT_CONFIG
            )
        except libvirt.libvirtError as error:
            if error.get_error_code() == Code.NO_DOMAIN_METADATA:
                return None
            raise explained(error, name) from None
        return found

    def set_metadata(self, name: str, element: str | None, prefix: str, namespace: str) -> None:
        """Set the element of a namespace in the metadata of a domain's definition, or remove it."""
        libvirt = library()
        with self._asking(name) as handle:
            handle.setMetadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                element,
                prefix,
                namespace,
                libvirt.VIR_DOMAIN_AFFECT_CONFIG,
            )

    def _known_domains(self) -> Iterator[KnownDomain]:
        libvirt = library()
        with explaining(self.uri):
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
                    raise explained(error, handle.name()) from None

    def _known(self, handle: Any, is_active: bool, is_persistent: bool) -> KnownDomain:  # noqa: ANN401, FBT001
        name, inactive = handle.name(), library().VIR_DOMAIN_XML_INACTIVE
        running = _read(handle.XMLDesc(0), name) if is_active else None
        defined = _read(handle.XMLDesc(inactive), name) if is_persistent else None
        return KnownDomain(
            name=name,
            uuid=handle.UUIDString(),
            is_active=bool(is_active),
            running=running,
            defined=defined,
            autostarts=bool(is_persistent and handle.autostart()),
            is_running_unread=bool(is_active and not running),
            is_definition_unread=bool(is_persistent and not defined),
        )

    def _qemu_version(self) -> Version | None:
        """None for a driver without a hypervisor; the test driver reports version 2."""
        number = self._if_supported(self._handle.getVersion)
        with explaining(self.uri):
            is_qemu = str(self._handle.getType()).upper() == "QEMU"
        return Version.from_number(number) if is_qemu and number else None

    # ---- definitions

    def define(self, xml: bytes, source: str) -> bool:
        """Define a domain, validated by libvirt's schema; return whether its definition changed.

        What libvirt prints afterwards must contain everything that was written; otherwise the
        previous definition is restored. XML without a UUID is for the domain of its name, if there
        is one, and interfaces without a MAC address keep theirs.

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
        message = (
            f"cannot define {source}: libvirt {self.version()} at {self.uri} would drop parts of it"
        )
        left = self._put_back(handle, previous)
        hint = f"remove these parts, or use a libvirt that supports them; {left}"
        raise InvalidDocument(message, hint, tuple(f"{source}: dropped: {drop}" for drop in drops))

    def redefine(self, xml: bytes) -> None:
        """Restore a definition that libvirt printed itself, with its secrets."""
        self._define(xml.decode(), "the previous definition", validate=False)

    def would_define(self, xml: bytes, source: str) -> DefineForecast:
        """What `define` would find; libvirt is only queried.

        Raises:
            InvalidDocument: it is not the XML of a domain.
            LibvirtFailed: the name belongs to a domain with another UUID, or vice versa.
        """
        wanted = read_domain(xml, source)
        for key, taken in ((wanted.uuid, "is already defined"), (wanted.name, "already exists")):
            handle = self._find(key) if key is not None else None
            if handle is None:
                continue
            state = self.state(handle.UUIDString())
            if state.name != wanted.name or wanted.uuid not in {None, state.uuid}:
                text = f"domain '{state.name}' {taken} with uuid {state.uuid}"
                raise explain(ReportedError(Code.OPERATION_FAILED, text), source)
            if not state.is_persistent:
                continue
            printed = self.domain_xml(state.uuid)
            is_same = self._completed(xml, wanted, printed) == printed.decode()
            return DefineForecast.SAME if is_same else DefineForecast.ANOTHER
        return DefineForecast.NEW

    def _completed(self, xml: bytes, wanted: Domain, previous: bytes | None) -> str:
        """The XML for libvirt, with the identity of the domain of that name, if there is one."""
        known = self._find(wanted.name) if wanted.name else None
        uuid = None if known is None else known.UUIDString()
        try:
            return with_identity(xml, wanted.source, uuid, previous).decode()
        except UnicodeDecodeError:
            message = f"{wanted.source} is not UTF-8 text"
            raise InvalidDocument(message, "convert it to UTF-8, which libvirt requires") from None

    def _define(self, text: str, source: str, *, validate: bool) -> Any:  # noqa: ANN401
        flags = library().VIR_DOMAIN_DEFINE_VALIDATE if validate else 0
        with explaining(source):
            return self._handle.defineXMLFlags(text, flags)

    def _definition(self, uuid: str | None, name: str | None) -> bytes | None:
        for key in (uuid, name):
            if key is not None and (handle := self._find(key)) is not None:
                with explaining(key):
                    is_defined = handle.isPersistent()
                return self.domain_xml(handle.UUIDString(), secure=True) if is_defined else None
        return None

    def _put_back(self, handle: Any, previous: bytes | None) -> str:  # noqa: ANN401
        """Undo a definition and return what is defined now, for the error about dropped parts."""
        try:
            if previous is not None:
                self.redefine(previous)
                return "the previous definition is unchanged"
            self._undefine(handle)
        except VfiomgrError as error:
            name = shlex.quote(handle.name())
            return f"{name} stays defined without them ({error.message}): {error.hint}"
        return "nothing is defined"

    def _undefine(self, handle: Any) -> None:  # noqa: ANN401
        """Undefine a domain; its NVRAM stays, because it may be older than this definition."""
        keep = library().VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
        if self._if_supported(lambda: handle.undefineFlags(keep)) is None:
            with explaining(handle.name()):  # drivers without NVRAM do not know the flag
                handle.undefine()

    # ---- devices

    def attach(self, name: str, element: str, scope: Scope) -> None:
        """Attach a device to a domain; libvirt applies the entire scope or nothing."""
        with self._asking(name) as handle:
            handle.attachDeviceFlags(element, _flags(scope))

    def detach(self, name: str, element: str, scope: Scope, removal: Removal) -> None:
        """Detach a device from a domain; a running guest must release it.

        Raises:
            GuestKeepsDevice: the guest refused, or missed the deadline; the definition is changed.
        """
        if not scope.live:
            with self._asking(name) as handle:
                handle.detachDeviceFlags(element, _flags(scope))
            return
        handle = self._lookup(name)
        with self._removals(handle) as news:
            found = read_domain(self.domain_xml(name, inactive=False), name).hostdev(removal.device)
            alias = found.alias if found else None
            with explaining(name):
                handle.detachDeviceFlags(element, _flags(scope))
            end = time.monotonic() + removal.deadline
            while self.has(name, removal.device):
                if alias in news.refused:
                    raise _kept(name, removal.device, "refused to release it", scope)
                left = end - time.monotonic()
                if left <= 0:
                    late = f"has not released it within {removal.deadline:g} s"
                    raise _kept(name, removal.device, late, scope)
                news.wait(min(_TICK, left))

    def has(self, name: str, device: str) -> bool:
        """Whether the running guest has the device; false for a domain that is off."""
        try:
            if not self.state(name).is_active:
                return False
            running = read_domain(self.domain_xml(name, inactive=False), name)
        except UsageError:
            return False
        return running.hostdev(device) is not None

    @contextmanager
    def _removals(self, handle: Any) -> Iterator[_Removals]:  # noqa: ANN401
        libvirt = library()
        removals = _Removals()
        register = functools.partial(self._handle.domainEventRegisterAny, handle)
        with explaining(handle.name()):
            ids = [
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, removals.removed, None),
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED, removals.failed, None),
            ]
        try:
            yield removals
        finally:
            with explaining(handle.name()):
                for number in ids:
                    self._handle.domainEventDeregisterAny(number)


def _read(xml: str, name: str) -> Domain | None:
    """Read a domain from libvirt's own XML; None if vfiomgr cannot read it."""
    try:
        return read_domain(xml.encode(), name)
    except InvalidDocument:
        return None


class _Removals:
    """What QEMU reports about devices that a guest must release; filled by the event loop."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._news = threading.Event()

    def removed(self, _connection: object, _domain: object, _alias: str, _data: object) -> None:
        """Handle DEVICE_REMOVED: the domain's XML no longer has the device."""
        self._news.set()

    def failed(self, _connection: object, _domain: object, alias: str, _data: object) -> None:
        """Handle DEVICE_REMOVAL_FAILED: the guest refused."""
        self.refused.add(alias)
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait for news, or until the time is over."""
        self._news.wait(seconds)
        self._news.clear()


def _kept(name: str, device: str, what: str, scope: Scope) -> GuestKeepsDevice:
    rest = "; it is no longer in the definition" if scope.config else ""
    message = f"cannot detach {device}: guest {name} {what}{rest}"
    hint = (
        "the request stays pending: check that the guest's system is up and has unloaded the "
        "driver, or shut the guest down"
    )
    return GuestKeepsDevice(message, hint)


def _flags(scope: Scope) -> int:
    libvirt = library()
    live: int = libvirt.VIR_DOMAIN_AFFECT_LIVE if scope.live else 0
    config: int = libvirt.VIR_DOMAIN_AFFECT_CONFIG if scope.config else 0
    return live | config
