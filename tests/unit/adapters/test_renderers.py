from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from tests.unit.devices import pci_device
from vfiomgr.adapters.kata.render import render_drop_in
from vfiomgr.errors import Refusal

GPU = replace(pci_device(), driver="vfio-pci")
AUDIO = replace(GPU, address=replace(GPU.address, function=1), class_code="040300")


def test_kata_gets_a_root_port_for_each_function() -> None:
    document = tomllib.loads(render_drop_in([GPU, AUDIO]))
    assert document["hypervisor"]["qemu"]["pcie_root_port"] == 2
    assert document["hypervisor"]["qemu"]["cold_plug_vfio"] == "root-port"
    assert tomllib.loads(render_drop_in([]))["hypervisor"]["qemu"]["pcie_root_port"] == 1


def test_kata_has_sixteen_root_ports() -> None:
    functions = [replace(GPU, address=replace(GPU.address, bus=bus)) for bus in range(17)]
    assert tomllib.loads(render_drop_in(functions[:16]))
    with pytest.raises(Refusal, match="17 functions"):
        render_drop_in(functions)
