"""What libvirt chooses for a domain where its XML leaves it open, and would choose anew each time.

A domain defined twice from the same file is to be the same one: with its UUID, and with the MAC
addresses that its guest knows its networks by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.document import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.adapters.libvirt.document import Element

_NETWORKS = ("network", "bridge", "dev", "path", "name")
"""Attributes of an interface's <source> that say which network it is in (formatdomain.html)."""


def with_identity(xml: bytes, source: str, uuid: str | None, previous: bytes | None) -> bytes:
    """XML with the UUID of the domain that it is about, and the MAC addresses of its definition.

    Raises:
        InvalidDocument: it is no XML.

    """
    root = parse(xml, source)
    additions = [*_uuid(root, uuid)]
    if previous is not None:
        additions += _macs(root, parse(previous, "the definition of before"))
    for start, stop, text in sorted(additions, reverse=True):
        xml = xml[:start] + text + xml[stop:]
    return xml


def _uuid(root: Element, uuid: str | None) -> Iterator[tuple[int, int, bytes]]:
    name = root.find("name")
    if uuid is not None and name is not None and root.find("uuid") is None:
        yield name.whole.stop, name.whole.stop, f"<uuid>{uuid}</uuid>".encode()


def _macs(root: Element, previous: Element) -> Iterator[tuple[int, int, bytes]]:
    """Of interfaces without one: that of the first of the same network which no other has."""
    written = root.each("devices/interface")
    used = {_mac(interface).lower() for interface in written}
    left = [one for one in previous.each("devices/interface") if _mac(one).lower() not in used]
    for interface in written:
        known = next((one for one in left if _network(one) == _network(interface)), None)
        if interface.find("mac") is not None or known is None:
            continue
        left.remove(known)
        mac, stop = f"<mac address='{_mac(known)}'/>".encode(), interface.start.stop
        if interface.is_short:
            yield stop - 2, stop, b">" + mac + f"</{interface.tag}>".encode()
        else:
            yield stop, stop, mac


def _mac(interface: Element) -> str:
    mac = interface.find("mac")
    return "" if mac is None else mac.get("address")


def _network(interface: Element) -> tuple[str, ...]:
    source = interface.find("source")
    names = () if source is None else tuple(source.get(name) for name in _NETWORKS)
    return (interface.get("type"), *filter(None, names))
