"""`vfiomgr bind --release`: the desktop releases a card, and has it again afterwards."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import desktop as desktops
from tests.fakes.bars import FakeBar
from tests.fakes.faults import PowerCut
from tests.fakes.live_desktop import LiveDesktop
from tests.unit.engine.faults import STRIDE
from vfiomgr.desktop.plan import LOCK
from vfiomgr.engine.plan import DEADLINE
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import Refusal, RollbackIncomplete, RolledBack, VfiomgrError
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.function import present_bars
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.released import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fakes.desktop import Desktop
    from vfiomgr.engine.plan import Plan, Step
    from vfiomgr.host.programs import ProgramAnswer

FIRST, SECOND = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:02:00.0")
RELEASE = Bind((FIRST,), release=True)
SECOND_TOO = Bind((SECOND,), release=True)


def bind(live: LiveDesktop, request: Bind = RELEASE) -> None:
    api.apply(request, tree=live.kernel)


def unbind(live: LiveDesktop, address: PciAddress = FIRST) -> None:
    api.apply(Unbind((address,)), tree=live.kernel)


def plan(live: LiveDesktop, request: Bind = RELEASE) -> Plan:
    return api.host_at(live.kernel).plan(request)


def driver(live: LiveDesktop, address: PciAddress = FIRST) -> str | None:
    return live.kernel.driver_of(str(address))


def refusal(live: LiveDesktop, request: Bind = RELEASE) -> Refusal:
    with pytest.raises(Refusal) as caught:
        bind(live, request)
    assert live.log == []
    return caught.value


def records(live: LiveDesktop) -> list[str]:
    """Without the temporary file that a death leaves, which the next record replaces."""
    return [name for name in live.kernel.children(RELEASED) if not name.startswith(".")]


def test_gnome_on_the_only_card_goes_and_returns(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    assert driver(live) == "vfio-pci"
    assert live.log == ["stop gdm.service", "end session 2"]
    assert records(live) == [f"{FIRST}.json"]
    unbind(live)
    assert driver(live) == "amdgpu"
    assert live.log[2:] == ["start gdm.service"]
    assert live.has_screen()
    assert records(live) == []


def test_the_plan_says_all_that_will_happen_in_order(tmp_path: Path) -> None:
    shown = str(plan(LiveDesktop(desktops.gnome(tmp_path))))
    expected = [
        "ends session 2 of anna (wayland, seat0); unsaved work is lost",
        "this host has no screen until: vfiomgr unbind 0000:01:00.0",
        "stop gdm.service",
        "systemctl stop gdm.service",
        "end session 2 of anna",
        "loginctl terminate-session 2",
        "wait until no program has it open",
        "then: 0000:01:00.0: detach the text console from its frame buffer",
        "then: 0000:01:00.0: amdgpu -> vfio-pci",
    ]
    places = [shown.index(text) for text in expected]
    assert places == sorted(places)


def test_only_one_run_at_a_time_changes_what_all_displays_share(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    assert LOCK in plan(live).locks
    bind(live)
    assert LOCK in api.host_at(live.kernel).plan(Unbind((FIRST,))).locks
    place = RELEASED / f"{FIRST}.json"
    paused = live.kernel.sysfs.get(place).replace('"stopped"', '"paused"')
    live.kernel.sysfs.put(place, paused.replace('"paused": []', '"stopped": []'))
    resumed = plan(live)
    assert "start sddm.service" in str(resumed)
    assert LOCK in resumed.locks


def test_plasma_under_sddm_ends_with_its_session(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path))
    bind(live)
    assert live.log == ["stop sddm.service", "end session 3"]
    unbind(live)
    assert live.log[2:] == ["start sddm.service"]


def test_the_compositor_of_a_lingering_user_is_stopped_by_its_unit(tmp_path: Path) -> None:
    desktop = desktops.kde(tmp_path)
    desktop.sysfs.put("/var/lib/systemd/linger/anna", "")
    live = LiveDesktop(desktop)
    live.lingering.add("1000")
    bind(live)
    assert live.log == ["stop sddm.service", "end session 3", "stop plasma-kwin_wayland.service"]


def test_another_program_of_a_lingering_user_is_refused_before_anything_ends(
    tmp_path: Path,
) -> None:
    desktop = desktops.kde(tmp_path)
    desktop.sysfs.put("/var/lib/systemd/linger/anna", "")
    desktop.of_user(1400, "firefox", "app-firefox.service", "/dev/dri/renderD128")
    assert "firefox (PID 1400" in refusal(LiveDesktop(desktop)).message


def test_sway_of_a_login_keeps_the_login_away_until_the_card_returns(tmp_path: Path) -> None:
    desktop = desktops.sway(tmp_path)
    desktop.service(700, "agetty", "getty@tty1.service")
    live = LiveDesktop(desktop)
    bind(live)
    assert live.log == ["stop getty@tty1.service", "end session 1"]
    unbind(live)
    assert live.log[2:] == ["start getty@tty1.service"]


def test_an_x_server_of_the_display_manager_ends_with_it(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.xfce(tmp_path))
    bind(live)
    assert live.log == ["stop lightdm.service", "end session c2"]
    unbind(live)
    assert live.log[2:] == ["start lightdm.service"]


def test_without_a_desktop_only_the_console_is_detached(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.headless(tmp_path))
    bind(live)
    assert (driver(live), live.log, live.has_screen()) == ("vfio-pci", [], False)
    unbind(live)
    assert (driver(live), live.has_screen()) == ("amdgpu", True)


def test_a_console_that_another_frame_buffer_kept_is_attached_again(tmp_path: Path) -> None:
    """A new frame buffer brings a console that had vanished back by itself, but not this one."""
    live = LiveDesktop(desktops.headless(tmp_path))
    live.is_on_all_cards = True
    bind(live)
    assert not live.has_screen()
    unbind(live)
    assert live.has_screen()


def test_the_console_is_found_by_its_name(tmp_path: Path) -> None:
    """On BIOS hosts the frame buffer is vtcon0 once its driver is loaded."""
    desktop = desktops.headless(tmp_path)
    for name, of in (("vtcon0", "(M) frame buffer device"), ("vtcon1", "(M) dummy device")):
        desktop.sysfs.put(f"/sys/class/vtconsole/{name}/name", of)
        desktop.sysfs.put(f"/sys/class/vtconsole/{name}/bind", str(int(name == "vtcon0")))
    bind(LiveDesktop(desktop))
    assert ("/sys/class/vtconsole/vtcon0/bind", "0") in desktop.kernel.writes


# ---- a second card


def test_niri_closes_a_second_card_and_its_session_goes_on(tmp_path: Path) -> None:
    desktop = desktops.Desktop(tmp_path, cards=2)
    desktop.display_manager("greetd.service", "greetd")
    desktop.node("226:0", "card0")
    desktop.session("1", SERVICE="greetd", DEVICES="226:0 ")
    nodes = ("/dev/dri/card0", "/dev/dri/card1", "/dev/dri/renderD129")
    desktop.of_user(1200, "niri", "niri.service", *nodes)
    live = LiveDesktop(desktop)
    bind(live, SECOND_TOO)
    assert driver(live, SECOND) == "vfio-pci"
    assert live.is_active("niri.service")


def test_kwin_closes_a_second_card_and_its_session_goes_on(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    bind(live, SECOND_TOO)
    assert driver(live, SECOND) == "vfio-pci"
    assert live.log == ["remove card1", "remove renderD129"]
    assert live.is_active("plasma-kwin_wayland.service")
    unbind(live, SECOND)
    assert driver(live, SECOND) == "amdgpu"


@pytest.mark.parametrize("program", ["kwin_wayland", "sway"])
def test_a_screen_on_the_second_card_does_not_keep_it(tmp_path: Path, program: str) -> None:
    """Who shows it is its DRM master: a sign of the console's display, but not of the primary."""
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    live.desktop.sysfs.put("/proc/1200/comm", program)
    for number, address in enumerate((FIRST, SECOND)):
        live.desktop.screen(number, str(address), program, 1200)
    assert "compositors close 0000:02:00.0" in " ".join(plan(live, SECOND_TOO).notes)
    device = api.scan(live.kernel).device_named(str(SECOND))
    assert device is not None
    signs = device.display_signs
    assert signs == (f"{program} (PID 1200) is its DRM master, with a screen switched on",)


def test_without_a_primary_card_no_compositor_is_asked_to_close_one(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    live.desktop.sysfs.put(f"/sys/bus/pci/devices/{FIRST}/boot_vga", "0")
    live.desktop.sysfs.put("/sys/class/vtconsole/vtcon1/bind", "0")
    assert "ends session 3" in " ".join(plan(live, SECOND_TOO).notes)


def test_a_compositor_that_keeps_the_card_is_named_with_what_ends_it(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    live.deaf.add("kwin_wayland")
    with pytest.raises(RolledBack) as caught:
        bind(live, SECOND_TOO)
    assert "still in use after 40 seconds by kwin_wayland (PID 1200" in caught.value.message
    assert "vfiomgr bind --release --end-sessions 0000:02:00.0" in caught.value.hint
    assert live.log[2:] == ["add card1", "add renderD129"]
    assert records(live) == []
    bind(live, Bind((SECOND,), release=True, end_sessions=True))
    assert driver(live, SECOND) == "vfio-pci"


def test_gnome_starts_again_without_the_second_card(tmp_path: Path) -> None:
    """It closes no card while it runs: its session ends, and the greeter is back at once."""
    live = LiveDesktop(desktops.gnome(tmp_path, cards=2))
    assert str(plan(live, SECOND_TOO)).splitlines()[-1] == "then: start gdm.service"
    bind(live, SECOND_TOO)
    assert driver(live, SECOND) == "vfio-pci"
    assert live.log == ["stop gdm.service", "end session 2", "start gdm.service"]
    assert live.has_screen()
    unbind(live, SECOND)
    assert live.log[3:] == []


def test_the_console_moves_to_the_display_that_remains(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path, cards=2)
    live = LiveDesktop(desktop)
    live.is_on_all_cards = True
    bind(live)
    assert driver(live) == "vfio-pci"
    assert live.has_screen()


# ---- services


def test_audio_of_a_user_who_stays_is_stopped_and_started(tmp_path: Path) -> None:
    desktop = desktops.kde(tmp_path, cards=2)
    for name in ("pipewire", "wireplumber"):
        desktop.of_user(1300 + len(name), name, f"{name}.service", "/dev/snd/controlC1")
    desktop.sysfs.put("/usr/lib/systemd/user/pipewire.socket", "[Socket]")
    live = LiveDesktop(desktop)
    bind(live, SECOND_TOO)
    names = ["pipewire.socket", "pipewire.service", "wireplumber.service"]
    stopped = [text.removeprefix("stop ") for text in live.log if text.startswith("stop")]
    assert stopped == names[1:]
    assert [text for text in live.log if text.startswith("start")] == [
        f"start {name}" for name in reversed(names)
    ]


def test_nvidia_services_and_modules_go_in_their_order_and_return(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.nvidia(tmp_path))
    bind(live)
    unloaded = ["nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia"]
    assert live.log == [
        "stop gdm.service",
        "stop nvidia-persistenced.service",
        "end session 2",
        *(f"unload {name}" for name in unloaded),
    ]
    assert driver(live) == "vfio-pci"
    unbind(live)
    assert driver(live) == "nvidia"
    assert all(live.kernel.sysfs.exists(f"/sys/module/{name}") for name in unloaded)
    assert live.log[-2:] == ["start nvidia-persistenced.service", "start gdm.service"]


@pytest.mark.parametrize(("first", "last"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_two_cards_at_once_leave_nothing_for_a_display_manager_until_one_returns(
    tmp_path: Path, first: PciAddress, last: PciAddress
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path, cards=2))
    both = Bind((FIRST, SECOND), release=True)
    assert "this host has no screen until" in str(plan(live, both))
    bind(live, both)
    assert driver(live, FIRST) == driver(live, SECOND) == "vfio-pci"
    assert live.log == ["stop gdm.service", "end session 2"]
    unbind(live, first)
    assert live.log[2:] == ["start gdm.service"]
    unbind(live, last)
    assert live.has_screen()
    assert records(live) == []


def test_nvidia_modules_stay_if_another_card_needs_them(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.nvidia(tmp_path, cards=2))
    bind(live, Bind((SECOND,), release=True))
    assert driver(live, SECOND) == "vfio-pci"
    assert driver(live) == "nvidia"
    assert not [text for text in live.log if text.startswith("unload")]


# ---- what is refused


def test_a_program_outside_the_desktop_is_refused_by_name(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.service(2000, "ollama", "ollama.service", "/dev/dri/renderD128")
    error = refusal(LiveDesktop(desktop))
    assert "in use by: ollama (PID 2000, ollama.service)" in error.message


def test_sessions_that_cannot_be_read_are_a_reason_to_refuse(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.sysfs.put("/run/systemd/sessions/2", "", 0o200)
    error = refusal(LiveDesktop(desktop))
    assert "cannot read /run/systemd/sessions/2" in error.message
    assert error.hint


@pytest.mark.parametrize("name", ["lingering users", "panel"], ids=["lingering users", "the panel"])
def test_what_cannot_be_read_of_the_desktop_is_a_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    if name == "panel":
        status = f"/sys/bus/pci/devices/{FIRST}/drm/card0/card0-eDP-1/status"
        live.kernel.sysfs.put(status, "", 0o200)
        live.kernel.sysfs.link("/sys/class/drm/card0-eDP-1", status.removesuffix("/status"))
        expected = "cannot read /sys/class/drm/card0-eDP-1/status"
    else:
        listed = live.kernel.why_unlisted
        linger = "/var/lib/systemd/linger"
        monkeypatch.setattr(
            live.kernel,
            "why_unlisted",
            lambda at: "Input/output error" if at == linger else listed(at),
        )
        expected = "lingering users: cannot list /var/lib/systemd/linger: Input/output error"
    error = refusal(live)
    assert expected in error.message
    assert error.hint


def test_the_panel_of_a_laptop_is_named_with_what_brings_it_back(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    connector = f"/sys/bus/pci/devices/{FIRST}/drm/card0/card0-eDP-1"
    live.kernel.sysfs.put(f"{connector}/status", "connected")
    live.kernel.sysfs.link("/sys/class/drm/card0-eDP-1", connector)
    expected = f"the built-in panel of this laptop is black until: vfiomgr unbind {FIRST}"
    assert expected in plan(live).notes


def test_a_laptop_whose_panel_is_on_the_card_is_refused(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.sysfs.put("/sys/devices/platform/asus-nb-wmi/gpu_mux_mode", "0")
    error = refusal(LiveDesktop(desktop))
    assert "wired to 0000:01:00.0" in error.message
    assert error.hint == "vfiomgr laptop hybrid, and reboot"


def test_a_laptop_whose_panel_may_be_on_the_card_is_refused(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.sysfs.put("/sys/devices/platform/asus-nb-wmi/gpu_mux_mode", "", 0o200)
    error = refusal(LiveDesktop(desktop))
    assert error.message.endswith("cannot read /sys/devices/platform/asus-nb-wmi/gpu_mux_mode")
    assert "asus_wmi" in error.hint


def test_a_user_cannot_pass_options_to_systemctl(tmp_path: Path) -> None:
    """Users make groups of any name below their own manager."""
    desktop = desktops.kde(tmp_path)
    desktop.sysfs.put("/var/lib/systemd/linger/anna", "")
    desktop.of_user(1210, "kwin_wayland", "--host=example.service", "/dev/dri/card0")
    live = LiveDesktop(desktop)
    live.lingering.add("1000")
    assert "--host" not in str(plan(live))


@pytest.mark.parametrize("after", [False, True], ids=["stop", "start"])
def test_the_run_waits_longer_for_a_step_than_the_step_for_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """A run that is abandoned is not rolled back."""
    live = LiveDesktop(desktops.nvidia(tmp_path))
    if after:
        bind(live)
        live.limited |= {"gdm.service", "nvidia-persistenced.service"}
    kernel, waits = live.kernel, list[float]()
    call, ask = kernel.call, kernel.ask
    begun: list[tuple[Step, int]] = []

    def timed(*command: str, limit: float) -> None:
        waits.append(limit)
        call(*command, limit=limit)

    def asked(command: Sequence[str], seconds: float = 0) -> ProgramAnswer | None:
        waits.append(seconds)
        return ask(command, seconds)

    monkeypatch.setattr(kernel, "call", timed)
    monkeypatch.setattr(kernel, "ask", asked)
    request = Unbind((FIRST,)) if after else RELEASE
    api.apply(request, tree=kernel, on_step=lambda step: begun.append((step, len(waits))))
    ends = [*(first for _, first in begun[1:]), len(waits)]
    took = [(step, sum(waits[first:end])) for (step, first), end in zip(begun, ends, strict=True)]
    assert sum(bool(seconds) for _, seconds in took) > 1
    assert all((step.deadline or DEADLINE) > seconds for step, seconds in took)


def test_a_card_with_only_the_firmware_framebuffer_is_refused(tmp_path: Path) -> None:
    """vfio-pci removes it, and no plan can bring it back: efi-framebuffer/bind says ENODEV."""
    desktop = desktops.Desktop(tmp_path, driver=None)
    lines = f"e0000000-efffffff : {FIRST}\n  e0000000-e0ffffff : efifb"
    desktop.sysfs.put("/proc/iomem", lines)
    error = refusal(LiveDesktop(desktop))
    assert "only shows the firmware's framebuffer (efifb)" in error.message
    assert "load the native driver" in error.hint


def test_a_compositor_on_a_virtio_card_is_seen_and_released(tmp_path: Path) -> None:
    """Older kernels have the card below the virtio device of the function."""
    live = LiveDesktop(desktops.virtio(tmp_path))
    error = refusal(live, Bind((FIRST,)))
    assert "in use by: gnome-shell (PID 1200" in error.message
    bind(live)
    assert live.log == ["stop gdm.service", "end session 2"]
    assert driver(live) == "vfio-pci"
    unbind(live)
    assert live.has_screen()
    assert live.started_with_screen == {"gdm.service": True}


def test_kwin_closes_a_second_card_of_virtio(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.virtio(tmp_path, cards=2))
    live.desktop.of_user(1200, "kwin_wayland", "plasma-kwin_wayland.service", "/dev/dri/card1")
    bind(live, SECOND_TOO)
    assert live.log == ["remove card1", "remove renderD129"]
    assert driver(live, SECOND) == "vfio-pci"


def test_a_program_on_the_buses_of_the_screens_is_refused(tmp_path: Path) -> None:
    """i2c_del_adapter waits for it, without end: ddcutil, powerdevil, OpenRGB."""
    desktop = desktops.gnome(tmp_path)
    card = f"/sys/bus/pci/devices/{FIRST}"
    desktop.sysfs.make(f"{card}/i2c-3/i2c-dev/i2c-3")
    desktop.sysfs.make(f"{card}/drm/card0/card0-DP-1/i2c-7/i2c-dev/i2c-7")
    desktop.service(2100, "openrgb", "openrgb.service", "/dev/i2c-7")
    error = refusal(LiveDesktop(desktop))
    assert "in use by: openrgb (PID 2100, openrgb.service)" in error.message


def test_the_card_does_not_sleep_too_deeply_while_it_waits_for_the_guest(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    d3cold = f"/sys/bus/pci/devices/{FIRST}/d3cold_allowed"
    live.kernel.sysfs.put(d3cold, "1")
    bind(live)
    assert live.kernel.sysfs.get(d3cold) == "0"
    unbind(live)
    assert live.kernel.sysfs.get(d3cold) == "1"


def test_without_release_the_console_is_refused_as_before(tmp_path: Path) -> None:
    error = refusal(LiveDesktop(desktops.gnome(tmp_path)), Bind((FIRST,)))
    assert "is the console's display" in error.message


def test_the_console_is_not_taken_at_each_boot_unless_it_is_allowed(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    kept = replace(RELEASE, persist=True)
    error = refusal(live, kept)
    assert "--persist leaves this host without a screen at each boot" in error.message
    assert "leave out --persist" in error.hint
    allowed = replace(kept, allow=frozenset({"boot-display"}))
    assert any("05-vfiomgr-0000:01:00.0.rules" in text for text in plan(live, allowed).deferred)


def test_a_second_card_is_released_and_taken_at_each_boot(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.kde(tmp_path, cards=2))
    kept = replace(SECOND_TOO, persist=True)
    assert any("05-vfiomgr-0000:02:00.0.rules" in text for text in plan(live, kept).deferred)


def test_a_function_that_is_no_display_is_bound_as_usual(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.keyboard_behind("0000:02:00.0", group=30, bridge="0000:00:01.0")
    desktop.sysfs.put("/proc/bus/input/devices", "")
    made = plan(LiveDesktop(desktop), Bind((SECOND,), release=True))
    assert "--release has no effect: no display is bound" in made.notes
    assert "d3cold" not in str(made)


def test_a_card_on_vfio_needs_no_release(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    log = list(live.log)
    bind(live)
    assert live.log == log


# ---- failures and deaths


def is_back(live: LiveDesktop, state: dict[str, str]) -> None:
    """The screen first of all, then the desktop, and no trace of the attempt."""
    assert live.has_screen()
    assert live.is_active("gdm.service")
    assert records(live) == []
    assert cut_off_runs(live.kernel, live.kernel.read(BOOT_ID)) == []
    now = live.kernel.state(modules=False)
    assert {k for k in now.keys() | state.keys() if now.get(k) != state.get(k)} == set()


HOSTS: dict[str, Callable[[Path], Desktop]] = {
    "gnome": desktops.gnome,
    "nvidia": desktops.nvidia,
}


def failure(live: LiveDesktop) -> Exception | None:
    try:
        bind(live)
    except (VfiomgrError, OSError) as error:
        return error
    return None


def operations(tmp_path: Path, host: Callable[[Path], Desktop]) -> range:
    """Every third operation, and all of them with `make lab-faults`."""
    live = LiveDesktop(host(tmp_path / "complete"))
    earlier = len(live.kernel.operations)
    bind(live)
    return range(1, len(live.kernel.operations) - earlier + 1, STRIDE)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("late", [False, True], ids=["rejected", "half-done"])
def test_a_failure_at_any_operation_brings_the_screen_back(
    tmp_path: Path, host: Callable[[Path], Desktop], *, late: bool
) -> None:
    failed = 0
    for at in operations(tmp_path, host):
        live = LiveDesktop(host(tmp_path / str(at)))
        state = live.kernel.state(modules=False)
        (live.kernel.fail_after if late else live.kernel.fail)(at=at, errno=errno.EIO)
        error = failure(live)
        if error is not None:
            failed += 1
            assert not isinstance(error, RollbackIncomplete), (at, error)
            is_back(live, state)
    assert failed


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_death_at_any_operation_brings_the_screen_back(
    tmp_path: Path, host: Callable[[Path], Desktop]
) -> None:
    """By `recover`, which the service of the command runs whenever the command ends."""
    for at in operations(tmp_path, host):
        live = LiveDesktop(host(tmp_path / str(at)))
        state = live.kernel.state(modules=False)
        live.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            bind(live)
        live.kernel.revive()
        api.recover(tree=live.kernel)
        is_back(live, state)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_after_a_death_at_any_operation_unbind_brings_the_screen_back(
    tmp_path: Path, host: Callable[[Path], Desktop]
) -> None:
    """As the hook does when libvirt releases a guest that never started."""
    for at in operations(tmp_path, host):
        live = LiveDesktop(host(tmp_path / str(at)))
        live.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            bind(live)
        live.kernel.revive()
        unbind(live)
        api.recover(tree=live.kernel)
        assert live.has_screen()
        assert live.is_active("gdm.service")
        assert driver(live) == ("nvidia" if host is desktops.nvidia else "amdgpu")
        assert records(live) == []


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_the_same_request_after_a_death_releases_the_card(
    tmp_path: Path, host: Callable[[Path], Desktop]
) -> None:
    for at in operations(tmp_path, host):
        live = LiveDesktop(host(tmp_path / str(at)))
        live.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            bind(live)
        live.kernel.revive()
        bind(live)
        assert driver(live) == "vfio-pci"
        unbind(live)
        assert live.has_screen()
        assert live.is_active("gdm.service")
        assert records(live) == []


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_death_at_any_operation_of_the_return_ends_with_the_screen(
    tmp_path: Path, host: Callable[[Path], Desktop]
) -> None:
    """`recover` finishes it: taking the card again would leave the host without a screen."""
    first = LiveDesktop(host(tmp_path / "complete"))
    state = first.kernel.state(modules=False)
    bind(first)
    earlier = len(first.kernel.operations)
    unbind(first)
    finished = 0
    for at in range(1, len(first.kernel.operations) - earlier + 1, STRIDE):
        live = LiveDesktop(host(tmp_path / str(at)))
        bind(live)
        live.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            unbind(live)
        live.kernel.revive()
        ended = api.recover(tree=live.kernel)
        finished += sum(one.is_finished for one in ended)
        if not ended:
            unbind(live)  # it had not begun
        is_back(live, state)
    assert finished


def test_recover_with_undo_takes_the_card_again(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    live.kernel.kill(at=8, after=True)
    with pytest.raises(PowerCut):
        unbind(live)
    live.kernel.revive()
    assert api.host_at(live.kernel).recover(undo=True)
    assert driver(live) == "vfio-pci"


def test_a_display_manager_that_does_not_stop_ends_the_attempt(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.broken.add("gdm.service")
    with pytest.raises(RollbackIncomplete, match=r"Job for gdm\.service failed"):
        bind(live)
    assert driver(live) == "amdgpu"
    assert live.has_screen()


def test_a_display_manager_that_does_not_start_again_is_told_and_the_card_stays_back(
    tmp_path: Path,
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    live.broken.add("gdm.service")
    with pytest.warns(UserWarning, match=r"to try again: systemctl start gdm\.service"):
        unbind(live)
    assert driver(live) == "amdgpu"
    assert live.has_screen()


def test_a_record_of_another_device_is_not_restored(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    place = RELEASED / f"{FIRST}.json"
    text = live.kernel.read_text(place)
    assert text is not None
    live.kernel.sysfs.put(place, text.replace('"744c"', '"0000"'))
    unbind(live)
    assert live.log[-1] == "end session 2"


def test_a_record_that_cannot_be_read_is_told_with_what_to_do(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    live.kernel.sysfs.put(RELEASED / f"{FIRST}.json", "{")
    with pytest.warns(UserWarning, match="systemctl start display-manager"):
        unbind(live)
    assert driver(live) == "amdgpu"


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_record_that_cannot_be_read_is_not_replaced(tmp_path: Path, *, is_bound: bool) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    if is_bound:
        bind(live)
    place = f"{RELEASED}/{FIRST}.json"
    live.kernel.sysfs.put(place, "{")
    with (
        pytest.raises(Refusal, match=f"cannot read {place}") as caught,
        pytest.warns(UserWarning, match="systemctl start display-manager"),
    ):
        bind(live)
    assert caught.value.hint.endswith("then remove the file")
    assert live.kernel.sysfs.get(place) == "{"


@pytest.mark.parametrize("desktop", [desktops.gnome, desktops.nvidia])
def test_a_bar_is_resized_while_the_card_is_released(
    tmp_path: Path, desktop: Callable[[Path], Desktop]
) -> None:
    live = LiveDesktop(desktop(tmp_path))
    live.kernel.add_bars(str(FIRST), FakeBar(3, 256, (256, 16384)))
    host_driver, large = driver(live), BarSize(3, 16 << 30)

    def size() -> int:
        (bar,) = (bar for bar in present_bars(live.kernel, FIRST) if bar.index == large.index)
        return bar.size >> 20

    request = replace(RELEASE, bars=(large,))
    live.kernel.bars.room[str(FIRST)] = 8192
    with pytest.raises(RolledBack, match="have no room"):
        bind(live, request)
    assert (driver(live), size(), live.has_screen()) == (host_driver, 256, True)
    live.kernel.bars.room.clear()
    bind(live, request)
    assert (driver(live), size()) == ("vfio-pci", 16384)
    unbind(live)
    assert (driver(live), size(), live.has_screen()) == (host_driver, 256, True)
