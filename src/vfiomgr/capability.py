"""Capabilities: packages that provide steps, requests, diagnostics and commands.

A capability names the modules that the engine imports when it needs them. `values` hold the
classes of requests and steps, `plans` plan the requests, `applies` perform the steps, and `hooks`
take part in every change; they register their functions with the decorators of
`vfiomgr.engine.registry`. `rules` register the rules of checks (`vfiomgr.rules.runner`). Those of
vfiomgr itself are registered at the end of this module.
"""

from __future__ import annotations

from collections.abc import Mapping

from vfiomgr.value import Value


class Capability(Value):
    """A package, and the modules in it that are imported on demand."""

    package: str
    """Its dotted name: `vfiomgr.passthrough`. Modules are named relative to it."""
    values: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    applies: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    commands: Mapping[str, str] = {}
    """Commands that it adds to `vfiomgr`; each module has a function of the command's name."""


_KNOWN: dict[str, Capability] = {}


def register(*capabilities: Capability) -> None:
    """Register capabilities; one of the same package is replaced."""
    _KNOWN.update((capability.package, capability) for capability in capabilities)


def registered() -> tuple[Capability, ...]:
    """All capabilities in the order of registration."""
    return tuple(_KNOWN.values())


def added_commands() -> dict[str, tuple[str, str]]:
    """The commands that capabilities add: the module and the function of each name."""
    return {
        name: (f"{capability.package}.{module}", name.replace("-", "_"))
        for capability in _KNOWN.values()
        for name, module in capability.commands.items()
    }


register(
    Capability("vfiomgr.vgpu", values=("steps",), plans=("plan",), applies=("apply",)),
    Capability(
        "vfiomgr.passthrough",
        values=("steps", "reserve"),
        plans=("plan", "reserve", "reset"),
        applies=("apply",),
    ),
    Capability("vfiomgr.desktop", values=("steps",), applies=("apply",)),
    Capability("vfiomgr.laptop", values=("steps",), plans=("plan",), applies=("apply",)),
    Capability("vfiomgr.tuning", values=("steps",), plans=("plan",), applies=("apply",)),
    Capability("vfiomgr.check", rules=("plan", "console_rules")),
    Capability("vfiomgr.persistence", values=("steps",), plans=("plan",), applies=("apply",)),
    Capability(
        "vfiomgr.sriov",
        values=("steps",),
        plans=("plan", "quota_plan"),
        applies=("apply",),
    ),
    Capability(
        "vfiomgr.gpu", values=("requests",), plans=("plan", "switch"), hooks=("undo_guards",)
    ),
    Capability("vfiomgr.definitions", values=("requests",), plans=("plan", "start", "restore")),
    Capability(
        "vfiomgr.containers.cdi",
        values=("requests",),
        plans=("plan",),
        hooks=("requests",),
        rules=("rules", "check", "readers"),
    ),
    Capability(
        "vfiomgr.libvirt",
        values=("hook",),
        plans=("hook",),
        rules=("preflight.plan", "migration.domain_rules", "migration.target_rules"),
    ),
    Capability(
        "vfiomgr.layout",
        values=("requests",),
        plans=("compare", "revert", "boot"),
        hooks=("revert",),
        rules=("document",),
    ),
    Capability(
        "vfiomgr.kata",
        rules=(
            "explain.cluster",
            "plan",
            "explain.image",
            "explain.pod_to_shim",
            "explain.configuration",
            "explain.resources",
            "explain.devices",
            "explain.functions",
        ),
    ),
    Capability("vfiomgr.node", rules=("health",)),
    Capability("vfiomgr.uninstall", values=("requests",), plans=("plan",)),
)
