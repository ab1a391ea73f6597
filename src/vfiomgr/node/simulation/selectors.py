"""CEL selectors of devices, with the variables, functions and limits that Kubernetes gives them.

Source: k8s.io/dynamic-resource-allocation/cel/compile.go.

The library evaluates without limits; in Kubernetes each step of a macro counts. Therefore a
counting call is inserted before the body of each macro: `[1, 2].all(x, x > 0)` becomes
`[1, 2].all(x, @(x) ? (x > 0) : null)`, with a name for @. An error of the call ends the evaluation.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import cel
from cel.stdlib import EXTENSIONS

from vfiomgr.expressions import expression
from vfiomgr.node.dra.model import DRIVER, DraDevice
from vfiomgr.units import parse_quantity

MOST_BYTES = 10 << 10
"""CELSelectorExpressionMaxLength of k8s.io/api/resource/v1/types.go."""
MOST_STEPS = 1_000_000
"""CELSelectorExpressionMaxCost of the same file."""
COUNTER = "vfiomgr_counts_step"
"""The name of the function that counts."""
EXCEEDED = "actual cost limit exceeded"
"""The error of cel-go (interpreter/runtimecost.go)."""
_MOST_SIZE = 1 << 14
"""Maximum characters and parts of a value in a macro, which a body can repeat many times."""
_SIZE_OF_STEP = 10
"""Characters or parts that cost one step (StringTraversalCostFactor of cel-go is 0.1)."""
_MACROS = frozenset({"all", "exists", "exists_one", "existsOne", "map", "filter"})
_TOKEN = expression(
    r"//[^\n]*"
    r"|(?:[rR][bB]?|[bB][rR])(?:\"\"\".*?\"\"\"|'''.*?'''|\"[^\"\n]*\"|'[^'\n]*')"
    r"|[bB]?(?:\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''"
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|\w+|\s+|.",
    re.DOTALL,
)
_OPENS, _CLOSES = frozenset("([{"), frozenset(")]}")
_REAL = "real_"
_DOMAINS = expression(
    r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
    r"|\bdevice\s*\.\s*(attributes|capacity)\b(?!\s*(?:\[|\.\s*\w+\b(?!\s*\()))"
)
"""A text; or the domains of a device, of which none is read: `"a.io" in device.attributes`."""


class TooCostly(ValueError):  # noqa: N818 - the name describes the expression
    """An expression that is too long, or takes too many steps."""


class Meter:
    """Counts the steps of successive evaluations."""

    def __init__(self) -> None:
        self.steps = 0

    def count(self, value: object = None) -> bool:
        """Count a step with a value; True, so that it can be a condition.

        Raises:
            TooCostly: there are too many, or the value is too large.
        """
        size = _size(value)
        self.steps += 1 + size // _SIZE_OF_STEP
        if size > _MOST_SIZE:
            self.steps = max(self.steps, MOST_STEPS + 1)
        if self.is_exceeded:
            raise TooCostly(EXCEEDED)
        return True

    @property
    def is_exceeded(self) -> bool:
        """Whether there were too many steps, even if the expression hides the error of `count`."""
        return self.steps > MOST_STEPS

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its arguments and its result counted."""

        def counting(*arguments: Any) -> Any:  # noqa: ANN401 - like the function
            for each in (*arguments, range(_expected(name, arguments))):
                self.count(each)
            found = call(*arguments)
            self.count(found)
            return found

        return counting


def _expected(name: str, arguments: Sequence[Any]) -> int:
    """The size of a result that can be far larger than the arguments."""
    match name, arguments:
        case "replace", [str(text), _, str(new), *_]:
            return (len(text) + 1) * len(new)
        case "join", [list(items), str(between)]:
            return len(items) * len(between) + _size(items)
    return 0


def _size(value: object) -> int:
    """The characters and parts of a value; it stops counting where a value is too large."""
    if isinstance(value, range):
        return len(value)
    size, left = 0, [value]
    while left and size <= _MOST_SIZE:
        part = left.pop()
        if isinstance(part, str | bytes):
            size += len(part)
        elif isinstance(part, list | tuple | dict):
            size += len(part)
            left += part.values() if isinstance(part, dict) else part
    return size


def metered(source: str) -> str:
    """The expression with a call of COUNTER in each macro, and with maps of the real domains."""
    return _metered(_TOKEN.findall(_DOMAINS.sub(_with_real_domains, source)))


def _with_real_domains(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else f"device.{_REAL}{match[1]}"


def require_short(source: str) -> None:
    """Require an expression within Kubernetes' limit of length.

    Raises:
        TooCostly: it is too long.
    """
    if len(source.encode(errors="replace")) > MOST_BYTES:
        message = f"too long: more than {MOST_BYTES} bytes"
        raise TooCostly(message)


def _metered(tokens: Sequence[str]) -> str:
    parts: list[str] = []
    at = 0
    while at < len(tokens):
        parts.append(tokens[at])
        at += 1
        if parts[-1] not in _MACROS:
            continue
        begin = next((n for n in range(at, len(tokens)) if not _is_blank(tokens[n])), at)
        arguments, end = _arguments(tokens, begin)
        if len(arguments) < 2:  # noqa: PLR2004 - a variable and a body
            continue
        variable, body, *rest = ("".join(arguments[0]).strip(), *map(_metered, arguments[1:]))
        call = f"{COUNTER}({variable}) ? ({body}\n) : null"
        parts.append(f"({','.join((variable, call, *rest))}")
        at = end
    return "".join(parts)


def _is_blank(token: str) -> bool:
    return token.isspace() or token.startswith("//")


def _arguments(tokens: Sequence[str], begin: int) -> tuple[list[Sequence[str]], int]:
    """The arguments in the parentheses at an index, and the index of the closing parenthesis."""
    if tokens[begin : begin + 1] != ["("]:
        return [], begin
    found: list[Sequence[str]] = []
    depth, start = 0, begin + 1
    for at in range(begin, len(tokens)):
        depth += (tokens[at] in _OPENS) - (tokens[at] in _CLOSES)
        if depth == 0 or (depth == 1 and tokens[at] == ","):
            found.append(tokens[start:at])
            start = at + 1
        if depth == 0:
            return found, at
    return [], begin


_QUANTITY = "quantity"
"""The key of a quantity: a map, so that operators that Kubernetes refuses are refused too."""
_SEMVER = "semver"
"""The key of a version; devices of vfiomgr have none, but classes of others compare them."""
_STRICT = expression(r"(\d+)\.(\d+)\.(\d+)(?:-[-.\w]+)?(?:\+[-.\w]+)?")
_LENIENT = expression(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:-[-.\w]+)?(?:\+[-.\w]+)?")
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
    values: dict[str, Mapping[str, object]] = {
        "attributes": dict(attributes),
        "capacity": quantities,
    }
    return {
        "driver": DRIVER,
        "allowMultipleAllocations": False,
        **{name: _by_domain(own, domains) for name, own in values.items()},
        **{f"{_REAL}{name}": _by_domain(own, frozenset()) for name, own in values.items()},
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
    a, b = (_numbers(each) if _is_version(each) else (_amount(each),) for each in (one, other))
    return (a > b) - (a < b)


def _version(text: str, lenient: bool = False) -> dict[str, str]:  # noqa: FBT001, FBT002 - of CEL
    found = (_LENIENT if lenient else _STRICT).fullmatch(text)
    if found is None:
        message = f"not a semantic version: {text!r}"
        raise ValueError(message)
    return {_SEMVER: ".".join(part or "0" for part in found.groups())}


def _is_version(value: object) -> bool:
    return isinstance(value, dict) and _SEMVER in value


def _numbers(version: Any) -> tuple[Fraction, ...]:  # noqa: ANN401 - what an expression passes
    return tuple(map(Fraction, version[_SEMVER].split(".")))


def _includes(values: object, one: object) -> bool:
    """Whether an attribute has a value; 1 and true differ."""
    every = values if isinstance(values, list) else [values]
    return any(type(each) is type(one) and each == one for each in every)


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
    "includes": _includes,
    "semver": _version,
    "isSemver": lambda text, lenient=False: bool(
        (_LENIENT if lenient else _STRICT).fullmatch(text)
    ),
    "isInteger": lambda one: _amount(one).denominator == 1,
    "asInteger": _whole,
    "asApproximateFloat": lambda one: float(_amount(one)),
    "sign": lambda one: (_amount(one) > 0) - (_amount(one) < 0),
    "add": lambda one, other: _quantity(_amount(one) + _term(other)),
    "sub": lambda one, other: _quantity(_amount(one) - _term(other)),
}
