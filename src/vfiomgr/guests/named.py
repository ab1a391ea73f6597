"""The devices and the memory of a guest as users write them: `04:00.0,rom=/gpu.rom`, `16G`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.guests.model import AttachOptions, DeviceRequest
from vfiomgr.units import MIB, mebibytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAGS = {
    "managed": "is_managed",
    "unassigned": "is_unassigned",
    "display": "display",
    "ramfb": "ramfb",
    "vga": "has_vga",
}
_VALUES = {
    "rom": "rom",
    "model": "driver_model",
    "boot-order": "boot_order",
    "subsystem": "subsystem",
    "vf-token": "vf_token",
    "teaming": "partner",
    "ats": "ats",
}
_SHOWN = {
    "rom": "rom=FILE|off",
    "model": "model=DRIVER",
    "boot-order": "boot-order=N",
    "subsystem": "subsystem=VENDOR:DEVICE",
    "vf-token": "vf-token=UUID",
    "teaming": "teaming=ALIAS",
    "ats": "ats=on|off",
}
_NUMBERS = frozenset({"boot-order"})


def parse_device(
    text: str, argument: str, keys: Sequence[str], *, has_iommufd: bool = False
) -> DeviceRequest:
    """Parse `0000:04:00.0,rom=/x.rom`: a name, then options, which are some of `keys`.

    `argument` is the option that the text is the value of, for messages; empty for none.

    Raises:
        UsageError: an option is unknown, or has an invalid value.

    """
    name, *words = text.split(",")
    options: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        is_known = key in keys and (not equals or bool(value))
        if is_known and key in _FLAGS and not equals:
            options[_FLAGS[key]] = True
        elif (
            is_known and key in _VALUES and value and not (key in _NUMBERS and not _is_count(value))
        ):
            options[_VALUES[key]] = int(value) if key in _NUMBERS else value
        elif word != "only":
            shown = f"{argument} {text}".strip()
            message = f"invalid option in {shown}: {word!r}"
            allowed = ", ".join(_SHOWN.get(known, known) for known in keys)
            raise UsageError(message, f"allowed after the name: {allowed}")
    has_iommufd = has_iommufd and "unassigned" not in words
    attached = AttachOptions(has_iommufd=has_iommufd, **options)  # type: ignore[arg-type]
    return DeviceRequest(name, attached, is_alone="only" in words)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0


def memory_bytes(option: str, text: str) -> int:
    """A memory size with its unit: 16 may be meant as GiB, but would be MiB.

    Raises:
        UsageError: the unit is missing, or the size is invalid.

    """
    if text.strip().isdecimal():
        message = f"missing unit: {option} {text}"
        raise UsageError(message, f"write {text}G or {int(text) * 1024}M")
    return mebibytes(option, text) * MIB
