"""Virtual functions made and removed on the fake kernel; with a fault at every operation."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import network_adapter, workstation
from tests.fakes.kernel import FakeKernel
from tests.unit.engine.faults import EveryFault, Stories, told
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov import apply as sriov_apply
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.paths import HostPath

NIC = PciAddress.parse("0000:05:00.0")
VF = PciAddress.parse("0000:05:10.0")
SECOND_VF = PciAddress.parse("0000:05:10.4")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, vfio_loaded=True)


def set_vfs(kernel: FakeKernel, count: int, *, autoprobe: bool = False) -> api.Outcome:
    return api.apply(SetVirtualFunctions(NIC, count, autoprobe), tree=kernel)


def drivers(kernel: FakeKernel) -> list[str | None]:
    return [kernel.driver_of(str(vf)) for vf in read_virtual_functions(kernel, NIC)]


def attribute(name: str) -> HostPath:
    return pci_device(NIC) / name


def test_new_functions_have_no_driver_and_autoprobe_is_as_before(kernel: FakeKernel) -> None:
    before = kernel.state()
    assert set_vfs(kernel, 4).is_changed
    assert drivers(kernel) == [None] * 4
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "1"
    assert not set_vfs(kernel, 4).is_changed
    set_vfs(kernel, 0)
    assert kernel.state() == before


def test_functions_are_in_the_order_of_their_numbers_of_which_the_tenth_is_not_the_second(
    tmp_path: Path,
) -> None:
    """Quotas and MSI-X vectors are set by these numbers."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("igb", ids=[("8086", "1521")])
    kernel.add_pci(
        str(NIC),
        vendor="8086",
        device="1521",
        class_code="020000",
        group=21,
        driver="igb",
        total_vfs=12,
        vf_device="1520",
        vf_offset=0x80,
    )
    set_vfs(kernel, 12)
    functions = read_virtual_functions(kernel, NIC)
    targets = [kernel.link_name(pci_device(NIC) / f"virtfn{number}") for number in range(12)]
    assert [str(function) for function in functions] == targets
    assert api.scan(kernel).device(NIC).virtual_functions == functions


def test_host_drivers_get_them_on_request(kernel: FakeKernel) -> None:
    kernel.write(attribute("sriov_drivers_autoprobe"), "0")
    set_vfs(kernel, 2, autoprobe=True)
    assert drivers(kernel) == ["igbvf"] * 2
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "0"


def test_zero_comes_between_two_numbers(kernel: FakeKernel) -> None:
    set_vfs(kernel, 2)
    written = len(kernel.writes)
    set_vfs(kernel, 4)
    assert [(path.name, text) for path, text in kernel.writes[written:]] == [
        ("sriov_drivers_autoprobe", "0"),
        ("sriov_numvfs", "0"),
        ("sriov_numvfs", "4"),
        ("sriov_drivers_autoprobe", "1"),
    ]
    assert drivers(kernel) == [None] * 4


def test_a_new_function_can_be_bound_and_given_back(kernel: FakeKernel) -> None:
    set_vfs(kernel, 2)
    api.apply(Bind((VF,)), tree=kernel)
    assert drivers(kernel) == ["vfio-pci", None]
    api.apply(Unbind((VF,)), tree=kernel)
    assert drivers(kernel) == [None, None]


def test_records_of_functions_that_go_are_dropped(kernel: FakeKernel) -> None:
    set_vfs(kernel, 2)
    api.apply(Bind((VF, SECOND_VF)), tree=kernel)
    assert len(api.scan(kernel).origins) == 2
    set_vfs(kernel, 0)
    assert api.scan(kernel).origins == ()
    set_vfs(kernel, 2)
    assert not api.apply(Unbind((VF,)), tree=kernel).is_changed


def test_functions_that_a_guest_holds_stay(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_vfs(kernel, 2)
    api.apply(Bind((VF,)), tree=kernel)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    group = api.scan(kernel).device(VF).iommu_group
    assert group is not None
    kernel.guest_opens(group)
    with pytest.raises(Refusal, match=r"05:10\.0.*is in use by: qemu-system-x86 \(PID"):
        set_vfs(kernel, 4)
    assert kernel.stuck.names() == []
    assert drivers(kernel) == ["vfio-pci", None]


def test_without_room_the_old_functions_are_back_on_their_drivers(kernel: FakeKernel) -> None:
    set_vfs(kernel, 2)
    api.apply(Bind((VF,)), tree=kernel)
    kernel.sriov.room[str(NIC)] = 2
    with pytest.raises(
        RolledBack, match="too few bus numbers or too little MMIO address space"
    ) as why:
        set_vfs(kernel, 4)
    assert "pci=realloc" in why.value.hint
    assert drivers(kernel) == ["vfio-pci", None]
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "1"
    api.apply(Unbind((VF,)), tree=kernel)
    assert drivers(kernel) == [None, None]


def test_a_driver_that_makes_fewer_is_not_believed(kernel: FakeKernel) -> None:
    kernel.sriov.grants[str(NIC)] = 3
    with pytest.raises(RolledBack, match=r"to 4: it has 3 \(sriov_numvfs 3\)"):
        set_vfs(kernel, 4)
    assert drivers(kernel) == []


@pytest.mark.parametrize(
    ("number", "words", "remedy"),
    [
        (errno.ERANGE, "no more than its sriov_totalvfs", "vfiomgr sriov list"),
        (errno.ENOENT, "does not support virtual functions", "host driver first"),
        (errno.EBUSY, "another number was set in the meantime", "run the command again"),
        (errno.ENOSPC, "too few bus numbers", "pci=realloc"),
        (errno.ENOMEM, "too little MMIO address space", "pci=realloc"),
        (errno.EINVAL, "rejects this number", "see dmesg"),
        (errno.EPERM, "the driver refuses", "stop using"),
        (errno.EOPNOTSUPP, "disabled in the device's firmware", "vendor's tool"),
        (errno.EIO, "contradictory information", "firmware"),
        (errno.EAGAIN, "is busy", "try again"),
        (errno.ENODEV, "vanished", "vfiomgr list --all"),
        (errno.EACCES, "root privileges are missing", "run as root"),
    ],
)
def test_every_errno_is_explained(kernel: FakeKernel, number: int, words: str, remedy: str) -> None:
    kernel.fail_writes("sriov_numvfs", number)
    with pytest.raises(RolledBack, match=words) as caught:
        set_vfs(kernel, 4)
    assert remedy in caught.value.hint
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "1"


def test_a_function_that_gets_no_group_is_not_ready(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sriov_apply, "GROUP_DEADLINE", 0.05)
    monkeypatch.setattr(
        sriov_apply, "group_number", lambda _tree, path: 21 if path.name[-4:] == "00.0" else None
    )
    with pytest.raises(RolledBack, match=r"without an IOMMU group: 0000:05:10\.0, 0000:05:10\.4"):
        set_vfs(kernel, 2)
    assert drivers(kernel) == []


HOSTS = SetVirtualFunctions(NIC, 2, autoprobe=True)
MADE = SetVirtualFunctions(NIC, 2)
INTENTS: Stories = {
    "make": ((), MADE),
    "make for the host": ((), HOSTS),
    "more": ((MADE,), SetVirtualFunctions(NIC, 4)),
    "more for the host": ((MADE,), SetVirtualFunctions(NIC, 4, autoprobe=True)),
    "more instead of the host's": ((HOSTS,), SetVirtualFunctions(NIC, 3)),
    "more instead of a guest's": ((MADE, Bind((VF,))), SetVirtualFunctions(NIC, 3)),
    "none": ((MADE,), SetVirtualFunctions(NIC, 0)),
    "none, where the host and a guest had one": (
        (HOSTS, Bind((SECOND_VF,))),
        SetVirtualFunctions(NIC, 0),
    ),
}


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told(INTENTS, network_adapter)


def test_the_same_request_restores_the_autoprobe_of_before_an_interrupted_run(
    kernel: FakeKernel,
) -> None:
    kernel.before_write = lambda path, _: kernel.kill(at=2) if "autoprobe" in path else None
    with pytest.raises(PowerCut):
        set_vfs(kernel, 2)
    kernel.before_write = None
    kernel.revive()
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "0"
    notes: list[str] = []
    api.apply(SetVirtualFunctions(NIC, 2), tree=kernel, on_note=notes.append)
    assert "was interrupted" in notes[0]
    assert notes[0].endswith("; this operation completes it")
    assert kernel.read(attribute("sriov_drivers_autoprobe")) == "1"
    assert drivers(kernel) == [None, None]
    assert api.recover(tree=kernel) == ()
