"""udev: its events, its changes to device nodes, and the effect of its rules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from errno import ENOBUFS
from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    import os

    from vfiomgr.host.tree import HostTree

_UDEVD = HostPath("/run/udev/control")
_DATABASE = HostPath("/run/udev/data")
_QUEUE = HostPath("/run/udev/queue")
"""The file that exists while udevd has events to handle."""
_ANSWER = 60.0
"""Seconds in which udevd answers even on a busy machine."""
_ATTEMPTS = 4
_PAUSE = 0.5
"""Seconds between attempts to ask a busy udevd."""
_RULES = tuple(
    HostPath(f"{place}/udev/rules.d")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
"""Directories of udev rules (udev(7)); a file hides those of the same name in later ones."""
_CONTINUED = expression(r"\\\n\s*")
_ACCESS = expression(r'\b(?:OWNER|GROUP|MODE|RUN(?:\{\w+\})?|TAG) *(?:=|\+=|:=) *"(?!systemd")')
_CONTAINER = expression(r'\bKERNEL *== *"vfio"')
"""A match of /dev/vfio/vfio, which is not a node of a group or a function."""
_NODES_OF_HOST = ("drm", "accel", "sound", "infiniband_verbs", "uio")
_SUBSYSTEMS = ("pci", "mdev", "vfio", "vfio-dev", *_NODES_OF_HOST)
"""Subsystems of functions, of their nodes for guests, and of those on the host.

Nodes of groups are of `vfio`, and cdevs of `vfio-dev` (drivers/vfio/group.c, vfio_main.c).
"""
_BUFFER = 1 << 23
"""Bytes; a bus scan announces all of its functions at once."""


class DeviceEvents(Value):
    """Which devices have changed."""

    paths: frozenset[str] = frozenset()
    """Their directories below /sys: `/devices/pci0000:00/0000:00:01.0/0000:01:00.0`."""
    is_complete: bool = True
    """False if more events came at once than could be kept: any device may have changed."""


class DeviceChanges:
    """Changes of devices, as announced by udev after its rules have acted.

    Without udevd, as announced by the kernel. A driver that binds or unbinds is an event too
    (KOBJ_BIND, KOBJ_UNBIND in drivers/base/dd.c).
    """

    def __init__(self, tree: HostTree) -> None:
        import pyudev  # noqa: PLC0415 - one command's own, and slow to import

        source = "udev" if tree.exists(_UDEVD) else "kernel"
        self._monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=source)
        for subsystem in _SUBSYSTEMS:
            self._monitor.filter_by(subsystem)
        with suppress(OSError):  # only root may; without it, more is lost in a storm, and told so
            self._monitor.set_receive_buffer_size(_BUFFER)
        self._monitor.start()
        self._paths: set[str] = set()
        self._is_complete = True

    def fileno(self) -> int:
        """The descriptor that is readable after an event, for select."""
        return int(self._monitor.fileno())

    def wait(self, seconds: float) -> bool:
        """Whether an event occurs within some seconds; returns with the first."""
        try:
            device = self._monitor.poll(seconds)
        except OSError as error:
            if error.errno != ENOBUFS:
                raise
            self._is_complete = False  # more came at once than the buffer holds
            return True
        if device is None:
            return False
        self._paths.add(device.device_path)
        return True

    def take(self) -> DeviceEvents:
        """All events since the last call, also those that nobody waited for."""
        while self.wait(0):
            pass
        taken = DeviceEvents(frozenset(self._paths), self._is_complete)
        self._paths, self._is_complete = set(), True
        return taken


def is_settled(tree: HostTree, node: HostPath) -> bool:
    """Whether a device node has its final owner and mode.

    devtmpfs creates a node for root; udevd then applies its rules, which may grant access to a
    guest without root privileges, and writes its record of the node, which libudev checks too
    (sd_device_get_is_initialized in systemd). True without udevd, and on other hosts than this
    machine. A record that is older than the node belongs to an earlier node of the same number,
    whose removal udevd has not handled yet.
    """
    if not tree.is_machine or not tree.exists(_UDEVD):
        return True
    record, found = _record(tree, node), tree.status(node)
    return record is not None and found is not None and record.st_mtime_ns >= found.st_mtime_ns


def _record(tree: HostTree, node: HostPath) -> os.stat_result | None:
    number = tree.device_number(node)
    return None if number is None else tree.status(_DATABASE / f"c{number[0]}:{number[1]}")


def has_received(tree: HostTree) -> bool:
    """Wait until udevd has received all events that the kernel has sent; False if it is not asked.

    It answers only after it has queued them (on_ctrl_msg has idle priority in udev-manager.c).
    """
    try:
        _control(tree, "--ping", _ANSWER)
    except HostError:
        return False
    return True


def _control(tree: HostTree, option: str, seconds: float) -> None:
    """Send udevd a command and wait up to some seconds for its answer.

    A busy udevd may close the connection before it has answered (EPIPE): then it is asked again.

    Raises:
        HostError: udevadm is absent, fails several times, or does not end in time.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            tree.call("udevadm", "control", option, limit=seconds)
        except ProgramFailed as error:
            if not left or error.status is None or not tree.exists(_UDEVD):
                raise
            time.sleep(_PAUSE)
        else:
            return


def is_busy(tree: HostTree) -> bool:
    """Whether udevd has events that it has not handled."""
    return tree.exists(_QUEUE)


def has_record(tree: HostTree, node: HostPath) -> bool:
    """Whether udevd has handled an event of a node; after the last event, of the present node.

    Unlike `is_settled`, this is correct even if the clock was set back.
    """
    return _record(tree, node) is not None


@lru_cache(maxsize=1)
def rules_give_access(tree: HostTree) -> bool:
    """Whether a udev rule sets the access to VFIO nodes.

    Otherwise a node stays as created by devtmpfs, and nobody needs to wait for udevd.
    """
    return any(
        "vfio" in rule and _ACCESS.search(rule) and not _CONTAINER.search(rule)
        for text in _rules(tree)
        for rule in _CONTINUED.sub(" ", text).splitlines()
        if not rule.lstrip().startswith("#")
    )


def _rules(tree: HostTree) -> Iterator[str]:
    """The texts of the rules that mention VFIO."""
    seen: set[str] = set()
    for directory in _RULES:
        for name in tree.children(directory):
            if name in seen or not name.endswith(".rules"):
                continue
            seen.add(name)
            data = tree.read_whole(directory / name) or b""
            if b"vfio" in data:
                yield data.decode(errors="replace")


def reload_rules(tree: HostTree, seconds: float) -> None:
    """Make udevd read its rules now, within some seconds; no effect without udevd."""
    if tree.is_machine and tree.exists(_UDEVD):
        _control(tree, "--reload", seconds)
