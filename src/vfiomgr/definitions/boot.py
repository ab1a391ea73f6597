"""What starts autostart vGPUs at boot: mdevctl's udev rule, or services of vfiomgr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.definitions.service import (
    FILES,
    INSTANCE,
    RULE,
    SERVICE,
    WANTED,
    render_instance,
    render_registration_rule,
    render_service,
    render_wanted,
)
from vfiomgr.persistence.plan import Part
from vfiomgr.persistence.steps import ReplaceFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.definitions.model import DefinitionFacts, GpuDefinition, VgpuDefinition
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot

_BY_HAND = "run `vfiomgr vgpu restore --boot` at boot, after the drivers are loaded"


def exchange(
    host: HostSnapshot,
    mdevs: Sequence[VgpuDefinition],
    gpus: Sequence[GpuDefinition],
    program: str | None,
) -> Part:
    """Return the steps to the files that these definitions need, and notes.

    Without a program (vfiomgr runs as a Python module) nothing new is written.
    """
    needs_rule = not host.defined.is_started_by_mdevctl and any(d.autostart for d in mdevs)
    if not needs_rule and not any(gpu.autostarting for gpu in gpus):
        return Part(tuple(_replaced(host.defined, dict.fromkeys(FILES))))
    notes = tuple(_rule_notes(host.defined)) if needs_rule else ()
    if not host.has_systemd:
        return Part(notes=(*notes, f"systemd not found: {_BY_HAND}"))
    if program is None:
        is_there = host.defined.file(RULE if needs_rule else SERVICE) is not None
        why = "vfiomgr is not installed as a command, so no service can run it"
        return Part(notes=notes if is_there else (*notes, f"{why}: {_BY_HAND}"))
    wanted: dict[str, str | None] = {SERVICE: render_service(program), WANTED: render_wanted()}
    wanted[INSTANCE] = render_instance(program) if needs_rule else None
    wanted[RULE] = render_registration_rule() if needs_rule else None
    return Part(tuple(_replaced(host.defined, wanted)), notes)


def _replaced(facts: DefinitionFacts, wanted: dict[str, str | None]) -> Iterator[Step]:
    """The steps to the wanted files, services before what starts them."""
    for path, after in sorted(wanted.items(), key=lambda item: FILES.index(item[0])):
        before = facts.file(path)
        if before != after:
            yield ReplaceFile(path, before, after)


def _rule_notes(facts: DefinitionFacts) -> Iterator[str]:
    rule = facts.mdevctl
    if rule is not None and not rule.has_program:
        yield f"vfiomgr starts it, because {rule.path} runs {rule.program}, which does not exist"
