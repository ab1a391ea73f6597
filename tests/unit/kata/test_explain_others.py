"""`vfiomgr check pod`: pods that Kata does not run, and pods without devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import breaks
from tests.unit.kata_nodes import (
    CONFIGURATION,
    CONTAINERD,
    CRIO,
    GROUP,
    HANDLER,
    KUBELET,
    SHIMS,
    KataNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Run

CLASS = "  runtimeClassName: kata-vfio\n"
TABLE = "[plugins.'io.containerd.cri.v1.runtime'.containerd"
NVIDIA = f'{TABLE}.runtimes.nvidia]\nruntime_type = "io.containerd.runc.v2"\n'


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    """On which all is right for Kata; no specification has a device."""
    found = KataNode(tmp_path / "node", "go")
    found.add_gpus()
    return found


@pytest.fixture
def explain(run: Run, node: KataNode) -> Callable[..., tuple[int, Any]]:
    """The status and the document of the pod."""

    def explain_it(*options: str) -> tuple[int, Any]:
        line = ("--root", str(node.root), "check", "pod", str(node.pod), *options)
        answer = run(*line, "--format", "json")
        (item,) = json.loads(answer.stdout)["items"]
        return answer.status, item

    return explain_it


def ids(item: Any) -> list[str]:
    return [found["id"] for found in breaks(item)]


def use_nvidia(node: KataNode, entry: str = NVIDIA) -> None:
    node.change(node.pod, "handler: kata-vfio", "handler: nvidia")
    node.change(node.pod, "kata-vfio", "nvidia")
    node.change(node.pod, "pgpu", "gpu")
    node.write(CONTAINERD, HANDLER.format(shim=SHIMS["go"]) + entry)


def test_a_pod_without_a_runtime_class_is_not_judged_by_the_chain_of_kata(
    run: Run, node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    node.change(node.pod, CLASS, "")
    node.change(node.pod, "pgpu", "gpu")
    status, item = explain()
    assert (status, breaks(item), item["release"], item["devices"]) == (0, [], "", [])
    states = [(step["name"], step["state"]) for step in item["steps"]]
    assert states[2:] == [("handler", "ok"), ("request", "unknown")], "no plugin was asked"
    told = run("--root", str(node.root), "check", "pod", str(node.pod)).stdout
    assert told.startswith(f"Pod cuda ({node.pod}:7): not a Kata pod: Kata's chain is not checked")
    assert told.endswith("\nunknown: request\n")


def test_a_handler_of_others_is_only_checked_to_be_there(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    use_nvidia(node)
    node.change(node.pod, "privileged: false", "privileged: true")
    assert (explain()[0], ids(explain()[1])) == (0, [])
    node.write(CONTAINERD, HANDLER.format(shim=SHIMS["go"]))
    status, item = explain()
    (found,) = breaks(item)
    assert (status, found["id"]) == (1, "kata-handler-missing")
    assert "--kata" not in found["remedy"]
    assert "nvidia-ctk runtime configure --runtime=containerd" in found["remedy"]
    node.change(node.pod, "handler: nvidia", "handler: runc")
    assert explain()[0] == 0, "containerd has runc without an entry"


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.change(node.pod, "handler: nvidia", "handler: kata"),
        lambda node: node.change(node.pod, "Name: nvidia", "Name: kata-gpu"),
        lambda node: node.change(
            node.pod, "{}", "{io.katacontainers.config.hypervisor.kernel_params: a}"
        ),
        lambda node: node.publish(kind="nvidia.com/gpu"),
    ],
)
def test_a_pod_that_is_meant_for_kata_is_followed_whatever_its_handler(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    change: Callable[[KataNode], None],
) -> None:
    use_nvidia(node)
    change(node)
    assert len(explain()[1]["steps"]) == 10
    assert len(explain("--handler", "nvidia")[1]["steps"]) == 10


def test_the_default_runtime_of_a_node_may_be_kata(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    node.publish()
    node.change(node.pod, CLASS, "")
    assert ids(explain()[1]) == ["kata-no-runtime-class"], "a GPU on VFIO, in a container"
    node.change(CONTAINERD, "version = 3", f'version = 3\n{TABLE}]\ndefault_runtime_name = "x"')
    assert sorted(ids(explain()[1])) == ["kata-handler-missing", "kata-no-runtime-class"]
    node.change(CONTAINERD, '"x"', '"kata-vfio"')
    status, item = explain()
    assert (status, item["handler"], breaks(item)) == (0, "kata-vfio", [])


def test_a_kata_pod_without_devices_is_not_broken(
    run: Run, node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    node.change(node.pod, "nvidia.com/pgpu: 1, ", "")
    node.change(node.pod, '{podFixed: {memory: "10240Mi", cpu: "1"}}', "{}")
    status, item = explain()
    assert (status, breaks(item)) == (0, [])
    assert {step["state"] for step in item["steps"]} == {"ok"}
    told = run("--root", str(node.root), "check", "pod", str(node.pod)).stdout
    assert "Pod cuda requests no device" in told
    node.change(node.pod, "metadata:\n", "metadata:\n  namespace: a\n")
    node.change(node.pod, "{}", "{io.katacontainers.config.hypervisor.kernel_verity_params: a}")
    assert ids(explain()[1]) == ["kata-annotation-not-enabled"], "what is not of devices is told"


def test_nobody_reads_cdi_names_of_a_pod_without_kata(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    use_nvidia(node)
    node.change(node.pod, "annotations: {}", 'annotations: {cdi.k8s.io/a: "nvidia.com/gpu=0"}')
    (found,) = breaks(explain()[1])
    assert (found["id"], found["severity"]) == ("kata-annotations-unread", "warning")
    node.change(node.pod, "nvidia.com/gpu: 1, ", "")
    (found,) = breaks(explain()[1])
    assert found["severity"] == "blocker"
    assert "Kata" not in found["title"] + found["remedy"]


def test_a_kubelet_without_a_record_gave_pods_nothing(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    use_nvidia(node)
    plugins = "var/lib/kubelet/device-plugins"
    node.write(f"{plugins}/kubelet.sock", "")
    assert ids(explain()[1]) == ["pod-no-checkpoint"]
    node.write(f"{plugins}/kubelet_internal_checkpoint", "{}")
    assert ids(explain()[1]) == ["pod-no-plugin"]
    node.write(f"{plugins}/nvidia-gpu.sock", "")
    assert ids(explain()[1]) == []


@pytest.mark.parametrize(
    ("record", "is_found"),
    [
        ('{"Data": {"RegisteredDevices": {"nvidia.com/gpu": []}}}', True),
        ('{"Data": {"RegisteredDevices": {"nvidia.com/gpu": null}}}', True),
        ('{"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"]}}}', False),
        ('{"Data": {"RegisteredDevices": {"example.com/nic": []}}}', False),
        ('{"Data": {"RegisteredDevices": null}}', False),
        ('{"Data": []}', False),
        ("{", False),
    ],
)
def test_a_plugin_may_have_registered_no_healthy_device(
    node: KataNode, explain: Callable[..., tuple[int, Any]], record: str, *, is_found: bool
) -> None:
    use_nvidia(node)
    node.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", record)
    assert ids(explain()[1]) == (["pod-no-healthy-device"] if is_found else [])


def test_a_plugin_in_the_other_directory_of_the_kubelet_is_seen(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    use_nvidia(node)
    node.write("var/lib/kubelet/device-plugins/kubelet.sock", "")
    node.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{}")
    node.write("var/lib/kubelet/plugins_registry/plugin-reg.sock", "")
    assert ids(explain()[1]) == []


@pytest.mark.parametrize(
    ("type_", "version", "is_broken"),
    [("oci", "2.1.0", True), ("oci", "1.12.0", False), ("vm", "2.1.0", False)],
)
def test_the_command_line_of_kata_runs_no_container_since_2(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    type_: str,
    version: str,
    is_broken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    (node.root / CONTAINERD).unlink()
    text = CRIO.format(shim="/usr/bin/kata-runtime").replace('"vm"', f'"{type_}"')
    node.write("etc/crio/crio.conf.d/50-vfiomgr.conf", text)
    _, item = explain("--kata-version", version)
    assert ("kata-handler-not-kata" in ids(item)) == is_broken


@pytest.mark.parametrize(
    ("own", "sibling", "conmon", "is_broken"),
    [
        ("", "/opt/crio/conmon", "", True),
        ('monitor_path = "/opt/crio/conmon"', "/opt/crio/conmon", "", False),
        ('runtime_type = "vm"', "/opt/crio/conmon", "", False),
        ("", "/opt/crio/conmon", "usr/bin/conmon", False),
        ("", "", "", False),
    ],
)
def test_without_conmon_each_handler_of_cri_o_needs_its_path(  # noqa: PLR0913, PLR0917
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    own: str,
    sibling: str,
    conmon: str,
    is_broken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    (node.root / CONTAINERD).unlink()
    node.write("usr/bin/crio", "")
    if conmon:
        node.write(conmon, "")
    table = "[crio.runtime.runtimes"
    crun = f'{table}.crun]\nruntime_path = "/usr/bin/crun"\nmonitor_path = "{sibling}"\n'
    node.write("etc/crio/crio.conf", CRIO.format(shim="/x") + crun)
    node.write("etc/crio/crio.conf.d/99-nvidia.conf", f"{table}.nvidia]\n{own}\n")
    assert "crio-no-monitor" not in ids(explain()[1])  # CRI-O ignores it without its program
    node.write("usr/bin/nvidia", "")
    found = [each for each in breaks(explain()[1]) if each["id"] == "crio-no-monitor"]
    assert len(found) == is_broken
    for each in found:
        assert f'monitor_path = "{sibling}" in {table}.nvidia]' in str(each)


@pytest.mark.parametrize(
    ("own", "default", "is_broken"),
    [
        ('runtime_path = "/usr/bin/crun"', "", True),
        ('runtime_path = "/opt/none"', "", False),
        ('runtime_path = "/opt/none"', "nvidia", True),
        ("inherit_default_runtime = true", "kata", False),
        ("inherit_default_runtime = true", "crun", True),
    ],
)
def test_a_handler_of_cri_o_that_inherits_or_is_ignored_needs_no_conmon(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    own: str,
    default: str,
    is_broken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    (node.root / CONTAINERD).unlink()
    for program in ("crio", "crun"):
        node.write(f"usr/bin/{program}", "")
    table = "[crio.runtime.runtimes"
    crun = f'{table}.crun]\nruntime_path = "/usr/bin/crun"\nmonitor_path = "/opt/conmon"\n'
    kata = f'{table}.kata]\nruntime_path = "/usr/bin/crun"\nruntime_type = "vm"\n'
    chosen = f'[crio.runtime]\ndefault_runtime = "{default}"\n'
    node.write("etc/crio/crio.conf", f"{chosen}{crun}{kata}{table}.nvidia]\n{own}\n")
    found = [each for each in breaks(explain()[1]) if each["id"] == "crio-no-monitor"]
    assert len(found) == is_broken


def test_one_conmon_for_all_handlers_of_cri_o_is_enough(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    (node.root / CONTAINERD).unlink()
    node.write("usr/bin/crio", "")
    text = '[crio.runtime]\nconmon = "/opt/conmon"\n[crio.runtime.runtimes.nvidia]\n'
    node.write("etc/crio/crio.conf", text)
    assert "crio-no-monitor" not in ids(explain()[1])


def test_a_handler_of_containerd_needs_a_type(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    node.publish()
    node.change(CONTAINERD, '  runtime_type = "io.containerd.kata-vfio.v2"\n', "")
    assert ids(explain()[1]) == ["kata-handler-no-type"]


@pytest.mark.parametrize(
    ("count", "version", "params", "is_told"),
    [
        (5, "4.1", "pci=realloc", True),
        (4, "4.1", "pci=realloc", False),
        (5, "4.1", "agent.cdi_timeout=600", False),
        (5, "3.12", "pci=realloc", False),
    ],
)
def test_many_gpus_need_an_agent_that_waits_longer(  # noqa: PLR0913, PLR0917 - a case each
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    count: int,
    version: str,
    params: str,
    is_told: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    for number in range(2, count + 1):
        node.add_gpu(number, driver="vfio-pci")
    node.publish(range(GROUP, GROUP + count))
    node.change(node.pod, "pgpu: 1", f"pgpu: {count}")
    node.change(CONFIGURATION, "pci=realloc", params)
    item = explain("--kata-version", version)[1]
    assert ("kata-agent-timeout" in ids(item)) == is_told


FLAGS, DAEMON = "var/lib/kubelet/kubeadm-flags.env", "etc/docker/daemon.json"
ENDPOINT = 'KUBELET_KUBEADM_ARGS="--network-plugin=cni{} --pod-infra-container-image=pause"\n'


def put_docker(node: KataNode, flags: str, kubelet: str, daemon: str = "{}") -> None:
    use_nvidia(node)
    node.write(FLAGS, ENDPOINT.format(flags))
    node.write(DAEMON, daemon)
    status = f"Package: kubelet\nStatus: install ok installed\nVersion: {kubelet}-00\n"
    node.write("var/lib/dpkg/status", status)


@pytest.mark.parametrize(
    ("flags", "kubelet", "severity"),
    [
        ("", "1.21.3", "blocker"),
        (" --container-runtime=docker", "1.23.1", "blocker"),
        (" --container-runtime-endpoint=unix:///var/run/cri-dockerd.sock", "1.29.0", "warning"),
        (" --container-runtime-endpoint unix:///run/cri-dockerd.sock", "1.21.3", "warning"),
        ("", "1.24.0", None),
        (" --container-runtime=remote", "1.21.3", None),
        (" --container-runtime-endpoint=unix:///run/containerd/containerd.sock", "1.21.3", None),
    ],
)
def test_docker_does_not_know_handlers(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    flags: str,
    kubelet: str,
    severity: str | None,
) -> None:
    put_docker(node, flags, kubelet, '{"default-runtime": "nvidia"}')
    found = breaks(explain()[1])
    assert [(each["id"], each["severity"]) for each in found] == (
        [] if severity is None else [("kubelet-docker", severity)]
    )
    assert breaks(explain("--runtime", "containerd")[1]) == [], "another runtime was named"
    for version, others in (("0.3.15", "blocker"), ("0.4.0", None)) if "cri-" in flags else ():
        status = "Package: {}\nStatus: install ok installed\nVersion: {}\n"
        packages = (("kubelet", kubelet), ("cri-dockerd", version))
        text = "\n".join(status.format(*package) for package in packages)
        node.write("var/lib/dpkg/status", text)
        assert [each["severity"] for each in breaks(explain()[1])] == ([others] if others else [])


@pytest.mark.parametrize(
    ("daemon", "is_found"),
    [
        ("{}", True),
        ('{"runtimes": {"nvidia": {}}, "default-runtime": "runc"}', True),
        ('{"default-runtime": "nvidia"}', False),
        ("{", False),
    ],
)
def test_under_docker_the_default_runtime_gives_gpus_to_pods(
    node: KataNode, explain: Callable[..., tuple[int, Any]], daemon: str, *, is_found: bool
) -> None:
    put_docker(node, "", "1.18.2", daemon)
    node.change(node.pod, "  runtimeClassName: nvidia\n", "")
    assert ids(explain()[1]) == (["docker-default-runtime"] if is_found else [])
    unit = "[Service]\nExecStart=/usr/bin/dockerd --default-runtime=nvidia\n"
    node.write("etc/systemd/system/docker.service", unit)
    assert ids(explain()[1]) == [], "the unit sets it"


def test_whether_the_kubelet_uses_docker_may_be_unknown(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    put_docker(node, "", "1.21.3")
    (node.root / FLAGS).unlink()
    assert ids(explain()[1]) == [], "flags may be somewhere else"
    node.write("var/run/dockershim.sock", "")
    assert ids(explain()[1]) == ["kubelet-docker", "docker-default-runtime"]
    unit = "[Service]\n#Environment=A=--container-runtime=docker\nEnvironment=B='{}=remote'\n"
    place = "etc/systemd/system/kubelet.service.d/10-kubeadm.conf"
    node.write(place, unit.format("--container-runtime"))
    assert ids(explain()[1]) == []


@pytest.mark.parametrize(
    ("flag", "is_found"),
    [("'--docker'", True), ("--docker", True), ("--docker=false", False), ("--docker-x", False)],
)
def test_k3s_has_a_flag_for_docker(
    node: KataNode, explain: Callable[..., tuple[int, Any]], flag: str, *, is_found: bool
) -> None:
    use_nvidia(node)
    unit = f"[Service]\nExecStart=/usr/local/bin/k3s \\\n    server \\\n\t{flag} \\\n"
    node.write("etc/systemd/system/k3s.service", unit)
    found = [each for each in breaks(explain()[1]) if each["id"] == "kubelet-docker"]
    assert [each["remedy"].startswith("remove --docker there") for each in found] == (
        [True] if is_found else []
    )


RUNC = f'{TABLE}.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
OPTIONS = TABLE + ".runtimes.{}.options]\nSystemdCgroup = {}\n"


@pytest.mark.parametrize(
    ("entries", "kubelet", "is_found"),
    [
        (NVIDIA + RUNC + OPTIONS.format("runc", "true"), "", True),
        (NVIDIA + OPTIONS.format("nvidia", "false"), "cgroupDriver: systemd\n", False),
        (NVIDIA + OPTIONS.format("nvidia", "true"), "cgroupDriver: systemd\n", False),
        (NVIDIA + RUNC + OPTIONS.format("runc", "false"), "cgroupDriver: systemd\n", False),
        (NVIDIA + RUNC, "cgroupDriver: cgroupfs\n", False),
        (NVIDIA + RUNC, "", False),
        (NVIDIA.replace("runc.v2", "runsc.v1"), "cgroupDriver: systemd\n", False),
    ],
)
def test_a_handler_has_the_cgroup_driver_of_the_kubelet(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    entries: str,
    kubelet: str,
    *,
    is_found: bool,
) -> None:
    use_nvidia(node, entries)
    node.write(KUBELET, kubelet)
    expected = ["runtime-cgroup-driver"] if is_found else []
    assert ids(explain()[1]) == expected
    node.change(node.pod, "  runtimeClassName: nvidia\n", "")
    table = f'version = 3\n{TABLE}]\ndefault_runtime_name = "nvidia"'
    node.change(CONTAINERD, "version = 3", table)
    assert ids(explain()[1]) == expected, "the default handler"


def test_k3s_writes_the_cgroup_driver_from_a_template(
    node: KataNode, explain: Callable[..., tuple[int, Any]]
) -> None:
    use_nvidia(node, NVIDIA + RUNC + OPTIONS.format("runc", "true"))
    text = (node.root / CONTAINERD).read_text()
    (node.root / CONTAINERD).unlink()
    node.write("var/lib/rancher/k3s/agent/etc/containerd/config.toml", text)
    (found,) = breaks(explain()[1])
    assert "config.toml.tmpl" in found["remedy"]
    assert "1.25.15" in found["remedy"]


def plugin(**container: Any) -> str:
    image = "nvcr.io/nvidia/k8s-device-plugin:v0.15.0"
    spec = {"containers": [{"name": "ctr", "image": image, **container}]}
    metadata = {"name": "plugin"}
    daemon_set = {"kind": "DaemonSet", "metadata": metadata, "spec": {"template": {"spec": spec}}}
    return json.dumps(daemon_set)


def variable(name: str, value: str) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value}]}


TOOLKIT = "etc/nvidia-container-runtime/config.toml"
OF_OPERATOR = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
NO_VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"
STRATEGY = "DEVICE_LIST_STRATEGY"
FROM = {"env": [{"name": STRATEGY, "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}


@pytest.mark.parametrize(
    ("container", "toolkit", "remedy"),
    [
        ({}, NO_VARIABLE + MOUNTS, "set DEVICE_LIST_STRATEGY=volume-mounts"),
        (variable(STRATEGY, "volume-mounts"), "", "set DEVICE_LIST_STRATEGY=envvar"),
        ({"args": ["--device-list-strategy=envvar"]}, NO_VARIABLE, "unprivileged = true"),
        ({"args": ["--device-list-strategy", "volume-mounts"]}, NO_VARIABLE + MOUNTS, None),
        (variable(STRATEGY, "cdi-annotations,envvar"), NO_VARIABLE, None),
        (variable("CONFIG_FILE", "/config/config.yaml"), NO_VARIABLE, None),
        ({"image": "registry.example/plugin"}, NO_VARIABLE, None),
        (FROM, NO_VARIABLE, None),
        ({}, "", None),
        ({}, "accept-", None),
    ],
)
def test_the_toolkit_takes_what_the_device_plugin_passes(
    node: KataNode,
    explain: Callable[..., tuple[int, Any]],
    container: dict[str, Any],
    toolkit: str,
    remedy: str | None,
) -> None:
    node.pod.write_text(plugin(**container))
    assert ids(explain()[1]) == [], "there is no toolkit"
    node.write(TOOLKIT, toolkit)
    found = breaks(explain()[1])
    assert [each["id"] for each in found] == ([] if remedy is None else ["device-list-strategy"])
    assert all(str(remedy) in each["remedy"] for each in found)
    node.write(OF_OPERATOR, MOUNTS)
    assert ids(explain()[1]) == [], "the operator has a toolkit of its own"


def test_kata_needs_kvm(run: Run, node: KataNode, explain: Callable[..., tuple[int, Any]]) -> None:
    def check_kata() -> str:
        return str(run("--root", str(node.root), "check", "kata").stdout)

    node.publish()
    node.write("proc/cpuinfo", "vendor_id : GenuineIntel\nflags : fpu hypervisor\n")
    node.write("dev/null", "")
    (found,) = breaks(explain()[1])
    assert (found["id"], found["severity"]) == ("kvm", "blocker")
    assert "nested virtualization" in found["remedy"]
    assert check_kata().startswith("blocker: no KVM: the CPU shows no virtualization")
    node.write("dev/kvm", "")
    assert ids(explain()[1]) == []
    assert "KVM" not in check_kata()
    (node.root / "dev/kvm").unlink()
    use_nvidia(node)
    node.change(node.pod, "nvidia.com/gpu", "example.com/gpu")
    assert ids(explain()[1]) == [], "no pod of Kata"
