"""What an edit of a domain's XML did, or would do."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.document import Document
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.planner.domain_edit import Additions, Placed, Removals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.cli.session import Session

_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True, slots=True)
class Edited:
    """A text before and after, and what came and went."""

    before: Document
    after: bytes
    removals: Removals
    additions: Additions

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to write."""
        return self.after != self.before.text


def print_edited(session: Session, done: Edited, *, is_piped: bool, undo: str) -> None:
    """What came and went; on stderr where stdout has the text. `undo` takes back what came."""
    if is_piped:
        for line in _told(done):
            note(line)
    elif session.format == "table":
        say(*_told(done))
        if done.additions.placed and not done.removals.devices:
            names = " ".join(f"--remove {one.names[0]}" for one in done.additions.placed)
            note(f"undo with: {undo} {names}")
    else:
        print_document("DomainEdit", _body(done), session.format)


def _told(done: Edited) -> Iterator[str]:
    source = done.before.source
    yield from (f"removed {device.name}" for device in done.removals.devices)
    for port in done.additions.ports:
        yield f"added root port {port.index} for {port.device}"
    for placed in done.additions.placed:
        where = "" if placed.guest is None else f", in the guest {_place(placed)}"
        yield f"added {', '.join(placed.names)}{where}"
    yield from (f"{name} is in {source} already" for name in done.additions.already)
    yield from (f"{name} is not in {source}" for name in done.removals.absent)
    for name in done.removals.orphans:
        yield f"{name} stays, and the guest does not find it without function 0 of its slot"
    if not done.is_changed:
        yield "nothing to do"


def _place(placed: Placed) -> str:
    guest = placed.guest
    return "" if guest is None else f"{guest.bus:02x}:{guest.slot:02x}"


def _body(done: Edited) -> dict[str, object]:
    additions, removals = done.additions, done.removals
    return {
        "source": done.before.source,
        "changed": done.is_changed,
        "added": [{"names": one.names, "guest": one.guest} for one in additions.placed],
        "root_ports": additions.ports,
        "removed": [device.name for device in removals.devices],
        "already": additions.already,
        "absent": removals.absent,
        "orphans": removals.orphans,
    }


def print_difference(session: Session, done: Edited) -> None:
    """What would be different, as diff -u shows it; what there is besides, on stderr."""
    difference = "".join(_difference(done))
    if session.format != "table":
        body = {**_body(done), "difference": difference}
        print_document("DomainEdit", body, session.format)
        return
    say_text(difference)
    for line in _told(done):
        note(line.replace("added", "would add", 1).replace("removed", "would remove", 1))


def _difference(done: Edited) -> Iterator[str]:
    """Lines end with the line feeds of the text; a carriage return is part of its line."""
    encoding, source = done.before.encoding, done.before.source
    before, after = (_lines(text, encoding) for text in (done.before.text, done.after))
    for line in difflib.unified_diff(before, after, source, source):
        yield line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n"


def _lines(text: bytes, encoding: str) -> list[str]:
    decoded = text.decode(encoding)
    return [line for line in decoded.replace("\n", "\n\0").split("\0") if line]
