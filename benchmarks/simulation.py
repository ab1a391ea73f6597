"""Pods on a cluster of nodes with vGPUs: `vfiomgr node simulate`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import seconds
from benchmarks.table import Row
from tests.fakes.vgpu_trees import make_vgpu_tree
from tests.lab.command import VFIOMGR
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.source import HostSource

_NODES, _PODS = 1000, 10_000
_BUDGET = 60.0
"""Seconds."""
_OBJECTS = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: vgpu.vfiomgr.io
          selectors:
          - cel:
              expression: |
                device.capacity["vfiomgr.io"].memory.compareTo(quantity("{memory}Gi")) >= 0
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {replicas}
  template:
    spec:
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: {name}}}]
      containers: [{{name: guest, resources: {{claims: [{{name: gpu}}]}}}}]
"""
_MEMORY = (1, 2, 4, 8)
"""The least memory of the vGPUs, in GiB; each has an equal part of the pods."""


def measure(place: str | None) -> list[Row]:
    """The time of the command, for nodes with eight GPUs of twenty types each."""
    with tempfile.TemporaryDirectory(prefix="vfiomgr-bench-", dir=place) as directory:
        tree = f"{directory}/host"
        make_vgpu_tree(tree, gpus=8, vfs=32, types=20)
        source = HostSource()
        source.root = tree
        snapshot = Path(directory, "node.json")
        snapshot.write_text(write_snapshot(source.scan()))
        pods = Path(directory, "pods.yaml")
        parts = (
            _OBJECTS.format(name=f"m{memory}", memory=memory, replicas=_PODS // len(_MEMORY))
            for memory in _MEMORY
        )
        pods.write_text("---\n".join(parts))
        spent = seconds((VFIOMGR, "node", "simulate", f"{snapshot}={_NODES}", f"--pods={pods}"))
    what = f"node simulate, {_NODES} nodes with 8 GPUs, {_PODS} pods"
    return [Row(what, spent, "at most", _BUDGET, 1.0)]
