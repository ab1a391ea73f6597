"""The commands below `vfiomgr vgpu`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.definitions.listing import list_defined
from vfiomgr.errors import forbid_alone, forbid_together
from vfiomgr.gpu.commands import instances, mode
from vfiomgr.libvirt.commands.connection import forbid_with_libvirt, libvirt_options
from vfiomgr.libvirt.commands.nodedev import list_mdevs
from vfiomgr.main.commands.definitions import add_commands
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.commands.active import list_active
from vfiomgr.vgpu.commands.create import create, parent_option, remove
from vfiomgr.vgpu.commands.types import list_types


@click.group("vgpu")
def vgpu() -> None:
    """Create, remove, define, start and stop vGPUs."""


add_commands(vgpu)


for _command in (create, remove, instances, mode):
    vgpu.add_command(_command)


@vgpu.command("list")
@flag("--defined", text="List definitions, active or not.")
@flag("--types", text="List types, and how many more fit on each GPU.")
@parent_option("Only types of this GPU or virtual function.")
@libvirt_options
@session_options(*READING, "timeout")
@pass_session
def list_vgpus(
    session: Session, *, defined: bool, types: bool, parent: str | None, uri: str | None
) -> None:
    """List active vGPUs, definitions or types.

    USED BY is the guest (of libvirt, Kata, or QEMU's -name), its process and its systemd unit; it
    is unknown without root. --libvirt lists the mediated devices that libvirt has, active and
    defined.

    With --types, AVAILABLE is the capacity of the GPU, not the sum over its virtual functions. "<="
    marks a maximum, if the driver does not report everything; "+N" counts vGPUs in GPU instances
    (MIG) that vgpu create would create, if no other type gets them. UNUSABLE is the memory (MiB)
    left over when the GPU is filled with this type. The last rows are the totals of all GPUs. NOTES
    says why a type is unavailable.

    \b
    Examples:
      vfiomgr vgpu list
      vfiomgr vgpu list --defined
      vfiomgr vgpu list --types
      vfiomgr vgpu list --types --parent 0000:08:00.0 --format json
      vfiomgr vgpu list --libvirt
      vfiomgr vgpu list --connect qemu+ssh://node7/system
    """
    if parent is not None and not types:
        forbid_alone("--parent", "--types", "vGPUs are listed for all GPUs")
    if defined and types:
        forbid_together("--defined", "--types", "one lists vGPUs, the other what can be created")
    if uri is not None:
        forbid_with_libvirt(defined=defined, types=types)
        list_mdevs(session, uri)
        return
    if types:
        list_types(session, parent)
    elif defined:
        list_defined(session)
    else:
        list_active(session)
