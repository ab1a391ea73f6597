"""The built-in capabilities of vfiomgr; importing this module registers them with the engine."""

from __future__ import annotations

from vfiomgr.capability import Capability, register

BUILT_IN = (
    Capability("vfiomgr.engine", values=("load_module",), applies=("load_module",)),
    Capability(
        "vfiomgr.vgpu",
        values=(
            "steps",
            "mig.steps",
        ),
        plans=("plan",),
        applies=("apply", "mig.apply"),
        hooks=(),
    ),
    Capability(
        "vfiomgr.passthrough",
        values=("steps",),
        plans=("plan", "reset"),
        applies=("apply",),
        hooks=(),
    ),
    Capability(
        "vfiomgr.persistence",
        values=("steps",),
        plans=("plan", "file_changes"),
        applies=("apply",),
    ),
    Capability(
        "vfiomgr.sriov",
        values=("steps",),
        plans=("plan", "quota_plan"),
        applies=("apply",),
    ),
    Capability(
        "vfiomgr.gpu",
        values=("requests",),
        plans=(
            "plan",
            "switch",
        ),
        hooks=("undo_guards",),
    ),
    Capability("vfiomgr.definitions", values=("requests",), plans=("plan", "start", "restore")),
    Capability(
        "vfiomgr.containers.cdi",
        values=("requests",),
        plans=("plan",),
        hooks=(
            "requests",
            "apply",
        ),
    ),
    Capability("vfiomgr.libvirt.hook", values=("model",), plans=("plan",)),
    Capability(
        "vfiomgr.layout",
        values=("requests",),
        plans=("compare", "revert", "boot"),
        hooks=("revert",),
    ),
)

register(*BUILT_IN)
