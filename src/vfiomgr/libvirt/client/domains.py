"""Calls about domains, and about what the host offers them (formatdomain.html, formatcaps.html).

A domain is given by name or UUID; every call raises UsageError if there is no such domain.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.errors import InvalidDocument, LibvirtFailed
from vfiomgr.libvirt.client.binding import Caller, explained, explaining, library
from vfiomgr.libvirt.client.error_codes import Code
from vfiomgr.libvirt.model import Hypervisor, KnownDomain
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model import Domain


def offers_vfio(capabilities: str) -> bool | None:
    """Whether libvirt supports VFIO passthrough of PCI devices; None if it does not say."""
    hostdev = _root(capabilities).find("devices/hostdev")
    if hostdev is None:
        return None
    if hostdev.get("supported") != "yes":
        return False
    backends = hostdev.find("enum[@name='pciBackend']")
    if backends is None:
        return None
    return any(value.text == "vfio" for value in backends.findall("value"))


def _root(capabilities: str) -> ET.Element:
    return ET.fromstring(capabilities)  # noqa: S314 - of the daemon that runs the guests


def has_kvm(capabilities: str) -> bool:
    """Whether the host can run guests of type kvm, by its capabilities (formatcaps.html)."""
    return any(domain.get("type") == "kvm" for domain in _root(capabilities).iter("domain"))


class DomainState(Value):
    """The facts about a domain that a change needs."""

    name: str
    uuid: str
    is_active: bool
    is_persistent: bool


class DomainCalls(Caller):
    """The calls that query domains."""

    def hypervisor(self) -> Hypervisor:
        """The versions, what the host offers, and all domains, running and defined.

        A domain that disappears meanwhile is omitted; one whose XML cannot be read has no XML.
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
        """One domain, by name or UUID."""
        handle = self._lookup(name)
        with explaining(handle.name()):
            return self._known(handle, handle.isActive(), handle.isPersistent())

    def state(self, name: str) -> DomainState:
        """Whether a domain runs and is defined, by name or UUID."""
        handle = self._lookup(name)
        with explaining(name):
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
        handle = self._lookup(name)
        with explaining(name):
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
        handle = self._lookup(name)
        with explaining(name):
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
        handle = self._lookup(name)
        with explaining(name):
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

    def _domain_capabilities(self) -> str:
        text: str = self._handle.getDomainCapabilities()
        return text


def _read(xml: str, name: str) -> Domain | None:
    """Read a domain from libvirt's own XML; None if vfiomgr cannot read it."""
    try:
        return read_domain(xml.encode(), name)
    except InvalidDocument:
        return None
