"""CEL selectors of devices, with the variables and functions that Kubernetes gives them.

Source: k8s.io/dynamic-resource-allocation/cel/compile.go.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import cel
from cel.stdlib import EXTENSIONS

from vfiomgr.expressions import expression
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.simulation.cel_cost import (
    COUNTER,
    EXCEEDED,
    Meter,
    TooCostly,
    metered,
    require_short,
)
from vfiomgr.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vfiomgr.node.dra.model import DraDevice

_QUANTITY = "quantity"
"""The key of a quantity: a map, so that operators that Kubernetes refuses are refused too."""
_LIBRARIES = ("strings", "sets", "lists")
_TEXT = expression(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'")
_UNSUPPORTED = expression(r"\bcel\s*\.\s*bind\s*\(|\.\?|\[\?")
_BOUND = expression(r"\b(?:all|exists|exists_one|map|filter)\(\s*(\w+)\s*,")
"""The variable of a macro, e.g. x in `[1, 2].exists(x, x > 1)`."""
_OPERATOR = expression(r"\W|_.*_|@")
_BUILT_IN = frozenset(
    {
        *("size", "contains", "startsWith", "endsWith", "matches", "has", "int", "uint", "double"),
        *("string", "bool", "bytes", "type", "dyn", "all", "exists", "exists_one", "map", "filter"),
    }
)
"""Functions and macros of CEL itself that selectors use."""

Facts = tuple[tuple[tuple[str, object], ...], tuple[tuple[str, int], ...]]
"""The attributes and the capacity of a device by qualified name; equal for equal devices."""


class SelectorError(ValueError):
    """A selector that cannot be compiled, or fails on a device."""


def qualified(name: str) -> str:
    """DOMAIN/NAME of an attribute; those without a domain belong to the driver."""
    return name if "/" in name else f"{DRIVER}/{name}"


def facts_of(device: DraDevice) -> Facts:
    """What selectors see of a device."""
    attributes = sorted((qualified(name), value) for name, value in device.attributes.items())
    capacity = sorted((qualified(name), value) for name, value in device.capacity.items())
    return tuple(attributes), tuple(capacity)


class Selectors:
    """Compiles each expression once, and evaluates it once for devices with equal facts."""

    def __init__(self) -> None:
        logging.getLogger("cel").disabled = True  # it repeats errors that are raised
        self._programs: dict[str, tuple[cel.Program, frozenset[str]]] = {}
        self._found: dict[tuple[str, Facts], bool] = {}
        self._meter = Meter()
        counted = {name: self._meter.counted(name, call) for name, call in _FUNCTIONS.items()}
        self._functions = {**counted, COUNTER: self._meter.count}

    def compile(self, expression: str) -> None:
        """Require an expression that can be compiled.

        Raises:
            SelectorError: it cannot; says why.

        """
        if expression not in self._programs:
            self._programs[expression] = _compiled(expression)

    def matches(self, expression: str, facts: Facts) -> bool:
        """Whether a device matches.

        Raises:
            SelectorError: the expression cannot be compiled, or fails on the device.

        """
        key = (expression, facts)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._evaluated(expression, facts)
        return found

    def _evaluated(self, expression: str, facts: Facts) -> bool:
        self.compile(expression)
        program, domains = self._programs[expression]
        context = cel.Context({"device": _variable(facts, domains)}, self._functions)
        self._meter.steps = 0
        try:
            found = program.execute(context)
        except KeyError as error:
            message = f"no such key: {error.args[0]}"
            raise SelectorError(message) from None
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            why = EXCEEDED if self._meter.is_exceeded else _first_sentence(error)
            raise SelectorError(why) from None
        if self._meter.is_exceeded:
            raise SelectorError(EXCEEDED)
        if not isinstance(found, bool):
            message = f"the result is not true or false but {found!r}"
            raise SelectorError(message)
        return found


def _compiled(expression: str) -> tuple[cel.Program, frozenset[str]]:
    texts = frozenset(double or single for double, single in _TEXT.findall(expression))
    if _UNSUPPORTED.search(_TEXT.sub('""', expression)):
        message = "vfiomgr cannot evaluate cel.bind or optional fields (.? and [?)"
        raise SelectorError(message)
    try:
        require_short(expression)
        program = cel.compile(expression)
        with_steps = cel.compile(metered(expression))
    except TooCostly as error:
        raise SelectorError(str(error)) from None
    except (ValueError, RuntimeError) as error:
        raise SelectorError(_first_line(error)) from None
    known = _FUNCTIONS.keys() | _BUILT_IN
    unknown = [n for n in program.functions() if n not in known and not _OPERATOR.match(n)]
    if unknown:
        message = f"unknown function: {', '.join(unknown)}"
        raise SelectorError(message)
    variables = {"device", *_BOUND.findall(expression)}
    if undeclared := [name for name in program.variables() if name not in variables]:
        message = f"unknown variable: {', '.join(undeclared)}"
        raise SelectorError(message)
    return with_steps, texts


def _first_line(error: Exception) -> str:
    """The cause of a syntax error: `1:4: mismatched input`."""
    return str(error).partition("<input>:")[2].partition("\n")[0] or str(error).partition("\n")[0]


def _first_sentence(error: Exception) -> str:
    """The cause, without what the library says of its calls."""
    return str(error).partition("\n")[0].partition(". ")[0].rpartition("Error: ")[2]


def _variable(facts: Facts, domains: frozenset[str]) -> dict[str, object]:
    """The variable `device`; a domain without attributes is an empty map, not an error."""
    attributes, capacity = facts
    quantities = {name: _quantity(Fraction(amount)) for name, amount in capacity}
    return {
        "driver": DRIVER,
        "allowMultipleAllocations": False,
        "attributes": _by_domain(dict(attributes), domains),
        "capacity": _by_domain(quantities, domains),
    }


def _by_domain(
    values: Mapping[str, object], domains: frozenset[str]
) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {domain: {} for domain in domains}
    for name, value in values.items():
        domain, _, own = name.partition("/")
        found.setdefault(domain, {})[own] = value
    return found


def _quantity(amount: Fraction) -> dict[str, str]:
    return {_QUANTITY: str(amount)}


def _amount(quantity: Any) -> Fraction:  # noqa: ANN401 - what an expression passes
    if not isinstance(quantity, dict) or _QUANTITY not in quantity:
        message = f"not a quantity: {quantity!r}"
        raise ValueError(message)
    return Fraction(quantity[_QUANTITY])


def _parsed(text: str) -> dict[str, str]:
    found = parse_quantity(text)
    if found is None:
        message = f"not a quantity: {text!r}"
        raise ValueError(message)
    return _quantity(found)


def _compared(one: object, other: object) -> int:
    a, b = _amount(one), _amount(other)
    return (a > b) - (a < b)


def _whole(quantity: object) -> int:
    found = _amount(quantity)
    if found.denominator != 1:
        message = f"not a whole number: {found}"
        raise ValueError(message)
    return int(found)


def _term(other: object) -> Fraction:
    return Fraction(other) if isinstance(other, int) else _amount(other)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: call for library in _LIBRARIES for name, call in EXTENSIONS[library].items()},
    "quantity": _parsed,
    "isQuantity": lambda text: parse_quantity(text) is not None,
    "isGreaterThan": lambda one, other: _compared(one, other) > 0,
    "isLessThan": lambda one, other: _compared(one, other) < 0,
    "compareTo": _compared,
    "isInteger": lambda one: _amount(one).denominator == 1,
    "asInteger": _whole,
    "asApproximateFloat": lambda one: float(_amount(one)),
    "sign": lambda one: (_amount(one) > 0) - (_amount(one) < 0),
    "add": lambda one, other: _quantity(_amount(one) + _term(other)),
    "sub": lambda one, other: _quantity(_amount(one) - _term(other)),
}
