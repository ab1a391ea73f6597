"""vGPUs of other tools that a layout adopts, and what else sets up its devices at boot.

A vGPU that fits a rule gets the record of vfiomgr's own vGPUs, with its creator; the vGPU itself is
not changed. Only a definition of mdevctl shows the creator of a mediated device; libvirt's
persistent node devices are such definitions. Functions have no record of a creator.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.engine.plan import Plan, Step
from vfiomgr.host.kernel import parameters
from vfiomgr.layout.parts import Difference
from vfiomgr.pci.drivers import parse_pci_ids
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.vgpu.model import Vgpu, adoption_mark, mark_file
from vfiomgr.vgpu.steps import AdoptVgpu

if TYPE_CHECKING:
    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu


def _definition(host: HostSnapshot, vgpu: Vgpu) -> VgpuDefinition | None:
    """The definition of mdevctl from which it was made, active or not."""
    same = (vgpu.uuid, vgpu.parent, vgpu.type)
    found = (d for d in host.defined.vgpus if (d.uuid, d.parent, d.type_id) == same)
    return next(found, None)


def creator(host: HostSnapshot, vgpu: Vgpu) -> str:
    """Who created a vGPU that vfiomgr did not create; `unknown` without a definition."""
    return "unknown" if _definition(host, vgpu) is None else "mdevctl"


def adoption(host: HostSnapshot, vgpus: Sequence[Vgpu], begun: Collection[str]) -> Plan:
    """Record vGPUs as vfiomgr's own; those that it created need nothing.

    `begun` are those that an interrupted run had created or adopted, of which only the latter have
    an adoption's mark.
    """
    marks = {mark.path: mark.text for mark in host.vgpus.marks}
    foreign = [
        one
        for one in vgpus
        if not host.vgpus.is_own(one)
        and (one.name not in begun or marks.get(mark_file(one)) == _mark(host, one))
    ]
    return Plan(
        "",
        tuple(step for one in foreign for step in _records(host, one)),
        locks=tuple(f"vgpu-{one.name}" for one in foreign),
        notes=tuple(_starters(host, vgpus)),
        resolves=tuple(one.name for one in foreign),
    )


def _records(host: HostSnapshot, vgpu: Vgpu) -> Iterator[Step]:
    left = {mark.path: mark.text for mark in host.vgpus.marks}
    file, text = mark_file(vgpu), _mark(host, vgpu)
    if left.get(file) != text:
        yield ReplaceFile(file, left.get(file), text)
    function = host.device_named(vgpu.name) if vgpu.uuid is None else None
    if function is not None:
        yield AdoptVgpu(function.identity, int(vgpu.type), before=False, after=True)


def _mark(host: HostSnapshot, vgpu: Vgpu) -> str:
    return adoption_mark(vgpu, creator(host, vgpu))


def differences(
    host: HostSnapshot, gpus: Iterable[Gpu], kept: Collection[Vgpu]
) -> list[Difference]:
    """The vGPUs to adopt."""
    return [
        Difference(
            gpu.name,
            gpu.device.name if gpu.device else "",
            f"{one}, {gpu.type_of(one) or one.type}, creator: {creator(host, one)}",
            "adopted",
        )
        for gpu in gpus
        for one in gpu.instances
        if one in kept and not host.vgpus.is_own(one)
    ]


def _starters(host: HostSnapshot, vgpus: Iterable[Vgpu]) -> Iterator[str]:
    """Definitions by which something else creates these vGPUs at boot too."""
    for vgpu in vgpus:
        found = _definition(host, vgpu)
        if found is not None and found.autostart:
            yield (
                f"mdevctl's definition also starts {vgpu} at boot ({found.path}); if the layout "
                "is installed and no guest names this UUID, disable it: "
                f"vfiomgr vgpu define {found.uuid} --parent {shlex.quote(found.parent)} --manual"
            )


def binders(host: HostSnapshot, functions: Collection[PciAddress]) -> Iterator[str]:
    """What else binds these functions to VFIO drivers at boot, besides driverctl."""
    devices = [host.device(address) for address in sorted(functions)]
    for place, text in _listed_ids(host):
        ids = [entry for _, entry in parse_pci_ids(text) if entry is not None]
        found = [str(d.address) for d in devices if any(entry.matches(d) for entry in ids)]
        if found:
            yield (
                f"{place} also binds {', '.join(found)} at boot; once the layout is installed, "
                f"remove ids={text} there"
            )


def _listed_ids(host: HostSnapshot) -> Iterator[tuple[str, str]]:
    """The effective IDs of vfio-pci; without a check of the host, of the kernel command line."""
    line = host.kernel.command_line
    if host.readiness is None:
        found = parameters(line, "vfio_pci.ids")[-1:]
        yield from (("the kernel command line (vfio-pci.ids)", one.value) for one in found)
        return
    for setting in host.readiness.parameter(line, "vfio_pci", "ids"):
        if not setting.ignored:
            yield setting.place, setting.value
