"""libvirt-python, an optional dependency: its only importer, its errors and its event loop."""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import HostError, LibvirtFailed
from vfiomgr.libvirt.client.errors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOP_TICK = 200
"""Milliseconds after which the event loop wakes up without an event."""


@functools.cache
def library() -> Any:  # noqa: ANN401
    """libvirt-python, told not to print its errors by itself."""
    try:
        import libvirt  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        message = f"this needs libvirt-python, which is not there: {error}"
        hint = (
            f"{sys.executable} -m pip install libvirt-python (it is built with gcc, pkg-config, "
            "python3-dev and libvirt-dev)"
        )
        raise HostError(message, hint) from None
    libvirt.registerErrorHandler(_be_silent, None)
    return libvirt


def _be_silent(_context: object, _error: object) -> None:
    """Libvirt's default handler prints on stderr."""


@contextmanager
def event_loop() -> Iterator[None]:
    """Hear events within; begun before a connection is opened, and ended after it is closed.

    The thread must not be in libvirt when the interpreter ends, which frees what it works with.
    """
    _register_event_loop()
    stop = threading.Event()
    thread = threading.Thread(target=_loop, args=(stop,), name="libvirt-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@functools.cache
def _register_event_loop() -> None:
    """Once a process. The timeout wakes the loop, which else sleeps until a descriptor is ready."""
    libvirt = library()
    with explaining("the event loop"):
        libvirt.virEventRegisterDefaultImpl()
        libvirt.virEventAddTimeout(_LOOP_TICK, _do_nothing, None)


def _do_nothing(_timer: int, _data: object) -> None:
    """The loop needed to wake up, no more."""


def _loop(stop: threading.Event) -> None:
    libvirt = library()
    while not stop.is_set():
        libvirt.virEventRunDefaultImpl()


@contextmanager
def explaining(subject: str) -> Iterator[None]:
    """Errors of libvirt within are vfiomgr's, about a domain, a file or a URI."""
    libvirt = library()
    try:
        yield
    except libvirt.libvirtError as error:
        raise explained(error, subject) from None


def explained(error: Any, subject: str) -> Exception:  # noqa: ANN401
    """An error of libvirt as one of vfiomgr."""
    code = error.get_error_code()
    if code is None:
        return LibvirtFailed(f"libvirt failed: {error}", "see its log: journalctl -u libvirtd")
    return explain(code, error.get_error_message() or "", subject)
