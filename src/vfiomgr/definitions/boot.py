"""What starts vGPUs that are defined to start by themselves: mdevctl's rule, or a service."""

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

    from vfiomgr.definitions.model.gpu import GpuDefinition
    from vfiomgr.definitions.model.kept import DefinitionFacts
    from vfiomgr.definitions.model.vgpu import VgpuDefinition
    from vfiomgr.engine.step import Step
    from vfiomgr.snapshot.model import HostSnapshot

_BY_HAND = "run `vfiomgr vgpu restore --boot` at boot, once the drivers are loaded"


def exchange(
    host: HostSnapshot,
    mdevs: Sequence[VgpuDefinition],
    gpus: Sequence[GpuDefinition],
    program: str | None,
) -> Part:
    """From the files that are there to those that these definitions need, and what to be told.

    Without a program (a module of Python that somebody runs) nothing new is written.
    """
    needs_rule = not host.defined.is_started_by_mdevctl and any(d.autostart for d in mdevs)
    if not needs_rule and not any(gpu.autostarting for gpu in gpus):
        return Part(tuple(_replaced(host.defined, dict.fromkeys(FILES))))
    notes = tuple(_rule_notes(host.defined)) if needs_rule else ()
    if not host.has_systemd:
        return Part(notes=(*notes, f"no systemd here: {_BY_HAND}"))
    if program is None:
        is_there = host.defined.file(RULE if needs_rule else SERVICE) is not None
        why = "vfiomgr is no installed command here, so that no service can run it"
        return Part(notes=notes if is_there else (*notes, f"{why}: {_BY_HAND}"))
    wanted: dict[str, str | None] = {SERVICE: render_service(program), WANTED: render_wanted()}
    wanted[INSTANCE] = render_instance(program) if needs_rule else None
    wanted[RULE] = render_registration_rule() if needs_rule else None
    return Part(tuple(_replaced(host.defined, wanted)), notes)


def _replaced(facts: DefinitionFacts, wanted: dict[str, str | None]) -> Iterator[Step]:
    """The service before what starts it."""
    for path, after in sorted(wanted.items(), key=lambda item: FILES.index(item[0])):
        before = facts.file(path)
        if before != after:
            yield ReplaceFile(path, before, after)


def _rule_notes(facts: DefinitionFacts) -> Iterator[str]:
    rule = facts.mdevctl
    if rule is not None and not rule.has_program:
        yield f"{rule.path} would start it with {rule.program}, which is not there; vfiomgr does"
