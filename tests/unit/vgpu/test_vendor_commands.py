"""vGPUs of the vendor's own interface, for libvirt, Kata and CDI."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import l40s_host
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

FIRST, SECOND = "0000:21:00.4", "0000:21:00.5"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """An L40S with two virtual functions."""
    return l40s_host(tmp_path, total_vfs=2)


def test_a_vgpu_goes_to_kata_with_its_node_and_a_function_without_a_type_does_not(
    run: Run, kernel: FakeKernel
) -> None:
    refused = run("cdi", "generate")
    assert (refused.status, refused.stdout) == (4, "")
    made = run("vgpu", "create", "--type", "L40S-2Q", "--parent", FIRST)
    assert made.stdout == f"{FIRST}\n"
    (device,) = json.loads(run("cdi", "generate").stdout)["devices"]
    (node,) = (n["path"] for n in device["containerEdits"]["deviceNodes"])
    assert device["name"] == FIRST
    assert kernel.exists(HostPath(node))
    told = run("kata", "config", "--kata-version", "4.1")
    assert tomllib.loads(told.stdout)["hypervisor"]["qemu"]["pcie_root_port"] == 1
    assert FIRST in told.stdout
    assert told.stderr == "", "it is no mediated device, and needs no binding"


@pytest.mark.parametrize(
    "command", [("libvirt", "hostdev", "--libvirt-version", "9.7"), ("kata", "config")]
)
def test_what_makes_a_function_ready_is_told(run: Run, command: tuple[str, ...]) -> None:
    run("vgpu", "create", "--type", "L40S-2Q", "--parent", FIRST)
    told = run(*command, FIRST, SECOND).stderr
    assert f"has no vGPU; create one with: vfiomgr vgpu create --parent {SECOND}" in told
    assert FIRST not in told
    assert "vfiomgr bind" not in told


def test_what_is_a_vgpu_needs_no_binding_and_is_shown_as_ready(run: Run) -> None:
    shown = run("show", SECOND).stdout
    assert "guest-ready      no: it is a virtual function for nvidia vGPUs" in shown
    refused = run("bind", SECOND)
    assert refused.status == 4
    assert f"vfiomgr vgpu create --parent {SECOND}" in refused.stderr
    run("vgpu", "create", "--type", "L40S-2Q", "--parent", FIRST)
    assert "guest-ready      yes, vGPU on driver nvidia" in run("show", FIRST).stdout
    assert f"assign the vGPU: vfiomgr libvirt hostdev {FIRST}" in run("bind", FIRST).stderr


def test_a_libvirt_that_would_unbind_it_is_refused(run: Run) -> None:
    run("vgpu", "create", "--type", "L40S-2Q", "--parent", FIRST)
    refused = run("libvirt", "hostdev", FIRST, "--libvirt-version", "9.0.0-4+deb12u2")
    assert refused.status == 4
    assert "(libvirt 9.7.0 or later); this is 9.0.0" in refused.stderr
    assert "install libvirt 9.7.0 or later" in refused.stderr
    assert "managed='no'" in run("libvirt", "hostdev", FIRST, "--libvirt-version", "9.7").stdout
