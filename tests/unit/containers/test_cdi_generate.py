from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.defined_vgpus import vendor_host
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.containers.cdi.devices import specification_of
from vfiomgr.containers.cdi.document import render_specification
from vfiomgr.containers.cdi.model import OfferRequest
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.host.owners import NodeOwner
from vfiomgr.persistence.model import PersistedBinding, render_rule, rule_file
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.model import Naming, NodeForm
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(pci_device(), driver="vfio-pci", vfio_device="vfio0", vfio_cdev=True)
AUDIO = replace(
    GPU, address=moved(GPU.address, function=1), class_code="040300", vfio_device="vfio1"
)
ON_HOST: dict[str, Any] = {"driver": "nvidia", "vfio_device": None}
PGPU = OfferRequest("nvidia.com/pgpu")


def at(device: PciDevice, bus: int, number: int | None = None) -> PciDevice:
    """The same on another bus, in a group and with a cdev of its own number."""
    number = bus if number is None else number
    address = moved(device.address, bus=bus)
    return replace(device, address=address, iommu_group=number, vfio_device=f"vfio{number}")


def with_nodes(host: HostSnapshot) -> HostSnapshot:
    """Whose groups all have nodes."""
    return with_facts(host, groups=tuple(replace(group, has_node=True) for group in host.groups))


def names(host: HostSnapshot, wanted: OfferRequest) -> list[str]:
    return [device.name for device in specification_of(host, wanted).devices]


def nodes(host: HostSnapshot, wanted: OfferRequest) -> list[list[str]]:
    """Of each device, and of the whole kind last."""
    made = specification_of(host, wanted)
    edits = [*(device.edits for device in made.devices), made.edits]
    return [[node.path for node in edit.device_nodes] for edit in edits]


def test_a_group_is_one_device_by_its_gpu_and_what_no_guest_can_take_is_left_out() -> None:
    spoilt = at(GPU, 5)
    foreign = replace(spoilt, address=moved(spoilt.address, function=1), **ON_HOST)
    audio_first = replace(AUDIO, address=moved(AUDIO.address, function=0))
    gpu_second = replace(GPU, address=moved(GPU.address, function=1))
    host = with_nodes(host_of(audio_first, gpu_second, spoilt, foreign))
    assert json.loads(render_specification(specification_of(host, PGPU))) == {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/pgpu",
        "devices": [
            {
                "name": "0000:04:00.1",
                "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/4", "fileMode": 0o600}]},
            }
        ],
        "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/vfio", "fileMode": 0o600}]},
    }


def test_a_node_has_the_owner_that_the_layout_says() -> None:
    owner = NodeOwner("qemu:kvm", 64055, 108)
    binding = PersistedBinding(GPU.identity, "vfio-pci", "vfio_pci", owner)
    rule = TextFile(rule_file(GPU.address), render_rule(binding))
    host = with_facts(with_nodes(host_of(GPU, at(GPU, 5))), files=(rule,))
    made = specification_of(host, PGPU)
    nodes = [node for device in made.devices for node in device.edits.device_nodes]
    accesses = [(node.file_mode, node.uid, node.gid) for node in (*nodes, *made.edits.device_nodes)]
    assert accesses == [(0o660, 64055, 108), (0o600, None, None), (0o666, None, None)]


def test_the_control_node_is_of_the_kind_since_runtime_rs_plugs_each_node_of_a_device() -> None:
    host = with_nodes(host_of(GPU, AUDIO))
    assert nodes(host, PGPU) == [["/dev/vfio/4"], ["/dev/vfio/vfio"]]


def test_cdevs_come_all_of_a_group_and_iommu_for_who_opens_them_inside_alone() -> None:
    both = replace(GPU, address=moved(GPU.address, function=1))
    host = with_nodes(host_of(replace(AUDIO, address=GPU.address), both))
    wanted = replace(PGPU, node="cdev")
    assert nodes(host, wanted) == [["/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"], []]
    assert nodes(host, replace(wanted, is_plain=True))[-1] == ["/dev/iommu"]


@pytest.mark.parametrize(
    ("is_plain", "common"),
    [(True, ["/dev/vfio/vfio", "/dev/iommu"]), (False, ["/dev/vfio/vfio"])],
)
def test_a_group_beside_cdevs_has_the_control_nodes_of_both(
    common: list[str], *, is_plain: bool
) -> None:
    host = host_of(GPU, at(GPU, 5))
    host = with_facts(host, groups=tuple(replace(g, has_node=g.number == 5) for g in host.groups))
    assert nodes(host, replace(PGPU, node="auto", is_plain=is_plain)) == [
        ["/dev/vfio/devices/vfio0"],
        ["/dev/vfio/5"],
        common,
    ]


@pytest.mark.parametrize(
    ("node", "has_group", "has_cdev", "path"),
    [
        ("auto", True, True, "/dev/vfio/4"),
        ("auto", False, True, "/dev/vfio/devices/vfio0"),
        ("auto", True, False, "/dev/vfio/4"),
        ("group", True, True, "/dev/vfio/4"),
        ("cdev", True, True, "/dev/vfio/devices/vfio0"),
    ],
)
def test_a_device_has_one_form_and_never_both(
    node: NodeForm, *, has_group: bool, has_cdev: bool, path: str
) -> None:
    host = host_of(replace(GPU, vfio_cdev=has_cdev))
    host = with_nodes(host) if has_group else host
    assert nodes(host, replace(PGPU, node=node))[0] == [path]


def test_a_cdev_that_the_kernel_does_not_make_is_refused() -> None:
    host = with_nodes(host_of(replace(GPU, vfio_cdev=False)))
    with pytest.raises(Refusal, match="has no node below /dev/vfio/devices") as caught:
        specification_of(host, replace(PGPU, node="cdev"))
    assert "--node group" in caught.value.hint


@pytest.mark.parametrize(
    ("name_by", "expected"),
    [
        ("address", ["0000:04:00.0", "0000:05:00.0"]),
        ("group", ["4", "9"]),
        ("cdev", ["vfio0", "vfio9"]),
        ("index", ["0", "1"]),
    ],
)
def test_names_are_what_the_kubelet_plugin_says(name_by: Naming, expected: list[str]) -> None:
    host = with_nodes(host_of(GPU, AUDIO, at(GPU, 5, 9)))
    assert names(host, replace(PGPU, name_by=name_by)) == expected


def test_named_devices_come_alone_with_their_groups() -> None:
    host = with_nodes(host_of(GPU, AUDIO, at(GPU, 5)))
    assert names(host, replace(PGPU, addresses=(AUDIO.address,))) == ["0000:04:00.0"]


@pytest.mark.parametrize(
    ("devices", "reason", "remedy"),
    [
        ((replace(GPU, **ON_HOST),), "is on nvidia", "vfiomgr bind 0000:04:00.0"),
        ((GPU, replace(AUDIO, **ON_HOST)), "also contains", "-group"),
    ],
)
def test_what_is_not_ready_is_refused_with_what_makes_it_so(
    devices: tuple[PciDevice, ...], reason: str, remedy: str
) -> None:
    host = with_nodes(host_of(*devices))
    with pytest.raises(Refusal, match=reason) as caught:
        specification_of(host, replace(PGPU, addresses=(GPU.address,)))
    assert remedy in caught.value.hint


def vgpu_host(*groups: int) -> HostSnapshot:
    """Two virtual functions of NVIDIA's own interface in these groups; the first is a vGPU."""
    host = vendor_host()
    gpu, *functions = (replace(d, driver="nvidia", iommu_group=1) for d in host.devices)
    vfs = [
        replace(d, iommu_group=group, vfio_device=f"vfio{group}")
        for d, group in zip(functions, groups, strict=True)
    ]
    grown = host_of(gpu, *vfs)
    return with_facts(host, devices=grown.devices, groups=grown.groups)


def test_vgpus_of_the_vendors_own_interface_are_devices_and_functions_without_a_type_not() -> None:
    wanted = OfferRequest("nvidia.com/vgpu")
    assert names(vgpu_host(5, 6), wanted) == ["0000:41:00.4"]
    assert nodes(vgpu_host(5, 6), wanted) == [["/dev/vfio/5"], ["/dev/vfio/vfio"]]
    assert names(with_facts(vgpu_host(5, 6), vgpus=()), wanted) == []


def test_one_function_without_a_type_spoils_a_group() -> None:
    """Kata opens all functions of a group."""
    assert names(vgpu_host(5, 5), OfferRequest("nvidia.com/vgpu")) == []


def test_mediated_devices_are_for_containers_that_run_a_guest_themselves() -> None:
    """Kata attaches none."""
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    mediated = Vgpu(uuid, "mdev", "0000:06:00.0", "nvidia-558", None, "nvidia", 30, "vfio7", None)
    host = with_nodes(with_facts(host_of(GPU), vgpus=(mediated,)))
    assert names(host, PGPU) == ["0000:04:00.0"]
    plain = replace(PGPU, is_plain=True)
    assert names(host, plain) == ["0000:04:00.0", uuid]
    assert nodes(host, plain)[1] == ["/dev/vfio/30"]


def test_a_class_with_a_dot_needs_cdi_0_6() -> None:
    made = specification_of(with_nodes(host_of(GPU)), OfferRequest("nvidia.com/gpu.vfio"))
    assert made.version == "0.6.0"


@pytest.mark.parametrize(
    "kind", ["gpu", "nvidia.com/", "/gpu", "a b/c", "nvidia.com/gpu-", "n/gpu", "nvidia.com/g"]
)
def test_kinds_have_a_grammar(kind: str) -> None:
    with pytest.raises(UsageError, match="invalid CDI kind:"):
        specification_of(host_of(), OfferRequest(kind))
