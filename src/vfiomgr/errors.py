"""The tree of errors: each has a message (the cause), a hint (the remedy) and an exit status.

VfiomgrError
├── UsageError             2   the request cannot be understood
│   └── UnknownDevice      2   it names a device that does not exist
├── InvalidDocument       65   an input document is malformed
├── Refusal                4   a safety check refuses; the hint says how to resolve it
├── HostError              1   the host did not do what was requested
│   ├── WriteFailed        1   a kernel attribute rejected a write
│   ├── ProgramFailed      1   a program of the host ended with an error
│   ├── StillDiffers       1   all steps succeeded, but the host still differs
│   ├── LibvirtFailed      1   libvirt did not do what was requested
│   ├── LibvirtSilent      1   libvirt did not answer before the deadline
│   └── NeedsRoot          1   the process may not change the host
├── RolledBack             1   a run failed; everything is as it was before
└── RollbackIncomplete     5   a run failed, and so did part of the rollback
    ├── StuckInKernel      5   the kernel did not return from a step
    └── GuestKeepsDevice   5   a running guest did not release a device
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic, Remedy


class VfiomgrError(Exception):
    """Any error that is reported to a user; `exit_code` is the exit status of the process."""

    exit_code = 1
    details: tuple[str, ...] = ()
    """If the message summarizes several things: one line for each."""

    def __init__(self, message: str, hint: str | Remedy = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = hint
        self.hint = str(hint)


class UsageError(VfiomgrError):
    """The request cannot be understood."""

    exit_code = 2


class UnknownDevice(UsageError):
    """No device of this host has this name."""


class InvalidDocument(VfiomgrError):
    """An input document is malformed; the message or the details give the place."""

    exit_code = 65

    def __init__(self, message: str, hint: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.details = details


class Refusal(VfiomgrError):
    """A safety check refuses the request; nothing was changed.

    `diagnostics` are the findings that the message and the hint were made from.
    """

    exit_code = 4

    def __init__(
        self, message: str, hint: str | Remedy = "", diagnostics: tuple[Diagnostic, ...] = ()
    ) -> None:
        super().__init__(message, hint)
        self.diagnostics = diagnostics


class HostError(VfiomgrError):
    """The host did not do what was requested."""


class NeedsRoot(HostError):
    """The process may not change the host."""

    def __init__(self, what: str = "changing devices", *, has_plan: bool = True) -> None:
        shown = "; --dry-run shows the plan without root" if has_plan else ""
        super().__init__(f"{what} requires root", f"run the command as root, e.g. with sudo{shown}")


class WriteFailed(HostError):
    """The kernel rejected a write to an attribute; `errno` is the kernel's answer."""

    def __init__(self, path: str, text: str, errno: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.path = path
        self.text = text
        self.errno = errno


class ProgramFailed(HostError):
    """A program of the host failed; `status` is its exit status, None if it did not end."""

    def __init__(self, message: str, hint: str, *, status: int | None, said: str) -> None:
        super().__init__(message, hint)
        self.status = status
        self.said = said


class LibvirtFailed(HostError):
    """Libvirt did not do what was requested; `code` is its virErrorNumber."""

    def __init__(self, message: str, hint: str = "", *, code: int = 0) -> None:
        super().__init__(message, hint)
        self.code = code


class LibvirtSilent(HostError):
    """Libvirt did not answer before the deadline; it may still carry out the request."""


class DeviceDamaged(HostError):
    """A step harmed a device in a way that undoing the step does not repair."""


class StillDiffers(HostError):
    """A part of a layout was applied but still differs; the message says how."""


class RolledBack(VfiomgrError):
    """A run failed and all its steps were undone."""


class RollbackIncomplete(VfiomgrError):
    """A run failed and could not be undone completely; the message says what is left."""

    exit_code = 5


class StuckInKernel(RollbackIncomplete):
    """The kernel has not returned from a step; `devices` are the devices concerned.

    The process `pid`, which waits in the kernel, keeps the `locks` of those devices.
    """

    def __init__(
        self,
        message: str,
        devices: tuple[str, ...],
        *,
        pid: int = 0,
        locks: frozenset[str] = frozenset(),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.devices = devices
        self.pid = pid
        self.locks = locks


class GuestKeepsDevice(RollbackIncomplete):
    """A running guest did not release a device before the deadline."""


_Word = TypeVar("_Word", bound=str)


def forbid_together(one: str, other: str, why: str) -> NoReturn:
    """Reject two options that contradict each other.

    Raises:
        UsageError: always.
    """
    message = f"{one} and {other} contradict each other: {why}"
    raise UsageError(message, f"pass {one} or {other}")


def forbid_alone(option: str, without: str, why: str) -> NoReturn:
    """Reject an option that has no effect without another one.

    Raises:
        UsageError: always.
    """
    message = f"{option} does nothing without {without}: {why}"
    raise UsageError(message, f"pass {without} too, or leave out {option}")


def require_known(options: Mapping[str, object], kind: type) -> None:
    """Require keywords to be those of a TypedDict: Python does not check them.

    Raises:
        TypeError: one is unknown.
    """
    known = kind.__annotations__
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        message = f"unknown keyword: {', '.join(unknown)} (known: {', '.join(known)})"
        raise TypeError(message)


def require_choice(option: str, value: str | None, choices: Sequence[str]) -> None:
    """Require a word to be one of some choices, or omitted.

    Raises:
        UsageError: it is another word.
    """
    if value is not None and value not in choices:
        known = ", ".join(map(repr, choices))
        message = f"{option}: {value!r} is not {'one of ' if len(choices) > 1 else ''}{known}"
        raise UsageError(message, "use one of them")


def chosen(option: str, values: Iterable[_Word], choices: Sequence[_Word]) -> frozenset[_Word]:
    """The given words (or the single one), each of which must be one of some choices.

    Raises:
        UsageError: one of them is another word.
    """
    if isinstance(values, str):
        values = cast("tuple[_Word, ...]", (values,))
    found = tuple(values)
    for value in found:
        require_choice(option, value, choices)
    return frozenset(found)


def require_whole(option: str, value: int | None, least: int, most: int | None = None) -> None:
    """Require a whole number to be in its range, or omitted.

    Raises:
        UsageError: it is not.
        TypeError: it is not a number, e.g. a text.
    """
    if not isinstance(value, int | None):
        message = f"{option}: expected a whole number, not {value!r}"
        raise TypeError(message)
    if value is not None and not least <= value <= (value if most is None else most):
        upward = "up" if most is None else f"to {most}"
        message = f"{option}: {str(value)!r} is not a whole number from {least} {upward}"
        raise UsageError(message, "use a number in this range")
