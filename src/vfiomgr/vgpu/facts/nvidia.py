"""nvidia-smi, the one door to what NVIDIA's driver shows in no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.model import HostUse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice

_QUERY = ("--query-gpu=pci.bus_id,persistence_mode", "--format=csv,noheader")


def ask(tree: HostTree, devices: Sequence[PciDevice], *question: str) -> str | None:
    """What nvidia-smi says; None where it is absent, or could not answer for long.

    A GPU that is stuck in the kernel would make nvidia-smi hang too; it is not asked then.
    """
    gpus = [device for device in devices if device.driver == "nvidia"]
    if not gpus or any(device.stuck for device in devices):
        return None
    return tree.run(("nvidia-smi", *question))


def persistence_uses(tree: HostTree, devices: Sequence[PciDevice]) -> Iterator[HostUse]:
    """GPUs in persistence mode: the driver keeps a use count for them that no open file shows."""
    for line in (ask(tree, devices, *_QUERY) or "").splitlines():
        name, _, mode = line.partition(",")
        if mode.strip() != "Enabled":
            continue
        try:
            address = PciAddress.parse(name)
        except UsageError:
            continue  # a line of another kind: nvidia-smi also prints warnings
        yield HostUse(address, "persistence-mode", "nvidia-smi shows it as enabled")
