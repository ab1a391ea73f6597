"""What the reader of a desktop makes of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.desktop import Desktop, headless
from tests.unit.host_files import tree_of
from vfiomgr.users.desktop import Framebuffer, VirtualConsole, read_desktop
from vfiomgr.users.laptop import GraphicsSwitch

if TYPE_CHECKING:
    from pathlib import Path


def test_sessions_with_their_fields(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.node("226:0", "card0")
    desktop.session("3", TYPE="x11", DEVICES="13:64 226:0 29:0 ", VTNR="7")
    desktop.session("4", UID="", USER="")
    desktop.sysfs.put("/run/systemd/sessions/3.ref", "")
    third, fourth = read_desktop(desktop.kernel).sessions
    assert (third.id, third.user, third.uid, third.vt) == ("3", "anna", 1000, "7")
    assert third.nodes == ("/dev/dri/card0",)
    assert third.is_graphical
    assert fourth.uid is None


def test_a_session_from_elsewhere_is_not_graphical(tmp_path: Path) -> None:
    desktop = headless(tmp_path)
    desktop.session("6", REMOTE="1")
    assert not any(one.is_graphical for one in read_desktop(desktop.kernel).sessions)


def test_only_known_programs_and_holders_are_read(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.of_user(1200, "gnome-shell", "org.gnome.Shell@wayland.service")
    desktop.of_session(1201, "blender", "2")
    desktop.of_session(1202, "bash", "2")
    desktop.session("2")
    facts = read_desktop(desktop.kernel, {1201})
    shell, blender = facts.processes
    assert (shell.uid, shell.session, shell.unit) == (
        1000,
        None,
        "org.gnome.Shell@wayland.service",
    )
    assert (blender.command, blender.session) == ("blender", "2")
    assert facts.session_of(shell) == facts.session_of(blender) == facts.sessions[0]


def test_consoles_and_framebuffers(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        sys/class/vtconsole/vtcon1/name: (M) frame buffer device
        sys/class/vtconsole/vtcon1/bind: 1
        sys/class/graphics/fb0/name: EFI VGA
        sys/class/graphics/fb0/device -> ../../../devices/platform/efi-framebuffer.0
        sys/class/graphics/fbcon/cursor_blink: 0
        sys/bus/platform/devices/serial8250 -> ../../../devices/platform/serial8250
        sys/devices/pci0000:00/0000:01:00.0/simple-framebuffer.0/driver -> ../simple-framebuffer
        sys/bus/platform/devices/simple-framebuffer.0 -> ../../../devices/pci0000:00/0000:01:00.0/simple-framebuffer.0
        """,  # noqa: E501 - a link
    )
    facts = read_desktop(tree)
    assert facts.consoles == (VirtualConsole("vtcon1", "(M) frame buffer device", is_bound=True),)
    assert facts.framebuffers == (Framebuffer("fb0", "EFI VGA", "efi-framebuffer.0"),)
    (platform,) = facts.platform_framebuffers
    assert (platform.driver, platform.device) == ("simple-framebuffer", "0000:01:00.0")
    assert [text.partition(":")[0] for text in facts.unread] == [
        "programs of the desktop",
        "user sessions",
        "lingering users",
    ]


def test_a_running_host_without_a_directory_has_none_of_it(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.sysfs.put("/run/systemd/notify", "")
    for place in ("/run/systemd/sessions", "/sys/class/vtconsole"):
        desktop.sysfs.drop(place)
    facts = read_desktop(desktop.kernel)
    assert (facts.unread, facts.sessions, facts.consoles) == ((), (), ())


def test_a_panel_of_the_discrete_gpu(tmp_path: Path) -> None:
    place = "sys/class/firmware-attributes/asus-armoury/attributes/gpu_mux_mode/current_value"
    for text, value in (("0", False), ("1", True), ("", None)):
        laptop = read_desktop(tree_of(tmp_path / f"_{text}", f"{place}: {text}")).laptop
        assert laptop.mux == GraphicsSwitch(f"/{place}", value)
    assert read_desktop(tree_of(tmp_path / "none", "sys/x: 1")).laptop.mux is None


@pytest.mark.parametrize(("init", "missing"), [("systemd", 2), ("openrc-init", 0), ("", 2)])
def test_sessions_and_lingering_users_are_unknown_only_where_systemd_keeps_them(
    tmp_path: Path, init: str, missing: int
) -> None:
    facts = read_desktop(tree_of(tmp_path, f"proc/1/comm: {init}"))
    names = [text.partition(":")[0] for text in facts.unread]
    assert sum(name in ("user sessions", "lingering users") for name in names) == missing


@pytest.mark.parametrize("above", ["etc", "run", "usr/local/lib", "usr/lib", "lib"])
def test_sockets_for_users_are_found_where_systemd_looks_for_units(
    tmp_path: Path, above: str
) -> None:
    tree = tree_of(tmp_path, f"{above}/systemd/user/pipewire.socket: [Socket]")
    assert read_desktop(tree).user_sockets == ("pipewire.socket",)
