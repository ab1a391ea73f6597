"""Findings by rule, and differences."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.fleet.hosts import a_card, a_snapshot
from vfiomgr.errors import HostError
from vfiomgr.fleet.checking import Finding, HostReport, RuleSummary, by_rule, report_of
from vfiomgr.fleet.differences import Difference, Inventory, differences, inventory
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.snapshot.created import UNKNOWN


def test_the_findings_of_a_host_are_those_of_check() -> None:
    broken = replace(a_card(0), is_responsive=False)
    found = report_of(a_snapshot(broken, a_card(1)), UNKNOWN, "/a/gpu1.json")
    assert found.name == "gpu1"
    assert ("silent-device", "warning") in [(one.rule, one.severity) for one in found.findings]


def test_findings_are_counted_by_rule_and_severity() -> None:
    warn, block = Finding("a", "warning", "x"), Finding("b", "blocker", "y")
    hosts = [
        HostReport("gpu10", None, (warn, block), ()),
        HostReport("gpu9", None, (replace(warn, summary="z"),), ()),
    ]
    assert by_rule(hosts) == (
        RuleSummary("b", "blocker", ("gpu10",), "y"),
        RuleSummary("a", "warning", ("gpu9", "gpu10"), "gpu9: z"),
    )
    same = [HostReport(name, None, (warn,), ()) for name in ("gpu9", "gpu10")]
    assert by_rule(same) == (RuleSummary("a", "warning", ("gpu9", "gpu10"), "x"),)


def facts_of(*cards: object, **facts: object) -> dict[str, str]:
    host = with_facts(a_snapshot(*cards), **facts)  # type: ignore[arg-type]
    return inventory(host, UNKNOWN, "a.json").facts


def test_what_is_compared() -> None:
    card = replace(a_card(0), serial="17", sriov_totalvfs=8)
    links = (PciLink(card.address, 16.0, 8, 16.0, 16),)
    found = facts_of(card, replace(a_card(1), iommu_group=1), links=links)
    name = "0000:01:00.0"
    assert {what: text for what, text in found.items() if what.startswith(name)} == {
        name: "NVIDIA A40 (10de:2235, subsystem 10de:157e)",
        f"{name} driver": "vfio-pci",
        f"{name} NUMA node": "0",
        f"{name} VFs": "0",
        f"{name} IOMMU group": "0000:02:00.0",
        f"{name} link width": "x8",
        f"{name} serial": "17",
    }
    assert found["NUMA node 0: huge pages of 1 GiB"] == "64"
    assert found["kernel"] == "6.1.0"
    assert "QEMU" not in found


def test_users_make_no_difference() -> None:
    before, after = a_snapshot(a_card(0)), a_snapshot(a_card(0), win=0)
    pair = [inventory(host, UNKNOWN, "a.json") for host in (before, after)]
    assert differences([(pair[0], pair[1])]) == ()


def test_the_same_difference_is_named_once() -> None:
    old = {"kernel": "6.1", "d": "A40", "d driver": "nvidia"}
    new = old | {"kernel": "6.12"}
    pairs = [(Inventory(n, None, old), Inventory(n, None, new)) for n in ("gpu10", "gpu9")]
    moved = Inventory("gpu1", None, old), Inventory("gpu1", None, old | {"d driver": "vfio-pci"})
    assert differences([*pairs, moved]) == (
        Difference("kernel", "6.1", "6.12", ("gpu9", "gpu10")),
        Difference("d driver", "nvidia", "vfio-pci", ("gpu1",)),
    )


def test_what_is_unknown_on_one_side_is_no_difference() -> None:
    card = replace(a_card(0), serial="17", driver_override="vfio-pci")
    links = (PciLink(card.address, 16.0, 8, 16.0, 16),)
    old = with_facts(a_snapshot(card), links=links)
    plain = replace(card, serial=None, driver_override=None)
    new = with_facts(a_snapshot(plain), links=None, topology=None, readiness=None)
    pair = [inventory(host, UNKNOWN, "a.json") for host in (old, new)]
    for before, after in (pair, pair[::-1]):
        assert [one.what for one in differences([(before, after)])] == [
            f"{card.address} driver_override"
        ]


def test_hosts_whose_devices_are_unknown_are_not_compared() -> None:
    host = with_facts(a_snapshot(), pci_unlisted="Permission denied")
    with pytest.raises(HostError, match="PCI devices are unknown: Permission denied"):
        inventory(host, UNKNOWN, "a.json")
    both = a_snapshot(a_card(0), a_card(1))
    unidentified = with_facts(a_snapshot(a_card(1)), pci_unidentified=("0000:01:00.0",))
    pair = [inventory(one, UNKNOWN, "a.json") for one in (both, unidentified)]
    assert differences([(pair[0], pair[1])]) == ()


def test_a_missing_device_is_one_difference() -> None:
    old, new = facts_of(a_card(0), a_card(1)), facts_of(a_card(0))
    found = differences([(Inventory("a", None, old), Inventory("a", None, new))])
    assert [(one.what, one.after) for one in found] == [("0000:02:00.0", None)]
