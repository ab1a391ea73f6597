"""What keeps a device from a pod's guest: one thing wrong on a node where all else is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.unit.kata_nodes import (
    BUILD,
    CONFIGURATION,
    CONTAINERD,
    CRIO,
    DROP_INS,
    GROUP,
    HANDLER,
    KUBELET,
    SHIMS,
    SOCKET,
    SPECIFICATION,
    KataNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def breaks(item: Any) -> list[Any]:
    """The breaks of a trace, in JSON."""
    return [found for step in item["steps"] for found in step["breaks"]]


def said(found: Any) -> str:
    """A break as the text output has it."""
    return f"{found['title']}: {found['why']}" if found["why"] else str(found["title"])


def is_certain(found: Any) -> bool:
    """Whether it breaks the chain by itself."""
    return bool(found["severity"] == "blocker")


@dataclass(frozen=True)
class Case:
    """A pod or a node with one thing wrong: its number, and what the break and its remedy say."""

    name: str
    number: int | None
    spoil: Callable[[KataNode], None]
    what: str
    remedy: str
    runtime: str = "rs"
    is_silent: bool = True
    is_certain: bool = True
    options: tuple[str, ...] = ()


def annotate(node: KataNode, key: str, value: str) -> None:
    node.change(node.pod, "annotations: {}", f'annotations: {{{key}: "{value}"}}')


def annotate_cold_plug(allow: str, port: str) -> Callable[[KataNode], None]:
    def spoil(node: KataNode) -> None:
        annotate(node, "io.katacontainers.config.hypervisor.cold_plug_vfio", "root-port")
        node.change(CONFIGURATION, "^kernel_params$", allow)
        node.change(CONFIGURATION, 'cold_plug_vfio = "root-port"', f'cold_plug_vfio = "{port}"')

    return spoil


def drop_in(name: str, text: str) -> Callable[[KataNode], None]:
    return lambda node: node.write(f"{DROP_INS}/{name}", text)


def second_file(path: str, **settings: Any) -> Callable[[KataNode], None]:
    return lambda node: node.publish(path=path, **settings)


def changed(place: str, old: str, new: str) -> Callable[[KataNode], None]:
    return lambda node: node.change(node.pod if place == "pod" else place, old, new)


def both(*spoilers: Callable[[KataNode], None]) -> Callable[[KataNode], None]:
    def spoil(node: KataNode) -> None:
        for one in spoilers:
            one(node)

    return spoil


def wrap_shim(node: KataNode) -> None:
    """As kata-deploy did before containerd could name a configuration."""
    configuration = "/srv/kata/configuration.toml"
    settings = (node.root / CONFIGURATION).read_text()
    node.write(configuration.removeprefix("/"), settings)
    wrapper = f'#!/bin/bash\nKATA_CONF_FILE={configuration} {SHIMS["go"]} "$@"\n'
    node.write("usr/local/bin/containerd-shim-kata-vfio-v2", wrapper)
    entry, _, _ = HANDLER.partition("  [plugins")
    node.write(CONTAINERD, entry.replace('  runtime_path = "{shim}"\n', ""))


def use_crio(node: KataNode) -> None:
    (node.root / CONTAINERD).unlink()
    node.write("etc/crio/crio.conf.d/50-vfiomgr.conf", CRIO.format(shim=SHIMS["rs"]))


def many_gpus(node: KataNode) -> None:
    for number in range(3, 13):
        node.add_gpu(number, driver="vfio-pci")
    node.publish(range(GROUP, GROUP + 12))
    node.change(node.pod, "pgpu: 1", "pgpu: 12")


CASES = [
    Case(
        "cold plug by annotation alone",
        1,
        annotate_cold_plug("^cold_plug_vfio$", "no-port"),
        "cold_plug_vfio is only set by annotation, and Kata looks for devices before it",
        "set cold_plug_vfio in /etc/kata-containers/vfiomgr/kata-vfio/configuration.toml",
        runtime="go",
    ),
    Case(
        "an annotation that Go does not allow",
        1,
        annotate_cold_plug("^x$", "root-port"),
        "is not enabled': enable_annotations of the configuration does not allow it",
        "remove the annotation",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "an annotation that runtime-rs ignores",
        1,
        annotate_cold_plug("^x$", "no-port"),
        "runtime-rs ignores it: no device is injected",
        "remove the annotation",
    ),
    Case(
        "an annotation that runtime-rs allows and does not know",
        1,
        annotate_cold_plug("cold_plug", "root-port"),
        "is allowed, but not supported",
        "remove the annotation",
        is_silent=False,
    ),
    Case(
        "a claim",
        2,
        changed("pod", "  containers:", "  resourceClaims: [{name: gpu}]\n  containers:"),
        "claim gpu uses dynamic resource allocation (DRA), which both runtimes of Kata ignore: "
        "they only read devices of device plugins",
        "request the resource of a device plugin in resources.limits instead: vfiomgr kata pod",
    ),
    Case(
        "another plugin's resource",
        3,
        changed("pod", "{nvidia.com/pgpu: 1", '{nvidia.com/pgpu: 1, rdma/hca: "1"'),
        "rdma/hca belongs to another device plugin and has no CDI specification: the pod fails "
        "with 'unresolvable CDI devices', because Kata looks up each of its devices",
        "with the plugin's device IDs, or request",
        is_silent=False,
    ),
    Case(
        "a file of CDI 0.7",
        4,
        second_file("var/run/cdi/b.json", kind="b.io/bb", version="0.7.0"),
        "/var/run/cdi/b.json:1: cdiVersion 0.7.0 is newer than CDI 0.6: Kata's Go runtime",
        "or move /var/run/cdi/b.json away",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "a file of CDI 1.0 for runtime-rs 3.31",
        4,
        second_file("var/run/cdi/b.json", kind="b.io/bb", version="1.0.0"),
        "cdiVersion 1.0.0 is newer than CDI 0.7: Kata's runtime-rs 3.31 ",
        "or move /var/run/cdi/b.json away",
        is_silent=False,
        options=("--kata-version", "3.31.0"),
    ),
    Case(
        "a file with an unknown key",
        4,
        second_file("etc/cdi/b.json", kind="b.io/bb", devces=[]),
        "/etc/cdi/b.json:1: devces is not a CDI key",
        "correct it (did you mean devices?), or move /etc/cdi/b.json away; vfiomgr check cdi",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "a file that is no document",
        4,
        lambda node: node.write("etc/cdi/b.yaml", "a: ["),
        "/etc/cdi/b.yaml:1: a bracket or brace is not closed",
        "or move /etc/cdi/b.yaml away",
        is_silent=False,
    ),
    Case(
        "one name in two files of a directory",
        4,
        second_file("etc/cdi/b.json"),
        f"nvidia.com/pgpu={GROUP} is also in /etc/cdi/b.json, so neither is used",
        "remove it from one of the files",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "nodes that runtime-rs would plug",
        None,
        changed(SPECIFICATION, '[{"path"', '[{"path": "/dev/vfio/vfio"}, {"path"'),
        ": runtime-rs attaches every node of a device, but /dev/vfio/vfio is not a VFIO device",
        "move it to the containerEdits of the file, as vfiomgr cdi generate does",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "one name in both directories",
        5,
        second_file("var/run/cdi/b.json", nodes=["/dev/vfio/41"], names=[str(GROUP)]),
        "which runtime-rs uses, and /var/run/cdi/b.json (/dev/vfio/41)",
        "keep one of them, e.g. remove /var/run/cdi/b.json",
    ),
    Case(
        "an editor's copy in config.d",
        6,
        drop_in("50-gpu.toml~", '[hypervisor.qemu]\ncold_plug_vfio = "no-port"\n'),
        "config.d/50-gpu.toml~ is read too, whatever its suffix: it overrides cold_plug_vfio",
        "move it out of /etc/kata-containers/vfiomgr/kata-vfio/config.d",
    ),
    Case(
        "a key that Go does not have",
        6,
        drop_in("a.toml", "[hypervisor.qemu]\ncold_plug_vifo = 1\n"),
        "a.toml: Kata 4.1.0 (Go runtime) does not know cold_plug_vifo in [hypervisor.qemu]",
        "remove it",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "kernel_params that replace those before",
        6,
        drop_in("a.toml", '[hypervisor.qemu]\nkernel_params = "quiet"\n'),
        "replaces the previous one, so pci=realloc is lost",
        "add the lost parameters to",
        is_certain=False,
    ),
    Case(
        "KATA_CONF_FILE",
        7,
        wrap_shim,
        "containerd-shim-kata-vfio-v2 sets KATA_CONF_FILE=/srv/kata/configuration.toml",
        "vfiomgr runtime install --kata --config /srv/kata/configuration.toml",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "twelve GPUs",
        8,
        many_gpus,
        "12 root ports: the Go runtime sorts their names as text (rp10 before rp2), so "
        "containers get the wrong GPU index",
        "assign at most 10 functions per pod (bind a GPU without its audio function: "
        "--function-only), or use runtime-rs",
        runtime="go",
    ),
    Case(
        "an overhead that is too small",
        9,
        changed("pod", "10240Mi", "4096Mi"),
        "the overhead of RuntimeClass kata-vfio is 4096Mi, less than default_memory (8192 MiB)",
        "set overhead.podFixed.memory to 10240Mi",
    ),
    Case(
        "no overhead",
        9,
        changed("pod", 'overhead: {podFixed: {memory: "10240Mi", cpu: "1"}}', "x: y"),
        "is nothing, less than default_memory",
        "set overhead.podFixed.memory to 10240Mi",
    ),
    Case(
        "a kubelet without patience",
        10,
        both(
            lambda node: node.write(KUBELET, "featureGates: {KubeletPodResourcesGet: true}\n"),
            drop_in("a.toml", "[agent.kata]\ncreate_container_timeout = 1200\n"),
        ),
        "the kubelet times out after 120 s (runtimeRequestTimeout in "
        "/var/lib/kubelet/config.yaml), before Kata's",
        "set runtimeRequestTimeout: 1200s",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "a kubelet whose feature gate is off",
        None,
        lambda node: node.write(KUBELET, "featureGates: {KubeletPodResourcesGet: false}\n"),
        "/var/lib/kubelet/config.yaml disables the feature gate KubeletPodResourcesGet: without",
        "set featureGates: {KubeletPodResourcesGet: true}",
        is_silent=False,
    ),
    Case(
        "a kubelet whose feature gate depends on its release",
        None,
        lambda node: node.write(KUBELET, "runtimeRequestTimeout: 20m\n"),
        "does not enable the feature gate KubeletPodResourcesGet, which Kubernetes before 1.34",
        "set featureGates: {KubeletPodResourcesGet: true}",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "sizes by CRI-O",
        11,
        use_crio,
        "static_sandbox_resource_mgmt is on, but CRI-O does not pass container sizes: the guest "
        "has only default_memory (8192 MiB) and default_vcpus, without",
        "set default_memory and default_vcpus to what the pods need",
    ),
    Case(
        "a privileged container",
        12,
        both(
            changed("pod", "privileged: false", "privileged: true"),
            changed(CONTAINERD, "_host_devices = true", "_host_devices = false"),
        ),
        ": all VFIO groups are assigned to this guest, including those of other pods",
        "set privileged_without_host_devices = true",
    ),
    Case(
        "no RuntimeClass",
        None,
        changed("pod", "  runtimeClassName: kata-vfio\n", ""),
        "the pod has no runtimeClassName: the default runtime of the node runs it (usually "
        "runc, on the host kernel)",
        "add runtimeClassName",
    ),
    Case(
        "an unknown handler",
        None,
        changed("pod", "handler: kata-vfio", "handler: kata-gpu"),
        "containerd has no handler kata-gpu (available: kata-vfio): its pods fail with 'no "
        'runtime for "kata-gpu" is configured\'',
        "kata-vfio; or create this one: vfiomgr runtime install kata-gpu --kata",
        is_silent=False,
    ),
    Case(
        "a mistyped handler",
        None,
        changed("pod", "handler: kata-vfio", "handler: kata-vfi"),
        "containerd has no handler kata-vfi",
        "did you mean kata-vfio? set it as the handler of the RuntimeClass",
        is_silent=False,
    ),
    Case(
        "containerd as Docker's package configures it",
        None,
        lambda node: node.write(CONTAINERD, 'disabled_plugins = ["cri"]\n'),
        "/etc/containerd/config.toml disables CRI (disabled_plugins)",
        "remove cri from disabled_plugins in /etc/containerd/config.toml, then restart containerd",
        is_silent=False,
    ),
    Case(
        "a handler of runc",
        None,
        lambda node: node.write(
            CONTAINERD,
            HANDLER.format(shim="/usr/bin/runc").replace("kata-vfio.v2", "runc.v2"),
        ),
        "runs io.containerd.runc.v2, not Kata's shim",
        "use another name for the handler: vfiomgr runtime install kata-vfio-vfio --kata",
    ),
    Case(
        "a shim that does not exist",
        None,
        changed(CONTAINERD, SHIMS["rs"], "/opt/kata/bin/containerd-shim-kata-v3"),
        "/opt/kata/bin/containerd-shim-kata-v3, the shim of kata-vfio in "
        "/etc/containerd/config.toml, does not exist",
        f'set runtime_path = "{SHIMS["rs"]}" there, then restart containerd',
        is_silent=False,
    ),
    Case(
        "a handler of a Kata that is not installed",
        None,
        lambda node: (node.root / SHIMS["rs"].removeprefix("/")).unlink(),
        "does not exist: no pod of the handler starts",
        "install Kata Containers at that path, or",
        is_silent=False,
    ),
    Case(
        "a shim by name that no directory has",
        None,
        changed(CONTAINERD, f'  runtime_path = "{SHIMS["rs"]}"\n', ""),
        "containerd-shim-kata-vfio-v2, the shim of kata-vfio in /etc/containerd/config.toml, "
        "is in none of the usual directories",
        f'set runtime_path = "{SHIMS["rs"]}" there',
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "Go's shim with a configuration of runtime-rs",
        None,
        changed(CONFIGURATION, "[runtime]\n", '[runtime]\nhypervisor_name = "qemu"\n'),
        "the handler has the shim of the Go runtime, but /etc/kata-containers/vfiomgr/kata-vfio/"
        "configuration.toml is for runtime-rs",
        "use a configuration for the Go runtime, or the shim of runtime-rs",
        runtime="go",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "runtime-rs with a configuration of Go's",
        None,
        changed(CONFIGURATION, 'hypervisor_name = "qemu"\n', ""),
        "is for the Go runtime: [runtime] has no hypervisor_name",
        "use a configuration for runtime-rs, or the shim of the Go runtime",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "default_memory by an annotation that Go does not allow",
        1,
        lambda node: annotate(node, "io.katacontainers.config.hypervisor.default_memory", "16384"),
        "default_memory is not enabled': enable_annotations of the configuration does not allow it",
        "vfiomgr kata config --annotations default_memory",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "default_memory by an annotation that runtime-rs ignores",
        1,
        lambda node: annotate(node, "io.katacontainers.config.hypervisor.default_memory", "16384"),
        "runtime-rs ignores annotation io.katacontainers.config.hypervisor.default_memory",
        "vfiomgr kata config --annotations default_memory",
        is_certain=False,
    ),
    Case(
        "an annotation alone where the kubelet is asked",
        None,
        both(
            changed("pod", "nvidia.com/pgpu: 1, ", ""),
            lambda node: annotate(node, "cdi.k8s.io/gpu", f"nvidia.com/pgpu={GROUP}"),
        ),
        ": if a kubelet answers there, Kata uses only its devices, and a pod that requests no "
        "resource has none",
        "request the resource in resources.limits (nvidia.com/pgpu: 1)",
        runtime="go",
        is_certain=False,
    ),
    Case(
        "a guest without its kernel",
        None,
        lambda node: (node.root / BUILD / "vmlinux-nvidia-gpu.container").unlink(),
        "the guest's kernel does not exist: Kata cannot start a guest without it",
        "vfiomgr check kata --config /etc/kata-containers/vfiomgr/kata-vfio/",
        is_silent=False,
    ),
    Case(
        "a guest without a root file system",
        None,
        changed(CONFIGURATION, "initrd =", "initrd_nix ="),
        "the guest has no root file system",
        "set image to the path of one",
        is_silent=False,
        runtime="rs",
    ),
    Case(
        "no kubelet",
        None,
        lambda node: (node.root / SOCKET).unlink(),
        "the kubelet socket of Kata's configuration does not exist: "
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "start the kubelet",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "a node that udev has not made",
        None,
        lambda node: (node.root / "dev/vfio" / str(GROUP)).unlink(),
        f"/dev/vfio/{GROUP} does not exist, although 0000:41:00.0 is available to guests",
        "recreate it with udevadm trigger, or run vfiomgr unbind",
        is_silent=False,
    ),
    Case(
        "an annotation with a device that is nowhere",
        None,
        both(
            lambda node: annotate(node, "cdi.k8s.io/gpu", "nvidia.com/pgpu=40,nvidia.com/pgpu=99"),
            changed("pod", "nvidia.com/pgpu: 1, ", ""),
        ),
        "no specification has nvidia.com/pgpu=99, from annotation cdi.k8s.io/gpu",
        "use one of nvidia.com/pgpu=40",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "an annotation with a device that is nowhere, where the kubelet is asked",
        None,
        lambda node: annotate(node, "cdi.k8s.io/gpu", "nvidia.com/pgpu=99"),
        "no specification has nvidia.com/pgpu=99, from annotation cdi.k8s.io/gpu",
        "use one of nvidia.com/pgpu=40",
        is_silent=False,
    ),
    Case(
        "an annotation that names no device, where devices are hot-plugged",
        None,
        both(
            lambda node: annotate(node, "cdi.k8s.io/gpu", "garbage"),
            changed(
                CONFIGURATION,
                'cold_plug_vfio = "root-port"',
                'cold_plug_vfio = "no-port"\nhot_plug_vfio = "root-port"',
            ),
        ),
        "annotation cdi.k8s.io/gpu has an invalid CDI name: 'garbage' (write VENDOR/CLASS=NAME, "
        "separated by commas without spaces); the pod fails when it is read",
        "use one of nvidia.com/pgpu=40",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "an annotation with a blank between names",
        None,
        lambda node: annotate(node, "cdi.k8s.io/gpu", "nvidia.com/pgpu=40, nvidia.com/pgpu=40"),
        "has an invalid CDI name: ' nvidia.com/pgpu=40' (write VENDOR/CLASS=NAME, separated by "
        "commas without spaces); the pod fails when it is read",
        "use one of nvidia.com/pgpu=40",
        is_silent=False,
    ),
    Case(
        "a main file of containerd that is no TOML",
        None,
        lambda node: node.write(CONTAINERD, "# mine\nversion = [\n"),
        f"/{CONTAINERD}:2: not valid TOML: Invalid value (at end of document): containerd does not",
        "correct that place, then restart containerd",
        is_silent=False,
    ),
    Case(
        "an imported file of containerd that is no TOML",
        None,
        both(
            changed(CONTAINERD, "version = 3", 'version = 3\nimports = ["conf.d/*.toml"]'),
            lambda node: node.write("etc/containerd/conf.d/a.toml", "version = 3\n\nx =\n"),
        ),
        "/etc/containerd/conf.d/a.toml:3: not valid TOML",
        "correct that place, then restart containerd",
        is_silent=False,
    ),
    Case(
        "a drop-in that only some releases of containerd read, and that is no TOML",
        None,
        lambda node: node.write("etc/containerd/conf.d/a.toml", "version = 3\nx =\n"),
        "(at line 2, column 4): containerd, from 2.3.0 on, does not start with it",
        "correct that place, then restart containerd",
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "a file of CRI-O that is no TOML",
        None,
        both(use_crio, lambda node: node.write("etc/crio/crio.conf.d/99-x.conf", "[crio\n")),
        "/etc/crio/crio.conf.d/99-x.conf:1: not valid TOML",
        "correct that place, then restart CRI-O",
        is_silent=False,
    ),
    Case(
        "a drop-in of another version",
        None,
        both(
            lambda node: node.write(
                "etc/containerd/conf.d/a.toml", HANDLER.format(shim=SHIMS["rs"])
            ),
            lambda node: node.write(CONTAINERD, 'version = 2\nimports = ["conf.d/*"]\n'),
        ),
        "conf.d/a.toml has version 3, but /etc/containerd/config.toml has version 2: contain",
        "use the same version in both: containerd config migrate; then restart containerd",
        is_certain=False,
        options=("--config", f"/{CONFIGURATION}"),
    ),
    Case(
        "a drop-in that takes the place of all others before containerd 2.0",
        None,
        both(
            changed(CONTAINERD, "version = 3", 'version = 2\nimports = ["conf.d/*"]'),
            lambda node: node.write(
                "etc/containerd/conf.d/99-nvidia.toml",
                "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n",
            ),
        ),
        "before containerd 2.0 the CRI table of /etc/containerd/conf.d/99-nvidia.toml replaces "
        "all others, so",
        "also define kata-vfio in /etc/containerd/conf.d/99-nvidia.toml",
        is_certain=False,
    ),
    Case(
        "a configuration that does not exist",
        None,
        lambda node: (node.root / CONFIGURATION).unlink(),
        "does not exist, but /etc/containerd/config.toml names it for kata-vfio",
        f"vfiomgr kata config --whole BASE --output /{CONFIGURATION}",
        is_silent=False,
    ),
    Case(
        "a configuration that is no TOML",
        None,
        lambda node: node.write(CONFIGURATION, "a = 1\nb = [\n\n"),
        f"/{CONFIGURATION}:2: not valid TOML",
        "correct it",
        is_silent=False,
    ),
    Case(
        "no port for devices",
        None,
        changed(CONFIGURATION, '"root-port"', '"no-port"'),
        "sets cold_plug_vfio = no-port: devices are not plugged into the guest",
        "set cold_plug_vfio = root-port",
    ),
    Case(
        "both plugs",
        None,
        changed(CONFIGURATION, "machine_type", 'hot_plug_vfio = "root-port"\nmachine_type'),
        "cold_plug_vfio and hot_plug_vfio in [hypervisor.qemu] are both set",
        'write hot_plug_vfio = "no-port"',
        runtime="go",
        is_silent=False,
    ),
    Case(
        "a port that runtime-rs has not",
        None,
        changed(CONFIGURATION, '"root-port"', '"bridge-port"'),
        "cold_plug_vfio in [hypervisor.qemu] is 'bridge-port'",
        "write one of no-port, root-port",
        is_silent=False,
    ),
    Case(
        "a runtime-rs without cold plug",
        None,
        lambda _node: None,
        "Kata 3.24.0 (runtime-rs) does not support cold_plug_vfio (added in 3.31",
        "remove it, or use Kata 3.31.0 or later, or its other runtime",
        options=("--kata-version", "3.24"),
        is_certain=False,
    ),
    Case(
        "a key of the agent that runtime-rs refuses",
        None,
        lambda node: node.write(
            CONFIGURATION, (node.root / CONFIGURATION).read_text() + "[agent.kata]\nnix = 1\n"
        ),
        "does not know nix in [agent.kata]: runtime-rs refuses the entire configuration",
        "remove it",
        is_silent=False,
    ),
    Case(
        "a guest that is larger than its host",
        None,
        changed(CONFIGURATION, "default_memory = 8192", "default_memory = 819200"),
        "is larger than the host, which has 65536 MiB: VFIO pins all memory of a guest",
        "lower default_memory",
        is_silent=False,
    ),
    Case(
        "an overhead without room for QEMU",
        9,
        changed("pod", "10240Mi", "8200Mi"),
        "is 8200Mi, little more than default_memory (8192 MiB)",
        "set overhead.podFixed.memory to 10240Mi",
        is_certain=False,
    ),
    Case(
        "vfio_mode without an IOMMU",
        None,
        changed(CONFIGURATION, '"guest-kernel"', '"vfio"'),
        "vfio_mode is 'vfio', but enable_iommu in [hypervisor.qemu] is not true",
        'write vfio_mode = "guest-kernel"',
        is_silent=False,
        is_certain=False,
    ),
    Case(
        "no socket of the kubelet",
        None,
        changed(CONFIGURATION, "/var/lib/kubelet/pod-resources/kubelet.sock", ""),
        "pod_resource_api_sock is not set, and no annotation names a device",
        "set pod_resource_api_sock = ",
    ),
    Case(
        "annotations that containerd keeps",
        None,
        both(
            lambda node: annotate(node, "cdi.k8s.io/gpu", f"nvidia.com/pgpu={GROUP}"),
            changed(CONTAINERD, '"cdi.k8s.io/*"', ""),
            changed(CONFIGURATION, "/var/lib/kubelet/pod-resources/kubelet.sock", ""),
        ),
        "containerd does not pass cdi.k8s.io/gpu: pod_annotations of",
        "set pod_annotations",
    ),
    Case(
        "a kind that no specification has",
        None,
        changed(SPECIFICATION, "nvidia.com/pgpu", "nvidia.com/gpu"),
        "but the CDI specifications have none; the node has nvidia.com/gpu (1)",
        "request nvidia.com/gpu, which must also be the resource name of the device plugin",
        is_silent=False,
    ),
    Case(
        "fewer devices than asked for",
        None,
        changed("pod", "pgpu: 1", "pgpu: 3"),
        "the pod requests 3 of nvidia.com/pgpu, but the CDI specifications have 1",
        "request at most 1, or also publish 0000:42:00.0: vfiomgr cdi generate",
        is_silent=False,
    ),
    Case(
        "fewer devices than asked for, and no other",
        None,
        both(
            changed("pod", "pgpu: 1", "pgpu: 3"),
            lambda node: node.publish([GROUP, GROUP + 1]),
        ),
        "the pod requests 3 of nvidia.com/pgpu, but the CDI specifications have 2",
        "request at most 2: no other device is available (vfiomgr list; vfiomgr bind)",
        is_silent=False,
    ),
    Case(
        "no specification at all",
        None,
        lambda node: (node.root / SPECIFICATION).unlink(),
        "the pod requests 1 of nvidia.com/pgpu, but the CDI specifications have none: Kata",
        "vfiomgr cdi generate --kind nvidia.com/pgpu --name-by group --write, when",
        is_silent=False,
    ),
    Case(
        "a node that is no longer there",
        None,
        changed(SPECIFICATION, f"/dev/vfio/{GROUP}", "/dev/vfio/99"),
        "/dev/vfio/99 belongs to no device of this host",
        "vfiomgr groups shows the groups",
        is_silent=False,
    ),
    Case(
        "a cdev for a Kata that knows none",
        None,
        changed(SPECIFICATION, f"/dev/vfio/{GROUP}", "/dev/vfio/devices/vfio0"),
        "/dev/vfio/devices/vfio0 is an iommufd device node, which Kata 3.2.0 (Go runtime) does "
        "not support",
        "use the group instead (",
        runtime="go",
        is_silent=False,
        options=("--kata-version", "3.2"),
    ),
    Case(
        "a group for a confidential guest",
        None,
        changed(CONFIGURATION, "machine_type", "confidential_guest = true\nmachine_type"),
        f"the Go runtime does not accept group /dev/vfio/{GROUP} for confidential guests",
        "use the device node instead (",
        runtime="go",
        is_silent=False,
    ),
    Case(
        "one group under two names",
        None,
        second_file("etc/cdi/b.json", kind="b.io/gpu"),
        f"/dev/vfio/{GROUP} is published under 2 names",
        "publish each group under one name",
        is_silent=False,
        is_certain=False,
    ),
]
