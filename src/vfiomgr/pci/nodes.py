"""The nodes below /dev that a host driver created for a PCI function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.facts import Function

_DIRECTORIES = {
    "drm": (re.compile(r"(card|renderD)\d+"), "/dev/dri"),
    "accel": (re.compile(r"accel\d+"), "/dev/accel"),
    "infiniband_verbs": (re.compile(r"uverbs\d+"), "/dev/infiniband"),
    "infiniband_mad": (re.compile(r"(umad|issm)\d+"), "/dev/infiniband"),
}
"""Subdirectories of a function by class, and where udev creates their nodes."""
_OWNERS = frozenset({*_DIRECTORIES, "sound"})
_SOUND_NODE = re.compile(r"(controlC|pcmC|hwC|midiC)\w+")
_NVIDIA_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_NVIDIA_GPUS = HostPath("/proc/driver/nvidia/gpus")


def nodes_of(function: Function, driver: str | None) -> tuple[str, ...]:
    """The nodes of a function bound to `driver`."""
    nvidia = _nvidia_nodes(function.tree, function.directory.name) if driver == "nvidia" else ()
    if function.entries.isdisjoint(_OWNERS):
        return nvidia
    return (*_by_class(function), *_of_sound(function), *nvidia)


def _by_class(function: Function) -> Iterator[str]:
    for kind, (pattern, place) in _DIRECTORIES.items():
        for name in function.children(kind):
            if pattern.fullmatch(name):
                yield f"{place}/{name}"


def _of_sound(function: Function) -> Iterator[str]:
    for card in function.children("sound"):
        for name in function.tree.children(function.directory / "sound" / card):
            if _SOUND_NODE.fullmatch(name):
                yield f"/dev/snd/{name}"


def _nvidia_nodes(tree: HostTree, address: str) -> tuple[str, ...]:
    """`/dev/nvidiaN`, with the number from the driver; if unknown, the control node."""
    information = tree.read(_NVIDIA_GPUS / address / "information") or ""
    minor = _NVIDIA_MINOR.search(information)
    return (f"/dev/nvidia{minor[1]}",) if minor else ("/dev/nvidiactl",)
