"""The options of a desktop guest as users write them: `--looking-glass 2560x1440,kvmfr`.

Every function raises UsageError for an option that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, cast

from vfiomgr.cli.keywords import Keywords, Option
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.model import HOST_FILE
from vfiomgr.libvirt.build.model import Graphics, Video
from vfiomgr.libvirt.desktop import (
    GRABS,
    AudioKind,
    EvdevInput,
    GuestAudio,
    LookingGlass,
    UsbDevice,
)

_NONE = "none"
_SIZE = expression(r"([1-9][0-9]{2,4})x([1-9][0-9]{2,4})")
LARGEST_SIDE = 16384
"""Pixels: D3D11_REQ_TEXTURE2D_U_OR_V_DIMENSION, of the textures that Windows captures."""
_GLASS_WORDS = frozenset({"kvmfr", "hdr"})
_INPUT = expression(r"/dev/(?:[A-Za-z0-9_.:+-]+/)*[A-Za-z0-9_.:+-]+")
_KEYBOARD = "-event-kbd"
"""The end of the names of keyboards below /dev/input/by-id (60-persistent-input.rules)."""
_AUDIO = expression(r"(spice|none)|(pipewire|pulseaudio),user=([0-9]{1,10})")
_USB = expression(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})")
USUAL_GLASS = LookingGlass(3840, 2160)
"""With --desktop: enough for every screen up to 4K."""


def parse_looking_glass(text: str) -> LookingGlass | None:
    """Parse `2560x1440`, `3840x2160,kvmfr,hdr`, `none`."""
    size, *words = text.split(",")
    found = _SIZE.fullmatch(size)
    if text == _NONE:
        return None
    if found is None or not _GLASS_WORDS.issuperset(words):
        message = f"invalid screen size: --looking-glass {text}"
        hint = "write the largest resolution of the guest, e.g. 2560x1440; ,kvmfr and ,hdr may "
        raise UsageError(message, f"{hint}follow; or none")
    width, height = int(found[1]), int(found[2])
    if max(width, height) > LARGEST_SIDE:
        message = f"screen size too large: --looking-glass {text}"
        raise UsageError(message, f"write at most {LARGEST_SIDE}x{LARGEST_SIDE}")
    return LookingGlass(width, height, "kvmfr" in words, "hdr" in words)


def parse_evdev(text: str) -> EvdevInput:
    """Parse `/dev/input/by-id/NAME-event-kbd`; `,keyboard` and `,toggle=KEYS` may follow."""
    path, *words = text.split(",")
    toggles = [word.removeprefix("toggle=") for word in words if word != "keyboard"]
    is_known = all(one in GRABS and f"toggle={one}" in words for one in toggles)
    if not _INPUT.fullmatch(path) or not is_known:
        message = f"invalid input device: --evdev {text}"
        hint = f"write a name below /dev/input/by-id; ,toggle= may follow: {', '.join(GRABS)}"
        raise UsageError(message, hint)
    is_keyboard = bool(words) or path.endswith(_KEYBOARD)
    return EvdevInput(path, is_keyboard, *toggles[-1:])


def parse_audio(text: str) -> GuestAudio:
    """Parse `spice`, `none`, `pipewire,user=1000`, `pulseaudio,user=1000`."""
    found = _AUDIO.fullmatch(text)
    if found is None:
        message = f"invalid sound output: --audio {text}"
        hint = "write spice, none, pipewire,user=UID or pulseaudio,user=UID (id -u prints the UID)"
        raise UsageError(message, hint)
    kind = cast("AudioKind", found[1] or found[2])
    return GuestAudio(kind, int(found[3]) if found[3] else None)


def parse_usb(text: str) -> UsbDevice:
    """Parse `046d:c52b`."""
    found = _USB.fullmatch(text)
    if found is None:
        message = f"invalid USB device: --usb {text}"
        raise UsageError(message, "write VENDOR:PRODUCT, four hexadecimal digits each (lsusb)")
    return UsbDevice(found[1].lower(), found[2].lower())


class ScreenOptions(Keywords, total=False):
    """Screen, input, sound and USB devices of a guest."""

    desktop: Annotated[
        bool,
        Option("Choose what a desktop guest needs; a note lists it.", field="is_desktop"),
    ]
    graphics: Annotated[
        Graphics | None,
        Option("Provide a screen on 127.0.0.1.  [default: vnc; with --desktop: spice]"),
    ]
    video: Annotated[
        Video | None, Option("Emulate a graphics card, or none beside a GPU.  [default: vga]")
    ]
    looking_glass: Annotated[
        str | None,
        Option(
            "Share the guest's frames with a window of the host; kvmfr: by its kernel module.",
            metavar="WxH[,kvmfr][,hdr]|none",
            parse=parse_looking_glass,
        ),
    ]
    evdev: Annotated[
        Iterable[str],
        Option(
            "Share a keyboard or mouse with the host; the keys of toggle switch.",
            metavar="PATH[,toggle=KEYS]",
            complete=HOST_FILE,
            parse=parse_evdev,
        ),
    ]
    audio: Annotated[
        str | None,
        Option(
            "Play sound by spice, or by pipewire or pulseaudio of a user.",
            metavar="spice|pipewire,user=UID|pulseaudio,user=UID|none",
            complete="libvirt.commands.domain:complete_audio",
            parse=parse_audio,
        ),
    ]
    usb: Annotated[
        Iterable[str],
        Option(
            "Pass a USB device, if it is plugged in at the start.",
            metavar="VENDOR:PRODUCT",
            parse=parse_usb,
        ),
    ]


def with_desktop(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, with what --desktop chooses where nothing was given."""
    if not fields.get("is_desktop"):
        return fields
    usual: dict[str, Any] = {
        "graphics": "spice",
        "looking_glass": USUAL_GLASS if fields.get("devices") else None,
        "audio": GuestAudio("spice" if fields.get("graphics", "spice") == "spice" else "none"),
        "has_own_cpus": fields.get("has_pinning"),
    }
    if fields.get("system") == "windows":
        usual["has_secure_boot"] = fields.get("firmware") != "bios"
    return {**usual, **fields}
