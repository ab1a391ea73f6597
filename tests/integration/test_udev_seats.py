"""udev's rule engine reads the rules of `bind --reserve` as compositors and logind expect it.

The sysfs is a made one, in a mount namespace with a /dev of its own; the rules of the system, which
set the tags of a seat, are the real ones.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.persistence.reservation import Reservation, render_reservation, reservation_file

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS, AUDIO = PciAddress.parse("0000:02:00.0"), PciAddress.parse("0000:02:00.1")
CARD = DeviceIdentity(ADDRESS, "1002", "744c", "1002:0e3b", "030000", "pci0000:00/0000:00:01.1")
SEAT = "seat-vfiomgr"
_SCRIPT = """
mount --bind "$0/sys" /sys && mount --bind "$0/rules" /etc/udev/rules.d &&
mount -t tmpfs none /run && mount -t tmpfs none /dev || exit 9
exec env SYSTEMD_DEVICE_VERIFY_SYSFS=0 udevadm test --action=add "$1"
"""
"""With this variable, libsystemd takes any file system at /sys (docs/ENVIRONMENT.md of systemd)."""


class Sysfs:
    """Devices as files, below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, path: str, bus: str, **attributes: str) -> None:
        """A device of a bus or a class; `_` at the end of a name is left out."""
        directory = self.root / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in attributes.items():
            (directory / name.removesuffix("_")).write_text(f"{text}\n")
        self._link(f"{path}/subsystem", bus)
        place = "devices/" if bus.startswith("/sys/bus") else ""
        self._link(f"{bus}/{place}{directory.name}", path)

    def _link(self, path: str, target: str) -> None:
        link, there = (self.root / each.lstrip("/") for each in (path, target))
        link.parent.mkdir(parents=True, exist_ok=True)
        there.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(there, link.parent))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with a card and its audio function, and the rules."""
    sysfs = Sysfs(tmp_path)
    for address, device, code in ((ADDRESS, "744c", "030000"), (AUDIO, "ab30", "040300")):
        sysfs.add(
            f"/sys/devices/pci0000:00/0000:00:01.1/{address}",
            "/sys/bus/pci",
            uevent=f"PCI_SLOT_NAME={address}",
            vendor="0x1002",
            device=f"0x{device}",
            subsystem_vendor="0x1002",
            subsystem_device="0x0e3b",
            class_=f"0x{code}",
        )
    card = f"/sys/devices/pci0000:00/0000:00:01.1/{ADDRESS}/drm/card1"
    sysfs.add(card, "/sys/class/drm", uevent="MAJOR=226\nMINOR=1\nDEVNAME=dri/card1", dev="226:1")
    sound = f"/sys/devices/pci0000:00/0000:00:01.1/{AUDIO}/sound/card1"
    sysfs.add(sound, "/sys/class/sound", uevent="", number="1")
    (tmp_path / "rules").mkdir()
    return tmp_path


def reserve(host: Path, card: DeviceIdentity = CARD) -> None:
    rules = render_reservation(Reservation(card, (AUDIO,)))
    (host / "rules" / reservation_file(card.address).name).write_text(rules)


def properties(host: Path, device: str) -> dict[str, str]:
    """What udev's rules make of a device."""
    command = ["unshare", "--mount", "sh", "-c", _SCRIPT, str(host), device]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "72-vfiomgr" not in "".join(
        line for line in ran.stderr.splitlines() if "nvalid" in line or "gnoring" in line
    )
    pairs = (line.strip().split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
    return {pair[0]: pair[1] for pair in pairs}


def tags(found: dict[str, str]) -> set[str]:
    return set(found["CURRENT_TAGS"].strip(":").split(":"))


def test_a_card_is_master_of_no_seat_once_it_is_reserved(host: Path) -> None:
    before = properties(host, "/sys/class/drm/card1")
    assert {"seat", "master-of-seat"} <= tags(before)
    assert "ID_SEAT" not in before
    reserve(host)
    since = properties(host, "/sys/class/drm/card1")
    assert since["ID_SEAT"] == SEAT
    assert tags(since) >= {"seat", SEAT, "mutter-device-ignore"}
    assert "master-of-seat" not in tags(since)


def test_audio_servers_ignore_the_audio_function_of_a_reserved_card(host: Path) -> None:
    assert "ID_SEAT" not in properties(host, "/sys/class/sound/card1")
    reserve(host)
    since = properties(host, "/sys/class/sound/card1")
    assert (since["ACP_IGNORE"], since["PULSE_IGNORE"], since["ID_SEAT"]) == ("1", "1", SEAT)


def test_another_device_at_the_address_keeps_its_seat(host: Path) -> None:
    other = DeviceIdentity(ADDRESS, "10de", "2684", "10de:167c", "030000", CARD.bridge_path)
    reserve(host, other)
    found = properties(host, "/sys/class/drm/card1")
    assert "ID_SEAT" not in found
    assert "master-of-seat" in tags(found)
