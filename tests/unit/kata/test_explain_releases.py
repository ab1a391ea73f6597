"""`check pod` with releases of Kata that lack keys of later ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import annotate, breaks, is_certain
from tests.unit.kata_nodes import CONFIGURATION, KIND, KataNode
from vfiomgr.kata.check import check_keys
from vfiomgr.kata.model import KataRelease, RuntimeName
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

COLD = 'cold_plug_vfio = "root-port"\npcie_root_port = 16\n'
ON_ROOT_BUS = "hotplug_vfio_on_root_bus = true\n"
SOCKET = 'pod_resource_api_sock = "/var/lib/kubelet/pod-resources/kubelet.sock"\n'
LATER_KEYS = ("cold_plug_vfio = ", "hot_plug_vfio = ", "pod_resource_api_sock = ", "kata config")


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    found = KataNode(tmp_path / "node", "go")
    found.add_gpus()
    found.publish()
    return found


def explained(run: Run, node: KataNode, version: str, *options: str) -> Any:
    line = ("--root", str(node.root), "check", "pod", str(node.pod), "--kata-version", version)
    (item,) = json.loads(run(*line, *options, "--format", "json").stdout)["items"]
    return item


def found_by(item: Any) -> dict[str, Any]:
    return {found["id"]: found for found in breaks(item)}


def release(version: str, runtime: RuntimeName) -> KataRelease:
    return KataRelease(Version.parse(version), runtime)


@pytest.mark.parametrize(
    ("version", "runtime", "has_keys"),
    [
        ("1.10", "go", False),
        ("2.5.2", "go", False),
        ("3.1.3", "go", False),
        ("3.2.0", "go", True),
        ("4.1.0", "go", True),
        ("3.1.0", "rs", False),
        ("3.30.0", "rs", False),
        ("3.31.0", "rs", True),
    ],
)
def test_a_release_before_the_table_lacks_the_keys_that_its_first_introduced(
    version: str, runtime: RuntimeName, *, has_keys: bool
) -> None:
    assert release(version, runtime).has_plug_keys == has_keys
    assert release(version, "go").knows("hypervisor", "machine_type")


@pytest.mark.parametrize(
    ("version", "machine"), [("1.10", "q35"), ("1.10", "pc"), ("2.5", "q35"), ("3.1", "q35")]
)
@pytest.mark.parametrize("ports", ["", ON_ROOT_BUS, f"{ON_ROOT_BUS}pcie_root_port = 2\n"])
@pytest.mark.parametrize("annotation", ["", "hypervisor.cold_plug_vfio", "hypervisor.nosuch"])
def test_no_remedy_names_a_key_of_a_later_release_or_a_command_that_refuses_this_one(  # noqa: PLR0913, PLR0917 - a case each
    run: Run, node: KataNode, version: str, machine: str, ports: str, annotation: str
) -> None:
    node.change(CONFIGURATION, COLD, ports)
    node.change(CONFIGURATION, SOCKET, "")
    node.change(CONFIGURATION, '"q35"', f'"{machine}"')
    if annotation:
        annotate(node, f"io.katacontainers.config.{annotation}", "root-port")
    for remedy in (found["remedy"] for found in breaks(explained(run, node, version))):
        assert not any(key in remedy for key in LATER_KEYS), remedy


@pytest.mark.parametrize(
    ("ports", "version", "remedy"),
    [
        (ON_ROOT_BUS, "2.5", "set pcie_root_port = 2 in "),
        (f"{ON_ROOT_BUS}pcie_root_port = 1\n", "2.5", "set pcie_root_port = 2 in "),
        (f"{ON_ROOT_BUS}pcie_root_port = 2\n", "2.5", None),
        (f"{ON_ROOT_BUS}pcie_root_port = 2\n", "1.10", "use Kata 1.11.0 or later, with pcie_root"),
        ("pcie_root_port = 0\n", "2.5", None),
    ],
)
def test_before_cold_plug_each_device_on_the_root_bus_needs_a_port(
    run: Run, node: KataNode, ports: str, version: str, remedy: str | None
) -> None:
    node.add_gpu(2, driver="vfio-pci")
    node.publish([40, 41])
    node.change(node.pod, "pgpu: 1", "pgpu: 2")
    node.change(CONFIGURATION, COLD, ports)
    found = found_by(explained(run, node, version)).get("kata-too-few-ports")
    assert (found is None) == (remedy is None)
    if found is not None and remedy is not None:
        assert is_certain(found)
        assert found["remedy"].startswith(remedy)


def test_of_a_resource_with_unknown_devices_a_missing_port_is_only_possible(
    run: Run, node: KataNode
) -> None:
    node.change(node.pod, KIND, "example.com/nic")
    node.change(CONFIGURATION, COLD, ON_ROOT_BUS)
    found = found_by(explained(run, node, "2.5"))["kata-too-few-ports"]
    assert not is_certain(found)
    node.change(CONFIGURATION, ON_ROOT_BUS, f"{ON_ROOT_BUS}pcie_root_port = 1\n")
    assert "kata-too-few-ports" not in found_by(explained(run, node, "2.5"))


@pytest.mark.parametrize(
    ("gib", "machine", "version", "remedy"),
    [
        (16, "pc", "1.10", 'use Kata 1.11.0 or later, with machine_type = "q35", hotplug_vfio_on'),
        (16, "pc", "2.0", 'set machine_type = "q35", hotplug_vfio_on_root_bus = true, pcie_root'),
        (16, "q35", "2.0", None),
        (2, "pc", "2.0", None),
    ],
)
def test_the_machine_pc_has_no_room_for_large_bars(  # noqa: PLR0913, PLR0917 - a case each
    run: Run, node: KataNode, gib: int, machine: str, version: str, remedy: str | None
) -> None:
    start = 1 << 40
    lines = ["0x0 0x0 0x0", f"{start:#x} {start + (gib << 30) - 1:#x} 0x14220c"]
    node.write("sys/bus/pci/devices/0000:41:00.0/resource", "\n".join(lines) + "\n")
    node.change(CONFIGURATION, COLD, "")
    node.change(CONFIGURATION, '"q35"', f'"{machine}"')
    found = found_by(explained(run, node, version)).get("kata-machine-type")
    assert (found is None) == (remedy is None)
    if found is not None and remedy is not None:
        assert found["remedy"].startswith(remedy)


def test_before_cold_plug_there_is_no_index_and_a_port_only_by_its_key(
    run: Run, node: KataNode
) -> None:
    node.change(CONFIGURATION, COLD, "")
    (chain,) = explained(run, node, "2.5")["devices"]
    assert [(f["port"], f["guest_index"]) for f in chain["functions"]] == [(None, None)]
    node.change(CONFIGURATION, "[runtime]\n", f"{ON_ROOT_BUS}pcie_root_port = 1\n[runtime]\n")
    (chain,) = explained(run, node, "2.5")["devices"]
    assert [(f["port"], f["guest_index"]) for f in chain["functions"]] == [("rp0", None)]


@pytest.mark.parametrize(("version", "runtime"), [("2.5", "go"), ("3.24", "rust")])
def test_a_release_without_plug_keys_is_not_told_to_set_one(
    run: Run, node: KataNode, version: str, runtime: str
) -> None:
    node.change(CONFIGURATION, COLD, "")
    item = explained(run, node, version, "--kata-runtime", runtime)
    assert not {"kata-not-plugged", "kata-not-plugged-silently"} & set(found_by(item))
    node.change(CONFIGURATION, "[runtime]\n", 'cold_plug_vfio = "root-port"\n[runtime]\n')
    found = found_by(explained(run, node, version, "--kata-runtime", runtime))
    assert found["kata-no-cold-plug"]["remedy"].startswith("remove it, or use Kata 3.")


def test_a_release_with_the_key_is_told_to_set_it(run: Run, node: KataNode) -> None:
    node.change(CONFIGURATION, COLD, "")
    found = found_by(explained(run, node, "3.2"))["kata-not-plugged"]
    assert "set cold_plug_vfio = root-port and pcie_root_port to the number" in found["remedy"]
    assert "network" not in found["title"]
    annotate(node, "k8s.v1.cni.cncf.io/networks", "sriov")
    found = found_by(explained(run, node, "3.2"))["kata-not-plugged"]
    assert "function of the pod's network may be left on vfio-pci" in found["title"]


def test_cdi_names_of_a_pod_are_read_by_nobody_before_cold_plug(run: Run, node: KataNode) -> None:
    node.change(CONFIGURATION, COLD, "")
    annotate(node, "cdi.k8s.io/gpu", f"{KIND}=40")
    found = found_by(explained(run, node, "2.5"))["kata-annotations-unread"]
    assert not is_certain(found), "the pod also requests the resource"
    node.change(node.pod, f"{KIND}: 1, ", "")
    found = found_by(explained(run, node, "2.5"))["kata-annotations-unread"]
    assert is_certain(found)
    assert found["remedy"].endswith("or use Kata 3.2.0 or later")


@pytest.mark.parametrize(("version", "has_key"), [("3.14", False), ("3.24", True)])
def test_the_kubelets_socket_is_advised_where_the_release_asks_the_kubelet(
    run: Run, node: KataNode, version: str, *, has_key: bool
) -> None:
    node.change(CONFIGURATION, SOCKET, "")
    found = found_by(explained(run, node, version))["kata-devices-unnamed"]
    assert found["remedy"].startswith("set pod_resource_api_sock") == has_key
    assert is_certain(found) == has_key
    assert has_key or "use Kata 3.24.0 or later" in found["remedy"]


def test_keys_that_only_releases_before_the_table_have_are_not_called_unknown() -> None:
    document = {"hypervisor": {"qemu": {"hotplug_vfio_on_root_bus": True}}}
    assert check_keys(document, release("2.5", "go"), is_drop_in=True) == ()
    assert check_keys(document, release("3.2", "go"), is_drop_in=True)


@pytest.mark.parametrize(("version", "is_ignored"), [("1.2.13", True), ("1.3.0", False)])
def test_containerd_before_1_3_gives_privileged_pods_all_groups(
    run: Run, node: KataNode, version: str, *, is_ignored: bool
) -> None:
    node.change(node.pod, "privileged: false", "privileged: true")
    package = f"Package: containerd.io\nStatus: install ok installed\nVersion: {version}-1\n"
    node.write("var/lib/dpkg/status", package)
    recorded = node.pod.parent / "recorded"
    recorded.symlink_to(node.root)
    line = ("--root", str(recorded), "check", "pod", str(node.pod), "--format", "json")
    (item,) = json.loads(run(*line).stdout)["items"]
    found = found_by(item).get("kata-privileged")
    assert (found is not None) == is_ignored
    assert found is None or found["remedy"].startswith("upgrade containerd to 1.3.0 or later")


@pytest.mark.parametrize(
    ("version", "port", "is_found"),
    [("3.2.0", "root-port", True), ("3.2.0", "no-port", False), ("3.3.0", "root-port", False)],
)
def test_kata_3_2_forgets_the_port_of_network_interfaces(
    run: Run, node: KataNode, version: str, port: str, *, is_found: bool
) -> None:
    annotate(node, "k8s.v1.cni.cncf.io/networks", "sriov-net")
    node.change(CONFIGURATION, 'cold_plug_vfio = "root-port"', f'cold_plug_vfio = "{port}"')
    found = found_by(explained(run, node, version))
    assert ("kata-endpoint-port" in found) == is_found
    node.change(node.pod, "k8s.v1.cni.cncf.io/networks", "example.com/networks")
    assert "kata-endpoint-port" not in found_by(explained(run, node, version))
