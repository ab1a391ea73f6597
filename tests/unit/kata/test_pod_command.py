"""`vfiomgr kata pod`, and its RuntimeClass."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tests.unit.kata_nodes import CONFIGURATION, CONTAINERD, KataNode
from vfiomgr.users.node_agent import DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Answer, Matches, Run

GPU, SHARED = "0000:02:00.0", "0000:04:00.0"


def objects(answer: Answer) -> list[Any]:
    assert answer.status == 0, answer.stderr
    return list(YAML(typ="safe", pure=True).load_all(answer.stdout))


def test_a_runtime_class_has_an_overhead_that_holds_the_guests_memory(run: Run) -> None:
    (made,) = objects(run("kata", "pod", "--runtimeclass", "--handler", "kata-gpu"))
    assert (made["metadata"]["name"], made["handler"]) == ("kata-gpu", "kata-gpu")
    assert made["overhead"]["podFixed"] == {"memory": "10240Mi", "cpu": "1"}
    assert made["scheduling"]["nodeSelector"] == {"katacontainers.io/kata-runtime": "true"}
    typed = run(
        "kata", "pod", "--runtimeclass", "--default-memory", "4G", "--node-selector", "a=on"
    )
    assert typed.stderr == ""
    (made,) = objects(typed)
    assert made["overhead"]["podFixed"]["memory"] == "6144Mi"
    assert made["scheduling"]["nodeSelector"] == {"a": "on"}
    assert "# default_memory is 4096" in typed.stdout


def test_default_memory_is_read_from_the_configuration_of_the_handler(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    node = KataNode(tmp_path / "node", "go", kernel)
    node.change(CONFIGURATION, "8192", "4096")
    answer = run("kata", "pod", "--runtimeclass")
    (made,) = objects(answer)
    assert made["overhead"]["podFixed"]["memory"] == "6144Mi"
    assert answer.stderr == (
        f"default_memory is 4096 MiB in /{CONFIGURATION}\n"
        "pods run only on nodes with the label katacontainers.io/kata-runtime=true (kata-deploy "
        "sets it): kubectl label node NODE katacontainers.io/kata-runtime=true\n"
    )
    assert "kubectl" not in run("kata", "pod", "--runtimeclass", "--any-node").stderr
    other = tmp_path / "other.toml"
    other.write_text("[hypervisor.qemu]\ndefault_memory = 1024\n")
    (made,) = objects(run("kata", "pod", "--runtimeclass", "--config", str(other)))
    assert made["overhead"]["podFixed"]["memory"] == "3072Mi"
    node.change(CONFIGURATION, "default_memory = 4096\n", "")
    assert "(not set in the configuration)" in run("kata", "pod", "--runtimeclass").stderr
    node.change(CONFIGURATION, "machine_type =", "machine_type")
    assert ": not valid TOML:" in run("kata", "pod", "--runtimeclass").stderr


def test_what_is_installed_written_and_printed_is_explained_as_whole(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    node = KataNode(tmp_path / "node", "rs", kernel)
    node.write(CONTAINERD, "version = 3\n")
    node.pod.write_text(run("kata", "pod", "--naming", "pgpu").stdout)
    before = run("check", "pod", str(node.pod))
    assert before.status == 1
    assert "remedy: vfiomgr runtime install kata-vfio --kata, then restart" in before.stdout
    assert (
        "remedy: vfiomgr cdi generate --kind nvidia.com/pgpu --name-by group --write, when the "
        "devices are available"
    ) in before.stdout
    for command in (
        f"bind {GPU}",
        "runtime install --kata --runtime containerd --containerd-version 2.2",
        "cdi generate --kind nvidia.com/pgpu --name-by group --write",
    ):
        answer = run(*command.split())
        assert answer.status == 0, answer.stderr
    runtime_class, pod = (
        run("kata", "pod", "--runtimeclass"),
        run("kata", "pod", "--naming", "pgpu"),
    )
    node.pod.write_text(f"{runtime_class.stdout}---\n{pod.stdout}")
    after = run("check", "pod", str(node.pod))
    assert after.status == 0, after.stdout
    assert after.stdout.endswith("no problem found\n")


def test_what_is_printed_is_explained_as_whole(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    node = KataNode(tmp_path / "node", "rs", kernel)
    run("bind", GPU)
    made = run("cdi", "generate", "--kind", "nvidia.com/pgpu").stdout
    node.write("etc/cdi/vfio.json", made)
    klass = run("kata", "pod", "--runtimeclass").stdout
    node.pod.write_text(f"{klass}---\n{run('kata', 'pod', '--naming', 'pgpu').stdout}")
    answer = run("check", "pod", str(node.pod))
    assert answer.status == 0, answer.stdout
    assert answer.stdout.endswith("no problem found\n")
    assert f"{GPU} on vfio-pci -> rp0 -> nvidia.com/gpu=0" in answer.stdout


def test_a_pod_asks_for_what_is_bound_and_says_what_it_waits_for(run: Run) -> None:
    run("bind", GPU)
    answer = run("kata", "pod")
    (made,) = objects(answer)
    (container,) = made["spec"]["containers"]
    assert made["spec"]["runtimeClassName"] == "kata-vfio"
    assert container["resources"]["limits"]["vfiomgr.io/PCI_10DE_2684"] == "1"
    assert "cuda" in container["image"]
    assert answer.stderr == (
        "the pods wait until a device plugin offers vfiomgr.io/PCI_10DE_2684; to deploy the "
        "node agent: vfiomgr node manifests\n"
    )
    pgpu = run("kata", "pod", "--naming", "pgpu").stderr
    assert "vfiomgr cdi generate --kind nvidia.com/pgpu --name-by group --write\n" in pgpu
    assert json.loads(run("kata", "pod", "--format", "json").stdout) == made


def test_a_pod_requests_what_the_node_agent_offers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = objects(run("kata", "pod", GPU))
    run("bind", GPU)
    offered = run("node", "run", "--once").stderr
    (made,) = objects(run("kata", "pod"))
    assert made == before
    assert f"{next(iter(_limits(made)))}: 1" in offered

    device = DeviceStatus(GPU, (GPU,), (), is_healthy=True, used_by="")
    resource = ResourceStatus("example.com/GPU", "kata", is_registered=True, devices=(device,))
    status = NodeStatus(1, "/plugins", has_kubelet=True, resources=(resource,))
    monkeypatch.setattr("vfiomgr.kata.workloads.find_status", lambda _: status)
    answer = run("kata", "pod", GPU)
    assert "example.com/GPU" in _limits(objects(answer)[0])
    assert answer.stderr == ""


def _limits(pod: Any) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {name: count for name, count in container["resources"]["limits"].items() if "/" in name}


def test_a_small_limit_without_a_unit_is_refused(run: Run) -> None:
    answer = run("kata", "pod", "--memory", "8")
    assert answer.status == 2
    assert "missing unit: --memory 8\n  remedy: write 8G or 8M\n" in answer.stderr
    assert run("kata", "pod", GPU, "--memory", "64M").status == 0


def test_objects_are_printed_as_they_always_were(run: Run, matches: Matches) -> None:
    run("bind", GPU)
    runtime_class = run("kata", "pod", "--runtimeclass", "--default-memory", "8G").stdout
    pod = run("kata", "pod", "--resource", "nvidia.com/pgpu").stdout
    deployment = run("kata", "pod", "--deployment", "--naming", "model").stdout
    matches("kata/objects.yaml", f"{runtime_class}---\n{pod}---\n{deployment}")


def test_named_devices_go_to_one_pod(run: Run) -> None:
    run("bind", GPU)
    answer = run("kata", "pod", GPU, "0000:02:00.1", "0000:01:00.0", "--naming", "pgpu")
    (made,) = objects(answer)
    limits = made["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/pgpu"] == "2", "both functions of the slot are one device"
    assert "0000:01:00.0" in answer.stderr
    assert "vfiomgr bind 0000:01:00.0" in answer.stderr
    assert GPU not in answer.stderr


def test_a_group_goes_whole_and_its_bridges_need_no_port(run: Run) -> None:
    """Three functions behind two bridges: five such devices fit 16 root ports, six do not."""
    assert run("kata", "pod", SHARED, "--count", "5").status == 0
    answer = run("kata", "pod", SHARED, "--count", "6")
    assert answer.status == 4
    assert "18 functions need a root port each, but Kata has only 16" in answer.stderr


def test_a_deployment_keeps_its_pod_running(run: Run) -> None:
    (made,) = objects(
        run("kata", "pod", "--deployment", "--resource", "a.io/b", "--count", "3", "--name", "yes")
    )
    assert made["metadata"]["name"] == "yes"
    template = made["spec"]["template"]
    assert made["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"]["a.io/b"] == "3"
    assert container["command"] == ["sleep", "infinity"]


def test_without_a_device_the_pod_is_printed_and_the_lack_is_told(run: Run) -> None:
    answer = run("kata", "pod", "--naming", "pgpu")
    assert len(objects(answer)) == 1
    assert answer.stderr.startswith(
        "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create"
    )


def test_a_mediated_device_is_refused_with_what_works_instead(run: Run) -> None:
    uuid = run("vgpu", "create", "--type", "nvidia-222").stdout.strip()
    answer = run("kata", "pod", uuid)
    assert (answer.status, answer.stdout) == (4, "")
    assert (
        "is a mediated device of 0000:06:00.0, which Kata does not support: the Go runtime "
        "passes a wrong address or the entire parent, runtime-rs finds no PCI device ("
    ) in answer.stderr
    assert f"vfiomgr libvirt hostdev {uuid}" in answer.stderr
    steps = f"vfiomgr vgpu remove {uuid}, vfiomgr bind 0000:06:00.0"
    for command in ("kata pod", "kata config", "check pod", "kata run-command"):
        told = run(*command.split(), uuid).stderr
        assert f"the entire GPU 0000:06:00.0 to Kata: {steps}" in told, command
        assert "a vGPU that is a virtual function" not in told, "this host makes none"


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("pod 0000:03:00.0", 4, "is a bridge"),
        ("pod 0000:99:00.0", 2, "no such PCI device"),
        ("pod", 4, "no available device whose model could name the resource"),
        ("pod --naming model", 4, "no available device whose model could name the resource"),
        ("pod --resource cpu", 2, "is not a resource of a device plugin"),
        ("pod --name Gpu", 2, "--name 'Gpu' is not a valid Kubernetes name"),
        ("pod --namespace a.b", 2, "--namespace 'a.b' is not a valid Kubernetes name"),
        ("pod --runtime-class a_b", 2, "--runtime-class 'a_b' is not a valid Kubernetes name"),
        ("pod --memory much", 2, "--memory much is not a size"),
        ("pod --count 17", 2, "from 1 to 16"),
        ("pod 0000:05:00.0 --naming model", 4, "no NVIDIA plugin offers 0000:05:00.0"),
        ("pod --runtimeclass --handler A", 2, "--handler 'A' is not a valid Kubernetes name"),
        ("pod --runtimeclass --default-memory 1G --config x", 2, "contradict each other"),
        ("pod --runtimeclass --config /nowhere.toml", 2, "cannot read configuration"),
        ("pod --runtimeclass --default-memory 0", 2, "--default-memory 0 is not a size"),
        ("pod --runtimeclass --node-selector x", 2, "is not a node label"),
        ("pod --runtimeclass --any-node --node-selector a=b", 2, "contradict each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_printed(
    run: Run, line: str, status: int, words: str
) -> None:
    answer = run("kata", *line.split())
    assert (answer.status, answer.stdout) == (status, "")
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


@pytest.mark.parametrize(
    "option",
    [
        "--count=2",
        "--resource=nvidia.com/pgpu",
        "--name=a",
        "--namespace=a",
        "--image=a",
        "--deployment",
        "--memory=16G",
        "--cpus=4",
        "--naming=agent",
    ],
)
def test_a_runtime_class_takes_no_option_of_pods(run: Run, option: str) -> None:
    answer = run("kata", "pod", "--runtimeclass", option)
    assert (answer.status, answer.stdout) == (2, "")
    name = option.partition("=")[0]
    assert f"--runtimeclass and {name} contradict each other" in answer.stderr


def test_the_agent_writes_the_specification_of_its_resource(run: Run) -> None:
    answer = run("kata", "pod", "--resource", "vfiomgr.io/GA102GL_A40")
    assert "has the kind vfiomgr.io/GA102GL_A40: vfiomgr node run\n" in answer.stderr


def test_more_than_this_host_has_is_told(run: Run) -> None:
    run("bind", "0000:01:00.0")
    answer = run("kata", "pod", "--count", "2")
    assert answer.status == 0
    assert "a pod requests 2 of " in answer.stderr
    assert ", but this host has 1: it waits for a node with more" in answer.stderr
    assert "a pod requests" not in run("kata", "pod").stderr


@pytest.mark.parametrize("line", ["pod", "config", "run-command", "pod --format json"])
def test_what_is_printed_for_later_tells_what_is_not_ready(run: Run, line: str) -> None:
    """What is used at once is refused: bind, cdi generate, oci edit."""
    answer = run("kata", *line.split(), "0000:01:00.0")
    assert (answer.status, bool(answer.stdout)) == (0, True)
    assert "bind it with: vfiomgr bind 0000:01:00.0" in answer.stderr
    refused = run("kata", *line.split(), "0000:00:02.0")
    assert (refused.status, bool(refused.stdout)) == (0, True)
    assert "vfiomgr bind refuses it" in refused.stderr
    assert run("cdi", "generate", "0000:01:00.0").status == 4


@pytest.mark.parametrize("name", ["nvidia.com/2684", "a/gpu", "example.com/1gpu"])
def test_a_resource_that_is_no_kind_of_cdi_is_told(run: Run, name: str) -> None:
    answer = run("kata", "pod", "--resource", name)
    assert f"{name} is not a valid CDI kind" in answer.stderr
    assert "cdi generate --kind" not in answer.stderr
    assert (
        "is not a valid CDI kind (vendor and class need two characters or more and start with a "
        "letter). Kata looks up the kubelet's devices by that kind, so pods with cold-plugged "
        "devices fail. Configure another name in the device plugin, and pass it: --resource "
        "domain/name"
    ) not in run("kata", "pod", "--resource", "nvidia.com/pgpu").stderr


def test_a_claim_selects_the_model_of_the_named_devices(run: Run) -> None:
    run("bind", GPU, "--yes")
    answer = run("kata", "pod", GPU, "--dra")
    claim, pod = objects(answer)
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    (selector,) = request["exactly"]["selectors"]
    shown = json.loads(run("show", GPU, "--format", "json").stdout)
    device = shown.get("device", shown)
    ids = (f'vendor == "{device["vendor_id"]}"', f'device == "{device["device_id"]}"')
    assert all(text in selector["cel"]["expression"] for text in ids)
    assert pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == "gpu"
    assert "kata-containers#13322" in answer.stderr
    assert "KubeVirt" not in answer.stderr
    assert "vfiomgr node manifests --dra" in answer.stderr


def test_a_claim_has_no_naming(run: Run) -> None:
    answer = run("kata", "pod", "--dra", "--naming", "model")
    assert answer.status == 2
    assert "--dra and --naming" in answer.stderr


def test_a_device_class_offers_a_model_under_the_name_of_a_resource(run: Run) -> None:
    name = "example.com/GA102GL_A40"
    answer = run("kata", "pod", GPU, "--dra", "--resource", name)
    device_class, pod = objects(answer)
    assert device_class["metadata"]["name"] == "ga102gl-a40.example.com"
    assert device_class["spec"]["extendedResourceName"] == name
    (selector,) = device_class["spec"]["selectors"]
    expression = selector["cel"]["expression"]
    assert expression.startswith('device.driver == "vfiomgr.io" && ')
    assert '.vendor == "' in expression
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][name] == "1"
    assert "resourceClaims" not in pod["spec"]
    assert "Kubernetes 1.36" in answer.stderr
    assert "kata-containers#13322" in answer.stderr


def test_a_device_class_for_a_resource_selects_one_model(run: Run) -> None:
    for addresses, found in (((GPU, SHARED), "several models"), ((), "no devices")):
        answer = run("kata", "pod", *addresses, "--dra", "--resource", "a.b/c")
        assert answer.status == 2
        assert f"selects one model, but there are {found}" in answer.stderr
        assert "vfiomgr kata pod ADDRESS --dra --resource a.b/c" in answer.stderr


def test_kubevirt_has_no_device_classes_for_resources(run: Run) -> None:
    answer = run("kata", "pod", GPU, "--dra", "--kubevirt", "--resource", "a.b/c")
    assert answer.status == 2
    assert "--kubevirt and --resource with --dra" in answer.stderr


def test_a_vm_of_kubevirt_has_a_request_for_each_of_its_devices(run: Run) -> None:
    """KubeVirt accepts one device for each request (resolveDevice in its pkg/dra/utils.go)."""
    run("bind", GPU, "--yes")
    answer = run("kata", "pod", GPU, "--dra", "--kubevirt", "--count", "2", "--memory", "32G")
    claim, vm = objects(answer)
    requests = claim["spec"]["spec"]["devices"]["requests"]
    assert [(one["name"], one["exactly"]["count"]) for one in requests] == [
        ("gpu", 1),
        ("gpu-1", 1),
    ]
    spec = vm["spec"]["template"]["spec"]
    assert (vm["apiVersion"], vm["kind"]) == ("kubevirt.io/v1", "VirtualMachine")
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
    assert spec["domain"]["devices"]["gpus"] == [
        {"name": "gpu", "claimName": "gpu", "requestName": "gpu"},
        {"name": "gpu-1", "claimName": "gpu", "requestName": "gpu-1"},
    ]
    further = [f"{name}-function-1" for name in ("gpu", "gpu-1")]
    assert spec["domain"]["devices"]["hostDevices"] == [
        {"name": name, "claimName": "gpu", "requestName": name} for name in further
    ]
    assert "1.8" in answer.stderr
    assert spec["domain"]["memory"] == {"guest": "32Gi"}
    assert "GPUsWithDRA" in answer.stderr
    assert "kata-containers#13322" not in answer.stderr


def test_a_vm_of_kubevirt_names_the_resource_of_a_device_plugin(run: Run) -> None:
    answer = run(
        "kata", "pod", GPU, "--kubevirt", "--resource", "vfiomgr.io/A40", "--image", "r/d:1"
    )
    (vm,) = objects(answer)
    spec = vm["spec"]["template"]["spec"]
    assert spec["domain"]["devices"]["gpus"] == [{"name": "gpu", "deviceName": "vfiomgr.io/A40"}]
    assert spec["volumes"][0]["containerDisk"]["image"] == "r/d:1"
    assert "resourceClaims" not in spec
    assert "permittedHostDevices" in answer.stderr


def test_a_claim_for_one_function_has_no_further_requests(run: Run) -> None:
    alone = "0000:05:00.0"
    run("bind", alone, "--yes")
    answer = run("kata", "pod", alone, "--dra", "--kubevirt")
    _, vm = objects(answer)
    devices = vm["spec"]["template"]["spec"]["domain"]["devices"]
    assert [len(devices.get(kind, ())) for kind in ("gpus", "hostDevices")].count(1) == 1
    assert "function-1" not in answer.stdout
    assert "1.8" not in answer.stderr


def test_kubevirt_lists_what_is_no_gpu_as_host_device(run: Run) -> None:
    (vm,) = objects(run("kata", "pod", SHARED, "--kubevirt", "--resource", "a.b/nic"))
    devices = vm["spec"]["template"]["spec"]["domain"]["devices"]
    assert devices["hostDevices"] == [{"name": "gpu", "deviceName": "a.b/nic"}]
    assert "gpus" not in devices


@pytest.mark.parametrize(
    "option", [("--deployment",), ("--runtime-class", "kata"), ("--runtimeclass",)]
)
def test_kubevirt_starts_no_pods(run: Run, option: tuple[str, ...]) -> None:
    answer = run("kata", "pod", "--kubevirt", *option)
    assert answer.status == 2
    assert "--kubevirt" in answer.stderr
