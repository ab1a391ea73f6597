"""The script that libvirt runs when guests start and end, and the requests to install it.

Since 6.5 libvirt runs the files in `qemu.d` in name order, besides the script `qemu`, and waits for
them: a script that called libvirt would wait for itself (https://libvirt.org/hooks.html).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.documents.jsonable import from_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.engine.plan import Request
from vfiomgr.errors import InvalidDocument
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.persistence.model import require_plain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable


MODE = 0o755
PREFIX = "vfiomgr"
OPT_IN = "<devices bind='yes'/>"
GUESTS = RUNTIME / "guests"
"""What the hook took from the host for running guests."""
PREPARE, RELEASE = "prepare", "release"


def render_script(program: str) -> str:
    """The script; it lets guests start if vfiomgr is removed, and acts only on two operations.

    Raises:
        Refusal: a path would need quotes.

    """
    words = require_plain(program)
    plain = words.partition(" ")[0]
    return f"""\
#!/bin/sh
# vfiomgr: removed by `vfiomgr libvirt hook uninstall`. It acts only for guests for which
# `vfiomgr libvirt hook install DOMAIN` was run.
case "$2" in
    {PREPARE} | {RELEASE}) ;;
    *) exit 0 ;;
esac
if [ ! -x {plain} ]; then
    echo "vfiomgr: {plain} is gone, so devices of guests are not bound" >&2
    exit 0
fi
exec {words} libvirt hook run -- "$@"
"""


class GuestRecord(Value):
    """What the hook took from the host for one guest; a reboot removes the record."""

    uuid: str
    name: str
    functions: tuple[str, ...] = ()
    vgpus: tuple[str, ...] = ()

    @property
    def path(self) -> HostPath:
        """The path of the record."""
        return GUESTS / f"{self.uuid}.json"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken."""
        return not self.functions and not self.vgpus

    def with_taken(self, functions: Iterable[str], vgpus: Iterable[str]) -> GuestRecord:
        """The record with more devices."""
        return GuestRecord(
            self.uuid,
            self.name,
            tuple(dict.fromkeys((*self.functions, *functions))),
            tuple(dict.fromkeys((*self.vgpus, *vgpus))),
        )

    def render(self) -> str:
        """The text of the record's file."""
        document = {"name": self.name, "functions": self.functions, "vgpus": self.vgpus}
        return f"{json.dumps(document)}\n"


class _Written(Value):
    """The file of a record."""

    name: str
    functions: tuple[str, ...]
    vgpus: tuple[str, ...]


def parse_record(uuid: str, text: str) -> GuestRecord:
    """Read the file of a record.

    Raises:
        InvalidDocument: it is not a record.

    """
    try:
        written = from_jsonable(_Written, parse_json(text))
    except ValueError as error:
        message = f"{GUESTS / uuid}.json is not a valid record of vfiomgr: {error}"
        hint = (
            "remove it; vfiomgr list shows what is bound, and vfiomgr unbind returns it to the host"
        )
        raise InvalidDocument(message, hint) from None
    return GuestRecord(uuid, written.name, written.functions, written.vgpus)


class InstallHook(Request, Value):
    """Install the hook in libvirt; it acts only for guests for which it is enabled."""

    program: str | None = None
    """The path of vfiomgr itself, for the script."""
    kind: ClassVar[str] = "install-hook"


class UninstallHook(Request, Value):
    """Remove the installed hook."""

    kind: ClassVar[str] = "uninstall-hook"
