"""What `vfiomgr show` says about the rest of a slot, of a group, and about weak isolation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.passthrough.readiness_hints import BOUND_BY_CLAIM, bind_remedy, tell_how_to_bind
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.source import HostSource
from vfiomgr.users.model import DeviceUser
from vfiomgr.users.node_agent import DeviceStatus, NodeStatus

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(pci_device(), driver="vfio-pci", iommu_group=4)
AUDIO = replace(GPU, address=PciAddress.parse("0000:04:00.1"), class_code="040300", iommu_group=5)
GUEST = DeviceUser("/dev/vfio/4", 4711, "qemu-system-x86")
BOTH = (GUEST, DeviceUser("/dev/vfio/5", 4711, "qemu-system-x86"))


def shown(run: Run, tmp_path: Path, host: HostSnapshot) -> str:
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(host))
    return str(run("--snapshot", str(file), "show", "0000:04:00.0").stdout)


@pytest.mark.parametrize(
    ("users", "changes", "is_left_out"),
    [
        ((GUEST,), {}, True),
        (BOTH, {}, False),
        ((), {}, False),
        ((GUEST,), {"driver": "snd_hda_intel"}, False),
    ],
)
def test_a_function_of_the_card_that_its_guest_does_not_have(
    run: Run, tmp_path: Path, users: Any, changes: dict[str, Any], *, is_left_out: bool
) -> None:
    host = with_facts(host_of(GPU, replace(AUDIO, **changes)), users=users)
    text = shown(run, tmp_path, host)
    assert ("0000:04:00.1" in text and "is not in the guest" in text) is is_left_out


def test_members_of_the_group_that_are_not_on_vfio_are_to_be_bound(
    run: Run, tmp_path: Path
) -> None:
    audio = replace(AUDIO, iommu_group=4, driver="snd_hda_intel")
    text = shown(run, tmp_path, host_of(GPU, audio))
    assert "not yet: vfiomgr bind 0000:04:00.1\n" in text
    native = host_of(replace(GPU, driver="nvidia"), audio)
    assert "not yet: vfiomgr bind 0000:04:00.0\n" in shown(run, tmp_path, native)


@pytest.mark.parametrize(
    ("machine", "is_weak"), [("raspberrypi,5-model-b", True), ("nvidia,p3768", False)]
)
def test_the_iommu_of_a_soc_that_ignores_who_asks(
    run: Run, tmp_path: Path, machine: str, *, is_weak: bool
) -> None:
    text = shown(run, tmp_path, with_facts(host_of(GPU), compatible=(machine,)))
    assert ("only for trusted guests" in text) is is_weak


@pytest.mark.parametrize(
    ("changes", "drivers", "is_for_gim"),
    [
        ({}, ("gim", "vfio-pci"), True),
        ({}, ("vfio-pci",), False),
        ({"vendor_id": "10de"}, ("gim", "vfio-pci"), False),
    ],
)
def test_a_gpu_without_driver_where_gim_is_loaded_is_not_to_be_bound(
    run: Run, tmp_path: Path, changes: dict[str, Any], drivers: Any, *, is_for_gim: bool
) -> None:
    gpu = replace(GPU, driver=None, **{"vendor_id": "1002", **changes})
    text = shown(run, tmp_path, with_facts(host_of(gpu), pci_drivers=drivers))
    assert ("vfiomgr explain gim-no-sriov" in text) is is_for_gim
    assert ("not yet: vfiomgr bind" in text) is not is_for_gim


def test_a_device_that_claims_bind_is_not_to_be_bound_by_hand(run: Run, tmp_path: Path) -> None:
    native = replace(GPU, driver="nvidia")
    device = DeviceStatus(str(GPU.address), (str(GPU.address),), (), True, "")  # noqa: FBT003
    agent = NodeStatus(1, "/p", has_kubelet=True, on_demand=(device,))
    host = with_facts(host_of(native), agent=agent)
    text = shown(run, tmp_path, host)
    assert "bound when a ResourceClaim gets it" in text
    assert "vfiomgr bind" not in text
    assert "on demand" in run("--snapshot", str(tmp_path / "host.json"), "list").stdout
    remedy = bind_remedy(f"vfiomgr bind {GPU.address}", [native])
    assert not remedy.is_useful(host)
    assert [str(each) for each in remedy.instead(host)] == [f"{GPU.address} is {BOUND_BY_CLAIM}"]
    assert bind_remedy("", [native]).is_useful(host_of(native))
    notes: list[str] = []
    source = HostSource()
    vars(source)["on_note"] = notes.append
    tell_how_to_bind(source, host, [native])
    assert notes == [f"{native} is on nvidia; it is {BOUND_BY_CLAIM}"]
