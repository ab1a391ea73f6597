"""The dashboard and the alerts, by Grafana's own kinds and by the metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from vfiomgr.documents import read_values
from vfiomgr.metrics.model import METRICS
from vfiomgr.node.metrics import METRICS as AGENT_METRICS

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
    assert asked >= SERIES - {"vfiomgr_facts_unknown", "vfiomgr_group_viable"} - {
        "vfiomgr_link_transfers_per_second"
    }


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
