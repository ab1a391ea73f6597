"""QEMU as a backend: what a release of it has for a guest, and its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.guests.device import units_of
from vfiomgr.guests.memory import within_iommu
from vfiomgr.guests.options import check_options, check_qemu, check_together
from vfiomgr.guests.plan import plan_guest
from vfiomgr.guests.vf_token import diagnostics as vf_token_diagnostics
from vfiomgr.qemu.arguments import arguments_of
from vfiomgr.qemu.model import GENERIC_INITIATOR, VF_TOKEN, QemuPlan
from vfiomgr.qemu.render import command_line
from vfiomgr.units import Version, format_cpulist, size
from vfiomgr.value import Value
from vfiomgr.vgpu.steps import DRIVER

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice, GuestPlan, GuestRequest
    from vfiomgr.snapshot.model import HostSnapshot

_HOW = "pass the token: {device}"
_PCI = "vfio-pci"


class QemuBackend(Value):
    """QEMU of a release; what depends on the release is not checked if it is unknown."""

    qemu: Version | None = None

    def plan(self, host: HostSnapshot, request: GuestRequest) -> QemuPlan:
        """Plan the guest and its arguments.

        Raises:
            UnknownDevice: the host has no such device or vGPU.
            UsageError: options contradict each other.
            Refusal: the host or QEMU does not support it; the message names the remedy.
        """
        units = units_of(host, request.devices)
        check_together(units)
        for unit in units:
            self._check(unit)
        refuse_if_any(vf_token_diagnostics(host, units, _HOW))
        request = within_iommu(host, request, units)
        guest = plan_guest(host, request, units)
        if any(device.options.acpi_nodes is not None for device in guest.devices):
            self._require(GENERIC_INITIATOR, "acpi-generic-initiator", request.name)
        arguments = arguments_of(request, guest)
        notes = (*guest.notes, *_notes(request, guest), *_uuid_notes(host, guest.seen))
        return QemuPlan(request, guest, arguments, notes)

    def render(self, plan: QemuPlan) -> str:
        """The arguments, one per line."""
        return command_line(plan.arguments)

    def _check(self, unit: GuestDevice) -> None:
        if unit.model not in (None, _PCI):
            message = f"cannot assign vGPU {unit.name}: it is of {unit.model}, and not a PCI device"
            raise UsageError(message, "assign one whose device API is vfio-pci")
        check_options(unit)
        check_qemu(unit, self.qemu)
        if unit.options.vf_token is not None:
            self._require(VF_TOKEN, "vf-token", unit.name)

    def _require(self, since: Version, what: str, subject: str) -> None:
        if self.qemu is not None and self.qemu < since:
            message = f"{what} for {subject} needs QEMU {since} or later; this is {self.qemu}"
            refuse("qemu-too-old", subject, message, f"install QEMU {since} or later")


def _notes(request: GuestRequest, guest: GuestPlan) -> Iterator[str]:
    """Settings that the printed arguments do not include."""
    if guest.memory.locked_bytes:
        kib = guest.memory.locked_bytes // 1024
        locked = size(guest.memory.locked_bytes)
        yield f"QEMU locks {locked} of memory: a user other than root needs ulimit -l {kib}"
    if guest.cpus.emulator:
        near = format_cpulist(guest.cpus.emulator)
        yield f"QEMU cannot pin CPUs: run it with taskset --cpu-list {near}"
    if request.firmware == "efi":
        yield "add the firmware: -drive if=pflash,unit=0,readonly=on,format=raw,file=OVMF_CODE.fd"
    shown = [device.name for device in guest.seen if device.options.display]
    if shown:
        yield f"the display of {shown[0]} needs a front end with OpenGL, e.g. -display egl-headless"


def _uuid_notes(host: HostSnapshot, devices: Iterable[GuestDevice]) -> Iterator[str]:
    """NVIDIA's plugin reads it from the command line (vGPU user guide, KVM: -uuid vm-uuid)."""
    vgpus = filter(None, (host.vgpus.named(device.name) for device in devices))
    parents = filter(None, (host.device_named(vgpu.parent) for vgpu in vgpus))
    if any(parent.driver == DRIVER for parent in parents):
        yield "NVIDIA's vGPUs need the UUID of the guest: add -uuid UUID, e.g. -uuid $(uuidgen)"
