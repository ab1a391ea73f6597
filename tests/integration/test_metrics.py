"""Prometheus' own programs read the metrics, and node-exporter serves them."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from msgspec.structs import replace

from tests import api, debian
from tests.fakes.servers import dgx, vgpu_server
from tests.unit.metrics.test_dashboard import ALERTS, OF_NODE_EXPORTER, SERIES, dashboard
from vfiomgr.metrics.collect import collect
from vfiomgr.metrics.facts import known_devices
from vfiomgr.metrics.model import METRICS, CheckFacts, LayoutState, UnitResult
from vfiomgr.metrics.render import render_textfile
from vfiomgr.metrics.samples import check_samples, measured_devices
from vfiomgr.pci.error_counters import FunctionHealth, HealthFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

_RELEASE = "trixie"
_SECONDS = 60
_ADDRESS = re.compile(r"Listening on.*address=(127\.0\.0\.1:\d+)")


@cache
def promtool() -> tuple[str, ...]:
    """Debian's promtool, which is not installed: its package starts a service."""
    return debian.program(_RELEASE, "prometheus", "usr/bin/promtool").command


def ask(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(
        [*promtool(), *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )


def everything(kernel: FakeKernel) -> str:
    """The metrics of a host, with samples of all names."""
    host, facts = collect(api.host_at(kernel))
    devices = measured_devices(host)
    facts = CheckFacts(
        replace(facts.report, unknown=("one",)),
        HealthFacts(tuple(FunctionHealth(device.address, 1, 2, 3) for device in devices)),
        tuple(known_devices(devices)),
        LayoutState('a "layout"\\\n', 2),
        (UnitResult("vfiomgr-layout", "success", has_failed=False),),
    )
    return render_textfile(check_samples(host, facts), METRICS)


@pytest.mark.parametrize("host", [vgpu_server, dgx])
def test_promtool_finds_nothing_to_correct(
    tmp_path: Path, host: Callable[[Path], FakeKernel]
) -> None:
    checked = ask("check", "metrics", text=everything(host(tmp_path)))
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_promtool_would_find_a_counter_without_its_suffix(tmp_path: Path) -> None:
    text = everything(vgpu_server(tmp_path)).replace("vfiomgr_aer_errors_total", "vfiomgr_aer")
    checked = ask("check", "metrics", text=text)
    assert checked.returncode == 3
    assert "vfiomgr_aer" in checked.stderr


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the address of Debian's node-exporter that reads it."""
    directory = tmp_path / "textfile"
    directory.mkdir()
    package = "prometheus-node-exporter"
    command = (
        *debian.program(_RELEASE, package, f"usr/bin/{package}").command,
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={directory}",
        "--web.listen-address=127.0.0.1:0",
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = (_ADDRESS.search(line) for line in process.stderr)
            address = next(filter(None, found))[1]
            yield directory, f"http://{address}/metrics"
        finally:
            process.kill()


def page(url: str) -> str:
    """The text of a page."""
    with closing(urlopen(url, timeout=_SECONDS)) as answer:  # noqa: S310 - of this machine
        text: str = answer.read().decode()
    return text


def test_node_exporter_serves_what_was_written(tmp_path: Path, exporter: tuple[Path, str]) -> None:
    directory, url = exporter
    text = everything(vgpu_server(tmp_path))
    (directory / "vfiomgr.prom").write_text(text)
    served = page(url)
    assert "node_textfile_scrape_error 0" in served
    assert f'node_textfile_mtime_seconds{{file="{directory}/vfiomgr.prom"}}' in served
    for name in SERIES:
        assert re.search(rf"^{name}[ {{]", served, re.MULTILINE), name
        assert f"# TYPE {name} " in served
    assert "# TYPE vfiomgr_aer_errors_total counter" in served
    (directory / "vfiomgr.prom").write_text(f"{text}vfiomgr_x 1 1700000000000\n")
    assert "node_textfile_scrape_error 1" in page(url)


def test_promtool_accepts_the_alerts() -> None:
    checked = ask("check", "rules", str(ALERTS))
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS: 7 rules found" in checked.stdout


def test_prometheus_can_evaluate_each_query_of_the_dashboard(tmp_path: Path) -> None:
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(asked)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = ask("check", "rules", str(file))
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(asked)} rules found" in checked.stdout


def query(title: str, kind: str, number: int = 0) -> str:
    """A query of a panel, about all hosts."""
    (panel,) = (
        one for one in dashboard()["panels"] if (one["title"], one["type"]) == (title, kind)
    )
    text: str = panel["targets"][number]["expr"]
    return text.replace("$instance", ".*")


def answers(tmp_path: Path, text: str, series: dict[str, str], *samples: tuple[str, int]) -> bool:
    """Whether Prometheus answers a query with these samples and no others, after 100 minutes."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    expected = [{"labels": labels, "value": value} for labels, value in samples]
    asked = {"expr": text, "eval_time": "100m", "exp_samples": expected}
    test = {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}
    file = tmp_path / "query.json"
    file.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    answer = ask("test", "rules", str(file))
    assert ("SUCCESS" in answer.stdout) is (answer.returncode == 0)
    assert answer.returncode == 0 or "exp:" in answer.stdout + answer.stderr
    return answer.returncode == 0


@pytest.mark.parametrize(
    "title", ["Old metrics", "Missing devices", "Hosts with drift", "Blockers", "Failed units"]
)
def test_a_number_is_zero_if_a_host_reports_and_unknown_if_none_does(
    tmp_path: Path, title: str
) -> None:
    there = {"vfiomgr_build_info{instance='a',version='1'}": "1x200"}
    assert answers(tmp_path, query(title, "stat"), there, ("{}", 0))
    assert answers(tmp_path, query(title, "stat"), {})


def test_metrics_that_ended_are_old(tmp_path: Path) -> None:
    mtime = "node_textfile_mtime_seconds{instance='a',file='/x/vfiomgr.prom',job='node'}"
    other = mtime.replace("'/x/", "'/y/")
    text = query("Old metrics", "stat")
    assert answers(tmp_path, text, {mtime: "0+60x20 stale"}, ("{}", 1))
    moved = {
        mtime: "0+60x20 stale",
        other: "0+60x200",
        "vfiomgr_build_info{instance='a',version='1'}": "1x200",
    }
    assert answers(tmp_path, text, moved, ("{}", 0))


def test_guests_have_devices_and_vgpus_but_no_audio_functions(tmp_path: Path) -> None:
    series = {
        f"vfiomgr_device_assigned{{instance='a',job='n',address='{address}',guest='{guest}'}}": one
        for address, guest, one in (
            ("1", "win", "1x200"),
            ("2", "win", "1x200"),
            ("3", "", "0x200"),
            ("uuid", "desktop", "1x200"),
        )
    }
    for address, model in (("1", "A40"), ("2", "GA102 Audio Controller"), ("3", "A40")):
        labels = f"instance='a',job='n',address='{address}',model='{model}',numa_node='0'"
        series[f"vfiomgr_device_info{{{labels}}}"] = "1x200"
    assert answers(
        tmp_path,
        query("Devices of guests", "table"),
        series,
        ('{instance="a", address="1", guest="win", model="A40", numa_node="0"}', 1),
        ('{instance="a", address="uuid", guest="desktop", model="vGPU"}', 1),
    )


@pytest.mark.parametrize(("number", "lanes"), [(0, 8), (1, 16)])
def test_a_narrow_link_is_shown_with_the_lanes_that_it_could_have(
    tmp_path: Path, number: int, lanes: int
) -> None:
    series = {
        f"vfiomgr_link_lanes{{instance='a',job='n',address='{address}',bound='{bound}'}}": values
        for address, bound, values in (
            ("1", "current", "8x200"),
            ("1", "possible", "16x200"),
            ("2", "current", "16x200"),
            ("2", "possible", "16x200"),
        )
    }
    for address in "12":
        series[f"vfiomgr_device_info{{instance='a',address='{address}',model='A40'}}"] = "1x200"
    text = query("Links below their width", "table", number)
    sample = ('{instance="a", address="1", model="A40"}', lanes)
    assert answers(tmp_path, text, series, sample)


def test_the_problems_of_a_host_are_the_conditions_of_its_alerts(tmp_path: Path) -> None:
    series = {
        name.replace("{", "{instance='a',"): values
        for name, values in CASES.values()
        if not name.startswith("vfiomgr_aer")
    }
    series |= {
        "vfiomgr_aer_errors_total{instance='a',address='1',severity='fatal'}": "0x60 3x140",
        "vfiomgr_link_lanes{instance='a',address='1',bound='current'}": "8x200",
        "vfiomgr_link_lanes{instance='a',address='1',bound='possible'}": "16x200",
        "vfiomgr_build_info{instance='b',version='1'}": "1x200",
    }
    samples = ('{instance="a"}', len(CASES) + 1), ('{instance="b"}', 0)
    assert answers(tmp_path, query("Hosts", "table"), series, *samples)


CASES = {
    "VfiomgrMetricsOld": ("node_textfile_mtime_seconds{file='/x/vfiomgr.prom'}", "0x200"),
    "VfiomgrDeviceMissing": ("vfiomgr_device_missing{address='a',model='A40'}", "1x200"),
    "VfiomgrFatalErrors": ("vfiomgr_aer_errors_total{address='a',severity='fatal'}", "0x60 3x140"),
    "VfiomgrDrift": ("vfiomgr_layout_differences{layout='lab'}", "2x200"),
    "VfiomgrBlocked": ("vfiomgr_findings{rule='iommu',severity='blocker'}", "1x200"),
    "VfiomgrUnitFailed": ("vfiomgr_unit_failed{unit='vfiomgr-layout',result='timeout'}", "1x200"),
}
"""A series, a sample a minute, for which each alert fires after 100 minutes."""
_QUIET = {
    "VfiomgrMetricsOld": "0+60x200",
    "VfiomgrFatalErrors": "3x200",
}
"""The samples for which it does not; 0 if there are others."""


def fires(tmp_path: Path, alert: str, *series: tuple[str, str]) -> bool:
    """Whether an alert fires."""
    given = [{"series": name, "values": values} for name, values in series]
    expected = {"eval_time": "100m", "alertname": alert, "exp_alerts": []}
    test = {"interval": "1m", "input_series": given, "alert_rule_test": [expected]}
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))
    answer = ask("test", "rules", str(file))
    assert ("SUCCESS" in answer.stdout) is (answer.returncode == 0)
    assert answer.returncode == 0 or f"alertname: {alert}" in answer.stdout + answer.stderr
    return answer.returncode != 0


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_for_its_series_only(tmp_path: Path, alert: str) -> None:
    name, values = CASES[alert]
    assert fires(tmp_path, alert, (name, values))
    assert not fires(tmp_path, alert, (name, _QUIET.get(alert, "0x200")))
    assert not fires(tmp_path, alert)


def test_metrics_that_ended_fire_only_while_their_host_is_up(tmp_path: Path) -> None:
    ended = "vfiomgr_build_info{instance='a',version='1'}", "1x20 stale"
    for up, expected in (("1x200", True), ("0x200", False)):
        host = "up{instance='a'}", up
        assert fires(tmp_path, "VfiomgrMetricsOld", ended, host) is expected
    there = "vfiomgr_build_info{instance='a',version='2'}", "1x200"
    assert not fires(tmp_path, "VfiomgrMetricsOld", ended, there, ("up{instance='a'}", "1x200"))


def test_a_link_with_fewer_lanes_than_possible_fires_whatever_its_device_could_have(
    tmp_path: Path,
) -> None:
    def lanes(current: int, possible: int, maximum: int) -> list[tuple[str, str]]:
        given = {"current": current, "possible": possible, "maximum": maximum}
        return [
            (f"vfiomgr_link_lanes{{address='a',bound='{bound}'}}", f"{number}x200")
            for bound, number in given.items()
        ]

    assert fires(tmp_path, "VfiomgrNarrowLink", *lanes(4, 8, 16))
    assert not fires(tmp_path, "VfiomgrNarrowLink", *lanes(8, 8, 16))
    assert not fires(tmp_path, "VfiomgrNarrowLink", lanes(4, 8, 16)[0])


def test_node_exporters_names_are_its_own(exporter: tuple[Path, str]) -> None:
    directory, url = exporter
    (directory / "vfiomgr.prom").write_text("# HELP x X.\n# TYPE x gauge\nx 1\n")
    served = page(url)
    for name in OF_NODE_EXPORTER:
        assert f"# TYPE {name} gauge" in served
