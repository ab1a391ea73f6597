"""Errors in files of pods and claims: the place, and the remedy."""

from __future__ import annotations

import pytest

from tests.unit.node.simulation.made import cel, claim, exactly, pods
from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.kubernetes import template
from vfiomgr.node.simulation.model import Workload
from vfiomgr.node.simulation.objects import CLASSES, Objects, read_simulation
from vfiomgr.node.simulation.selectors import Selectors

CLASS = """\
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: big}
spec:
  selectors: [{cel: {expression: 'device.driver == "vfiomgr.io"'}}]
  extendedResourceName: example.com/big
"""


def read(text: str) -> Objects:
    return read_simulation(text, "f.yaml", Selectors())


def errors(text: str) -> str:
    with pytest.raises(InvalidDocument) as found:
        read(text)
    return "\n".join((found.value.message, *found.value.details))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("{name: a}", "requests[0]: not a request; set either exactly or firstAvailable"),
        ("{name: a, exactlly: {}}", "unknown key 'exactlly'; did you mean exactly?"),
        ("{exactly: {deviceClassName: vfio.vfiomgr.io}}", "the request has no name; add name"),
        (exactly("selector: []"), "exactly: unknown key 'selector'; did you mean selectors?"),
        (exactly("count: 0"), "exactly.count: a request needs at least one device"),
        (exactly("count: two"), "exactly.count: count is not a whole number from 0 to 1000000"),
        (exactly("count: true"), "exactly.count: count is not a whole number"),
        (
            exactly("allocationMode: All, count: 2"),
            "exactly.count: allocationMode All has no count",
        ),
        (exactly("allocationMode: Some"), "allocationMode 'Some' is not one of ExactCount, All"),
        (exactly("adminAccess: 1"), "adminAccess: adminAccess is not true or false"),
        (exactly("", "vfo.vfiomgr.io"), "'vfo.vfiomgr.io'; did you mean vfio.vfiomgr.io?"),
        (
            exactly("", "x"),
            "unknown DeviceClass 'x'; add the DeviceClass to the file, or use vfio.",
        ),
        (exactly("selectors: [{}]"), "selectors[0]: the selector has no CEL expression"),
        (exactly(cel("1 +")), "invalid CEL expression: 1:4: Syntax error"),
        (exactly(cel("devise.driver == 1")), "unknown variable: devise"),
        (exactly(cel("device.driver.foo(1)")), "unknown function: foo"),
        (exactly(cel("device.attributes.?x == 1")), "cannot evaluate cel.bind or optional fields"),
        (exactly("tolerations: [{value: a}]"), "a toleration without a key; add key"),
        (
            exactly("tolerations: [{operator: Exists, value: a}]"),
            "a value with the operator Exists",
        ),
        (exactly("tolerations: [{key: a, effect: No}]"), "effect 'No' is not one of NoSchedule"),
        (exactly("capacity: {requests: {memory: 8Gib}}"), "invalid quantity: '8Gib'"),
        ("{name: a, firstAvailable: [{deviceClassName: vfio.vfiomgr.io}]}", "has no name"),
    ],
)
def test_a_bad_request(request_: str, expected: str) -> None:
    found = errors(claim(f"[{request_}]") + pods())
    assert expected in found
    assert "f.yaml:8:" in found


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("{requests: [gpu]}", "set either matchAttribute or distinctAttribute"),
        ("{matchAttribute: numaNode}", "'numaNode' has no domain; write vfiomgr.io/numaNode"),
        ("{requests: [gpus], matchAttribute: a/b}", "no request 'gpus' in the claim; did you mean"),
        ("{matchAttributes: a/b}", "unknown key 'matchAttributes'; did you mean matchAttribute?"),
    ],
)
def test_a_bad_constraint(constraint: str, expected: str) -> None:
    found = errors(claim(f"[{exactly()}]", constraint) + pods())
    assert expected in found
    assert "f.yaml:9:" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (pods(), "no ResourceClaimTemplate 'gpu' in namespace default; add it to the file"),
        (claim(f"[{exactly()}]", name="gpu1") + pods(), "did you mean gpu1?"),
        (claim("[]") + pods(), "spec.spec.devices: the claim has no requests; add a request"),
        (claim("3") + pods(), "requests is not a list; start items with -"),
        (
            claim("[]").replace("/v1", "/v1beta1") + pods(),
            "unsupported version 'resource.k8s.io/v1b",
        ),
        (CLASS.replace("name: big", "label: x") + pods(), "the DeviceClass has no name"),
        (claim(f"[{exactly()}]") + pods(-1), "replicas is not a whole number from 0"),
        (claim(f"[{exactly()}]") + pods().replace("Deployment", "DaemonSet"), "not simulated"),
        (claim(f"[{exactly()}]") + pods(spec="nodeName: a"), "nodeName bypasses the scheduler"),
        (claim(f"[{exactly()}]"), "f.yaml:1:1: no pod found, only ResourceClaimTemplate"),
        (pods().replace("resourceClaimTemplateName: gpu", ""), "set either resourceClaimName or"),
    ],
)
def test_a_bad_object(text: str, expected: str) -> None:
    assert expected in errors(text)


def test_all_errors_are_reported() -> None:
    found = errors(claim(f"[{exactly('count: 0')}, {exactly('allocationMode: x')}]") + pods())
    assert found.startswith("f.yaml: 2 errors\nf.yaml:8:")


def test_objects_are_in_any_order_and_in_lists() -> None:
    found = read(pods(2) + claim(f"[{exactly('', 'big')}]") + CLASS)
    (workload,) = found.workloads
    assert isinstance(workload, Workload)
    assert workload.replicas == 2
    assert [each.selectors for each in workload.claims[0].spec.requests[0]] == [
        ('device.driver == "vfiomgr.io"',)
    ]
    node = '{"kind": "Node", "metadata": {"name": "a", "labels": {"b": "c"}}}'
    listed = f'{{"kind": "List", "items": [{node}]}}'
    assert read(f"{listed}\n{LIMITS}").labels == {"a": {"b": "c"}}


LIMITS = """\
---
kind: Pod
metadata: {name: a}
spec:
  affinity: {nodeAffinity: {}}
  containers: [{name: a, resources: {limits: {example.com/big: 2}}}]
"""


RULE = """\
---
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {name: out-of-service}
"""
ALLOCATED = """\
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: a}
spec: {devices: {requests: [{name: b, exactly: {deviceClassName: vfio.vfiomgr.io}}]}}
status: {allocation: {devices: {results: [{request: b}]}}}
"""


def test_what_is_not_simulated_is_told() -> None:
    admin = claim(f"[{exactly('adminAccess: true')}]")
    node = "---\n{kind: Node, metadata: {name: n}, spec: {taints: [{key: a}]}}\n"
    urgent = LIMITS.replace("affinity: {nodeAffinity: {}}", "priorityClassName: high")
    assert read(urgent + node).notes == (
        "taints of nodes are not simulated",
        "Pod a: priorityClassName is not simulated",
    )
    assert read(LIMITS + CLASS + RULE + ALLOCATED + admin).notes == (
        "DeviceTaintRule out-of-service is not simulated",
        "ResourceClaim default/a: its allocation is not simulated",
        "request gpu: vfiomgr refuses to prepare claims with adminAccess",
        "Pod a: affinity is not simulated",
    )
    plain = claim(f"[{exactly('adminAccess: false')}]") + CLASS + pods()
    assert read(plain).notes == ()


@pytest.mark.parametrize("name", ["example.com/big", "deviceclass.resource.kubernetes.io/big"])
def test_an_extended_resource_of_a_class_is_a_claim(name: str) -> None:
    (workload,) = read(LIMITS.replace("example.com/big", name) + CLASS).workloads
    (own,) = workload.claims
    assert (own.name, own.shared, workload.limits) == (name, "", ())
    ((request,),) = own.spec.requests
    assert (request.count, request.selectors) == (2, ('device.driver == "vfiomgr.io"',))
    (workload,) = read(LIMITS).workloads
    assert (workload.limits, workload.claims) == ((("example.com/big", 2),), ())


@pytest.mark.parametrize("kind", ["vfio", "vgpu"])
def test_the_known_classes_are_those_that_are_deployed(kind: str) -> None:
    document = template(f"node-agent/dra/deviceclass-{kind}")
    selectors = (each["cel"]["expression"] for each in document["spec"]["selectors"])
    assert CLASSES[document["metadata"]["name"]] == tuple(selectors)
