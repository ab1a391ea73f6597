"""Handlers as configurations of containerd and CRI-O define them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vfiomgr.containers.runtimes.handlers import (
    HandlerEntry,
    imports_of,
    read_containerd,
    read_crio,
)
from vfiomgr.units import Version

CRI = {
    1: "plugins.cri.containerd.runtimes",
    2: "plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes",
    3: "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes",
}


def containerd(schema: int, body: str, name: str = "kata") -> str:
    return f"version = {schema}\n[{CRI[schema]}.{name}]\n{body}\n"


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_every_schema_of_containerd_is_read(schema: int) -> None:
    text = containerd(schema, 'runtime_type = "io.containerd.kata.v2"\n[a]\n')
    facts = read_containerd([("main", text)])
    assert facts.schema("main") == schema
    assert facts.with_cri == ("main",)
    plugin = CRI[schema].split("'")[1] if schema > 1 else "cri"
    entry = HandlerEntry("kata", "main", "io.containerd.kata.v2", plugins=(plugin,))
    assert facts.handler("kata") == entry
    assert facts.handler("runc") is None


def test_later_files_are_merged_into_earlier_ones() -> None:
    main = containerd(
        3,
        'runtime_type = "io.containerd.kata.v2"\nruntime_path = "/a"\n'
        f'[{CRI[3]}.kata.options]\nConfigPath = "/a.toml"',
    )
    drop_in = containerd(3, 'runtime_path = "/b"\nprivileged_without_host_devices = true')
    entry = read_containerd([("main", main), ("b", drop_in)]).handler("kata")
    assert entry is not None
    assert (entry.source, entry.runtime_path, entry.config_path) == ("b", "/b", "/a.toml")
    assert entry.privileged_without_host_devices


def test_what_nothing_imports_counts_only_where_nothing_else_has_the_handler() -> None:
    main, other = containerd(3, 'runtime_path = "/a"'), containerd(3, 'runtime_path = "/b"')
    new = containerd(3, 'runtime_path = "/c"', "new")
    facts = read_containerd([("main", main)], [("x", other), ("y", new), ("z", "?")])
    found = {entry.name: (entry.source, entry.runtime_path) for entry in facts.handlers}
    assert found == {"kata": ("main", "/a"), "new": ("y", "/c")}
    assert facts.unsure == ("x", "y")
    (unread,) = facts.unreadable
    assert (unread.place, unread.is_wrong, unread.is_unsure) == ("z:1", True, True)
    assert facts.is_known, "not every release reads it"
    facts = read_containerd([("main", main), ("z", "a = 1\nversion = [\n")])
    assert (facts.unreadable[0].place, facts.is_known) == ("z:2", False)


def test_a_later_file_of_crio_replaces_the_whole_handler() -> None:
    place = "[crio.runtime.runtimes.kata]\n"
    first = f'{place}runtime_type = "vm"\nruntime_config_path = "/a"\n'
    facts = read_crio([("a", first), ("b", f'{place}allowed_annotations = ["x"]\n')])
    assert facts.handler("kata") == HandlerEntry("kata", "b", pod_annotations=("x",))
    assert facts.cri == "crio"


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ('imports = ["/a/*.toml"]', ("/a/*.toml",)),
        ("imports = []", ()),
        ("", None),
        ("imports = 5", None),
        ("=", None),
    ],
)
def test_imports(text: str, patterns: tuple[str, ...] | None) -> None:
    assert imports_of(text) == patterns


@pytest.mark.parametrize(
    ("patterns", "annotation", "told"),
    [
        (("cdi.k8s.io/*",), "cdi.k8s.io/gpu", True),
        (("cdi.k8s.io/gpu",), "cdi.k8s.io/gpu", True),
        (("cdi.k8s.io/gpu",), "cdi.k8s.io/gpu2", False),
        (("io.katacontainers.*",), "cdi.k8s.io/gpu", False),
        ((), "cdi.k8s.io/gpu", False),
    ],
)
def test_annotations_are_told_by_pattern(
    patterns: tuple[str, ...], annotation: str, *, told: bool
) -> None:
    assert HandlerEntry("kata", "", pod_annotations=patterns).tells(annotation) == told


def test_a_shim_is_named_by_its_type() -> None:
    named = HandlerEntry("kata", "", runtime_type="io.containerd.kata-gpu.v2")
    assert named.shim == "containerd-shim-kata-gpu-v2"
    assert HandlerEntry("kata", "").shim == ""


TABLES = {"cri": "cri", "v2": "io.containerd.grpc.v1.cri", "v3": "io.containerd.cri.v1.runtime"}


@pytest.mark.parametrize(
    ("version", "schema", "read"),
    [
        ("1.7.28", None, {"cri"}),
        ("1.7.28", 1, {"cri"}),
        ("1.7.28", 2, {"v2"}),
        ("2.1.1", None, {"v3"}),
        ("2.1.1", 2, {"v2", "v3"}),
        ("2.0.2", 3, {"v3"}),
        ("2.3.0", None, {"cri", "v2", "v3"}),
        ("2.3.0", 3, {"v2", "v3"}),
        ("2.3.0", 4, {"v3"}),
        (None, None, {"cri"}),
        (None, 2, {"v2"}),
        (None, 3, {"v3"}),
        (None, 4, {"v3"}),
        ("2.3.0", 5, {"cri", "v2", "v3"}),
    ],
)
def test_the_table_that_a_containerd_reads_depends_on_both_versions(
    version: str | None, schema: int | None, read: set[str]
) -> None:
    line = "" if schema is None else f"version = {schema}\n"
    for name, plugin in TABLES.items():
        text = f"{line}[plugins.'{plugin}'.containerd.runtimes.kata]\nruntime_type = 'a'\n"
        facts = read_containerd([("a.toml", text)])
        facts = replace(facts, version=Version.parse(version) if version else None)
        (entry,) = facts.handlers
        assert facts.passes_over(entry) == (name not in read)


def test_a_handler_in_two_tables_is_read_where_one_is() -> None:
    both = "".join(
        f"[plugins.'{name}'.containerd.runtimes.kata]\na=1\n" for name in TABLES.values()
    )
    facts = read_containerd([("a.toml", f"version = 3\n{both}")])
    assert not facts.passes_over(facts.handlers[0])


def test_the_default_handler_is_the_one_that_is_stated_last() -> None:
    text = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = '{}'\n"
    facts = read_containerd([("a", text.format("a")), ("b", "x = 1"), ("c", text.format("c"))])
    assert facts.default == "c"
    assert read_crio([("a", "[crio.runtime]\ndefault_runtime = 'crun'\n")]).default == "crun"
    assert read_crio([("a", "[crio.runtime]\ndefault_runtime = 5\n")]).default == ""
