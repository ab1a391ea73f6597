"""Options that are declared once, as the keywords of the library."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal, Required

import click
import pytest
from click.testing import CliRunner

from tests.unit.cli.test_usage import commands
from vfiomgr.cli.keywords import Keywords, Option, fields_of, negated
from vfiomgr.cli.options import declared
from vfiomgr.errors import UsageError
from vfiomgr.main.program import cli


class Ordered(Keywords, total=False):
    """What a guest orders."""

    dish: Required[Annotated[str, Option("What to eat.", metavar="NAME", field="meal")]]
    plates: Annotated[int | None, Option("How many.", least=1, most=3, field="count")]
    drink: Annotated[Literal["tea", "water"], Option(default="tea")]
    sides: Annotated[Iterable[str], Option(flags=("--side",), parse=str.upper)]
    sizes: Annotated[Iterable[Literal["s", "l"]], Option()]
    heated: Annotated[bool | None, Option(field="is_hot")]
    no_salt: Annotated[bool, Option("Without salt.", field="has_salt", parse=negated)]


def test_keywords_become_fields() -> None:
    assert fields_of(Ordered, {"dish": "soup"}) == {"meal": "soup", "drink": "tea"}
    given = {"dish": "soup", "plates": None, "sides": ["a", "b"], "sizes": "s", "no_salt": True}
    assert fields_of(Ordered, {**given, "heated": False}) == {
        "meal": "soup",
        "drink": "tea",
        "sides": ("A", "B"),
        "sizes": frozenset({"s"}),
        "is_hot": False,
        "has_salt": False,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing keyword: dish"),
        ({"dish": "soup", "plate": 2}, "unknown keyword: plate"),
        ({"dish": "soup", "plates": "2"}, "--plates: expected a whole number, not '2'"),
    ],
)
def test_keywords_that_are_no_options(given: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fields_of(Ordered, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plates": 4}, "--plates: '4' is not a whole number from 1 to 3"),
        ({"drink": "wine"}, "--drink: 'wine' is not one of 'tea', 'water'"),
        ({"sizes": ["s", "m"]}, "--sizes: 'm' is not one of 's', 'l'"),
    ],
)
def test_values_that_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        fields_of(Ordered, {"dish": "soup", **given})
    assert raised.value.message == message


def test_a_command_has_the_options_that_are_declared() -> None:
    taken: dict[str, object] = {}

    @click.command()
    @declared(Ordered)
    def order(**options: object) -> None:
        taken.update(options)

    arguments = ["--dish", "soup", "--side", "a", "--side", "b", "--no-heated", "--no-salt"]
    assert CliRunner().invoke(order, arguments).exit_code == 0
    assert taken == {
        "dish": "soup",
        "plates": None,
        "drink": "tea",
        "sides": ("a", "b"),
        "sizes": (),
        "heated": False,
        "no_salt": True,
    }
    assert CliRunner().invoke(order, []).exit_code != 0
    assert CliRunner().invoke(order, ["--dish", "soup", "--plates", "4"]).exit_code != 0
    shown = CliRunner().invoke(order, ["--help"]).stdout
    assert shown.index("--dish NAME") < shown.index("--plates") < shown.index("--no-salt")


def test_what_completes_an_option_exists() -> None:
    top = click.Context(cli, info_name="vfiomgr")
    parameters = [parameter for context in commands(top) for parameter in context.command.params]
    completes = [parameter._custom_shell_complete for parameter in parameters]
    places = {one.args[0] for one in completes if isinstance(one, partial)}
    assert "snapshot.completion:complete_host_file" in places
    for place in places:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(f"vfiomgr.{module}"), name)), place
