from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from tests.unit.layout.bad_layouts import BAD, Bad, rules, wanted
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.layout.diagnostics import RULES, covers, keys_of
from vfiomgr.layout.document import choose_layout, find_flaws, read_layouts, render_layouts
from vfiomgr.layout.model import (
    Layout,
    LayoutFile,
    PassthroughRule,
    Selector,
    VgpuRequest,
    VgpuRule,
)
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pydantic import BaseModel

EXAMPLES = sorted((Path(__file__).parents[3] / "docs/examples").glob("*.yaml"))
_DOCUMENTATION = Path(__file__).parents[3] / "docs/layout.md"
_PYDANTIC = ("Input", "valid ", "literal", "tag '", "constrained", "Value error", "pydantic")


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_each_flaw_is_told_with_its_place_and_its_remedy(bad: Bad) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_layouts(bad.text, "host.yaml")
    told = caught.value.details or (caught.value.message,)
    assert told == tuple(f"host.yaml:{line}" for line in bad.told.splitlines())
    assert not [word for line in told for word in _PYDANTIC if word in line]


def test_several_flaws_are_counted_and_one_stands_for_itself() -> None:
    several = next(bad for bad in BAD if bad.name == "several")
    with pytest.raises(InvalidDocument, match=r"^host.yaml: 5 errors$") as caught:
        read_layouts(several.text, "host.yaml")
    assert "vfiomgr check layout --schema" in caught.value.hint
    assert caught.value.exit_code == 65


@pytest.mark.parametrize("bad", [b for b in BAD if b.by_schema], ids=lambda bad: bad.name)
def test_a_flaw_is_told_of_json_as_of_yaml(bad: Bad) -> None:
    document = YAML(typ="safe", pure=True).load(bad.text)
    _, of_yaml = find_flaws(bad.text)
    _, of_json = find_flaws(json.dumps(document, indent="\t"))
    messages = [(flaw.subject, flaw.remedy) for flaw in of_json if "quote it" not in flaw.remedy]
    assert messages == [(f.subject, f.remedy) for f in of_yaml if "quote it" not in f.remedy]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_read_and_survive_being_written(path: Path) -> None:
    read = read_layouts(path.read_text(), path.name)
    assert read_layouts(render_layouts(read), "again") == read


def test_scalars_stand_for_lists_and_digits_may_be_written_large() -> None:
    text = rules(
        "select: {id: 10DE:2235, class: 0C03, numa_node: 1, address: 41:00.0}\n"
        "        state: passthrough\n        allow: boot-display"
    )
    rule = read_layouts(text, "x").layouts["gpus"].devices[0]
    assert rule.select.id == ("10de:2235",)
    assert rule.select.classes == ("0c03",)
    assert rule.select.numa_node == (1,)
    assert rule.select.address == (PciAddress(0, 0x41, 0, 0),)
    assert rule.allow == ("boot-display",)


@pytest.mark.parametrize(
    ("size", "mebibytes"), [("6G", 6144), ("512M", 512), ("1GiB", 1024), ("2gb", 2048), (512, 512)]
)
def test_sizes(size: str | int, mebibytes: int) -> None:
    file = read_layouts(wanted(f"{{framebuffer: {size}, count: 1}}"), "x")
    rule = file.layouts["gpus"].devices[0]
    assert isinstance(rule, VgpuRule)
    assert rule.vgpus[0].framebuffer == mebibytes


def test_parameters_are_texts_whatever_yaml_reads() -> None:
    text = wanted("{type: A, count: 1, parameters: {a: 0, b: true, c: x, d: 0.5}}")
    rule = read_layouts(text, "x").layouts["gpus"].devices[0]
    assert isinstance(rule, VgpuRule)
    assert rule.vgpus[0].parameters == {"a": "0", "b": "1", "c": "x", "d": "0.5"}


def test_aliases_mean_what_they_name() -> None:
    text = rules(
        "{select: &a {address: 0000:41:00.0}, state: passthrough, owner: &o kvm}",
        "{select: {address: 0000:42:00.0}, state: passthrough, owner: *o}",
    )
    rule = read_layouts(text, "x").layouts["gpus"].devices[1]
    assert isinstance(rule, PassthroughRule)
    assert rule.owner == "kvm"


def test_aliases_of_aliases_end_before_memory_does() -> None:
    levels = "".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    _, flaws = find_flaws(f"version: vfiomgr/v1\nlayouts:\n  - &a0 [x]\n{levels}")
    assert [flaw.summary for flaw in flaws] == ["too large for a layout"]


@pytest.mark.parametrize("text", ["\N{ZERO WIDTH NO-BREAK SPACE}{", "version: \x07", "\x00"])
def test_odd_characters_are_no_defect(text: str) -> None:
    _, flaws = find_flaws(text)
    assert flaws


def test_json_may_escape_what_is_beyond_16_bits() -> None:
    document = {
        "version": "vfiomgr/v1",
        "layouts": {"a": {"description": "\U0001f5a5", "devices": []}},
    }
    read = read_layouts(json.dumps(document), "x")
    assert read.layouts["a"].description == "\U0001f5a5"


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    text = "\N{ZERO WIDTH NO-BREAK SPACE}version: vfiomgr/v1\nlayouts: {a: {devices: []}}\n"
    assert list(read_layouts(text, "x").layouts) == ["a"]


def test_an_address_is_not_covered_without_one_for_it_may_be_the_console_s() -> None:
    wide = Selector(id=("10de:*",))
    assert covers(wide, Selector(id=("10de:2235",)))
    assert not covers(wide, Selector(id=("10de:2235",), address=(PciAddress(0, 0x41, 0, 0),)))


def test_braces_do_not_make_json_of_yaml() -> None:
    read = read_layouts("{version: vfiomgr/v1, layouts: {a: {devices: []}}}", "x")
    assert list(read.layouts) == ["a"]


@pytest.mark.parametrize(
    ("first", "second", "is_idle"),
    [
        ("all", "all", True),
        ("all", "{class: '0300'}", True),
        ("all", "{class: accelerator, numa_node: 1}", True),
        ("all", "{class: ethernet}", False),
        ("all", "{id: '10de:2235'}", False),
        ("all", "{address: 0000:41:00.0}", False),
        ("{class: display}", "{class: ['0300', 3d]}", True),
        ("{class: '0300'}", "{class: display}", False),
        ("{class: display, numa_node: 0}", "{class: display}", False),
        ("{id: '10de:*'}", "{id: '10de:2235'}", True),
        ("{id: '10de:*'}", "{id: ['10de:2235', '1002:66af']}", False),
        ("{id: '10de:*'}", "{id: '10de:2235', physical_function: 0000:41:00.0}", False),
        ("{name: '*A40*'}", "{name: 'NVIDIA a40'}", True),
        ("{name: '*A40*'}", "{name: '*A4?*'}", False),
        ("{name: '*'}", "{name: '*A40*'}", True),
        ("{address: 0000:41:00.0}", "{address: 0000:41:00.0, id: '10de:*'}", True),
        ("{address: 0000:41:00.0, id: '10de:*'}", "{address: 0000:41:00.0}", False),
        ("{parent: mtty}", "{parent: mtty}", True),
        ("{serial: a}", "{serial: [a, b]}", False),
    ],
)
def test_a_rule_is_idle_where_an_earlier_one_has_all_of_its_devices(
    first: str, second: str, *, is_idle: bool
) -> None:
    states = (f"{{select: {first}, state: vgpu}}", f"{{select: {second}, state: vgpu}}")
    _, flaws = find_flaws(rules(*states))
    assert [flaw.summary.startswith("this rule never applies: rule 1") for flaw in flaws] == (
        [True] if is_idle else []
    )


@pytest.fixture
def two() -> LayoutFile:
    text = "version: vfiomgr/v1\nlayouts: {day: {devices: []}, night: {devices: []}}\n"
    return read_layouts(text, "x")


def test_one_layout_needs_no_name() -> None:
    file = read_layouts("version: vfiomgr/v1\nlayouts: {day: {devices: []}}\n", "x")
    assert choose_layout(file, None) == ("day", file.layouts["day"])


def test_of_several_layouts_one_is_named(two: LayoutFile) -> None:
    assert choose_layout(two, "night")[0] == "night"
    with pytest.raises(UsageError, match="day, night") as caught:
        choose_layout(two, None)
    assert caught.value.hint == "pass one of them, e.g. --layout day"


@pytest.mark.parametrize(
    ("name", "hint"), [("nigth", "did you mean night?"), ("x", "use one of day, night")]
)
def test_an_unknown_layout_is_answered_with_those_that_are_there(
    two: LayoutFile, name: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=rf"'{name}' \(it has day, night\)") as caught:
        choose_layout(two, name)
    assert caught.value.hint == hint


def test_the_documentation_shows_the_examples_as_they_are() -> None:
    text = _DOCUMENTATION.read_text()
    assert len(EXAMPLES) == 4
    for path in EXAMPLES:
        assert f"(examples/{path.name})):\n\n```yaml\n{path.read_text()}```\n" in text


def test_the_documentation_has_every_key() -> None:
    text = _DOCUMENTATION.read_text()
    models: list[type[BaseModel]] = [LayoutFile, Layout, Selector, VgpuRequest, *RULES.values()]
    for model in models:
        for key in keys_of(model):
            assert f"| `{key}` |" in text, key


def test_the_file_that_the_documentation_begins_with_is_good() -> None:
    first = _DOCUMENTATION.read_text().split("```yaml\n")[1].partition("```")[0]
    assert list(read_layouts(first, "x").layouts) == ["gpus"]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("HostSnapshot", "pass it with --snapshot FILE"),
        ("LayoutPlan", "apply it with: vfiomgr apply FILE"),
        ("Pod", "a layout begins with version: vfiomgr/v1"),
    ],
)
def test_another_document_is_called_by_its_name(kind: str, remedy: str) -> None:
    text = json.dumps({"api_version": "vfiomgr/v1", "kind": kind, "devices": [{}] * 50})
    with pytest.raises(InvalidDocument) as caught:
        read_layouts(text, "x.json")
    assert f"this is a {kind}, not a layout; {remedy}" in caught.value.message
    assert caught.value.details == ()


def test_of_very_many_flaws_the_first_are_told() -> None:
    rules = "".join(f"      - {{select: {{id: x{number}}}, state: host}}\n" for number in range(99))
    text = f"version: vfiomgr/v1\nlayouts:\n  a:\n    devices:\n{rules}"
    with pytest.raises(InvalidDocument, match="99 errors") as caught:
        read_layouts(text, "host.yaml")
    assert caught.value.details[-1] == "and 59 more"
    assert len(caught.value.details) == 41


def rules_by_name(number: int) -> str:
    """A layout with rules of different names."""
    rules = [{"select": {"name": f"GPU {n}"}, "state": "passthrough"} for n in range(number)]
    return json.dumps({"version": "vfiomgr/v1", "layouts": {"lab": {"devices": rules}}})


def test_the_comparisons_of_rules_grow_with_their_number_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def counting(earlier: Selector, later: Selector) -> bool:
        compared.append(later)
        return covers(earlier, later)

    monkeypatch.setattr("vfiomgr.layout.diagnostics.covers", counting)
    found, flaws = find_flaws(rules_by_name(600))
    assert found is not None
    assert flaws == ()
    assert len(compared) <= 100 * 600


def test_equal_rules_are_found_however_many_others_are_between_them() -> None:
    document = json.loads(rules_by_name(300))
    devices = document["layouts"]["lab"]["devices"]
    devices.append(devices[250])
    _, flaws = find_flaws(json.dumps(document))
    assert [flaw.rule for flaw in flaws] == ["layout-rule-idle"]
    assert "rule 251 (" in flaws[0].summary


def test_the_search_for_errors_ends_at_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def close(word: str, *_: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr("difflib.get_close_matches", close)
    rule: dict[str, object] = {"select": {"id": "10de:2235"}, "state": "passthrough"}
    rule |= {f"key_{n}": 1 for n in range(20_000)}
    text = json.dumps({"version": "vfiomgr/v1", "layouts": {"lab": {"devices": [rule]}}})
    found, flaws = find_flaws(text)
    assert found is None
    assert len(flaws) == 1001
    assert sum(flaw.rule == "layout-unchecked" for flaw in flaws) == 1
    assert len(compared) == 1001, "one more shows that there are more"
