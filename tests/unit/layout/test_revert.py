"""Which steps of several runs are undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.errors import Refusal
from vfiomgr.layout.requests import RevertLayout
from vfiomgr.layout.revert import of_several, plan_revert
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import QuotaChange, SetAutoprobe, SetQuotas, SetVfCount
from vfiomgr.users.model import DeviceUser, HostUse, UnknownUsers
from vfiomgr.vgpu.steps import RunSriovManage, SetPersistence, SetVgpuAttribute

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot

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


@pytest.mark.parametrize(
    "made", [RunSriovManage(GPU, before=0, after=2), SetVfCount(GPU, before=0, after=2)]
)
def test_a_function_that_somebody_moved_between_two_runs_stays_where_the_first_found_it(
    made: Step,
) -> None:
    back = ChangeDriver(GPU, DriverState("vfio-pci", "vfio-pci"), DriverState("nvidia", None))
    forgotten = DropOriginalState(
        OriginalState(GPU, DriverState("nvidia", None, "on"), "nvidia", "boot")
    )
    assert of_several([[made], [back, forgotten, made]]) == (made,)
    assert of_several([[back, forgotten, made], [back, forgotten, made]])[0] == back
    taken = back.inverse()
    assert of_several([[made], [taken]]) == (made, taken), "a run that was cut off, and its end"


def test_a_step_that_changed_nothing_hides_no_later_one() -> None:
    check, change = quota(1, "10", "10"), quota(1, "10", "20")
    assert of_several([[check], [change]])[-1] == change


# ---- what speaks against it

NODE = "/dev/nvme4n1"
PHYSICAL = replace(pci_device("0000:05:00.0"), driver="igb", iommu_group=5)
VIRTUAL = replace(
    pci_device("0000:05:10.0"),
    driver="igbvf",
    iommu_group=6,
    physical_function=PHYSICAL.address,
    nodes=(NODE,),
)
PHYSICAL = replace(PHYSICAL, virtual_functions=(VIRTUAL.address,), sriov_numvfs=1)
MADE = SetVfCount(PHYSICAL.identity, before=0, after=1)
GIVEN_BACK = ChangeDriver(
    VIRTUAL.identity, DriverState("vfio-pci", "vfio-pci"), DriverState("igbvf", None)
)
HOST = host_of(PHYSICAL, VIRTUAL)
ROUTE = HostUse(VIRTUAL.address, "default-route", "enp5s0v0")
ADDRESS = HostUse(VIRTUAL.address, "network", "interface enp5s0v0: address 192.0.2.5/24")
DISK = HostUse(VIRTUAL.address, "mounted-disk", "/dev/nvme4n1p1 on /srv")
USER = DeviceUser(NODE, 812, "dd")


@pytest.mark.parametrize("step", [MADE, GIVEN_BACK], ids=["goes with its number", "is moved"])
@pytest.mark.parametrize(
    ("host", "why", "allowance"),
    [
        (
            with_facts(HOST, host_uses=(ROUTE,)),
            "default route: interface enp5s0v0",
            "default-route",
        ),
        (
            with_facts(HOST, host_uses=(ADDRESS,)),
            "by the host's network: interface enp5s0v0",
            "in-use",
        ),
        (with_facts(HOST, host_uses=(DISK,)), "the host uses: /dev/nvme4n1p1", "mounted-disk"),
        (with_facts(HOST, users=(USER,)), r"is in use by: dd \(PID 812\)", "in-use"),
    ],
    ids=["route", "address", "disk", "node"],
)
def test_a_function_that_the_host_uses_is_not_taken_from_it(
    step: Step, host: HostSnapshot, why: str, allowance: Override
) -> None:
    with pytest.raises(Refusal, match=why) as caught:
        plan_revert(host, RevertLayout("test", (step,), ()))
    assert caught.value.message.startswith(str(VIRTUAL))
    assert caught.value.hint.endswith(f"or pass --allow {allowance}")
    assert "--function-only" not in caught.value.hint, "nothing can be left out of an undoing"
    allowed = RevertLayout("test", (step,), (), frozenset({allowance}))
    assert plan_revert(host, allowed).steps == (step.inverse(),)


@pytest.mark.parametrize("step", [MADE, GIVEN_BACK], ids=["goes with its number", "is moved"])
@pytest.mark.parametrize("kind", ["disks", "network", "processes", "open-files"])
def test_a_function_is_not_taken_from_the_host_while_its_users_cannot_be_read(
    step: Step, kind: str
) -> None:
    why = UnknownUsers(kind, "cannot read X", "mend X", (VIRTUAL.address,))  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=r"whether 0000:05:10\.0 .* is in use: cannot read X"):
        plan_revert(with_facts(HOST, unknown_users=(why,)), RevertLayout("test", (step,), ()))


# ---- persistence mode, in which NVIDIA's driver never lets a GPU go

TO_HOST = ChangeDriver(GPU, DriverState("vfio-pci", "vfio-pci"), DriverState("nvidia", None))
TO_GUEST = TO_HOST.inverse()
MADE_BY_PROGRAM = RunSriovManage(GPU, before=0, after=2)
OFF = SetPersistence(GPU, before=False, after=False)
END = SetPersistence(GPU, before=True, after=False)
KEPT = (HostUse(GPU.address, "persistence-mode", "nvidia-smi shows it as enabled"),)


def reverted(*steps: Step, uses: tuple[HostUse, ...] = ()) -> tuple[Step, ...]:
    host = with_facts(host_of(pci_device()), host_uses=uses)
    return plan_revert(host, RevertLayout("test", steps, ())).steps


def test_persistence_mode_is_no_obstacle_and_is_ended() -> None:
    assert reverted(TO_HOST, uses=KEPT) == (END, TO_GUEST)
    assert reverted(TO_HOST) == (TO_GUEST,)


def test_it_is_not_ended_twice() -> None:
    back = reverted(TO_HOST, OFF, MADE_BY_PROGRAM, uses=KEPT)
    assert back == (MADE_BY_PROGRAM.inverse(), OFF, TO_GUEST)


def test_it_is_ended_where_the_program_has_run_meanwhile() -> None:
    assert reverted(TO_HOST, MADE_BY_PROGRAM) == (MADE_BY_PROGRAM.inverse(), END, TO_GUEST)


def test_a_gpu_that_stays_on_its_driver_stays_in_it() -> None:
    assert reverted(MADE_BY_PROGRAM, uses=KEPT) == (MADE_BY_PROGRAM.inverse(),)
    assert reverted(TO_GUEST, uses=KEPT) == (TO_HOST,)
