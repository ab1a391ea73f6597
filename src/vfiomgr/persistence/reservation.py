"""Cards that compositors leave alone until a guest gets them, and the udev rules for it.

A rule assigns the card to a seat of its own. Compositors only open cards whose ID_SEAT is that of
their session: KWin (drm_backend.cpp), mutter (meta-udev.c), wlroots (backend/session/session.c),
Hyprland (aquamarine's DRM.cpp), niri and COSMIC (smithay's udev.rs) and Xorg (check_seat in
config/udev.c). logind opens no other card for them (session_device_verify in
logind-session-device.c), and starts no seat for a card without the tag `master-of-seat`
(manager_process_seat_device in logind-core.c), so that no greeter appears there. Unlike their
variables (KWIN_DRM_DEVICES, WLR_DRM_DEVICES, AQ_DRM_DEVICES), it does not depend on the number of
a card, and also applies when the card returns from a guest. mutter without a session reads its own
tag (meta_is_udev_device_ignore).

Audio servers have no seat: PipeWire reads ACP_IGNORE (alsa-udev.c), PulseAudio PULSE_IGNORE
(module-udev-detect.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import VfiomgrError
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.persistence.model import LINE, RULES, VERSION, identity_matches, require_plain_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.paths import HostPath
    from vfiomgr.persistence.model import FileFacts

_PREFIX, _SUFFIX = "72-vfiomgr-", ".rules"
"""After 71-seat.rules, which sets the tags, and before 73-seat-late.rules, which reads ID_SEAT."""
_RECORD = "# vfiomgr-reservation: "
_SEAT = "seat-vfiomgr"


class Reservation(Value):
    """A card that compositors leave alone while it is on its host driver."""

    device: DeviceIdentity
    audio: tuple[PciAddress, ...] = ()
    """The audio functions of the card."""

    @property
    def address(self) -> PciAddress:
        """The address of the card."""
        return self.device.address


def reservation_file(address: PciAddress) -> HostPath:
    """The rule file of a card."""
    return RULES / f"{_PREFIX}{address}{_SUFFIX}"


def is_reservation_file(name: str) -> bool:
    """Whether a file in /etc/udev/rules.d has the name of such a file."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def reservations(files: FileFacts) -> dict[PciAddress, Reservation]:
    """The reserved cards, by address."""
    found = (parse_reservation(f.text) for f in files.texts if f.path.startswith(RULES))
    return {one.address: one for one in found if one is not None}


def render_reservation(reserved: Reservation) -> str:
    """Render the udev rules (udev(7)) of a card, with the record that `parse_reservation` reads.

    Neither affects a different device at the address.

    Raises:
        Refusal: a rule cannot contain an attribute of the device.
    """
    import json  # noqa: PLC0415 - `list` needs none

    address = reserved.address
    require_plain_device(reserved.device, "leave out --reserve")
    record = {"api_version": VERSION, **to_jsonable(reserved)}
    card = identity_matches(reserved.device, f"[pci/{address}]")
    seat = f'ENV{{ID_SEAT}}="{_SEAT}"'
    tags = ['TAG-="master-of-seat"', 'TAG+="mutter-device-ignore"']
    ignored = [f'ENV{{{name}_IGNORE}}="1"' for name in ("ACP", "PULSE")]
    rules = [
        [*_of("drm", address), *card, seat, *tags],
        *([*_of("sound", audio), *card, seat, *ignored] for audio in reserved.audio),
    ]
    return "\n".join(
        [
            f"# vfiomgr: keep compositors off {address}, which guests get on demand.",
            f"# Remove with: vfiomgr unbind {address} --forget-only",
            _RECORD + json.dumps(record),
            *map(LINE.join, rules),
            "",
        ]
    )


def _of(subsystem: str, address: PciAddress) -> list[str]:
    """What matches the card of a function (`card1`) in the subsystem."""
    kernel = ('KERNEL=="card[0-9]*"', f'KERNELS=="{address}"')
    return ['ACTION!="remove"', f'SUBSYSTEM=="{subsystem}"', *kernel]


def parse_reservation(text: str) -> Reservation | None:
    """Parse the record in a file of `render_reservation`; None if there is none."""
    for line in text.splitlines():
        if line.startswith(_RECORD):
            try:
                record = parse_json(line.removeprefix(_RECORD))
                if record.pop("api_version") == VERSION:
                    return from_jsonable(Reservation, record)
            except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError):
                return None
    return None
