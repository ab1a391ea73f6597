from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from lxml import etree

from tests.unit.defined_vgpus import vendor_host
from tests.unit.devices import host_of, pci_device
from vfiomgr.adapters.cdi.render import render_spec
from vfiomgr.adapters.kata.render import render_drop_in
from vfiomgr.adapters.libvirt.render import mdev_hostdev, pci_hostdevs
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.model.vgpu import Vgpu

if TYPE_CHECKING:
    from vfiomgr.model.snapshot import HostSnapshot

GPU = replace(pci_device(), driver="vfio-pci")
AUDIO = replace(GPU, address=replace(GPU.address, function=1), class_code="040300")
VGPU = Vgpu(
    "f715f63c-0d00-4007-9c5a-b07b0c6c05de", "mdev", "mtty", "mtty-2", "Dual", None, 9, None, None
)


def parsed(element: str) -> etree._Element:
    return etree.fromstring(element)


def test_a_slot_is_one_multifunction_guest_device() -> None:
    first, second = map(parsed, pci_hostdevs([(AUDIO, GPU)], first_bus=0x10, managed=False))
    assert first.get("managed") == "no"
    assert dict(first.find("source/address").attrib) == {  # type: ignore[union-attr]
        "domain": "0x0000",
        "bus": "0x04",
        "slot": "0x00",
        "function": "0x0",
    }
    assert dict(first.find("address").attrib) == {  # type: ignore[union-attr]
        "type": "pci",
        "domain": "0x0000",
        "bus": "0x10",
        "slot": "0x00",
        "function": "0x0",
        "multifunction": "on",
    }
    guest = second.find("address")
    assert guest is not None
    assert (guest.get("function"), guest.get("multifunction")) == ("0x1", None)


def test_functions_of_a_slot_close_ranks_in_the_guest() -> None:
    usb = replace(GPU, address=replace(GPU.address, function=2))
    elements = [parsed(e) for e in pci_hostdevs([(GPU, usb)], first_bus=1, managed=True)]
    assert [e.find("address").get("function") for e in elements] == ["0x0", "0x1"]  # type: ignore[union-attr]
    assert elements[0].get("managed") == "yes"


def test_each_slot_gets_a_bus_of_its_own_and_a_lone_function_none() -> None:
    lone = replace(GPU, address=replace(GPU.address, bus=9))
    twin = [replace(d, address=replace(d.address, bus=5)) for d in (GPU, AUDIO)]
    slots = [(GPU, AUDIO), (lone,), twin]
    elements = [parsed(e) for e in pci_hostdevs(slots, first_bus=0xFE, managed=False)]
    guests = [e.find("address") for e in elements]
    assert [g.get("bus") if g is not None else None for g in guests] == [
        *["0xfe"] * 2,
        None,
        *["0xff"] * 2,
    ]
    with pytest.raises(UsageError, match="no guest bus is left"):
        list(pci_hostdevs([*slots, twin], first_bus=0xFE, managed=False))


def test_names_are_escaped() -> None:
    evil = replace(GPU, name="--> <script> & 'Co'")
    (element,) = pci_hostdevs([(evil,)], first_bus=1, managed=False)
    assert parsed(element).find("script") is None


def test_an_mdev_has_the_model_of_its_api() -> None:
    element = parsed(mdev_hostdev(VGPU, "vfio-pci"))
    assert (element.get("type"), element.get("model")) == ("mdev", "vfio-pci")
    assert element.find("source/address").get("uuid") == VGPU.uuid  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="no hostdev model"):
        mdev_hostdev(VGPU, "vfio-platform")


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
