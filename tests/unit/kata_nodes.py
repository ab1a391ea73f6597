"""A node of a cluster on which all is right for Kata, as files; tests change a file or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fakes.kernel import FakeKernel
from tests.unit.host_files import put_topology
from vfiomgr.pci.memory import HostTopology, NumaNode

if TYPE_CHECKING:
    from collections.abc import Iterable

KIND = "nvidia.com/pgpu"
GROUP = 40
"""Of the first GPU."""
CONTAINERD = "etc/containerd/config.toml"
CONFIGURATION = "etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"
DROP_INS = "etc/kata-containers/vfiomgr/kata-vfio/config.d"
SPECIFICATION = "etc/cdi/vfiomgr.json"
BUILD = "opt/kata/share/kata-containers"
SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
KUBELET = "var/lib/kubelet/config.yaml"
SHIMS = {
    "go": "/opt/kata/bin/containerd-shim-kata-v2",
    "rs": "/opt/kata/runtime-rs/bin/containerd-shim-kata-v2",
}

HANDLER = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata-vfio]
  runtime_type = "io.containerd.kata-vfio.v2"
  runtime_path = "{shim}"
  privileged_without_host_devices = true
  pod_annotations = ["io.katacontainers.*", "cdi.k8s.io/*"]
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata-vfio.options]
    ConfigPath = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"
"""
CRIO = """\
[crio.runtime.runtimes.kata-vfio]
runtime_path = "{shim}"
runtime_type = "vm"
runtime_config_path = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"
privileged_without_host_devices = true
"""
SETTINGS = """\
[hypervisor.qemu]
machine_type = "q35"
cold_plug_vfio = "root-port"
pcie_root_port = 16
kernel = "/opt/kata/share/kata-containers/vmlinux-nvidia-gpu.container"
initrd = "/opt/kata/share/kata-containers/kata-containers-nvidia-gpu.initrd"
default_memory = 8192
kernel_params = "pci=realloc"
enable_annotations = ["^kernel_params$"]
[runtime]
{name}vfio_mode = "guest-kernel"
static_sandbox_resource_mgmt = true
sandbox_cgroup_only = true
pod_resource_api_sock = "/var/lib/kubelet/pod-resources/kubelet.sock"
"""
POD = """\
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: kata-vfio}
handler: kata-vfio
overhead: {podFixed: {memory: "10240Mi", cpu: "1"}}
---
apiVersion: v1
kind: Pod
metadata:
  name: cuda
  annotations: {}
spec:
  runtimeClassName: kata-vfio
  containers:
  - name: main
    image: example
    securityContext: {privileged: false}
    resources: {limits: {nvidia.com/pgpu: 1, memory: 16Gi}}
"""


class KataNode:
    """A tree below a directory; `go` and `rs` have files of their own."""

    def __init__(
        self, directory: Path, runtime: str = "rs", kernel: FakeKernel | None = None
    ) -> None:
        self.kernel = kernel or _kernel(directory / "host")
        self.root = Path(self.kernel.root)
        self.pod = directory / "pod.yaml"
        directory.mkdir(exist_ok=True)
        self.pod.write_text(POD)
        node = NumaNode(0, (0, 1, 2, 3), 64 << 30, 60 << 30, (), (10,))
        put_topology(self.root, HostTopology((node,)))
        shim = SHIMS[runtime]
        name = 'hypervisor_name = "qemu"\n' if runtime == "rs" else ""
        self.write(shim.removeprefix("/"), "\x7fELF")
        self.write("opt/kata/VERSION", "4.1.0\n")
        self.write(f"{BUILD}/vmlinux-nvidia-gpu.container", "kernel")
        self.write(f"{BUILD}/kata-containers-nvidia-gpu.initrd", "initrd")
        self.write(SOCKET, "")
        self.write(CONTAINERD, HANDLER.format(shim=shim))
        self.write(CONFIGURATION, SETTINGS.format(name=name))
        gates = "featureGates: {KubeletPodResourcesGet: true}\n"
        self.write(KUBELET, f"runtimeRequestTimeout: 20m0s\n{gates}")

    def write(self, path: str, text: str) -> None:
        """A file below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def change(self, path: str | Path, old: str, new: str) -> None:
        """Put one text in the place of another, which must be there."""
        place = self.root / path
        text = place.read_text()
        assert old in text
        place.write_text(text.replace(old, new))

    def add_gpus(
        self,
        count: int = 1,
        *,
        driver: str = "vfio-pci",
        vendor: str = "10de",
        domain: int = 0,
        with_audio: bool = False,
    ) -> None:
        """The first GPUs, from 0000:41:00.0 on, in groups of their own, from GROUP on."""
        for number in range(1, count + 1):
            self.add_gpu(number, driver=driver, vendor=vendor, domain=domain, with_audio=with_audio)

    def add_gpu(  # noqa: PLR0913 - each is a fact of its own, with a default
        self,
        number: int,
        *,
        driver: str,
        vendor: str = "10de",
        domain: int = 0,
        with_audio: bool = False,
        numa_node: int = -1,
    ) -> None:
        """The GPU of a number, which counts from 1; its audio function beside it."""
        slot = f"{domain:04x}:{0x40 + number:02x}:00"
        functions = [(".0", "2684", "030200"), (".1", "22ba", "040300")]
        for function, device, class_code in functions[: 2 if with_audio else 1]:
            self.kernel.add_pci(
                slot + function,
                vendor=vendor,
                device=device,
                class_code=class_code,
                group=GROUP + number - 1,
                driver=driver,
                driver_override=driver if "vfio" in driver else None,
                numa_node=numa_node,
            )

    def publish(  # noqa: PLR0913 - as above
        self,
        groups: Iterable[int] = (GROUP,),
        *,
        path: str = SPECIFICATION,
        kind: str = KIND,
        version: str = "0.5.0",
        nodes: Iterable[str] = (),
        names: Iterable[str] = (),
        **extra: object,
    ) -> None:
        """A specification with a device for each group, or for each node."""
        nodes = tuple(nodes) or tuple(f"/dev/vfio/{group}" for group in groups)
        names = tuple(names) or tuple(node.rpartition("/")[2] for node in nodes)
        devices = [
            {"name": name, "containerEdits": {"deviceNodes": [{"path": node}]}}
            for name, node in zip(names, nodes, strict=True)
        ]
        document = {"cdiVersion": version, "kind": kind, "devices": devices, **extra}
        self.write(path, json.dumps(document))


def _kernel(root: Path) -> FakeKernel:
    kernel = FakeKernel(root, has_cdev=True)
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_driver("snd_hda_intel", ids=[("*", "*", "0403")])
    return kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
