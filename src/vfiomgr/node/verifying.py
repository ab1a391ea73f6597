"""What is done with devices before a container starts: they are verified, and reset if asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from errno import EACCES, EPERM, EROFS
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, diagnostics_of, warning
from vfiomgr.errors import NeedsRoot, Refusal, UsageError, VfiomgrError, WriteFailed
from vfiomgr.node.messages import BINDER, Problem, Question
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.library import Host
    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.snapshot.model import HostSnapshot

_FORBIDDEN = frozenset({EACCES, EPERM, EROFS})


def may_reset(tree: HostTree) -> bool:
    """Whether attributes of devices can be written: in a pod, /sys is read-only."""
    return tree.is_live and os.access(tree.locate(PCI_DEVICES), os.W_OK)


def may_bind(tree: HostTree) -> bool:
    """Whether devices can be bound for claims: by this host's agent itself, or by another pod."""
    return may_reset(tree) or tree.exists(BINDER)


def is_of_device(error: VfiomgrError) -> bool:
    """Whether a reset failed because of the device, not because this process may not write."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NeedsRoot | UsageError):
            return False
        if isinstance(cause, OSError | WriteFailed) and cause.errno in _FORBIDDEN:
            return False
        cause = cause.__cause__
    return True


def find_problems(
    host: Host,
    question: Question,
    seen: HostSnapshot,
    found: Inventory,
    crashes: Mapping[str, Diagnostic],
) -> Iterator[Problem]:
    """Why a container must not start with the devices of a question."""
    resource = found.resource(question.resource)
    units = {unit.id: unit for unit in resource.units} if resource else {}
    if not question.resource:  # devices of claims must only answer
        for each in found.units:
            silent = next((r for r in each.reasons if r.rule == "silent-device"), None)
            if silent is not None and each.id in question.verify:
                yield Problem(each.id, silent.summary)
        return
    for device in question.verify:
        unit = units.get(device)
        if unit is None:
            yield Problem(device, f"{device} is not a device of {question.resource}")
        elif unit.reasons:
            yield Problem(device, "; ".join(each.summary for each in unit.reasons))
        elif device in crashes:
            yield Problem(device, crashes[device].summary)
        elif resource is not None and resource.resets:
            yield from _reset(host, unit, seen)


def _reset(host: Host, unit: NodeUnit, seen: HostSnapshot) -> Iterator[Problem]:
    """Reset a device, unless a guest has it already: Kata starts its guest before containers.

    VFIO itself resets a function that is opened or closed (vfio_pci_core_enable, _disable).
    The kubelet has given the device to the pod already, which `in-use` allows.
    """
    if unit.kind != "function" or any(
        user.node in unit.nodes for user in seen.users.processes or ()
    ):
        return
    if not may_reset(host.tree):
        return
    for address in unit.addresses:
        try:
            host.reset(address, allow=("in-use",))
        except Refusal as refusal:
            reasons = "; ".join(each.summary for each in diagnostics_of(refusal))
            yield Problem(unit.id, f"cannot reset {address}: {reasons}")
        except VfiomgrError as error:
            yield Problem(unit.id, error.message, has_failed_reset=is_of_device(error))


def skipped_resets(tree: HostTree, found: Inventory) -> Iterator[Diagnostic]:
    """The resources whose devices are not reset although their settings say so."""
    for resource in found.resources:
        if resource.resets and not may_reset(tree):
            yield warning(
                "reset-skipped",
                f"devices of {resource.name} are not reset before containers start",
                (f"{PCI_DEVICES} is not writable",),
                "VFIO resets a device when it is opened and closed",
                "run the agent as a service: vfiomgr node manifests --unit vfiomgr-node.service",
                subject=resource.name,
            )
