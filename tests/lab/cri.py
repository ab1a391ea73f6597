"""Pods of containerd's CRI plugin, as a kubelet makes them.

Source of the fields: pkg/apis/runtime/v1/api.proto of k8s.io/cri-api; those without use are `_`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from vfiomgr.node.kubelet import package

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SERVICE = "runtime.v1.RuntimeService"
_HOST_NETWORK = 2
"""NamespaceMode NODE: without it a sandbox needs CNI."""
_EXITED = 2
_SECONDS = 300.0
_M = package(
    "runtime.v1",
    {
        "Empty": "",
        "PodSandboxMetadata": "name:string uid:string namespace:string attempt:int32",
        "NamespaceOption": "network:int32",
        "LinuxSandboxSecurityContext": "namespace_options:NamespaceOption",
        "LinuxPodSandboxConfig": "_1:string security_context:LinuxSandboxSecurityContext",
        "PodSandboxConfig": (
            "metadata:PodSandboxMetadata hostname:string log_directory:string _4:Empty _5:Empty "
            "labels:map<string> annotations:map<string> linux:LinuxPodSandboxConfig"
        ),
        "RunPodSandboxRequest": "config:PodSandboxConfig runtime_handler:string",
        "RunPodSandboxResponse": "pod_sandbox_id:string",
        "PodSandboxRequest": "pod_sandbox_id:string",
        "ContainerMetadata": "name:string attempt:int32",
        "ImageSpec": "image:string",
        "CDIDevice": "name:string",
        "ContainerConfig": (
            "metadata:ContainerMetadata image:ImageSpec command:string* args:string* _5:string "
            "_6:Empty _7:Empty _8:Empty _9:Empty annotations:map<string> log_path:string _12:bool "
            "_13:bool _14:bool _15:Empty _16:Empty CDI_devices:CDIDevice*"
        ),
        "CreateContainerRequest": (
            "pod_sandbox_id:string config:ContainerConfig sandbox_config:PodSandboxConfig"
        ),
        "ContainerRequest": "container_id:string",
        "CreateContainerResponse": "container_id:string",
        "ContainerStatus": (
            "_1:string _2:Empty state:int32 _4:int64 _5:int64 _6:int64 exit_code:int32"
        ),
        "ContainerStatusResponse": "status:ContainerStatus",
    },
)


@dataclass
class Pod:
    """A pod with one container; its messages are those of the CRI."""

    address: Path
    logs: Path
    name: str
    _channel: grpc.Channel = field(init=False)
    _id: str = ""

    def __post_init__(self) -> None:
        """Connect to containerd."""
        self._channel = grpc.insecure_channel(f"unix:{self.address}")

    def run(self, image: str, devices: Sequence[str], command: Sequence[str]) -> tuple[int, str]:
        """Run a container with CDI devices to its end: its exit status and its output."""
        metadata = {"name": self.name, "uid": self.name, "namespace": "default"}
        options = {"security_context": {"namespace_options": {"network": _HOST_NETWORK}}}
        sandbox = {"metadata": metadata, "log_directory": str(self.logs), "linux": options}
        request = _M.RunPodSandboxRequest(config=sandbox)
        self._id = self._call("RunPodSandbox", request, _M.RunPodSandboxResponse).pod_sandbox_id
        config = {
            "metadata": {"name": "main"},
            "image": {"image": image},
            "command": command,
            "log_path": "main.log",
            "CDI_devices": [{"name": name} for name in devices],
        }
        request = _M.CreateContainerRequest(
            pod_sandbox_id=self._id, config=config, sandbox_config=sandbox
        )
        made = self._call("CreateContainer", request, _M.CreateContainerResponse)
        one = _M.ContainerRequest(container_id=made.container_id)
        self._call("StartContainer", one, _M.Empty)
        end = time.monotonic() + _SECONDS
        while True:
            status = self._call("ContainerStatus", one, _M.ContainerStatusResponse).status
            if status.state == _EXITED:
                break
            assert time.monotonic() < end, "the container does not end"
            time.sleep(0.5)
        lines = (self.logs / "main.log").read_text().splitlines()
        return status.exit_code, "\n".join(line.split(" ", 3)[3] for line in lines)

    def remove(self) -> None:
        """Stop and remove it."""
        one = _M.PodSandboxRequest(pod_sandbox_id=self._id)
        self._call("StopPodSandbox", one, _M.Empty)
        self._call("RemovePodSandbox", one, _M.Empty)
        self._channel.close()

    def _call(self, method: str, request: Any, response: Any) -> Any:
        stub = self._channel.unary_unary(
            f"/{_SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return stub(request, timeout=_SECONDS)
