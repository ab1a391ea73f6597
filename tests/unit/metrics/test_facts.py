"""What systemd says of vfiomgr's units, and the record of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.programs import Said
from tests.unit.devices import pci_device
from vfiomgr.errors import InvalidDocument
from vfiomgr.metrics.facts import (
    known_devices,
    parse_known_devices,
    read_units,
    render_known_devices,
)
from vfiomgr.metrics.model import UnitResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.kernel import FakeKernel

GPU = pci_device()


class Systemctl:
    """Shows units."""

    def __init__(self, *blocks: str, code: int = 0) -> None:
        self._said = Said(code, "\n\n".join(blocks) + "\n")

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return False

    def run(self, arguments: Sequence[str]) -> Said:
        """Show them."""
        assert arguments[0] == "show"
        assert arguments[-1] == "vfiomgr-*.service"
        return self._said


def block(name: str, state: str, result: str = "success", started: int = 0) -> str:
    return (
        f"Result={result}\nExecMainStartTimestampMonotonic={started}\n"
        f"Id={name}.service\nActiveState={state}"
    )


def put(kernel: FakeKernel, systemctl: Systemctl) -> FakeKernel:
    kernel.programs.install("/usr/bin/systemctl")
    kernel.programs.known["/usr/bin/systemctl"] = systemctl
    return kernel


def test_units_that_have_run_have_their_last_result(kernel: FakeKernel) -> None:
    shown = Systemctl(
        block("vfiomgr-layout", "active", started=5),
        block("vfiomgr-vgpu", "inactive", started=6),
        block("vfiomgr-persist", "activating", "exit-code", started=7),
        block("vfiomgr-watch", "failed", "timeout"),
        block("vfiomgr-node", "inactive"),
        block("vfiomgr-metrics", "activating", started=8),
    )
    assert read_units(put(kernel, shown)) == (
        UnitResult("vfiomgr-layout", "success", has_failed=False),
        UnitResult("vfiomgr-vgpu", "success", has_failed=False),
        UnitResult("vfiomgr-persist", "exit-code", has_failed=True),
        UnitResult("vfiomgr-watch", "timeout", has_failed=True),
    )


def test_units_are_unknown_if_systemd_does_not_answer(kernel: FakeKernel) -> None:
    assert read_units(kernel) is None
    assert read_units(put(kernel, Systemctl(code=1))) is None


def test_a_host_without_units_has_none(kernel: FakeKernel) -> None:
    assert read_units(put(kernel, Systemctl())) == ()


def test_the_record_is_read_as_it_was_written() -> None:
    found = tuple(known_devices([GPU]))
    assert parse_known_devices(render_known_devices(found)) == found
    assert parse_known_devices(None) == ()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"api_version": "vfiomgr/v1", "kind": "KnownDevices", "devices": [{}]}',
        '{"api_version": "vfiomgr/v2", "kind": "KnownDevices", "devices": []}',
        '{"api_version": "vfiomgr/v1", "kind": "Other", "devices": []}',
    ],
)
def test_a_damaged_record_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidDocument) as raised:
        parse_known_devices(text)
    assert "vfiomgr metrics accept" in raised.value.hint
