"""Which devices of a host become resources, and why others do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.fakes.vgpu_hosts import xe_host
from tests.unit.devices import with_facts
from tests.unit.node.made import (
    A40,
    A40_NAME,
    AUDIO,
    SETTINGS,
    UUID,
    at,
    node_of,
    notes,
    offered,
    rules,
    units_by_name,
    vgpu_node,
)
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.errors import UsageError
from vfiomgr.node.health import HealthContext
from vfiomgr.node.model import NodeSettings, ResourceRule
from vfiomgr.node.plan import inventory
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS_PROBE
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

A40_TYPE = "vfiomgr.io/NVIDIA_A40-4Q"


def test_a_unit_is_an_entire_group_by_its_gpu() -> None:
    gpu = replace(A40, address=moved(A40.address, function=2))
    (resource,) = inventory(node_of(AUDIO, gpu), SETTINGS).resources
    (unit,) = resource.units
    assert (resource.name, unit.id, unit.kind) == (A40_NAME, "0000:41:00.2", "function")
    assert [str(address) for address in unit.addresses] == ["0000:41:00.2", "0000:41:00.1"]
    assert unit.pci_ids == ("10de:2235", "10de:1aef")
    assert (unit.group, unit.nodes, unit.numa_nodes) == (41, ("/dev/vfio/41",), (0,))
    assert unit.pcie_path == ("pci0000:40", "0000:40:01.0")
    assert (unit.parent, unit.driver, unit.reasons) == (None, "vfio-pci", ())


def test_a_path_begins_at_the_root_complex() -> None:
    gpu = replace(A40, bridge_path=f"platform/4010000000.pcie/{A40.bridge_path}")
    (resource,) = inventory(node_of(AUDIO, gpu), SETTINGS).resources
    assert resource.units[0].pcie_path == ("pci0000:40", "0000:40:01.0")


def test_devices_of_one_model_are_one_resource() -> None:
    other = replace(at(A40, 9), name="NVIDIA Corporation AD102GL [L40S]", device_id="26b9")
    assert offered(node_of(A40, at(A40, 7), other)) == {
        "vfiomgr.io/AD102GL_L40S": ["0000:09:00.0"],
        A40_NAME: ["0000:07:00.0", "0000:41:00.0"],
    }


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        (replace(AUDIO, driver="snd_hda_intel", vfio_device=None), "group-not-viable"),
        (replace(AUDIO, driver=None, vfio_device=None), "group-not-viable"),
    ],
)
def test_a_group_with_a_function_that_no_guest_can_have_is_not_offered(
    other: PciDevice, rule: str
) -> None:
    host = node_of(A40, other)
    assert offered(host) == {}
    assert notes(host) == [(rule, "0000:41:00.0")]


def test_a_bridge_of_a_group_stays_behind() -> None:
    port = replace(AUDIO, class_code="060400", header_type=1, driver="pcieport", vfio_device=None)
    assert offered(node_of(A40, port)) == {A40_NAME: ["0000:41:00.0"]}
    assert offered(node_of(A40, replace(port, driver=None))) == {A40_NAME: ["0000:41:00.0"]}


def test_a_host_with_cdevs_only_has_their_nodes() -> None:
    host = node_of(replace(A40, vfio_cdev=True), replace(AUDIO, vfio_cdev=True))
    host = with_facts(host, groups=tuple(replace(g, has_node=False) for g in host.groups))
    (unit,) = inventory(host, SETTINGS).units
    assert unit.nodes == ("/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1")
    assert unit.is_healthy


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"driver": "nvidia"}, "on-host-driver"),
        ({"driver": None}, "on-host-driver"),
        ({"driver": "nvidia", "is_boot_display": True}, "boot-display"),
        (
            {"driver": "nvidia", "virtual_functions": (PciAddress(0, 0x41, 0, 4),)},
            "has-virtual-functions",
        ),
    ],
)
def test_a_gpu_of_the_host_is_noted(changes: dict[str, object], rule: str) -> None:
    host = node_of(replace(A40, vfio_device=None, **changes))
    assert offered(host) == {}
    assert notes(host) == [(rule, "0000:41:00.0")]


def test_a_console_display_that_was_bound_is_offered_like_others() -> None:
    host = node_of(replace(A40, is_boot_display=True, display_signs=("boot_vga is 1",)))
    assert offered(host) == {A40_NAME: ["0000:41:00.0"]}
    (unit,) = inventory(host, SETTINGS).units
    assert unit.is_healthy
    assert notes(host) == []


def test_other_devices_of_the_host_are_not_noted() -> None:
    assert notes(node_of(replace(AUDIO, driver="snd_hda_intel", vfio_device=None))) == []


def test_no_iommu_mode_is_not_offered() -> None:
    host = node_of(A40)
    host = with_facts(host, groups=tuple(replace(g, name="vfio-noiommu") for g in host.groups))
    assert offered(host) == {}
    assert notes(host) == [("no-iommu-mode", "0000:41:00.0")]


def test_a_mediated_device_is_a_unit_of_its_type() -> None:
    (resource,) = inventory(vgpu_node(uuid=UUID), SETTINGS).resources
    (unit,) = resource.units
    assert (resource.name, unit.id, unit.kind, unit.type) == (
        A40_TYPE,
        UUID,
        "mdev",
        "NVIDIA A40-4Q",
    )
    assert (unit.group, unit.nodes) == (60, ("/dev/vfio/60",))
    assert [str(address) for address in unit.addresses] == ["0000:41:00.4"]
    assert str(unit.parent) == "0000:41:00.0"
    assert unit.is_healthy


def test_carriers_of_mediated_devices_are_noted() -> None:
    assert notes(vgpu_node(uuid=UUID)) == [
        ("has-virtual-functions", "0000:41:00.0"),
        ("carries-vgpus", "0000:41:00.4"),
        ("vgpu-function", "0000:41:00.5"),
    ]


@pytest.mark.parametrize("name", ["NVIDIA A40-4Q", None])
def test_a_virtual_function_with_a_type_is_a_unit_of_it(name: str | None) -> None:
    host = vgpu_node(type_name=name)
    (resource,) = inventory(host, SETTINGS).resources
    (unit,) = resource.units
    assert (resource.name, unit.id, unit.kind) == (A40_TYPE, "0000:41:00.4", "vendor")
    assert (str(unit.parent), unit.nodes, unit.driver) == (
        "0000:41:00.0",
        ("/dev/vfio/50",),
        "nvidia",
    )
    assert unit.is_healthy
    assert notes(host)[-1] == ("vgpu-function", "0000:41:00.5")


def test_a_virtual_function_of_nvidia_on_vfio_has_no_memory() -> None:
    host = vgpu_node()
    function = replace(host.devices[2], driver="vfio-pci")
    plain = node_of(host.devices[0], function)
    assert offered(plain) == {}
    assert ("vgpu-function", "0000:41:00.5") in notes(plain)


def test_virtual_functions_with_quotas_are_of_their_size(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=3)
    for number in (1, 2):
        directory = PCI_DEVICES / f"0000:21:00.{number}"
        driver = kernel.driver_of(f"0000:21:00.{number}")
        if driver is not None:
            kernel.write(directory / "driver/unbind", f"0000:21:00.{number}")
        kernel.write(directory / "driver_override", "vfio-pci")
        kernel.write(PCI_DRIVERS_PROBE, f"0000:21:00.{number}")
    host = scan(kernel, kernel)
    made = inventory(host, SETTINGS)
    assert units_by_name(made) == {
        "vfiomgr.io/PCI_8086_E211_VF_8G": ["0000:21:00.1", "0000:21:00.2"]
    }
    assert {(unit.kind, str(unit.parent)) for unit in made.units} == {("quota", "0000:21:00.0")}


def test_a_group_with_two_gpus_is_one_unit() -> None:
    second = replace(at(A40, 0x42), iommu_group=41)
    host = node_of(A40, second)
    assert offered(host) == {A40_NAME: ["0000:41:00.0"]}
    assert notes(host) == [("several-gpus", "0000:41:00.0")]


def test_kata_with_mediated_devices_is_noted() -> None:
    settings = NodeSettings(consumer="kata")
    assert ("mediated", A40_TYPE) in notes(vgpu_node(uuid=UUID), settings)
    assert ("mediated", A40_TYPE) not in notes(vgpu_node(), settings)


TWICE = {"0000:41:00.0": ["twice-published"]}


def with_file(host: HostSnapshot, path: str, kind: str, node: str) -> HostSnapshot:
    """The host with a CDI file that has this node, and one that is not readable."""
    edits = {"deviceNodes": [{"path": node}]}
    devices = [{"name": "41", "containerEdits": edits}]
    text = json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": devices})
    files = (CdiFile(path, text), CdiFile("/etc/cdi/x.json", None, "cannot open it"))
    return with_facts(host, cdi_files=files)


@pytest.mark.parametrize(
    ("path", "kind", "node", "expected"),
    [
        ("/var/run/cdi/nvidia.com-pgpu.yaml", "nvidia.com/pgpu", "vfio/41", TWICE),
        ("/var/run/cdi/nvidia.com-pgpu.yaml", "nvidia.com/pgpu", "vfio/devices/vfio0", TWICE),
        ("/var/run/cdi/nvidia.com-pgpu.yaml", "nvidia.com/pgpu", "vfio/9", {}),
        ("/run/cdi/vfiomgr-nvidia.com_pgpu.json", "nvidia.com/pgpu", "vfio/41", TWICE),
        ("/run/cdi/vfiomgr-vfiomgr.io_GA102GL__A40.json", A40_NAME, "vfio/41", {}),
        ("/run/cdi/other.json", A40_NAME, "vfio/41", TWICE),
        ("/run/cdi/vfiomgr-vfiomgr.io_a40.json", "vfiomgr.io/a40", "vfio/41", {}),
        ("/run/cdi/vfiomgr-vfiomgr.io_claim-7.json", "vfiomgr.io/claim", "vfio/41", {}),
        ("/run/cdi/other-claim.json", "vfiomgr.io/claim", "vfio/41", TWICE),
    ],
)
def test_a_device_of_another_program_is_not_healthy(
    path: str, kind: str, node: str, expected: dict[str, list[str]]
) -> None:
    host = with_file(node_of(A40, at(A40, 7)), path, kind, f"/dev/{node}")
    made = inventory(host, SETTINGS, written=("vfiomgr.io/a40",))
    assert (rules(made), made.notes) == (expected, ())


def test_a_pod_keeps_a_device_that_another_program_also_has() -> None:
    host = with_file(node_of(A40), "/run/cdi/x.json", "nvidia.com/pgpu", "/dev/vfio/41")
    made = inventory(host, SETTINGS, HealthContext(held={"0000:41:00.0": "lab/train"}))
    assert rules(made) == {}
    assert [(note.rule, note.severity) for note in made.notes] == [("twice-published", "warning")]


def test_a_specification_for_no_device_plugin_is_only_noted() -> None:
    path = "/etc/cdi/vfiomgr-vfiomgr.io_vfio.json"
    host = with_file(node_of(A40), path, "vfiomgr.io/vfio", "/dev/vfio/41")
    assert rules(inventory(host, SETTINGS)) == {}
    assert notes(host) == [("twice-published", "0000:41:00.0")]


def test_the_pod_that_has_a_unit_is_named() -> None:
    (unit,) = inventory(
        node_of(A40), SETTINGS, HealthContext(held={"0000:41:00.0": "lab/train"})
    ).units
    assert (unit.pod, unit.used_by, unit.is_open) == ("lab/train", "lab/train", False)


def test_settings_are_those_of_each_resource() -> None:
    settings = NodeSettings(prefix="example.com", consumer="kubevirt", resets=True)
    (resource,) = inventory(node_of(A40), settings).resources
    assert (resource.name, resource.consumer, resource.resets) == (
        "example.com/GA102GL_A40",
        "kubevirt",
        True,
    )


def test_rules_of_a_layout_name_what_is_offered() -> None:
    rule = ResourceRule(frozenset({"0000:41:00.0"}), "training", "kata", resets=True)
    settings = NodeSettings(rules=(rule,))
    host = node_of(A40, at(A40, 7))
    (resource,) = inventory(host, settings).resources
    assert (resource.name, resource.consumer, resource.resets) == (
        "vfiomgr.io/training",
        "kata",
        True,
    )
    assert offered(host, settings) == {"vfiomgr.io/training": ["0000:41:00.0"]}
    assert notes(host, settings) == [("not-in-layout", "0000:07:00.0")]


def test_a_rule_for_a_gpu_is_for_its_vgpus() -> None:
    settings = NodeSettings(rules=(ResourceRule(frozenset({"0000:41:00.0"})),))
    assert offered(vgpu_node(uuid=UUID), settings) == {A40_TYPE: [UUID]}


def test_an_invalid_name_of_a_rule_is_refused() -> None:
    settings = NodeSettings(rules=(ResourceRule(frozenset({"0000:41:00.0"}), "7 of 9"),))
    with pytest.raises(UsageError, match="invalid resource name: '7 of 9'"):
        inventory(node_of(A40), settings)


def test_a_device_that_was_removed_stays_as_unhealthy() -> None:
    before = inventory(node_of(A40, AUDIO, at(A40, 7)), SETTINGS)
    after = inventory(node_of(at(A40, 7)), SETTINGS, previous=before)
    assert units_by_name(after) == units_by_name(before)
    assert rules(after) == {"0000:41:00.0": ["device-removed"]}
    again = inventory(node_of(A40, AUDIO, at(A40, 7)), SETTINGS, previous=after)
    assert again == before


def test_a_device_that_left_its_driver_stays_as_unhealthy() -> None:
    before = inventory(node_of(A40), SETTINGS)
    host = node_of(replace(A40, driver="nvidia", vfio_device=None))
    after = inventory(host, SETTINGS, previous=before)
    assert rules(after) == {"0000:41:00.0": ["wrong-driver"]}


def test_a_group_that_is_no_longer_viable_stays_as_unhealthy() -> None:
    before = inventory(node_of(A40), SETTINGS)
    for driver in ("snd_hda_intel", None):
        host = node_of(A40, replace(AUDIO, driver=driver, vfio_device=None))
        after = inventory(host, SETTINGS, previous=before)
        assert rules(after) == {"0000:41:00.0": ["group-not-viable"]}


def test_the_rest_of_a_lost_unit_is_not_offered_again() -> None:
    before = inventory(node_of(A40, AUDIO), SETTINGS)
    after = inventory(node_of(AUDIO), SETTINGS, previous=before)
    assert units_by_name(after) == {A40_NAME: ["0000:41:00.0"]}
    assert offered(node_of(AUDIO)) == {
        "vfiomgr.io/GA102_HIGH_DEFINITION_AUDIO_CONTROLLER": ["0000:41:00.1"]
    }


def test_a_unit_that_has_another_name_now_is_not_offered_twice() -> None:
    before = inventory(node_of(AUDIO), SETTINGS)
    after = inventory(node_of(A40, AUDIO), SETTINGS, previous=before)
    assert rules(after) == {"0000:41:00.1": ["not-ready"]}
    assert [unit.id for unit in after.units] == ["0000:41:00.1"]


def test_a_vgpu_with_another_type_changes_its_resource() -> None:
    before = inventory(vgpu_node(), SETTINGS)
    host = vgpu_node()
    (vgpu,) = host.vgpus.active
    host = with_facts(host, vgpus=(replace(vgpu, type="562", type_name="NVIDIA A40-8Q"),))
    after = inventory(host, SETTINGS, previous=before)
    assert units_by_name(after) == {"vfiomgr.io/NVIDIA_A40-8Q": ["0000:41:00.4"]}


def test_devices_that_a_new_layout_leaves_out_are_dropped() -> None:
    before = inventory(node_of(A40), SETTINGS)
    assert inventory(node_of(A40), NodeSettings(rules=()), previous=before).resources == ()


@pytest.mark.parametrize(
    "settings",
    [
        NodeSettings(aliases={"10de:2235": "gpu"}),
        NodeSettings(rules=()),
        NodeSettings(rules=(ResourceRule(frozenset({"0000:41:00.0"}), "gpu"),)),
    ],
)
def test_a_device_of_a_pod_keeps_its_resource_until_the_pod_ends(settings: NodeSettings) -> None:
    host, held = node_of(A40), {"0000:41:00.0": "lab/train"}
    before = inventory(host, SETTINGS, HealthContext(held=held))
    after = inventory(host, settings, HealthContext(held=held), previous=before)
    assert units_by_name(after) == {A40_NAME: ["0000:41:00.0"]}
    assert after.notes == ()
    ended = inventory(host, settings, previous=after)
    assert units_by_name(ended) == offered(host, settings)
    assert A40_NAME not in units_by_name(ended)


def test_a_second_model_of_the_same_name_does_not_rename_the_device_of_a_pod() -> None:
    held = {"0000:41:00.0": "lab/train"}
    before = inventory(node_of(A40), SETTINGS, HealthContext(held=held))
    twin = replace(at(A40, 7), device_id="2236")
    after = inventory(node_of(A40, twin), SETTINGS, HealthContext(held=held), previous=before)
    assert units_by_name(after) == {
        A40_NAME: ["0000:41:00.0"],
        f"{A40_NAME}_2236": ["0000:07:00.0"],
    }
