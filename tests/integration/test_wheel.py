"""The wheel, in an empty virtual environment, away from the checkout and without extras."""

from __future__ import annotations

import doctest
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from lxml import etree

from tests.fakes.hosts import workstation
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS_PROBE

CHECKOUT = Path(__file__).parents[2]
BOUND = "0000:02:00.0"
WRONG = """\
import vfiomgr
vfiomgr.Host().bind("04:00.0", persit=True)
vfiomgr.Host().bind(4)
vfiomgr.Host().create_vgpu(count="2")
vfiomgr.libvirt.domain_xml(vfiomgr.Host(), "win", memory="16G")
vfiomgr.kata.configuration(vfiomgr.Host(), hypervisor="xen")
vfiomgr.nothing
"""
"""A mistake in each line but the first."""


@pytest.fixture(scope="module")
def vfiomgr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(place)]
    subprocess.run([*build, str(CHECKOUT)], check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    environment = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return environment / "bin/vfiomgr"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded host with one GPU bound."""
    kernel = workstation(tmp_path_factory.mktemp("host"), vfio_loaded=True)
    for address in (BOUND, BOUND.replace(".0", ".1")):
        device = PCI_DEVICES / address
        kernel.write(device / "driver_override", "vfio-pci")
        kernel.write(device / "driver/unbind", address)
        kernel.write(PCI_DRIVERS_PROBE, address)
    recorded = tmp_path_factory.mktemp("recorded") / "root"
    shutil.copytree(kernel.root, recorded, symlinks=True)
    return recorded


def answer(vfiomgr: Path, recording: Path, *arguments: str) -> str:
    command = [str(vfiomgr), "--root", str(recording), *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=recording)
    return result.stdout


def test_it_lists(vfiomgr: Path, recording: Path) -> None:
    document = json.loads(answer(vfiomgr, recording, "list", "--all", "--format", "json"))
    drivers = {item["address"]: item["driver"] for item in document["items"]}
    assert drivers["0000:01:00.0"] == "nvidia"
    assert drivers[BOUND] == "vfio-pci"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is protected")
def test_it_takes_no_packages_of_the_callers_path(vfiomgr: Path, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('shadowed')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [str(vfiomgr), "--version"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("vfiomgr, version")


def test_programs_that_use_it_are_typed(vfiomgr: Path, tmp_path: Path) -> None:
    """The example of the documents, and the lines of the tutorial, by the installed wheel."""
    tutorial = doctest.script_from_examples((CHECKOUT / "docs/python.md").read_text())
    (tmp_path / "tutorial.py").write_text(tutorial)
    (tmp_path / "wrong.py").write_text(WRONG)
    example = shutil.copy(CHECKOUT / "docs/examples/passthrough.py", tmp_path)
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache"]
    checker += ["--python-executable", str(vfiomgr.with_name("python"))]
    for program in (example, "tutorial.py"):
        said = subprocess.run(
            [*checker, program], check=False, capture_output=True, text=True, cwd=tmp_path
        )
        assert said.returncode == 0, said.stdout
    said = subprocess.run(
        [*checker, "wrong.py"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    errors = [line for line in said.stdout.splitlines() if ": error: " in line]
    lines = [line.partition(": error: ")[0] for line in errors]
    assert lines == [f"wrong.py:{number}" for number in range(2, WRONG.count("\n") + 1)]


def test_it_plans_a_bind(vfiomgr: Path, recording: Path) -> None:
    plan = answer(vfiomgr, recording, "bind", "0000:01:00.0", "--dry-run")
    assert "0000:01:00.1" in plan
    assert "drivers_probe" in plan


def test_it_prints_what_guests_read(vfiomgr: Path, recording: Path) -> None:
    xml = answer(vfiomgr, recording, "libvirt", "hostdev", BOUND)
    assert len(etree.fromstring(f"<devices>{xml}</devices>")) == 2
    kata = tomllib.loads(answer(vfiomgr, recording, "kata", "config"))
    assert kata["hypervisor"]["qemu"]["pcie_root_port"] == 2
    pod = answer(vfiomgr, recording, "kata", "pod", "--format", "json")
    assert json.loads(pod)["kind"] == "Pod"
    (device,) = json.loads(answer(vfiomgr, recording, "cdi", "generate"))["devices"]
    assert device["name"] == BOUND
