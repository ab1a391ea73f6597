"""What releases of Kata do wrong with devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from tests.unit.kata.test_explain_releases import COLD, ON_ROOT_BUS, explained, found_by
from tests.unit.kata_breaks import is_certain
from tests.unit.kata_nodes import CONFIGURATION, KIND, KataNode
from vfiomgr.kata.explain.releases import configured_faults, device_faults
from vfiomgr.kata.facts import KataSettings
from vfiomgr.kata.model import KataRelease, RuntimeName
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

NETWORK = "{k8s.v1.cni.cncf.io/networks: sriov}"
FAULTS = {
    "kata-pcidevice",
    "kata-mapped-twice",
    "kata-block-volumes",
    "kata-guest-group",
    "kata-port-window",
    "kata-hypervisor",
    "kata-sandbox-cgroup",
}


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    found = KataNode(tmp_path / "node", "go")
    found.add_gpus()
    found.publish()
    return found


def settings(hypervisor: str, **runtime: object) -> KataSettings:
    document = {"hypervisor": {hypervisor: {}}, "runtime": runtime}
    return KataSettings(HostPath("/etc/kata-containers/configuration.toml"), (), document)


def faults(node: KataNode, run: Run, version: str, *options: str) -> dict[str, Any]:
    found = found_by(explained(run, node, version, *options))
    return {rule: found[rule] for rule in sorted(FAULTS & set(found))}


@pytest.mark.parametrize(
    ("hypervisor", "runtime", "version", "remedy"),
    [
        ("firecracker", "go", "2.0", "use a configuration of QEMU ([hypervisor.qemu])"),
        ("firecracker", "rs", "4.1", "use a configuration of QEMU ([hypervisor.qemu])"),
        ("stratovirt", "go", "3.20", "use a configuration of QEMU ([hypervisor.qemu])"),
        ("dragonball", "rs", "3.2", "[hypervisor.qemu]), or Kata 3.3.0 or later"),
        ("cloud-hypervisor", "rs", "3.2", "[hypervisor.qemu]), or Kata 3.3.0 or later"),
        ("dragonball", "rs", "3.3", None),
        ("clh", "go", "2.0", None),
        ("qemu", "go", "2.0", None),
        ("remote", "go", "3.20", None),
    ],
)
def test_a_hypervisor_without_devices_is_named_with_the_release_that_has_them(
    hypervisor: str, runtime: RuntimeName, version: str, remedy: str | None
) -> None:
    release = KataRelease(Version.parse(version), runtime)
    found = list(configured_faults(release, settings(hypervisor)))
    assert [f.rule for f in found] == ([] if remedy is None else ["kata-hypervisor"])
    assert all(f.severity == "blocker" and str(f.remedy).endswith(remedy or "") for f in found)


@pytest.mark.parametrize(
    ("version", "is_set", "is_found"),
    [
        ("1.11.1", True, True),
        ("1.11.1", False, False),
        ("1.11.2", True, False),
        ("3.2", True, False),
    ],
)
def test_a_cgroup_of_the_sandbox_may_lack_the_group_in_early_releases(
    *, version: str, is_set: bool, is_found: bool
) -> None:
    release = KataRelease(Version.parse(version), "go")
    found = list(configured_faults(release, settings("qemu", sandbox_cgroup_only=is_set)))
    assert [f.severity for f in found] == ["warning"] * is_found


@pytest.mark.parametrize(
    ("version", "machine", "is_on_root_bus", "is_found"),
    [
        ("1.12.0", "q35", True, True),
        ("2.2.3", "q35", True, True),
        ("2.3.0", "q35", True, False),
        ("1.12.0", "q35", False, False),
        ("1.12.0", "pc", True, False),
    ],
)
def test_a_device_may_be_lost_that_is_plugged_while_the_kernel_of_the_guest_boots(
    *, version: str, machine: str, is_on_root_bus: bool, is_found: bool
) -> None:
    table = {"machine_type": machine, "hotplug_vfio_on_root_bus": is_on_root_bus}
    read = replace(settings("qemu"), document={"hypervisor": {"qemu": table}})
    found = list(configured_faults(KataRelease(Version.parse(version), "go"), read))
    assert [f.rule for f in found] == ["kata-early-hotplug"] * is_found


@pytest.mark.parametrize(("version", "is_found"), [("1.10.0", True), ("1.10.3", False)])
def test_early_releases_give_containers_the_node_of_the_host(
    *, version: str, is_found: bool
) -> None:
    release = KataRelease(Version.parse(version), "go")
    found = list(configured_faults(release, settings("qemu")))
    assert [f.rule for f in found] == ["vfio-node-in-container"] * is_found


def told(hypervisor: str, *groups: int, **keys: object) -> list[str]:
    """The rules about functions of these groups with a configuration."""
    document = {"hypervisor": {hypervisor: keys}, "runtime": {}}
    path = HostPath("/etc/kata-containers/configuration.toml")
    functions = [
        replace(pci_device(f"0000:0{n}:00.0"), iommu_group=group) for n, group in enumerate(groups)
    ]
    return [f.rule for f in device_faults(KataSettings(path, (), document), functions)]


def test_functions_of_one_group_are_apart_behind_an_iommu_of_the_guest() -> None:
    assert told("qemu", 4, 4, enable_iommu=True) == ["kata-address-spaces"]
    assert told("qemu", 4, 5, enable_iommu=True) == []
    assert told("qemu", 4, enable_iommu=True) == []
    assert told("qemu", 4, 4) == []


def test_cloud_hypervisor_may_refuse_a_second_device_that_is_hot_plugged() -> None:
    hot = {"hot_plug_vfio": "root-port"}
    assert told("clh", 4, 5, **hot) == ["kata-hypervisor-devices"]
    assert told("clh", 4, **hot) == []
    assert told("clh", 4, 5, cold_plug_vfio="root-port", hot_plug_vfio="no-port") == []
    assert told("qemu", 4, 5, **hot) == []


@pytest.mark.parametrize(
    ("version", "is_hot", "is_set", "severity", "remedy"),
    [
        (
            "3.4",
            False,
            True,
            "blocker",
            "use Kata 3.32.0 or later, or Kata 3.6.0 or later",
        ),
        ("3.4", False, False, "warning", "use Kata 3.32.0 or later"),
        ("3.4", True, True, "blocker", "use Kata 3.6.0 or later"),
        ("3.6", True, True, None, ""),
        ("3.31", False, True, "blocker", "use Kata 3.32.0 or later"),
        ("3.32", False, True, None, ""),
        ("2.5", True, True, "blocker", "use Kata 3.6.0 or later"),
        ("2.3", True, True, None, ""),
    ],
)
def test_addresses_of_the_sriov_plugin_need_a_map_in_the_guest(  # noqa: PLR0913 - a case each
    run: Run,
    node: KataNode,
    *,
    version: str,
    is_hot: bool,
    is_set: bool,
    severity: str | None,
    remedy: str,
) -> None:
    node.change(CONFIGURATION, COLD, 'hot_plug_vfio = "root-port"\n' if is_hot else COLD)
    image = "image: example"
    if is_set:
        node.change(node.pod, image, f"env: [{{name: PCIDEVICE_X, value: a}}]\n    {image}")
    else:
        node.change(node.pod, "annotations: {}", f"annotations: {NETWORK}")
    found = faults(node, run, version).get("kata-pcidevice")
    assert (found and found["severity"]) == severity
    assert found is None or found["remedy"].startswith(remedy)


def test_no_variable_of_the_plugin_is_no_fault(run: Run, node: KataNode) -> None:
    assert not faults(node, run, "3.4")


INIT = f"""\
  initContainers:
  - name: first
    image: x
    resources: {{limits: {{{KIND}: 1}}}}
  containers:
"""


@pytest.mark.parametrize(
    ("version", "mode", "is_found"),
    [
        ("3.14", "guest-kernel", True),
        ("3.15", "guest-kernel", False),
        ("3.5", "guest-kernel", False),
        ("3.5", "vfio", True),
        ("2.3", "vfio", False),
    ],
)
def test_a_device_of_an_init_container_is_mapped_twice(
    run: Run, node: KataNode, version: str, mode: str, *, is_found: bool
) -> None:
    node.change(CONFIGURATION, '"guest-kernel"', f'"{mode}"')
    node.change(node.pod, "  containers:\n", INIT)
    found = faults(node, run, version)
    assert ("kata-mapped-twice" in found) == is_found
    node.change(node.pod, "    image: x\n", "    image: x\n    restartPolicy: Always\n")
    assert "kata-mapped-twice" not in faults(node, run, version)


@pytest.mark.parametrize(
    ("version", "mode", "runtime", "is_found"),
    [
        ("3.14", "vfio", "go", True),
        ("3.16", "vfio", "go", True),
        ("3.17", "vfio", "go", False),
        ("3.13", "vfio", "go", False),
        ("3.16", "guest-kernel", "go", False),
        ("3.16", "vfio", "rust", False),
    ],
)
def test_block_volumes_are_dropped_with_cold_plug(  # noqa: PLR0913 - a case each
    run: Run, node: KataNode, version: str, mode: str, runtime: str, *, is_found: bool
) -> None:
    node.change(CONFIGURATION, '"guest-kernel"', f'"{mode}"')
    volume = "volumeDevices: [{name: data, devicePath: /dev/xda}]"
    node.change(node.pod, "    image: example", f"    {volume}\n    image: example")
    found = faults(node, run, version, "--kata-runtime", runtime).get("kata-block-volumes")
    assert (found is not None) == is_found
    assert found is None or (is_certain(found) and "3.17.0" in found["remedy"])


SECOND = f"""\
  containers:
  - name: second
    image: x
    resources: {{limits: {{{KIND}: 1}}}}
"""


@pytest.mark.parametrize(
    ("ports", "version", "remedy"),
    [
        ("", "2.3", "set hotplug_vfio_on_root_bus = true and pcie_root_port = 2"),
        (ON_ROOT_BUS, "2.3", None),
        ('hot_plug_vfio = "bridge-port"\n', "3.4", "set the port to root-port and pcie_root_port"),
        (COLD, "3.4", None),
    ],
)
def test_devices_behind_one_bridge_share_a_group_of_the_guest(
    run: Run, node: KataNode, ports: str, version: str, remedy: str | None
) -> None:
    node.change(CONFIGURATION, '"guest-kernel"', '"vfio"')
    node.change(CONFIGURATION, COLD, ports)
    assert "kata-guest-group" not in faults(node, run, version)
    node.change(node.pod, "  containers:\n", SECOND)
    found = faults(node, run, version).get("kata-guest-group")
    assert (found is None) == (remedy is None)
    assert found is None or found["remedy"].startswith(remedy)


@pytest.mark.parametrize(
    ("gib", "version", "is_found"),
    [(32, "2.3", True), (32, "2.5", False), (32, "2.2", False), (0, "2.3", False)],
)
def test_a_root_port_without_a_window_has_no_room_for_large_bars(
    run: Run, node: KataNode, gib: int, version: str, *, is_found: bool
) -> None:
    start, length = 1 << 40, gib << 30 or 16 << 20
    lines = ["0x0 0x0 0x0", f"{start:#x} {start + length - 1:#x} 0x14220c"]
    node.write("sys/bus/pci/devices/0000:41:00.0/resource", "\n".join(lines) + "\n")
    node.change(CONFIGURATION, COLD, f"{ON_ROOT_BUS}pcie_root_port = 1\n")
    assert ("kata-port-window" in faults(node, run, version)) == is_found
