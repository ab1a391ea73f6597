"""Requests as written by people: `2xA40`, sizes, and files with reservations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.documents.reader import misfit_in, read_values
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.fleet.model import hosts as counted_hosts
from vfiomgr.fleet.placing import Request, Reserved, Wanted
from vfiomgr.units import MIB, mebibytes
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.fleet.model import Fleet, HostSummary
    from vfiomgr.fleet.placing import Kind

_COUNTED = expression(r"(?:([1-9]\d{0,3})\s*[xX]\s*)?(\S.*)")
_VERSION = "vfiomgr/v1"
_REMEDY = "see docs/fleet.md for an example"
_MOMENTS = ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d")


def wanted(kind: Kind, text: str) -> Wanted:
    """`2xA40`; without a number 1.

    Raises:
        UsageError: there is no name.
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
        0 if memory is None else mebibytes("--memory", memory) * MIB,
        0 if hugepages is None else mebibytes("--hugepages", hugepages) * MIB,
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
        ends = [_end(one, number) for number, one in enumerate(known.reservations)]
    except Misfit as error:
        message = f"{source}:{misfit_in(error, text)}"
        raise InvalidDocument(message, _REMEDY) from None
    found: dict[str, Reserved] = {}
    for one, end in zip(known.reservations, ends, strict=True):
        if end is None or now < end:
            _require_known(one, fleet, source)
            found[one.host] = _added(found.get(one.host, Reserved()), one)
    return found


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
    host = next((known for known in fleet.hosts if known.name == one.host), None)
    if host is None:
        message = f"{source}: no such host in the fleet: {one.host}"
        known = f"hosts: {', '.join(_first(h.name for h in fleet.hosts))}"
        raise UsageError(message, f"correct or remove its reservation ({known})")
    there = {gpu.address for gpu in host.gpus}
    for address in one.gpus:
        if address not in there:
            message = f"{source}: {one.host} has no GPU {address}"
            raise UsageError(message, f"GPUs of {one.host}: {', '.join(sorted(there)) or 'none'}")


_SHOWN = 5


def _first(names: Iterable[str]) -> Iterator[str]:
    known = list(names)
    yield from known[:_SHOWN]
    if len(known) > _SHOWN:
        yield f"and {counted_hosts(len(known) - _SHOWN)} more"


def _added(before: Reserved, one: _Reservation) -> Reserved:
    memory = 0 if one.memory is None else mebibytes("memory", one.memory) * MIB
    return Reserved(
        before.gpus | set(one.gpus),
        before.is_entire or not (one.gpus or memory),
        before.memory_bytes + memory,
    )
