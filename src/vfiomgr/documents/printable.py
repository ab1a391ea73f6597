"""Foreign text (names of processes, pods, files, devices), escaped for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with everything that is not printable escaped as Python escapes it: `\x1b`.

    These are control characters (C0, DEL, C1), line separators, marks that change the
    direction of text or have no width, and bytes that are not UTF-8 (str.isprintable).
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    r"""`\x1b`, `\u202e`; the usual names of newline, carriage return and tab."""
    return repr(character)[1:-1]
