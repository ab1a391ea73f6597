"""Devices on host drivers that claims bind and return: what is published, refused and left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.fakes.vgpu_hosts import a40_host, mig_host
from tests.unit.engine.faults import changes, kept
from tests.unit.node.dra_claims import GPU, NODE, Direct
from tests.unit.node.stories import answer
from vfiomgr.errors import HostError, Refusal
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node.dra.binding import DIRECTORY, Binding
from vfiomgr.node.dra.plan import pools, with_known_facts
from vfiomgr.node.health import HealthContext
from vfiomgr.node.messages import ClaimFacts, Order, Question, Settings
from vfiomgr.node.model import NodeSettings, NodeUnit, OnDemand
from vfiomgr.node.plan import inventory
from vfiomgr.node.scanner import Scanner
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.node.dra.model import DraDevice, Pool
    from vfiomgr.node.model import Inventory

CARD, SOUND = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:01:00.1")
DISK = PciAddress.parse("0000:04:01.0")
OWNER, OTHER = "uid-1/node-1/pci-0000-01-00-0", "uid-2/node-1/pci-0000-01-00-0"
LAYOUT = """\
version: vfiomgr/v1
layouts:
  mixed:
    devices:
      - select: {address: "0000:01:00.0"}
        state: on-demand
"""


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path)


def found_on(kernel: FakeKernel, *addresses: object, **fields: Any) -> Inventory:
    settings = NodeSettings(on_demand=dict.fromkeys(map(str, addresses), OnDemand(**fields)))
    return inventory(api.scan(kernel), settings, HealthContext())


def drivers(kernel: FakeKernel) -> tuple[str | None, ...]:
    host = api.scan(kernel)
    return tuple(host.device(address).driver for address in (CARD, SOUND))


def binding_of(kernel: FakeKernel, during: Callable[[], None] | None = None) -> Binding:
    """Bindings whose clock goes on by a second with each look at a device in use."""
    seconds = iter(range(1000))

    def sleep(_seconds: float) -> None:
        if during is not None:
            during()

    return Binding(Host(kernel), sleep=sleep, clock=lambda: next(seconds))


def test_a_device_on_its_host_driver_is_for_claims_only(kernel: FakeKernel) -> None:
    found = found_on(kernel, CARD)
    assert found.resources == ()
    (unit,) = found.on_demand
    assert (unit.id, unit.addresses) == (str(CARD), (CARD, SOUND))
    assert (unit.nodes, unit.driver, unit.reasons) == ((), "vfio-pci", ())
    assert str(CARD) not in {note.subject.partition(" ")[0] for note in found.notes}


def test_a_claim_binds_the_whole_card_and_its_end_leaves_everything_as_before(
    kernel: FakeKernel,
) -> None:
    before = kept(kernel)
    unit = binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    assert unit.nodes == ("/dev/vfio/10",)
    assert kernel.exists(HostPath(unit.nodes[0]))
    binding_of(kernel).give_back(CARD, OWNER)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")
    assert changes(before, kept(kernel)) == {}
    assert kernel.children(DIRECTORY) == []


def test_the_same_order_again_changes_nothing(kernel: FakeKernel) -> None:
    binding = binding_of(kernel)
    unit = binding.bind(CARD, OnDemand(), OWNER)
    before = kept(kernel)
    assert binding.bind(CARD, OnDemand(), OWNER) == unit
    assert changes(before, kept(kernel)) == {}
    binding.give_back(CARD, OWNER)
    binding.give_back(CARD, OWNER)
    binding.give_back(CARD, "unknown")
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_device_is_not_bound_for_two_claims(kernel: FakeKernel) -> None:
    binding = binding_of(kernel)
    binding.bind(CARD, OnDemand(), OWNER)
    with pytest.raises(Refusal, match="was bound for the ResourceClaim with UID uid-1"):
        binding.bind(CARD, OnDemand(), OTHER)
    binding.give_back(CARD, OTHER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    binding.give_back(CARD, OWNER)
    binding.bind(CARD, OnDemand(), OTHER)


def test_what_an_administrator_bound_stays_bound(kernel: FakeKernel) -> None:
    Host(kernel).bind(CARD)
    binding = binding_of(kernel)
    binding.bind(CARD, OnDemand(), OWNER)
    binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")


def test_a_sticky_device_stays_for_the_next_claim_until_it_is_unbound(kernel: FakeKernel) -> None:
    binding = binding_of(kernel)
    binding.bind(CARD, OnDemand(is_sticky=True), OWNER)
    binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    (unit,) = found_on(kernel, CARD).on_demand
    assert (unit.nodes, unit.reasons) == (("/dev/vfio/10",), ())
    binding.bind(CARD, OnDemand(is_sticky=True), OTHER)
    binding.give_back(CARD, OTHER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    Host(kernel).unbind(CARD)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_damaged_record_is_only_of_its_own_device(kernel: FakeKernel) -> None:
    binding = binding_of(kernel)
    binding.bind(CARD, OnDemand(), OWNER)
    kernel.replace(DIRECTORY / "0000:02:00.0.json", b"{", mode=0o600)
    binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")
    with pytest.raises(HostError, match=r"cannot read .*0000:02:00\.0\.json"):
        binding.bind(CARD, OnDemand(), OTHER)  # it may be of this card


def test_after_a_reboot_nothing_is_returned(kernel: FakeKernel) -> None:
    binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    record = kernel.read_text(DIRECTORY / f"{CARD}.json") or ""
    kernel.reboot()
    kernel.make_directory(DIRECTORY)
    kernel.replace(DIRECTORY / f"{CARD}.json", record.encode(), mode=0o600)
    before = drivers(kernel)
    binding_of(kernel).give_back(CARD, OWNER)
    assert drivers(kernel) == before
    assert kernel.children(DIRECTORY) == []


# ---- refusals


def holds(kernel: FakeKernel, node: str = "/dev/dri/card1") -> Callable[[], None]:
    """A process of the host that has a card open; returns how it ends."""
    kernel.sysfs.put("/proc/4711/comm", "python3\n")
    kernel.sysfs.put("/proc/4711/cmdline", "python3\0train.py\0")
    kernel.sysfs.link_absolute("/proc/4711/fd/7", node)
    return lambda: kernel.sysfs.drop("/proc/4711/fd/7")


def test_a_process_that_lets_go_is_waited_for(kernel: FakeKernel) -> None:
    end, looks = holds(kernel), []

    def look() -> None:
        looks.append(drivers(kernel))
        if len(looks) == 10:
            end()

    binding_of(kernel, look).bind(CARD, OnDemand(), OWNER)
    assert looks == [("nvidia", "snd_hda_intel")] * 10
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")


def test_a_process_that_does_not_let_go_is_named(kernel: FakeKernel) -> None:
    holds(kernel)
    with pytest.raises(Refusal, match=r"is in use by: python3 \(PID 4711\)") as told:
        binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    assert told.value.hint == "stop these processes"  # a claim has no options
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_container_is_named_with_its_pod(kernel: FakeKernel) -> None:
    uid = "6f4bde77-3ab7-4d6f-9c38-6bbf5e6e1ee1"
    kernel.sysfs.put("/proc/4711/cgroup", f"0::/kubepods/burstable/pod{uid}/{'4f' * 32}\n")
    kernel.sysfs.put(f"/var/log/pods/ml_train-0_{uid}/main/0.log", "")
    holds(kernel)
    user = r"is in use by: pod ml/train-0 \(python3, PID 4711\)"
    with pytest.raises(Refusal, match=user) as refused:
        binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    assert refused.value.hint == "delete the pod: kubectl -n ml delete pod train-0"


def test_a_guest_that_still_runs_keeps_its_device(kernel: FakeKernel) -> None:
    binding = binding_of(kernel)
    binding.bind(CARD, OnDemand(), OWNER)
    kernel.guest_opens(10)
    with pytest.raises(Refusal, match="is in use by"):
        binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    kernel.guest_closes(10)
    binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_mounted_disk_is_refused_at_once_and_has_a_taint(kernel: FakeKernel) -> None:
    (unit,) = found_on(kernel, DISK).on_demand
    assert "mounted-disk" in {reason.rule for reason in unit.reasons}
    looks: list[None] = []
    with pytest.raises(Refusal, match="has a disk that the host uses"):
        binding_of(kernel, lambda: looks.append(None)).bind(DISK, OnDemand(), OWNER)
    assert looks == []
    assert api.scan(kernel).device(DISK).driver == "nvme"


def test_a_driver_that_does_not_exist_is_a_reason(kernel: FakeKernel) -> None:
    (unit,) = found_on(kernel, CARD, driver="nvidia").on_demand
    (reason,) = unit.reasons
    assert reason.severity == "blocker"
    assert (reason.summary, reason.hint) == (
        "nvidia is not a VFIO driver",
        "correct its rule in the layout",  # a claim has no options
    )


def test_an_agent_that_may_not_write_binds_nothing(tmp_path: Path) -> None:
    tree = HostTree(workstation(tmp_path).root)
    with pytest.raises(HostError, match="/sys is not writable"):
        Binding(Host(tree)).bind(CARD, OnDemand(), OWNER)


# ---- what is published


def published(kernel: FakeKernel, found: Inventory, before: tuple[Pool, ...] = ()) -> Any:
    made = (pool for pool in pools(api.scan(kernel), found, NODE) if pool.name == NODE)
    return with_known_facts(tuple(made), before)


def device_of(made: tuple[Pool, ...]) -> DraDevice:
    (pool,) = made
    (device,) = pool.devices
    return device


def test_a_bind_and_a_return_write_no_slice(kernel: FakeKernel) -> None:
    first = published(kernel, found_on(kernel, CARD))
    device = device_of(first)
    assert (device.attributes["bound"], device.attributes["viable"]) == (False, True)
    assert (device.attributes["driver"], device.taints) == ("vfio-pci", ())
    known = {**device.attributes, "link": "16 GT/s x16"}
    more = replace(device, attributes=known, capacity={"memory": 1 << 34})
    richer = (replace(first[0], devices=(more,)),)
    binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    during = published(kernel, found_on(kernel, CARD), richer)
    assert during == richer
    binding_of(kernel).give_back(CARD, OWNER)
    assert published(kernel, found_on(kernel, CARD), during) == richer


def test_facts_of_another_device_at_the_address_are_not_kept(kernel: FakeKernel) -> None:
    first = published(kernel, found_on(kernel, CARD))
    device = device_of(first)
    other = {**device.attributes, "device": "2204"}
    before = replace(device, attributes=other, capacity={"memory": 1})
    assert (
        published(kernel, found_on(kernel, CARD), (replace(first[0], devices=(before,)),)) == first
    )


def test_a_gpu_that_claims_bind_hosts_no_vgpus(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=2)
    (alone,) = pools(api.scan(kernel), found_on(kernel), NODE)
    assert alone.devices[0].target.parent == GPU
    made = pools(api.scan(kernel), found_on(kernel, GPU), NODE)
    assert [device.target.unit for pool in made for device in pool.devices] == [GPU]


@pytest.mark.parametrize("claims", [{}, {str(CARD): "ml/gpu"}])
def test_pods_leave_a_device_that_the_kernel_does_not_return_from(
    kernel: FakeKernel, claims: dict[str, str]
) -> None:
    (unit,) = found_on(kernel, CARD).on_demand
    stuck = replace(api.scan(kernel).device(CARD), stuck="unbind (PID 7)")
    host = api.scan(kernel)
    host = replace(host, devices=tuple(stuck if d.address == CARD else d for d in host.devices))
    settings = NodeSettings(on_demand={str(CARD): OnDemand()})
    found = inventory(host, settings, HealthContext(claims=claims))
    made = tuple(pool for pool in pools(host, found, NODE) if pool.name == NODE)
    taints = device_of(made).taints
    assert unit.reasons == ()
    assert [(each.key, each.effect) for each in taints] == [
        ("vfiomgr.io/stuck-device", "NoExecute")
    ]


def test_a_device_that_is_stuck_while_it_returns_has_a_taint_too(kernel: FakeKernel) -> None:
    binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    host = api.scan(kernel)
    stuck = replace(host.device(CARD), stuck="unbind (PID 7)")
    host = replace(host, devices=tuple(stuck if d.address == CARD else d for d in host.devices))
    settings = NodeSettings(on_demand={str(CARD): OnDemand()})
    (unit,) = inventory(host, settings, HealthContext()).on_demand
    assert unit.nodes
    assert [reason.rule for reason in unit.reasons] == ["stuck-device"]


def test_the_agent_reads_the_devices_from_its_layout(kernel: FakeKernel, run: Run) -> None:
    kernel.make_directory(FILE.parent)
    kernel.replace(FILE, LAYOUT.encode(), mode=0o644)
    scanner = Scanner(Host(kernel))
    report = answer(scanner, Question(settings=Settings(dra_node=NODE), pods={}))
    assert report.inventory is not None
    assert [unit.id for unit in report.inventory.on_demand] == [str(CARD)]
    assert report.drift == {}
    once = run("--root", str(kernel.root), "node", "run", "--once")
    assert once.stderr == "bound on demand by claims: 1\n"
    binding_of(kernel).bind(CARD, OnDemand(), OWNER)
    held = ClaimFacts(2, ((NODE, "pci-0000-01-00-0"),), {str(CARD): "ml/gpu"})
    later = answer(scanner, Question(claims=held))
    assert later.pools is None
    assert later.inventory is not None
    (unit,) = later.inventory.on_demand
    assert (unit.claim, unit.nodes) == ("ml/gpu", ("/dev/vfio/10",))
    assert str(CARD) not in {each.id for r in later.inventory.resources for each in r.units}
    scanner.close()


def test_an_order_is_carried_out_by_the_process_beside_the_agent(kernel: FakeKernel) -> None:
    direct = Direct(kernel)
    result = direct.vgpus.perform(Order("bind", OWNER, addresses=(CARD,), on_demand=OnDemand()))
    assert isinstance(result.unit, NodeUnit)
    assert result.unit.nodes == ("/dev/vfio/10",)
    assert json.loads(kernel.read_text(DIRECTORY / f"{CARD}.json") or "")["driver"] == "nvidia"
    assert direct.vgpus.perform(Order("return", OWNER, addresses=(CARD,))).error == ""
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_users_on_the_host_driver_are_taints_that_end_with_them(kernel: FakeKernel) -> None:
    kernel.make_directory(FILE.parent)
    kernel.replace(FILE, LAYOUT.encode(), mode=0o644)
    end = holds(kernel)
    scanner = Scanner(Host(kernel))

    def rules() -> list[str]:
        found = answer(scanner, Question()).inventory
        assert found is not None
        return [reason.rule for unit in found.on_demand for reason in unit.reasons]

    answer(scanner, Question(settings=Settings(dra_node=NODE), pods={}))
    assert rules() == ["in-use"]
    end()
    assert rules() == []
    scanner.close()


def test_an_agent_that_may_not_write_publishes_only_what_is_bound(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.make_directory(FILE.parent)
    kernel.replace(FILE, LAYOUT.encode(), mode=0o644)
    binding_of(kernel).bind(CARD, OnDemand(is_sticky=True), OWNER)
    scanner = Scanner(Host(kernel))
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _tree: False)
    question = Question(settings=Settings(dra_node=NODE), pods={})

    def names() -> list[str]:
        return [
            d.target.unit for pool in answer(scanner, question).pools or () for d in pool.devices
        ]

    assert str(CARD) in names()
    Host(kernel).unbind(CARD, allow=("in-use",))
    assert str(CARD) not in names()
    scanner.close()


# ---- persistence mode of NVIDIA's GPUs

VGPU_CARD = PciAddress.parse(GPU)


def is_persistent(kernel: FakeKernel) -> bool:
    gpus = kernel.nvidia.gpus
    return gpus.is_persistent(next(gpu for gpu in gpus.visible() if gpu.address == GPU))


def test_persistence_mode_is_off_for_the_bind_and_on_after_the_return(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, is_enabled=False)
    before = kept(kernel)
    assert is_persistent(kernel)
    binding = binding_of(kernel)
    binding.bind(VGPU_CARD, OnDemand(), OWNER)
    assert api.scan(kernel).device(VGPU_CARD).driver == "vfio-pci"
    assert binding.bind(VGPU_CARD, OnDemand(), OWNER).nodes
    binding.give_back(VGPU_CARD, OWNER)
    assert changes(before, kept(kernel)) == {}
    assert is_persistent(kernel)


@pytest.mark.parametrize("closes", [True, False])
def test_nvidias_daemon_closes_a_gpu_in_its_own_time_or_is_named(
    tmp_path: Path, *, closes: bool
) -> None:
    """It has the GPU open while the mode is on (kubernetes-sigs/dra-driver-nvidia-gpu#1037)."""
    kernel = a40_host(tmp_path, is_enabled=False)
    kernel.sysfs.put(f"/proc/driver/nvidia/gpus/{GPU}/information", "Device Minor: \t 0\n")
    kernel.sysfs.put("/proc/4711/comm", "nvidia-persiste\n")
    kernel.sysfs.link_absolute("/proc/4711/fd/7", "/dev/nvidia0")
    modes: list[bool] = []

    def look() -> None:
        modes.append(is_persistent(kernel))
        if closes:
            kernel.sysfs.drop("/proc/4711/fd/7")

    if closes:
        binding_of(kernel, look).bind(VGPU_CARD, OnDemand(), OWNER)
        assert api.scan(kernel).device(VGPU_CARD).driver == "vfio-pci"
        assert modes == [False]
        return
    with pytest.raises(Refusal, match=r"in use by: nvidia-persiste \(PID 4711\)"):
        binding_of(kernel, look).bind(VGPU_CARD, OnDemand(), OWNER)
    assert {*modes} == {False}
    assert is_persistent(kernel)


def test_persistence_mode_stays_if_the_bind_is_refused(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=2)
    assert is_persistent(kernel)
    with pytest.raises(Refusal, match="virtual functions"):
        binding_of(kernel).bind(VGPU_CARD, OnDemand(), OWNER)
    assert is_persistent(kernel)


def test_persistence_mode_is_on_again_after_a_kill_at_any_operation(tmp_path: Path) -> None:
    whole = a40_host(tmp_path / "whole", is_enabled=False)
    before = len(whole.operations)
    binding_of(whole).bind(VGPU_CARD, OnDemand(), OWNER)
    bound = len(whole.operations) - before
    binding_of(whole).give_back(VGPU_CARD, OWNER)
    returned = len(whole.operations) - before - bound
    for at in range(1, bound + returned + 1):
        kernel = a40_host(tmp_path / str(at), is_enabled=False)
        first = kept(kernel)
        binding = binding_of(kernel)
        if at > bound:
            binding.bind(VGPU_CARD, OnDemand(), OWNER)
        kernel.kill(at=at if at <= bound else at - bound, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            binding.bind(VGPU_CARD, OnDemand(), OWNER) if at <= bound else binding.give_back(
                VGPU_CARD, OWNER
            )
        kernel.revive()
        binding_of(kernel).give_back(VGPU_CARD, OWNER)
        assert changes(first, kept(kernel)) == {}, at
        assert api.recover(tree=kernel) == ()


def test_a_sticky_gpu_is_bound_or_as_before_after_a_kill_at_any_operation(tmp_path: Path) -> None:
    sticky = OnDemand(is_sticky=True)
    whole = a40_host(tmp_path / "whole", is_enabled=False)
    before = len(whole.operations)
    binding_of(whole).bind(VGPU_CARD, sticky, OWNER)
    found: list[str | None] = []
    for at in range(1, len(whole.operations) - before + 1):
        kernel = a40_host(tmp_path / str(at), is_enabled=False)
        first = kept(kernel)
        kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            binding_of(kernel).bind(VGPU_CARD, sticky, OWNER)
        kernel.revive()
        binding_of(kernel).give_back(VGPU_CARD, OWNER)
        found.append(api.scan(kernel).device(VGPU_CARD).driver)
        if found[-1] != "vfio-pci":
            assert changes(first, kept(kernel)) == {}, at
            assert is_persistent(kernel), at
    assert {*found} == {"nvidia", "vfio-pci"}


def test_a_claim_ends_although_persistence_mode_cannot_be_turned_on(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, is_enabled=False)
    binding = binding_of(kernel)
    binding.bind(VGPU_CARD, OnDemand(), OWNER)
    kernel.programs.known.clear()
    note = binding.give_back(VGPU_CARD, OWNER)
    assert note.startswith("persistence mode is still off: ")
    turn_on = f"nvidia-smi -i {VGPU_CARD} -pm 1"
    assert note.endswith(f"; restart nvidia-persistenced if this fails: {turn_on}")
    assert api.scan(kernel).device(VGPU_CARD).driver == "nvidia"
    assert kernel.children(DIRECTORY) == []


# ---- what a review found


def test_whatever_function_is_named_the_device_is_the_card(kernel: FakeKernel) -> None:
    (unit,) = found_on(kernel, SOUND).on_demand
    assert (unit.id, unit.addresses, unit.reasons) == (str(CARD), (CARD, SOUND), ())
    assert found_on(kernel, CARD, SOUND).on_demand == (unit,)
    binding = binding_of(kernel)
    assert binding.bind(SOUND, OnDemand(), OWNER).id == str(CARD)
    for address in (CARD, SOUND):
        with pytest.raises(Refusal, match="with UID uid-1"):
            binding.bind(address, OnDemand(), OTHER)
    binding.give_back(CARD, OWNER)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_gpu_in_mig_mode_is_not_bound(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", GPU)
    with pytest.raises(Refusal, match="is in MIG mode"):
        binding_of(kernel).bind(VGPU_CARD, OnDemand(), OWNER)
    assert kernel.children(DIRECTORY) == []


def test_a_refusal_is_told_although_persistence_mode_cannot_be_restored(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, is_enabled=False)

    def lose() -> None:
        kernel.programs.known.clear()

    kernel.sysfs.put("/proc/4711/comm", "train\n")
    (node, *_) = api.scan(kernel).device(VGPU_CARD).nodes
    kernel.sysfs.link_absolute("/proc/4711/fd/7", node)
    with pytest.raises(Refusal, match="train"):
        binding_of(kernel, lose).bind(VGPU_CARD, OnDemand(), OWNER)
