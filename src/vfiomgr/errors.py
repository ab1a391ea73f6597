"""The tree of errors: each has a message (the cause), a hint (the remedy) and an exit status.

VfiomgrError
├── UsageError             2   the request cannot be understood
│   └── UnknownDevice      2   it names a device that this host does not have
├── InvalidDocument       65   an input document is malformed
├── Refusal                4   a guard refuses; the hint names what would lift it
├── HostError              1   the host did not do what was asked
│   ├── WriteFailed        1   a kernel attribute rejected a write
│   ├── ProgramFailed      1   a program of the host ended with an error
│   ├── StillDiffers       1   all was done that was to be, and something differs all the same
│   ├── LibvirtFailed      1   libvirt did not do what was asked
│   ├── LibvirtSilent      1   libvirt has not answered until a deadline
│   └── NeedsRoot          1   the right to change the host is missing
├── RolledBack             1   a run failed; everything is as it was before
└── RollbackIncomplete     5   a run failed, and so did part of undoing it
    ├── StuckInKernel      5   the kernel did not return from a step
    └── GuestKeepsDevice   5   a running guest has not released a device
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic, Remedy


class VfiomgrError(Exception):
    """Anything that a user is told about; `exit_code` is the process's exit status."""

    exit_code = 1
    details: tuple[str, ...] = ()
    """What the message sums up, where that is several things: a line for each."""

    def __init__(self, message: str, hint: str | Remedy = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = hint
        self.hint = str(hint)


class UsageError(VfiomgrError):
    """The request cannot be understood."""

    exit_code = 2


class UnknownDevice(UsageError):
    """No device of this host answers to the name."""


class InvalidDocument(VfiomgrError):
    """An input document is malformed; the message names the place, or the details do."""

    exit_code = 65

    def __init__(self, message: str, hint: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.details = details


class Refusal(VfiomgrError):
    """A guard refuses the request; nothing was changed.

    `diagnostics` are what the message and the hint were joined from, where guards found them.
    """

    exit_code = 4

    def __init__(
        self, message: str, hint: str | Remedy = "", diagnostics: tuple[Diagnostic, ...] = ()
    ) -> None:
        super().__init__(message, hint)
        self.diagnostics = diagnostics


class HostError(VfiomgrError):
    """The host did not do what was asked of it."""


class NeedsRoot(HostError):
    """The right to change the host is missing."""

    def __init__(self, what: str = "changing devices") -> None:
        super().__init__(
            f"{what} needs root",
            "run the same command as root, e.g. with sudo; --dry-run shows the plan without it",
        )


class WriteFailed(HostError):
    """The kernel rejected a write to an attribute; `errno` is the kernel's answer."""

    def __init__(self, path: str, text: str, errno: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.path = path
        self.text = text
        self.errno = errno


class ProgramFailed(HostError):
    """A program of the host failed; `status` is its exit status, None where it did not end."""

    def __init__(self, message: str, hint: str, *, status: int | None, said: str) -> None:
        super().__init__(message, hint)
        self.status = status
        self.said = said


class LibvirtFailed(HostError):
    """Libvirt did not do what was asked; `code` is its virErrorNumber."""

    def __init__(self, message: str, hint: str = "", *, code: int = 0) -> None:
        super().__init__(message, hint)
        self.code = code


class LibvirtSilent(HostError):
    """Libvirt has not answered until a deadline; what it was asked for it may do later."""


class StillDiffers(HostError):
    """A part of a layout was brought about and is not as it is wanted; the message says in what."""


class RolledBack(VfiomgrError):
    """A run failed and every step that it had taken was undone."""


class RollbackIncomplete(VfiomgrError):
    """A run failed and could not be undone completely; the message says what is left."""

    exit_code = 5


class StuckInKernel(RollbackIncomplete):
    """The kernel has not returned from a step; `devices` are what it is about.

    The process `pid`, which waits in it, keeps the `locks` of those devices.
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
    """A running guest was asked to release a device, and has not until the deadline."""
