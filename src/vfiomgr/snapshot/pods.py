"""The pods of Kata's guests, as container runtimes keep them for their sandboxes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_SANDBOX = re.compile(r"sandbox-([0-9a-f]{12,64})")
"""What Kata has QEMU call its guest: see buildName in virtcontainers/qemu.go."""
_BUNDLES = (
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json",
    "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json",
    "/run/containers/storage/overlay-containers/{}/userdata/config.json",
)
"""The OCI configuration of a sandbox: of containerd, of the one in k3s and RKE2, of CRI-O."""
_ANNOTATIONS = (
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"),
    ("io.kubernetes.cri-o.Namespace", "io.kubernetes.cri-o.KubeName"),
)
"""Where namespace and name of the pod are in it (containerd's and CRI-O's pkg/annotations)."""


def pod_of(tree: HostTree, guest: str | None) -> str | None:
    """The pod of a guest, `namespace/name`; None of other guests, and where no file tells."""
    found = _SANDBOX.fullmatch(guest or "")
    if found is None:
        return None
    texts = (tree.read_text(HostPath(bundle.format(found[1]))) for bundle in _BUNDLES)
    return next((pod for text in texts if text and (pod := _pod_in(text))), None)


def _pod_in(text: str) -> str | None:
    import json  # noqa: PLC0415 - few hosts have pods

    try:
        annotations = json.loads(text)["annotations"]
        for namespace, name in _ANNOTATIONS:
            if name in annotations:
                return f"{annotations[namespace]}/{annotations[name]}"
    except (ValueError, LookupError, TypeError):
        return None  # not what a runtime writes
    return None
