"""Numbers, sizes and sets as libvirt writes them in XML (formatdomain.html, src/util/virutil.c)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.libvirt.model import GuestAddress
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.documents.xml_text import Element

KIB = 1024
_EXPONENTS = {letter: number for number, letter in enumerate("kmgtpe", start=1)}
_NUMBER = re.compile(r"(?P<hex>0[xX][0-9a-fA-F]{1,16})|(?P<octal>0[0-7]{1,22})|[0-9]{1,20}")
_UUID = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBERS = 16_384
"""The limit for CPUs and nodes: VIR_DOMAIN_CPUMASK_LEN, and the maximum of Linux."""
_LIMITS = {"domain": 0xFFFFFFFF, "bus": 0xFF, "slot": 0x1F, "function": 0x7}
_HOW_TO_WRITE = "write 0x08 or 8; a leading 0 means octal"


def number_of(element: Element, attribute: str, most: int, default: int | None = None) -> int:
    """A hexadecimal, octal or decimal attribute, read like strtoul(…, 0).

    Raises:
        InvalidDocument: it is not a number, larger than `most`, or missing without a default.

    """
    text = element.attributes.get(attribute)
    if text is None:
        if default is None:
            element.fail(f"<{element.tag}> has no {attribute}", f"add {attribute}='…'")
        return default
    found = whole_number(text)
    if found is None:
        element.fail(f"invalid number: {attribute}={text!r}", _HOW_TO_WRITE)
    if found > most:
        element.fail(f"number too large: {attribute}={text!r}", f"use at most {most:#x}")
    return found


def whole_number(text: str) -> int | None:
    """Read a number like strtoul(…, 0); None if it is invalid."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    if match["hex"]:
        return int(match["hex"], 16)
    if match["octal"]:
        return int(match["octal"], 8)
    digits = match[0]
    return int(digits) if digits == "0" or digits[0] != "0" else None


def size_of(element: Element, unit: str = "KiB", attribute: str | None = None) -> int:
    """The bytes of an element: a number in its text or `attribute`, and its attribute `unit`.

    virScaleInteger: `k`, `KiB` and `kib` are 1024, `KB` is 1000; b and bytes are bytes.

    Raises:
        InvalidDocument: the size is invalid.

    """
    text = (element.text if attribute is None else element.get(attribute)).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 20):  # noqa: PLR2004 - 2**64 has 20
        element.fail(
            f"invalid size in <{element.tag}>: {text!r}",
            "write a number, and its unit, e.g. unit='KiB'",
        )
    scale = _scale(element.get("unit") or unit)
    if scale is None:
        remedy = "use b, KiB, MiB, GiB, TiB, or KB, MB, GB (multiples of 1000)"
        element.fail(f"unknown unit: unit={element.get('unit')!r}", remedy)
    return int(text) * scale


def _scale(unit: str) -> int | None:
    lowered = unit.lower()
    if lowered in {"b", "byte", "bytes"}:
        return 1
    exponent = _EXPONENTS.get(lowered[:1])
    if exponent is None or lowered[1:] not in {"", "ib", "b"}:
        return None
    return int((1000 if lowered[1:] == "b" else KIB) ** exponent)


def set_of(element: Element, text: str) -> frozenset[int]:
    """A set of CPUs or nodes: `0-3,^2,8`; an exclusion applies to what precedes it.

    Raises:
        InvalidDocument: the set is invalid.

    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.removeprefix("^").partition("-")
        low, high = _index(first), _index(last or first)
        if low is None or high is None or low > high or high >= _MOST_NUMBERS:
            remedy = f"write it like 0-3,^2,8, with numbers below {_MOST_NUMBERS}"
            element.fail(f"invalid set of numbers: {text!r}", remedy)
        numbers = range(low, high + 1)
        if part.startswith("^"):
            found.difference_update(numbers)
        else:
            found.update(numbers)
    return frozenset(found)


def _index(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None  # noqa: PLR2004 - more than enough


def is_on(element: Element | None, attribute: str) -> bool:
    """Whether an attribute is `on` or `yes`."""
    return element is not None and element.get(attribute) in {"on", "yes"}


def host_address(element: Element) -> PciAddress:
    """A host function: `<address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>`.

    Raises:
        InvalidDocument: the address is invalid.

    """
    return PciAddress(*_parts(element))


def guest_address(device: Element) -> GuestAddress | None:
    """The PCI address of a guest device; None if it has none, or is not on PCI.

    An address of zeros lets libvirt choose one.

    Raises:
        InvalidDocument: the address is invalid.

    """
    element = device.find("address")
    if element is None or element.get("type") != "pci":
        return None
    domain, bus, slot, function = _parts(element)
    if not (domain or bus or slot or function):
        return None
    return GuestAddress(
        bus, slot, function, multifunction=is_on(element, "multifunction"), domain=domain
    )


def _parts(element: Element) -> tuple[int, int, int, int]:
    domain, bus, slot, function = (
        number_of(element, name, most, 0) for name, most in _LIMITS.items()
    )
    return domain, bus, slot, function


def uuid_of(element: Element, text: str) -> str:
    """A UUID in its usual form, from one with or without hyphens.

    Raises:
        InvalidDocument: the UUID is invalid.

    """
    digits = re.sub(r"[-\s]", "", text).lower()
    if not _UUID.fullmatch(digits):
        element.fail(f"invalid UUID: {text.strip()!r}", "create one with: uuidgen")
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
