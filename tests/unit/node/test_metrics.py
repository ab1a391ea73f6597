"""The samples of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.node.made import A40, A40_NAME, AUDIO, SETTINGS, UUID, at, node_of, vgpu_node
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.diagnostic import blocker
from vfiomgr.node import health
from vfiomgr.node.health import HealthContext
from vfiomgr.node.metrics import METRICS, samples
from vfiomgr.node.plan import inventory
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.error_counters import FunctionHealth, HealthFacts
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.metrics.model import Sample
    from vfiomgr.node.model import Inventory
    from vfiomgr.snapshot.model import HostSnapshot

ID = "0000:41:00.0"
HOST = node_of(A40, AUDIO, at(A40, 7))


def values(
    name: str,
    host: HostSnapshot = HOST,
    made: Inventory | None = None,
    facts: HealthFacts | None = None,
) -> list[tuple[dict[str, str], float]]:
    """The labels and values of all samples of a metric."""
    found: list[Sample] = list(samples(host, made or inventory(host, SETTINGS), facts))
    return [(labels, value) for metric, value, labels in found if metric == f"vfiomgr_{name}"]


def test_each_function_is_described() -> None:
    assert values("device")[1] == (
        {
            "address": ID,
            "vendor": "10de",
            "device": "2235",
            "model": "NVIDIA A40",
            "driver": "vfio-pci",
            "iommu_group": "41",
            "numa_node": "0",
        },
        1,
    )
    assert len(values("device")) == 3
    unknown = node_of(replace(A40, numa_node=None))
    assert values("device", unknown)[0][0]["numa_node"] == ""


def test_a_device_is_ready_or_has_its_reasons() -> None:
    unit = inventory(HOST, SETTINGS).units
    reason = health.reset_failed(next(unit), "it did not answer")
    made = inventory(
        node_of(replace(A40, is_responsive=False), AUDIO, at(A40, 7)),
        SETTINGS,
        HealthContext(quarantine={ID: reason}),
    )
    assert values("device_ready", made=made) == [
        ({"address": "0000:07:00.0", "reason": ""}, 1),
        ({"address": ID, "reason": "silent-device"}, 0),
        ({"address": ID, "reason": "reset-failed"}, 0),
    ]
    assert values("device_reset_required", made=made) == [
        ({"address": "0000:07:00.0"}, 0),
        ({"address": ID}, 1),
    ]


@pytest.mark.parametrize(("pod", "container"), [("lab/train", ""), ("lab/train/main", "main")])
def test_the_pod_of_a_device_is_a_label(pod: str, container: str) -> None:
    made = inventory(HOST, SETTINGS, HealthContext(held={ID: pod}))
    assert values("device_allocated", made=made) == [
        (
            {
                "address": ID,
                "resource": A40_NAME,
                "namespace": "lab",
                "pod": "train",
                "container": container,
                "claim": "",
            },
            1,
        )
    ]


@pytest.mark.parametrize(("pods", "pod"), [({}, ""), ({"lab/gpu": "lab/train"}, "train")])
def test_the_claim_of_a_device_is_a_label(pods: dict[str, str], pod: str) -> None:
    made = inventory(HOST, SETTINGS, HealthContext(claims={ID: "lab/gpu"}))
    created = replace(next(iter(made.units)), id="a vGPU", claim="lab/vgpu")
    found = {
        labels["address"]: labels
        for name, _, labels in samples(HOST, made, created=(created,), pods=pods)
        if name == "vfiomgr_device_allocated"
    }
    assert found.keys() == {ID, "a vGPU"}
    shared = {"resource": "", "namespace": "lab", "container": ""}
    assert found[ID] == {"address": ID, **shared, "pod": pod, "claim": "gpu"}
    assert found["a vGPU"] == {"address": "a vGPU", **shared, "pod": "", "claim": "vgpu"}


def test_open_devices_are_known_where_processes_were_read() -> None:
    user = DeviceUser("/dev/vfio/41", 7, "qemu")
    assert values("device_open", with_facts(HOST, users=(user,))) == [
        ({"address": "0000:07:00.0"}, 0),
        ({"address": ID}, 1),
    ]
    assert values("device_open", with_facts(HOST, users=None)) == []


def test_groups_are_viable_or_not() -> None:
    spoilt = node_of(A40, replace(AUDIO, driver="snd_hda_intel", vfio_device=None), at(A40, 7))
    made = inventory(spoilt, SETTINGS, previous=inventory(HOST, SETTINGS))
    assert values("group_viable", spoilt, made) == [
        ({"iommu_group": "7"}, 1),
        ({"iommu_group": "41"}, 0),
    ]


def test_errors_that_are_unknown_have_no_sample() -> None:
    facts = HealthFacts((FunctionHealth(A40.address, 1, None, 30),))
    assert values("aer_errors", facts=facts) == [
        ({"address": ID, "severity": "correctable"}, 30),
        ({"address": ID, "severity": "fatal"}, 1),
    ]
    assert values("aer_errors") == []


def test_links_have_their_width_and_speed() -> None:
    links = (
        PciLink(A40.address, 2.5, 8, 16.0, 16),
        PciLink(at(A40, 9).address, 2.5, 8, 16.0, 16),
        PciLink(at(A40, 7).address, None, None, 16.0, 16),
    )
    host = with_facts(HOST, links=links)
    assert values("link_lanes", host) == [
        ({"address": "0000:07:00.0", "bound": "maximum"}, 16),
        ({"address": ID, "bound": "current"}, 8),
        ({"address": ID, "bound": "maximum"}, 16),
    ]
    assert values("link_transfers_per_second", host)[1] == (
        {"address": ID, "bound": "current"},
        2.5e9,
    )


def test_vgpus_are_counted_by_gpu_and_type() -> None:
    host = vgpu_host((a40_type(4), a40_type(4)), functions=8)
    found = {(d["parent"], d["type"], d["state"]): v for d, v in values("vgpus", host)}
    assert found["0000:01:00.0", "NVIDIA A40-4Q", "active"] == 2
    assert found["0000:01:00.0", "NVIDIA A40-4Q", "available"] == 6
    assert found["0000:01:00.0", "NVIDIA A40-8Q", "available"] == 0


def test_every_metric_is_listed_and_has_help() -> None:
    facts = HealthFacts((FunctionHealth(A40.address, 1, 2, 3),))
    links = (PciLink(A40.address, 2.5, 8, 16.0, 16),)
    function = with_facts(HOST, users=(), links=links)
    vgpu = with_facts(vgpu_node(uuid=UUID), users=())
    known = HealthContext(held={UUID: "lab/train"})
    found = {
        name
        for host in (function, vgpu)
        for name, _, _ in samples(host, inventory(host, SETTINGS, known), facts)
    }
    assert found == METRICS.keys()
    assert all(text.endswith(".") for _, text in METRICS.values())


def test_it_is_unknown_which_devices_need_a_reset_if_the_quarantine_is() -> None:
    reason = blocker("quarantine-unreadable", "", "it cannot be read", "release it")
    made = inventory(HOST, SETTINGS, HealthContext(quarantine={health.EVERY: reason}))
    assert values("device_reset_required", made=made) == []
    assert {labels["reason"] for labels, _ in values("device_ready", made=made)} == {reason.rule}


def test_samples_of_one_metric_have_the_same_labels() -> None:
    host = with_facts(HOST, users=(), links=(PciLink(A40.address, 2.5, 8, 16.0, 16),))
    names: dict[str, set[tuple[str, ...]]] = {}
    for name, _, labels in samples(
        host, inventory(host, SETTINGS, HealthContext(held={ID: "lab/train"}))
    ):
        names.setdefault(name, set()).add(tuple(labels))
    assert all(len(found) == 1 for found in names.values())
