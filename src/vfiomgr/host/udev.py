"""udev: what it announces, what it has done to nodes of devices, what its rules would do."""

from __future__ import annotations

import re
from contextlib import suppress
from errno import ENOBUFS
from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_UDEVD = HostPath("/run/udev/control")
_DATABASE = HostPath("/run/udev/data")
_RULES = tuple(
    HostPath(f"{place}/udev/rules.d")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
"""Where udevd reads rules (udev(7)); a file hides those of its name in later directories."""
_CONTINUED = re.compile(r"\\\n\s*")
_ACCESS = re.compile(r'\b(?:OWNER|GROUP|MODE|RUN(?:\{\w+\})?|TAG) *(?:=|\+=|:=) *"(?!systemd")')
_CONTAINER = re.compile(r'\bKERNEL *== *"vfio"')
"""A match of /dev/vfio/vfio, which is no node of a group or a function."""
_SUBSYSTEMS = ("pci", "mdev", "vfio", "drm")
"""What is given to guests, and what shows that somebody has it."""
_BUFFER = 1 << 23
"""Bytes; a bus that is scanned announces all of its functions at once."""


class DeviceChanges:
    """What happens to devices, as udev announces it once its rules have acted.

    Where no udevd runs, as the kernel announces it. A driver that binds or unbinds is an event as
    well (KOBJ_BIND, KOBJ_UNBIND in drivers/base/dd.c).
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

    def wait(self, seconds: float) -> bool:
        """Whether something happens within some seconds; returns with the first that does."""
        try:
            return self._monitor.poll(seconds) is not None
        except OSError as error:
            if error.errno != ENOBUFS:
                raise
            return True  # more came at once than the buffer holds


def is_settled(tree: HostTree, node: HostPath) -> bool:
    """Whether a device node has the owner and the mode that it will keep.

    devtmpfs makes a node for root at once; udevd then applies its rules, by which a guest without
    root's rights may open it, and writes its record of the node, which libudev looks for too
    (sd_device_get_is_initialized in systemd). True where no udevd runs, and on other hosts than
    this machine.
    """
    if not tree.is_machine or not tree.exists(_UDEVD):
        return True
    number = tree.device_number(node)
    return number is not None and tree.exists(_DATABASE / f"c{number[0]}:{number[1]}")


@lru_cache(maxsize=1)
def rules_give_access(tree: HostTree) -> bool:
    """Whether a rule of udev decides who may open the nodes of VFIO.

    Where none does, a node stays as devtmpfs made it, and nobody need wait for udevd.
    """
    return any(
        "vfio" in rule and _ACCESS.search(rule) and not _CONTAINER.search(rule)
        for text in _rules(tree)
        for rule in _CONTINUED.sub(" ", text).splitlines()
        if not rule.lstrip().startswith("#")
    )


def _rules(tree: HostTree) -> Iterator[str]:
    """The texts of the rules that mention VFIO at all."""
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
    """Have udevd read its rules now, within some seconds; nothing where none runs."""
    if tree.is_machine and tree.exists(_UDEVD):
        tree.call("udevadm", "control", "--reload", limit=seconds)
