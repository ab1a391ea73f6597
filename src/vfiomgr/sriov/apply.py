"""Perform steps on virtual functions and quotas, also by NVIDIA's sriov-manage.

It unbinds the GPU, sets sriov_numvfs, and binds the GPU again. If it is interrupted, the GPU stays
on pci-pf-stub or without driver, and a second call does nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import (
    becomes_true,
    explaining,
    require_runnable,
    require_same_device,
)
from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.paths import PCI_DRIVERS, SRIOV_MANAGE, HostPath
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.capabilities import read_vectors
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import QuotaChange, SetAutoprobe, SetQuotas, SetVectors, SetVfCount
from vfiomgr.vgpu.quota.model import is_met
from vfiomgr.vgpu.steps import RunSriovManage, sriov_manage_command

if TYPE_CHECKING:
    from vfiomgr.engine.verified_write import Operation
    from vfiomgr.host.tree import HostTree


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
    if step.after:
        _set_vectors(tree, made, step.vectors)


@performs(SetVectors)
def set_vectors(tree: HostTree, step: SetVectors) -> None:
    """Set the MSI-X vectors of virtual functions.

    Raises:
        HostError: the driver rejects a number, or the configuration space has another one.
    """
    require_same_device(tree, step.device)
    _set_vectors(tree, pci_facts.read_virtual_functions(tree, step.device.address), step.after)


def _set_vectors(
    tree: HostTree, functions: tuple[PciAddress, ...], vectors: tuple[int | None, ...]
) -> None:
    """Set those that differ; functions that return vectors come before those that get more."""
    pairs = zip(functions, vectors, strict=False)
    wanted = {function: count for function, count in pairs if count is not None}
    more = {each: wanted[each] - (read_vectors(tree, each) or 0) for each in wanted}
    for function in sorted(wanted, key=lambda each: more[each]):
        if more[function]:
            _set_vectors_of(tree, function, wanted[function])


def _set_vectors_of(tree: HostTree, function: PciAddress, count: int) -> None:
    """Set the Table Size of a virtual function.

    ice adds a vector of its own to the number (ice_sriov_set_msix_vec_count).
    """
    target = pci_device(function) / "sriov_vf_msix_count"
    with explaining("vf-vectors", f"MSI-X vectors of {function} to {count}"):
        tree.write(target, str(count))
        found = read_vectors(tree, function)
        if found is not None and count < found < 2 * count:
            tree.write(target, str(2 * count - found))
            found = read_vectors(tree, function)
    if found != count:
        message = f"cannot set the MSI-X vectors of {function} to {count}: it has {found}"
        raise HostError(message, "check dmesg, or request another number")


def virtual_function_count(tree: HostTree, address: PciAddress) -> int:
    """The number of virtual functions; 0 if the function does not support them."""
    return tree.read_number(pci_device(address) / "sriov_numvfs") or 0


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


ATTEMPTS = 5
PAUSE = 1.0
"""Seconds between attempts; monitors (NVML, DCGM) keep a GPU open for less time."""
_BUSY = "cannot obtain unbindlock"
_DRIVER = "nvidia"
_FAILED = (
    "check dmesg (NVRM), that NVIDIA's vGPU host driver is loaded, and that SR-IOV is enabled in "
    "the firmware setup"
)
_QUIET = (
    "stop the processes that vfiomgr show lists, e.g.: systemctl stop nvidia-dcgm "
    "nvidia-dcgm-exporter nvidia-persistenced"
)


@performs(RunSriovManage)
def run_sriov_manage(tree: HostTree, step: RunSriovManage) -> None:
    """Create all virtual functions, each on its driver, or remove them.

    Raises:
        HostError: the program failed, or its result is incomplete.
    """
    require_same_device(tree, step.device)
    address = step.device.address
    present = virtual_function_count(tree, address)
    wanted = _wanted(tree, step)
    if present and wanted and (present != wanted or _driverless(tree, address)):
        _call(tree, step, is_on=False)
        present = virtual_function_count(tree, address)
    if present != wanted:
        _call(tree, step, is_on=bool(step.after))
    _bring_back(tree, address)
    _verify(tree, step)


def _wanted(tree: HostTree, step: RunSriovManage) -> int:
    """The number to create: at most what the current driver of the GPU allows.

    A driver may allow fewer than the device supports (pci_sriov_set_totalvfs in drivers/pci/iov.c),
    which is visible only while it is bound.
    """
    most = tree.read(pci_device(step.device.address) / "sriov_totalvfs") or ""
    return min(step.after, int(most)) if most.isdecimal() else step.after


def _call(tree: HostTree, step: RunSriovManage, *, is_on: bool) -> None:
    """Run the program, with some retries while the GPU is in use."""
    require_runnable(tree, SRIOV_MANAGE)
    command = sriov_manage_command(step.device, is_on=is_on)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            tree.call(*command, limit=None)  # whoever runs the step has a deadline
        except ProgramFailed as error:
            if _BUSY not in error.said.lower():
                raise HostError(error.message, _FAILED) from error
            if attempt == ATTEMPTS:
                message = f"{step.device.address} is in use: {error.message}"
                raise HostError(message, _QUIET) from error
            time.sleep(PAUSE)
        else:
            return


def _bring_back(tree: HostTree, address: PciAddress) -> None:
    """Bind the GPU to its driver if the program did not."""
    link = pci_device(address) / "driver"
    driver = tree.link_name(link)
    if driver == _DRIVER:
        return
    if driver is not None:
        with explaining("unbind", str(address)):
            tree.write(link / "unbind", str(address))
    with explaining("bind", f"{address} to {_DRIVER}"):
        tree.write(PCI_DRIVERS / _DRIVER / "bind", str(address))


def _verify(tree: HostTree, step: RunSriovManage) -> None:
    address = step.device.address
    count, wanted = virtual_function_count(tree, address), _wanted(tree, step)
    if count != wanted:
        message = f"cannot create {wanted} virtual functions of {address}: it has {count}"
        raise HostError(message, "check dmesg (NVRM) for messages of the driver")
    if group_number(tree, pci_device(address)) is not None:
        await_groups(tree, pci_facts.read_virtual_functions(tree, address))
    lost = _driverless(tree, address)
    if lost:
        message = f"virtual functions without a driver after sriov-manage: {', '.join(lost)}"
        raise HostError(message, "check dmesg (NVRM) for messages of the driver")


def _driverless(tree: HostTree, address: PciAddress) -> list[str]:
    functions = pci_facts.read_virtual_functions(tree, address)
    return [str(vf) for vf in functions if tree.link_name(pci_device(vf) / "driver") is None]
