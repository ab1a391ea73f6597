"""Physical functions whose virtual ones a rule counts, and what becomes of these."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model.intent import Bind, SetVirtualFunctions, SwitchGpu
from vfiomgr.planner import guards, sriov, switch
from vfiomgr.planner.layout_functions import differences, virtual_to_guests, virtual_to_host
from vfiomgr.planner.layout_part import Case, Part, attempt, counted
from vfiomgr.planner.selection import moving_together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.layout import SriovRule
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.plan import Plan


def parts(case: Case, rule: SriovRule, device: PciDevice) -> Iterator[Part]:
    """A physical function with its number, and then what is to become of the virtual ones."""
    count = device.sriov_totalvfs or 1 if rule.count == "max" else rule.count
    wanted = counted(count, "virtual function")
    name = str(device.address)

    def numbered() -> Plan:
        after = case.autoprobe(device.address)
        instances = case.instances(device.address) if count else None
        if not device.is_on_vfio and device.sriov_numvfs == count:
            same = SetVirtualFunctions(
                device.address, count, autoprobe_after=after, instances_after=instances
            )
            return sriov.plan_set(case.host, same)
        guards.refuse_if_any(sriov.impossible(case.host, device, count), frozenset())
        goal = SwitchGpu(
            device.address,
            "vgpu",
            functions=count,
            allow=case.allow,
            autoprobe_after=after,
            instances_after=instances,
            only=case.is_shared(device),
            autoprobe=rule.functions == "host",
        )
        return switch.brought(case.host, goal)[0]

    functions = attempt(name, numbered, differences(case.host, [device], wanted))
    if device.iommu_group is not None:
        functions = replace(functions, groups=frozenset({device.iommu_group}))
    if rule.functions == "any" or not count:
        yield functions
    elif functions.differences:
        goes_to = "guests" if rule.functions == "passthrough" else "the host's drivers"
        yield replace(functions, later=(f"{name}: its {wanted} to {goes_to}",))
    else:
        yield functions
        yield from _virtual(case, rule, device)


def _virtual(case: Case, rule: SriovRule, physical: PciDevice) -> Iterator[Part]:
    """The virtual functions, but for those that another rule has."""
    name = str(physical.address)
    present = (case.host.device(a) for a in physical.virtual_functions if a not in case.others)
    for batch in moving_together(present):
        if rule.functions == "host":
            yield virtual_to_host(case, name, batch)
            continue
        bind = Bind(
            tuple(function.address for function in batch),
            driver=rule.driver,
            allow=case.allow,
            owner=case.owner(rule.owner),
        )
        yield virtual_to_guests(case, name, bind)
