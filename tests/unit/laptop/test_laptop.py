"""`vfiomgr laptop`: modes by the firmware's switches, and what cannot work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.laptop import AUDIO, DISCRETE, INTEGRATED, AsusFirmware, laptop
from tests.unit.devices import with_facts
from tests.unit.engine.faults import Course, Courses, EveryFault
from vfiomgr.errors import HostError, Refusal, RolledBack, UsageError
from vfiomgr.laptop.apply import set_discrete_gpu
from vfiomgr.laptop.state import mode_of
from vfiomgr.laptop.steps import LaptopMode, SetDiscreteGpu, SetLaptopMode
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import DeviceUser, UnknownUsers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.snapshot.model import HostSnapshot

GPU = PciAddress.parse(DISCRETE)
_STATUS = "/sys/class/drm/card1-eDP-1/status"
_PENDING = "/sys/class/firmware-attributes/asus-armoury/attributes/pending_reboot"


@pytest.fixture(params=[False, True], ids=["asus-nb-wmi", "asus-armoury"])
def firmware(request: pytest.FixtureRequest, tmp_path: Path) -> AsusFirmware:
    return laptop(tmp_path, armoury=request.param)


def switch(firmware: AsusFirmware, mode: LaptopMode) -> api.Outcome:
    return api.apply(SetLaptopMode(mode), tree=firmware.kernel)


def read(firmware: AsusFirmware) -> HostSnapshot:
    return api.scan(firmware.kernel, with_users=True, with_desktop=True)


def present(firmware: AsusFirmware) -> LaptopMode | None:
    return mode_of(read(firmware))


def refusal(firmware: AsusFirmware, mode: LaptopMode) -> str:
    """What is said of a change that is refused and writes nothing."""
    before = firmware.kernel.state()
    with pytest.raises(Refusal) as caught:
        switch(firmware, mode)
    assert caught.value.remedy
    assert firmware.kernel.state() == before
    return f"{caught.value.message}; {caught.value.remedy}"


def test_the_gpu_is_removed_before_it_loses_power_and_returns(firmware: AsusFirmware) -> None:
    kernel = firmware.kernel
    before = kernel.state()
    assert present(firmware) == "hybrid"
    done = switch(firmware, "integrated")
    written = [(one.path, one.text) for one in kernel.operations if one.path.startswith("/sys")]
    assert [path.rpartition("/")[2] for path, _ in written][:2] == ["remove", "remove"]
    assert written[-1] == (firmware.path("dgpu_disable"), "1")
    assert kernel.driver_of(DISCRETE) is kernel.driver_of(AUDIO) is None
    assert present(firmware) == "integrated"
    assert any("keeps it off after a reboot too" in note for note in done.plan.notes)
    switch(firmware, "hybrid")
    assert (kernel.driver_of(DISCRETE), kernel.driver_of(AUDIO)) == ("amdgpu", "snd_hda_intel")
    assert kernel.state().keys() == before.keys()


@pytest.mark.parametrize("mode", ["integrated", "hybrid"])
def test_the_firmware_keeps_the_mode_over_a_reboot(
    firmware: AsusFirmware, mode: LaptopMode
) -> None:
    switch(firmware, "integrated")
    if mode == "hybrid":
        switch(firmware, mode)
    firmware.kernel.reboot()
    assert present(firmware) == mode


def test_what_is_so_already_changes_nothing(firmware: AsusFirmware) -> None:
    assert "is already on amdgpu" in str(switch(firmware, "hybrid").plan.already)
    for mode in ("integrated", "vfio", "discrete"):
        switch(firmware, mode)
        assert not switch(firmware, mode).is_changed
        switch(firmware, "hybrid")
        firmware.kernel.reboot()


def test_vfio_is_a_bind_with_all_its_checks_and_hybrid_undoes_it(firmware: AsusFirmware) -> None:
    kernel = firmware.kernel
    switch(firmware, "vfio")
    assert kernel.driver_of(DISCRETE) == kernel.driver_of(AUDIO) == "vfio-pci"
    assert present(firmware) == "vfio"
    switch(firmware, "hybrid")
    assert (kernel.driver_of(DISCRETE), kernel.driver_of(AUDIO)) == ("amdgpu", "snd_hda_intel")
    with_user = with_facts(read(firmware), users=(DeviceUser("/dev/dri/card1", 1200, "shell"),))
    with pytest.raises(Refusal) as caught:
        api.plan(with_user, SetLaptopMode("vfio"))
    assert "shell (PID 1200)" in caught.value.message
    assert f"run vfiomgr bind {DISCRETE} --allow in-use" in str(caught.value.remedy)


def test_a_gpu_that_the_desktop_uses_is_lent_by_releasing_it(firmware: AsusFirmware) -> None:
    way = f"have the desktop release it: vfiomgr bind --release {DISCRETE}"
    host = read(firmware)
    for command, is_helped in (("gnome-shell", True), ("blender", False)):
        user = DeviceUser("/dev/dri/card1", 1200, command)
        with pytest.raises(Refusal) as caught:
            api.plan(with_facts(host, users=(user,)), SetLaptopMode("vfio"))
        assert (way in caught.value.hint) is is_helped


def test_a_gpu_in_use_is_not_turned_off(firmware: AsusFirmware) -> None:
    host = read(firmware)
    request = SetLaptopMode("integrated")
    assert api.plan(host, request).steps
    for function in (DISCRETE, AUDIO):
        node = host.device(PciAddress.parse(function)).nodes[0]
        with pytest.raises(Refusal) as caught:
            api.plan(with_facts(host, users=(DeviceUser(node, 1300, "blender"),)), request)
        assert "blender (PID 1300)" in caught.value.message
        assert "--allow" not in str(caught.value.remedy)
    unseen = with_facts(host, unknown_users=(UnknownUsers("processes", "not root", "run as root"),))
    with pytest.raises(Refusal, match="cannot tell whether"):
        api.plan(unseen, request)


def test_a_lent_gpu_is_returned_before_it_is_turned_off(firmware: AsusFirmware) -> None:
    switch(firmware, "vfio")
    assert "vfiomgr laptop hybrid first" in refusal(firmware, "integrated")


def test_a_gpu_that_is_off_cannot_be_lent_or_have_the_panel(firmware: AsusFirmware) -> None:
    switch(firmware, "integrated")
    modes: tuple[LaptopMode, ...] = ("vfio", "discrete")
    for mode in modes:
        assert "turn it on first: vfiomgr laptop hybrid" in refusal(firmware, mode)


def test_the_panel_on_the_gpu_forbids_to_lend_it_or_to_turn_it_off(
    firmware: AsusFirmware,
) -> None:
    taking: tuple[LaptopMode, ...] = ("integrated", "vfio")
    done = switch(firmware, "discrete")
    assert "the panel changes at the next boot: reboot" in done.plan.notes
    for _ in range(2):
        assert present(firmware) == "discrete"
        for mode in taking:
            assert "would be black" in refusal(firmware, mode)
            assert "run vfiomgr laptop hybrid, and reboot" in refusal(firmware, mode)
        firmware.kernel.reboot()
    assert "the panel changes at the next boot: reboot" in switch(firmware, "hybrid").plan.notes
    assert present(firmware) == "hybrid", "but the panel is there until the reboot"
    for mode in taking:
        assert "until the next boot" in refusal(firmware, mode)
    firmware.kernel.reboot()
    switch(firmware, "vfio")


def test_the_desktop_does_not_release_a_gpu_with_the_panel(firmware: AsusFirmware) -> None:
    switch(firmware, "discrete")
    with pytest.raises(Refusal, match="the panel of this laptop is wired to") as caught:
        api.apply(Bind((GPU,), release=True), tree=firmware.kernel)
    assert "vfiomgr laptop hybrid, and reboot" in str(caught.value.remedy)


def test_the_panel_stays_with_the_host_while_a_guest_has_the_gpu_or_gets_it_at_boot(
    firmware: AsusFirmware,
) -> None:
    switch(firmware, "vfio")
    assert f"return it to the host: vfiomgr unbind {DISCRETE} --forget" in refusal(
        firmware, "discrete"
    )
    switch(firmware, "hybrid")
    api.apply(Bind((GPU,), persist=True, at_boot=True), tree=firmware.kernel)
    assert "would be black" in refusal(firmware, "discrete")


def test_without_switches_only_the_driver_changes(tmp_path: Path) -> None:
    firmware = laptop(tmp_path)
    firmware.kernel.sysfs.drop("/sys/devices/platform/asus-nb-wmi")
    assert "no dgpu_disable" in refusal(firmware, "integrated")
    assert "no gpu_mux_mode" in refusal(firmware, "discrete")
    switch(firmware, "vfio")
    switch(firmware, "hybrid")
    muxless = laptop(tmp_path / "muxless", has_mux=False)
    switch(muxless, "integrated")
    switch(muxless, "hybrid")
    assert muxless.kernel.driver_of(DISCRETE) == "amdgpu"


@pytest.mark.parametrize("name", ["gpu_mux_mode", "dgpu_disable"])
def test_a_switch_that_cannot_be_read_is_not_changed(firmware: AsusFirmware, name: str) -> None:
    firmware.kernel.sysfs.put(firmware.path(name), "")
    assert present(firmware) is None
    for mode in ("integrated", "hybrid", "vfio", "discrete"):
        assert f"cannot read {firmware.path(name)}" in refusal(firmware, mode)


@pytest.mark.parametrize("path", [_PENDING, _STATUS], ids=["pending", "panel"])
def test_a_panel_whose_state_cannot_be_read_may_be_on_the_gpu(tmp_path: Path, path: str) -> None:
    firmware = laptop(tmp_path, armoury=True)
    firmware.kernel.sysfs.put(path, "", 0o200)
    for mode in ("integrated", "hybrid", "vfio", "discrete"):
        assert f"cannot read {path}" in refusal(firmware, mode)


def test_a_snapshot_without_the_switches_is_refused(firmware: AsusFirmware) -> None:
    with pytest.raises(Refusal, match="not in the snapshot"):
        api.plan(api.scan(firmware.kernel), SetLaptopMode("hybrid"))


def test_several_discrete_gpus_are_named(firmware: AsusFirmware) -> None:
    firmware.kernel.add_pci(
        "0000:05:00.0",
        vendor="1002",
        device="744c",
        class_code="030000",
        group=20,
        driver="amdgpu",
        bridge="0000:00:01.0",
        gives=[("drm", "drm/card2")],
    )
    assert "several discrete GPUs: 0000:01:00.0, 0000:05:00.0" in refusal(firmware, "vfio")
    for address in (INTEGRATED, AUDIO, "0000:00:01.0"):
        named = SetLaptopMode("vfio", PciAddress.parse(address))
        if address == AUDIO:
            assert api.plan(read(firmware), named).steps
            continue
        with pytest.raises(UsageError, match="not a discrete GPU"):
            api.plan(read(firmware), named)
    api.apply(SetLaptopMode("integrated", GPU), tree=firmware.kernel)
    assert firmware.kernel.driver_of("0000:05:00.0") == "amdgpu"
    switch_on = SetLaptopMode("hybrid", PciAddress.parse("0000:05:00.0"))
    api.apply(switch_on, tree=firmware.kernel)
    assert firmware.kernel.driver_of(DISCRETE) == "amdgpu"


def test_a_gpu_that_does_not_return_is_an_error_and_off_again(
    firmware: AsusFirmware, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(firmware, "integrated")
    monkeypatch.setattr("vfiomgr.laptop.apply._PAUSE", 0.0)
    monkeypatch.setattr(firmware.kernel, "plug", lambda _address: None)
    with pytest.raises(RolledBack, match="did not appear on the PCI bus"):
        switch(firmware, "hybrid")
    assert firmware.disabled


def test_what_the_firmware_refuses_is_explained(
    firmware: AsusFirmware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firmware, "egpu_enabled", True)
    with pytest.raises(RolledBack, match="an external GPU"):
        switch(firmware, "discrete")


def test_other_hardware_at_the_address_is_not_removed(firmware: AsusFirmware) -> None:
    (step,) = api.plan(read(firmware), SetLaptopMode("integrated")).steps
    assert isinstance(step, SetDiscreteGpu)
    other = tuple(replace(device, device_id="0000") for device in step.functions)
    with pytest.raises(HostError, match="another device is at this address"):
        set_discrete_gpu(firmware.kernel, replace(step, functions=other))
    assert firmware.kernel.driver_of(DISCRETE) == "amdgpu"
    assert not firmware.disabled


def test_the_state_as_a_table_and_as_json(
    run: Run, monkeypatch: pytest.MonkeyPatch, firmware: AsusFirmware
) -> None:
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: firmware.kernel)
    shown = run("laptop").stdout
    assert "gpu_mux_mode  1             panel on the integrated GPU" in shown
    assert f"GPU           {DISCRETE}  on amdgpu" in shown
    document = json.loads(run("laptop", "--format", "json").stdout)
    assert (document["kind"], document["mode"]) == ("LaptopGraphics", "hybrid")
    assert document["discrete_gpus"] == [{"address": DISCRETE, "driver": "amdgpu"}]
    assert document["panels"] == [INTEGRATED]
    dry = run("laptop", "integrated", "--dry-run").stdout
    assert f"turn the discrete GPU off (dgpu_disable), {DISCRETE}, {AUDIO}" in dry
    assert f"echo 1 > {firmware.path('dgpu_disable')}" in dry
    run("laptop", "discrete")
    waits = run("laptop").stderr == "a change of the MUX waits for a reboot\n"
    assert waits == read(firmware).desktop.laptop.is_pending  # type: ignore[union-attr]


def _course(
    mode: LaptopMode, *earlier: LaptopMode, armoury: bool = True
) -> Callable[[Path], Course]:
    def made(tmp_path: Path) -> Course:
        def prepared(place: Path) -> tuple[FakeKernel, SetLaptopMode]:
            firmware = laptop(place, armoury=armoury)
            for each in earlier:
                switch(firmware, each)
                if each == "discrete":
                    firmware.kernel.reboot()
            return firmware.kernel, SetLaptopMode(mode)

        return Course(tmp_path, prepared)

    return made


class TestFaults(EveryFault):
    """A fault at each operation of a change of the mode."""

    courses: ClassVar[Courses] = {
        "off": _course("integrated"),
        "on": _course("hybrid", "integrated"),
        "lent": _course("vfio"),
        "returned": _course("hybrid", "vfio"),
        "panel": _course("discrete", armoury=False),
        "panel-back": _course("hybrid", "discrete", armoury=False),
    }
