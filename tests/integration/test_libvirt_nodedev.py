"""Mediated devices as the real libvirt tells of them, and what is looked at before it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.vgpu_hosts import a40_host, t4_host
from vfiomgr.definitions.start import mdev_type, refuse_without_room
from vfiomgr.errors import LibvirtFailed, Refusal, UnknownDevice
from vfiomgr.libvirt.client.connection import MdevState, connect, parent_name, read_mdev
from vfiomgr.libvirt.xml.render import node_mdev
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
PARENT = PciAddress.parse("0000:65:00.0")
GPU = PciAddress.parse("0000:21:00.0")
STATE = MdevState(is_active=True, is_defined=False, starts_by_itself=False)
NODE = f"""\
<node>
  <device>
    <name>pci_0000_65_00_0</name><parent>computer</parent>
    <capability type='pci'>
      <domain>0</domain><bus>101</bus><slot>0</slot><function>0</function>
      <product id='0x20b0'/><vendor id='0x10de'/>
    </capability>
  </device>
  <device>
    <name>mdev_f715f63c_0d00_4007_9c5a_b07b0c6c05de_0000_65_00_0</name>
    <parent>pci_0000_65_00_0</parent>
    <capability type='mdev'>
      <type id='nvidia-468'/><uuid>{UUID.upper()}</uuid><iommuGroup number='60'/>
    </capability>
  </device>
  <device>
    <name>computer</name>
    <capability type='system'>
      <hardware><uuid>{UUID}</uuid></hardware><firmware/>
    </capability>
  </device>
</node>
"""


def test_libvirts_mdevs_are_known_by_their_uuids(tmp_path: Path) -> None:
    file = tmp_path / "node.xml"
    file.write_text(NODE)
    with connect(f"test://{file}") as connection:
        (mdev,) = connection.mdevs()
        assert (mdev.uuid, mdev.parent, mdev.type) == (UUID, str(PARENT), "nvidia-468")
        assert mdev.state.is_active
        assert mdev.state.starts_by_itself is None
        with pytest.raises(LibvirtFailed, match="libvirt does not support the operation:"):
            connection.define_mdev(node_mdev(UUID, "pci_0000_65_00_0", "x"), UUID, autostart=True)


def test_a_definition_is_read_as_it_is_written() -> None:
    text = node_mdev(UUID, parent_name(PARENT), "nvidia-468")
    mdev = read_mdev(text, STATE)
    assert mdev is not None
    assert (mdev.uuid, mdev.parent, mdev.type) == (UUID, str(PARENT), "nvidia-468")
    assert read_mdev(text.replace("uuid", "name"), STATE) is None


def test_another_parent_keeps_libvirts_name() -> None:
    mdev = read_mdev(node_mdev(UUID, "css_0_0_0052", "vfio_ccw-io"), STATE)
    assert mdev is not None
    assert mdev.parent == "css_0_0_0052"


def test_a_type_is_found_by_its_name_on_its_parent(tmp_path: Path) -> None:
    host = api.scan(t4_host(tmp_path))
    assert mdev_type(host, GPU, "T4-2Q") == mdev_type(host, GPU, "GRID T4-2Q")
    with pytest.raises(UnknownDevice, match="has no vGPU type"):
        mdev_type(host, GPU, "nvidia-invented")


def test_a_function_that_makes_none_is_refused(tmp_path: Path) -> None:
    host = api.scan(t4_host(tmp_path))
    other = next(device for device in host.devices if device.is_bridge)
    with pytest.raises(Refusal, match="does not support vGPUs"):
        mdev_type(host, other.address, "T4-2Q")


def test_no_more_are_made_than_there_is_room_for(tmp_path: Path) -> None:
    host = api.scan(t4_host(tmp_path))
    refuse_without_room(host, str(GPU), mdev_type(host, GPU, "T4-2Q"))
    with pytest.raises(Refusal, match="has no capacity for another vGPU of type nvidia-9"):
        refuse_without_room(host, str(GPU), "nvidia-9")
    with pytest.raises(UnknownDevice, match="no such vGPU parent:"):
        refuse_without_room(host, "0000:77:00.0", "nvidia-9")


def test_a_gpu_whose_functions_make_them_is_no_parent(tmp_path: Path) -> None:
    host = api.scan(a40_host(tmp_path))
    with pytest.raises(Refusal, match="does not support vGPUs"):
        mdev_type(host, GPU, "A40-4Q")
