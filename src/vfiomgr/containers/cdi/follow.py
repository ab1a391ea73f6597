"""What becomes of vfiomgr's own CDI specifications when devices go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import notes_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

GOES = " goes"
"""What a note ends with that tells of a device that is taken out."""


@notes_devices
def following_notes(host: HostSnapshot, going: Iterable[PciDevice | Vgpu]) -> Iterator[str]:
    """Which of vfiomgr's own files name functions or vGPUs that are about to go."""
    nodes = {node for holder in going for node in host.guest_nodes(holder)}
    for file in host.cdi_files:
        if file.is_own and any(f'"{node}"' in (file.text or "") for node in nodes):
            yield f"{file.path} names it, and is put right afterwards"
