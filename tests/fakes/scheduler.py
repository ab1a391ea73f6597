"""What the scheduler and the controllers write for a pod with a claim, as other clients do.

Sources: bindingCycle and handleBindingCycleError in pkg/scheduler/schedule_one.go; PreBind and
PostFilter in pkg/scheduler/framework/plugins/dynamicresources; assignPod in
pkg/registry/core/pod/storage (kubernetes/kubernetes 1.36).
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from vfiomgr.node.dra.model import DRIVER

if TYPE_CHECKING:
    from tests.fakes.api_server import ApiServer

_COPIED = ("bindingConditions", "bindingFailureConditions")
"""Fields of a device that are copied to its allocation."""


class Scheduler:
    """Places a pod of the namespace ml with one claim, step by step."""

    def __init__(self, server: ApiServer, node: str) -> None:
        self._server, self._node = server, node

    def create(self, pod: str, claim: str = "gpu", uid: str = "uid-1") -> None:
        """Create a pod, and its claim from a template."""
        self._server.put("resourceclaims", {"metadata": _metadata(claim, uid)})
        self._server.put(
            "pods",
            {
                "metadata": _metadata(pod, f"uid-of-{pod}"),
                "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]},
                "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": claim}]},
            },
        )

    def nominate(self, pod: str, node: str | None = None) -> None:
        """Write the node of a pod before the claims are allocated; "" if that failed."""
        found = self._get("pods", pod)
        found["status"]["nominatedNodeName"] = self._node if node is None else node
        self._server.put("pods", found)

    def allocate(self, device: str, claim: str = "gpu") -> None:
        """Allocate a published device of the pool of the node to a claim."""
        found = self._get("resourceclaims", claim)
        result = {"driver": DRIVER, "pool": self._node, "device": device, "request": "gpu"}
        result |= {name: each for name in _COPIED if (each := self._published(device).get(name))}
        field = {"key": "metadata.name", "operator": "In", "values": [self._node]}
        found["status"] = {
            "allocation": {
                "devices": {"results": [result]},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
            },
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "uid-of-p"}],
        }
        self._server.put("resourceclaims", found)

    def deallocate(self, claim: str = "gpu") -> None:
        """Deallocate a claim."""
        found = self._get("resourceclaims", claim)
        found["status"] = {}
        self._server.put("resourceclaims", found)

    def place(self, pod: str) -> None:
        """Bind a pod to the node."""
        found = self._get("pods", pod)
        found["spec"]["nodeName"] = self._node
        found["status"].pop("nominatedNodeName", None)
        self._server.put("pods", found)

    def conditions(self, claim: str = "gpu") -> dict[str, str]:
        """The messages of the conditions that are true."""
        status = self._get("resourceclaims", claim).get("status") or {}
        return {
            condition["type"]: condition["message"]
            for device in status.get("devices") or ()
            for condition in device["conditions"]
            if condition["status"] == "True"
        }

    def _published(self, device: str) -> dict[str, Any]:
        slices = self._server.objects("resourceslices")
        found = [each for one in slices for each in one["spec"].get("devices") or ()]
        return next((each for each in found if each["name"] == device), {})

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        objects = self._server.objects(kind)
        found = (each for each in objects if each["metadata"]["name"] == name)
        return deepcopy(next(found))


def _metadata(name: str, uid: str) -> dict[str, str]:
    return {"name": name, "namespace": "ml", "uid": uid}
