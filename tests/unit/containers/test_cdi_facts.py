from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from pathlib import Path


def host(root: Path, **files: bytes) -> HostTree:
    """A host with these files; `__` stands for a slash, and `_1` for a dot."""
    for name, data in files.items():
        path = root / name.replace("__", "/").replace("_1", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return HostTree(root)


def test_files_are_found_where_consumers_look(tmp_path: Path) -> None:
    (tmp_path / "run" / "cdi").mkdir(parents=True)
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to("/run")
    tree = host(
        tmp_path,
        etc__cdi__b_1json=b"{}",
        etc__cdi__a_1yaml=b"kind: a/b",
        etc__cdi__c_1yml=b"",
        etc__cdi__deep__d_1JSON=b"{",
        etc__cdi__spec_1tmp=b"",
        etc__cdi__b_1json_1bak=b"",
        run__cdi__e_1json=b"[]",
    )
    assert {file.path: file.text for file in read_cdi_files(tree)} == {
        "/etc/cdi/a.yaml": "kind: a/b",
        "/etc/cdi/b.json": "{}",
        "/etc/cdi/c.yml": "",
        "/etc/cdi/deep/d.JSON": "{",
        "/run/cdi/e.json": "[]",
    }


def test_a_var_run_that_is_no_link_is_read_as_such(tmp_path: Path) -> None:
    tree = host(tmp_path, var__run__cdi__e_1json=b"{}", run__cdi__f_1json=b"{}")
    (file,) = read_cdi_files(tree)
    assert file.path == "/var/run/cdi/e.json"
    assert (file.directory, file.below) == ("/run/cdi", "e.json")


def test_what_cannot_be_read_is_told_with_why(tmp_path: Path) -> None:
    tree = host(tmp_path, etc__cdi__a_1json=b"{\n\xff}")
    (tmp_path / "etc" / "cdi" / "b.json").symlink_to("nowhere")
    told = {file.path: (file.text, file.why) for file in read_cdi_files(tree)}
    assert told == {
        "/etc/cdi/a.json": (None, "not UTF-8 text in line 2"),
        "/etc/cdi/b.json": (None, "cannot open it"),
    }


def test_links_are_followed_within_the_tree(tmp_path: Path) -> None:
    tree = host(tmp_path, usr__share__cdi__a_1json=b"{}", etc__cdi__real_1json=b"[]")
    for name, target in (("a", "../../usr/share/cdi/a.json"), ("b", "/usr/share/cdi/a.json")):
        (tmp_path / "etc" / "cdi" / f"{name}.json").symlink_to(target)
    told = {file.path: file.text for file in read_cdi_files(tree)}
    assert told == {
        "/etc/cdi/a.json": "{}",
        "/etc/cdi/b.json": "{}",
        "/etc/cdi/real.json": "[]",
    }


def test_a_host_without_any_has_none(tmp_path: Path) -> None:
    assert read_cdi_files(HostTree(tmp_path)) == ()
