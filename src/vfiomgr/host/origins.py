"""First states of bound functions: /var/lib/vfiomgr/origins, one JSON file each."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr.errors import VfiomgrError
from vfiomgr.model.jsonable import API_VERSION, to_jsonable
from vfiomgr.model.origin import DriverState, Origin
from vfiomgr.model.parsed import parse_json
from vfiomgr.model.path import STATE
from vfiomgr.model.pci import DeviceIdentity, PciAddress

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

_ORIGINS = STATE / "origins"


def _file(origin: Origin) -> HostPath:
    return _ORIGINS / f"{origin.device.address}.json"


def read_origins(tree: HostTree) -> tuple[Origin, ...]:
    """All records; one that cannot be read hides no other."""
    found: list[Origin] = []
    for name in tree.children(_ORIGINS):
        text = tree.read(_ORIGINS / name) if name.endswith(".json") else None
        if text is None:
            continue
        try:
            found.append(_parse(text))
        except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError) as error:
            message = f"{_ORIGINS / name} is no record of vfiomgr and is ignored: {error}"
            warnings.warn(message, stacklevel=2)
    return tuple(sorted(found, key=lambda origin: origin.device.address))


def write_origin(tree: HostTree, origin: Origin) -> None:
    """Record a first state; it is good for this boot, so that no power cut can lose it."""
    import json  # noqa: PLC0415 - slow to import, and lists need none

    tree.make_directory(_ORIGINS)
    data = json.dumps({"api_version": API_VERSION, **to_jsonable(origin)}, indent=2) + "\n"
    tree.replace(_file(origin), data.encode(), durable=False)


def remove_origin(tree: HostTree, origin: Origin) -> None:
    """Drop a record."""
    tree.remove(_file(origin))


def _parse(text: str) -> Origin:

    document = parse_json(text)
    if document["api_version"] != API_VERSION:
        message = f"api_version is {document['api_version']!r}"
        raise ValueError(message)
    device = document["device"]
    return Origin(
        device=DeviceIdentity(**{**device, "address": PciAddress.parse(device["address"])}),
        state=DriverState(**document["state"]),
        driver_module=document["driver_module"],
        boot_id=document["boot_id"],
    )
