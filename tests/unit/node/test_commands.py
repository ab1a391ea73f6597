"""The commands of `vfiomgr node`, as far as they need no agent that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from vfiomgr.diagnostic import blocker
from vfiomgr.host import installation
from vfiomgr.node.commands import status as status_module
from vfiomgr.users.node_agent import DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from tests.unit.conftest import Run

NAME = "vfiomgr.io/GA102GL_A40"
GPU = "0000:41:00.0"
REASON = blocker("wrong-driver", GPU, f"{GPU} is on nvidia", f"vfiomgr bind {GPU}")
DEVICES = (
    DeviceStatus(GPU, (GPU, "0000:41:00.1"), (), is_healthy=False, used_by="", reasons=(REASON,)),
    DeviceStatus("0000:81:00.0", ("0000:81:00.0",), (0, 1), True, "default/cuda/c0"),  # noqa: FBT003
)
RESOURCE = ResourceStatus(NAME, "default", is_registered=False, devices=DEVICES)


def shown(monkeypatch: pytest.MonkeyPatch, found: NodeStatus) -> None:
    """Have an agent answer this."""
    monkeypatch.setattr(status_module, "read_status", lambda _: found)


def test_status_is_a_table_with_reasons_below(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = (replace(REASON, severity="info"), replace(REASON, severity="warning", summary="look"))
    shown(monkeypatch, NodeStatus(7, "/p", has_kubelet=True, resources=(RESOURCE,), notes=notes))
    answer = run("node", "status")
    assert answer.stdout.splitlines() == [
        "RESOURCE                DEVICE        NUMA  HEALTH     USED BY",
        f"{NAME}  {GPU}  -     unhealthy  -",
        f"{NAME}  0000:81:00.0  0,1   healthy    default/cuda/c0",
    ]
    assert answer.stderr.splitlines() == [
        f"{NAME}: not registered with the kubelet",
        f"{GPU} is on nvidia",
        f"  remedy: vfiomgr bind {GPU}",
        "look",
        f"  remedy: vfiomgr bind {GPU}",
    ]


def test_status_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown(monkeypatch, NodeStatus(7, "/p", has_kubelet=False, error="no sys"))
    answer = run("node", "status")
    assert answer.stdout == ""
    assert answer.stderr.splitlines() == [
        "cannot scan the host: no sys",
        "no kubelet found in /p",
        "no devices are offered; bind some with: vfiomgr bind ADDRESS",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--alias", "10de:2235"), "not an alias: '10de:2235'"),
        (("--alias", "10de:2235=/"), "invalid resource name"),
        (("--resource-prefix", "kubernetes.io"), "invalid domain of resource names"),
    ],
)
def test_wrong_names_are_refused_at_the_start(
    arguments: tuple[str, ...], message: str, run: Run
) -> None:
    answer = run("node", "run", *arguments)
    assert answer.status == 2
    assert message in answer.stderr


@pytest.mark.parametrize(
    ("prefix", "beside", "remedy"),
    [
        (
            "/opt/vfiomgr",
            "/usr/bin",
            "in the source directory of vfiomgr: /opt/vfiomgr/bin/pip install '.[node]'",
        ),
        (
            "/usr/lib/vfiomgr",
            "/usr/bin",
            "install the package vfiomgr again: it contains this library",
        ),
        (
            "/usr/lib/vfiomgr",
            "/usr/no-library",
            "install for the system's Python: grpclib, httpx, prometheus-client, protobuf",
        ),
    ],
)
def test_a_missing_library_of_the_agent_names_how_to_get_it_where_vfiomgr_is_installed(
    run: Run, monkeypatch: pytest.MonkeyPatch, prefix: str, beside: str, remedy: str
) -> None:
    def missing(_name: str) -> None:
        text = "No module named 'grpclib'"
        raise ModuleNotFoundError(text, name="grpclib")

    monkeypatch.setattr(installation, "import_module", missing)
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(installation, "BESIDE", Path(beside))
    answer = run("node", "run")
    assert answer.status == 2
    assert (
        "cannot run the agent: the libraries of the extra 'node' are not installed" in answer.stderr
    )
    assert remedy in answer.stderr


def test_other_commands_do_not_import_the_libraries_of_the_agent() -> None:
    code = (
        "import sys; from vfiomgr.main.program import cli; import click; c = click.Context(cli); "
        "cli.get_command(c, 'list'); cli.get_command(c, 'node').get_command(c, 'run'); "
        "print(sorted({'grpclib', 'google.protobuf', 'prometheus_client'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_the_agent_starts_without_the_reader_of_layouts() -> None:
    """Pydantic takes a third of a second, and half of the scanning process' memory."""
    modules = "vfiomgr.node.commands.run, vfiomgr.node.scanner, vfiomgr.node.metrics, sys"
    code = f"import {modules}; print('pydantic' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--credentials", ("/srv",)),
        ("--kubelet-root", ("/srv",)),
        ("--binding-conditions", ()),
    ],
)
def test_options_of_the_driver_need_the_driver(
    run: Run, option: str, value: tuple[str, ...]
) -> None:
    answer = run("node", "run", option, *value)
    assert answer.status == 2
    assert option in answer.stderr
    assert "--dra" in answer.stderr
