"""Requests, selectors, counters, taints and constraints on one node."""

from __future__ import annotations

from tests.unit.node.simulation.made import (
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
)
from vfiomgr.node.dra.model import Taint

VGPU = "vgpu.vfiomgr.io"
DOWN = Taint("vfiomgr.io/link-down", "", "NoSchedule")
A2 = cel('device.attributes["vfiomgr.io"].model == "A2"')
A40 = cel('device.attributes["vfiomgr.io"].model == "A40"')
TYPE_8Q = cel('device.attributes["vfiomgr.io"].vgpuType == "A40-8Q"')
TYPE_24Q = cel('device.attributes["vfiomgr.io"].vgpuType == "A40-24Q"')
LINK = cel('device.attributes["vfiomgr.io"].link > 8')
NUMA = "resource.kubernetes.io/numaNode"
FIRST, SECOND, THIRD = (f"pci-0000-0{number}-00-0" for number in (1, 2, 3))


def test_the_first_device_that_matches_is_chosen() -> None:
    node = template(plain(device(1, model="A2"), device(2), device(3)))
    result = simulate(cluster(one=node), claim(f"[{exactly(A40)}]") + pods(3))
    assert placed(result) == [("one", [SECOND]), ("one", [THIRD]), (None, [])]
    assert reasons(result) == ["1: request gpu: 0 of 2 matching devices free: allocated"]


def test_several_devices_of_a_request() -> None:
    node = template(plain(device(1), device(2), device(3)))
    result = simulate(cluster(one=node), claim(f"[{exactly('count: 2')}]") + pods(2))
    assert placed(result)[0] == ("one", [FIRST, SECOND])
    assert reasons(result) == ["1: request gpu: 1 of 3 matching devices free, 2 needed: allocated"]


def test_all_devices_are_all_that_match_used_ones_too() -> None:
    node = cluster(one=template(plain(device(1), device(2))))
    every = claim(f"[{exactly('allocationMode: All')}]", name="all")
    others = claim(f"[{exactly()}]") + pods()
    assert placed(simulate(node, every + pods(template="all"))) == [("one", [FIRST, SECOND])]
    result = simulate(node, every + others + pods(name="all", template="all"))
    assert placed(result) == [("one", [FIRST]), (None, [])]
    assert reasons(result) == ["1: request gpu: 1 of 2 matching devices free, 2 needed: allocated"]


def test_all_devices_need_at_least_one() -> None:
    text = claim(f"[{exactly(f'allocationMode: All, {A2}')}]") + pods()
    (reason,) = reasons(simulate(cluster(one=template(plain(device(1)))), text))
    assert reason == (
        "1: request gpu: no device of class vfio.vfiomgr.io matches "
        'device.attributes["vfiomgr.io"].model == "A2"'
    )


def test_a_claim_has_at_most_32_devices() -> None:
    node = cluster(one=template(plain(*(device(number) for number in range(1, 40)))))
    every = claim(f"[{exactly('allocationMode: All')}]") + pods()
    assert reasons(simulate(node, every)) == [
        "1: request gpu: 39 devices match; a claim can have 32"
    ]
    two = f"[{exactly('count: 20', name='a')}, {exactly('count: 13', name='b')}]"
    assert placed(simulate(node, claim(two) + pods())) == [(None, [])]
    fits = f"[{exactly('count: 20', name='a')}, {exactly('count: 12', name='b')}]"
    assert len(placed(simulate(node, claim(fits) + pods()))[0][1]) == 32


def test_capacity_is_the_least_of_a_device() -> None:
    node = cluster(one=template(gpu(0x41)))
    small = exactly("capacity: {requests: {memory: 20Gi}}", VGPU)
    assert placed(simulate(node, claim(f"[{small}]") + pods())) == [
        ("one", ["gpu-0000-41-00-0-a40-24q-0"])
    ]
    large = exactly("capacity: {requests: {vfiomgr.io/memory: 25Gi}}", VGPU)
    assert reasons(simulate(node, claim(f"[{large}]") + pods())) == [
        "1: request gpu: no device that matches has 25 GiB vfiomgr.io/memory"
    ]


def test_devices_share_counters() -> None:
    node = cluster(one=template(gpu(0x41)))
    text = claim(f"[{exactly(TYPE_24Q, VGPU)}]") + pods(1)
    text += claim(f"[{exactly(TYPE_8Q, VGPU)}]", name="small") + pods(4, "s", template="small")
    text += claim(f"[{exactly()}]", name="entire") + pods(1, "e", template="entire")
    result = simulate(node, text)
    assert [len(devices) for _, devices in placed(result)] == [1, 1, 1, 1, 0, 0]
    assert reasons(result) == [
        "1: request gpu: 0 of 4 matching devices free: allocated; needs 8 GiB memory, none free",
        "1: request gpu: 0 of 1 matching device free: needs 48 GiB memory, none free",
    ]


def test_passthrough_takes_all_of_a_gpu() -> None:
    node = cluster(one=template(gpu(0x41)))
    text = claim(f"[{exactly()}]") + pods()
    text += claim(f"[{exactly(TYPE_8Q, VGPU)}]", name="small") + pods(1, "s", template="small")
    assert placed(simulate(node, text)) == [("one", ["pci-0000-41-00-0"]), (None, [])]


def test_a_taint_without_effect_needs_no_toleration() -> None:
    taint = Taint("vfiomgr.io/narrow-link", "", "None")
    node = cluster(one=template(plain(device(1, taints=(taint,)))))
    (pod,) = simulate(node, claim(f"[{exactly()}]") + pods()).pods
    assert pod.node == "one"


def test_taints_need_a_toleration() -> None:
    node = cluster(one=template(plain(device(1, taints=(DOWN,)))))
    result = simulate(node, claim(f"[{exactly()}]") + pods())
    assert reasons(result) == [
        "1: request gpu: 0 of 1 matching device free: tainted vfiomgr.io/link-down"
    ]
    for toleration, is_tolerated in (
        ("{operator: Exists}", True),
        ("{key: vfiomgr.io/link-down, operator: Exists, effect: NoSchedule}", True),
        ("{key: vfiomgr.io/link-down, operator: Exists, effect: NoExecute}", False),
        ("{key: vfiomgr.io/link-down}", True),
        ("{key: vfiomgr.io/link-down, value: x}", False),
        ("{key: other, operator: Exists}", False),
    ):
        request = exactly(f"tolerations: [{toleration}]")
        (pod,) = simulate(node, claim(f"[{request}]") + pods()).pods
        assert (pod.node == "one") is is_tolerated, toleration


def test_alternatives_are_tried_in_order() -> None:
    node = cluster(one=template(gpu(0x41)))
    first = f"{{name: large, deviceClassName: {VGPU}, {TYPE_24Q}}}"
    second = f"{{name: small, deviceClassName: {VGPU}, {TYPE_8Q}}}"
    text = claim(f"[{{name: gpu, firstAvailable: [{first}, {second}]}}]") + pods(3)
    result = simulate(node, text)
    assert [[each.request for each in pod.devices] for pod in result.pods] == [
        ["gpu/large"],
        ["gpu/large"],
        [],
    ]
    text = (
        claim(f"[{exactly(TYPE_8Q, VGPU)}]", name="other") + pods(1, "o", template="other") + text
    )
    result = simulate(node, text)
    assert [[each.request for each in pod.devices] for pod in result.pods] == [
        ["gpu"],
        ["gpu/large"],
        ["gpu/small"],
        ["gpu/small"],
    ]


def test_match_attribute_is_found_by_backtracking() -> None:
    node = template(plain(device(1, numa=0), device(2, numa=1), device(3, numa=1)))
    text = claim(f"[{exactly('count: 2')}]", f"{{matchAttribute: {NUMA}}}") + pods(2)
    result = simulate(cluster(one=node), text)
    assert placed(result) == [("one", [SECOND, THIRD]), (None, [])]
    node = template(plain(device(1, numa=0), device(2, numa=1), device(3)))
    (reason,) = reasons(simulate(cluster(one=node), text.replace("replicas: 2", "replicas: 1")))
    assert reason == f"1: claim gpu: no free devices satisfy matchAttribute {NUMA}"


def test_a_device_without_the_attribute_satisfies_no_constraint() -> None:
    node = cluster(one=template(plain(device(1), device(2, numa=0))))
    for kind in ("matchAttribute", "distinctAttribute"):
        text = claim(f"[{exactly()}]", f"{{{kind}: {NUMA}}}") + pods(2)
        assert placed(simulate(node, text)) == [("one", [SECOND]), (None, [])]


def test_distinct_attribute() -> None:
    node = template(plain(device(1, numa=0), device(2, numa=0), device(3, numa=1)))
    text = claim(f"[{exactly('count: 2')}]", f"{{distinctAttribute: {NUMA}}}") + pods()
    assert placed(simulate(cluster(one=node), text)) == [("one", [FIRST, THIRD])]


def test_a_constraint_is_for_the_requests_that_it_names() -> None:
    node = template(plain(device(1, numa=0), device(2, numa=1), device(3, numa=1)))
    requests = f"[{exactly(name='a')}, {exactly(name='b')}, {exactly(name='c')}]"
    match = f"{{requests: [b, c], matchAttribute: {NUMA}}}"
    assert placed(simulate(cluster(one=node), claim(requests, match) + pods())) == [
        ("one", [FIRST, SECOND, THIRD])
    ]
    match = f"{{requests: [a, b], matchAttribute: {NUMA}}}"
    assert placed(simulate(cluster(one=node), claim(requests, match) + pods())) == [
        ("one", [SECOND, THIRD, FIRST])
    ]


def test_values_of_different_types_differ() -> None:
    node = template(plain(device(1, flag=1), device(2, flag=True)))
    match = "{matchAttribute: vfiomgr.io/flag}"
    text = claim(f"[{exactly('count: 2')}]", match) + pods()
    assert placed(simulate(cluster(one=node), text)) == [(None, [])]


def test_a_request_can_leave_too_little_for_the_next() -> None:
    node = template(plain(device(1), device(2, model="A2")))
    text = claim(f"[{exactly(name='any')}, {exactly(A40, name='a40')}]") + pods()
    assert placed(simulate(cluster(one=node), text)) == [("one", [SECOND, FIRST])]
    text = claim(f"[{exactly(A40, name='a')}, {exactly(A40, name='b')}]") + pods()
    assert reasons(simulate(cluster(one=node), text)) == [
        "1: claim gpu: too few devices are free for all of them at once"
    ]


def test_a_selector_that_fails_keeps_the_pod_from_all_nodes() -> None:
    made = cluster(one=template(plain(device(1))), two=template(plain(device(1, link=16))))
    text = claim(f"[{exactly(LINK)}]") + pods()
    (reason,) = reasons(simulate(made, text))
    assert "fails on pci-0000-01-00-0: no such key: link" in reason


def test_a_search_with_too_many_combinations_ends() -> None:
    devices = (device(number, numa=number // 3) for number in range(33))
    text = claim(f"[{exactly('count: 12')}]", f"{{distinctAttribute: {NUMA}}}") + pods()
    assert reasons(simulate(cluster(one=template(plain(*devices))), text)) == [
        "1: no solution found in 100000 steps"
    ]
