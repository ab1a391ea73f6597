"""Snapshots as documents: the facts of all facets are members of one object."""

from __future__ import annotations

from typing import Any

from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.snapshot.model import HostSnapshot


def to_document(host: HostSnapshot) -> dict[str, Any]:
    """The facts of a host as lists, dictionaries and scalars."""
    document: dict[str, Any] = {}
    for name in host.__struct_fields__:
        value = getattr(host, name)
        if name in HostSnapshot.facets:
            members = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            document |= {key: to_jsonable(getattr(value, field)) for key, field in members}
        else:
            document[name] = to_jsonable(value)
    return document


def from_document(document: dict[str, Any]) -> HostSnapshot:
    """Read what `to_document` wrote.

    Raises:
        Misfit: the members are not those of a snapshot; names the first wrong one.

    """
    facets = HostSnapshot.facets
    facet_of = {key: name for name, kind in facets.items() for key in kind.__struct_encode_fields__}
    own: dict[str, Any] = {}
    of_facets: dict[str, dict[str, Any]] = {}
    for key, value in document.items():
        if key in facet_of:
            of_facets.setdefault(facet_of[key], {})[key] = value
        elif key in facets or key not in HostSnapshot.__struct_fields__:
            what = "unknown field"
            raise Misfit(what, (key,))
        else:
            own[key] = value
    absent: dict[str, Any] = {name: {} for name in facets if name not in of_facets}
    try:
        return from_jsonable(HostSnapshot, {**own, **of_facets, **absent})
    except Misfit as error:
        if error.keys[:1] and error.keys[0] in facets:
            raise Misfit(error.what, error.keys[1:]) from None
        raise
