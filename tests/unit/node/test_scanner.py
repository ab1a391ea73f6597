"""The scanning process on a kernel that reacts: inventories, CDI files, verification, resets."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from errno import ENOTTY, EPERM, EROFS
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.vgpu_hosts import mig_host, t4_host
from tests.unit.node.stories import answer, gpu_node
from vfiomgr.diagnostic import blocker
from vfiomgr.errors import HostError, NeedsRoot, Refusal, UsageError, WriteFailed
from vfiomgr.host.udev import DeviceEvents
from vfiomgr.library import Host
from vfiomgr.node.messages import ClaimFacts, Problem, Question, Report, Settings, read, write
from vfiomgr.node.metrics import render
from vfiomgr.node.model import FEATURES, Inventory, NodeSettings
from vfiomgr.node.observing import THOROUGH
from vfiomgr.node.scanner import Scanner, serve
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.node.observing import Observed

NAME = "vfiomgr.io/GA102GL_A40"
GPUS = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
CDI = HostPath("/run/cdi/vfiomgr-vfiomgr.io_GA102GL__A40.json")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return gpu_node(tmp_path)


@pytest.fixture
def scanner(kernel: FakeKernel) -> Scanner:
    return Scanner(Host(kernel), render)


def found(report: Report) -> Inventory:
    assert report.error == ""
    assert report.inventory is not None
    return report.inventory


def reasons(report: Report) -> dict[str, list[str]]:
    return rules_of(found(report))


def rules_of(made: Inventory) -> dict[str, list[str]]:
    return {unit.id: [reason.rule for reason in unit.reasons] for unit in made.units}


def specification(kernel: FakeKernel) -> dict[str, Any]:
    text = kernel.read_text(CDI)
    assert text is not None
    return {d["name"]: d["containerEdits"] for d in json.loads(text)["devices"]}


def asking(*ids: str, resource: str = NAME) -> Question:
    return Question(verify=ids, resource=resource, number=7)


def unbind(kernel: FakeKernel, address: str, driver: str) -> None:
    kernel.write(HostPath(f"/sys/bus/pci/drivers/{driver}/unbind"), address)


def count_fatal(kernel: FakeKernel, address: str, number: int) -> None:
    path = HostPath(f"/sys/bus/pci/devices/{address}/aer_dev_fatal")
    kernel.replace(path, f"Undefined 0\nTOTAL_ERR_FATAL {number}\n".encode())


def test_bound_gpus_are_a_resource_with_a_specification(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    report = scanner.scan()
    assert [resource.name for resource in found(report).resources] == [NAME]
    assert reasons(report) == {gpu: [] for gpu in GPUS}
    mode = 0o600
    nodes = {g: [{"path": f"/dev/vfio/{n}", "fileMode": mode}] for n, g in enumerate(GPUS, 11)}
    assert specification(kernel) == {gpu: {"deviceNodes": nodes[gpu]} for gpu in GPUS}
    assert kernel.status(CDI).st_mode & 0o777 == 0o644  # type: ignore[union-attr]
    assert 'vfiomgr_device_ready{address="0000:01:00.0",reason=""} 1.0' in report.metrics
    assert "# EOF" not in report.metrics


def test_what_was_created_for_a_claim_is_not_offered_nor_missed_afterwards(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    created = ClaimFacts(7, created={GPUS[1]: ("gpu-1", "pci")})
    report = answer(scanner, Question(claims=created))
    assert list(reasons(report)) == [GPUS[0], GPUS[2]]
    assert ([unit.id for unit in report.created], report.claims) == ([GPUS[1]], 7)
    assert list(specification(kernel)) == [GPUS[0], GPUS[2]]
    unbind(kernel, GPUS[1], "vfio-pci")
    report = answer(scanner, Question(claims=ClaimFacts(8)))
    assert list(reasons(report)) == [GPUS[0], GPUS[2]]
    assert (report.created, report.claims, report.pools) == ((), 8, None)


def test_a_record_that_cannot_be_read_taints_free_devices(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    against = blocker("claim-unreadable", "u1.json", "cannot read u1.json", "rm u1.json")
    scanner.settings = Settings(dra_node="gpu-1")
    claims = ClaimFacts(1, held={GPUS[0]: "ml/train"}, unreadable=(against,))
    report = answer(scanner, Question(claims=claims))
    assert reasons(report) == {
        GPUS[0]: [],
        **{gpu: ["claim-unreadable"] for gpu in GPUS[1:]},
    }
    (pool,) = report.pools or ()
    assert [bool(device.taints) for device in pool.devices] == [False, True, True]
    assert not any(reasons(answer(scanner, Question(claims=ClaimFacts(2)))).values())
    file = HostPath("/run/vfiomgr/dra/vgpus/x.json")
    kernel.make_directory(file.parent)
    kernel.replace(file, b"")
    assert all(reasons(scanner.look()).values())
    kernel.remove(file)
    assert not any(reasons(scanner.look()).values())


def test_the_numa_nodes_near_devices_are_in_the_pools(kernel: FakeKernel, scanner: Scanner) -> None:
    for number, distances in enumerate(("10 12", "12 10")):
        kernel.sysfs.put(f"/sys/devices/system/node/node{number}/cpulist", f"{number}\n")
        kernel.sysfs.put(f"/sys/devices/system/node/node{number}/distance", distances)
        cpu = f"/sys/devices/system/cpu/cpu{number}"
        kernel.sysfs.put(f"{cpu}/topology/physical_package_id", "0\n")
    scanner.settings = Settings(dra_node="gpu-1")
    (pool,) = scanner.scan().pools or ()
    values = [d.attributes["resource.kubernetes.io/numaNode"] for d in pool.devices]
    assert set(values) == {(0, 1)}


def test_pools_are_reported_after_changes(kernel: FakeKernel, scanner: Scanner) -> None:
    scanner.settings = Settings(dra_node="gpu-1")
    (pool,) = read(Report, write(scanner.scan())).pools or ()
    assert (pool.name, len(pool.devices)) == ("gpu-1", 3)
    assert scanner.scan().pools is None
    unbind(kernel, GPUS[0], "vfio-pci")
    (pool,) = scanner.scan().pools or ()
    assert [bool(device.taints) for device in pool.devices] == [True, False, False]


def test_the_claim_of_a_device_is_reported(scanner: Scanner) -> None:
    report = answer(scanner, Question(claims=ClaimFacts(held={GPUS[0]: "ml/train"})))
    first = next(found(report).units)
    assert (first.claim, first.used_by) == ("ml/train", "claim ml/train")
    assert next(found(read(Report, write(report))).units).claim == "ml/train"


def test_an_unchanged_specification_is_not_written_again(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    scanner.scan()
    before = kernel.modified(CDI)
    scanner.scan()
    assert kernel.modified(CDI) == before


def test_a_gpu_that_leaves_its_driver_is_unhealthy_and_not_dropped(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    scanner.scan()
    unbind(kernel, GPUS[1], "vfio-pci")
    report = scanner.scan()
    assert list(reasons(report)) == list(GPUS)
    assert "wrong-driver" in reasons(report)[GPUS[1]]
    assert list(specification(kernel)) == [GPUS[0], GPUS[2]]


def test_a_specification_without_usable_devices_is_removed(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    scanner.scan()
    for gpu in GPUS:
        unbind(kernel, gpu, "vfio-pci")
    scanner.scan()
    assert not kernel.exists(CDI)
    kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/bind"), GPUS[0])
    assert reasons(scanner.scan())[GPUS[0]] == []
    assert list(specification(kernel)) == [GPUS[0]]


def test_specifications_of_former_names_are_removed_and_no_others(kernel: FakeKernel) -> None:
    Scanner(Host(kernel)).scan()
    other = HostPath("/run/cdi/vfiomgr-vfiomgr.io_vfio.json")
    kernel.replace(other, b"{}")
    settings = Settings(NodeSettings(prefix="example.com"))
    report = answer(Scanner(Host(kernel)), Question(settings=settings))
    assert reasons(report) == {gpu: [] for gpu in GPUS}
    assert sorted(kernel.children(HostPath("/run/cdi"))) == [
        "vfiomgr-example.com_GA102GL__A40.json",
        other.name,
    ]


def test_a_new_process_knows_what_the_last_one_offered(kernel: FakeKernel) -> None:
    report = Scanner(Host(kernel)).scan()
    unbind(kernel, GPUS[1], "vfio-pci")
    assert list(reasons(Scanner(Host(kernel)).scan())) == [GPUS[0], GPUS[2]]
    again = answer(Scanner(Host(kernel)), Question(previous=report.inventory))
    assert list(reasons(again)) == list(GPUS)


def test_settings_apply_from_the_next_scan_on(scanner: Scanner) -> None:
    scanner.scan()
    settings = Settings(NodeSettings(prefix="example.com", aliases={"10de:2235": "a40"}))
    resources = found(answer(scanner, Question(settings=settings))).resources
    assert [(r.name, [u.id for u in r.units]) for r in resources] == [
        ("example.com/a40", list(GPUS))
    ]


LAYOUT = """\
version: vfiomgr/v1
layouts:
  node:
    devices:
      - {select: {address: "0000:02:00.0"}, state: passthrough, resource: training}
"""


def test_the_layout_of_the_node_says_what_is_offered(kernel: FakeKernel, scanner: Scanner) -> None:
    scanner.scan()
    kernel.make_directory(HostPath(FILE.parent))
    kernel.replace(FILE, LAYOUT.encode())
    resources = found(scanner.scan()).resources
    assert {r.name: [u.id for u in r.units if u.is_healthy] for r in resources} == {
        "vfiomgr.io/training": [GPUS[1]]
    }
    kernel.replace(FILE, LAYOUT.replace("state: passthrough", "state: none").encode())
    count_fatal(kernel, GPUS[1], 0)
    scanner.scan()
    count_fatal(kernel, GPUS[1], 1)
    report = scanner.scan()
    assert "layout.yaml" in report.error
    assert report.inventory is not None
    assert rules_of(report.inventory)[GPUS[1]] == ["fatal-errors"]
    kernel.replace(FILE, LAYOUT.replace("training", "a" * 60).encode())
    report = scanner.scan()
    assert "invalid resource name: 'aaa" in report.error
    assert report.inventory is not None
    fresh = Scanner(Host(kernel)).scan()
    assert (fresh.inventory, fresh.error) == (None, report.error)
    kernel.remove(FILE)
    assert [resource.name for resource in found(scanner.scan()).resources] == [NAME]


def test_pods_and_quarantine_are_joined(scanner: Scanner) -> None:
    reason = blocker("reset-failed", GPUS[0], "cannot reset it", "power-cycle it")
    pods = {GPUS[2]: "default/cuda/c0"}
    report = answer(scanner, Question(pods=pods, quarantine={GPUS[0]: reason}))
    assert reasons(report)[GPUS[0]] == ["reset-failed"]
    assert [unit.used_by for unit in found(report).units] == ["", "", "default/cuda/c0"]
    expected = f'vfiomgr_device_allocated{{address="{GPUS[2]}",claim="",container="c0"'
    assert expected in report.metrics
    assert reasons(answer(scanner, Question(quarantine={})))[GPUS[0]] == []


def test_errors_before_the_start_and_before_a_release_are_forgiven(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    count_fatal(kernel, GPUS[0], 1)
    assert reasons(scanner.scan())[GPUS[0]] == []
    count_fatal(kernel, GPUS[0], 2)
    assert reasons(scanner.scan())[GPUS[0]] == ["fatal-errors"]
    assert reasons(answer(scanner, Question(forgive=GPUS[0])))[GPUS[0]] == []
    assert reasons(scanner.scan())[GPUS[0]] == []


def test_a_release_forgives_no_other_device(kernel: FakeKernel, scanner: Scanner) -> None:
    for number in (0, 1):
        for gpu in GPUS[:2]:
            count_fatal(kernel, gpu, number)
        report = scanner.scan()
    assert reasons(report)[GPUS[1]] == ["fatal-errors"]
    for report in (answer(scanner, Question(forgive=GPUS[0])), scanner.scan()):
        assert reasons(report) == {GPUS[0]: [], GPUS[1]: ["fatal-errors"], GPUS[2]: []}


def test_errors_of_a_function_that_was_added_later_are_seen(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    scanner.scan()
    count_fatal(kernel, GPUS[0], 5)
    assert reasons(scanner.scan())[GPUS[0]] == []
    count_fatal(kernel, GPUS[0], 6)
    assert reasons(scanner.scan())[GPUS[0]] == ["fatal-errors"]


def test_errors_of_a_function_that_was_added_again_are_seen(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    for number, expected in ((5, []), (0, []), (1, ["fatal-errors"])):
        count_fatal(kernel, GPUS[0], number)
        assert reasons(scanner.scan())[GPUS[0]] == expected


def test_a_new_process_knows_the_errors_that_are_forgiven(kernel: FakeKernel) -> None:
    count_fatal(kernel, GPUS[0], 1)
    report = Scanner(Host(kernel)).scan()
    count_fatal(kernel, GPUS[0], 2)
    again = read(Question, write(Question(previous=report.inventory, before=report.before)))
    assert reasons(answer(Scanner(Host(kernel)), again))[GPUS[0]] == ["fatal-errors"]


def test_devices_are_verified_by_a_scan_of_now(kernel: FakeKernel, scanner: Scanner) -> None:
    scanner.scan()
    report = answer(scanner, asking(GPUS[0], GPUS[1]))
    assert (report.number, report.problems) == (7, ())
    unbind(kernel, GPUS[1], "vfio-pci")
    (problem,) = answer(scanner, asking(GPUS[0], GPUS[1])).problems
    assert problem.device == GPUS[1]
    assert f"{GPUS[1]} is on no driver" in problem.message
    (problem,) = answer(scanner, asking("0000:09:00.0")).problems
    assert problem.message == f"0000:09:00.0 is not a device of {NAME}"
    (problem,) = answer(scanner, asking(GPUS[0], resource="example.com/GPU")).problems
    assert not problem.has_failed_reset


def test_a_device_that_leaves_the_driver_of_its_rule_is_drift(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    kernel.make_directory(HostPath(FILE.parent))
    kernel.replace(FILE, LAYOUT.encode())
    assert scanner.scan().drift == {}
    kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), GPUS[1])
    kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), GPUS[2])
    drift = scanner.scan().drift
    assert list(drift) == [GPUS[1]]
    assert drift[GPUS[1]].endswith(": layout requires a VFIO driver, found no driver")
    kernel.replace(FILE, LAYOUT.replace("state: passthrough", "state: none").encode())
    assert scanner.scan().drift == drift
    kernel.remove(FILE)
    assert scanner.scan().drift == {}


@pytest.mark.parametrize(("cost", "pause"), [(0.01, 10.0), (0.15, 15.0), (9.0, 20.0)])
def test_scans_take_a_hundredth_of_a_processor(
    cost: float, pause: float, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([5.0, 5.0 + cost])
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    scanner.settings = Settings(interval=10.0)
    assert scanner.scan().inventory is not None
    assert scanner.pause(has_events=False) == pytest.approx(pause)


class Resets:
    """What a host does when a device is to be reset."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.addresses: list[str] = []

    def __call__(self, address: object, allow: tuple[str, ...]) -> None:
        """Reset it although a pod has it, or fail."""
        assert allow == ("in-use",)
        self.addresses.append(str(address))
        if self.error is not None:
            raise self.error


def with_resets(scanner: Scanner, resets: Resets, monkeypatch: pytest.MonkeyPatch) -> Scanner:
    monkeypatch.setattr(scanner._host, "reset", resets)
    scanner.settings = replace(scanner.settings, node=NodeSettings(resets=True))
    return scanner


def test_devices_are_reset_where_the_resource_says_so(
    scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = Resets()
    monkeypatch.setattr(scanner._host, "reset", resets)
    answer(scanner, asking(GPUS[0]))
    assert resets.addresses == []
    with_resets(scanner, resets, monkeypatch)
    assert answer(scanner, asking(GPUS[0], GPUS[2])).problems == ()
    assert resets.addresses == [GPUS[0], GPUS[2]]


def test_a_device_that_a_guest_has_already_is_not_reset(
    kernel: FakeKernel, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kata starts the guest with its devices before the containers of the pod."""
    resets = Resets()
    with_resets(scanner, resets, monkeypatch)
    kernel.guest_opens(11)
    answer(scanner, Question(pods={GPUS[0]: "default/cuda/c0"}))
    assert answer(scanner, asking(GPUS[0], GPUS[1])).problems == ()
    assert resets.addresses == [GPUS[1]]


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (HostError("cannot reset it: timeout"), True),
        (WriteFailed("/sys/x/reset", "1", ENOTTY, "cannot reset it"), True),
        (Refusal("it has no reset"), False),
        (NeedsRoot("a reset"), False),
        (UsageError("a recorded host cannot be changed"), False),
        (WriteFailed("/sys/x/reset", "1", EROFS, "cannot reset it"), False),
        (WriteFailed("/sys/x/reset", "1", EPERM, "cannot reset it"), False),
    ],
)
def test_only_a_reset_that_failed_leads_to_quarantine(
    error: Exception, *, failed: bool, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_resets(scanner, Resets(error), monkeypatch)
    (problem,) = answer(scanner, asking(GPUS[0])).problems
    assert problem.has_failed_reset is failed
    assert str(error) in problem.message


def test_without_access_to_sys_a_reset_is_skipped_and_noted(
    scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = Resets()
    with_resets(scanner, resets, monkeypatch)
    assert found(scanner.scan()).notes == ()
    monkeypatch.setattr("os.access", lambda *_: False)
    report = answer(scanner, asking(GPUS[0]))
    assert (report.problems, resets.addresses) == ((), [])
    assert [(note.rule, note.subject) for note in found(report).notes] == [("reset-skipped", NAME)]


def test_labels_are_written_for_node_feature_discovery(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    scanner.scan()
    assert not kernel.exists(FEATURES)
    kernel.make_directory(FEATURES)
    scanner.scan()
    text = kernel.read_text(FEATURES / "vfiomgr")
    assert text is not None
    assert "vfiomgr.io/model.GA102GL_A40=3\n" in text


def test_an_error_of_a_scan_is_reported(scanner: Scanner) -> None:
    scanner.settings = Settings(NodeSettings(prefix="kubernetes.io"))
    report = answer(scanner, asking(GPUS[0]))
    assert report.inventory is None
    assert "invalid domain" in report.error
    assert report.number == 7


def test_messages_survive_the_pipe(scanner: Scanner) -> None:
    report = replace(
        scanner.scan(), number=3, problems=(Problem("x", "it is gone", has_failed_reset=True),)
    )
    line = write(report)
    assert line.count(b"\n") == 1
    assert read(Report, line) == report
    question = Question(Settings(), {"a": "b"}, {"a": blocker("x", "a", "why")}, report.inventory)
    assert read(Question, write(question)) == question
    with pytest.raises(ValueError, match="truncated"):
        read(Report, b"{")


def test_a_guest_without_its_device_has_not_crashed_while_its_process_runs(
    kernel: FakeKernel, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.offers.SETTLE", 0)
    kernel.guest_opens(11)
    process = f"/proc/{kernel.vfio.guests[11].pid}"
    name = f"qemu-system-x86_64\0-name\0sandbox-{'a' * 64},debug-threads=on\0"
    kernel.sysfs.put(f"{process}/cmdline", name)
    assert answer(scanner, Question(pods={GPUS[0]: "ml/train-0/c0"})).crashes == {}
    kernel.guest_closes(11)
    kernel.sysfs.put(f"{process}/cmdline", name)
    assert scanner.scan().crashes == {}
    kernel.sysfs.drop(process)
    assert list(scanner.scan().crashes) == [GPUS[0]]


def test_allocations_do_not_delay_the_next_scan(kernel: FakeKernel) -> None:
    source, questions = os.pipe()
    answers, sink = os.pipe()
    thread = threading.Thread(target=serve, args=(Host(kernel), source, sink))
    thread.start()
    os.write(questions, write(Question(settings=Settings(interval=0.5))))
    end, text = time.monotonic() + 10, b""
    while text.count(b"\n") < 4 and time.monotonic() < end:
        os.write(questions, write(Question(allocated=(GPUS[0],))))
        if select.select([answers], [], [], 0.1)[0]:
            text += os.read(answers, 1 << 16)
    os.close(questions)
    thread.join(10)
    for descriptor in (source, answers, sink):
        os.close(descriptor)
    assert text.count(b"\n") >= 4


def test_between_events_the_host_is_looked_at_and_an_event_is_followed(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    answers, sink = os.pipe()
    source, questions = os.pipe()
    waiting, event = os.pipe()

    class Changes:
        def __init__(self, _: object) -> None:
            os.write(event, b"x")

        def fileno(self) -> int:
            return waiting

        def wait(self, _: float) -> bool:
            return False

        def take(self) -> DeviceEvents:
            os.read(waiting, 1)
            return DeviceEvents()

    def noted(name: str) -> Callable[..., Report]:
        def note(*_: object) -> Report:
            done.append(name)
            if len(done) == len(ways):
                os.close(questions)
            return Report()

        return note

    ways = ["follow", "look", "look"]
    for name in ("scan", "follow", "look"):
        monkeypatch.setattr(Scanner, name, noted(name))
    monkeypatch.setattr(Scanner, "pause", lambda *_, **__: 0.0)
    monkeypatch.setattr(type(kernel), "is_machine", True)
    monkeypatch.setattr("vfiomgr.node.scanner.DeviceChanges", Changes)
    serve(Host(kernel), source, sink)
    for descriptor in (source, answers, sink, waiting, event):
        os.close(descriptor)
    assert done[: len(ways)] == ways


@pytest.mark.parametrize("is_writable", [True, False])
def test_vgpus_for_claims_need_a_writable_sys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_writable: bool
) -> None:
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _: is_writable)
    scanner = Scanner(Host(t4_host(tmp_path)), render)
    scanner.settings = Settings(dra_node="gpu-1")
    assert bool(scanner.scan().pools) == is_writable


def test_gpu_instances_are_published_and_read_again_after_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, gpu = mig_host(tmp_path, total_vfs=2), "0000:21:00.0"
    kernel.call("nvidia-smi", "-mig", "1", "-i", gpu)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", gpu)
    monkeypatch.setattr("vfiomgr.node.scanner.may_reset", lambda _: True)
    scanner, asked = Scanner(Host(kernel)), list[object]()
    scanner.settings = Settings(dra_node="gpu-1")
    run = kernel.run

    def counted(command: Sequence[str], *options: Any) -> str | None:
        asked.append(command)
        return run(command, *options)

    monkeypatch.setattr(kernel, "run", counted)
    (pool,) = scanner.scan().pools or ()
    assert "profile-0" in pool.counter_sets[0].counters
    asked.clear()
    assert scanner.scan().pools is None
    assert asked == []
    Host(kernel).create_vgpu(type="474", parent=gpu)
    asked.clear()
    (pool,) = scanner.scan().pools or ()
    assert any(device.target.unit for device in pool.devices)
    assert ("nvidia-smi", "mig", "-lgi") in asked
    asked.clear()
    monkeypatch.setattr("vfiomgr.node.observing._MODES_INTERVAL", 0)
    scanner.scan()
    assert ("nvidia-smi", "-q") in asked


def event(kernel: FakeKernel, address: str) -> DeviceEvents:
    directory = kernel.resolve(pci_device(PciAddress.parse(address)))
    assert directory is not None
    return DeviceEvents(frozenset({directory.removeprefix("/sys")}))


def settled(scanner: Scanner) -> Scanner:
    """A scanner that has read the files that it has written."""
    scanner.scan()
    scanner.look()
    return scanner


def test_a_look_at_a_host_as_it_was_makes_no_inventory(scanner: Scanner) -> None:
    report = settled(scanner).look()
    assert (report.inventory, report.is_unchanged, report.error) == (None, True, "")
    assert read(Report, write(report)) == report
    assert scanner.cost_of_look > 0


@pytest.mark.parametrize("way", ["follow", "look"])
def test_a_change_is_reported_as_by_a_scan(kernel: FakeKernel, scanner: Scanner, way: str) -> None:
    settled(scanner)
    events = event(kernel, GPUS[1])
    unbind(kernel, GPUS[1], "vfio-pci")
    report = scanner.follow(events) if way == "follow" else scanner.look()
    assert reasons(report) == reasons(scanner.scan())
    assert "wrong-driver" in reasons(report)[GPUS[1]]
    assert list(specification(kernel)) == [GPUS[0], GPUS[2]]


def test_an_event_of_another_device_makes_no_inventory(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    assert settled(scanner).follow(event(kernel, GPUS[1])).is_unchanged


def test_a_look_finds_users_errors_layouts_and_lost_files(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    count_fatal(kernel, GPUS[0], 0)
    kernel.make_directory(FEATURES)
    settled(scanner)
    kernel.guest_opens(12)
    units = {unit.id: unit for unit in found(scanner.look()).units}
    assert [unit.is_open for unit in units.values()] == [False, True, False]
    count_fatal(kernel, GPUS[0], 1)
    assert reasons(scanner.look())[GPUS[0]] == ["fatal-errors"]
    for path in (CDI, FEATURES / "vfiomgr"):
        kernel.remove(path)
        assert not scanner.look().is_unchanged
        assert kernel.exists(path)
        scanner.look()
    kernel.make_directory(HostPath(FILE.parent))
    kernel.replace(FILE, LAYOUT.encode())
    names = [r.name for r in found(scanner.look()).resources]
    assert names == ["vfiomgr.io/training"]


def put_to_sleep(kernel: FakeKernel, address: str, state: str = "D3hot") -> None:
    """vfio-pci suspends functions that nobody has open."""
    directory = pci_device(PciAddress.parse(address))
    kernel.sysfs.put(directory / "power/runtime_status", "suspended")
    kernel.sysfs.put(directory / "power_state", state)


@pytest.mark.parametrize("state", ["D3hot", "D3cold"])
def test_a_suspended_function_is_read_before_a_container_starts(
    kernel: FakeKernel, scanner: Scanner, state: str
) -> None:
    """It fell off the bus while it was suspended; a scan does not wake it from D3cold."""
    for gpu in GPUS:
        put_to_sleep(kernel, gpu, state)
    scanner.scan()
    kernel.fall_off_bus(GPUS[0])
    if state == "D3cold":
        assert reasons(scanner.scan())[GPUS[0]] == []
    report = answer(scanner, asking(*GPUS[:2]))
    (problem,) = report.problems
    assert (problem.device, "does not answer" in problem.message) == (GPUS[0], True)
    assert reasons(report)[GPUS[0]] == ["silent-device"]
    assert reasons(scanner.scan()) == {GPUS[0]: ["silent-device"], GPUS[1]: [], GPUS[2]: []}


def test_a_suspended_function_is_read_before_a_claim_is_prepared(
    kernel: FakeKernel, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet waits for it: nothing else is read."""
    for gpu in GPUS:
        put_to_sleep(kernel, gpu)
    scanner.scan()
    kernel.fall_off_bus(GPUS[0])
    monkeypatch.setattr(scanner._observer._kept, "read", None)
    report = answer(scanner, asking(*GPUS[:2], resource=""))
    assert [problem.device for problem in report.problems] == [GPUS[0]]
    assert (report.number, reasons(report)[GPUS[0]]) == (7, ["silent-device"])


def test_each_suspended_function_is_looked_at_once_in_a_while(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    for gpu in GPUS:
        put_to_sleep(kernel, gpu)
    settled(scanner)
    kernel.fall_off_bus(GPUS[1])
    reports = [scanner.look() for _ in range(THOROUGH)]
    (report,) = (each for each in reports if not each.is_unchanged)
    assert reasons(report) == {GPUS[0]: [], GPUS[1]: ["silent-device"], GPUS[2]: []}
    kernel.sysfs.put_bytes(pci_device(PciAddress.parse(GPUS[1])) / "config", bytes(256))
    assert reasons(scanner.look())[GPUS[1]] == []


@pytest.mark.parametrize("who", ["function", "bridge"])
def test_a_look_wakes_neither_a_function_nor_its_bridge(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Reading would resume a function in D3cold, and a bridge that is suspended."""
    kernel.add_pci("0000:00:01.0", vendor="8086", device="1901", class_code="060400", group=1)
    kernel.add_pci(
        "0000:09:00.0",
        vendor="10de",
        device="2235",
        class_code="030200",
        group=9,
        driver="vfio-pci",
        bridge="0000:00:01.0",
    )
    put_to_sleep(kernel, "0000:09:00.0", "D3cold" if who == "function" else "D3hot")
    if who == "bridge":
        put_to_sleep(kernel, "0000:00:01.0")
    scanner = settled(Scanner(Host(kernel), render))
    kernel.fall_off_bus("0000:09:00.0")
    reads: list[str] = []
    monkeypatch.setattr("vfiomgr.pci.facts.answers", lambda _, device: reads.append(str(device)))
    assert all(scanner.look().is_unchanged for _ in range(THOROUGH))
    assert sorted(reads) == sorted(GPUS)


def test_an_event_of_an_error_leads_to_its_counter(kernel: FakeKernel, scanner: Scanner) -> None:
    """The kernel announces the recovery of a device (pci_uevent_ers)."""
    count_fatal(kernel, GPUS[0], 0)
    settled(scanner)
    count_fatal(kernel, GPUS[0], 1)
    report = scanner.follow(event(kernel, GPUS[0]))
    assert reasons(report)[GPUS[0]] == ["fatal-errors"]


def test_errors_are_noticed_by_the_counter_of_a_root_port(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is read however many functions are behind the port."""
    kernel.add_pci("0000:00:01.0", vendor="8086", device="1901", class_code="060400")
    counter = HostPath("/sys/bus/pci/devices/0000:00:01.0/aer_rootport_total_err_fatal")
    for bus in (8, 9):
        kernel.add_pci(
            f"0000:{bus:02x}:00.0",
            vendor="10de",
            device="2235",
            class_code="030200",
            group=bus,
            driver="vfio-pci",
            bridge="0000:00:01.0",
        )
        count_fatal(kernel, f"0000:{bus:02x}:00.0", 0)
    kernel.replace(counter, b"0\n")
    scanner = settled(Scanner(Host(kernel), render))
    assert not scanner.has_errors()
    reads: list[str] = []
    read_in = type(kernel).read_in

    def counted(tree: FakeKernel, above: str, name: str) -> str | None:
        reads.append(name)
        return read_in(tree, above, name)

    monkeypatch.setattr(type(kernel), "read_in", counted)
    assert not scanner.has_errors()
    assert reads == ["aer_rootport_total_err_fatal"]
    kernel.replace(counter, b"1\n")
    count_fatal(kernel, "0000:09:00.0", 1)
    assert scanner.has_errors()
    assert reasons(scanner.look())["0000:09:00.0"] == ["fatal-errors"]
    assert [scanner.has_errors() for _ in range(2)] == [True, False]


def test_errors_lead_to_a_look_between_the_others(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, questions = os.pipe()
    answers, sink = os.pipe()
    scans = 0

    def scan(*_: object) -> Report:
        nonlocal scans
        scans += 1
        if scans == 3:
            os.close(questions)
        return Report()

    monkeypatch.setattr(Scanner, "scan", scan)
    monkeypatch.setattr(Scanner, "pause", lambda *_, **__: 3600.0)
    monkeypatch.setattr(Scanner, "pause_of_glances", lambda _: 0.0)
    monkeypatch.setattr(Scanner, "has_errors", lambda _: scans > 0)
    serve(Host(kernel), source, sink)
    for descriptor in (source, answers, sink):
        os.close(descriptor)
    assert scans == 3


def test_errors_are_noticed_by_the_counter_of_a_function_without_a_root_port(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    count_fatal(kernel, GPUS[2], 5)
    settled(scanner)
    assert not scanner.has_errors()
    count_fatal(kernel, GPUS[2], 6)
    assert scanner.has_errors()


def test_what_the_agent_learns_during_a_scan_leads_to_one_more(
    scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where events are announced, that one reads only what no event announces."""
    settled(scanner)
    reads: list[str] = []

    def noted(way: str) -> Callable[..., Observed]:
        made: Callable[..., Observed] = getattr(scanner._observer, way)

        def note(*arguments: object) -> Observed:
            reads.append(way)
            return made(*arguments)

        return note

    for way in ("read", "look"):
        monkeypatch.setattr(scanner._observer, way, noted(way))
    learned = (
        Question(pods={GPUS[0]: "default/a/c"}),
        Question(claims=ClaimFacts(number=4)),
        Question(quarantine={}),
    )
    (report,) = scanner.answers(map(write, learned), has_events=True)
    assert (report.knows_pods, report.claims, reads) == (True, 4, ["look"])
    verifying = (*learned, asking(GPUS[1]))
    (report,) = scanner.answers(map(write, verifying), has_events=True)
    assert (report.number, reads) == (7, ["look", "read"])
    (_,) = scanner.answers([write(Question())], has_events=True)
    assert reads == ["look", "read", "read"]


def test_an_error_is_reported_again_until_it_is_gone(scanner: Scanner) -> None:
    settled(scanner)
    answer(scanner, Question(settings=Settings(NodeSettings(prefix="kubernetes.io"))))
    assert "invalid domain" in scanner.look().error
    assert found(answer(scanner, Question(settings=Settings())))
    assert scanner.look().is_unchanged


def test_errors_that_only_metrics_show_are_counted_now_and_then(
    kernel: FakeKernel, scanner: Scanner
) -> None:
    path = HostPath(f"/sys/bus/pci/devices/{GPUS[0]}/aer_dev_correctable")
    count_fatal(kernel, GPUS[0], 0)
    settled(scanner)
    kernel.replace(path, b"TOTAL_ERR_COR 3\n")
    reports = [scanner.look() for _ in range(4)]
    assert [report.is_unchanged for report in reports].count(False) == 1
    (report,) = (report for report in reports if not report.is_unchanged)
    expected = f'vfiomgr_aer_errors_total{{address="{GPUS[0]}",severity="correctable"}} 3.0'
    assert expected in report.metrics


def test_a_flood_of_corrected_errors_is_a_hint_until_it_ends(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port above counts too; a rate needs two readings that are a minute apart."""
    port = "0000:00:01.0"
    kernel.add_pci(port, vendor="8086", device="1901", class_code="060400", header_type=1, group=1)
    kernel.add_pci(
        "0000:09:00.0",
        vendor="10de",
        device="2235",
        class_code="030200",
        group=9,
        driver="vfio-pci",
        bridge=port,
    )
    now = 864_000.0
    monkeypatch.setattr("vfiomgr.node.observing.time.monotonic", lambda: now)
    path = HostPath(f"/sys/bus/pci/devices/{port}/aer_dev_correctable")
    for kind in ("correctable", "nonfatal", "fatal"):
        kernel.sysfs.put(f"{path.parent}/aer_dev_{kind}", "TOTAL_ERR_COR 0")
    scanner = settled(Scanner(Host(kernel), render))
    hints = []
    for number in (100, 103, 103):
        now += 60
        kernel.replace(path, f"TOTAL_ERR_COR {number}\n".encode())
        reports = [scanner.look() for _ in range(THOROUGH)]
        changed = [report for report in reports if not report.is_unchanged]
        units = {unit.id: unit.hints for report in changed for unit in found(report).units}
        hints.append(units["0000:09:00.0"])
        assert units.get(GPUS[0], ()) == ()
    assert hints == [("corrected-errors",), ("corrected-errors",), ()]


def test_a_new_node_has_its_users_looked_for(kernel: FakeKernel, scanner: Scanner) -> None:
    unbind(kernel, GPUS[1], "vfio-pci")
    settled(scanner)
    kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/bind"), GPUS[1])
    kernel.guest_opens(12)
    report = scanner.follow(event(kernel, GPUS[1]))
    assert [unit.is_open for unit in found(report).units] == [False, True, False]
    events = event(kernel, GPUS[1])
    kernel.guest_closes(12)
    unbind(kernel, GPUS[1], "vfio-pci")
    assert [unit.is_open for unit in found(scanner.follow(events)).units] == [False] * 3


def test_everything_is_read_from_time_to_time(
    kernel: FakeKernel, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(scanner)
    host = HostPath("/sys/bus/pci/devices/0000:01:00.0/numa_node")
    kernel.sysfs.put(host, "1")
    assert scanner.look().is_unchanged
    monkeypatch.setattr("vfiomgr.node.observing.EVERYTHING", 0)
    assert next(found(scanner.look()).units).numa_nodes == (1,)


@pytest.mark.parametrize(("cost", "pause"), [(0.001, 10.0), (0.0045, 15.0), (9.0, 20.0)])
def test_looks_take_less_than_a_thousandth_of_a_processor(
    cost: float, pause: float, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(scanner).settings = Settings(interval=10.0)
    clock = iter([5.0, 5.0 + cost])
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    assert scanner.look().is_unchanged
    assert scanner.pause(has_events=True) == pytest.approx(pause)
