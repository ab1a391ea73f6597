"""The commonest failures of public scripts that lend the console's card, by number of report.

Those that have a test elsewhere: 6 in tests/unit/libvirt/test_hook_release.py (a guest that could
not start ends no session), 11 and 12 in tests/unit/libvirt/preflight (the hook's mode and label),
14 in tests/unit/libvirt/test_hook_release.py (the hook's pipes).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.fakes import desktop as desktops
from tests.fakes.live_desktop import LiveDesktop
from tests.unit.passthrough.test_release import FIRST, bind, driver, plan, refusal, unbind
from vfiomgr.desktop.steps import SetModules
from vfiomgr.host.tree import HostTree
from vfiomgr.users.desktop import modules_above

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULES = ("uvm", "modeset", "drm", "peermem")
NODE = "/dev/dri/renderD128"


def test_1_a_program_that_has_only_mapped_the_card_is_a_user(tmp_path: Path) -> None:
    """The unbind would not return: gnome-shell had /dev/nvidia0 as `mem` only."""
    desktop = desktops.gnome(tmp_path)
    desktop.service(2000, "ollama", "ollama.service", "/dev/null")
    desktop.sysfs.put("/proc/2000/maps", f"7f00-7f01 rw-s 0 00:06 400    {NODE}")
    assert "ollama (PID 2000, ollama.service)" in refusal(LiveDesktop(desktop)).message


def test_2_only_services_that_had_the_card_open_are_stopped_and_started(tmp_path: Path) -> None:
    desktop = desktops.nvidia(tmp_path)
    desktop.service(860, "nvidia-powerd", "nvidia-powerd.service")  # runs, without the card
    live = LiveDesktop(desktop)
    bind(live)
    unbind(live)
    assert "stop nvidia-persistenced.service" in live.log
    assert "start nvidia-persistenced.service" in live.log
    assert not any("powerd" in text for text in live.log)


@pytest.mark.parametrize("order", [*itertools.permutations(MODULES)])
def test_3_no_module_is_unloaded_before_those_that_need_it(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    """Whatever the order of the directory: the names of `holders` decide."""
    needs = {"uvm": "", "modeset": "", "drm": "modeset", "peermem": ""}
    for name in order:
        needed = f"nvidia_{needs[name]}" if needs[name] else "nvidia"
        (tmp_path / f"sys/module/{needed}/holders/nvidia_{name}").mkdir(parents=True)
        (tmp_path / f"sys/module/nvidia_{name}").mkdir(parents=True, exist_ok=True)
    found = modules_above(HostTree(tmp_path), "nvidia")
    assert {*found} == {"nvidia", *(f"nvidia_{name}" for name in needs)}
    assert found[0] == "nvidia"
    assert found.index("nvidia_modeset") < found.index("nvidia_drm")


def test_4_a_program_that_ends_late_is_waited_for(tmp_path: Path) -> None:
    """Not the unit's state counts, but the open files: Xorg outlived a stopped sddm."""
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.late[1200] = 3
    bind(live)
    assert driver(live) == "vfio-pci"
    assert live.late[1200] == 0


def test_4_a_program_that_never_ends_brings_the_desktop_back(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.immortal.add(1200)
    with pytest.raises(Exception, match=r"still in use after 40 seconds by gnome-shell \(PID 1200"):
        bind(live)
    assert live.is_active("gdm.service")
    assert live.has_screen()
    assert driver(live) == "amdgpu"


def test_5_each_session_on_the_card_ends_and_no_other_one(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.session("7", UID="1001", USER="bert", VTNR="3")
    desktop.of_user(1700, "gnome-shell", "org.gnome.Shell@wayland.service", NODE, uid=1001)
    desktop.session("9", UID="1002", USER="carl", SEAT="", VTNR="", REMOTE="1", TYPE="tty")
    live = LiveDesktop(desktop)
    bind(live)
    assert [text for text in live.log if text.startswith("end")] == [
        "end session 2",
        "end session 7",
    ]
    assert live.kernel.sysfs.exists("/run/systemd/sessions/9")


def test_7_the_console_is_back_before_the_display_manager_starts(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    unbind(live)
    assert live.started_with_screen == {"gdm.service": True}


def test_8_a_console_that_vanishes_with_the_last_frame_buffer_is_released(tmp_path: Path) -> None:
    """Fbcon unregisters, and its directory is gone before the next write."""
    live = LiveDesktop(desktops.headless(tmp_path))
    live.console_vanishes = True
    bind(live)
    assert driver(live) == "vfio-pci"
    unbind(live)
    assert live.has_screen()


@pytest.mark.parametrize("host", [desktops.gnome, desktops.nvidia, desktops.sway])
def test_9_no_plan_unloads_a_module_of_vfio(
    tmp_path: Path, host: Callable[[Path], desktops.Desktop]
) -> None:
    live = LiveDesktop(host(tmp_path))
    steps = plan(live).steps
    assert not any(isinstance(s, SetModules) and any("vfio" in m for m in s.before) for s in steps)
    bind(live)
    assert live.kernel.sysfs.exists("/sys/module/vfio_pci")
    assert not any(text.startswith("unload vfio") for text in live.log)


def test_10_what_keeps_the_audio_open_goes_before_its_driver(tmp_path: Path) -> None:
    """The unbind of snd_hda_intel waits in snd_card_free, and no signal ends it."""
    desktop = desktops.gnome(tmp_path)
    desktop.of_user(1310, "pipewire", "pipewire.service", "/dev/snd/controlC0")
    desktop.sysfs.put("/usr/lib/systemd/user/pipewire.socket", "[Socket]")
    steps = [step.describe() for step in plan(LiveDesktop(desktop)).steps]
    socket, service = (f"stop pipewire.{kind} of user 1000" for kind in ("socket", "service"))
    awaited = next(text for text in steps if "wait until" in text)
    assert steps.index(socket) < steps.index(service) < steps.index(awaited)


def test_13_the_hook_cannot_wait_for_the_libvirt_that_waits_for_it() -> None:
    """It does not even import libvirt's library."""
    code = (
        "import sys, vfiomgr.libvirt.commands.hook, vfiomgr.libvirt.guest_hook\n"
        "sys.exit('libvirt' in sys.modules)"
    )
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 0


def test_15_a_slot_with_the_keyboard_is_refused(tmp_path: Path) -> None:
    """Some APUs have a USB controller in the slot of their GPU."""
    desktop = desktops.gnome(tmp_path)
    desktop.keyboard_behind("0000:01:00.2", group=10, bridge="0000:00:01.0")
    error = refusal(LiveDesktop(desktop))
    assert "0000:01:00.2" in error.message
    assert "keyboard" in error.message
    assert str(FIRST) not in error.hint
