"""The table of Kata's keys."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any, get_args

import pytest

from vfiomgr.documents.text import resource_directory
from vfiomgr.kata.model import (
    NEWEST,
    OLDEST,
    KataRelease,
    KeyType,
    RuntimeName,
    has_annotation,
    key_table,
)
from vfiomgr.units import Version

TABLE = key_table()


def release(version: str, runtime: RuntimeName) -> KataRelease:
    return KataRelease(Version.parse(version), runtime)


def document() -> Any:
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        return json.load(file)


@pytest.mark.parametrize(
    ("place", "first", "last"),
    [
        ("go hypervisor cold_plug_vfio", "3.2.0", "4.1.0"),
        ("go hypervisor hot_plug_vfio", "3.2.0", "4.1.0"),
        ("go hypervisor pcie_root_port", "3.6.0", "4.1.0"),
        ("go hypervisor pcie_switch_port", "3.6.0", "4.1.0"),
        ("go hypervisor enable_numa", "3.27.0", "4.1.0"),
        ("go hypervisor file_mem_backend", "3.2.0", "3.31.0"),
        ("go hypervisor default_maxmemory", "3.2.0", "4.1.0"),
        ("go runtime create_container_timeout", "3.4.0", "4.1.0"),
        ("go runtime pod_resource_api_sock", "3.24.0", "4.1.0"),
        ("go agent visible_cdi_devices", "3.32.0", "4.1.0"),
        ("go image service_offload", "3.2.0", "3.3.0"),
        ("rs hypervisor cold_plug_vfio", "3.31.0", "4.1.0"),
        ("rs hypervisor hotplug_vfio_on_root_bus", "3.2.0", "3.32.0"),
        ("rs hypervisor pcie_root_port", "3.2.0", "4.1.0"),
        ("rs hypervisor pcie_switch_port", "3.17.0", "4.1.0"),
        ("rs hypervisor extra_monitor_socket", "3.29.0", "4.1.0"),
        ("rs hypervisor dbg_monitor_socket", "3.6.0", "4.1.0"),
        ("rs hypervisor tdx_quote_generation_service_socket_port", "3.18.0", "4.1.0"),
        ("rs hypervisor.factory enable_template", "3.23.0", "4.1.0"),
        ("rs runtime pod_resource_api_sock", "3.31.0", "4.1.0"),
        ("rs agent request_timeout_ms", "3.2.0", "3.18.0"),
        ("rs agent create_container_timeout", "3.19.0", "4.1.0"),
        ("rs agent cdh_api_timeout_ms", "3.31.0", "4.1.0"),
        ("rs agent.mem_agent mem_agent_enable", "3.13.0", "4.1.0"),
    ],
)
def test_the_releases_of_keys_that_matter(place: str, first: str, last: str) -> None:
    runtime, section, key = place.split()
    found = release("4.1", "go" if runtime == "go" else "rs").key(section, key)
    assert found is not None
    assert (str(found.releases.first), str(found.releases.last)) == (first, last)


@pytest.mark.parametrize(
    "place",
    [
        "go hypervisor hotplug_vfio_on_root_bus",
        "go agent create_container_timeout",
        "go runtime vsock_uds_forward",
        "rs hypervisor hot_plug_vfio",
        "rs hypervisor enable_numa",
        "rs runtime create_container_timeout",
        "rs agent dial_timeout",
    ],
)
def test_keys_that_no_release_of_a_runtime_has(place: str) -> None:
    runtime, section, key = place.split()
    assert release("4.1", "go" if runtime == "go" else "rs").key(section, key) is None


def test_a_release_between_those_of_the_table_is_the_one_before_it() -> None:
    def knows(version: str, section: str = "hypervisor", key: str = "pcie_root_port") -> bool:
        return release(version, "go").knows(section, key)

    assert [knows(each) for each in ("3.5.0", "3.5.9", "3.6.0", "3.6.1", "4.2.0")] == [
        *(False, False, True, True, True),
    ]
    assert knows("3.1.0", key="pcie_switch_port") == knows("3.2.0", key="pcie_switch_port")
    assert not knows("3.1.0", key="cold_plug_vfio"), "an older one lacks what the first added"


def test_units_and_types_by_release() -> None:
    def milliseconds(version: str) -> int:
        key = "create_container_timeout"
        return release(version, "rs").per_second("agent", key)

    assert [milliseconds(each) for each in ("3.19.0", "3.20.0", "3.21.0", "4.1.0")] == [
        *(1000, 1000, 1, 1),
    ]
    assert release("4.1", "rs").per_second("agent", "reconnect_timeout_ms") == 1000
    assert release("3.18", "rs").per_second("agent", "request_timeout_ms") == 1000
    assert release("4.1", "go").per_second("agent", "dial_timeout") == 1
    vcpus = [release(v, "go").form("hypervisor", "default_vcpus") for v in ("3.2", "3.3")]
    assert [form and form.type for form in vcpus] == ["integer", "number"]


def test_where_an_unknown_key_is_refused() -> None:
    refusing = {
        (version, section)
        for version in ("3.28", "3.29", "4.1")
        for section in ("agent", "agent.mem_agent", "hypervisor", "hypervisor.factory", "runtime")
        if release(version, "rs").refuses_unknown_keys(section)
    }
    strict = {"agent", "agent.mem_agent", "hypervisor.factory"}
    assert refusing == {(version, section) for version in ("3.29", "4.1") for section in strict}


def test_annotations_by_release() -> None:
    assert release("3.2", "rs").takes_annotation("pcie_root_port")
    assert not release("3.16", "rs").takes_annotation("pcie_switch_port")
    assert release("3.17", "rs").takes_annotation("pcie_switch_port")
    assert not release("4.1", "rs").takes_annotation("cold_plug_vfio")
    assert release("3.2", "go").takes_annotation("cold_plug_vfio")
    assert not release("3.5", "go").takes_annotation("pcie_root_port")
    assert not has_annotation("nosuch")


def test_the_last_release_has_as_many_keys_as_its_source() -> None:
    counts = Counter(
        (key.runtime, key.section)
        for key in TABLE.keys.values()
        if release("4.1", key.runtime).knows(key.section, key.key)
    )
    assert counts["go", "hypervisor"] == 96
    assert counts["go", "runtime"] == 23
    assert counts["go", "agent"] == 8
    assert counts["rs", "hypervisor"] == 108
    assert counts["rs", "runtime"] == 26
    assert counts["rs", "agent"] == 17


def test_the_table_is_whole() -> None:
    table = document()
    assert [TABLE.releases[0], TABLE.releases[-1]] == [OLDEST, NEWEST]
    assert len(TABLE.releases) == 35
    assert all(before < after for before, after in pairwise(TABLE.releases))
    assert len(table["keys"]) == len(TABLE.keys) == 320
    places = [(row["runtime"], row["section"], row["key"]) for row in table["keys"]]
    assert places == sorted(set(places))
    assert {row["runtime"] for row in table["keys"]} == set(get_args(RuntimeName))
    for key in TABLE.keys.values():
        assert {key.releases.first, key.releases.last} <= set(TABLE.releases)
        assert key.forms[-1].last == key.releases.last
        assert {form.type for form in key.forms} <= set(get_args(KeyType))
