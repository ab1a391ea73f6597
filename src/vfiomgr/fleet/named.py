"""Requests as written by people: `2xA40`, sizes, and files with reservations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.documents.reader import misfit_in, read_values
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.fleet.placing import Request, Reserved, Wanted
from vfiomgr.listing import listed
from vfiomgr.units import memory_bytes
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.fleet.model import Fleet, HostSummary
    from vfiomgr.fleet.placing import Kind

_COUNTED = expression(r"(?:([1-9]\d{0,3})\s*[xX]\s*)?(?![-+]?\d+\s*[xX])(\S.*)")
_VERSION = "vfiomgr/v1"
_REMEDY = "see docs/fleet.md for an example"
_MOMENTS = ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d")


def wanted(kind: Kind, text: str) -> Wanted:
    """`2xA40`; without a number 1.

    Raises:
        UsageError: the name is missing, or the number is not from 1 to 9999.
    """
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        message = f"--{kind}: not a number and a name: {text!r}"
        raise UsageError(message, f"write e.g. --{kind} {_EXAMPLES[kind]}")
    return Wanted(kind, int(match[1] or 1), match[2])


_EXAMPLES: dict[Kind, str] = {"gpu": "2xA40", "vgpu": "2xA40-8Q", "mig": "2x1g.5gb"}


def request_of(
    texts: Mapping[Kind, Iterable[str]],
    memory: str | None,
    hugepages: str | None,
    cpus: int,
    *,
    is_on_one_node: bool,
) -> Request:
    """The request of the options of `fleet place`.

    Raises:
        UsageError: nothing is asked for, or a size or a name is malformed.
    """
    parts = tuple(wanted(kind, text) for kind, some in texts.items() for text in some)
    if not parts and memory is None and not cpus:
        message = "missing option: what the guest needs"
        raise UsageError(message, "pass at least one of --gpu, --vgpu, --mig, --memory, --vcpus")
    if hugepages is not None and memory is None:
        message = "--hugepages needs --memory"
        raise UsageError(message, "pass the size of the guest's memory, e.g. --memory 16G")
    return Request(
        parts,
        0 if memory is None else memory_bytes("--memory", memory),
        0 if hugepages is None else memory_bytes("--hugepages", hugepages),
        cpus,
        is_on_one_node,
    )


class _Reservation(Value):
    """One reservation of a file."""

    host: str
    gpus: tuple[str, ...] = ()
    """Addresses; without them and without memory the entire host."""
    memory: str | None = None
    until: str | None = None
    """UTC; a day alone ends at its end."""
    note: str = ""


class _Reservations(Value):
    version: str
    reservations: tuple[_Reservation, ...]


def read_reservations(path: str, fleet: Fleet[HostSummary], now: float) -> dict[str, Reserved]:
    """What a file reserves at a time (seconds since 1970), by host.

    Raises:
        UsageError: it cannot be read, or names a host or a GPU that the fleet does not have.
        InvalidDocument: it is malformed.
    """
    text, source = text_of(path, "the reservations"), source_of(path)
    document = read_values(text, source, _REMEDY)
    try:
        known = from_jsonable(_Reservations, document)
        if known.version != _VERSION:
            what = f"unsupported version: {known.version} (expected {_VERSION})"
            raise Misfit(what, ("version",))
        parsed = [_parsed(one, number) for number, one in enumerate(known.reservations)]
    except Misfit as error:
        message = f"{source}:{misfit_in(error, text)}"
        raise InvalidDocument(message, _REMEDY) from None
    found: dict[str, Reserved] = {}
    for one, (end, memory) in zip(known.reservations, parsed, strict=True):
        if end is None or now < end:
            _require_known(one, fleet, source)
            found[one.host] = _added(found.get(one.host, Reserved()), one, memory)
    return found


def _parsed(one: _Reservation, number: int) -> tuple[float | None, int]:
    """When a reservation ends, and its memory in bytes."""
    try:
        memory = 0 if one.memory is None else memory_bytes("memory", one.memory)
    except UsageError:
        what = f"not a size with a unit such as 64G: {one.memory!r}"
        raise Misfit(what, ("reservations", number, "memory")) from None
    return _end(one, number), memory


def _end(one: _Reservation, number: int) -> float | None:
    import calendar  # noqa: PLC0415 - slow to import

    if one.until is None:
        return None
    for form in _MOMENTS:
        try:
            end = calendar.timegm(time.strptime(one.until, form))
        except ValueError:
            continue
        return end + (0 if "T" in form else 86400)
    what = f"not a day or a time in UTC such as 2026-12-31 or 2026-12-31T18:00:00Z: {one.until!r}"
    raise Misfit(what, ("reservations", number, "until"))


def _require_known(one: _Reservation, fleet: Fleet[HostSummary], source: str) -> None:
    """Require that a reservation is of the fleet: a wrong name would reserve nothing."""
    there = {gpu.address for gpu in host_named(one.host, fleet, f"{source}: ").gpus}
    for address in one.gpus:
        if address not in there:
            message = f"{source}: {one.host} has no GPU {address}"
            raise UsageError(message, f"GPUs of {one.host}: {', '.join(sorted(there)) or 'none'}")


def host_named(name: str, fleet: Fleet[HostSummary], place: str = "") -> HostSummary:
    """The host of a fleet with this name.

    Raises:
        UsageError: there is none; names the closest ones.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - needed only for mistakes

    known = {host.name: host for host in fleet.hosts}
    if name not in known:
        near = "".join(f"did you mean {one}? " for one in get_close_matches(name, known, 1))
        message = f"{place}no such host in the fleet: {name}"
        raise UsageError(message, f"{near}hosts: {listed(list(known), 5)}")
    return known[name]


def _added(before: Reserved, one: _Reservation, memory: int) -> Reserved:
    return Reserved(
        before.gpus | set(one.gpus),
        before.is_entire or not (one.gpus or memory),
        before.memory_bytes + memory,
    )
