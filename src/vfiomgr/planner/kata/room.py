"""Whether a guest has room for its memory and for the BARs of its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model.explanation import ChainBreak
from vfiomgr.planner.kata.sizing import check_sizing, sizing_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.kata import KataHypervisor
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.planner.kata.situation import Situation

_OF_ROOM = frozenset({"kata-host-memory", "kata-window", "kata-maxmemory"})
"""Rules of `kata config` that no other link tells of."""
_MIB = 1 << 20


def room_breaks(situation: Situation, functions: tuple[PciDevice, ...]) -> Iterator[ChainBreak]:
    """What has no room, as far as the configuration and the host show it."""
    settings = situation.settings
    if settings is None:
        return
    hypervisor: KataHypervisor = "qemu" if settings.hypervisor == "qemu" else "clh"
    runtime, host = situation.release.runtime, situation.host
    sizing = sizing_of(host, runtime, hypervisor, functions, settings)
    for found in check_sizing(replace(sizing, limit_mib=situation.pod.memory_bytes // _MIB)):
        if found.id in _OF_ROOM and found.severity != "info":
            yield ChainBreak(
                f"{found.title}: {found.why}",
                found.remedy,
                is_silent=found.id != "kata-host-memory",
                is_certain=found.severity == "blocker",
            )
