"""CEL expressions as Kubernetes evaluates them."""

from __future__ import annotations

import pytest

from vfiomgr.node.dra.model import DraDevice, Target
from vfiomgr.node.simulation import selectors
from vfiomgr.node.simulation.selectors import _MOST_SIZE, SelectorError, Selectors, facts_of
from vfiomgr.units import GIB

DEVICE = DraDevice(
    "a",
    Target("0000:01:00.0"),
    {"type": "A40-8Q", "count": 3, "viable": True, "resource.kubernetes.io/numaNode": 1},
    {"memory": 8 * GIB},
)
OWN = 'device.attributes["vfiomgr.io"]'
MEMORY = 'device.capacity["vfiomgr.io"].memory'


def nested(depth: int, body: str, items: int = 10) -> str:
    """`all` in `all`: items to the power of depth steps."""
    numbers = ", ".join(map(str, range(items)))
    for level in range(depth):
        body = f"[{numbers}].all(v{level}, {body})"
    return body


def matches(expression: str) -> bool:
    return Selectors().matches(expression, facts_of(DEVICE))


@pytest.mark.parametrize(
    "expression",
    [
        "true",
        'device.driver == "vfiomgr.io"',
        f'{OWN}.type == "A40-8Q" && {OWN}.count == 3 && {OWN}.viable',
        'device.attributes["resource.kubernetes.io"].numaNode == 1',
        f'{OWN}.type.lowerAscii().startsWith("a40")',
        f'{OWN}.type.matches("^A40-[0-9]+Q$")',
        f'{OWN}.type in ["A40-8Q", "A40-4Q"]',
        f"[1, 3].exists(n, n == {OWN}.count)",
        '!has(device.attributes["other.io"].name)',
        'device.attributes["other.io"].size() == 0',
        f'{MEMORY}.isGreaterThan(quantity("7.5Gi"))',
        f'{MEMORY}.isLessThan(quantity("9G"))',
        f'{MEMORY}.compareTo(quantity("8192Mi")) == 0',
        f'{MEMORY} == quantity("8Gi")',
        f'{MEMORY}.sub(quantity("8Gi")).sign() == 0',
        f"{MEMORY}.add(1).asInteger() == 8589934593",
        f'isQuantity("1k") && !isQuantity("1x") && {MEMORY}.isInteger()',
        f"{MEMORY}.asApproximateFloat() > 8.0e9",
        "!device.allowMultipleAllocations",
        '"vfiomgr.io" in device.attributes && !("other.io" in device.attributes)',
        '!("other.io" in device . capacity) && device.attributes["other.io"].size() == 0',
        'device.attributes.all(d, d != "other.io") && device.attributes.size() == 2',
        '"in device.attributes".size() == 20',
        f'{OWN}.type.includes("A40-8Q") && !{OWN}.count.includes(true)',
        'semver("1.10.0").isGreaterThan(semver("1.9.3")) && isSemver("v1.2", true)',
        '!isSemver("1.2") && semver("v2", true).compareTo(semver("2.0.0")) == 0',
    ],
)
def test_an_expression_that_matches(expression: str) -> None:
    assert matches(expression)
    assert not matches(f"!({expression})")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        (f"{OWN}.missing == 1", "no such key: missing"),
        ('device.attributes["other.io"].a == 1', "no such key: a"),
        (f"{MEMORY} > 5", "No such overload: the operation is not defined"),
        (f"{MEMORY}.isGreaterThan(5)", "not a quantity: 5"),
        (f'{MEMORY}.isGreaterThan(quantity("8Gib"))', "not a quantity: '8Gib'"),
        ('quantity("0.5").asInteger() == 0 || device.driver == ""', "not a whole number: 1/2"),
        (f"{OWN}.type", "the result is not true or false but 'A40-8Q'"),
        ("device.driver ==", "Syntax error"),
        ("devices.driver == 1", "unknown variable: devices"),
        ("nope(device.driver)", "unknown function: nope"),
        ('semver("1.2") == semver("1.2.0")', "not a semantic version: '1.2'"),
    ],
)
def test_an_expression_that_fails(expression: str, why: str) -> None:
    with pytest.raises(SelectorError) as found:
        matches(expression)
    assert why in str(found.value)


def test_an_expression_is_evaluated_once_for_equal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    selectors = Selectors()
    assert selectors.matches("true", facts_of(DEVICE))
    monkeypatch.setattr(Selectors, "_evaluated", None)
    assert selectors.matches("true", facts_of(DEVICE))
    with pytest.raises(TypeError):
        selectors.matches("false", facts_of(DEVICE))


@pytest.mark.parametrize(
    "expression",
    [
        nested(9, "true"),
        nested(9, "false || true"),
        f"{nested(9, 'v0 >= 0')} || true",
        nested(9, "true").replace(".all(", ".exists_one("),
        nested(9, "true").replace(".all(", " . /* */all(").replace("/* */", "// all(\n"),
        f'["{"a" * 100}"]{".map(t, t + t)" * 60}.size() == 1',
        "[[1, 2]]" + ".map(t, t + t)" * 60 + ".size() == 1",
        f"{'[' * 30}1{']' * 30}{'.map(t, [t, t])' * 40}.size() == 1",
        f"""[{", ".join(['"a"'] * 300)}].all(t, t.replace("", "{"b" * 400}") != "")""",
    ],
)
def test_an_expression_that_costs_more_than_kubernetes_allows_is_ended(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.simulation.selectors.MOST_STEPS", 10_000)
    selectors = Selectors()
    with pytest.raises(SelectorError, match=r"^actual cost limit exceeded$"):
        selectors.matches(expression, facts_of(DEVICE))
    assert selectors._meter.steps <= 10_000 + _MOST_SIZE


def test_the_limits_are_those_of_kubernetes() -> None:
    assert (selectors.MOST_STEPS, selectors.MOST_BYTES) == (1_000_000, 10_240)


@pytest.mark.parametrize(
    ("expression", "number"),
    [("true", 0), (nested(3, "true"), 1110), ("[1, 2].map(x, x > 1, x * 2) == [4]", 2)],
)
def test_each_step_of_a_macro_is_counted(expression: str, number: int) -> None:
    selectors = Selectors()
    assert selectors.matches(expression, facts_of(DEVICE))
    assert selectors._meter.steps == number


def test_an_expression_that_is_too_long_for_kubernetes_is_an_error() -> None:
    with pytest.raises(SelectorError, match=r"^too long: more than 10240 bytes$"):
        matches(f'"{"a" * 10_240}" == ""')


@pytest.mark.parametrize(
    "expression",
    [
        '[\'.all(x, \', "b)"].exists(t, t == "b)")',
        r"[r'\'].all(t, t.size() == 1)",
        '["""a"b(""", \'c\'].map(t, t.size()) == [4, 1]',
        "[1, 2] // .all(\n .filter(x, x > 1 // )\n).size() == 1",
        "[[1], [2]].all(x, x.exists(y, y in [1, 2]))",
        "{'a': 1}.all(k, k == 'a') && [1].map(x, x + 1)[0] == 2",
    ],
)
def test_texts_and_comments_that_look_like_macros_are_left_alone(expression: str) -> None:
    assert matches(expression)
