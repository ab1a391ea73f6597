"""Pools, nodes and objects of simulations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.node.dra.model import Consumption, CounterSet, DraDevice, Pool, Taint, Target
from vfiomgr.node.model import Inventory, NodeResource, NodeUnit
from vfiomgr.node.simulation.objects import read_simulation
from vfiomgr.node.simulation.scheduler import Cluster, Scheduler, template_of
from vfiomgr.node.simulation.selectors import Selectors
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.node.dra.model import AttributeValue
    from vfiomgr.node.simulation.model import SimulationResult
    from vfiomgr.node.simulation.scheduler import NodeTemplate

NODE = "one"
MEMORY, FUNCTIONS = 48 * GIB, 4


def device(
    number: int, *, taints: tuple[Taint, ...] = (), **attributes: AttributeValue
) -> DraDevice:
    """A passthrough device; `numa` stands for the standard attribute."""
    named = {
        "resource.kubernetes.io/numaNode" if k == "numa" else k: v for k, v in attributes.items()
    }
    unit = f"0000:{number:02x}:00.0"
    return DraDevice(
        name=f"pci-0000-{number:02x}-00-0",
        target=Target(unit),
        attributes={"model": "A40", "family": "function", **named},
        capacity={"memory": MEMORY},
        taints=taints,
    )


def plain(*devices: DraDevice) -> Pool:
    """The pool of devices without counters."""
    return Pool(NODE, devices)


def gpu(bus: int, sizes: Iterable[int] = (8, 24)) -> Pool:
    """The pool of a GPU: passthrough, or vGPUs of some sizes in GiB."""
    name = f"gpu-0000-{bus:02x}-00-0"
    every = {"memory": MEMORY, "functions": FUNCTIONS}
    entire = DraDevice(
        f"pci-0000-{bus:02x}-00-0",
        Target(f"0000:{bus:02x}:00.0"),
        {"model": "A40", "family": "function"},
        {"memory": MEMORY},
        (Consumption("gpu", every),),
    )
    parts = tuple(
        DraDevice(
            f"{name}-a40-{size}q-{number}",
            Target(parent=f"0000:{bus:02x}:00.0", type=str(size)),
            {"model": "A40", "family": "mdev", "vgpuType": f"A40-{size}Q"},
            {"memory": size * GIB},
            (Consumption("gpu", {"memory": size * GIB, "functions": 1}),),
        )
        for size in sizes
        for number in range(min(FUNCTIONS, MEMORY // (size * GIB)))
    )
    return Pool(f"{NODE}/{name}", (entire, *parts), (CounterSet("gpu", every),))


def unit(number: int, used_by: str = "") -> NodeUnit:
    """A unit of the device plugin."""
    name = f"0000:{number:02x}:00.0"
    return NodeUnit(name, "function", (), number, (), used_by=used_by)


def template(
    *pools: Pool, units: Iterable[NodeUnit] = (), labels: Mapping[str, str] | None = None
) -> NodeTemplate:
    """A node with these pools, and with units as the resource `vfiomgr.io/A40`."""
    found = tuple(units)
    resources = (NodeResource("vfiomgr.io/A40", found),) if found else ()
    return template_of(lambda _: pools, Inventory(resources), NODE, labels or {})


def cluster(**nodes: NodeTemplate) -> Cluster:
    """A cluster with these nodes."""
    made = Cluster()
    for name, each in nodes.items():
        made.add(each, (name,))
    return made


def simulate(made: Cluster, text: str) -> SimulationResult:
    """Place the pods of a YAML text."""
    selectors = Selectors()
    return Scheduler(made, selectors).place(read_simulation(text, "pods.yaml", selectors).workloads)


def claim(requests: str, constraints: str = "", name: str = "gpu") -> str:
    """A ResourceClaimTemplate; requests and constraints are YAML in one line."""
    return f"""\
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
    devices:
      requests: {requests}
      constraints: [{constraints}]
"""


def pods(count: int = 1, name: str = "guest", spec: str = "", template: str = "gpu") -> str:
    """A Deployment with a claim from a template; `spec` is more of its pods, in one line."""
    return f"""\
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {count}
  template:
    spec:
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: {template}}}]
      containers: [{{name: a, resources: {{claims: [{{name: gpu}}]}}}}]
      {spec}
"""


def exactly(words: str = "", device_class: str = "vfio.vfiomgr.io", name: str = "gpu") -> str:
    """A request; `words` are more of its keys, in YAML in one line."""
    more = f", {words}" if words else ""
    return f"{{name: {name}, exactly: {{deviceClassName: {device_class}{more}}}}}"


def cel(expression: str) -> str:
    """A selector of a request."""
    return f"selectors: [{{cel: {{expression: '{expression}'}}}}]"


def placed(result: SimulationResult) -> list[tuple[str | None, list[str]]]:
    """The node and the devices of each pod."""
    return [(pod.node, [each.device for each in pod.devices]) for pod in result.pods]


def reasons(result: SimulationResult) -> list[str]:
    """The reasons of the pods that are pending, with the numbers of nodes."""
    return [f"{each.count}: {each.text}" for pod in result.pods for each in pod.reasons]
