"""Numbers, sizes and sets as libvirt writes them in XML (formatdomain.html, src/util/virutil.c)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.libvirt.hostdev import GuestAddress
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.documents.xml_text import Element

KIB = 1024
_EXPONENTS = {letter: number for number, letter in enumerate("kmgtpe", start=1)}
_NUMBER = re.compile(r"(?P<hex>0[xX][0-9a-fA-F]{1,16})|(?P<octal>0[0-7]{1,22})|[0-9]{1,20}")
_UUID = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBERS = 16_384
"""Of CPUs and nodes: VIR_DOMAIN_CPUMASK_LEN, and what Linux can have."""
_LIMITS = {"domain": 0xFFFFFFFF, "bus": 0xFF, "slot": 0x1F, "function": 0x7}
_HOW_TO_WRITE = "write 0x08 or 8; a leading 0 alone means octal"


def number_of(element: Element, attribute: str, most: int, default: int | None = None) -> int:
    """An attribute in hexadecimal, octal or decimal, as strtoul(…, 0) reads it.

    Raises:
        InvalidDocument: it is no number, larger than `most`, or missing where it has no default.

    """
    text = element.attributes.get(attribute)
    if text is None:
        if default is None:
            element.fail(f"<{element.tag}> without {attribute}", f"give it {attribute}='…'")
        return default
    found = whole_number(text)
    if found is None:
        element.fail(f"{attribute}={text!r} is no number", _HOW_TO_WRITE)
    if found > most:
        element.fail(f"{attribute}={text!r} is more than {most:#x}", f"{most:#x} is the last one")
    return found


def whole_number(text: str) -> int | None:
    """As strtoul(…, 0) reads it; None where it is none."""
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
    """Bytes of an element whose text, or `attribute`, is a number in its attribute `unit`.

    virScaleInteger: `k`, `KiB` and `kib` are 1024, `KB` is 1000; b and bytes are themselves.

    Raises:
        InvalidDocument: it is no size.

    """
    text = (element.text if attribute is None else element.get(attribute)).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 20):  # noqa: PLR2004 - 2**64 has 20
        element.fail(
            f"{text!r} in <{element.tag}> is no size", "write a number, and its unit='KiB'"
        )
    scale = _scale(element.get("unit") or unit)
    if scale is None:
        remedy = "units are b, KiB, MiB, GiB, TiB, and KB, MB, GB of 1000"
        element.fail(f"unit={element.get('unit')!r} is not known", remedy)
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
    """CPUs or nodes: `0-3,^2,8`; each exclusion concerns what is before it.

    Raises:
        InvalidDocument: it is no such set.

    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.removeprefix("^").partition("-")
        low, high = _index(first), _index(last or first)
        if low is None or high is None or low > high or high >= _MOST_NUMBERS:
            remedy = f"write them as 0-3,^2,8, each below {_MOST_NUMBERS}"
            element.fail(f"{text!r} is no set of numbers", remedy)
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
    """Whether an attribute says `on` or `yes`."""
    return element is not None and element.get(attribute) in {"on", "yes"}


def host_address(element: Element) -> PciAddress:
    """A function of the host: `<address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>`.

    Raises:
        InvalidDocument: it is no address.

    """
    return PciAddress(*_parts(element))


def guest_address(device: Element) -> GuestAddress | None:
    """Where a device of a domain sits on PCI; None where it does not say, or sits elsewhere.

    An address of nothing but zeros asks libvirt for one.

    Raises:
        InvalidDocument: it is no address.

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
    """A UUID in the usual form, from one with or without hyphens.

    Raises:
        InvalidDocument: it is none.

    """
    digits = re.sub(r"[-\s]", "", text).lower()
    if not _UUID.fullmatch(digits):
        element.fail(f"{text.strip()!r} is no UUID", "uuidgen makes one")
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
