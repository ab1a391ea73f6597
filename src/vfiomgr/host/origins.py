"""First states of bound functions: /var/lib/vfiomgr/origins, one JSON file each."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr.errors import VfiomgrError
from vfiomgr.host.own_files import NotARecord, read_own
from vfiomgr.model.jsonable import API_VERSION, to_jsonable
from vfiomgr.model.origin import DriverState, Origin
from vfiomgr.model.parsed import parse_json
from vfiomgr.model.path import STATE
from vfiomgr.model.pci import DeviceIdentity, PciAddress, is_address

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

_ORIGINS = STATE / "origins"
_LIMIT = 1 << 16


class _UnreadableError(ValueError):
    """A record that may hold a state, and does not tell it."""


def origin_file(address: PciAddress | str) -> HostPath:
    """Where the record of a function is."""
    return _ORIGINS / f"{address}.json"


def read_origins(tree: HostTree) -> tuple[Origin, ...]:
    """All records; one that cannot be read hides no other."""
    found: list[Origin] = []
    for name in tree.children(_ORIGINS):
        try:
            origin = _read(tree, name)
        except ValueError as error:
            message = f"ignoring {_ORIGINS / name}: {error}"
            warnings.warn(message, stacklevel=2)
        else:
            found += [] if origin is None else [origin]
    return tuple(sorted(found, key=lambda origin: origin.device.address))


def unreadable_origins(tree: HostTree) -> dict[str, str]:
    """The functions whose records cannot be read, and why; what was never written is not one."""
    found: dict[str, str] = {}
    for name in tree.children(_ORIGINS):
        try:
            _read(tree, name)
        except _UnreadableError as error:
            found[name.removesuffix(".json")] = str(error)
        except ValueError:
            continue  # it holds no state
    return found


def _read(tree: HostTree, name: str) -> Origin | None:
    """One record; None where it is gone, closed to this user, or a temporary file.

    Raises:
        _UnreadableError: it may hold the state of a function.
        ValueError: it is something else.

    """
    if name.startswith("."):
        return None
    if not name.endswith(".json") or not is_address(name.removesuffix(".json")):
        message = "not a record of vfiomgr"
        raise ValueError(message)
    try:
        data = read_own(tree, _ORIGINS / name, _LIMIT)
    except OSError:
        return None
    except NotARecord as error:
        raise _UnreadableError(error) from None
    if not data.strip(b"\0"):
        # A power cut leaves a file like this, and ends the boot that the record was good for.
        message = "it is empty"
        raise ValueError(message)
    try:
        origin = _parse(data.decode())
    except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError, RecursionError) as error:
        message = f"it is not a record of vfiomgr ({type(error).__name__}: {error})"
        raise _UnreadableError(message) from None
    if origin_file(origin.device.address).name != name:
        message = f"it is about {origin.device.address}"
        raise _UnreadableError(message)
    return origin


def write_origin(tree: HostTree, origin: Origin) -> None:
    """Record a first state; it is good for this boot, so that no power cut can lose it."""
    import json  # noqa: PLC0415 - slow to import, and lists need none

    tree.make_directory(_ORIGINS)
    data = json.dumps({"api_version": API_VERSION, **to_jsonable(origin)}, indent=2) + "\n"
    tree.replace(origin_file(origin.device.address), data.encode(), durable=False)


def remove_origin(tree: HostTree, origin: Origin) -> None:
    """Drop a record."""
    tree.remove(origin_file(origin.device.address))


def _parse(text: str) -> Origin:

    document = parse_json(text)
    if document["api_version"] != API_VERSION:
        message = f"api_version is {document['api_version']!r}"
        raise ValueError(message)
    device, state = document["device"], document["state"]
    texts = (*device.values(), document["driver_module"], document["boot_id"])
    if not all(isinstance(text, str | None) for text in texts) or not all(
        isinstance(value, bool if key == "d3cold_allowed" else str) or value is None
        for key, value in state.items()
    ):
        message = "a value is of another type"
        raise TypeError(message)
    return Origin(
        device=DeviceIdentity(**{**device, "address": PciAddress.parse(device["address"])}),
        state=DriverState(**state),
        driver_module=document["driver_module"],
        boot_id=document["boot_id"],
    )
