"""The program of docs/python.md on a real kernel with the real libvirtd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import libvirtd as daemon
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from tests.lab.topology import Topology

PROGRAM = Path(__file__).parents[2] / "docs/examples/passthrough.py"
TREE = api.HostTree("/")


@pytest.mark.thorough
@pytest.mark.topology("workstation")
def test_the_program_binds_starts_a_domain_makes_a_vgpu_and_undoes_all(topology: Topology) -> None:
    gpu = PciAddress.parse(topology.addresses["gpu"])
    before = read_driver_state(TREE, gpu)
    kind = next(kind for parent in api.scan(TREE).vgpus.parents for kind in parent.types)
    daemon.start()
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(gpu), kind.id],
        env=os.environ | {"LIBVIRT_DEFAULT_URI": daemon.URI},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{gpu}: {before.driver} -> vfio-pci" in ran.stdout
    assert "Domain 'example' created" in ran.stdout
    assert "vGPU: " in ran.stdout
    assert "Domain 'example' destroyed" in ran.stdout
    assert read_driver_state(TREE, gpu) == before
    host = api.scan(TREE)
    assert host.vgpus.active == ()
    assert host.origins == ()
