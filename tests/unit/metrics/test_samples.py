"""The samples of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as textfile

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.node.made import A40, AUDIO, SETTINGS, at, node_of
from tests.unit.vgpus import A40_TYPES, a40_type, vgpu_host
from vfiomgr.diagnostic import blocker, finding
from vfiomgr.metrics.facts import known_devices
from vfiomgr.metrics.model import (
    METRICS,
    SHARED_METRICS,
    CheckFacts,
    LayoutState,
    UnitResult,
)
from vfiomgr.metrics.render import render_openmetrics, render_textfile
from vfiomgr.metrics.samples import check_samples, measured_devices
from vfiomgr.node.metrics import METRICS as AGENT_METRICS
from vfiomgr.node.metrics import samples as agent_samples
from vfiomgr.node.plan import inventory
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.error_counters import FunctionHealth, HealthFacts
from vfiomgr.pci.model import PciAddress
from vfiomgr.rules.runner import Report
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device()
PORT = PciAddress.parse("0000:00:01.0")
NOTHING = CheckFacts(Report((), ()))
EVERYTHING = CheckFacts(
    Report.of([blocker("iommu", "", "it is off")], (), ("the log: not readable",)),
    HealthFacts((FunctionHealth(A40.address, 1, 2, 3),)),
    tuple(known_devices([A40])),
    LayoutState("lab", 2),
    (UnitResult("vfiomgr-layout", "exit-code", has_failed=True),),
)
HOST = with_facts(
    node_of(A40, AUDIO, at(A40, 7)), users=(), links=(PciLink(A40.address, 2.5, 8, 16.0, 16),)
)


def values(
    name: str, host: HostSnapshot, facts: CheckFacts = NOTHING
) -> list[tuple[dict[str, str], float]]:
    """The labels and values of all samples of a metric."""
    found = check_samples(host, facts)
    return [(labels, value) for metric, value, labels in found if metric == f"vfiomgr_{name}"]


def states(host: HostSnapshot) -> dict[str, float]:
    """The number of A40 in each state."""
    found = values("devices", host)
    return {one["state"]: value for one, value in found if one["model"] == A40.short_name}


def test_devices_are_counted_by_model_and_state_with_those_that_none_is_in() -> None:
    assert states(HOST) == {"host": 0, "in-use": 0, "no-driver": 0, "vfio": 2, "vgpu": 0}
    user = DeviceUser("/dev/vfio/41", 7, "qemu-system-x86", guest="win")
    assert states(with_facts(HOST, users=(user,)))["in-use"] == 1
    models = {labels["model"] for labels, _ in values("devices", HOST)}
    assert models == {A40.short_name, AUDIO.short_name}


def test_without_processes_the_states_that_they_tell_apart_have_no_sample() -> None:
    unknown = with_facts(HOST, users=None)
    assert states(unknown) == {"host": 0, "no-driver": 0, "vgpu": 0}
    assert values("device_assigned", unknown) == []


def test_the_guest_of_a_device_is_a_label_and_a_free_one_has_none() -> None:
    user = DeviceUser("/dev/vfio/41", 7, "qemu-system-x86", guest="win")
    assert values("device_assigned", with_facts(HOST, users=(user,))) == [
        ({"address": "0000:07:00.0", "guest": ""}, 0),
        ({"address": "0000:41:00.0", "guest": "win"}, 1),
        ({"address": "0000:41:00.1", "guest": "win"}, 1),
    ]
    other = replace(user, guest=None)
    found = values("device_assigned", with_facts(HOST, users=(other,)))
    assert [labels["guest"] for labels, _ in found] == ["", *["qemu-system-x86"] * 2]


def test_virtual_functions_on_host_drivers_are_not_listed() -> None:
    function = replace(GPU, address=PciAddress.parse("0000:04:00.4"), physical_function=GPU.address)
    disk = replace(
        GPU, address=PciAddress.parse("0000:05:00.0"), class_code="010802", driver="nvme"
    )
    host = host_of(GPU, function, disk)
    assert measured_devices(host) == [GPU]
    taken = replace(function, driver="vfio-pci")
    assert measured_devices(host_of(GPU, taken, disk)) == [GPU, taken]


@pytest.mark.parametrize(
    ("port", "lanes", "transfers"),
    [
        (PciLink(PORT, 8.0, 8, 8.0, 16), 8, 8.0e9),
        (PciLink(PORT, 8.0, 8, None, 16), 8, None),
        (None, None, None),
    ],
)
def test_a_link_has_what_both_ends_can_have(
    port: PciLink | None, lanes: int | None, transfers: float | None
) -> None:
    own = PciLink(GPU.address, 2.5, 4, 16.0, 8)
    host = with_facts(host_of(GPU), links=tuple(filter(None, (port, own))))
    assert [
        next((v for labels, v in values(name, host) if labels["bound"] == "possible"), None)
        for name in ("link_lanes", "link_transfers_per_second")
    ] == [lanes, transfers]


@pytest.mark.parametrize(("driver", "is_known"), [("vfio-pci", True), ("amdgpu", False)])
def test_a_link_whose_driver_saves_lanes_has_no_possible_ones(
    driver: str, *, is_known: bool
) -> None:
    links = (PciLink(PORT, 8.0, 8, 8.0, 16), PciLink(GPU.address, 2.5, 4, 16.0, 8))
    host = with_facts(host_of(replace(GPU, driver=driver)), links=links)
    bounds = {labels["bound"] for labels, _ in values("link_lanes", host)}
    assert ("possible" in bounds) is is_known
    assert {"current", "maximum"} <= bounds


def test_the_ports_above_a_device_have_their_errors() -> None:
    port = replace(GPU, address=PORT, class_code="060400", header_type=1, driver="pcieport")
    errors = HealthFacts((FunctionHealth(PORT, 0, None, 5), FunctionHealth(GPU.address, 1)))
    assert values("aer_errors", host_of(port, GPU), replace(NOTHING, errors=errors)) == [
        ({"address": "0000:04:00.0", "severity": "fatal"}, 1),
        ({"address": "0000:00:01.0", "severity": "correctable"}, 5),
        ({"address": "0000:00:01.0", "severity": "fatal"}, 0),
    ]


def test_a_device_is_missing_if_it_or_its_kind_is_not_at_its_address() -> None:
    facts = replace(NOTHING, known_devices=tuple(known_devices([GPU])))
    name = {"address": "0000:04:00.0", "model": GPU.short_name}
    assert values("device_missing", host_of(GPU), facts) == [(name, 0)]
    assert values("device_missing", host_of(), facts) == [(name, 1)]
    assert values("device_missing", host_of(replace(GPU, device_id="2235")), facts) == [(name, 1)]


def test_a_device_that_cannot_be_read_is_not_called_missing() -> None:
    facts = replace(NOTHING, known_devices=tuple(known_devices([GPU])))
    unread = replace(host_of(), pci_unidentified=("0000:04:00.0",))
    assert values("device_missing", unread, facts) == []
    unlisted = replace(host_of(), pci_unlisted="no such directory")
    assert values("device_missing", unlisted, facts) == []


def test_findings_are_counted_by_rule_and_severity() -> None:
    found = (
        finding("no-reset", "warning", "it has none", (), "", subject=GPU),
        finding("no-reset", "warning", "it has none", (), "", subject=A40),
        blocker("iommu", "", "it is off"),
        finding("kvm", "ok", "it is on", (), ""),
    )
    facts = CheckFacts(Report.of(found, (), ("one: unread", "two: unread")))
    assert values("findings", host_of(), facts) == [
        ({"rule": "iommu", "severity": "blocker"}, 1),
        ({"rule": "no-reset", "severity": "warning"}, 2),
    ]
    assert values("facts_unknown", host_of(), facts) == [({}, 2)]


def test_vgpus_are_counted_and_their_guests_named() -> None:
    host = vgpu_host((a40_type(4), a40_type(4)), functions=8)
    found = {(d["type"], d["state"]): v for d, v in values("vgpus", host)}
    assert found["NVIDIA A40-4Q", "active"] == 2
    assert found["NVIDIA A40-4Q", "available"] == 6
    names = {vgpu.name for vgpu in host.vgpus.active}
    seen = with_facts(host, users=())
    assert names < {labels["address"] for labels, _ in values("device_assigned", seen)}


def test_vgpus_that_may_fit_at_most_are_not_called_available() -> None:
    host = vgpu_host((a40_type(4),), functions=8)
    kinds = tuple(replace(kind, max_instances=None, framebuffer=None) for kind in A40_TYPES)
    parents = tuple(
        replace(one, types=kinds, available=tuple(1 for _ in kinds)) for one in host.vgpus.parents
    )
    host = with_facts(host, vgpu_parents=parents)
    found = {d["state"] for d, _ in values("vgpus", host)}
    assert found == {"active"}


def test_unknown_facts_have_no_sample() -> None:
    for name in ("layout_differences", "unit_failed", "device_missing", "aer_errors"):
        assert values(name, HOST) == []
    assert values("layout_differences", HOST, EVERYTHING) == [({"layout": "lab"}, 2)]
    labels = {"unit": "vfiomgr-layout", "result": "exit-code"}
    assert values("unit_failed", HOST, EVERYTHING) == [(labels, 1)]


def test_every_metric_is_listed_with_help_and_labels_of_its_own() -> None:
    names: dict[str, set[tuple[str, ...]]] = {}
    for host in (HOST, vgpu_host((a40_type(4),), functions=8)):
        for name, _, labels in check_samples(host, EVERYTHING):
            names.setdefault(name, set()).add(tuple(labels))
    assert names.keys() == METRICS.keys()
    assert all(len(found) == 1 for found in names.values())
    assert all(text.endswith(".") for _, text in METRICS.values())


def test_the_agent_has_the_same_names_kinds_and_labels() -> None:
    """Of all metrics that both show, in the formats that Prometheus reads."""
    vgpus = with_facts(vgpu_host((a40_type(4),), functions=8), users=())
    own: dict[str, set[str]] = {}
    of_agent: dict[str, set[str]] = {}
    kinds: dict[str, set[str]] = {}
    for host in (HOST, vgpus):
        made = agent_samples(host, inventory(host, SETTINGS), EVERYTHING.errors)
        agent = f"{render_openmetrics(made, AGENT_METRICS)}# EOF\n"
        text = render_textfile(check_samples(host, EVERYTHING), METRICS)
        of_text, of_page = textfile(text), openmetrics(agent)  # type: ignore[no-untyped-call]
        for families, found in ((of_text, own), (of_page, of_agent)):
            for family in families:
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
                    kinds.setdefault(sample.name, set()).add(family.type)
    both = own.keys() & of_agent.keys()
    suffixes = {"counter": "_total", "info": "_info", "gauge": ""}
    assert both == {f"{name}{suffixes[kind]}" for name, (kind, _) in SHARED_METRICS.items()}
    assert {name: own[name] for name in both} == {name: of_agent[name] for name in both}
    for name in both:  # the text format has no kind for information
        assert kinds[name] in ({"gauge"}, {"counter"}, {"gauge", "info"}), name
