"""The default handler of containerd, for pods with NVIDIA's GPUs and without a RuntimeClass."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import breaks
from tests.unit.kata_nodes import CONTAINERD, KataNode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    """With a pod that requests nvidia.com/gpu of no RuntimeClass."""
    found = KataNode(tmp_path / "node", "go")
    found.add_gpus()
    found.change(found.pod, "  runtimeClassName: kata-vfio\n", "")
    found.change(found.pod, "pgpu", "gpu")
    return found


def of_default(run: Run, node: KataNode) -> list[Any]:
    answer = run("--root", str(node.root), "check", "pod", str(node.pod), "--format", "json")
    (item,) = json.loads(answer.stdout)["items"]
    return [found for found in breaks(item) if found["id"] == "nvidia-not-default"]


HANDLERS = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n{}\n'
TABLE = (
    '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{0}]\n'
    'runtime_type = "io.containerd.runc.v2"\n'
    '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{0}.options]\n'
    'BinaryName = "/usr/bin/{1}"\n'
)
RUNC, OWN = TABLE.format("runc", "runc"), TABLE.format("nvidia", "nvidia-container-runtime")
RKE2 = "var/lib/rancher/rke2/agent/etc/containerd/config.toml"
DEFAULT = 'default_runtime_name = "nvidia"\n'


@pytest.mark.parametrize(
    ("settings", "is_found"),
    [
        ({"table": RUNC + OWN}, True),
        ({"table": DEFAULT + RUNC + OWN}, False),
        ({"table": RUNC}, False),
        ({"table": TABLE.format("runc", "nvidia-container-runtime") + OWN}, False),
        ({"table": RUNC + OWN, "class": True}, False),
        ({"table": RUNC + OWN, "cdi": "kind: nvidia.com/gpu\n"}, False),
    ],
)
def test_the_default_handler_of_containerd_may_give_no_gpu(
    run: Run,
    node: KataNode,
    settings: dict[str, Any],
    *,
    is_found: bool,
) -> None:
    if "class" in settings:
        node.change(node.pod, "  containers:", "  runtimeClassName: nvidia\n  containers:")
    if "cdi" in settings:
        node.write("etc/cdi/nvidia.yaml", settings["cdi"])
    node.write(CONTAINERD, HANDLERS.format(settings["table"]))
    assert bool(of_default(run, node)) is is_found


def test_without_a_configuration_the_default_handler_is_unknown(run: Run, node: KataNode) -> None:
    (node.root / CONTAINERD).unlink()
    answer = run("--root", str(node.root), "check", "pod", str(node.pod))
    assert "the default handler: no containerd configuration found\n" in answer.stdout


@pytest.mark.parametrize("is_running", [True, False])
def test_rke2_does_not_read_the_handlers_of_the_hosts_containerd(
    run: Run, node: KataNode, *, is_running: bool
) -> None:
    node.write(CONTAINERD, HANDLERS.format(DEFAULT + RUNC + OWN))
    node.write(RKE2, HANDLERS.format(RUNC))
    if is_running:
        node.write("run/k3s/containerd/containerd.sock", "")
    found = of_default(run, node)
    assert bool(found) is is_running
    for each in found:
        assert f"/{RKE2} (config.toml.tmpl)" in each["remedy"]


HOOK = '{"hook": {"path": "/usr/local/nvidia/toolkit/nvidia-container-toolkit"}}'
CRIO = '[crio.runtime]\ndefault_runtime = "{}"\n{}\n'
BOTH = 'hooks_dir = ["/usr/share/containers/oci/hooks.d", "/run/containers/oci/hooks.d/"]'


@pytest.mark.parametrize(
    ("place", "settings", "pod", "is_found"),
    [
        ("run", CRIO.format("runc", ""), "gpu", True),
        ("etc", CRIO.format("runc", ""), "gpu", True),
        ("usr/share", CRIO.format("runc", ""), "gpu", False),
        ("run", CRIO.format("runc", BOTH), "gpu", False),
        ("run", CRIO.format("nvidia", ""), "gpu", False),
        ("run", CRIO.format("runc", ""), "other", False),
        ("", CRIO.format("runc", ""), "gpu", False),
    ],
)
def test_crio_reads_hooks_of_some_directories_only(  # noqa: PLR0913, PLR0917 - a case each
    run: Run,
    node: KataNode,
    place: str,
    settings: str,
    pod: str,
    is_found: bool,  # noqa: FBT001
) -> None:
    if place:
        node.write(f"{place}/containers/oci/hooks.d/oci-nvidia-hook.json", HOOK)
    node.change(node.pod, "nvidia.com/gpu", f"nvidia.com/{pod}")
    (node.root / CONTAINERD).unlink()
    node.write("etc/crio/crio.conf", settings)
    answer = run("--root", str(node.root), "check", "pod", str(node.pod), "--format", "json")
    (item,) = json.loads(answer.stdout)["items"]
    found = [each for each in breaks(item) if each["id"] == "nvidia-hook-unread"]
    assert bool(found) is is_found


NVIDIA_OF_CRIO = (
    '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/nvidia-container-runtime"\n'
)


@pytest.mark.parametrize(
    ("settings", "hook", "is_found"),
    [
        (CRIO.format("runc", NVIDIA_OF_CRIO), "", True),
        (CRIO.format("nvidia", NVIDIA_OF_CRIO), "", False),
        (CRIO.format("runc", NVIDIA_OF_CRIO), HOOK, False),
        (CRIO.format("runc", ""), "", False),
    ],
)
def test_the_default_handler_of_crio_may_give_no_gpu(
    run: Run, node: KataNode, settings: str, hook: str, *, is_found: bool
) -> None:
    (node.root / CONTAINERD).unlink()
    node.write("etc/crio/crio.conf", settings)
    if hook:
        node.write("usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", hook)
    found = of_default(run, node)
    assert bool(found) is is_found
    for each in found:
        assert 'default_runtime = "nvidia" in /etc/crio/crio.conf' in each["remedy"]
