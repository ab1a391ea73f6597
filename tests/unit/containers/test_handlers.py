"""Handlers as configurations of containerd and CRI-O define them."""

from __future__ import annotations

import pytest

from vfiomgr.containers.runtimes.handlers import (
    HandlerEntry,
    imports_of,
    read_containerd,
    read_crio,
)

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
    assert facts.handler("kata") == HandlerEntry("kata", "main", "io.containerd.kata.v2")
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
