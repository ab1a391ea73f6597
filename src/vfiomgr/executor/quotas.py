"""Write quotas of functions, and make sure of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.executor.writing import explaining, require_same_device
from vfiomgr.model.path import HostPath
from vfiomgr.model.quota import is_met

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.quota_step import QuotaChange, SetQuotas


def set_quotas(tree: HostTree, step: SetQuotas) -> None:
    """Write what is not as the step names it, and read it again.

    Raises:
        HostError: the driver does not take a quota, or shows another one afterwards.

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
        cannot = "cannot be read (EUCLEAN: it differs between the GPU's tiles)"
        says = f"is {found}" if found is not None else cannot
        message = f"{shown} {says} after {change.after} was written"
        raise HostError(message, "see dmesg for the driver's words; ask for another quota")
