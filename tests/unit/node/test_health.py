"""Each reason why a device is not healthy, and where it must be silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.node.made import A40, AUDIO, SETTINGS, UUID, node_of, rules, vgpu_node
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import HostError
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess, NodeFact, NodeOwner
from vfiomgr.host.tree import HostTree
from vfiomgr.node import health
from vfiomgr.node.health import HealthContext
from vfiomgr.node.model import OnDemand
from vfiomgr.node.plan import inventory
from vfiomgr.paths import HostPath
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.error_counters import FunctionHealth, HealthFacts, read_health
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.persistence.model import PersistedBinding, render_rule, rule_file
from vfiomgr.rules.runner import all_texts
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.node.model import Inventory
    from vfiomgr.snapshot.model import HostSnapshot

ID = "0000:41:00.0"
LINK = PciLink(A40.address, 16.0, 16, 16.0, 16)
QEMU = DeviceUser("/dev/vfio/41", 4711, "qemu-system-x86", "machine-qemu-3-win.scope", guest="win")


def after(host: HostSnapshot, **facts: Any) -> Inventory:
    """The inventory of a host that was healthy before."""
    previous = inventory(node_of(A40, AUDIO), SETTINGS)
    return inventory(host, SETTINGS, HealthContext(**facts), previous=previous)


def without_groups(host: HostSnapshot) -> HostSnapshot:
    """The host without the nodes of groups."""
    return with_facts(host, groups=tuple(replace(g, has_node=False) for g in host.groups))


def summaries(made: Inventory) -> list[str]:
    """The texts of all reasons."""
    return [reason.summary for unit in made.units for reason in unit.reasons]


def fatal(number: int | None) -> HealthFacts:
    """So many fatal errors of the GPU."""
    return HealthFacts((FunctionHealth(A40.address, number, 0, 7),))


def test_a_device_without_faults_is_healthy() -> None:
    host = with_facts(node_of(A40, AUDIO), links=(LINK,))
    (unit,) = inventory(host, SETTINGS).units
    assert unit.is_healthy


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"driver": "nvidia"}, "wrong-driver"),
        ({"driver": None}, "wrong-driver"),
        ({"is_responsive": False}, "silent-device"),
        ({"power_state": "D3cold", "runtime_status": "active"}, "stuck-in-d3cold"),
        ({"power_state": "D3cold", "runtime_status": "error"}, "stuck-in-d3cold"),
        ({"device_id": "20b5"}, "device-exchanged"),
    ],
)
def test_the_state_of_each_function_counts(changes: dict[str, Any], rule: str) -> None:
    expected = {ID: [rule]}
    is_other = "device_id" in changes
    assert rules(after(node_of(replace(A40, **changes), AUDIO))) == ({} if is_other else expected)
    assert rules(after(node_of(A40, replace(AUDIO, **changes)))) == ({} if is_other else expected)


def test_a_function_that_sleeps_is_healthy() -> None:
    host = node_of(replace(A40, power_state="D3cold", runtime_status="suspended"), AUDIO)
    assert rules(after(host)) == {}


def test_the_remedy_of_a_wrong_driver_is_a_bind() -> None:
    (unit,) = after(node_of(replace(A40, driver="nvidia"), AUDIO)).units
    (reason,) = unit.reasons
    assert (reason.summary, reason.remedy) == (f"{ID} is on nvidia", f"vfiomgr bind {ID}")


@pytest.mark.parametrize(("release", "is_refused"), [("6.12.0", True), ("6.1.0", False)])
def test_memory_of_the_firmware_is_a_reason_if_the_kernel_refuses_it(
    release: str, *, is_refused: bool
) -> None:
    host = node_of(A40, AUDIO)
    groups = tuple(replace(group, direct_regions=("f4000-f4fff",)) for group in host.groups)
    iommu = replace(host.iommu, units=("ivhd0",))
    made = after(with_facts(host, groups=groups, iommu=iommu, kernel_release=release))
    assert rules(made) == ({ID: ["reserved-region"]} if is_refused else {})


def test_a_missing_node_is_a_reason() -> None:
    host = without_groups(node_of(A40, AUDIO))
    assert summaries(after(host)) == ["/dev/vfio/41 does not exist"]


def test_a_missing_node_of_a_single_device_is_a_reason() -> None:
    whole = replace(A40, vfio_cdev=True), replace(AUDIO, vfio_cdev=True)
    host = without_groups(node_of(*whole))
    previous = inventory(host, SETTINGS)
    assert rules(previous) == {}
    host = without_groups(node_of(whole[0], AUDIO))
    made = inventory(host, SETTINGS, previous=previous)
    assert "/dev/vfio/devices/vfio1 does not exist" in summaries(made)


def test_a_missing_node_of_a_mediated_device_is_a_reason() -> None:
    host = vgpu_node(uuid=UUID)
    (vgpu,) = host.vgpus.active
    host = with_facts(without_groups(host), vgpus=(replace(vgpu, vfio_device="vfio7"),))
    path = "/dev/vfio/devices/vfio7"
    known = with_facts(host, nodes=(NodeFact(path, ROOT_ONLY),))
    assert [unit.nodes for unit in inventory(known, SETTINGS).units] == [(path,)]
    assert rules(inventory(known, SETTINGS)) == {}
    assert summaries(inventory(host, SETTINGS)) == [f"{path} does not exist"]


@pytest.mark.parametrize(
    ("owner", "found", "is_reason"),
    [
        (NodeOwner("1000:36", 1000, 36), NodeAccess(1000, 36, 0o660), False),
        (NodeOwner("1000:36", 1000, 36), ROOT_ONLY, True),
        (NodeOwner("1000", 1000), NodeAccess(1000, 0, 0o660), True),
        (NodeOwner("1000", 1000), None, False),
        (None, NodeAccess(1000, 36, 0o660), False),
    ],
)
def test_a_node_has_the_owner_that_its_rule_gives_it(
    owner: NodeOwner | None, found: NodeAccess | None, *, is_reason: bool
) -> None:
    binding = PersistedBinding(A40.identity, "vfio-pci", "vfio_pci", owner)
    rule = TextFile(rule_file(A40.address), render_rule(binding))
    nodes = () if found is None else (NodeFact("/dev/vfio/41", found),)
    host = with_facts(node_of(A40, AUDIO), files=(rule,), nodes=nodes)
    assert host.files.bindings == (binding,)
    assert rules(inventory(host, SETTINGS)) == ({ID: ["node-owner"]} if is_reason else {})


def test_another_device_at_the_address_is_a_reason_while_it_is_not_ready() -> None:
    host = node_of(replace(A40, device_id="20b5", driver="nvidia"), AUDIO)
    assert rules(after(host)) == {ID: ["device-exchanged", "wrong-driver"]}


@pytest.mark.parametrize(
    ("now", "before", "is_reason"),
    [(3, 2, True), (2, 2, False), (0, None, False), (None, 0, False), (1, 4, False)],
)
def test_fatal_errors_since_the_start_are_a_reason(
    now: int | None, before: int | None, *, is_reason: bool
) -> None:
    made = after(node_of(A40, AUDIO), now=fatal(now), before=fatal(before))
    assert rules(made) == ({ID: ["fatal-errors"]} if is_reason else {})


def test_errors_of_a_function_that_was_not_counted_before_are_forgiven() -> None:
    assert rules(after(node_of(A40, AUDIO), now=fatal(3))) == {}


def test_a_link_that_is_down_is_a_reason() -> None:
    host = with_facts(node_of(A40, AUDIO), links=(replace(LINK, width=None, speed=None),))
    assert summaries(after(host)) == [f"the PCIe link of {ID} is down"]
    slow = with_facts(node_of(A40, AUDIO), links=(replace(LINK, width=1, speed=2.5),))
    assert rules(after(slow)) == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"driver": None}, "has no driver"), ({"is_responsive": False}, "does not answer")],
)
@pytest.mark.parametrize("uuid", [None, UUID])
def test_a_vgpu_needs_its_physical_function(
    uuid: str | None, changes: dict[str, Any], problem: str
) -> None:
    host = vgpu_node(uuid=uuid)
    gpu, *functions = host.devices
    broken = with_facts(host, devices=(replace(gpu, **changes), *functions))
    made = inventory(broken, SETTINGS, previous=inventory(host, SETTINGS))
    assert f"the physical function {ID} {problem}" in summaries(made)


@pytest.mark.parametrize("uuid", [None, UUID])
def test_a_vgpu_that_lost_its_gpu_is_gone(uuid: str | None) -> None:
    host = vgpu_node(uuid=uuid)
    gone = with_facts(host, devices=(), vgpus=(), vgpu_parents=(), groups=())
    made = inventory(gone, SETTINGS, previous=inventory(host, SETTINGS))
    (found,) = rules(made).values()
    assert found == ["device-removed", "vgpu-parent-gone"]


def test_a_virtual_function_that_lost_its_type_is_gone() -> None:
    host = vgpu_node()
    made = inventory(with_facts(host, vgpus=()), SETTINGS, previous=inventory(host, SETTINGS))
    assert rules(made) == {"0000:41:00.4": ["device-removed"]}


def test_a_guest_outside_of_kubernetes_is_a_reason_with_its_name() -> None:
    host = with_facts(node_of(A40, AUDIO), users=(QEMU,))
    (unit,) = inventory(host, SETTINGS).units
    assert [reason.rule for reason in unit.reasons] == ["held-by-guest"]
    assert unit.reasons[0].summary == (
        f"{ID} is in use outside of Kubernetes by "
        "guest win (qemu-system-x86, PID 4711, machine-qemu-3-win.scope)"
    )
    assert unit.used_by == "guest win (qemu-system-x86, PID 4711, machine-qemu-3-win.scope)"
    assert unit.is_open


@pytest.mark.parametrize(
    "changes",
    [
        {"pod": "lab/train"},
        {"guest": f"sandbox-{'ab' * 32}"},
        {"unit": "cri-containerd-0a1b.scope"},
        {"unit": "crio-0a1b.scope"},
        {"unit": None, "guest": None},
    ],
)
def test_a_process_of_a_pod_is_no_reason(changes: dict[str, str | None]) -> None:
    host = with_facts(node_of(A40, AUDIO), users=(replace(QEMU, **changes),))
    (unit,) = inventory(host, SETTINGS).units
    assert unit.is_healthy
    assert unit.is_open


def test_a_process_that_has_the_device_of_a_pod_is_no_reason() -> None:
    host = with_facts(node_of(A40, AUDIO), users=(QEMU,))
    (unit,) = inventory(host, SETTINGS, HealthContext(held={ID: "lab/train"})).units
    assert (unit.reasons, unit.used_by) == ((), "lab/train")


def test_a_process_that_has_the_device_of_a_claim_is_no_reason() -> None:
    host = with_facts(node_of(A40, AUDIO), users=(QEMU,))
    (unit,) = inventory(host, SETTINGS, HealthContext(claims={ID: "lab/gpu"})).units
    assert (unit.reasons, unit.used_by) == ((), "claim lab/gpu")
    assert (unit.pod, unit.claim) == ("", "lab/gpu")


def test_a_process_of_another_device_is_no_reason() -> None:
    host = with_facts(node_of(A40, AUDIO), users=(replace(QEMU, node="/dev/vfio/42"),))
    assert rules(inventory(host, SETTINGS)) == {}


@pytest.mark.parametrize("node", ["/dev/vfio/60", "/dev/vfio/50"])
def test_the_nodes_of_a_mediated_device_are_its_own(node: str) -> None:
    host = with_facts(vgpu_node(uuid=UUID), users=(replace(QEMU, node=node),))
    expected = {UUID: ["held-by-guest"]} if node == "/dev/vfio/60" else {}
    assert rules(inventory(host, SETTINGS)) == expected


def test_a_quarantine_is_a_reason_until_it_ends() -> None:
    (unit,) = inventory(node_of(A40, AUDIO), SETTINGS).units
    failed = health.reset_failed(unit, "the device did not answer")
    made = after(node_of(A40, AUDIO), quarantine={ID: failed})
    assert summaries(made) == [failed.summary]
    assert f"vfiomgr node release {ID}" in failed.remedy
    assert rules(after(node_of(A40, AUDIO), quarantine={"0000:01:00.0": failed})) == {}
    everything = after(node_of(A40, AUDIO), quarantine={health.EVERY: failed})
    assert summaries(everything) == [failed.summary]


def test_a_record_that_cannot_be_read_may_have_each_device_that_nobody_else_has() -> None:
    file = HostPath("/run/vfiomgr/dra/u1.json")
    why = health.claim_unreadable(file, HostError(f"cannot read {file}", f"rm {file}"))
    host = node_of(A40, AUDIO)
    made = after(host, unreadable=(why,))
    assert rules(made) == {ID: ["claim-unreadable"]}
    assert summaries(made) == [f"cannot read {file}"]
    assert rules(after(host, unreadable=(why,), held={ID: "lab/train"})) == {}
    assert rules(after(host, unreadable=(why,), claims={ID: "lab/gpu"})) == {}


def test_all_rules_are_explained() -> None:
    (unit,) = inventory(node_of(A40, AUDIO), SETTINGS).units
    known = {rule.name for rule in all_texts() if rule.section.startswith("Kubernetes node")}
    assert known >= health.UNUSABLE
    assert health.reset_failed(unit, "").rule in known
    assert {"fatal-errors", "link-down", "silent-device", "stuck-in-d3cold"} <= known
    assert {"vgpu-parent-gone", "held-by-guest"} <= known


def test_error_counters_are_read_from_their_last_line(tmp_path: Path) -> None:
    directory = tmp_path / pci_device(A40.address).lstrip("/")
    directory.mkdir(parents=True)
    (directory / "aer_dev_fatal").write_text("Undefined 0\nDLP 2\nTOTAL_ERR_FATAL 2\n")
    (directory / "aer_dev_correctable").write_text("RxErr 9\nTOTAL_ERR_COR 9\n")
    (directory / "aer_dev_nonfatal").write_text("TOTAL_ERR_NONFATAL many\n")
    found = read_health(HostTree(tmp_path), (A40.address, AUDIO.address, A40.address))
    assert found.functions == (FunctionHealth(A40.address, 2, None, 9),)
    (directory / "aer_dev_fatal").write_text("TOTAL_ERR_FATAL 2\nDLP 5\n")
    found = read_health(HostTree(tmp_path), (A40.address,))
    assert found.functions == (FunctionHealth(A40.address, None, None, 9),)
    assert found.of(AUDIO.address) is None


# ---- what is worse than it should be


PORT = PciLink(PciAddress.parse(A40.bridges[-1]), 16.0, 16, 16.0, 16)
NARROW = replace(LINK, width=8)
BRIDGE = replace(
    A40,
    address=PORT.address,
    class_code="060400",
    header_type=1,
    driver="pcieport",
    bridge_path="pci0000:40",
    iommu_group=40,
    vfio_device=None,
)


def hints_of(host: HostSnapshot, previous: Inventory | None = None, **facts: Any) -> list[str]:
    made = inventory(host, SETTINGS, HealthContext(**facts), previous=previous)
    (unit,) = made.units
    assert unit.is_healthy
    return list(unit.hints)


@pytest.mark.parametrize(
    ("links", "is_narrow"),
    [
        ((NARROW, PORT), True),
        ((LINK, PORT), False),
        ((NARROW, replace(PORT, max_width=8)), False),  # the slot has no more lanes
        ((replace(NARROW, max_width=8), PORT), False),  # the card has no more lanes
        ((NARROW,), False),  # what the slot has is unknown
        ((), False),
    ],
)
def test_a_link_with_fewer_lanes_than_both_ends_have_is_a_hint(
    links: tuple[PciLink, ...], *, is_narrow: bool
) -> None:
    host = with_facts(node_of(A40, AUDIO, BRIDGE), links=links)
    assert hints_of(host) == (["narrow-link"] if is_narrow else [])


def test_a_link_that_sleeps_is_as_it_was() -> None:
    awake = with_facts(node_of(A40, AUDIO, BRIDGE), links=(NARROW, PORT))
    previous = inventory(awake, SETTINGS)
    asleep = with_facts(node_of(A40, AUDIO, BRIDGE), links=(PORT,))
    assert hints_of(asleep, previous) == ["narrow-link"]
    mended = with_facts(node_of(A40, AUDIO, BRIDGE), links=(LINK, PORT))
    assert hints_of(mended, previous) == []


def test_the_speed_of_a_link_is_a_hint_unless_a_gpu_is_idle() -> None:
    slow = replace(LINK, speed=2.5), replace(PORT, speed=2.5)
    assert hints_of(with_facts(node_of(A40, AUDIO, BRIDGE), links=slow)) == []
    card = replace(A40, class_code="020000")
    (unit,) = inventory(with_facts(node_of(card, BRIDGE), links=slow), SETTINGS).units
    assert unit.hints == ("slow-link",)


@pytest.mark.parametrize("place", [A40.address, AUDIO.address, PORT.address])
def test_too_many_corrected_errors_are_a_hint(place: PciAddress) -> None:
    host = node_of(A40, AUDIO, BRIDGE)
    assert hints_of(host, flooded=frozenset({place})) == ["corrected-errors"]
    assert hints_of(host, flooded=frozenset({PciAddress.parse("0000:80:01.0")})) == []


def test_a_driver_of_the_host_may_turn_off_lanes() -> None:
    host = with_facts(node_of(replace(A40, driver="nvidia")), links=(NARROW, PORT))
    settings = replace(SETTINGS, on_demand={ID: OnDemand()})
    (unit,) = inventory(host, settings).on_demand
    assert unit.hints == ()


@pytest.mark.parametrize(("now", "is_hint"), [(1, True), (0, False), (None, False)])
def test_nonfatal_errors_since_the_start_are_a_hint(now: int | None, *, is_hint: bool) -> None:
    def counted(number: int | None) -> HealthFacts:
        return HealthFacts((FunctionHealth(A40.address, 0, number, 7),))

    found = hints_of(node_of(A40, AUDIO), now=counted(now), before=counted(0))
    assert found == (["nonfatal-errors"] if is_hint else [])
