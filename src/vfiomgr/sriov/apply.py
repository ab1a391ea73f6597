"""Perform steps on virtual functions and quotas, and verify the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true, explaining, require_same_device
from vfiomgr.errors import HostError
from vfiomgr.paths import HostPath, pci_device
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.iommu import group_number
from vfiomgr.sriov.steps import SetAutoprobe, SetQuotas, SetVfCount
from vfiomgr.vgpu.quota.model import is_met

if TYPE_CHECKING:
    from vfiomgr.engine.errno_hints import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.sriov.steps import QuotaChange


@performs(SetQuotas)
def set_quotas(tree: HostTree, step: SetQuotas) -> None:
    """Write the quotas that differ from the step, and verify them.

    Raises:
        HostError: the driver rejects a quota, or reports another value.

    """
    require_same_device(tree, step.device)
    for change in step.changes:
        _set(tree, step, change)


def _set(tree: HostTree, step: SetQuotas, change: QuotaChange) -> None:
    directory = HostPath(step.directory)
    shown = directory / (change.shown or change.name)
    if is_met(change.name, change.after, tree.read(shown)):
        return
    name = change.name.rpartition("/")[2]
    with explaining("quota", f"{name} of {step.device.address} ({step.who})"):
        tree.write(directory / change.name, change.after)
    found = tree.read(shown)
    if not is_met(change.name, change.after, found):
        cannot = "the value differs between the GPU's tiles (EUCLEAN)"
        says = f"the driver reports {found}" if found is not None else cannot
        message = f"cannot set {shown} to {change.after}: {says}"
        raise HostError(message, "check dmesg, or request another quota")


GROUP_DEADLINE = 10.0
"""Seconds for all new functions to get their IOMMU groups."""


@performs(SetAutoprobe)
def set_autoprobe(tree: HostTree, step: SetAutoprobe) -> None:
    """Allow or forbid host drivers to bind new virtual functions.

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
        message = f"cannot set {target} to {wanted}: it is {tree.read(target)}"
        raise HostError(message, "check dmesg; another program may have changed it")


@performs(SetVfCount)
def set_vf_count(tree: HostTree, step: SetVfCount) -> None:
    """Create or remove virtual functions, and wait for their IOMMU groups.

    Raises:
        HostError: the driver created fewer than requested, although the write succeeded.

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
    made = pci_facts.read_virtual_functions(tree, address)
    if virtual_function_count(tree, address) != step.after or len(made) != step.after:
        message = (
            f"cannot set the virtual functions of {address} to {step.after}: it has {len(made)} "
            f"(sriov_numvfs {virtual_function_count(tree, address)})"
        )
        raise HostError(message, "check dmesg, or request fewer")
    if group_number(tree, pci_device(address)) is not None:
        await_groups(tree, made)


def virtual_function_count(tree: HostTree, address: PciAddress) -> int:
    """The number of virtual functions; 0 if the function does not support them."""
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
        HostError: some have no group in time; the message names them.

    """

    def missing() -> list[PciAddress]:
        return [vf for vf in functions if group_number(tree, pci_device(vf)) is None]

    if not becomes_true(lambda: not missing(), GROUP_DEADLINE):
        names = ", ".join(map(str, missing()))
        message = f"virtual functions without an IOMMU group: {names}"
        raise HostError(message, "check dmesg for messages about the IOMMU")
