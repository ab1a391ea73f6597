from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.defined_vgpus import vendor_host
from tests.unit.devices import host_of, pci_device
from vfiomgr.adapters.cdi.render import render_spec
from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from vfiomgr.model.snapshot import HostSnapshot

GPU = replace(pci_device(), driver="vfio-pci")
AUDIO = replace(GPU, address=replace(GPU.address, function=1), class_code="040300")


def test_cdi_names_a_group_by_its_gpu_and_leaves_out_what_no_guest_can_take() -> None:
    spoilt = replace(GPU, address=replace(GPU.address, bus=5), iommu_group=5)
    foreign = replace(spoilt, address=replace(spoilt.address, function=1), driver="nvidia")
    audio_first = replace(AUDIO, address=replace(AUDIO.address, function=0))
    gpu_second = replace(GPU, address=replace(GPU.address, function=1))
    host = host_of(audio_first, gpu_second, spoilt, foreign)
    assert json.loads(render_spec(host, "nvidia.com/pgpu")) == {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/pgpu",
        "devices": [
            {
                "name": "0000:04:00.1",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/vfio/vfio"}, {"path": "/dev/vfio/4"}]
                },
            }
        ],
    }


def vgpu_host(*groups: int) -> HostSnapshot:
    """Two virtual functions of NVIDIA's own interface in these groups; the first is a vGPU."""
    host = vendor_host()
    gpu, *functions = (replace(d, driver="nvidia", iommu_group=1) for d in host.devices)
    vfs = [
        replace(d, iommu_group=group, vfio_device=f"vfio{group}")
        for d, group in zip(functions, groups, strict=True)
    ]
    grown = host_of(gpu, *vfs)
    return replace(host, devices=grown.devices, groups=grown.groups)


def test_cdi_has_vgpus_of_the_vendors_own_interface_and_no_function_without_a_type() -> None:
    (device,) = json.loads(render_spec(vgpu_host(5, 6), "nvidia.com/vgpu"))["devices"]
    assert device == {
        "name": "0000:41:00.4",
        "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/vfio"}, {"path": "/dev/vfio/5"}]},
    }
    none_is = replace(vgpu_host(5, 6), vgpus=())
    assert json.loads(render_spec(none_is, "nvidia.com/vgpu"))["devices"] == []


def test_one_function_without_a_type_spoils_a_group() -> None:
    """Kata opens all functions of a group."""
    assert json.loads(render_spec(vgpu_host(5, 5), "nvidia.com/vgpu"))["devices"] == []


def test_a_class_with_a_dot_needs_cdi_0_6() -> None:
    assert json.loads(render_spec(host_of(), "nvidia.com/gpu.vfio"))["cdiVersion"] == "0.6.0"


@pytest.mark.parametrize("kind", ["gpu", "nvidia.com/", "/gpu", "a b/c", "nvidia.com/gpu-"])
def test_cdi_kinds_have_a_grammar(kind: str) -> None:
    with pytest.raises(UsageError, match="is no CDI kind"):
        render_spec(host_of(), kind)
