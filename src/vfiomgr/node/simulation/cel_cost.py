"""The cost of CEL expressions: each step of a macro counts, as in Kubernetes.

The library evaluates without limits. Therefore a counting call is inserted before the body of each
macro: `[1, 2].all(x, x > 0)` becomes `[1, 2].all(x, @(x) ? (x > 0) : null)`, with a name for @. An
error of the call ends the evaluation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vfiomgr.expressions import expression

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """The expression with a call of COUNTER in each macro."""
    return _metered(_TOKEN.findall(source))


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
