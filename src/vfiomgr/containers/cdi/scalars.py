"""Unquoted YAML values as the libraries of CDI read them, with different results.

Go: sigs.k8s.io/yaml over go-yaml 2 (resolve.go), which is YAML 1.1; a string gets the reformatted
value. Rust: serde_yaml 0.9 (de.rs), in which a string stays as written.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Literal

Family = Literal["go", "rust"]
"""The two libraries."""
Scalar = str | int | float | bool | None

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE, _FALSE = (
    frozenset(form for word in words for form in (word, word.capitalize(), word.upper()))
    for words in (("true",), ("false",))
)
_GO_TRUE, _GO_FALSE = (
    more | frozenset(form for word in words for form in (word, word.capitalize(), word.upper()))
    for more, words in ((_TRUE, ("y", "yes", "on")), (_FALSE, ("n", "no", "off")))
)
_RADIX = {"0x": 16, "0b": 2, "0o": 8}
_GO_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-7]*|[1-9][0-9]*)")
_GO_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_RUST_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+|0|[1-9][0-9]*)")
_FEWEST, _MOST = -4, 6
"""Powers of ten that strconv.FormatFloat writes out (ftoa.go, %g with the shortest digits)."""


def scalar_of(text: str, family: Family) -> Scalar:
    """The value that a library reads from an unquoted text."""
    if text in _NULLS:
        return None
    is_go = family == "go"
    if text in (_GO_TRUE if is_go else _TRUE):
        return True
    if text in (_GO_FALSE if is_go else _FALSE):
        return False
    return _go_number(text) if is_go else _rust_number(text)


def text_of(text: str, family: Family) -> str:
    """The string that a library reads where a string is expected."""
    if family == "rust":
        return text
    match scalar_of(text, family):
        case bool() as truth:
            return str(truth).lower()
        case int() as number:
            return str(number)
        case float() as number:
            return _float_text(number)
    return text


def _go_number(text: str) -> Scalar:
    if text[0] not in "+-.0123456789":
        return text
    plain = text.replace("_", "")
    if _GO_INTEGER.fullmatch(plain):
        number = _integer(plain, is_old_octal=True)
        if -(2**63) <= number < 2**64:
            return number
    value = float(plain) if _GO_FLOAT.fullmatch(plain) else math.inf
    return value if math.isfinite(value) else text  # ErrRange of ParseFloat


def _rust_number(text: str) -> Scalar:
    """Digits after a 0 are a string (digits_but_not_number)."""
    return _integer(text, is_old_octal=False) if _RUST_INTEGER.fullmatch(text) else text


def _integer(text: str, *, is_old_octal: bool) -> int:
    digits = text.lstrip("+-").lower()
    base = _RADIX.get(digits[:2], 8 if is_old_octal and digits.startswith("0") else 10)
    number = int(Decimal(digits)) if base == 10 else int(digits, base)  # noqa: PLR2004
    return -number if text.startswith("-") else number


def _float_text(number: float) -> str:
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - neither infinite nor no number
    power = len(digits) + exponent - 1
    written = "".join(map(str, digits))
    if power < _FEWEST or power >= _MOST:
        fraction = f".{written[1:]}" * (len(written) > 1)
        written = f"{written[0]}{fraction}e{'-' if power < 0 else '+'}{abs(power):02}"
    else:
        written = f"{Decimal((0, digits, exponent)):f}"
    return f"{'-' * sign}{written}"
