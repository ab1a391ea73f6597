"""Desktops on the fake host: sessions of logind, compositors, display managers, text consoles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from tests.fakes.kernel import FakeKernel

if TYPE_CHECKING:
    from pathlib import Path

_MANAGER = "/usr/lib/systemd/system"
_ALIAS = "/etc/systemd/system/display-manager.service"


class Desktop:
    """A host with one or two cards, whose console is on the first; each with its audio function.

    | card | functions | nodes |
    |---|---|---|
    | 0 | 0000:01:00.0/.1 (amdgpu, snd_hda_intel), boot_vga 1 | card0, renderD128, controlC0 |
    | 1 | 0000:02:00.0/.1 (amdgpu, snd_hda_intel) | card1, renderD129, controlC1 |
    """

    def __init__(
        self, root: Path, cards: int = 1, driver: str | None = "amdgpu", vendor: str = "1002"
    ) -> None:
        self.kernel = kernel = FakeKernel(root)
        kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
        kernel.add_driver("amdgpu", ids=[("1002", "*", "03")])
        kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
        kernel.add_driver("virtio-pci", ids=[("1af4", "*", "03")])
        if driver == "nvidia":
            needs = {"nvidia_uvm": "nvidia", "nvidia_modeset": "nvidia"}
            kernel.drivers.others = needs | {"nvidia_drm": "nvidia_modeset"}
            for module in kernel.drivers.others:
                kernel.drivers.load(module)
        kernel.add_driver("snd_hda_intel", ids=[("*", "*", "0403")])
        kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True, loaded=True)
        for number in range(cards):
            self._add_card(number, driver, vendor)
        self._begin()

    @classmethod
    def of(cls, kernel: FakeKernel) -> Self:
        """The desktop of another host."""
        desktop = cls.__new__(cls)
        desktop.kernel = kernel
        desktop._begin()
        return desktop

    def _begin(self) -> None:
        self.sysfs = self.kernel.sysfs
        for place in ("/sys/class/vtconsole", "/sys/class/graphics", "/sys/bus/platform/devices"):
            self.sysfs.make(place)
        self.sysfs.put("/proc/net/tcp", "  sl  local_address rem_address   st")
        self.sysfs.make("/run/systemd/sessions")
        self.sysfs.make("/var/lib/systemd/linger")

    def _add_card(self, number: int, driver: str | None, vendor: str) -> None:
        port = f"0000:00:01.{number}"
        self.kernel.add_pci(
            port,
            vendor="8086",
            device="460d",
            class_code="060400",
            header_type=0x81,
            group=1 + number,
            driver="pcieport",
            reset_methods="",
        )
        bus = number + 1
        below = f"virtio{number}/drm" if driver == "virtio-pci" else "drm"
        nodes = [("drm", f"{below}/card{number}"), ("drm", f"{below}/renderD{128 + number}")]
        self.kernel.add_pci(
            f"0000:{bus:02x}:00.0",
            vendor=vendor,
            device="744c",
            class_code="030000",
            header_type=0x80,
            subsystem="1002:0e3b",
            group=10 + number,
            bridge=port,
            driver=driver,
            boot_vga=not number,
            gives=nodes,
        )
        self.kernel.add_pci(
            f"0000:{bus:02x}:00.1",
            vendor=vendor,
            device="ab30",
            class_code="040300",
            header_type=0x80,
            subsystem="1002:0e3b",
            group=10 + number,
            bridge=port,
            driver="snd_hda_intel",
            gives=[("sound", f"sound/card{number}/controlC{number}")],
        )

    def keyboard_behind(self, address: str, *, group: int, bridge: str) -> None:
        """The only keyboard, at a USB controller."""
        self.kernel.add_driver("xhci_hcd", ids=[("*", "*", "0c03")])
        self.kernel.add_pci(
            address,
            vendor="1002",
            device="7446",
            class_code="0c0330",
            header_type=0x80,
            subsystem="1002:0e3b",
            group=group,
            bridge=bridge,
            driver="xhci_hcd",
        )
        place = os.path.realpath(self.sysfs.real(f"/sys/bus/pci/devices/{address}"))
        below = place.partition("/sys/devices")[2]
        lines = (
            'N: Name="Board"',
            f"S: Sysfs=/devices{below}/usb1/input0",
            "H: Handlers=sysrq leds",
        )
        self.sysfs.put("/proc/bus/input/devices", "\n".join(lines))

    def text_console(self, *, bound: bool = True) -> None:
        """The text console on the frame buffer of the first card."""
        for name, driver, is_bound in (
            ("vtcon0", "(S) dummy device", False),
            ("vtcon1", "(M) frame buffer device", bound),
        ):
            self.sysfs.put(f"/sys/class/vtconsole/{name}/name", driver)
            self.sysfs.put(f"/sys/class/vtconsole/{name}/bind", str(int(is_bound)))
        self.sysfs.put("/sys/class/graphics/fb0/name", "amdgpudrmfb")
        place = "/sys/bus/pci/devices/0000:01:00.0"
        if self.sysfs.exists(f"{place}/virtio0"):
            place = f"{place}/virtio0"
            self.sysfs.drop("/sys/bus/virtio/devices/virtio0")
            self.sysfs.link("/sys/bus/virtio/devices/virtio0", place)
        self.sysfs.link("/sys/class/graphics/fb0/device", place)

    def process(self, pid: int, command: str, cgroup: str, *nodes: str) -> None:
        """A process in a cgroup with nodes open."""
        self.sysfs.put(f"/proc/{pid}/comm", command)
        self.sysfs.put(f"/proc/{pid}/cgroup", f"0::{cgroup}")
        self.sysfs.make(f"/proc/{pid}/fd")
        for number, node in enumerate(nodes, 3):
            self.sysfs.link_absolute(f"/proc/{pid}/fd/{number}", node)

    def service(self, pid: int, command: str, unit: str, *nodes: str) -> None:
        """A service of the system."""
        self.process(pid, command, f"/system.slice/{unit}", *nodes)

    def of_user(self, pid: int, command: str, unit: str, *nodes: str, uid: int = 1000) -> None:
        """A service of a user."""
        manager = f"/user.slice/user-{uid}.slice/user@{uid}.service"
        self.process(pid, command, f"{manager}/session.slice/{unit}", *nodes)

    def of_session(self, pid: int, command: str, session: str, *nodes: str) -> None:
        """A process in the scope of a session of the user 1000."""
        self.process(pid, command, f"/user.slice/user-1000.slice/session-{session}.scope", *nodes)

    def session(self, name: str, **fields: str) -> None:
        """A session, by default of anna at seat0 on Wayland."""
        every = {
            "UID": "1000",
            "USER": "anna",
            "STATE": "active",
            "REMOTE": "0",
            "TYPE": "wayland",
            "CLASS": "user",
            "SEAT": "seat0",
            "VTNR": "2",
            "SERVICE": "gdm-password",
        }
        lines = (f"{key}={value}" for key, value in (every | fields).items())
        text = "\n".join(("# This is private data. Do not parse.", *lines))
        self.sysfs.put(f"/run/systemd/sessions/{name}", text)

    def screen(self, number: int, address: str, command: str, pid: int) -> None:
        """A screen that is switched on, of a program that is the DRM master of its card."""
        place = f"/sys/kernel/debug/dri/{number}"
        self.sysfs.put(f"{place}/name", f"amdgpu dev={address} unique={address}")
        clients = f"command tgid dev master a uid magic\n {command} {pid} {number} y y 0 0"
        self.sysfs.put(f"{place}/clients", clients)
        card = f"/sys/bus/pci/devices/{address}/drm/card{number}"
        self.sysfs.put(f"{card}/card{number}-DP-1/enabled", "enabled")

    def node(self, number: str, name: str) -> None:
        """A node that /sys/dev/char knows by its number."""
        self.sysfs.link(f"/sys/dev/char/{number}", f"/sys/class/drm/{name}")

    def display_manager(self, unit: str, command: str) -> None:
        """A display manager that runs, with systemd's alias."""
        self.sysfs.link_absolute(_ALIAS, f"{_MANAGER}/{unit}")
        self.service(900, command, unit)

    def ssh(self) -> None:
        """An SSH server."""
        self.service(800, "sshd", "ssh.service")


def gnome(root: Path, cards: int = 1) -> Desktop:
    """GNOME on Wayland under GDM, with PipeWire."""
    desktop = Desktop(root, cards)
    every = [f"/dev/dri/card{number}" for number in range(cards)]
    desktop.text_console()
    desktop.display_manager("gdm.service", "gdm3")
    desktop.session("2")
    desktop.of_user(1200, "gnome-shell", "org.gnome.Shell@wayland.service", *every)
    desktop.of_user(1300, "wireplumber", "wireplumber.service", "/dev/snd/controlC0")
    return desktop


def virtio(root: Path, cards: int = 1) -> Desktop:
    """GNOME on a card of virtio, with KWin on the second one."""
    desktop = Desktop(root, cards, driver="virtio-pci", vendor="1af4")
    desktop.text_console()
    desktop.display_manager("gdm.service", "gdm3")
    desktop.session("2")
    first = ("/dev/dri/card0",) if cards == 1 else ()
    desktop.of_user(1200, "gnome-shell", "org.gnome.Shell@wayland.service", *first)
    return desktop


def kde(root: Path, cards: int = 1) -> Desktop:
    """Plasma on Wayland under SDDM; logind opened the cards."""
    desktop = Desktop(root, cards)
    desktop.display_manager("sddm.service", "sddm")
    for number in range(cards):
        desktop.node(f"226:{number}", f"card{number}")
    numbers = " ".join(f"226:{number}" for number in range(cards))
    desktop.session("3", SERVICE="sddm", DEVICES=f"13:64 {numbers} ")
    every = [f"/dev/dri/card{number}" for number in range(cards)]
    desktop.of_user(1200, "kwin_wayland", "plasma-kwin_wayland.service", *every)
    return desktop


def sway(root: Path, cards: int = 1) -> Desktop:
    """Sway, started from a login on the first VT."""
    desktop = Desktop(root, cards)
    desktop.session("1", VTNR="1", SERVICE="login", TYPE="tty", DEVICES="226:0 ")
    desktop.node("226:0", "card0")
    every = [f"/dev/dri/card{number}" for number in range(cards)]
    desktop.of_session(1200, "sway", "1", *every)
    return desktop


def xfce(root: Path, cards: int = 1) -> Desktop:
    """An X server that LightDM runs as root, and a session of it."""
    desktop = Desktop(root, cards)
    desktop.display_manager("lightdm.service", "lightdm")
    every = [f"/dev/dri/card{number}" for number in range(cards)]
    desktop.service(950, "Xorg", "lightdm.service", *every)
    desktop.session("c2", TYPE="x11", SERVICE="lightdm", VTNR="7")
    desktop.of_session(1200, "xfwm4", "c2")
    return desktop


def headless(root: Path) -> Desktop:
    """No desktop: a text console, and a user who came by SSH."""
    desktop = Desktop(root)
    desktop.text_console()
    desktop.ssh()
    desktop.session("5", TYPE="tty", SEAT="", VTNR="", REMOTE="1", SERVICE="sshd")
    return desktop


def nvidia(root: Path, cards: int = 1) -> Desktop:
    """GNOME on cards of NVIDIA, with the DRM module and the persistence daemon."""
    desktop = Desktop(root, cards, driver="nvidia", vendor="10de")
    every = [f"/dev/dri/card{number}" for number in range(cards)]
    desktop.text_console()
    desktop.display_manager("gdm.service", "gdm3")
    desktop.session("2")
    desktop.of_user(1200, "gnome-shell", "org.gnome.Shell@wayland.service", *every)
    desktop.service(850, "nvidia-persiste", "nvidia-persistenced.service", "/dev/dri/card0")
    return desktop
