"""Quantities of Kubernetes (k8s.io/apimachinery/pkg/api/resource/quantity.go)."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))"
    r"(?P<unit>[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"


def parse_quantity(text: str) -> Fraction | None:
    """What a quantity means: `16Gi`, `500m`, `1e3`, `0.5`; None where the text is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number: Fraction = Fraction(match["number"])
    unit = match["unit"] or ""
    if unit.endswith("i"):
        return number * Fraction(1024 ** (_BINARY.index(unit[0]) + 1))
    exponent = _DECIMAL.get(unit)
    if exponent is None and unit:
        exponent = int(unit[1:])
    power: Fraction = Fraction(10) ** (exponent or 0)
    return number * power


def whole(quantity: Fraction) -> int:
    """The quantity rounded up, as Kubernetes does (Quantity.Value)."""
    return math.ceil(quantity)
