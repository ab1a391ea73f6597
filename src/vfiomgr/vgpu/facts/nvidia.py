"""nvidia-smi, for facts that NVIDIA's driver does not show in files."""

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
    """Run nvidia-smi; None if it is not installed or did not answer.

    It is not run while a GPU is stuck in the kernel, because it would hang too.
    """
    gpus = [device for device in devices if device.driver == "nvidia"]
    if not gpus or any(device.stuck for device in devices):
        return None
    return tree.run(("nvidia-smi", *question))


def persistence_uses(tree: HostTree, devices: Sequence[PciDevice]) -> Iterator[HostUse]:
    """GPUs in persistence mode, whose use count is not visible as an open file."""
    for line in (ask(tree, devices, *_QUERY) or "").splitlines():
        name, _, mode = line.partition(",")
        if mode.strip() != "Enabled":
            continue
        try:
            address = PciAddress.parse(name)
        except UsageError:
            continue  # a line of another kind: nvidia-smi also prints warnings
        yield HostUse(address, "persistence-mode", "nvidia-smi shows it as enabled")
