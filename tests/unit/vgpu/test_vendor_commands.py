"""vGPUs of the vendor's own interface, for libvirt, Kata and CDI."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.fakes.nvidia.cards import A40
from tests.fakes.vgpu_hosts import GPUS, l40s_host, nvidia_host
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


@pytest.mark.usefixtures("kernel")
class TestWithoutADriver:
    """Virtual functions that the kernel created without a driver, and that have no types."""

    @pytest.fixture(params=["mdev-sriov", "vendor"])
    def kernel(self, request: pytest.FixtureRequest, tmp_path: Path) -> FakeKernel:
        """A GPU without NVIDIA's programs."""
        return nvidia_host(
            tmp_path,
            A40,
            request.param,
            total_vfs=2,
            is_enabled=False,
            has_programs=False,
            rejects_raw=False,
        )

    @pytest.mark.usefixtures("kernel")  # its parameters, which `run` alone does not have
    def test_the_command_that_creates_them_for_vgpus_is_named_and_works(self, run: Run) -> None:
        """By all that lack them."""
        remedy = f"vfiomgr vgpu mode {GPUS[0]} vgpu"
        made = run("sriov", "set", GPUS[0], "2")
        assert made.status == 0
        note = "virtual functions without a driver cannot host vGPUs; to create them for vGPUs"
        assert f"{note}: {remedy}\n" in made.stdout
        listed = run("vgpu", "list", "--types")
        assert listed.stdout == ""
        assert "no device" not in listed.stderr
        assert (
            f"none of its 2 is on the driver nvidia; create them again: {remedy}\n" in listed.stderr
        )
        for parent in ([], ["--parent", GPUS[0]], ["--parent", FIRST]):
            refused = run("vgpu", "create", "--type", "A40-4Q", *parent)
            assert refused.status == 2
            assert refused.stderr.endswith(f": {remedy}\n")
        assert run(*remedy.split()[1:]).status == 0
        assert run("vgpu", "create", "--type", "A40-4Q").status == 0
        assert run("vgpu", "list", "--types").stderr == ""
