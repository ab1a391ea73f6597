"""A guest as libvirt tells its hook of it: its XML, and whether it wants its devices bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.document import parse
from vfiomgr.adapters.libvirt.read import domain_of
from vfiomgr.model.libvirt_hook import NAMESPACE

if TYPE_CHECKING:
    from vfiomgr.adapters.libvirt.document import Element
    from vfiomgr.model.domain import Domain

_MARK = "devices"


def read_guest(xml: bytes, name: str) -> Domain | None:
    """The domain; None of one that never asked for vfiomgr, which is not even read.

    Raises:
        InvalidDocument: it is no domain's XML.

    """
    if NAMESPACE.encode() not in xml:
        return None
    root = parse(xml, name)
    metadata = root.find("metadata")
    marks = () if metadata is None else metadata.all(_MARK, NAMESPACE)
    return domain_of(root) if any(map(_says_yes, marks)) else None


def asks_for_hook(element: str | None) -> bool:
    """Whether the element of vfiomgr's namespace, of a domain's metadata, says yes.

    Raises:
        InvalidDocument: it is no XML.

    """
    if element is None:
        return False
    mark = parse(element.encode(), "the metadata of vfiomgr")
    return mark.name == _MARK and _says_yes(mark)


def _says_yes(mark: Element) -> bool:
    return mark.get("bind") == "yes"
