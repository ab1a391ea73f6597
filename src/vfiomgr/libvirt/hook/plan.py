"""What libvirt's hook changes on the host for a guest, and how to install and remove the hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.definitions.requests import StartVgpu, StopVgpu
from vfiomgr.diagnostic import Diagnostic, blocker, refuse, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.libvirt.hook.model import MODE, InstallHook, UninstallHook, render_script
from vfiomgr.passthrough.steps import Bind, ChangeDriver, Unbind
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciAddress, is_vfio_driver
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.engine.plan import Request
    from vfiomgr.libvirt.hook.model import GuestRecord
    from vfiomgr.libvirt.model import Domain
    from vfiomgr.snapshot.model import HostSnapshot

LOCK = "libvirt-hook"


class GuestNeeds(Value):
    """The devices of a guest that are not available to it yet."""

    functions: tuple[PciAddress, ...] = ()
    """Functions on host drivers, or in a group with others on host drivers."""
    vgpus: tuple[str, ...] = ()
    """vGPUs that are defined but not active."""

    def intents(self) -> Iterator[Request]:
        """The requests that make them available; vGPUs first, because these fail more often."""
        if self.vgpus:
            yield StartVgpu(self.vgpus)
        if self.functions:
            yield Bind(self.functions)


def needs_of(host: HostSnapshot, domain: Domain, record: GuestRecord) -> GuestNeeds:
    """What vfiomgr must bind or start for a guest: nothing that libvirt manages.

    A recorded device that is not bound comes from an interrupted run.

    Raises:
        Refusal: a vGPU is neither active nor defined.

    """
    functions: list[PciAddress] = []
    vgpus: list[str] = []
    diagnostics: list[Diagnostic] = []
    for hostdev in domain.hostdevs:
        device = host.device_named(hostdev.name)
        is_vgpu = hostdev.kind == "mdev" or (device is not None and host.is_vendor_function(device))
        if is_vgpu and host.vgpu(hostdev.name) is None:
            if _is_defined(host, hostdev.name):
                vgpus.append(hostdev.name)
            else:
                diagnostics.append(_unknown(hostdev.name))
        elif is_vgpu or device is None or hostdev.managed or hostdev.kind != "pci":
            continue  # of a function that is not there libvirt tells
        elif not device.is_on_vfio or blockers(host.group_members(device.iommu_group)):
            functions.append(device.address)
    refuse_if_any(diagnostics, frozenset())
    begun = (host.device_named(name) for name in record.functions)
    functions += [d.address for d in begun if d is not None and not d.is_on_vfio]
    return GuestNeeds(tuple(dict.fromkeys(functions)), tuple(vgpus))


def _is_defined(host: HostSnapshot, name: str) -> bool:
    names = {definition.uuid for definition in host.vgpu_definitions}
    return name in names or any(
        str(function.address) == name for gpu in host.defined.gpus for function in gpu.vgpus
    )


def _unknown(name: str) -> Diagnostic:
    return blocker(
        "vgpu-missing",
        name,
        f"no such vGPU: {name}",
        f"vfiomgr vgpu define {name} --type …, or vfiomgr vgpu create",
    )


def taken_by(plan: Plan) -> tuple[str, ...]:
    """The functions that a plan takes from host drivers."""
    return tuple(
        str(step.device.address)
        for step in plan.steps
        if isinstance(step, ChangeDriver)
        and is_vfio_driver(step.after.driver)
        and not is_vfio_driver(step.before.driver)
    )


def returns_of(host: HostSnapshot, record: GuestRecord) -> Iterator[Request]:
    """The requests that return what was taken for a guest and has not been returned yet."""
    functions = tuple(
        device.address
        for device in map(host.device_named, record.functions)
        if device is not None and (device.is_on_vfio or host.origin(device) is not None)
    )
    if functions:
        yield Unbind(functions, only=True)
    vgpus = tuple(name for name in record.vgpus if host.vgpu(name) is not None)
    if vgpus:
        yield StopVgpu(vgpus)


# ---- the hook itself


@plans(InstallHook)
def plan_install(host: HostSnapshot, request: InstallHook) -> Plan:
    """Install the hook in libvirt.

    Raises:
        Refusal: vfiomgr is not installed as a command that a script can run.

    """
    if request.program is None:
        message = "cannot run vfiomgr from a script: it is not installed as a command"
        remedy = "install vfiomgr as its README says, and run that command"
        refuse("hook-without-program", "", message, remedy)
    wanted = render_script(request.program)
    there = host.file(SCRIPT)
    if there == wanted:
        return Plan("install the hook", (), already=("the hook is already installed",))
    notes = ["enable it for a guest: vfiomgr libvirt hook install DOMAIN"]
    if there is None:
        notes.append(
            "restart libvirtd or virtqemud once: libvirt looks for hooks only when it starts "
            "(running guests continue)"
        )
    return Plan(
        summary="install the hook",
        steps=(ReplaceFile(SCRIPT, there, wanted, mode=MODE),),
        locks=(LOCK,),
        notes=tuple(notes),
    )


@plans(UninstallHook)
def plan_uninstall(host: HostSnapshot, _request: UninstallHook) -> Plan:
    """Remove the script; what it bound for running guests stays bound."""
    there = host.file(SCRIPT)
    if there is None:
        return Plan("uninstall the hook", (), already=("the hook is not installed",))
    return Plan(
        summary="uninstall the hook",
        steps=(ReplaceFile(SCRIPT, there, None, mode=MODE),),
        locks=(LOCK,),
        notes=(
            "devices of running guests stay bound; vfiomgr unbind returns them to the host",
            "from now on, bind the devices of these guests yourself before they start",
        ),
    )
