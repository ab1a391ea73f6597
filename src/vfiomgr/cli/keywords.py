"""Options that are declared once: as the keywords of the library.

    class VgpuOptions(Keywords, total=False):
        heads: Annotated[int | None, Option("Require at least N displays.", metavar="N", least=1)]

From such a declaration come the options of a command (`vfiomgr.cli.options.declared`), the checks
of keywords and the fields of a request (`fields_of`), and the words after the name of a device
(`vfiomgr.guests.named`). The type says what an option is: a flag, one of some words, a number, a
text, or several of them. This module does not import click, because the library does not need it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from vfiomgr.errors import require_choice, require_known, require_whole
from vfiomgr.value import Value


class Keywords(TypedDict):
    """The base of declarations."""


class Option(Value):
    """An option of a request: its help, how a person writes it, and what becomes of it."""

    help: str = ""
    metavar: str | None = None
    default: Any = None
    shows_default: bool = True
    least: int | None = None
    """The lowest number."""
    most: int | None = None
    choices: tuple[str, ...] = ()
    """The words to choose from, if the type does not name them."""
    written: tuple[tuple[str, str], ...] = ()
    """Words of the library, and how a person writes them."""
    any_case: bool = False
    """Whether the words may be written in capital or small letters."""
    complete: str = ""
    """What completes it: `MODULE:FUNCTION`, below vfiomgr."""
    flags: tuple[str, ...] = ()
    """On the command line, if not `--` and its name."""
    word: str = ""
    """After the name of a device, if not its name."""
    field: str = ""
    """The field of the request, if not its name."""
    parse: Callable[[Any], Any] | None = None
    """Makes the value of the field from what the user writes."""


class Keyword(Value):
    """An option with what its type says."""

    name: str
    option: Option
    kind: type
    """bool, int, float or str."""
    is_required: bool
    is_optional: bool
    """Whether None is a value: for a flag, that the user leaves the choice."""
    is_multiple: bool
    choices: tuple[str, ...]
    is_for_commands: bool
    """Whether it is declared with an `Option`, or is only of the library."""

    @property
    def flag(self) -> str:
        """The option as messages call it: `--guest-bus`."""
        return self.option.flags[0] if self.option.flags else f"--{self.name.replace('_', '-')}"

    @property
    def word(self) -> str:
        """The option after the name of a device."""
        return self.option.word or self.name.replace("_", "-")

    @property
    def word_with_value(self) -> str:
        """The word as messages show it: `rom=FILE|off`."""
        return self.word if self.kind is bool else f"{self.word}={self.option.metavar}"

    def read(self, given: Any) -> Any:  # noqa: ANN401 - of the type that it declares
        """Check a value, and make the value of the field.

        Raises:
            UsageError: it is not one of the words, or not in the range of numbers.
        """
        if not self.is_multiple:
            return self._read(given)
        found = tuple(map(self._read, (given,) if isinstance(given, str) else given))
        return frozenset(found) if self.choices else found

    def _read(self, value: Any) -> Any:  # noqa: ANN401
        option = self.option
        if self.choices:
            value = value.upper() if option.any_case else value
            require_choice(self.flag, value, self.choices)
        if option.least is not None:
            require_whole(self.flag, value, option.least, option.most)
        return value if option.parse is None else option.parse(value)


@cache
def keywords_of(declaration: type) -> Mapping[str, Keyword]:
    """The options of a declaration by name, in its order."""
    hints = get_type_hints(declaration, include_extras=True)
    return {name: _keyword(name, hint) for name, hint in hints.items()}


def fields_of(declaration: type, given: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a request from keywords; one that is None is left out.

    Raises:
        TypeError: a keyword is unknown or missing.
        UsageError: a value is invalid.
    """
    require_known(given, declaration)
    found = {}
    for name, keyword in keywords_of(declaration).items():
        value = given.get(name, keyword.option.default)
        if value is not None:
            found[keyword.option.field or name] = keyword.read(value)
        elif keyword.is_required:
            message = f"missing keyword: {name}"
            raise TypeError(message)
    return found


def negated(value: object) -> bool:
    """For a flag that takes something away from a request."""
    return not value


def _keyword(name: str, hint: Any) -> Keyword:  # noqa: ANN401 - a type
    is_required = get_origin(hint) is Required
    (hint,) = get_args(hint) if is_required else (hint,)
    option, is_for_commands = Option(), get_origin(hint) is Annotated
    if is_for_commands:
        hint, option = get_args(hint)
    kinds = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [part for part in get_args(hint) if part is not type(None)]
    is_optional = kinds != [hint]
    kind = kinds[0]
    is_multiple = get_origin(kind) not in (None, Literal)
    (kind,) = get_args(kind)[:1] if is_multiple else (kind,)
    choices = option.choices
    if get_origin(kind) is Literal:
        choices = choices or get_args(kind)
        kind = str
    return Keyword(
        name=name,
        option=option,
        kind=cast("type", kind),
        is_required=is_required,
        is_optional=is_optional,
        is_multiple=is_multiple,
        choices=choices,
        is_for_commands=is_for_commands,
    )
