"""Interrupts of VFIO are moved as they appear; those of other handlers stay where they are."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import workstation
from vfiomgr.pci.model import PciAddress
from vfiomgr.tuning.interrupts import InterruptWatch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = "0000:01:00.0"
_FUNCTION = f"/sys/bus/pci/devices/{GPU}"


def request(kernel: FakeKernel, number: int, *handlers: str, cpus: str = "0-3") -> None:
    """An interrupt that handlers have requested."""
    place = f"/proc/irq/{number}"
    for handler in handlers:
        kernel.sysfs.make(f"{place}/{handler}")
    for name in ("smp_affinity_list", "effective_affinity_list", "spurious"):
        kernel.sysfs.put(f"{place}/{name}", cpus)


def enable(kernel: FakeKernel, number: int, vector: int) -> None:
    """A vector of MSI-X that the guest's driver enables."""
    kernel.sysfs.put(f"{_FUNCTION}/msi_irqs/{number}", "msix")
    request(kernel, number, f"vfio-msix[{vector}]({GPU})")


def disable(kernel: FakeKernel, number: int) -> None:
    kernel.sysfs.drop(f"{_FUNCTION}/msi_irqs/{number}")
    kernel.sysfs.drop(f"/proc/irq/{number}")


def cpus(kernel: FakeKernel, number: int) -> str:
    return kernel.sysfs.get(f"/proc/irq/{number}/smp_affinity_list").strip()


def watch(kernel: FakeKernel) -> InterruptWatch:
    return InterruptWatch(kernel, (PciAddress.parse(GPU),), (2, 3))


def test_vectors_are_moved_as_the_guest_enables_them(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    watching = watch(kernel)
    assert list(watching.place()) == []
    enable(kernel, 45, 0)
    line = f"interrupt 45, vfio-msix[0]({GPU}): moved from CPUs 0-3 to 2-3"
    assert list(watching.place()) == [line]
    assert cpus(kernel, 45) == "2-3"
    before = len(kernel.operations)
    assert list(watching.place()) == []
    assert len(kernel.operations) == before


def test_a_vector_that_is_moved_away_returns_without_another_line(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    watching = watch(kernel)
    enable(kernel, 45, 0)
    assert len(list(watching.place())) == 1
    kernel.sysfs.put("/proc/irq/45/smp_affinity_list", "0")
    assert list(watching.place()) == []
    assert cpus(kernel, 45) == "2-3"


def test_a_vector_is_moved_after_each_reboot_of_the_guest(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    watching = watch(kernel)
    for _ in range(2):
        enable(kernel, 45, 0)
        assert len(list(watching.place())) == 1
        assert cpus(kernel, 45) == "2-3"
        disable(kernel, 45)
        assert list(watching.place()) == []


@pytest.mark.parametrize(
    ("handlers", "expected"),
    [
        ((f"vfio-intx({GPU})",), "2-3"),
        ((f"vfio-intx({GPU})", "i801_smbus"), "0-3"),
        (("vfio-intx(0000:02:00.0)",), "0-3"),
        (("nvidia",), "0-3"),
        ((), "0-3"),
    ],
)
def test_a_line_is_moved_if_nobody_else_uses_it(
    tmp_path: Path, handlers: tuple[str, ...], expected: str
) -> None:
    kernel = workstation(tmp_path)
    kernel.sysfs.put(f"{_FUNCTION}/irq", "16")
    request(kernel, 16, *handlers)
    list(watch(kernel).place())
    assert cpus(kernel, 16) == expected


def test_a_vector_that_cannot_be_moved_is_told_once(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    watching = watch(kernel)
    enable(kernel, 45, 0)
    enable(kernel, 46, 1)
    kernel.fail_writes("/45/smp_affinity_list", errno.ENOSPC)
    lines = list(watching.place())
    assert len(lines) == 2
    assert lines[0].startswith(f"interrupt 45, vfio-msix[0]({GPU}), stays on CPUs 0-3: ")
    assert cpus(kernel, 46) == "2-3"
    assert list(watching.place()) == []


def test_the_service_says_that_it_is_ready_after_its_first_look(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable(kernel, 45, 0)
    told: list[str] = []

    def tell(state: str) -> None:
        assert cpus(kernel, 45) == "2-3"
        told.append(state)

    def end(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vfiomgr.tuning.commands.notify", tell)
    monkeypatch.setattr("vfiomgr.tuning.commands.time.sleep", end)
    answer = run("interrupts", "--cpus", "2-3", GPU)
    assert answer.status == 130
    assert "moved from CPUs 0-3 to 2-3" in answer.stderr
    assert told == ["READY=1"]


@pytest.mark.parametrize(
    ("cpus", "address", "message"),
    [("x", GPU, "not a list of CPUs: x"), ("2", "zz", "zz")],
)
def test_wrong_arguments_are_rejected(run: Run, cpus: str, address: str, message: str) -> None:
    answer = run("interrupts", "--cpus", cpus, address)
    assert answer.status == 2
    assert message in answer.stderr
