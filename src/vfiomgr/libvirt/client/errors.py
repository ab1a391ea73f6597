"""Translate libvirt's errors: code, domain and errno, then the text, become a cause and a remedy.

The causes are in errors.toml. virReportSystemErrorFull of src/util/virerror.c keeps the errno.
All errors are those that libvirt 9.0, 11.3 and 12.8 made (tests/unit/libvirt/errors_seen.json), or
their sources are named beside the tests of the table (test_client_errors.py).

A daemon translates its texts (LANG in its environment), this process does not: Python leaves
LC_MESSAGES at C. So rows without a pattern, and those whose pattern has only words of QEMU, names
and numbers, also match translated texts. Others need libvirt's words: most codes have many causes
in one domain. Errors that match no row keep libvirt's own words.
"""

from __future__ import annotations

import errno
import functools
import re
import shlex
from enum import IntEnum
from importlib.resources import files

from vfiomgr import errors
from vfiomgr.documents.text import parse_toml
from vfiomgr.errors import LibvirtFailed, VfiomgrError
from vfiomgr.messages.known import first_address
from vfiomgr.value import Value

LOGS = "journalctl -u libvirtd -u virtqemud"
"""The log of the daemon for QEMU, the single one or that of its own; unknown units are ignored."""
_MOST_WORDS = 600
_NAMES = frozenset({"subject", "name", "domain"})
"""Names that people choose: quoted where a hint names a command."""


class Code(IntEnum):
    """virErrorNumber (include/libvirt/virterror.h), as far as causes are known."""

    INTERNAL_ERROR = 1
    NO_SUPPORT = 3
    NO_CONNECT = 5
    INVALID_ARG = 8
    OPERATION_FAILED = 9
    NO_NAME = 21
    XML_ERROR = 27
    OPERATION_DENIED = 29
    XML_DETAIL = 35
    SYSTEM_ERROR = 38
    RPC = 39
    NO_DOMAIN = 42
    AUTH_FAILED = 45
    NO_NODE_DEVICE = 53
    OPERATION_INVALID = 55
    CONFIG_UNSUPPORTED = 67
    OPERATION_TIMEOUT = 68
    HOOK_SCRIPT_FAILED = 70
    ARGUMENT_UNSUPPORTED = 74
    AUTH_CANCELLED = 79
    NO_DOMAIN_METADATA = 80
    ACCESS_DENIED = 88
    XML_INVALID_SCHEMA = 92
    AUTH_UNAVAILABLE = 94
    DEVICE_MISSING = 99


class ErrorDomain(IntEnum):
    """virErrorDomain, the part of libvirt that reports an error, as far as it shows the cause."""

    NONE = 0
    RPC = 7
    QEMU = 10
    NODEDEV = 22


class ReportedError(Value):
    """An error as libvirt reports it; `errno` is -1 if no system call failed."""

    code: int
    text: str
    domain: int = ErrorDomain.NONE
    errno: int = -1


class Cause(Value):
    """A row of errors.toml; message and hint use the groups of the pattern by name."""

    codes: frozenset[Code]
    domain: ErrorDomain | None
    errnos: frozenset[int]
    pattern: str
    message: str
    hint: str
    error: type[VfiomgrError]

    def match(self, seen: ReportedError) -> re.Match[str] | None:
        """Match code, domain and errno first, the text second."""
        if seen.code not in self.codes or self.domain not in {None, seen.domain}:
            return None
        if self.errnos and seen.errno not in self.errnos:
            return None
        return re.search(self.pattern, seen.text)


@functools.cache
def causes() -> tuple[Cause, ...]:
    """The rows of errors.toml."""
    text = files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    table = parse_toml(text)
    found = []
    for row in table["rows"]:
        names = [name for key in row.get("codes", ()) for name in table["groups"].get(key, [key])]
        pattern = row.get("pattern", "")
        found.append(
            Cause(
                codes=frozenset(Code[name] for name in names or Code.__members__),
                domain=ErrorDomain[row["domain"]] if "domain" in row else None,
                errnos=frozenset(getattr(errno, name) for name in row.get("errnos", ())),
                pattern=pattern if isinstance(pattern, str) else "|".join(pattern),
                message=row["message"],
                hint=row["hint"],
                error=getattr(errors, row.get("error", "LibvirtFailed")),
            )
        )
    return tuple(found)


def explain(seen: ReportedError, subject: str) -> VfiomgrError:
    """The error for an error of libvirt; `subject` is the domain or file that it is about.

    The table may have been removed or replaced, e.g. by an upgrade: then libvirt's words are kept.
    """
    words = _shortened(seen.text)
    try:
        known = _with_cause(seen, subject, words)
    except Exception:  # noqa: BLE001 - nothing may hide the error of libvirt
        known = None
    return known or _in_own_words(seen, subject, words)


def _with_cause(seen: ReportedError, subject: str, words: str) -> VfiomgrError | None:
    """The error with the cause and remedy of the first row that matches."""
    for cause in causes():
        found = cause.match(seen)
        if found is None:
            continue
        parts = {name: _shortened(part or "") for name, part in found.groupdict().items()}
        address = first_address(seen.text) or "ADDRESS"
        known = {"text": words, "subject": subject, "logs": LOGS, "address": address, **parts}
        quoted = {**known, **{name: shlex.quote(known[name]) for name in _NAMES & known.keys()}}
        message, hint = cause.message.format(**known), cause.hint.format(**quoted)
        if cause.error is LibvirtFailed:
            return LibvirtFailed(message, hint, code=seen.code)
        return cause.error(message, hint)
    return None


def _in_own_words(seen: ReportedError, subject: str, words: str) -> LibvirtFailed:
    where = f"see its log: {LOGS}"
    if seen.domain == ErrorDomain.QEMU:
        where = f"see /var/log/libvirt/qemu/NAME.log of the guest, and libvirt's log: {LOGS}"
    elif seen.domain == ErrorDomain.NODEDEV:
        where = "see its log: journalctl -u libvirtd -u virtnodedevd"
    message = f"libvirt: {words or 'unknown error'} (error {seen.code}, {subject})"
    return LibvirtFailed(message, where, code=seen.code)


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}…"
