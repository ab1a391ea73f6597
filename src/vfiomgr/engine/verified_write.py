"""Writes with explained errors (drivers/base/bus.c, drivers/vfio), and their verification.

The causes are in write_errors.toml, by operation and errno.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from vfiomgr.documents.text import parse_toml
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.pci import facts as pci_facts

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import DeviceIdentity


Operation = Literal[
    "override",
    "unbind",
    "probe",
    "bind",
    "new-id",
    "power",
    "mdev-create",
    "mdev-remove",
    "vgpu-type",
    "attribute",
    "autoprobe",
    "vf-count",
    "nvidia-vf-count",
    "quota",
    "vf-vectors",
    "reset-method",
    "reset",
    "bus-reset",
    "d3cold",
    "bar-size",
    "graphics",
]


_ENOTSUPP = 524
"""include/linux/errno.h; Python's errno does not have it."""


@functools.cache
def _causes() -> dict[tuple[str, int], tuple[str, str]]:
    """Cause and remedy by operation and errno."""
    from importlib.resources import files  # noqa: PLC0415 - slow to import

    text = files(__package__).joinpath("write_errors.toml").read_text(encoding="utf-8")
    return {
        (operation, _ENOTSUPP if name == "ENOTSUPP" else getattr(errno, name)): (cause, remedy)
        for operation, known in parse_toml(text).items()
        for name, (cause, remedy) in known.items()
    }


def explained(error: WriteFailed, operation: Operation, subject: str) -> WriteFailed:
    """The error with its cause and remedy, if the errno of this write is known.

    The table may have been removed or replaced, e.g. by an upgrade: then there is no explanation.
    """
    try:
        causes = _causes()
    except Exception:  # noqa: BLE001 - nothing may hide the error of the write
        causes = {}
    known = causes.get((operation, error.errno))
    if known is None and operation == "nvidia-vf-count":
        known = causes.get(("vf-count", error.errno))
    cause, remedy = known or ("", "see dmesg for the driver's message")
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return WriteFailed(error.path, error.text, error.errno, message, remedy)


_POLL = 0.05


@contextmanager
def explaining(operation: Operation, subject: str) -> Iterator[None]:
    """Add cause and remedy to the error of a write."""
    try:
        yield
    except WriteFailed as error:
        raise explained(error, operation, subject) from error


def require_runnable(tree: HostTree, program: str) -> None:
    """Require that programs of the host can be run.

    Raises:
        HostError: the tree is not the machine that vfiomgr runs on.
    """
    if not tree.runs_programs:
        message = f"cannot run {program}: {tree.root} is not this machine"
        raise HostError(message, "run vfiomgr on that host")


def require_same_device(tree: HostTree, expected: DeviceIdentity) -> None:
    """Require that the device of a step still is at its address.

    Raises:
        HostError: it is gone or was replaced.
    """
    found = pci_facts.read_identity(tree, expected.address, with_serial=expected.serial is not None)
    if found is None:
        message = f"{expected} is gone"
        raise HostError(
            message, "it was unplugged or powered off; list the present devices: vfiomgr list --all"
        )
    if not found.is_same_as(expected):
        message = f"another device is at this address: {found} instead of {expected}"
        raise HostError(message, "check it with vfiomgr show, then run the command again")


def becomes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Wait up to `limit` seconds for a condition."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
