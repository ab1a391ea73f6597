"""The devices and the memory of a guest as users write them: `04:00.0,rom=/gpu.rom`, `16G`.

The options here are those that several monitors have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from vfiomgr.cli.keywords import Keyword, Option, fields_of, keywords_of
from vfiomgr.errors import UsageError
from vfiomgr.guests.model import PAGES, AttachOptions, DeviceRequest, DeviceWords, NumaMode


def parse_device(text: str, argument: str, words: Sequence[str]) -> DeviceRequest:
    """Parse `0000:04:00.0,rom=/x.rom`: a name, then options, which are some of `DeviceWords`.

    `argument` is the option that the text is the value of, for messages; empty for none.

    Raises:
        UsageError: an option is unknown, or has an invalid value.
    """
    keywords = keywords_of(DeviceWords)
    known = {keywords[name].word: keywords[name] for name in words}
    name, *given = text.split(",")
    options: dict[str, object] = {}
    for one in given:
        word, equals, value = one.partition("=")
        keyword = known.get(word)
        read = None if keyword is None else _read_word(keyword, value, is_bare=not equals)
        if keyword is None or read is None:
            shown = f"{argument} {text}".strip()
            message = f"invalid option in {shown}: {one!r}"
            allowed = ", ".join(keyword.word_with_value for keyword in known.values())
            raise UsageError(message, f"allowed after the name: {allowed}")
        options[keyword.name] = read
    is_alone = bool(options.pop("only", False))
    return DeviceRequest(name, AttachOptions(**fields_of(DeviceWords, options)), is_alone=is_alone)


def _read_word(keyword: Keyword, value: str, *, is_bare: bool) -> object:
    """The value of an option after a name; None if it cannot be read."""
    if keyword.kind is bool:
        return is_bare or None
    if keyword.kind is int:
        is_count = value.isascii() and value.isdecimal() and int(value) > 0
        return int(value) if is_count else None
    return value or None


SparePorts = Annotated[
    int,
    Option(
        "Set the number of free root ports, to attach devices later.",
        metavar="N",
        default=4,
        least=0,
        most=64,
    ),
]
Numa = Annotated[
    NumaMode, Option("Bind memory to the devices' NUMA nodes, or prefer them.", default="strict")
]
HugePages = Annotated[
    str | None,
    Option(
        "Use huge pages of the host.",
        choices=tuple(PAGES),
        field="hugepage_bytes",
        parse=PAGES.__getitem__,
    ),
]
AddressBits = Annotated[
    int | None, Option("Limit physical addresses to N bits.", metavar="N", least=32, most=52)
]
FixedAperture = Annotated[
    bool, Option("Write the BAR window size (for OVMF before 2022.11).", field="has_fixed_aperture")
]
