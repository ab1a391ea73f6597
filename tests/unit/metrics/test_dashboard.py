"""The dashboard and the alerts, by Grafana's own kinds and by the metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from vfiomgr.documents import read_values
from vfiomgr.metrics.model import METRICS
from vfiomgr.node.metrics import METRICS as AGENT_METRICS
from vfiomgr.snapshot.values import DeviceState

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "metrics/dashboard.json"
ALERTS = DOCS / "metrics/alerts.yaml"
SUFFIXES = {"gauge": "", "counter": "_total", "info": "_info"}
SERIES = {f"{name}{SUFFIXES[kind]}" for name, (kind, _) in METRICS.items()}
OF_NODE_EXPORTER = {"node_textfile_mtime_seconds"}
_METRIC = re.compile(r"\b(?:vfiomgr|node)_[a-z_]+\b")
_LABELS = re.compile(r"\b(vfiomgr_[a-z_]+)\{([^}]*)\}")
_GROUPED = re.compile(r"(?:0 \* |label_replace\()?(?:\w+|time\(\) - max) by \(([a-z_, ]+)\) \(")
_REPORTING = 'count(vfiomgr_build_info{instance=~"$instance"})'
_COLUMN_WIDTH = 150
"""The least width of a column in Grafana, unless a table sets one."""
_MARGIN, _GAP = 16, 8
"""Pixels beside and between the panels of Grafana."""
_ROW = re.compile(r"^\| `(vfiomgr_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def dashboard() -> dict[str, Any]:
    """The dashboard as a document."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def alerts() -> list[dict[str, Any]]:
    """The rules of all groups."""
    document: Any = read_values(ALERTS.read_text(), str(ALERTS), "")
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """What the dashboard and the alerts ask Prometheus for."""
    document = dashboard()
    asked = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in document["templating"]["list"] if one["type"] == "query"]
    return [*asked, *(rule["expr"] for rule in alerts())]


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The members that Grafana's kinds do not have, or have in another form."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            place = f"{path}/{key}"
            yield from lost(value, after[key], place) if key in after else [place]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}/{number}")
    elif before != after:
        yield path


def read_by_grafana(document: dict[str, Any]) -> Any:
    """What remains of a dashboard in the types that are generated from Grafana's kinds."""
    register_default_plugins()
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(document)))


def test_grafana_knows_each_member_of_the_dashboard() -> None:
    document = dashboard()
    assert list(lost(document, read_by_grafana(document))) == []


def test_what_grafana_does_not_know_would_be_found() -> None:
    document = dashboard()
    document["panels"][0]["options"]["colourMode"] = "value"
    document["grafTooltip"] = 1
    found = set(lost(document, read_by_grafana(document)))
    assert found == {"/panels/0/options/colourMode", "/grafTooltip"}


def test_panels_have_their_own_place_and_number() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not own & taken
        taken |= own
        assert panel["description"].endswith(".")
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert asked - OF_NODE_EXPORTER <= SERIES
    assert asked >= SERIES - {"vfiomgr_group_viable", "vfiomgr_link_transfers_per_second"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """The kind and the labels of each metric in the documentation."""
    rows = _ROW.findall((DOCS / "metrics.md").read_text())
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_every_metric_is_documented_with_its_kind() -> None:
    families = METRICS | AGENT_METRICS
    assert {name: kind for name, (kind, _) in documented().items()} == {
        f"{name}{SUFFIXES[kind]}": kind for name, (kind, _) in families.items()
    }


def test_labels_that_are_asked_for_are_documented() -> None:
    known = documented()
    for text in expressions():
        for name, matchers in _LABELS.findall(text):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|=)", matchers)) - {"instance"}
            assert labels <= known[name][1], text


def test_every_alert_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    assert re.findall(r"^\| `(Vfiomgr\w+)`", text, re.MULTILINE) == [
        rule["alert"] for rule in alerts()
    ]


def test_only_lost_data_is_critical() -> None:
    critical = [one["alert"] for one in alerts() if one["labels"]["severity"] == "critical"]
    assert critical == ["VfiomgrFatalErrors"]


def panels(kind: str) -> list[dict[str, Any]]:
    """The panels of a kind."""
    return [panel for panel in dashboard()["panels"] if panel["type"] == kind]


def overrides(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The properties that a panel sets for single columns or series."""
    return {
        one["matcher"]["options"]: {each["id"]: each["value"] for each in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }


def columns(panel: dict[str, Any]) -> dict[str, str]:
    """The columns that the answers of a table have, and their titles."""
    (organize,) = (one for one in panel["transformations"] if one["id"] == "organize")
    titles: dict[str, str] = organize["options"]["renameByName"]
    hidden = organize["options"]["excludeByName"]
    assert not titles.keys() & hidden.keys()
    assert list(organize["options"]["indexByName"]) == list(titles)
    return {name: titles.get(name, name) for name in answered(panel) if name not in hidden}


def alternatives(text: str) -> list[str]:
    """The operands of `or` outside of all parentheses."""
    found, depth = [""], 0
    for word in text.split(" "):
        if word == "or" and not depth:
            found.append("")
        else:
            found[-1] += f" {word}" if found[-1] else word
            depth += word.count("(") - word.count(")")
    return found


def answered(panel: dict[str, Any]) -> set[str]:
    """The columns of the answers before they are renamed.

    Grafana calls the value of a query `Value`, and `Value #A` if there are several queries.
    """
    targets = panel["targets"]
    names = {f"Value #{one['refId']}" for one in targets} if len(targets) > 1 else {"Value"}
    for target in targets:
        for part in alternatives(target["expr"]):
            found = _GROUPED.match(part)
            assert found, part
            names |= set(found[1].split(", "))
            names |= set(re.findall(r'label_replace\(.*, "(\w+)", "\w+", "", ""\)$', part))
    return names | {"Time"}


def test_titles_are_unique() -> None:
    titles = [panel["title"] for panel in dashboard()["panels"]]
    assert len(set(titles)) == len(titles)


def test_a_number_without_a_host_that_reports_is_no_green_zero() -> None:
    for panel in panels("stat"):
        settings = panel["fieldConfig"]["defaults"]
        (target,) = panel["targets"]
        assert "noValue" not in settings, panel["title"]
        (shown,) = (one["options"] for one in settings["mappings"] if one["type"] == "special")
        assert shown["match"] == "null+nan"
        assert shown["result"]["text"] == "No data"
        assert shown["result"]["color"] == "text"
        if panel["title"] != "Reporting hosts":
            assert target["expr"].endswith(f" or 0 * {_REPORTING}"), panel["title"]


def test_each_column_of_a_table_has_a_title_that_is_no_label() -> None:
    for panel in panels("table"):
        titles = list(columns(panel).values())
        assert all(re.fullmatch(r"(?!Value)[A-Zv][A-Za-z ]+", title) for title in titles), titles
        assert overrides(panel).keys() <= set(titles), panel["title"]


def test_each_table_is_sorted_by_columns_that_it_has() -> None:
    for panel in panels("table"):
        by = [one["displayName"] for one in panel["options"]["sortBy"]]
        assert by, panel["title"]
        assert set(by) <= set(columns(panel).values()), panel["title"]


def test_an_empty_list_claims_no_more_than_that_nothing_was_reported() -> None:
    found = {
        panel["title"]: panel["fieldConfig"]["defaults"].get("noValue")
        for panel in dashboard()["panels"]
    }
    assert set(found.values()) == {None, "None reported"}
    assert found["Hosts"] is None
    assert found["Findings"] == found["Errors of PCI Express per hour"] == "None reported"


def test_each_state_of_devices_has_its_color_and_none_is_red() -> None:
    (panel,) = (one for one in panels("timeseries") if one["title"] == "Devices by state")
    found = overrides(panel)
    assert found.keys() == set(get_args(DeviceState))
    colors = [one["color"]["fixedColor"] for one in found.values()]
    assert len(set(colors)) == len(colors)
    assert found["vfio"]["color"]["fixedColor"] == "green"
    assert "red" not in colors


def test_errors_are_colored_by_severity() -> None:
    (panel,) = (one for one in panels("timeseries") if one["title"].startswith("Errors"))
    colors = {
        severity: one["color"]["fixedColor"]
        for severity in ("correctable", "nonfatal", "fatal")
        for pattern, one in overrides(panel).items()
        if re.search(pattern.strip("/"), f"gpu1:9100 0000:01:00.0 {severity}")
    }
    assert colors == {"correctable": "yellow", "nonfatal": "orange", "fatal": "red"}


def test_each_alert_has_its_column_in_the_table_of_hosts() -> None:
    (panel,) = (one for one in panels("table") if one["title"] == "Hosts")
    problems, *others = (set(_METRIC.findall(one["expr"])) for one in panel["targets"])
    named = {name for rule in alerts() for name in _METRIC.findall(rule["expr"])}
    assert named == problems
    assert named - {"vfiomgr_build_info"} <= set().union(*others)


def test_all_columns_of_a_table_fit_a_window_of_1280_pixels() -> None:
    for panel in panels("table"):
        own = overrides(panel)
        given = [own.get(title, {}) for title in columns(panel).values()]
        widths = [
            one.get("custom.width", one.get("custom.minWidth", _COLUMN_WIDTH)) for one in given
        ]
        span = panel["gridPos"]["w"]
        room = span * (1280 - 2 * _MARGIN - 23 * _GAP) // 24 + (span - 1) * _GAP
        assert sum(widths) <= room, panel["title"]


def test_audio_functions_are_left_out_where_devices_are_counted() -> None:
    counted = [text for text in expressions() if "vfiomgr_devices{" in text]
    assert len(counted) == 4
    assert all('model!~".*(Audio|USB).*"' in text for text in counted)
