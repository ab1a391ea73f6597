"""`vfiomgr layout watch`: report and correct drift from a layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import click

from vfiomgr.cli.garbage import collect_as_usual
from vfiomgr.cli.options import CHANGING, allow_option, complete_file, flag, session_options
from vfiomgr.cli.output import note, print_text, print_yaml, say
from vfiomgr.diagnostic import OVERRIDES, Override
from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.text import STANDARD_INPUT, source_of, text_of
from vfiomgr.engine.changes import Wait, host_of, shown_wait
from vfiomgr.engine.transaction import once
from vfiomgr.errors import RolledBack, UsageError
from vfiomgr.host.udev import DeviceChanges
from vfiomgr.layout import watch_layout
from vfiomgr.layout.commands.changes import layout_option
from vfiomgr.layout.named import layout_of_text
from vfiomgr.persistence.installed_layout import FILE, RECORD, parse_record
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.layout.watch import WatchEvent

_Stamp = tuple[int, int, int]
_Told = TypeVar("_Told")


@click.command("watch")
@click.argument("file", required=False, shell_complete=complete_file)
@layout_option
@flag("--enforce", text="Correct drift.")
@allow_option(*OVERRIDES, text="Override a safety check (a failure message names it).")
@session_options(*CHANGING)
@pass_session
def watch(
    session: Session,
    *,
    file: str | None,
    name: str | None,
    enforce: bool,
    allow: tuple[Override, ...],
) -> None:
    """Report drift from a layout until interrupted.

    Without FILE, the installed layout is watched. Each event is a line, or with --format json a
    document: drift, resolved (by others), corrected (by --enforce) or failed. Devices in use by
    guests are never moved. Only --enforce requires root. (`vfiomgr persist watch` is the service of
    `bind --persist`.)

    \b
    Examples:
      vfiomgr layout watch
      vfiomgr layout watch fleet.yaml --layout kata-node --format json
      vfiomgr layout watch --enforce
    """
    if session.snapshot is not None or session.tree.root != session.machine.root:
        message = "cannot watch another host: only this machine reports events of its devices"
        raise UsageError(message, "remove --root and --snapshot")
    collect_as_usual()
    source = _FollowedLayout(session, file, name, frozenset(allow))
    try:
        changes = DeviceChanges(session.tree)  # before the first look, so that nothing is missed
        note(f"watching for drift from layout '{source.read().name}'")
        with shown_wait("waiting for changes of devices; end with Ctrl-C") as wait:
            watch_layout(
                host_of(session, on_note=once(_between(wait, note)), on_step=wait.tell_step),
                source,
                changes,
                tell=_between(wait, _teller(session, source)),
                enforce=enforce and not session.dry_run,
            )
    except KeyboardInterrupt:
        return
    except RolledBack as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        note(error.message)  # ended in the middle of a correction, of which nothing is left


def _between(wait: Wait, tell: Callable[[_Told], None]) -> Callable[[_Told], None]:
    """A function that prints without the spinner on the line."""

    def printed(told: _Told) -> None:
        with wait.pause():
            tell(told)

    return printed


class _FollowedLayout:
    """The layout in a file that may change."""

    def __init__(
        self, session: Session, file: str | None, name: str | None, allow: frozenset[Override]
    ) -> None:
        self._session = session
        self._file = session.tree.locate(FILE) if file is None else file
        self._is_installed = file is None
        self._name = name
        self._allow = allow
        self._stamp: _Stamp | None = None
        self.chosen = ""
        """The name of the layout that was read last."""
        self._piped = text_of(file, "the layout file") if file == STANDARD_INPUT else None

    def read(self) -> ApplyLayout:
        """The current layout.

        Raises:
            UsageError: the file does not exist.
            InvalidDocument: it is not a layout file.
        """
        self._stamp = self._stamp_now()
        if self._is_installed and self._stamp is None:
            message = f"no layout is installed: {FILE} not found"
            raise UsageError(
                message, "pass a file, or install a layout: vfiomgr layout install FILE"
            )
        text = self._piped
        if text is None:
            text = text_of(self._file, "the layout file")
        name = self._name or self._installed_name()
        request = layout_of_text(self._session, text, source_of(self._file), name, self._allow)
        self.chosen = request.name
        return request

    def is_stale(self) -> bool:
        """Whether the file has changed since it was read."""
        return self._piped is None and self._stamp_now() != self._stamp

    def _installed_name(self) -> str | None:
        """The layout of the installed file that is in use."""
        if not self._is_installed:
            return None
        installed = parse_record(self._session.tree.read_text(RECORD))
        return None if installed is None else installed.name

    def _stamp_now(self) -> _Stamp | None:
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _teller(session: Session, source: _FollowedLayout) -> Callable[[WatchEvent], None]:
    """A function that prints each event immediately, for people or for programs."""

    def tell(event: WatchEvent) -> None:
        now = datetime.now(UTC)
        if session.format == "table":
            say(f"{now.astimezone().isoformat(timespec='seconds')} {event}")
            return
        document = {
            "api_version": API_VERSION,
            "kind": "LayoutEvent",
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "layout": source.chosen,
            **to_jsonable(event),
        }
        if session.format == "json":
            print_text(json.dumps(document) + "\n")
        else:
            say("---")
            print_yaml(document)

    return tell
