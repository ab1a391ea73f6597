"""Rules about domains that libvirt's hook binds devices for: what it would lack or refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.model.intent import Bind
from vfiomgr.model.libvirt_hook import NAMESPACE, OPT_IN, SCRIPT
from vfiomgr.model.readiness import Finding
from vfiomgr.planner.passthrough import plan_bind
from vfiomgr.planner.preflight.situation import driver_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.planner.preflight.situation import Situation


def not_installed(situation: Situation) -> Iterator[Finding]:
    """A domain that asks for the hook, and no script that libvirt would run."""
    needs = situation.hook_needs
    names = (*map(str, needs.functions), *needs.vgpus)
    if not names or situation.host.file(SCRIPT) is not None:
        return
    yield Finding(
        "hook-not-installed",
        "blocker",
        f"the hook is to make {', '.join(names)} ready, and it is not installed",
        (_mark(situation), f"{SCRIPT} is not there"),
        "libvirt runs no script before the start, so nobody binds the devices",
        "vfiomgr libvirt hook install, and restart libvirtd or virtqemud once",
    )


def refused(situation: Situation) -> Iterator[Finding]:
    """The hook has the guards of `vfiomgr bind`: where one objects, the guest does not start."""
    functions = situation.hook_needs.functions
    stuck = {taken.device.address for taken in situation.functions if taken.device.stuck}
    if not functions or stuck.intersection(functions):
        return  # of a function that is stuck another rule tells
    try:
        plan_bind(situation.host, Bind(functions))
    except Refusal as refusal:
        drivers = (t.device for t in situation.functions if t.device.address in functions)
        yield Finding(
            "hook-refused",
            "blocker",
            refusal.message,
            (_mark(situation), *map(driver_of, drivers)),
            "the hook binds with the guards of vfiomgr bind, and a guest whose hook fails does not "
            "start",
            f"{refusal.hint} (what is allowed is allowed to vfiomgr bind "
            f"{' '.join(map(str, functions))}, before the start)",
        )


def _mark(situation: Situation) -> str:
    line = situation.domain.line("metadata")
    return f"{situation.at(line)}: <metadata> with {OPT_IN} of {NAMESPACE}"
