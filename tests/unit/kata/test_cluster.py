"""Objects of a cluster besides pods: guests of KubeVirt, and claims."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata.test_explain_releases import explained, found_by
from tests.unit.kata_nodes import KUBELET, KataNode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

SELECTOR = "10DE:2684"


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    found = KataNode(tmp_path / "node", "go")
    found.add_gpus()
    return found


def kubevirt(permitted: list[dict[str, object]] | None, gates: tuple[str, ...]) -> dict[str, Any]:
    configuration: dict[str, object] = {"developerConfiguration": {"featureGates": list(gates)}}
    if permitted is not None:
        configuration["permittedHostDevices"] = {"pciHostDevices": permitted}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt"},
        "spec": {"configuration": configuration},
    }


def guest(name: str, kind: str = "hostDevices") -> dict[str, Any]:
    devices = {kind: [{"name": "gpu", "deviceName": name}]}
    return {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm"},
        "spec": {"domain": {"devices": devices}},
    }


def permitted(name: str, **more: object) -> dict[str, object]:
    return {"pciVendorSelector": SELECTOR, "resourceName": name, **more}


def rules(run: Run, node: KataNode, *objects: dict[str, Any]) -> set[str]:
    node.pod.write_text(json.dumps({"kind": "List", "items": objects}))
    return set(found_by(explained(run, node, "4.1")))


GATES = ("GPU", "HostDevices")


@pytest.mark.parametrize(
    ("entries", "gates", "kind", "expected"),
    [
        ([permitted("a.io/b")], GATES, "hostDevices", set()),
        ([permitted("a.io/c")], GATES, "hostDevices", {"kubevirt-permitted"}),
        ([], GATES, "gpus", {"kubevirt-permitted"}),
        ([permitted("a.io/b")], ("GPU",), "hostDevices", {"kubevirt-gate"}),
        ([permitted("a.io/b")], ("GPU",), "gpus", set()),
    ],
)
def test_kubevirt_must_permit_the_devices_of_a_guest(  # noqa: PLR0913, PLR0917 - a case each
    run: Run,
    node: KataNode,
    entries: list[dict[str, object]],
    gates: tuple[str, ...],
    kind: str,
    expected: set[str],
) -> None:
    assert rules(run, node, kubevirt(entries, gates), guest("a.io/b", kind)) == expected


def test_an_object_of_kubevirt_alone_is_judged_too(run: Run, node: KataNode) -> None:
    assert rules(run, node, kubevirt(None, ("GPU",))) == {"kubevirt-gate", "kubevirt-permitted"}
    assert rules(run, node, kubevirt([permitted("a.io/b")], GATES)) == set()


def test_an_old_configmap_comes_first(run: Run, node: KataNode) -> None:
    old = {"kind": "ConfigMap", "metadata": {"name": "kubevirt-config"}}
    found = rules(run, node, kubevirt([permitted("a.io/b")], ()), old)
    assert found == {"kubevirt-configmap"}
    other = {"kind": "ConfigMap", "metadata": {"name": "other"}}
    assert rules(run, node, kubevirt([permitted("a.io/b")], GATES), other) == set()


@pytest.mark.parametrize(
    ("driver", "name", "expected"),
    [
        ("nvidia", "nvidia.com/gpu", {"pod-host-resource"}),
        ("vfio-pci", "nvidia.com/gpu", set()),
        ("nvidia", "nvidia.com/AD102_ANY", set()),
    ],
)
def test_a_guest_gets_no_device_of_a_host_driver(
    run: Run, tmp_path: Path, driver: str, name: str, expected: set[str]
) -> None:
    node = KataNode(tmp_path / "other", "go")
    node.add_gpu(1, driver=driver)
    entry = permitted(name, externalResourceProvider=True)
    found = rules(run, node, kubevirt([entry], GATES), guest(name))
    assert found - {"resource-name"} == expected


def test_kubevirt_only_offers_what_is_bound(run: Run, node: KataNode) -> None:
    node.kernel.add_pci(
        "0000:50:00.0",
        vendor="10de",
        device="2237",
        class_code="030200",
        group=60,
        driver="nvidia",
    )
    entry = permitted("a.io/b")
    entry["pciVendorSelector"] = "10de:2237"
    assert rules(run, node, kubevirt([entry], GATES)) == {"kubevirt-not-bound"}
    entry["externalResourceProvider"] = True
    assert rules(run, node, kubevirt([entry], GATES)) == set()


@pytest.mark.parametrize(
    ("name", "is_external", "is_found"),
    [
        ("nvidia.com/TU104GL_T4", True, True),
        ("nvidia.com/TU104GL_T4", False, False),
        ("nvidia.com/AD102_GEFORCE_RTX_4090", True, False),
        ("nvidia.com/AD102_GeForce_RTX_4090", True, False),
        ("nvidia.com/2684", True, False),
        ("nvidia.com/pgpu", True, False),
        ("nvidia.com/GRID_T4-1Q", True, False),
        ("example.com/TU104GL_T4", True, False),
    ],
)
def test_a_name_of_nvidias_plugin_is_that_of_the_model(
    run: Run, node: KataNode, name: str, *, is_external: bool, is_found: bool
) -> None:
    name_of_udev = "E:ID_VENDOR_FROM_DATABASE=NVIDIA Corporation\nE:ID_MODEL_FROM_DATABASE="
    node.write("run/udev/data/+pci:0000:41:00.0", f"{name_of_udev}AD102 [GeForce RTX 4090]\n")
    entry = permitted(name, externalResourceProvider=is_external)
    found = rules(run, node, kubevirt([entry], GATES), guest(name))
    assert found == ({"resource-name"} if is_found else set())


def test_the_audio_function_of_a_gpu_has_a_name_of_its_own(run: Run, node: KataNode) -> None:
    name_of_udev = "E:ID_VENDOR_FROM_DATABASE=NVIDIA Corporation\nE:ID_MODEL_FROM_DATABASE="
    node.write("run/udev/data/+pci:0000:41:00.0", f"{name_of_udev}AD102 [GeForce RTX 4090]\n")
    name = "nvidia.com/AD102_HDMI_AUDIO_CONTROLLER"
    audio = permitted(name, externalResourceProvider=True)
    audio["pciVendorSelector"] = "10de:22ba"
    assert rules(run, node, kubevirt([audio], GATES), guest(name)) == set()


def pci_device(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "devices.harvesterhci.io/v1beta1",
        "kind": "PCIDevice",
        "metadata": {"name": "node1-000041000"},
        "status": {"address": "0000:41:00.0", "resourceName": name},
    }


def test_harvester_permits_what_its_claims_enable(run: Run, node: KataNode) -> None:
    name = "nvidia.com/AD102_ANY"
    objects = (kubevirt([permitted("a.io/b")], GATES), guest(name), pci_device(name))
    assert rules(run, node, *objects) == {"kubevirt-permitted"}
    remedy = found_by(explained(run, node, "4.1"))["kubevirt-permitted"]
    assert "PCIDeviceClaim" in str(remedy)


@pytest.mark.parametrize(
    ("name", "is_found"), [("node1.lan-000041000", True), ("gpu-0_a", False), ("gpu 0", True)]
)
def test_the_name_of_a_device_is_an_alias(
    run: Run, node: KataNode, name: str, *, is_found: bool
) -> None:
    vm = guest("a.io/b")
    vm["spec"]["domain"]["devices"]["hostDevices"][0]["name"] = name
    found = rules(run, node, kubevirt([permitted("a.io/b")], GATES), vm)
    assert found == ({"kubevirt-device-name"} if is_found else set())


def claim(device_class: str, version: str = "v1", config: object = None) -> dict[str, Any]:
    iommu = {"opaque": {"parameters": {"kind": "VfioDeviceConfig", "iommu": config}}}
    devices = {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": device_class}}],
        "config": [iommu],
    }
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": "gpu"},
        "spec": {"devices": devices},
    }


def test_a_claim_for_kubevirt_asks_for_the_nodes_of_vfio(run: Run, node: KataNode) -> None:
    asked = {"enableAPIDevice": True, "backendPolicy": "LegacyOnly"}
    assert rules(run, node, claim("vfio.gpu.nvidia.com")) == {"claim-config"}
    assert rules(run, node, claim("vfio.gpu.nvidia.com", config=asked)) == set()
    assert rules(run, node, claim("gpu.nvidia.com")) == set()


@pytest.mark.parametrize(
    ("version", "kubelet", "remedy"),
    [
        ("v1", "1.33.2", "v1beta2"),
        ("v1", "1.34.3", None),
        ("v1alpha2", "1.31.0", "v1alpha3"),
        ("v1beta1", "1.32.0", None),
        ("v1", "", None),
    ],
)
def test_a_claim_has_a_version_that_the_release_serves(
    run: Run, node: KataNode, version: str, kubelet: str, remedy: str | None
) -> None:
    put_kubelet(node, kubelet)
    node.pod.write_text(json.dumps(claim("gpu.nvidia.com", version)))
    found = found_by(explained(run, node, "4.1"))
    assert set(found) == (set() if remedy is None else {"claim-version"})
    assert all(f"resource.k8s.io/{remedy}" in each["remedy"] for each in found.values())


@pytest.mark.parametrize(
    ("version", "is_found"),
    [("1.34.0", True), ("1.34.1", True), ("1.34.2", False), ("1.33.9", False)],
)
def test_some_kubelets_lose_drivers(
    run: Run, node: KataNode, version: str, *, is_found: bool
) -> None:
    put_kubelet(node, version)
    pod = {"resourceClaims": [{"name": "gpu"}], "containers": [{"name": "c"}]}
    node.pod.write_text(json.dumps({"kind": "Pod", "metadata": {"name": "p"}, "spec": pod}))
    assert ("claim-kubelet" in found_by(explained(run, node, "4.1"))) == is_found


def put_kubelet(node: KataNode, version: str) -> None:
    node.write(KUBELET, "kind: KubeletConfiguration\n")
    status = f"Package: kubelet\nStatus: install ok installed\nVersion: {version}-1.1\n"
    node.write("var/lib/dpkg/status", status if version else "")


def test_an_unknown_model_says_nothing_about_names(run: Run, node: KataNode) -> None:
    name = "nvidia.com/TU104GL_T4"
    entry = permitted(name, externalResourceProvider=True)
    assert rules(run, node, kubevirt([entry], GATES), guest(name)) == set()


def test_kubevirt_1_9_0_asks_for_character_devices(run: Run, node: KataNode) -> None:
    def found(version: str) -> bool:
        one = permitted("nvidia.com/GPU")
        status = {"status": {"observedKubeVirtVersion": version}}
        objects = ({**kubevirt([one], GATES), **status}, guest("nvidia.com/GPU"))
        return "kubevirt-cdev" in rules(run, node, *objects)

    assert not found("v1.9.0"), "the kernel has them"
    node.write("proc/devices", "Character devices:\n  1 mem\n510 vfio\n\nBlock devices:\n")
    assert found("v1.9.0")
    assert not found("v1.9.1")
    assert not found("v1.8.2")


@pytest.mark.parametrize(
    ("image", "kubelet", "is_found"),
    [
        ("registry.example/nvidia/k8s-dra-driver:v0.1.0", "1.29.0", True),
        ("registry.example/nvidia/k8s-dra-driver:v0.1.0", "1.27.3", False),
        ("nvcr.io/nvidia/k8s-dra-driver-gpu:v25.3.0", "1.32.0", False),
    ],
)
def test_the_first_driver_of_claims_is_older_than_generated_names(
    run: Run, node: KataNode, image: str, kubelet: str, *, is_found: bool
) -> None:
    put_kubelet(node, kubelet)
    spec = {"containers": [{"name": "controller", "image": image}]}
    metadata = {"name": "driver"}
    driver = {"kind": "Deployment", "metadata": metadata, "spec": {"template": {"spec": spec}}}
    template = {**claim("gpu.nvidia.com", "v1alpha2"), "kind": "ResourceClaimTemplate"}
    node.pod.write_text(json.dumps({"kind": "List", "items": [driver, template]}))
    line = ("--root", str(node.root), "check", "pod", str(node.pod), "--format", "json")
    assert ("dra-driver-release" in run(*line).stdout) == is_found


def harvester(kind: str, node: str, address: str = "0000:41:00.0", **more: str) -> dict[str, Any]:
    """An object of Harvester for a device of a node."""
    name = f"{node}-{address[5:].replace(':', '').replace('.', '').rjust(9, '0')}"
    fields = {"address": address, "nodeName": node, **more}
    return {
        "apiVersion": "devices.harvesterhci.io/v1beta1",
        "kind": kind,
        "metadata": {"name": name},
        "status" if kind == "PCIDevice" else "spec": fields,
    }


@pytest.mark.parametrize(
    ("address", "group", "rule"),
    [
        ("0000:41:00.0", "61", "harvester-group"),
        ("0000:3f:00.0", "61", "harvester-moved"),
        ("0000:41:00.0", None, None),
    ],
)
def test_objects_of_harvester_are_compared_with_the_host(
    run: Run, node: KataNode, address: str, group: str | None, rule: str | None
) -> None:
    """harvester#6892: the group of before an upgrade; #6518: a card that moved."""
    name = "nvidia.com/AD102_ANY"
    more = {"resourceName": name} | ({"iommuGroup": group} if group else {})
    device = harvester("PCIDevice", "node1", address, **more)
    claim = harvester("PCIDeviceClaim", "node1", address)
    vm = guest(name)
    vm["spec"]["domain"]["devices"]["hostDevices"][0]["name"] = device["metadata"]["name"]
    base = kubevirt([permitted(name, externalResourceProvider=True)], GATES)
    assert rules(run, node, base, device, claim, vm) == ({rule} if rule else set())
    found = found_by(explained(run, node, "4.1"))
    if rule == "harvester-moved":
        assert "its IDs are at 0000:41:00.0" in str(found[rule])


def test_a_guest_with_the_device_of_one_node_is_tied_to_it(run: Run, node: KataNode) -> None:
    """harvester#6648: both nodes offer the resource."""
    name = "nvidia.com/AD102_ANY"
    devices = [harvester("PCIDevice", n, resourceName=name) for n in ("node1", "node2")]
    vm = guest(name)
    vm["spec"]["domain"]["devices"]["hostDevices"][0]["name"] = devices[0]["metadata"]["name"]
    base = kubevirt([permitted(name, externalResourceProvider=True)], GATES)
    assert rules(run, node, base, *devices, vm) == {"harvester-node"}
    vm["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node1"}
    assert rules(run, node, base, *devices, vm) == set()


@pytest.mark.parametrize(
    ("count", "is_external", "is_found"), [(2, True, True), (1, True, False), (2, False, False)]
)
def test_an_audio_function_may_take_the_place_of_a_gpu(
    run: Run, tmp_path: Path, count: int, *, is_external: bool, is_found: bool
) -> None:
    """kubevirt-gpu-device-plugin#67: the plugin lists all functions of a group."""
    node = KataNode(tmp_path / "node", "go")
    node.add_gpus(2, with_audio=True)
    name = "nvidia.com/AD102_GEFORCE_RTX_4090"
    vm = guest(name, "gpus")
    vm["spec"]["domain"]["devices"]["gpus"] *= count
    base = kubevirt([permitted(name, externalResourceProvider=is_external)], GATES)
    assert ("plugin-companions" in rules(run, node, base, vm)) == is_found
