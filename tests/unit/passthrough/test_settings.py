from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind, ChangeDriver
from vfiomgr.pci.drivers import DriverState, OriginalState

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device()
AUDIO = replace(pci_device("0000:04:00.1"), driver="snd_hda_intel", reset_method=("pm",))
BOUND = replace(GPU, driver="vfio-pci", driver_override="vfio-pci")
ORIGIN = OriginalState(GPU.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")


def bind(host: HostSnapshot, **options: Any) -> Plan:
    return plan(host, replace(Bind((GPU.address,)), **options))


def changes(made: Plan) -> list[ChangeDriver]:
    return [step for step in made.steps if isinstance(step, ChangeDriver)]


def test_nothing_is_pinned_unasked() -> None:
    for step in changes(bind(host_of(GPU, AUDIO))):
        assert step.after == DriverState("vfio-pci", "vfio-pci")


def test_a_method_is_for_what_is_named_and_d3cold_for_the_slot() -> None:
    gpu, audio = changes(bind(host_of(GPU, AUDIO), reset_method="flr", no_d3cold=True))
    assert (gpu.after.reset_method, gpu.after.d3cold_allowed) == ("flr", False)
    assert (audio.after.reset_method, audio.after.d3cold_allowed) == (None, False)
    assert gpu.before == DriverState("nvidia", None, "on", "flr bus", d3cold_allowed=True)


def test_pins_are_told_and_can_be_typed() -> None:
    (step,) = changes(bind(host_of(GPU), reset_method="flr", no_d3cold=True))
    assert step.describe().endswith(", d3cold_allowed 0, reset_method flr")
    assert step.commands()[:2] == (
        "echo 0 > /sys/bus/pci/devices/0000:04:00.0/d3cold_allowed",
        "echo flr > /sys/bus/pci/devices/0000:04:00.0/reset_method",
    )
    assert step.inverse().commands()[0].startswith("echo 1 > ")
    assert step.inverse().commands()[1].startswith("echo flr bus > ")


def test_hostile_names_are_quoted_in_commands() -> None:
    hostile = DriverState("x; rm -rf $(id)", "$(reboot)\necho hi", "auto; reboot")
    step = ChangeDriver(GPU.identity, DriverState("nvidia", None), hostile)
    directory = "/sys/bus/pci/devices/0000:04:00.0"
    assert step.commands() == (
        f"echo '$(reboot)\necho hi' > {directory}/driver_override",
        f"echo 0000:04:00.0 > {directory}/driver/unbind",
        "echo 0000:04:00.0 > '/sys/bus/pci/drivers/x; rm -rf $(id)/bind'",
        f"echo 'auto; reboot' > {directory}/power/control",
    )


def test_a_kernel_without_d3cold_is_not_asked_for_it() -> None:
    host = host_of(replace(GPU, d3cold_allowed=None))
    assert changes(bind(host, no_d3cold=True))[0].after.d3cold_allowed is None


def test_a_method_that_the_function_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(Refusal, match=r"04:00\.0 .* cannot be reset by pm") as caught:
        bind(host_of(GPU), reset_method="pm")
    assert caught.value.hint == "use one of: flr, bus"


def test_what_is_bound_already_is_pinned_where_its_record_can_restore_it() -> None:
    host = with_facts(host_of(BOUND), origins=(ORIGIN,))
    (step,) = changes(bind(host, no_d3cold=True))
    assert step.before == replace(step.after, d3cold_allowed=True)
    pinned = with_facts(host, devices=(replace(BOUND, d3cold_allowed=False),))
    assert bind(pinned, no_d3cold=True).is_empty


def test_what_somebody_else_bound_is_not_pinned_and_that_is_told() -> None:
    made = bind(host_of(BOUND), no_d3cold=True)
    assert made.is_empty
    assert "vfiomgr unbind" in made.already[0]
