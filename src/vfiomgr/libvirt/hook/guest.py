"""A guest as libvirt tells its hook of it: its XML, and whether it wants its devices bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.documents.xml_text import parse
from vfiomgr.libvirt.model.domain import NAMESPACE
from vfiomgr.libvirt.xml.read import domain_of, is_bound_by_hook, says_yes

if TYPE_CHECKING:
    from vfiomgr.libvirt.model.domain import Domain


def read_guest(xml: bytes, name: str) -> Domain | None:
    """The domain; None of one that never asked for vfiomgr, which is not even read.

    Raises:
        InvalidDocument: it is no domain's XML.

    """
    if NAMESPACE.encode() not in xml:
        return None
    root = parse(xml, name)
    return domain_of(root) if is_bound_by_hook(root) else None


def asks_for_hook(element: str | None) -> bool:
    """Whether the element of vfiomgr's namespace, of a domain's metadata, says yes.

    Raises:
        InvalidDocument: it is no XML.

    """
    if element is None:
        return False
    return says_yes(parse(element.encode(), "the metadata of vfiomgr"))
