"""Rules of a layout that meet in one IOMMU group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.unit.devices import host_of, pci_device
from vfiomgr.errors import Refusal
from vfiomgr.layout.compare import binds, compare, plan_layout
from vfiomgr.layout.model import Layout
from vfiomgr.passthrough.steps import ChangeDriver
from vfiomgr.persistence.steps import SetNodeAccess

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def device(bus: int, **facts: Any) -> PciDevice:
    return replace(pci_device(f"0000:{bus:02x}:00.0"), iommu_group=7, name=f"GPU {bus}", **facts)


A, B, C = device(4), device(5), device(6)
APART = replace(device(9), iommu_group=9)
HOST = host_of(A, B, C, APART)
ON_VFIO: dict[str, Any] = {"driver": "vfio-pci", "driver_override": "vfio-pci"}


def layout(*rules: dict[str, Any]) -> ApplyLayout:
    document = Layout.model_validate({"devices": rules})
    return api.layout_request(None, "test", document)


def rule(device: PciDevice, state: str = "passthrough", **more: Any) -> dict[str, Any]:
    return {"select": {"address": str(device.address)}, "state": state, **more}


def refused(host: HostSnapshot, *rules: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan_layout(host, layout(*rules))
    return caught.value


def moves(plan: Plan) -> dict[str, str | None]:
    """Where each function goes; no function goes twice."""
    found = [step for step in plan.steps if isinstance(step, ChangeDriver)]
    assert len({step.device.address for step in found}) == len(found)
    return {str(step.device.address): step.after.driver for step in found}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("state", ["host", "sriov"])
def test_a_group_that_one_rule_takes_has_no_member_that_another_keeps(
    state: str, *, is_first: bool
) -> None:
    kept = rule(B, state, **({"count": 1} if state == "sriov" else {}))
    rules = [rule(A, with_group=True), kept]
    error = refused(HOST, *(rules if is_first else reversed(rules)))
    first, second = (1, 2) if is_first else (2, 1)
    assert f"{B} is {state} in rule {second} (address {B.address})" in error.message
    assert f"rule {first} (address {A.address}) includes it with IOMMU group 7" in error.message
    assert "give its functions one state, or move a device to a slot" in error.hint


def test_a_member_that_would_come_back_to_a_host_driver_is_in_the_way() -> None:
    host = host_of(A, replace(B, **ON_VFIO), replace(C, driver=None))
    error = refused(host, rule(A), rule(B, "host"))
    assert f"{B} is host in rule 2" in error.message
    assert f"{A} of the same IOMMU group 7 is passthrough in rule 1" in error.message


def test_a_member_without_a_driver_is_in_nobodys_way() -> None:
    host = host_of(A, replace(B, driver=None), replace(C, driver=None))
    assert moves(plan_layout(host, layout(rule(A), rule(B, "host")))) == {
        str(A.address): "vfio-pci"
    }


@pytest.mark.parametrize("with_group", [True, False])
def test_a_group_has_one_owner(*, with_group: bool) -> None:
    host = host_of(A, B)
    first, second = rule(A, owner="1000:36", with_group=with_group), rule(B, owner="2000")
    error = refused(host, first, second)
    assert (
        "IOMMU group 7 has only one node: rule 1 (address 0000:04:00.0) gives it to 1000:36"
        in str(error)
    )
    assert "but rule 2 (address 0000:05:00.0) gives it to 2000 (for 0000:05:00.0)" in str(error)
    assert "one owner" in error.hint
    for owner in ({}, {"owner": "1000:36"}):
        plan = plan_layout(host, layout(first, rule(B, **owner)))
        given = {s.after.uid for s in plan.steps if isinstance(s, SetNodeAccess)}
        assert given == {1000}


def test_who_is_selected_by_no_rule_goes_with_the_first_and_others_by_their_own() -> None:
    rules = [
        rule(A, with_group=True, driver="vfio-pci"),
        rule(B, with_group=True, driver="nvgrace_gpu_vfio_pci"),
    ]
    plan = plan_layout(HOST, layout(*rules))
    assert moves(plan) == {
        str(A.address): "vfio-pci",
        str(B.address): "nvgrace_gpu_vfio_pci",
        str(C.address): "vfio-pci",
    }
    done = host_of(
        replace(A, **ON_VFIO),
        replace(B, driver="nvgrace_gpu_vfio_pci"),
        replace(C, **ON_VFIO),
    )
    assert compare(done, layout(*rules)).differences == ()
    assert [len(others) for _, others in binds(HOST, layout(*rules))] == [1, 2]


def test_rules_that_clash_keep_no_other_device_from_its_turn() -> None:
    compared = compare(HOST, layout(rule(A, with_group=True), rule(B, "host"), rule(APART)))
    refused_parts = {part.name for part in compared.parts if part.diagnostics}
    assert refused_parts == {str(A.address), str(B.address)}
    assert [part.name for part in compared.parts if part.plan.steps] == [str(APART.address)]


def test_a_clash_is_told_though_all_is_as_each_rule_wants_it() -> None:
    host = host_of(replace(A, **ON_VFIO), B)
    compared = compare(host, layout(rule(A, with_group=True), rule(B, "host")))
    assert [part.differences for part in compared.parts] == [(), ()]
    assert compared.bundles == ((str(A.address),), (str(B.address),)), "and not passed over"
    assert all("includes it with IOMMU group 7" in d.found for d in compared.differences)


# ---- a group that is changed together


def test_what_shares_a_group_is_changed_together_and_refused_together() -> None:
    both = layout(rule(A, with_group=True), rule(B), rule(APART))
    assert compare(HOST, both).bundles == (
        (str(A.address), str(B.address)),
        (str(APART.address),),
    )
    silent = host_of(A, replace(B, is_responsive=False), C, APART)
    parts = {part.name: part for part in compare(silent, both).parts}
    (diagnostic,) = parts[str(A.address)].diagnostics
    assert diagnostic.summary == (
        f"IOMMU group 7 can only be passed through entirely, and its part {B.address} is refused"
    )
    assert "power-cycle" in diagnostic.remedy
    assert not parts[str(A.address)].plan.steps
    assert parts[str(APART.address)].plan.steps


def test_a_group_that_guests_have_already_is_changed_one_by_one() -> None:
    host = host_of(replace(A, **ON_VFIO), replace(B, **ON_VFIO))
    driver = "nvgrace_gpu_vfio_pci"
    compared = compare(host, layout(rule(A, driver=driver), rule(B, driver=driver)))
    assert compared.bundles == ((str(A.address),), (str(B.address),))
