"""What each step does to the host, and how it makes sure of it.

An action leads to the state that its step names from wherever the host is: taken a second time,
or after it was interrupted in the middle, it does only what is missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from vfiomgr import paths
from vfiomgr.engine.load_module import LoadModule
from vfiomgr.engine.verified_write import becomes_true, explaining, require_same_device
from vfiomgr.errors import HostError
from vfiomgr.passthrough import apply as passthrough_apply
from vfiomgr.passthrough import reset_apply
from vfiomgr.passthrough.apply import NODE_DEADLINE, let_udev_finish
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    ForgetOrigin,
    ReleaseDriver,
    RememberOrigin,
    RequireAnswer,
    ResetFunction,
    SetResetMethod,
    probe_file,
)
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci import original_state, vfio_drivers
from vfiomgr.pci.model import is_vfio_driver
from vfiomgr.persistence.apply import configure
from vfiomgr.persistence.steps import RebuildInitramfs, ReplaceFile, SetNodeAccess
from vfiomgr.sriov import apply as sriov_apply
from vfiomgr.sriov import nvidia_apply
from vfiomgr.sriov.steps import SetAutoprobe, SetQuotas, SetVfCount
from vfiomgr.vgpu import apply as vgpu_apply
from vfiomgr.vgpu.apply import set_attribute
from vfiomgr.vgpu.mig import apply as mig_apply
from vfiomgr.vgpu.mig.steps import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.engine.errno_hints import Operation
    from vfiomgr.engine.steps import Step
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import DeviceIdentity, PciAddress
    from vfiomgr.pci.original_state import DriverState
    from vfiomgr.vgpu.mig.steps import ModeStep


def perform(step: Step, tree: HostTree) -> None:
    """Carry out one step and verify its effect.

    Raises:
        HostError: the host did not get into the state that the step names.

    """
    match step:
        case LoadModule():
            _load_module(tree, step)
        case RememberOrigin() | ForgetOrigin():
            _keep_origin(tree, step)
        case ChangeDriver() | ReleaseDriver():
            _move(tree, step)
        case AwaitVfioNode():
            _await_vfio_node(tree, step)
        case CreateMdev() | RemoveMdev() | SetVgpuType() | SetVgpuAttribute():
            _perform_on_vgpu(step, tree)
        case (
            RunSriovManage() | SetHeterogeneous() | SetMig() | SetGpuInstances() | SetPersistence()
        ):
            _perform_on_gpu(step, tree)
        case SetAutoprobe() | SetVfCount() | SetQuotas():
            _divide(step, tree)
        case SetResetMethod() | ResetFunction() | RequireAnswer():
            _perform_on_function(step, tree)
        case ReplaceFile() | RebuildInitramfs() | SetNodeAccess():
            configure(tree, step)
        case _ as never:
            assert_never(never)


def _move(tree: HostTree, step: ChangeDriver | ReleaseDriver) -> None:
    if isinstance(step, ChangeDriver):
        _change_driver(tree, step.device, step.before, step.after)
    else:
        _release_driver(tree, step)


def _keep_origin(tree: HostTree, step: RememberOrigin | ForgetOrigin) -> None:
    if isinstance(step, RememberOrigin):
        original_state.write_origin(tree, step.origin)
    else:
        original_state.remove_origin(tree, step.origin)


def _perform_on_vgpu(
    step: CreateMdev | RemoveMdev | SetVgpuType | SetVgpuAttribute, tree: HostTree
) -> None:
    if isinstance(step, SetVgpuAttribute):
        set_attribute(tree, step)
    else:
        vgpu_apply.perform(tree, step)


def _perform_on_gpu(step: RunSriovManage | SetGpuInstances | ModeStep, tree: HostTree) -> None:
    """Steps that NVIDIA's own programs carry out."""
    match step:
        case RunSriovManage():
            nvidia_apply.run_sriov_manage(tree, step)
        case SetGpuInstances():
            mig_apply.set_instances(tree, step)
        case _:
            mig_apply.set_mode(tree, step)


def _divide(step: SetAutoprobe | SetVfCount | SetQuotas, tree: HostTree) -> None:
    """Steps about the virtual functions of a physical one."""
    match step:
        case SetAutoprobe():
            sriov_apply.set_autoprobe(tree, step)
        case SetVfCount():
            sriov_apply.set_vf_count(tree, step)
        case SetQuotas():
            sriov_apply.set_quotas(tree, step)


def _perform_on_function(
    step: SetResetMethod | ResetFunction | RequireAnswer, tree: HostTree
) -> None:
    """Steps that leave a function on its driver."""
    match step:
        case SetResetMethod():
            reset_apply.set_reset_method(tree, step)
        case ResetFunction():
            reset_apply.reset_function(tree, step)
        case RequireAnswer():
            reset_apply.require_answer(tree, step)


def require_life(step: Step, tree: HostTree) -> None:
    """Make sure that a function survived its change of drivers.

    Raises:
        HostError: its configuration space reads as all ones.

    """
    if isinstance(step, ChangeDriver) and not pci_facts.answers(tree, step.device.address):
        message = f"{step.device.address} fell off the bus: it reads as all ones"
        raise HostError(message, "only a power cycle of the device or the host brings it back")


def _load_module(tree: HostTree, step: LoadModule) -> None:
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        tree.load_module(step.module)
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        brought = vfio_drivers.driver_of_module(tree, step.module)
        other = f" but {brought}" if brought else ""
        message = f"the module {step.module} is loaded and brings no driver {step.driver}{other}"
        raise HostError(message, "run it again, or name the driver (--driver, in a layout driver)")


def _change_driver(
    tree: HostTree, device: DeviceIdentity, before: DriverState, target: DriverState
) -> None:
    address = device.address
    require_same_device(tree, device)
    reset_apply.tighten(tree, address, target)
    has_override = tree.exists(paths.pci_device(address) / "driver_override")
    current = tree.link_name(paths.pci_device(address) / "driver")
    override = _override_on_the_way(current, target)
    if has_override:
        _set_override(tree, address, override)
    elif before.driver is not None and is_vfio_driver(before.driver):
        passthrough_apply.withdraw(tree, device, before.driver)
    if current != target.driver:
        if current is not None:
            _unbind(tree, address)
        if target.driver is None:
            pass
        elif has_override:
            _probe(tree, address, replace(target, driver_override=override))
        else:
            passthrough_apply.bind_by_id(tree, device, target)
    _verify_driver(tree, address, target.driver)
    if has_override and override != target.driver_override:
        _set_override(tree, address, target.driver_override)
    if target.power_control is not None:
        _set_power_control(tree, address, target.power_control)
    reset_apply.loosen(tree, address, target)


def _override_on_the_way(current: str | None, target: DriverState) -> str | None:
    """The override with which the driver of a state can bind.

    A run that was cut off may have left a function on one driver with the override of another. No
    driver binds to it then, so that this override comes last.
    """
    is_contrary = target.driver_override not in (None, target.driver)
    if is_contrary and target.driver is not None and current != target.driver:
        return target.driver
    return target.driver_override


def _release_driver(tree: HostTree, step: ReleaseDriver) -> None:
    address = step.device.address
    require_same_device(tree, step.device)
    if tree.exists(paths.pci_device(address) / "driver_override"):
        _set_override(tree, address, None)
    if tree.link_name(paths.pci_device(address) / "driver") == step.before.driver:
        _unbind(tree, address)
    with explaining("probe", str(address)):
        tree.write(paths.PCI_DRIVERS_PROBE, str(address))
    if tree.link_name(paths.pci_device(address) / "driver") == step.before.driver:
        message = f"{address} went back to {step.before.driver}, which claims its identifiers"
        raise HostError(
            message, "look for vfio-pci.ids= on the kernel command line and in /etc/modprobe.d"
        )


def _set_override(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    if pci_facts.read_driver_state(tree, address).driver_override == driver:
        return
    with explaining("override", str(address)):
        tree.write(paths.pci_device(address) / "driver_override", driver or "")


def _set_power_control(tree: HostTree, address: PciAddress, control: str) -> None:
    if pci_facts.read_driver_state(tree, address).power_control == control:
        return
    with explaining("power", str(address)):
        tree.write(paths.pci_device(address) / "power/control", control)


def _unbind(tree: HostTree, address: PciAddress) -> None:
    with explaining("unbind", str(address)):
        tree.write(paths.pci_device(address) / "driver/unbind", str(address))


def _probe(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """drivers_probe succeeds when nothing matched; the driver's own `bind` tells why."""
    first = probe_file(target)
    operation: Operation = "probe" if first == paths.PCI_DRIVERS_PROBE else "bind"
    with explaining(operation, f"{address} to {target.driver}"):
        tree.write(first, str(address))
    bound = tree.link_name(paths.pci_device(address) / "driver")
    if bound is None and operation == "probe" and target.driver is not None:
        with explaining("bind", f"{address} to {target.driver}"):
            tree.write(paths.PCI_DRIVERS / target.driver / "bind", str(address))


def _verify_driver(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    bound = tree.link_name(paths.pci_device(address) / "driver")
    if bound != driver:
        wanted = driver or "no driver"
        message = f"{address} is on {bound or 'no driver'}, not on {wanted}, after the change"
        raise HostError(message, "see dmesg; another tool or a udev rule may have moved it")


def _await_vfio_node(tree: HostTree, step: AwaitVfioNode) -> None:
    group = paths.vfio_group_node(step.group)
    cdevs = paths.pci_device(step.device.address) / "vfio-dev"

    def is_there() -> bool:
        return tree.exists(group) or any(
            tree.exists(paths.VFIO_CDEVS / name) for name in tree.children(cdevs)
        )

    if not becomes_true(is_there, NODE_DEADLINE):
        message = f"{group} did not appear within {NODE_DEADLINE:.0f} seconds"
        raise HostError(message, "is udevd running, and /dev the host's own?")
    let_udev_finish(tree, group)
