"""Make and remove virtual functions (sriov_numvfs_store in drivers/pci/iov.c)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.executor.quotas import set_quotas
from vfiomgr.executor.writing import becomes_true, explaining, require_same_device
from vfiomgr.host import pci
from vfiomgr.host.iommu import group_number
from vfiomgr.model.path import pci_device

if TYPE_CHECKING:
    from vfiomgr.executor.causes import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress
    from vfiomgr.model.step import SetAutoprobe, SetVfCount

GROUP_DEADLINE = 10.0
"""Seconds for all new functions to get their IOMMU groups."""


def set_autoprobe(tree: HostTree, step: SetAutoprobe) -> None:
    """Let host drivers take new virtual functions, or not.

    Raises:
        HostError: the attribute did not change.

    """
    require_same_device(tree, step.device)
    target = pci_device(step.device.address) / "sriov_drivers_autoprobe"
    wanted = str(int(step.after))
    if tree.read(target) == wanted:
        return
    with explaining("autoprobe", str(step.device.address)):
        tree.write(target, wanted)
    if tree.read(target) != wanted:
        message = f"{target} is {tree.read(target)} after {wanted} was written"
        raise HostError(message, "see dmesg; another program may have changed it")


def set_vf_count(tree: HostTree, step: SetVfCount) -> None:
    """Have as many virtual functions as the step names, with their IOMMU groups.

    Raises:
        HostError: a driver may make fewer than it was asked for, and the write succeeds.

    """
    require_same_device(tree, step.device)
    address = step.device.address
    present = virtual_function_count(tree, address)
    if present != step.after:
        if present and step.after:
            _write_count(tree, address, 0)
        for share in step.shares if step.after else ():
            set_quotas(tree, share)
        _write_count(tree, address, step.after)
    made = pci.read_virtual_functions(tree, address)
    if virtual_function_count(tree, address) != step.after or len(made) != step.after:
        message = (
            f"{address} has {len(made)} virtual functions (sriov_numvfs "
            f"{virtual_function_count(tree, address)}), not {step.after}"
        )
        raise HostError(message, "ask for fewer; see dmesg for the driver's words")
    if group_number(tree, pci_device(address)) is not None:
        await_groups(tree, made)


def virtual_function_count(tree: HostTree, address: PciAddress) -> int:
    """How many virtual functions there are; 0 of a function that makes none."""
    text = tree.read(pci_device(address) / "sriov_numvfs")
    return int(text) if text and text.isdecimal() else 0


def _write_count(tree: HostTree, address: PciAddress, count: int) -> None:
    driver = tree.link_name(pci_device(address) / "driver")
    operation: Operation = "nvidia-vf-count" if driver == "nvidia" else "vf-count"
    with explaining(operation, f"sriov_numvfs of {address} to {count}"):
        tree.write(pci_device(address) / "sriov_numvfs", str(count))


def await_groups(tree: HostTree, functions: tuple[PciAddress, ...]) -> None:
    """Wait until each function has its IOMMU group.

    Raises:
        HostError: some have none in time; they are named.

    """

    def missing() -> list[PciAddress]:
        return [vf for vf in functions if group_number(tree, pci_device(vf)) is None]

    if not becomes_true(lambda: not missing(), GROUP_DEADLINE):
        names = ", ".join(map(str, missing()))
        message = f"virtual functions without an IOMMU group: {names}"
        raise HostError(message, "see dmesg for the IOMMU's words")
