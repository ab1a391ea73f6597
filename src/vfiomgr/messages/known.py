"""The tables of known messages, and what looks up texts in them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from msgspec.structs import replace

from vfiomgr.documents.text import parse_toml
from vfiomgr.value import Value

KERNEL = "the kernel"
NVIDIA = "NVIDIA's drivers"
QEMU = "QEMU"
_ADDRESS = re.compile(
    r"(?:(?<![\w:.])|(?<=PCI:))(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](?!\w)"
)
_GROUP = re.compile(r"(?i)\bgroup (\d+)\b|/dev/vfio/(\d+)\b")
_STAMP = re.compile(r"^\[ *(\d+)\.\d+\] ?")
"""The seconds since boot before a line of dmesg."""
_LONGEST = 300
"""Characters of a message that are kept."""
_OF_LINE = (1000, 300)
"""Characters of a line of a log that are searched at once, since some patterns are not linear in
its length, and of these the ones that the next part has too: no message is longer."""
_OF_PASTED = (4000, 1000)
"""The same for a text that a person pastes, in which a message has several lines."""
_MOST_PARTS = 8
"""Parts of a pasted text that are searched from its begin and from its end: 25,000 characters."""
_compiled = cache(re.compile)
"""The cache of `re` itself has 512 places, fewer than the tables have patterns."""


class Case(Value):
    """What a message means, and what helps, where a fact about the function that it names holds."""

    when: str
    """`absent`: no function of this host; `in-use`: processes of the host use it; `laptop`: the
    GPUs for guests are GeForce of laptops, without outputs; `not-amd`: it is not of AMD. One with
    `=` is an option of the kernel's command line."""
    meaning: str = ""
    """Empty: that of the message."""
    remedy: str = ""


class KnownMessage(Value):
    """A message: how it is recognized, its cause and its remedy."""

    name: str
    program: str
    """What prints it: `the kernel`, `QEMU`."""
    patterns: tuple[str, ...]
    """Regular expressions for its telling parts, in the case of the program."""
    examples: tuple[str, ...]
    """Messages as they are printed; tests look them up."""
    meaning: str
    remedy: str
    cases: tuple[Case, ...] = ()
    see: tuple[str, ...] = ()
    """The rules of `check`, `check cdi` and `check kata` that find its causes on a host."""
    leads_to_others: bool = False
    """Whether another program's message, with the cause, comes with it."""
    severity: Literal["warning", "info", "ok"] = "warning"
    """Of a finding about it in a log; `ok` is harmless and causes none."""

    def matches(self, text: str) -> bool:
        """Whether a text, in any case, is or has this message."""
        return any(_compiled(pattern, re.IGNORECASE).search(text) for pattern in self.patterns)


class LoggedMessage(Value):
    """A known message of a log."""

    name: str
    """That of the `KnownMessage`."""
    text: str
    """Its last line, without time stamp."""
    address: str = ""
    """The PCI function that it names first; empty if none."""
    count: int = 1
    """How often the log has it."""
    seconds: int | None = None
    """Seconds from boot to the last one; None without time stamps."""
    line: int = 1
    """The number of the last line."""


@cache
def known_messages() -> tuple[KnownMessage, ...]:
    """All tables, by program and name."""
    tables = (file for file in files(__package__).iterdir() if file.name.endswith(".toml"))
    read = (parse_toml(file.read_text(encoding="utf-8")) for file in tables)
    found = [
        _message(name, program, row)
        for t in read
        for program, rows in t.items()
        for name, row in rows.items()
    ]
    return tuple(sorted(found, key=lambda each: (each.program, each.name)))


@cache
def messages_by_name() -> dict[str, KnownMessage]:
    """All known messages by their names."""
    return {message.name: message for message in known_messages()}


def _message(name: str, program: str, row: dict[str, Any]) -> KnownMessage:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    values["cases"] = tuple(Case(**case) for case in values.get("cases", ()))
    return KnownMessage(name=name, program=program, **values)


def explanations(text: str) -> tuple[KnownMessage, ...]:
    """The known messages that a text has; line breaks and spaces of a copy do not matter.

    Quotes that a log has escaped count as quotes. One that only leads to others is left out where
    these are known.
    """
    words = " ".join(text.replace('\\"', '"').split())
    parts = _parts(words, *_OF_PASTED)
    parts = [*parts[:_MOST_PARTS], *parts[_MOST_PARTS:][-_MOST_PARTS:]]
    found = tuple(message for message in known_messages() if any(map(message.matches, parts)))
    return tuple(message for message in found if not message.leads_to_others) or found


def _parts(text: str, width: int, overlap: int) -> list[str]:
    """A text in parts of a width that overlap: a message at the end of one begins the next."""
    ends = range(0, max(1, len(text) - overlap), width - overlap)
    return [text[begin : begin + width] for begin in ends]


_WORD = re.compile(r"[A-Za-z_]{3,}")
_RARE = 8
"""Messages that may have a word that tells them apart."""
_FEWEST_COMMON = 3
_LEAST_SHARE = 0.5


def similar(text: str, most: int = 2) -> tuple[KnownMessage, ...]:
    """The known messages that share most rare words with a text that is none of them.

    Three rare words, or all where the text has fewer, and half of them must be the same.
    """
    messages = [(_words(each), each) for each in known_messages()]
    numbers = Counter(word for words, _ in messages for word in words)
    wanted = {word for word in _words_of(text) if numbers[word] <= _RARE}
    shares = [(len(wanted & words), each) for words, each in messages]
    least = max(1, min(_FEWEST_COMMON, len(wanted)), _LEAST_SHARE * len(wanted))
    near = sorted((pair for pair in shares if pair[0] >= least), key=lambda pair: -pair[0])
    return tuple(message for _, message in near[:most])


def _words(message: KnownMessage) -> frozenset[str]:
    return frozenset(word for example in message.examples for word in _words_of(example))


def _words_of(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text))


def clause(sentence: str) -> str:
    """A sentence as a part of a line: without its capital letter and its full stop."""
    first, _, _ = sentence.partition(" ")
    is_name = first != first.capitalize()  # BIOS, iGPU
    return f"{sentence[0] if is_name else sentence[0].lower()}{sentence[1:].removesuffix('.')}"


def first_address(text: str) -> str:
    """The first PCI address in a text, in full and lower case; empty if there is none."""
    match = _ADDRESS.search(text)
    if match is None:
        return ""
    address = match[0].lower()
    return address if address.count(":") > 1 else f"0000:{address}"


def first_group(text: str) -> int | None:
    """The number of the first IOMMU group in a text."""
    match = _GROUP.search(text)
    return None if match is None else int(match[1] or match[2])


def find_messages(text: str, programs: Iterable[str] = ()) -> tuple[LoggedMessage, ...]:
    """The known messages of a log, each once for a PCI function, in the order of their last lines.

    With `programs`, only messages of these, and no harmless ones. Each pattern is searched in the
    entire text, because `re` finds those that begin with literal characters fast.
    """
    wanted = frozenset(programs)
    lines = text.split("\n")
    parts = [(n, part) for n, line in enumerate(lines) for part in _parts(line, *_OF_LINE)]
    text = "\n".join(part for _, part in parts)
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    found: dict[tuple[str, str], LoggedMessage] = {}
    for message in known_messages():
        if wanted and (message.program not in wanted or message.severity == "ok"):
            continue
        for index in _line_numbers(message, text, starts):
            number, part = parts[index]
            logged = _logged(message.name, part, lines[number], number + 1)
            key = (message.name, logged.address)
            before = found.get(key)
            if before is None or before.line != logged.line:  # two parts may have the same message
                found[key] = replace(logged, count=1 if before is None else before.count + 1)
    return tuple(sorted(found.values(), key=lambda each: each.line))


def _line_numbers(message: KnownMessage, text: str, starts: list[int]) -> list[int]:
    """The lines that have a message, from 0."""
    places = (m.start() for pattern in message.patterns for m in _compiled(pattern).finditer(text))
    return sorted({bisect_right(starts, place) - 1 for place in places})


def _logged(name: str, part: str, line: str, number: int) -> LoggedMessage:
    """A message in a part of a line, whose other parts may have the time stamp and the address."""
    stamp = _STAMP.match(line)
    words = _STAMP.sub("", part).strip()
    seconds = int(stamp[1]) if stamp else None
    address = first_address(words) or first_address(line)
    return LoggedMessage(name, words[:_LONGEST], address, 1, seconds, number)
