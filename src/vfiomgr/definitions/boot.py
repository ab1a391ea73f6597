"""What starts autostart vGPUs at boot: mdevctl's udev rule, or systemd units and a rule of vfiomgr.

The service starts all vGPUs once per boot. Its instance starts those of one parent when it
registers with the kernel (mdev_register_parent sends a `change` event with MDEV_STATE), so that
vGPUs stopped on other parents stay stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.definitions.model import FILES, INSTANCE, RULE, SERVICE, WANTED
from vfiomgr.documents.text import sealed
from vfiomgr.persistence.model import SANDBOX, require_plain
from vfiomgr.persistence.part import Part
from vfiomgr.persistence.steps import ReplaceFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.definitions.model import DefinitionFacts, GpuDefinition, VgpuDefinition
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot


_HEAD = "# vfiomgr: removed with the last autostart vGPU.\n"
_AFTER = "systemd-modules-load.service nvidia-vgpud.service nvidia-vgpu-mgr.service"
_BEFORE = (
    "libvirtd.service virtqemud.service virtnodedevd.service "
    "kubelet.service containerd.service crio.service"
)


def render_service(program: str) -> str:
    """Render the unit for the boot, which runs before services that assign vGPUs to guests."""
    return sealed(f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot
{SANDBOX}""")


def render_instance(program: str) -> str:
    """Render the unit for one parent, named by the instance."""
    return sealed(f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs of %i
After={_AFTER}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot --parent %i
{SANDBOX}""")


def render_wanted() -> str:
    """Render the drop-in that starts the service at boot."""
    return sealed(f"{_HEAD}[Unit]\nWants={SERVICE.name}\n")


def render_registration_rule() -> str:
    """Render the rule that starts an instance for each parent with definitions.

    SYSTEMD_WANTS is not used: it applies when a device appears, not when it registers again.
    """
    unit = INSTANCE.name.replace("@", "@$kernel")
    return sealed(f"""\
{_HEAD}ACTION=="change", ENV{{MDEV_STATE}}=="registered", TEST=="/etc/mdevctl.d/$kernel", \\
  RUN+="/bin/systemctl --no-block start {unit}"
""")


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
    if not host.files.has_systemd:
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
