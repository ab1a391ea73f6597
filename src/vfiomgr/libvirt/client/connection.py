"""A connection to libvirt: opened, and closed again.

Where a method raises an error of libvirt, it is one of vfiomgr's by then:
`vfiomgr.libvirt.client.errors`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from vfiomgr.libvirt.client.binding import event_loop, explaining, library
from vfiomgr.libvirt.client.deadline import DEADLINE, converse
from vfiomgr.libvirt.client.define import DefinitionCalls
from vfiomgr.libvirt.client.devices import DeviceCalls
from vfiomgr.libvirt.client.mdevs import MdevCalls
from vfiomgr.libvirt.client.uri import split_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

_EMBEDDED = "/embed"
"""The path of a driver inside this process, which needs the loop itself (drvqemu.html)."""


class Connection(DefinitionCalls, DeviceCalls, MdevCalls):
    """An open connection; `connect` makes one."""


@contextmanager
def connect(
    uri: str, *, read_only: bool = False, with_events: bool = False, deadline: float = DEADLINE
) -> Iterator[Connection]:
    """A connection to the libvirt at a URI; events of domains are heard `with_events` alone.

    Each of its calls is answered within `deadline` seconds, or given up; a connection to another
    host is tried in between, so that one which is lost ends a call that may take longer.

    Raises:
        HostError: libvirt-python is not installed, or no libvirt answers.
        UsageError: it is no URI, or no driver of libvirt knows it.

    """
    libvirt = library()
    parts = split_uri(uri)
    open_it = libvirt.openReadOnly if read_only else libvirt.open
    is_remote = bool(parts.hostname or "+" in parts.scheme)
    needs_loop = with_events or is_remote or parts.path == _EMBEDDED
    with (
        event_loop() if needs_loop else nullcontext(),
        explaining(uri),
        converse(open_it, uri, deadline) as handle,
    ):
        connection = Connection(handle, uri)
        if is_remote or with_events:
            connection.keep_alive()
        yield connection
