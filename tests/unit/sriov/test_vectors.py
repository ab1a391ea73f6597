"""MSI-X vectors of virtual functions; with a fault at every operation."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import network_adapter, vector_adapter
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.engine.faults import EveryFault, Stories, told
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.layout.compare import compare
from vfiomgr.layout.from_host import export
from vfiomgr.layout.model import Layout, SriovRule
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.capabilities import MsixVectors, read_vectors
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.model import pci_device as directory
from vfiomgr.sriov.steps import (
    ChangeVectors,
    SetAutoprobe,
    SetVectors,
    SetVfCount,
    SetVirtualFunctions,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

ONLY = "and its MSI-X vectors can only be set without driver"
NIC = PciAddress.parse("0000:05:00.0")
VF, SECOND = PciAddress.parse("0000:05:10.0"), PciAddress.parse("0000:05:10.4")
ADAPTER = replace(
    pci_device(str(NIC)),
    name="CX7",
    driver="mlx5_core",
    iommu_group=5,
    sriov_totalvfs=8,
    sriov_numvfs=0,
    sriov_drivers_autoprobe=False,
    sriov_vf_total_msix=64,
)


def function(address: PciAddress, driver: str | None = None) -> PciDevice:
    return replace(
        pci_device(str(address)), name="VF", driver=driver, iommu_group=6, physical_function=NIC
    )


def with_functions(*counts: int | None, driver: str | None = None) -> HostSnapshot:
    """A host with virtual functions that have these vectors."""
    made = [function(PciAddress(0, 5, 16, number), driver) for number in range(len(counts))]
    physical = replace(
        ADAPTER, virtual_functions=tuple(vf.address for vf in made), sriov_numvfs=len(made)
    )
    known = zip(made, counts, strict=True)
    return with_facts(
        host_of(physical, *made),
        msix=tuple(MsixVectors(vf.address, count) for vf, count in known if count is not None),
    )


def created(count: int, vectors: int, *, autoprobe: bool = False) -> SetVirtualFunctions:
    return SetVirtualFunctions(NIC, count, autoprobe, vectors=vectors)


def test_new_functions_get_their_vectors_as_they_are_created() -> None:
    (step,) = plan(host_of(ADAPTER), created(4, 16)).steps
    assert step == SetVfCount(ADAPTER.identity, 0, 4, vectors=(16,) * 4)
    assert step.describe() == ("0000:05:00.0: 0 -> 4 virtual functions, with 16 MSI-X vectors each")
    assert step.commands()[1:3] == (
        "echo 16 > /sys/bus/pci/devices/0000:05:00.0/virtfn0/sriov_vf_msix_count",
        "echo 16 > /sys/bus/pci/devices/0000:05:00.0/virtfn1/sriov_vf_msix_count",
    )
    inverse = step.inverse()
    assert inverse is not None
    assert inverse.describe() == "0000:05:00.0: 4 -> 0 virtual functions"
    assert inverse.commands() == ("echo 0 > /sys/bus/pci/devices/0000:05:00.0/sriov_numvfs",)


def test_functions_that_are_removed_get_theirs_back_by_an_undo() -> None:
    host = with_functions(8, 24)
    first, second = plan(host, SetVirtualFunctions(NIC, 4)).steps
    assert first == SetVfCount(ADAPTER.identity, 2, 0, vectors=(8, 24))
    assert second == SetVfCount(ADAPTER.identity, 0, 4)
    inverse = first.inverse()
    assert inverse is not None
    assert inverse.describe() == (
        "0000:05:00.0: 0 -> 2 virtual functions, with 8 MSI-X vectors (VF 1), 24 (VF 2)"
    )


def test_a_device_without_vectors_has_the_steps_of_before() -> None:
    bare = replace(ADAPTER, sriov_vf_total_msix=0)
    (step,) = plan(host_of(bare), SetVirtualFunctions(NIC, 4)).steps
    assert step == SetVfCount(ADAPTER.identity, 0, 4)


def test_existing_functions_are_changed_where_they_differ() -> None:
    host = with_functions(8, 16, 8)
    changed = SetVectors(ADAPTER.identity, before=(8, None, 8), after=(16, None, 16))
    for request in (ChangeVectors(NIC, 16), created(3, 16)):
        assert plan(host, request).steps == (changed,)
    assert changed.describe() == ("0000:05:00.0: virtual functions with 16 MSI-X vectors (VF 1, 3)")
    assert changed.inverse() == SetVectors(ADAPTER.identity, (16, None, 16), (8, None, 8))


def test_steps_about_other_functions_have_another_topic() -> None:
    """Undoing several runs undoes each function once (layout revert)."""
    first = SetVectors(ADAPTER.identity, (8, None), (16, None))
    assert first.topic == first.inverse().topic
    assert first.topic != SetVectors(ADAPTER.identity, (None, 8), (None, 16)).topic


def test_one_function_is_changed_alone() -> None:
    made = plan(with_functions(8, 8), ChangeVectors(PciAddress(0, 5, 16, 1), 32))
    assert made.steps == (SetVectors(ADAPTER.identity, (None, 8), (None, 32)),)
    assert made.summary == "set the MSI-X vectors of 0000:05:10.1 (VF) to 32"
    assert made.locks == ("group-5", "group-6")


def test_functions_with_that_many_are_left_alone_whoever_has_them() -> None:
    host = with_functions(16, 16, driver="vfio-pci")
    for request in (ChangeVectors(NIC, 16), created(2, 16)):
        assert plan(host, request).is_empty
        assert plan(host, request).already


def test_what_is_not_readable_is_reported_and_not_changed() -> None:
    host = with_functions(None, 16)
    assert plan(host, ChangeVectors(NIC, 16)).is_empty
    words = ["the present MSI-X vectors of virtual functions of 0000:05:00.0: requires root"]
    assert list(ChangeVectors(NIC, 16).not_checked(host)) == words
    assert list(created(2, 16).not_checked(host)) == words
    assert list(SetVirtualFunctions(NIC, 2).not_checked(host)) == []
    old = host_of(replace(ADAPTER, sriov_vf_total_msix=None))
    assert plan(old, created(4, 16)).steps
    assert list(created(4, 16).not_checked(old)) == [
        "whether MSI-X vectors can be set: no sriov_vf_total_msix of 0000:05:00.0"
    ]


@pytest.mark.parametrize(
    ("host", "request_", "summary", "remedy"),
    [
        (
            host_of(ADAPTER),
            created(4, 17),
            "0000:05:00.0 (CX7) has 64 MSI-X vectors for its virtual functions, not 68",
            "request at most 16 for each of 4 virtual functions",
        ),
        (
            with_functions(40, 8),
            ChangeVectors(PciAddress(0, 5, 16, 1), 25),
            "0000:05:00.0 (CX7) has 64 MSI-X vectors for its virtual functions, not 65",
            "request at most 32 for each of 2 virtual functions",
        ),
        (
            host_of(replace(ADAPTER, sriov_vf_total_msix=0)),
            created(4, 8),
            (
                "driver mlx5_core of 0000:05:00.0 (CX7) cannot set the MSI-X vectors of virtual "
                "functions (sriov_vf_total_msix is 0)"
            ),
            "leave out the vectors; mlx5_core and ice can set them, if the firmware supports it",
        ),
        (
            host_of(replace(ADAPTER, sriov_vf_total_msix=0, driver="vfio-pci")),
            created(4, 8),
            "0000:05:00.0 (CX7) is on vfio-pci, which cannot create virtual functions (ENOENT)",
            "unbind it first: vfiomgr unbind 0000:05:00.0",
        ),
        (
            host_of(ADAPTER),
            created(0, 8),
            "cannot set MSI-X vectors of 0 virtual functions",
            "leave out the vectors",
        ),
        (
            host_of(ADAPTER),
            created(4, 8, autoprobe=True),
            "host drivers would bind the new functions before their MSI-X vectors are set",
            "leave out the vectors, or keep host drivers from the new functions",
        ),
        (
            host_of(ADAPTER),
            ChangeVectors(NIC, 8),
            "0000:05:00.0 (CX7) has no virtual functions",
            "create them: vfiomgr sriov set 0000:05:00.0 COUNT",
        ),
        (
            with_functions(8, driver="vfio-pci"),
            ChangeVectors(NIC, 16),
            f"0000:05:10.0 (VF) is on vfio-pci, {ONLY}",
            "vfiomgr unbind 0000:05:10.0",
        ),
        (
            with_functions(8, driver="mlx5_core"),
            created(1, 16),
            f"0000:05:10.0 (VF) is on mlx5_core, {ONLY}",
            "unbind it: echo 0000:05:10.0 > /sys/bus/pci/devices/0000:05:10.0/driver/unbind",
        ),
    ],
    ids=[
        "too many for all",
        "too many for one",
        "unsupported",
        "on vfio",
        "no functions requested",
        "autoprobe",
        "no functions",
        "on vfio-pci",
        "on its driver",
    ],
)
def test_what_cannot_be_set_is_refused_with_its_remedy(
    host: HostSnapshot, request_: ChangeVectors | SetVirtualFunctions, summary: str, remedy: str
) -> None:
    with pytest.raises(Refusal) as caught:
        plan(host, request_)
    assert (caught.value.message, caught.value.hint) == (summary, remedy)


def test_functions_of_a_vendors_program_have_none() -> None:
    gpu = replace(ADAPTER, driver="nvidia", sriov_vf_total_msix=None)
    host = with_facts(host_of(gpu), has_sriov_manage=True)
    with pytest.raises(
        Refusal, match=r"driver nvidia of .* cannot .*\(sriov-manage creates them\)"
    ):
        plan(host, created(8, 8))


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return vector_adapter(tmp_path)


def vectors(kernel: FakeKernel) -> list[int | None]:
    return [read_vectors(kernel, vf) for vf in read_virtual_functions(kernel, NIC)]


def msix_writes(kernel: FakeKernel) -> list[tuple[str, str]]:
    writes = kernel.writes
    return [(p.parent.name, text) for p, text in writes if p.name == "sriov_vf_msix_count"]


def test_they_are_set_from_their_creation_on(kernel: FakeKernel) -> None:
    before = kernel.state()
    api.apply(created(4, 12), tree=kernel)
    assert vectors(kernel) == [12] * 4
    assert [each.count for each in api.scan(kernel).msix] == [12] * 4
    assert not api.apply(created(4, 12), tree=kernel).is_changed
    api.apply(SetVirtualFunctions(NIC, 0), tree=kernel)
    assert kernel.state() == before


def test_functions_that_return_vectors_come_first(kernel: FakeKernel) -> None:
    """The device has 64: one with 32 must give some back before another gets 40."""
    api.apply(created(2, 8), tree=kernel)
    api.apply(ChangeVectors(SECOND, 32), tree=kernel)
    api.apply(ChangeVectors(VF, 32), tree=kernel)
    kernel.writes.clear()
    api.apply(ChangeVectors(SECOND, 20), tree=kernel)
    assert vectors(kernel) == [32, 20]
    api.apply(ChangeVectors(NIC, 30), tree=kernel)
    assert msix_writes(kernel)[-2:] == [(str(VF), "30"), (str(SECOND), "30")]


def test_functions_that_are_recreated_by_a_rollback_have_theirs_again(kernel: FakeKernel) -> None:
    api.apply(created(2, 8), tree=kernel)
    api.apply(ChangeVectors(SECOND, 32), tree=kernel)
    api.apply(Bind((VF,)), tree=kernel)
    kernel.sriov.room[str(NIC)] = 2
    with pytest.raises(RolledBack):
        api.apply(created(4, 16), tree=kernel)
    assert vectors(kernel) == [8, 32]
    assert kernel.driver_of(str(VF)) == "vfio-pci"


def test_a_driver_that_adds_a_vector_of_its_own_is_corrected(kernel: FakeKernel) -> None:
    kernel.sriov.added_vectors[str(NIC)] = 1
    api.apply(created(2, 16), tree=kernel)
    assert vectors(kernel) == [16, 16]
    assert msix_writes(kernel)[:2] == [(str(VF), "16"), (str(VF), "15")]


def test_a_driver_that_sets_another_number_is_no_success(kernel: FakeKernel) -> None:
    kernel.sriov.added_vectors[str(NIC)] = -3
    with pytest.raises(RolledBack, match=r"of 0000:05:10\.0 to 16: it has 13") as caught:
        api.apply(created(2, 16), tree=kernel)
    assert "another number" in caught.value.hint
    assert read_virtual_functions(kernel, NIC) == ()


def test_a_bound_function_is_refused_until_it_is_unbound(kernel: FakeKernel) -> None:
    api.apply(created(2, 8), tree=kernel)
    api.apply(Bind((VF,)), tree=kernel)
    with pytest.raises(Refusal, match="can only be set without driver"):
        api.apply(ChangeVectors(NIC, 16), tree=kernel)
    api.apply(Unbind((VF,)), tree=kernel)
    api.apply(ChangeVectors(NIC, 16), tree=kernel)
    assert vectors(kernel) == [16, 16]


def test_a_driver_without_them_is_refused(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    with pytest.raises(Refusal, match=r"driver igb of .* cannot set the MSI-X vectors"):
        api.apply(created(2, 8), tree=kernel)
    api.apply(SetVirtualFunctions(NIC, 2), tree=kernel)
    assert api.scan(kernel).msix == ()


@pytest.mark.parametrize(
    ("number", "words", "remedy"),
    [
        (errno.EBUSY, "a driver is bound to the virtual function", "vfiomgr unbind ADDRESS"),
        (errno.EOPNOTSUPP, "the driver of the physical function cannot set them", "leave out"),
        (errno.EINVAL, "the driver does not accept this number", "another number"),
        (errno.EOVERFLOW, "the device does not support that many", "request fewer"),
        (errno.ENOSPC, "the other virtual functions use too many", "request fewer"),
        (errno.ENOENT, r"this kernel \(before 5\.13\) cannot set them", "vfiomgr list --all"),
    ],
)
def test_the_errors_of_the_kernel_have_causes(
    kernel: FakeKernel, number: int, words: str, remedy: str
) -> None:
    api.apply(created(2, 8), tree=kernel)
    kernel.fail_writes("sriov_vf_msix_count", number)
    with pytest.raises(RolledBack, match=rf"MSI-X vectors of 0000:05:10\.0 to 16: {words}") as why:
        api.apply(ChangeVectors(NIC, 16), tree=kernel)
    assert remedy in why.value.hint


def test_autoprobe_is_restored_after_the_vectors(kernel: FakeKernel) -> None:
    steps = api.apply(created(2, 16), tree=kernel).plan.steps
    assert [type(step) for step in steps] == [SetAutoprobe, SetVfCount, SetAutoprobe]
    assert kernel.read(directory(NIC) / "sriov_drivers_autoprobe") == "1"


def test_show_has_both_numbers(run: Run, kernel: FakeKernel) -> None:
    api.apply(created(2, 16), tree=kernel)
    assert "  MSI-X of vfs     64 vectors in total" in run("show", str(NIC)).stdout.splitlines()
    assert "  MSI-X            16 vectors" in run("show", str(VF)).stdout.splitlines()
    physical, virtual = (
        json.loads(run("show", str(each), "--format", "json").stdout) for each in (NIC, VF)
    )
    assert (physical["sriov_vf_total_msix"], physical["msix_vectors"]) == (64, None)
    assert (virtual["sriov_vf_total_msix"], virtual["msix_vectors"]) == (None, 16)


def test_the_command_tells_what_functions_have_and_how_to_undo_it(
    run: Run, kernel: FakeKernel
) -> None:
    assert run("sriov", "set", str(NIC), "2", "--vf-msix", "16").status == 0
    assert vectors(kernel) == [16, 16]
    answer = run("sriov", "set", str(NIC), "--vf-msix", "12")
    assert answer.stdout.splitlines() == [
        "0000:05:10.0 has 12 MSI-X vectors",
        "0000:05:10.4 has 12 MSI-X vectors",
    ]
    assert answer.stderr == f"undo with: vfiomgr sriov set {NIC} --vf-msix 16\n"
    one = run("sriov", "set", str(VF), "--vf-msix", "20", "--format", "json")
    assert json.loads(one.stdout)["vectors"] == [{"address": str(VF), "count": 20}]
    for more in (("--exec-quantum", "20"), ("--physical",)):
        wrong = run("sriov", "set", str(VF), "--vf-msix", "20", *more)
        assert wrong.status == 2
        assert "MSI-X vectors and quotas of existing functions are set separately" in wrong.stderr
    assert run("sriov", "set", str(NIC), "2", "--vf-msix", "2049").status == 2


RULE = {"select": {"address": str(NIC)}, "state": "sriov", "functions": "passthrough"}


def requested(**rule: object) -> ApplyLayout:
    document = Layout.model_validate({"devices": [{**RULE, **rule}]})
    return api.layout_request(None, "nic", document)


def test_a_layout_has_them_from_creation_to_reversion(kernel: FakeKernel) -> None:
    before = kernel.state(modules=False)
    api.apply(requested(count=2, vf_msix=16), tree=kernel)
    assert vectors(kernel) == [16, 16]
    assert kernel.driver_of(str(VF)) == "vfio-pci"
    assert not api.apply(requested(count=2, vf_msix=16), tree=kernel).is_changed
    with pytest.raises(Refusal, match="can only be set without driver"):
        api.apply(requested(count=2, vf_msix=20), tree=kernel)
    api.revert(tree=kernel)
    assert kernel.state(modules=False) == before


def test_an_exported_layout_has_no_vectors_since_they_may_be_the_default(
    kernel: FakeKernel,
) -> None:
    api.apply(created(4, 12), tree=kernel)
    (rule,) = export(api.scan(kernel)).devices
    assert isinstance(rule, SriovRule)
    assert (rule.count, rule.vf_msix) == (4, None)


def test_a_layout_corrects_the_vectors_of_free_functions(kernel: FakeKernel) -> None:
    api.apply(created(2, 8), tree=kernel)
    wanted = requested(count=2, vf_msix=16)
    host = api.scan(kernel, with_users=True)
    (difference,) = (str(each) for each in compare(host, wanted).differences)
    assert difference.endswith("2 virtual functions, 16 MSI-X vectors each")
    api.apply(wanted, tree=kernel)
    assert vectors(kernel) == [16, 16]


def test_a_layout_that_takes_the_device_from_vfio_cannot_know_the_total(
    kernel: FakeKernel,
) -> None:
    """A VFIO driver reports 0; whether the host driver can set them is seen when it is bound."""
    api.apply(Bind((NIC,)), tree=kernel)
    assert api.scan(kernel).device(NIC).sriov_vf_total_msix == 0
    api.apply(requested(count=2, vf_msix=16), tree=kernel)
    assert vectors(kernel) == [16, 16]


TWO = created(2, 8)
STORIES: Stories = {
    "create with vectors": ((), created(2, 16)),
    "recreate": ((TWO, ChangeVectors(SECOND, 32), Bind((VF,))), created(3, 16)),
    "recreate without": ((TWO, ChangeVectors(SECOND, 32)), SetVirtualFunctions(NIC, 3)),
    "remove": ((TWO, ChangeVectors(SECOND, 32)), SetVirtualFunctions(NIC, 0)),
    "change all": ((TWO,), ChangeVectors(NIC, 20)),
    "change one": ((TWO,), ChangeVectors(SECOND, 20)),
    "change with a count": ((TWO,), created(2, 20)),
}


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told(STORIES, vector_adapter)
