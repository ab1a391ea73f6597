"""Steps look whether the device at their address is still the same one."""

from __future__ import annotations

import errno
from importlib import resources
from typing import TYPE_CHECKING, Any, get_args

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import mixed
from vfiomgr.engine import verified_write
from vfiomgr.engine.registry import perform
from vfiomgr.engine.verified_write import explaining, require_same_device
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.passthrough.steps import (
    ChangeDriver,
    ReleaseDriver,
    ResetBus,
    ResetFunction,
    SetResetMethod,
)
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.model import DeviceIdentity

ADAPTER = PciAddress.parse("0000:05:00.0")
STEPS: dict[str, Callable[[DeviceIdentity], Step]] = {
    "change-driver": lambda d: ChangeDriver(
        d, DriverState("igb", None), DriverState("vfio-pci", "vfio-pci")
    ),
    "release-driver": lambda d: ReleaseDriver(d, DriverState("igb", None)),
    "set-vf-count": lambda d: SetVfCount(d, 0, 2),
    "set-autoprobe": lambda d: SetAutoprobe(d, before=True, after=False),
    "set-reset-method": lambda d: SetResetMethod(d, "flr bus", "bus"),
    "reset-function": lambda d: ResetFunction(d, None),
    "reset-bus": lambda d: ResetBus(d, ()),
}
OTHERS: dict[str, dict[str, Any]] = {
    "another model": {"device_id": "1533"},
    "another maker": {"subsystem_id": "1028:0001"},
    "another slot": {"bridge_path": "0000:00:1e.0"},
}


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return mixed(tmp_path)


def identity(kernel: FakeKernel) -> DeviceIdentity:
    return api.scan(kernel).device(ADAPTER).identity


def test_the_same_device_is_the_same(kernel: FakeKernel) -> None:
    require_same_device(kernel, identity(kernel))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_nothing_is_written_to_another_device(
    kernel: FakeKernel, step: Callable[[DeviceIdentity], Step], other: dict[str, Any]
) -> None:
    planned = replace(identity(kernel), **other)
    with pytest.raises(HostError, match="another device is at this address") as caught:
        perform(step(planned), kernel)
    assert str(planned) in caught.value.message
    assert kernel.operations == []


def vital_product_data(serial: bytes) -> bytes:
    """A read-only resource with a serial number (PCI Local Bus 3.0, appendix I)."""
    field = b"SN" + bytes([len(serial)]) + serial
    return b"\x90" + len(field).to_bytes(2, "little") + field + b"\x78"


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_nothing_is_written_to_another_card_of_the_same_model(
    kernel: FakeKernel, step: Callable[[DeviceIdentity], Step]
) -> None:
    file = pci_device(ADAPTER) / "vpd"
    kernel.sysfs.put_bytes(file, vital_product_data(b"OLD"))
    planned = api.scan(kernel, serials_of=(ADAPTER,)).device(ADAPTER).identity
    assert planned.serial == "OLD"
    require_same_device(kernel, planned)
    kernel.sysfs.put_bytes(file, vital_product_data(b"NEW"))
    with pytest.raises(HostError, match=r"another device .* serial NEW instead of .* serial OLD"):
        perform(step(planned), kernel)
    assert kernel.operations == []


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_nothing_is_written_where_the_device_is_gone(
    kernel: FakeKernel, step: Callable[[DeviceIdentity], Step]
) -> None:
    planned = identity(kernel)
    kernel.unplug(str(ADAPTER))
    with pytest.raises(HostError, match="is gone"):
        perform(step(planned), kernel)
    assert kernel.operations == []


def test_every_cause_is_of_an_operation_and_an_errno_and_has_a_remedy() -> None:
    causes = verified_write._causes()
    assert {operation for operation, _ in causes} <= set(get_args(verified_write.Operation))
    assert all(cause and remedy for cause, remedy in causes.values())


@pytest.mark.parametrize(
    "table", [None, "[bind", "[bind]\nEBUSY = 1", "[bind]\nELATER = ['a', 'b']"]
)
def test_a_table_that_is_gone_or_replaced_does_not_hide_the_error(
    table: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package may be upgraded or removed while a command runs."""
    if table is not None:
        (tmp_path / "write_errors.toml").write_text(table)
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)
    verified_write._causes.cache_clear()
    error = WriteFailed("/sys/x", "0000:05:00.0", errno.EBUSY, "busy")
    with (
        pytest.raises(WriteFailed, match=r"^0000:05:00\.0: busy$") as failed,
        explaining("bind", "0000:05:00.0"),
    ):
        raise error
    assert failed.value.errno == errno.EBUSY
    assert failed.value.hint
