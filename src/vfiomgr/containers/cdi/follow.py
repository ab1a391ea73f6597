"""How vfiomgr's own CDI specifications change when devices are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import notes_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

GOES = " is removed"
"""The end of a note about a removed device."""


@notes_devices
def following_notes(host: HostSnapshot, going: Iterable[PciDevice | Vgpu]) -> Iterator[str]:
    """Notes about vfiomgr's own files with functions or vGPUs that are going to be removed."""
    nodes = {node for holder in going for node in host.guest_nodes(holder)}
    for file in host.cdi_files:
        if file.is_own and any(f'"{node}"' in (file.text or "") for node in nodes):
            yield f"{file.path} contains it, and is updated afterwards"
