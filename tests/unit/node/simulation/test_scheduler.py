"""Which node a pod is placed on, and why it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.node.simulation.made import (
    FUNCTIONS,
    MEMORY,
    cel,
    claim,
    cluster,
    device,
    exactly,
    gpu,
    placed,
    plain,
    pods,
    reasons,
    simulate,
    template,
    unit,
)
from vfiomgr.node.dra.model import Consumption, CounterSet, DraDevice, Pool, Target
from vfiomgr.node.model import Inventory
from vfiomgr.node.simulation.model import NodeUse
from vfiomgr.node.simulation.scheduler import Cluster, template_of
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from vfiomgr.node.dra.model import AttributeValue
    from vfiomgr.node.simulation.scheduler import NodeTemplate

VGPU = "vgpu.vfiomgr.io"
ANY = claim(f"[{exactly()}]")
LIMIT = """\
---
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec:
  containers: [{name: a, resources: {limits: {vfiomgr.io/A40: 2, cpu: 4}}}]
"""


def nodes_of(text: str, made: Cluster) -> list[str | None]:
    return [node for node, _ in placed(simulate(made, text))]


def test_the_node_with_the_fewest_free_devices_that_fit_is_chosen() -> None:
    made = cluster(
        large=template(plain(*(device(number) for number in range(4)))),
        small=template(plain(device(1), device(2))),
        other=template(plain(device(1), device(2))),
    )
    assert nodes_of(ANY + pods(5), made) == ["small", "small", "other", "other", "large"]
    assert nodes_of(claim(f"[{exactly('count: 3')}]") + pods(2), made) == ["large", None]


def test_the_number_of_nodes_that_fit_is_told() -> None:
    made = cluster(one=template(plain(device(1))))
    made.add(template(plain(device(1))), ("two", "three"))
    assert [pod.fits for pod in simulate(made, ANY + pods(4)).pods] == [3, 2, 1, 0]


def test_reasons_are_grouped_with_the_most_frequent_first() -> None:
    made = cluster(one=template(plain(device(1))))
    made.add(template(plain()), ("a", "b", "c", "d"))
    (pending,) = simulate(made, claim(f"[{exactly('count: 2')}]") + pods()).pods
    assert [(each.count, each.text, each.nodes) for each in pending.reasons] == [
        (4, "request gpu: the node has no devices", ("a", "b", "c")),
        (1, _ONLY_ONE, ("one",)),
    ]


_ONLY_ONE = (
    "request gpu: only 1 of 2 devices of class vfio.vfiomgr.io matches "
    'device.driver == "vfiomgr.io" && device.attributes["vfiomgr.io"].family == "function"'
)


def test_a_node_selector_is_for_labels_and_for_the_host_name() -> None:
    made = cluster(
        one=template(plain(device(1))), two=template(plain(device(1)), labels={"a": "b"})
    )
    assert nodes_of(ANY + pods(2, spec="nodeSelector: {a: b}"), made) == ["two", None]
    name = pods(spec="nodeSelector: {kubernetes.io/hostname: two, kubernetes.io/os: linux}")
    assert nodes_of(ANY + name, made) == ["two"]
    result = simulate(made, ANY + pods(spec="nodeSelector: {kubernetes.io/hostname: three}"))
    assert reasons(result) == ["2: the host name does not match the node selector"]
    result = simulate(made, ANY + pods(spec="nodeSelector: {a: c}"))
    assert reasons(result) == ["2: the labels do not match the node selector"]


def test_pods_share_a_claim_on_its_node() -> None:
    made = cluster(one=template(plain(device(1))), two=template(plain(device(1), device(2))))
    shared = ANY.replace("kind: ResourceClaimTemplate", "kind: ResourceClaim")
    shared = shared.replace("  spec:\n    devices", "    devices")
    text = pods(3).replace("resourceClaimTemplateName", "resourceClaimName")
    result = simulate(made, shared + text)
    assert [(pod.node, len(pod.devices)) for pod in result.pods] == [
        ("one", 1),
        ("one", 0),
        ("one", 0),
    ]
    assert [use.devices for use in result.nodes] == [1, 0]
    both = "[{name: gpu, resourceClaimName: gpu}, {name: own, resourceClaimTemplateName: own}]"
    text += claim(f"[{exactly()}]", name="own") + pods(name="both").replace(
        "[{name: gpu, resourceClaimTemplateName: gpu}]", both
    )
    assert reasons(simulate(made, shared + text)) == [
        "1: request gpu: 0 of 1 matching device free: allocated",
        "1: a claim of the pod is allocated on another node",
    ]


def test_limits_are_for_healthy_units_of_the_device_plugin() -> None:
    node = template(units=(unit(1), unit(2, used_by="lab/other"), unit(3), unit(4)))
    result = simulate(cluster(none=template(), one=node), LIMIT)
    (pod,) = result.pods
    assert pod.node == "one"
    assert [each.unit for each in pod.units] == ["0000:01:00.0", "0000:03:00.0"]
    assert result.nodes[1] == NodeUse("one", pods=1, devices=2, before=1, free=1)
    text = LIMIT + LIMIT.replace("name: plain", "name: second")
    assert reasons(simulate(cluster(none=template(), one=node), text)) == [
        "1: the node does not offer vfiomgr.io/A40",
        "1: vfiomgr.io/A40: 2 needed, 1 of 4 free",
    ]


def test_a_device_is_not_given_by_the_plugin_and_by_a_claim() -> None:
    node = template(plain(device(1), device(2), device(3)), units=(unit(1), unit(2), unit(3)))
    result = simulate(cluster(one=node), ANY + pods() + LIMIT + pods(name="last"))
    assert [pod.node for pod in result.pods] == ["one", "one", None]
    assert [each.unit for each in result.pods[1].units] == ["0000:02:00.0", "0000:03:00.0"]


def test_the_plugin_gives_no_gpu_that_has_vgpus() -> None:
    node = template(gpu(0x41), gpu(0x42), units=(unit(0x41), unit(0x42)))
    text = claim(f"[{exactly('', VGPU)}]") + pods() + LIMIT
    assert reasons(simulate(cluster(one=node), text)) == [
        "1: vfiomgr.io/A40: 2 needed, 1 of 2 free"
    ]


def test_what_is_published_can_change_with_what_is_allocated() -> None:
    """A GPU with vGPUs of one size only publishes other devices once the size is decided."""
    undecided, decided = gpu(0x41, (8, 24)), gpu(0x41, (24,))
    made = template_of(
        lambda allocated: (decided if allocated else undecided,), Inventory(), "one", {}
    )
    large, small = (
        exactly(cel(f'device.attributes["vfiomgr.io"].vgpuType == "A40-{size}Q"'), VGPU)
        for size in (24, 8)
    )
    text = claim(f"[{large}]") + pods() + claim(f"[{small}]", name="s") + pods(template="s")
    (reason,) = reasons(simulate(cluster(one=made), text))
    assert "no device of class vgpu.vfiomgr.io matches" in reason


def test_free_devices_are_those_that_can_be_allocated_at_once() -> None:
    made = cluster(one=template(gpu(0x41), plain(device(1), device(2)), units=(unit(9),)))
    small = cel('device.attributes["vfiomgr.io"].vgpuType == "A40-24Q"')
    text = ANY + pods() + claim(f"[{exactly(small, VGPU)}]", name="s") + pods(2, "s", template="s")
    before, after = ANY + pods(0), text
    assert [simulate(made, each).nodes[0].free for each in (before, after)] == [7, 2]


@pytest.mark.parametrize(
    ("nodes", "devices", "before", "count"),
    [
        pytest.param(1, 10, 0, 10, id="SchedulingWithResourceClaimTemplate/fast"),
        pytest.param(
            100, 20, 1000, 1000, id="SchedulingWithResourceClaimTemplate/2000pods_100nodes"
        ),
        pytest.param(100, 10, 990, 10, id="SteadyStateClusterResourceClaimTemplate/full_100nodes"),
    ],
)
def test_nodes_are_filled_completely(nodes: int, devices: int, before: int, count: int) -> None:
    """Workloads in test/integration/scheduler_perf/dra/performance-config.yaml of Kubernetes."""
    made = Cluster()
    node = template(plain(*(device(number) for number in range(devices))))
    made.add(node, (f"scheduler-perf-dra-{number}" for number in range(nodes)))
    result = simulate(made, ANY + pods(before, "init") + pods(count + 1, "test"))
    assert [pod.pod for pod in result.pods if pod.node is None] == [f"default/test-{count + 1}"]
    assert sum(node.free for node in result.nodes) == 0


@pytest.mark.parametrize("name", ["example.com/a", "deviceclass.resource.kubernetes.io/a"])
def test_an_extended_resource_gets_a_device_of_its_class(name: str) -> None:
    """As testExtendedResource in test/integration/dra/extendedresource.go of Kubernetes."""
    own = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: a}\n"
    own += "spec: {extendedResourceName: example.com/a, selectors: [{cel: {expression: 'true'}}]}\n"
    limit = LIMIT.replace("vfiomgr.io/A40: 2", f"{name}: 1")
    made = cluster(none=template(), worker=template(plain(device(1))))
    result = simulate(made, own + limit + limit.replace("plain", "second"))
    assert placed(result) == [("worker", ["pci-0000-01-00-0"]), (None, [])]
    assert result.pods[0].devices[0].claim == name


def test_groups_keep_sizes_apart() -> None:
    """IncompatibleRejectedCompatibleAdmitted in test/integration/dra/compatibility_groups.go."""
    made = cluster(
        apart=template(_grouped("mig", "vgpu")), together=template(_grouped("mig", "mig"))
    )
    result = simulate(made, claim(f"[{exactly('count: 2')}]") + pods(2))
    assert [pod.node for pod in result.pods] == ["together", None]
    assert "1: claim gpu: too few devices are free for all of them at once" in reasons(result)
    one = simulate(cluster(apart=template(_grouped("mig", "vgpu"))), ANY + pods(2))
    assert reasons(one) == [
        "1: request gpu: 0 of 2 matching devices free: allocated; its GPU has vGPUs of another size"
    ]


def _grouped(*groups: str) -> Pool:
    """A GPU with room for two devices, each with a group."""
    attributes: dict[str, AttributeValue] = {"family": "function"}
    devices = tuple(
        DraDevice(f"dev-{n}", Target(), attributes, {}, (Consumption("gpu", {"mem": 4}, (each,)),))
        for n, each in enumerate(groups)
    )
    return Pool("one/gpu", devices, (CounterSet("gpu", {"mem": 8}),))


MODELS = cluster(
    **{f"n{number}": template(plain(device(1, model=f"m{number}"))) for number in "1234"}
)


def test_nodes_with_better_alternatives_come_first() -> None:
    """SingleClaim and multi-claim of testPrioritizedListScoring in test/integration/dra."""
    assert nodes_of(claim(f"[{_first('3', '1', '2')}]") + pods(4), MODELS) == [
        "n3",
        "n1",
        "n2",
        None,
    ]
    both = "[{name: a, resourceClaimTemplateName: a}, {name: b, resourceClaimTemplateName: b}]"
    two = template(plain(device(1, model="m1"), device(2, model="m1")))
    made = cluster(**{f"n{n}": _pair(f"m{n}") for n in "123"}, other=two)
    text = claim(f"[{_first('1', '2', '3')}]", name="a") + claim(
        f"[{_first('2', '3', '1')}]", name="b"
    )
    text += (
        pods()
        .replace("[{name: gpu, resourceClaimTemplateName: gpu}]", both)
        .replace("claims: [{name: gpu}]", "claims: [{name: a}, {name: b}]")
    )
    assert nodes_of(text, made) == ["n2"]


def _pair(model: str) -> NodeTemplate:
    return template(plain(device(1, model=model), device(2, model=model)))


def _first(*models: str) -> str:
    """A request for the first of some models."""
    selectors = [cel(f'device.attributes["vfiomgr.io"].model == "m{each}"') for each in models]
    parts = (
        f"{{name: m{number}, deviceClassName: vfio.vfiomgr.io, {selector}}}"
        for number, selector in enumerate(selectors)
    )
    return f"{{name: gpu, firstAvailable: [{', '.join(parts)}]}}"


REQUESTS = st.sampled_from(
    (
        exactly(),
        exactly("count: 2"),
        exactly("", VGPU),
        exactly("capacity: {requests: {memory: 20Gi}}", VGPU),
        exactly("count: 3", VGPU),
        exactly("allocationMode: All", VGPU),
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.integers(1, 6)), min_size=1, max_size=5))
def test_no_device_is_given_twice_and_no_counter_is_oversold(asked: list[tuple[str, int]]) -> None:
    made = cluster(one=template(gpu(0x41), gpu(0x42), plain(device(1))), two=template(gpu(0x41)))
    text = ""
    for number, (request, count) in enumerate(asked):
        text += claim(f"[{request}]", name=f"c{number}")
        text += pods(count, f"p{number}", template=f"c{number}")
    result = simulate(made, text)
    given_ = [(each.pool, each.device) for pod in result.pods for each in pod.devices]
    assert len(given_) == len(set(given_))
    by_gpu: dict[str, list[str]] = {}
    for pool, name in given_:
        by_gpu.setdefault(pool, []).append(name)
    for pool, names in by_gpu.items():
        if "/" in pool:
            vgpus = [
                int(name.split("-a40-")[1].partition("q")[0]) for name in names if "-a40-" in name
            ]
            entire = len(names) - len(vgpus)
            assert entire * MEMORY + sum(vgpus) * GIB <= MEMORY
            assert entire * FUNCTIONS + len(vgpus) <= FUNCTIONS
    assert sum(use.devices for use in result.nodes) == len(given_)
    assert sum(use.pods for use in result.nodes) + result.pending == len(result.pods)


def test_reasons_are_those_at_the_time_of_each_pod() -> None:
    made = cluster(one=template(plain(*(device(number) for number in range(4)))))
    text = "".join(claim(f"[{exactly(f'count: {n}')}]", name=f"c{n}") for n in (1, 2, 3))
    order = (3, 2, 2, 1, 2)
    text += "".join(pods(1, f"p{place}", template=f"c{n}") for place, n in enumerate(order))
    assert reasons(simulate(made, text)) == [
        "1: request gpu: 1 of 4 matching devices free, 2 needed: allocated",
        "1: request gpu: 1 of 4 matching devices free, 2 needed: allocated",
        "1: request gpu: 0 of 4 matching devices free, 2 needed: allocated",
    ]
