"""Definitions carried out on the fake kernel, with a fault at every operation."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import samples
from tests.fakes.nvidia.driver import SRIOV_MANAGE
from tests.fakes.vgpu_hosts import GPUS, l40s_host, mig_host, t4_host
from tests.unit.defined_vgpus import document, vendor_host
from tests.unit.definitions.test_restore import AUTOMATIC, without_functions
from tests.unit.devices import with_facts
from tests.unit.engine.faults import EveryFault, Stories, changes, kept, told
from vfiomgr.definitions import restore
from vfiomgr.definitions.model import (
    FILES,
    SERVICE,
    WANTED,
    FunctionDefinition,
    GpuDefinition,
    definition_file,
)
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu, StopVgpu, UndefineVgpu
from vfiomgr.definitions.restore import Restoration
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.run import Outcome
from vfiomgr.errors import HostError, RollbackIncomplete, RolledBack, WriteFailed
from vfiomgr.gpu.requests import SetGpuMode
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES, HostPath
from vfiomgr.pci.facts import read_identity, read_virtual_functions
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.apply import set_attribute
from vfiomgr.vgpu.nvidia_smi import read_mode
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu, SetVgpuAttribute

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
PARAMETERS = "nvidia/vgpu_params"
GPU = GPUS[0]
DEFINE = DefineVgpu(
    UUID,
    GPU,
    "T4-2Q",
    ((PARAMETERS, "a=1,b=2"),),
    autostart=True,
    program="/usr/bin/vfiomgr",
)
ALSO = replace(DEFINE, name=OTHER, attributes=())
FIRST, SECOND = "0000:21:00.4", "0000:21:00.5"
FUNCTION = replace(DEFINE, name=FIRST, parent=None, type="L40S-2Q")
START, STOP, RESTORE = StartVgpu((UUID,)), StopVgpu((UUID,)), RestoreVgpus()


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return t4(tmp_path)


def t4(tmp_path: Path) -> FakeKernel:
    """A T4 and mtty on a host with systemd."""
    kernel = t4_host(tmp_path).add_parent(samples.mtty())
    kernel.sysfs.make("/run/systemd/system")
    return kernel


def l40s(tmp_path: Path) -> FakeKernel:
    """An L40S on such a host."""
    kernel = l40s_host(tmp_path, total_vfs=2)
    kernel.sysfs.make("/run/systemd/system")
    return kernel


def attribute(kernel: FakeKernel, name: str = PARAMETERS, uuid: str = UUID) -> str | None:
    return kernel.read(MDEV_DEVICES / uuid / name)


def test_it_is_defined_started_stopped_and_forgotten(kernel: FakeKernel) -> None:
    before = kept(kernel)
    api.apply(DEFINE, tree=kernel)
    assert all(kernel.exists(file) for file in FILES)
    assert api.apply(START, tree=kernel).is_changed
    assert attribute(kernel) == "a=1,b=2"
    assert api.scan(kernel).vgpus.is_own(api.scan(kernel).vgpus.active[0])
    assert not api.apply(START, tree=kernel).is_changed
    assert not api.apply(DEFINE, tree=kernel).is_changed
    api.apply(STOP, tree=kernel)
    assert api.scan(kernel).vgpus.active == ()
    assert kernel.exists(definition_file(GPU, UUID))
    api.apply(UndefineVgpu((UUID,)), tree=kernel)
    assert changes(before, kept(kernel)) == {}


def test_an_active_one_is_defined_as_it_is(kernel: FakeKernel) -> None:
    api.apply(CreateVgpu((UUID,), "T4-1B"), tree=kernel)
    kernel.write(MDEV_DEVICES / UUID / PARAMETERS, "c=3\n")
    api.apply(DefineVgpu(UUID), tree=kernel)
    (definition,) = api.scan(kernel).defined.vgpus
    assert (definition.type_id, definition.attributes) == ("nvidia-222", ((PARAMETERS, "c=3"),))


MEDIATED: Stories = {
    "define": ((), DEFINE),
    "change": ((DEFINE,), replace(DEFINE, autostart=False, attributes=())),
    "undefine": ((DEFINE,), UndefineVgpu((UUID,))),
    "start": ((DEFINE,), START),
    "stop": ((DEFINE, START), STOP),
    "stop-both": ((DEFINE, ALSO, RESTORE), StopVgpu((UUID, OTHER))),
    "restore": ((DEFINE, ALSO), RESTORE),
    "remove": ((DEFINE, START, UndefineVgpu((UUID,))), RemoveVgpu((UUID,))),
}
FUNCTIONS: Stories = {
    "function-start": ((FUNCTION,), StartVgpu((FIRST,))),
    "function-stop": ((FUNCTION, RESTORE), StopVgpu((FIRST,))),
    "function-remove": ((FUNCTION, RESTORE, UndefineVgpu((FIRST,))), RemoveVgpu((FIRST,))),
    "function-undefine": ((FUNCTION,), UndefineVgpu((FIRST,))),
}
COURSES = told(MEDIATED, t4) | told(FUNCTIONS, l40s)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = COURSES


def test_a_reboot_takes_vgpus_and_leaves_what_they_are_to_be(kernel: FakeKernel) -> None:
    api.apply(DEFINE, tree=kernel)
    api.apply(START, tree=kernel)
    kernel.reboot()
    assert api.scan(kernel).vgpus.active == ()
    (found,) = api.restore(RESTORE, tree=kernel)
    assert (found.name, found.state, found.reason) == (UUID, "restored", None)
    assert attribute(kernel) == "a=1,b=2"
    (found,) = api.restore(RESTORE, tree=kernel)
    assert found.state == "already"


# ---- one that fails keeps no other from it


def test_the_others_are_restored_where_one_fails(kernel: FakeKernel) -> None:
    third = "00000000-0000-4000-8000-000000000003"
    for intent in (
        DEFINE,
        ALSO,
        replace(ALSO, name=third, parent="mtty", type="mtty-1"),
    ):
        api.apply(intent, tree=kernel)
    kernel.fail_writes(PARAMETERS, errno.EINVAL)
    found = {item.name: item for item in api.restore(RESTORE, tree=kernel)}
    assert {name: item.state for name, item in found.items()} == {
        UUID: "failed",
        OTHER: "restored",
        third: "restored",
    }
    assert "the driver does not accept this text" in (found[UUID].reason or "")
    assert [vgpu.name for vgpu in api.scan(kernel).vgpus.active] == sorted([OTHER, third])


def test_what_waits_for_its_parent_is_no_failure(kernel: FakeKernel) -> None:
    api.apply(replace(ALSO, parent="mdpy", type="mdpy-hd"), tree=kernel)
    (found,) = api.restore(RESTORE, tree=kernel)
    assert (found.state, found.parent) == ("waiting", "mdpy")
    assert (found.reason or "").startswith("device not found: mdpy; load its driver")


def test_what_does_not_fit_beside_the_others_is_told(kernel: FakeKernel) -> None:
    names = [f"00000000-0000-4000-8000-00000000000{n}" for n in range(3)]
    for name in names:
        api.apply(replace(ALSO, name=name, type="T4-8Q"), tree=kernel)
    found = api.restore(RESTORE, tree=kernel)
    assert [item.state for item in found] == ["restored", "restored", "failed"]
    assert "no capacity for another nvidia-233" in (found[-1].reason or "")


def test_an_interruption_ends_it_all(kernel: FakeKernel) -> None:
    api.apply(DEFINE, tree=kernel)
    api.apply(ALSO, tree=kernel)

    def interrupt(_path: HostPath, _text: str) -> None:
        raise KeyboardInterrupt

    kernel.before_write = interrupt
    with pytest.raises(RolledBack, match="interrupted"):
        api.restore(RESTORE, tree=kernel)
    kernel.before_write = None
    assert api.scan(kernel).vgpus.active == ()


def test_a_gpu_that_the_kernel_may_hold_is_left_alone(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for intent in (DEFINE, ALSO):
        api.apply(intent, tree=kernel)
    asked: list[tuple[str, ...]] = []

    def apply(part: RestoreVgpus, _work: object) -> None:
        asked.append(part.only)
        message = "the kernel has not returned"
        raise RollbackIncomplete(message)

    monkeypatch.setattr(restore, "apply", apply)
    found = api.restore(RESTORE, tree=kernel)
    assert asked == [(OTHER, UUID)]
    assert {item.reason for item in found} == {"the kernel has not returned"}


# ---- attributes


def step(name: str, after: str, before: str | None = None) -> SetVgpuAttribute:
    return SetVgpuAttribute(UUID, MDEV_DEVICES / UUID, name, before, after)


@pytest.fixture
def active(kernel: FakeKernel) -> FakeKernel:
    api.apply(CreateVgpu((UUID,), "T4-2Q"), tree=kernel)
    return kernel


def test_an_attribute_that_is_as_wanted_is_not_written(active: FakeKernel) -> None:
    set_attribute(active, step(PARAMETERS, "a=1, b=2"))
    before = len(active.writes)
    set_attribute(active, step(PARAMETERS, "a=1,b=2"))
    assert len(active.writes) == before


def test_no_parameters_are_written_as_nvidia_wants_them(active: FakeKernel) -> None:
    set_attribute(active, step(PARAMETERS, "a=1"))
    set_attribute(active, step(PARAMETERS, ""))
    assert active.writes[-1][1] == " \n"


def test_only_attributes_of_the_vgpu_are_written(active: FakeKernel) -> None:
    with pytest.raises(HostError, match="has no attribute nothing"):
        set_attribute(active, step("nothing", "1"))
    active.sysfs.put("/sys/bus/mdev/drivers/nvidia-vgpu-vfio/unbind", "")
    with pytest.raises(
        HostError,
        match="is a link to another object: /sys/bus/mdev/drivers/nvidia-vgpu-vfio/unbind",
    ):
        set_attribute(active, step("driver/unbind", UUID))
    with pytest.raises(ValueError, match="is not a name below"):
        set_attribute(active, step("../remove", "1"))
    absent = SetVgpuAttribute(OTHER, MDEV_DEVICES / OTHER, "x", None, "1")
    with pytest.raises(HostError, match=f"vGPU {OTHER} no longer exists"):
        set_attribute(active, absent)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EINVAL, "does not accept this text"), (errno.EADDRINUSE, "another vGPU has")],
)
def test_an_attribute_that_is_rejected_is_explained(
    active: FakeKernel, number: int, words: str
) -> None:
    active.fail_writes(PARAMETERS, number)
    with pytest.raises(WriteFailed, match=words) as caught:
        set_attribute(active, step(PARAMETERS, "a=1"))
    assert caught.value.hint


def test_a_guest_keeps_parameters_from_being_changed(active: FakeKernel) -> None:
    group = api.scan(active).vgpus.active[0].iommu_group
    assert group is not None
    active.guest_opens(group)
    with pytest.raises(WriteFailed, match="does not allow writing it now"):
        set_attribute(active, step(PARAMETERS, "a=1"))


def test_a_number_that_comes_back_as_another_was_not_taken(active: FakeKernel) -> None:
    place = active.resolve(MDEV_DEVICES / UUID)
    assert place is not None
    active.sysfs.put(place / "heads", "1")
    active._reactions.instances["heads"] = lambda directory, _text: active.sysfs.put(
        directory / "heads", "4"
    )
    set_attribute(active, step("heads", "4"))
    with pytest.raises(HostError, match=r"cannot set heads of vGPU .* to 8: it is 4"):
        set_attribute(active, step("heads", "8"))


# ---- virtual functions of the vendor's own interface


@pytest.fixture
def vendor(tmp_path: Path) -> FakeKernel:
    kernel = l40s_host(tmp_path, total_vfs=4)
    kernel.sysfs.make("/run/systemd/system")
    return kernel


def parameters(kernel: FakeKernel, name: str) -> str | None:
    return kernel.read(PCI_DEVICES / name / PARAMETERS)


def test_virtual_functions_are_defined_started_and_stopped(vendor: FakeKernel) -> None:
    api.apply(FUNCTION, tree=vendor)
    assert [file for file in FILES if vendor.exists(file)] == [SERVICE, WANTED]
    assert api.apply(StartVgpu((FIRST,)), tree=vendor).is_changed
    assert parameters(vendor, FIRST) == "a=1,b=2"
    assert not api.apply(StartVgpu((FIRST,)), tree=vendor).is_changed
    api.apply(StopVgpu((FIRST,)), tree=vendor)
    assert api.scan(vendor).vgpus.active == ()
    api.apply(UndefineVgpu((FIRST,)), tree=vendor)
    assert not any(vendor.exists(file) for file in FILES)


def test_after_a_reboot_functions_come_first_then_types_then_parameters(
    vendor: FakeKernel,
) -> None:
    api.apply(SetGpuMode(PciAddress.parse(GPU), heterogeneous=True), tree=vendor)
    api.apply(FUNCTION, tree=vendor)
    api.apply(replace(FUNCTION, name=SECOND, type="L40S-8Q", attributes=None), tree=vendor)
    vendor.reboot()
    found = api.restore(RESTORE, tree=vendor)
    assert [(item.name, item.type, item.state) for item in found] == [
        (FIRST, "NVIDIA L40S-2Q", "restored"),
        (SECOND, "NVIDIA L40S-8Q", "restored"),
    ]
    assert parameters(vendor, FIRST) == "a=1,b=2"
    assert {item.state for item in api.restore(RESTORE, tree=vendor)} == {"already"}


def test_mig_that_is_defined_is_switched_on_before_virtual_functions_are_made(
    tmp_path: Path,
) -> None:
    """Which GPU instances it can have is known once it is on: they are made then."""
    kernel = mig_host(tmp_path)
    gpu = read_identity(kernel, PciAddress.parse(GPU))
    assert gpu is not None
    function = FunctionDefinition(PciAddress.parse(FIRST), "474", start="auto")
    file = document(GpuDefinition("vfiomgr/v1", gpu, 16, (function,), mig=("1g.5gb",)))
    kernel.sysfs.put(HostPath(file.path), file.text)
    (found,) = api.restore(RESTORE, tree=kernel)
    mode = read_mode(kernel, gpu.address)
    assert mode is not None
    assert mode.mig
    assert len(read_virtual_functions(kernel, gpu.address)) == 16
    assert found.state == "restored"
    (partition,) = api.scan(kernel, with_gpu_modes=True).vgpus.partitions
    assert [place.name for place in partition.places] == ["1g.5gb"]


def test_without_the_vendors_program_it_is_told_what_to_run(vendor: FakeKernel) -> None:
    api.apply(FUNCTION, tree=vendor)
    vendor.reboot()
    os.unlink(vendor.locate(HostPath(SRIOV_MANAGE)))
    (found,) = api.restore(RESTORE, tree=vendor)
    assert found.state == "failed"
    assert SRIOV_MANAGE in (found.reason or "")


def test_a_gpu_that_is_prepared_has_its_vgpus_made_in_the_same_run() -> None:
    hosts = iter(
        [
            without_functions(AUTOMATIC),
            vendor_host(document(AUTOMATIC)),
            with_facts(vendor_host(document(replace(AUTOMATIC, vgpus=AUTOMATIC.vgpus[:1])))),
        ]
    )
    asked: list[tuple[str, ...]] = []

    def apply(part: RestoreVgpus) -> Outcome:
        asked.append(part.only)
        return Outcome(Plan("", ()), is_changed=True)

    (found,) = Restoration(RESTORE, lambda: next(hosts), apply).run()
    assert asked == [("0000:41:00.0",), ("0000:41:00.5",)]
    assert (found.name, found.state) == ("0000:41:00.4", "already")


def test_vgpus_of_a_gpu_that_cannot_be_prepared_fail_with_it() -> None:
    def apply(_part: RestoreVgpus) -> Outcome:
        message = "the driver makes none"
        raise RolledBack(message, "see dmesg")

    found = Restoration(RESTORE, lambda: without_functions(AUTOMATIC), apply).run()
    assert [(item.name, item.state, item.reason) for item in found] == [
        (name, "failed", "the driver makes none; see dmesg")
        for name in ("0000:41:00.4", "0000:41:00.5")
    ]
