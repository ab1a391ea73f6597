"""The real dockerd accepts what is written for it, and what it rejects is not written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.programs import Machine
from tests.unit.runtimes import CONFIGURATION, SHIM, kata
from vfiomgr.containers.runtimes.apply import apply_prepared
from vfiomgr.containers.runtimes.entries import prepare_entry, prepare_removal
from vfiomgr.containers.runtimes.location import locate
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.errors import Refusal
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.debian import Program
    from vfiomgr.containers.runtimes.apply import Prepared

_DAEMON = HostPath("/etc/docker/daemon.json")
_CRUN = RuntimeRequest("docker", "crun", "/usr/bin/crun", set_default=True, enable_cdi=True)
_OLD = '{\n    "log-driver": "journald",\n    "features": {\n        "buildkit": true\n    }\n}\n'


def _host(root: Path, dockerd: Program, text: str | None) -> Machine:
    tree = Machine(root, dockerd)
    for path, content in ((_DAEMON, text), (HostPath(SHIM), ""), (CONFIGURATION, "")):
        if content is not None:
            tree.make_directory(path.parent)
            tree.replace(path, content.encode(), durable=False)
    return tree


def _prepare(tree: Machine, wanted: RuntimeRequest) -> Prepared:
    return prepare_entry(tree, locate(tree, "docker"), wanted, "the same command")


def _uninstall(tree: Machine, name: str) -> None:
    place = locate(tree, "docker")
    prepared = prepare_removal(tree, place, name, "the same command")
    assert prepared.unchecked == ()
    apply_prepared(prepared, ApplyContext(tree))


@pytest.mark.parametrize("text", [None, "{}\n", _OLD])
@pytest.mark.parametrize("first", ["kata-vfio", "crun"])
def test_it_accepts_the_entries_and_they_leave_the_first_bytes(
    tmp_path: Path, dockerd: Program, text: str | None, first: str
) -> None:
    tree = _host(tmp_path, dockerd, text)
    for wanted in (kata("docker"), _CRUN):
        prepared = _prepare(tree, wanted)
        assert prepared.unchecked == (), "dockerd looked at it"
        apply_prepared(prepared, ApplyContext(tree))
    written = json.loads(tree.read_text(_DAEMON) or "")
    assert written["runtimes"] == {
        "kata-vfio": {"runtimeType": SHIM, "options": {"ConfigPath": CONFIGURATION}},
        "crun": {"path": "/usr/bin/crun"},
    }
    assert written["default-runtime"] == "crun"
    assert written["features"]["cdi"] is True
    _uninstall(tree, first)
    _uninstall(tree, ({"kata-vfio", "crun"} - {first}).pop())
    assert tree.read_text(_DAEMON) == text


@pytest.mark.parametrize(
    "text",
    ['{"no-such-option": true}\n', '{"runtimes": {"x": 3}}\n'],
)
def test_what_it_rejects_is_told_in_its_words(tmp_path: Path, dockerd: Program, text: str) -> None:
    tree = _host(tmp_path, dockerd, text)
    with pytest.raises(Refusal, match=r"Docker rejects the file: .*unable to configure"):
        _prepare(tree, kata("docker"))
    assert tree.read_text(_DAEMON) == text
