"""Virtual functions that NVIDIA's driver has lost, though sysfs looks healthy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.vgpu_hosts import GPUS, l40s_host
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.paths import PCI_DRIVERS
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.capacity import gpus, room
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = PciAddress.parse(GPUS[0])
FIRST, SECOND = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))


def wedge(kernel: FakeKernel, function: PciAddress, *, bind: bool = True) -> None:
    """Off the driver, and perhaps on it again: the files are back, and refuse every type."""
    kernel.write(pci_device(function) / "driver/unbind", str(function))
    if bind:
        kernel.write(PCI_DRIVERS / "nvidia/bind", str(function))


def create(kernel: FakeKernel, uuid: str = FIRST, parent: str | None = None) -> api.Outcome:
    return api.apply(CreateVgpu((uuid,), type="L40S-8Q", parent=parent), tree=kernel)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """One L40S with two virtual functions, the first of them lost."""
    return l40s_host(tmp_path, total_vfs=2)


def test_one_that_rejects_what_it_offers_is_left_alone_from_then_on(kernel: FakeKernel) -> None:
    first, second = read_virtual_functions(kernel, GPU)
    wedge(kernel, first)
    with pytest.raises(RolledBack, match=str(first)) as caught:
        create(kernel)
    assert "uses another virtual function next time" in caught.value.hint
    host = api.scan(kernel)
    assert [(one.name, one.why.split()[0]) for one in host.vgpus.wedged] == [
        (str(first), "rejected")
    ]
    assert create(kernel).plan.resolves == (str(second),)
    with pytest.raises(Refusal, match="1 without a driver or not responding"):
        create(kernel, SECOND)


def test_made_anew_it_is_as_good_as_others(kernel: FakeKernel) -> None:
    first, second = read_virtual_functions(kernel, GPU)
    wedge(kernel, first)
    with pytest.raises(RolledBack):
        create(kernel)
    create(kernel)
    api.apply(RemoveVgpu((str(second),)), tree=kernel)
    for count in (0, 2):
        api.apply(SetVirtualFunctions(GPU, count), tree=kernel)
    create(kernel, parent=str(first))
    assert api.scan(kernel).vgpus.wedged == ()


def test_named_it_is_tried_and_forgiven(kernel: FakeKernel) -> None:
    """The driver's service was down perhaps, and the function is sound."""
    first, _ = read_virtual_functions(kernel, GPU)
    wedge(kernel, first)
    with pytest.raises(RolledBack):
        create(kernel)
    kernel.nvidia.gpus.memory.set_wedged(str(GPU), set())
    create(kernel, parent=str(first))
    assert api.scan(kernel).vgpus.wedged == ()


def test_what_is_refused_for_the_gpus_sake_marks_nothing(kernel: FakeKernel) -> None:
    first, second = read_virtual_functions(kernel, GPU)
    kernel.before_write = lambda path, text: (
        kernel.store(pci_device(second) / "nvidia/current_vgpu_type", "1156")
        if path.parent.parent.name == str(first) and text == "1152"
        else None
    )
    with pytest.raises(RolledBack):
        create(kernel)
    assert api.scan(kernel).vgpus.wedged == ()


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_one_without_nvidias_driver_does_not_count(kernel: FakeKernel, driver: str | None) -> None:
    first, second = read_virtual_functions(kernel, GPU)
    wedge(kernel, first, bind=False)
    if driver is not None:
        kernel.write(pci_device(first) / "driver_override", driver)
        kernel.write(PCI_DRIVERS / driver / "bind", str(first))
    (gpu,) = gpus(api.scan(kernel, with_gpu_modes=True))
    kind = next(kind for kind in gpu.types if kind.name == "NVIDIA L40S-8Q")
    assert room(gpu, kind).more == 1
    assert [parent.name for parent in gpu.free] == [str(second)]
