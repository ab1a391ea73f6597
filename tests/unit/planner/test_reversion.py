"""Which steps of several runs are undone."""

from __future__ import annotations

from tests.unit.devices import pci_device
from vfiomgr.model.attribute_step import SetVgpuAttribute
from vfiomgr.model.host_step import ReplaceFile
from vfiomgr.model.quota_step import QuotaChange, SetQuotas
from vfiomgr.model.step import SetAutoprobe
from vfiomgr.planner.reversion import of_several

GPU = pci_device().identity


def quota(function: int, before: str, after: str, name: str = "exec_quantum_ms") -> SetQuotas:
    change = QuotaChange(f"vf{function}/profile/{name}", before, after)
    return SetQuotas(GPU, "/sys/devices/gpu/sriov_admin", function, (change,))


def attribute(name: str, before: str, after: str) -> SetVgpuAttribute:
    return SetVgpuAttribute("u", "/sys/bus/mdev/devices/u", name, before, after)


def test_what_a_later_run_changed_again_leads_back_to_before_the_first() -> None:
    first, again = quota(1, "0", "10"), quota(1, "10", "20")
    assert of_several([[first], [again]]) == (first,)
    off = SetAutoprobe(GPU, before=True, after=False)
    on = SetAutoprobe(GPU, before=False, after=True)
    assert of_several([[off], [on]]) == (off,)
    made, changed = ReplaceFile("/a", None, "1"), ReplaceFile("/a", "1", "2")
    assert of_several([[made], [changed]]) == (made,)


def test_quotas_of_two_functions_and_two_quotas_of_one_are_undone_each() -> None:
    runs = [[quota(1, "0", "10")], [quota(2, "0", "10")], [quota(1, "0", "5", "vram_quota")]]
    assert of_several(runs) == tuple(step for run in runs for step in run)


def test_two_attributes_of_a_vgpu_are_undone_each() -> None:
    runs = [[attribute("a", "0", "1")], [attribute("b", "0", "1")]]
    assert of_several(runs) == tuple(step for run in runs for step in run)


def test_a_step_that_changed_nothing_hides_no_later_one() -> None:
    check, change = quota(1, "10", "10"), quota(1, "10", "20")
    assert of_several([[check], [change]])[-1] == change
