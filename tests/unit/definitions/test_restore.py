from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.defined_vgpus import (
    AUTO,
    BROKEN,
    DEFINITION,
    DOCUMENT,
    FIRST,
    GPU,
    OTHER,
    UUID,
    definition_text,
    document,
    host_with,
    vendor_host,
    with_active,
)
from tests.unit.devices import with_facts
from tests.unit.vgpu.test_sriov_manage import KEPT
from vfiomgr.definitions.model import VgpuAttribute
from vfiomgr.definitions.requests import RestoreVgpus
from vfiomgr.definitions.restore import candidates
from vfiomgr.engine.registry import plan
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount
from vfiomgr.vgpu.model import GpuMode
from vfiomgr.vgpu.steps import (
    CreateMdev,
    RunSriovManage,
    SetHeterogeneous,
    SetMig,
    SetVgpuAttribute,
    SetVgpuType,
)

if TYPE_CHECKING:
    from vfiomgr.definitions.model import GpuDefinition
    from vfiomgr.snapshot.model import HostSnapshot

RESTORE = RestoreVgpus()
SECOND = replace(FIRST, address=PciAddress.parse("0000:41:00.5"), parameters="a=1", start="auto")
AUTOMATIC = replace(DOCUMENT, vgpus=(replace(FIRST, start="auto"), SECOND))


def test_what_starts_by_itself_is_made_and_nothing_else() -> None:
    manual = replace(DEFINITION, uuid=OTHER)
    made = plan(host_with(definition_text(AUTO), definition_text(manual)), RESTORE)
    assert [s.uuid for s in made.steps if isinstance(s, CreateMdev)] == [UUID]
    assert made.notes == ()
    assert plan(host_with(), RESTORE).is_empty


def test_what_is_there_is_left_and_one_that_was_cut_off_is_completed() -> None:
    defined = definition_text(replace(AUTO, attributes=(("a", "1"),)))
    same, other = (VgpuAttribute(UUID, "a", text) for text in ("1", ""))
    host = with_active(host_with(defined, attributes=(same,)))
    assert plan(host, RESTORE).is_empty
    (step,) = plan(with_active(host_with(defined, attributes=(other,))), RESTORE).steps
    assert isinstance(step, SetVgpuAttribute)
    (left,) = candidates(with_active(host_with(defined), "mtty-2"), RESTORE)
    assert "is a mtty-2 on mtty, but defined as mtty-1" in (left.why_not or "")


def test_one_that_cannot_be_made_is_told_and_keeps_no_other_from_it() -> None:
    waiting = replace(AUTO, uuid=OTHER, parent="mdpy")
    impossible = replace(AUTO, uuid=OTHER, type_id="mtty-9")
    host = host_with(definition_text(waiting), definition_text(impossible), definition_text(AUTO))
    made = plan(host, RESTORE)
    assert [s.uuid for s in made.steps if isinstance(s, CreateMdev)] == [UUID]
    assert made.notes[0].startswith(f"vGPU {OTHER} (mtty-1 on mdpy): device not found: mdpy; load")
    assert made.notes[1].startswith(f"vGPU {OTHER} (mtty-9 on mtty): mtty has no vGPU type mtty-9")
    assert [c.is_waiting for c in candidates(host, RESTORE)] == [True, False, False]


def test_parent_and_names_choose() -> None:
    other = replace(AUTO, uuid=OTHER)
    host = host_with(definition_text(AUTO), definition_text(other))
    assert plan(host, RestoreVgpus("mdpy")).is_empty
    made = plan(host, RestoreVgpus("mtty", only=(OTHER,)))
    assert [s.uuid for s in made.steps if isinstance(s, CreateMdev)] == [OTHER]


def test_at_boot_mdevctl_is_left_what_its_rule_starts() -> None:
    boot = RestoreVgpus(boot=True)
    assert plan(host_with(definition_text(AUTO)), boot).is_empty
    for rule in (None, BROKEN):
        assert plan(host_with(definition_text(AUTO), mdevctl=rule), boot).steps


# ---- virtual functions of the vendor's own interface


def without_functions(
    definition: GpuDefinition, *, driver: str = "igb", mode: GpuMode | None = None
) -> HostSnapshot:
    """A host whose GPU has lost its virtual functions, as after a reboot."""
    host = vendor_host(document(definition), mode=mode)
    gpu = replace(GPU, driver=driver, virtual_functions=(), sriov_numvfs=0)
    gpu = replace(gpu, sriov_drivers_autoprobe=True)
    return with_facts(host, devices=(gpu,), vgpu_parents=(), vgpus=())


def test_types_and_parameters_come_back_where_functions_are_there() -> None:
    made = plan(vendor_host(document(AUTOMATIC)), RESTORE)
    steps = [s for s in made.steps if isinstance(s, SetVgpuType | SetVgpuAttribute)]
    assert [type(step) for step in steps] == [SetVgpuType, SetVgpuAttribute]
    assert [c.plan is not None for c in candidates(vendor_host(document(AUTOMATIC)), RESTORE)]
    only = plan(vendor_host(document(AUTOMATIC)), RestoreVgpus("0000:41:00.4"))
    assert only.is_empty


def test_virtual_functions_come_first_and_their_vgpus_follow() -> None:
    host = without_functions(AUTOMATIC)
    first, *others = candidates(host, RESTORE)
    assert (first.name, [c.after for c in others]) == ("0000:41:00.0", ["0000:41:00.0"] * 2)
    made = plan(host, RESTORE)
    assert [s for s in made.steps if not isinstance(s, SetAutoprobe)] == [
        SetVfCount(GPU.identity, 0, 2)
    ]
    assert made.notes[0] == (
        "vGPU 0000:41:00.4 (NVIDIA L40S-2Q on 0000:41:00.4): starts after 0000:41:00.0 is ready"
    )
    assert plan(without_functions(DOCUMENT), RESTORE).is_empty


def test_the_vendors_program_makes_its_functions_and_their_mode() -> None:
    mixed = replace(AUTOMATIC, heterogeneous=True)
    host = with_facts(
        without_functions(mixed, driver="nvidia"), has_sriov_manage=True, host_uses=KEPT
    )
    made = plan(host, RESTORE)
    assert [step.kind for step in made.steps] == [RunSriovManage.kind, SetHeterogeneous.kind]


def test_other_virtual_functions_than_defined_are_not_made_anew() -> None:
    more = replace(SECOND, address=PciAddress.parse("0000:41:01.0"))
    definition = replace(AUTOMATIC, virtual_functions=16, vgpus=(*AUTOMATIC.vgpus, more))
    found = candidates(vendor_host(document(definition)), RESTORE)
    assert all(
        "has 2 virtual functions other than those defined" in (c.why_not or "") for c in found
    )


def idle_host(
    definition: GpuDefinition, *, heterogeneous: bool | None = False, mig: bool | None = False
) -> HostSnapshot:
    """A GPU of NVIDIA's whose virtual functions are there, and no vGPU."""
    mode = GpuMode("0000:41:00.0", heterogeneous, mig, framebuffer=None)
    host = vendor_host(document(definition), mode=mode)
    gpu, *functions = (replace(device, driver="nvidia") for device in host.devices)
    devices = (replace(gpu, sriov_numvfs=gpu.sriov_totalvfs), *functions)
    return with_facts(host, devices=devices, vgpus=(), has_sriov_manage=True, host_uses=KEPT)


MIXED = replace(AUTOMATIC, heterogeneous=True)
INSTANCES = replace(AUTOMATIC, mig=("1g.6gb",))


@pytest.mark.parametrize(
    ("host", "steps"),
    [
        pytest.param(idle_host(MIXED), [SetHeterogeneous], id="one size"),
        pytest.param(
            idle_host(INSTANCES), [RunSriovManage, SetMig, RunSriovManage], id="without MIG"
        ),
    ],
)
def test_modes_that_are_defined_are_set_while_there_is_no_vgpu(
    host: HostSnapshot, steps: list[type]
) -> None:
    first, *others = candidates(host, RESTORE)
    assert first.plan is not None
    assert [type(step) for step in first.plan.steps] == steps
    assert [c.after for c in others] == ["0000:41:00.0"] * 2
    busy = with_facts(host, vgpus=vendor_host().vgpus.active)
    found = candidates(busy, RESTORE)
    assert all("vfiomgr vgpu remove 0000:41:00.4" in (c.why_not or "") for c in found)


@pytest.mark.parametrize(
    "host",
    [
        idle_host(AUTOMATIC, heterogeneous=True),
        idle_host(MIXED, heterogeneous=None, mig=None),
        idle_host(INSTANCES, mig=True),
    ],
    ids=["more freedom", "nothing is told", "as defined"],
)
def test_modes_that_do_no_harm_are_left(host: HostSnapshot) -> None:
    assert [c.after for c in candidates(host, RESTORE)] == [None, None]
    assert plan(host, RESTORE).steps


def test_mig_that_is_not_defined_is_left_and_what_ends_it_is_told() -> None:
    host = idle_host(AUTOMATIC, mig=True)
    alone = with_facts(host, devices=(replace(host.devices[0], sriov_numvfs=0),), vgpu_parents=())
    for one in (host, alone):
        assert plan(one, RESTORE).is_empty
        for found in candidates(one, RESTORE):
            assert "is in MIG mode, but its vGPUs are defined without" in (found.why_not or "")
            remedy = "vfiomgr vgpu mode 0000:41:00.0 --no-mig; then run: vfiomgr vgpu restore"
            assert remedy in (found.why_not or "")


def test_mig_comes_before_the_virtual_functions() -> None:
    host = idle_host(INSTANCES)
    gpu = replace(host.devices[0], sriov_numvfs=0, virtual_functions=())
    alone = with_facts(host, devices=(gpu,), vgpu_parents=())
    made = plan(alone, RESTORE)
    assert [step.kind for step in made.steps] == [SetMig.kind, RunSriovManage.kind]
    assert made.steps[1] == RunSriovManage(gpu.identity, before=0, after=32)


def test_functions_are_made_before_modes_are_looked_at() -> None:
    mode = GpuMode("0000:41:00.0", heterogeneous=False, mig=False, framebuffer=None)
    host = without_functions(replace(AUTOMATIC, heterogeneous=True), mode=mode)
    assert any(isinstance(step, SetVfCount) for step in plan(host, RESTORE).steps)


def test_another_gpu_at_the_address_is_left_alone_and_an_absent_one_awaited() -> None:
    other = replace(AUTOMATIC, gpu=replace(GPU.identity, device_id="2222"))
    found = candidates(vendor_host(document(other)), RESTORE)
    assert all("is a different device" in (c.why_not or "") for c in found)
    host = vendor_host(document(AUTOMATIC))
    absent = candidates(with_facts(host, devices=()), RESTORE)
    assert all(c.is_waiting for c in absent)
