"""The table of Kata's keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, get_args

import pytest

from vfiomgr.adapters.kata.keys import key_table
from vfiomgr.adapters.resources import resource_directory
from vfiomgr.model.kata import KataRelease, RuntimeName
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from vfiomgr.model.kata_keys import Knowledge

TABLE = key_table()


def release(version: str, runtime: RuntimeName) -> KataRelease:
    return KataRelease(Version.parse(version), runtime)


@pytest.mark.parametrize(
    ("runtime", "section", "key", "version", "knowledge"),
    [
        ("go", "hypervisor", "cold_plug_vfio", "3.2.0", "known"),
        ("rs", "hypervisor", "cold_plug_vfio", "3.30.0", "unknown"),
        ("rs", "hypervisor", "cold_plug_vfio", "3.31.0", "known"),
        ("rs", "hypervisor", "hot_plug_vfio", "4.1.0", "unknown"),
        ("go", "hypervisor", "hotplug_vfio_on_root_bus", "3.2.0", "unknown"),
        ("go", "runtime", "pod_resource_api_sock", "3.23.0", "unknown"),
        ("go", "runtime", "pod_resource_api_sock", "3.24.1", "known"),
        ("rs", "runtime", "pod_resource_api_sock", "3.24.0", "unknown"),
        ("go", "runtime", "create_container_timeout", "4.1.0", "known"),
        ("rs", "runtime", "create_container_timeout", "4.1.0", "unknown"),
        ("rs", "agent", "create_container_timeout", "4.1.0", "known"),
        ("go", "hypervisor", "file_mem_backend", "3.2.0", "known"),
        ("go", "hypervisor", "file_mem_backend", "3.24.0", "unsure"),
        ("go", "hypervisor", "file_mem_backend", "4.1.0", "unknown"),
        ("go", "hypervisor", "default_maxmemory", "3.2.0", "unsure"),
        ("go", "hypervisor", "default_maxmemory", "3.15.0", "known"),
        ("go", "runtime", "vsock_uds_forward", "4.1.0", "unsure"),
        ("go", "hypervisor", "nothing_of_kata", "4.1.0", "unknown"),
    ],
)
def test_what_is_known_of_a_key(
    runtime: RuntimeName, section: str, key: str, version: str, knowledge: Knowledge
) -> None:
    assert TABLE.knowledge(release(version, runtime), section, key) == knowledge


def test_the_last_release_has_as_many_keys_as_were_counted_in_its_source() -> None:
    last = release("4.1", "go")
    known = [
        key for key in TABLE.keys if key.runtime == "go" and TABLE.knows(last, key.section, key.key)
    ]
    sections = [key.section for key in known]
    assert [sections.count(name) for name in ("hypervisor", "runtime", "agent")] == [96, 23, 8]


def test_each_row_names_its_source_and_stands_once() -> None:
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        document = json.load(file)
    sources = document["sources"]
    assert {row["source"] for row in document["keys"]} <= set(sources)
    assert all(source["dated"] for source in sources.values())
    places = [(row["runtime"], row["section"], row["key"]) for row in document["keys"]]
    assert len(places) == len(set(places))
    assert places == sorted(places)
    assert {row["runtime"] for row in document["keys"]} == set(get_args(RuntimeName))
