"""What the hook changes on the host while a guest runs: CPUs, huge pages, sleep."""

from __future__ import annotations

import errno
import warnings
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import mixed
from tests.fakes.libvirt_node import node_uri
from tests.fakes.tunable import TunableHost
from tests.unit.engine.faults import STRIDE, EveryFault, changes, kept, told
from tests.unit.libvirt.domains import EMPTY, hostdev, with_hostdevs
from tests.unit.libvirt.test_hook_apply import prepare, read_records, release
from tests.unit.libvirt.test_hook_commands import xml
from vfiomgr.engine.plan import DEADLINE
from vfiomgr.engine.registry import perform
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import InvalidDocument, Refusal, RolledBack, VfiomgrError
from vfiomgr.guests.model import NumaCell
from vfiomgr.libvirt.checks import check_domain
from vfiomgr.libvirt.hook import render_settings, tuning_of
from vfiomgr.libvirt.model import NAMESPACE, DomainCpu, DomainMemory, HookSettings
from vfiomgr.paths import BOOT_ID, SCRIPT
from vfiomgr.pci.model import PciAddress
from vfiomgr.tuning.model import TUNED, PlacedInterrupts, parse_tuned
from vfiomgr.tuning.steps import (
    HugepageNeeds,
    InhibitSleep,
    IsolateCpus,
    KeepInterrupts,
    MemoryPart,
    RestoreHost,
    TuneHost,
)
from vfiomgr.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.host.programs import ProgramAnswer
    from vfiomgr.libvirt.model import Domain

GPU = "0000:01:00.0"
OTHER = "5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c99"
EVERY = HookSettings(isolate_cpus=True, hugepages=True, interrupts=True)
PAGES = DomainMemory(GIB, has_hugepages=True, host_nodes=frozenset({1}))
PINNED = DomainCpu(2, pins=((0, frozenset({2})), (1, frozenset({3}))))
GUEST = replace(with_hostdevs(EMPTY, hostdev(GPU)), hook=EVERY, memory=PAGES, cpu=PINNED)
UNIT = f"vfiomgr-inhibit-{GUEST.uuid}.service"
WATCH = f"vfiomgr-interrupts-{GUEST.uuid}.service"
PLACED = PlacedInterrupts((PciAddress.parse(GPU),), (2, 3))
PROGRAM = "/usr/bin/python3 -I -m vfiomgr"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfiomgr.tuning.apply.own_program", lambda: PROGRAM)


def tunable(place: Path) -> TunableHost:
    return TunableHost(mixed(place))


def other(cpu: int, memory: int) -> Domain:
    """A second guest, without devices."""
    return replace(
        GUEST,
        uuid=OTHER,
        name="lin",
        hostdevs=(),
        cpu=DomainCpu(1, pins=((0, frozenset({cpu})),)),
        memory=replace(PAGES, total_bytes=memory),
    )


def test_host_has_its_cpus_and_memory_again_when_the_guest_ends(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    before = kept(host.kernel)
    assert GPU in prepare(host.kernel, GUEST)
    assert host.allowed == {"system.slice": "0-1", "user.slice": "0-1", "init.scope": "0-1"}
    assert host.cpus() == "0-1"
    assert host.pages(1) == (512, 512)
    assert host.pages(0) == (0, 0)
    release(host.kernel, GUEST)
    assert set(host.allowed.values()) == {""}
    assert host.cpus() == "0-3"
    assert host.pages(1) == (0, 0)
    assert not host.kernel.exists(TUNED)
    left = changes(before, kept(host.kernel))
    assert all("cpuset.cpus" in path for path in left)


def test_sleep_is_inhibited_while_the_guest_has_a_device(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    plain = replace(GUEST, hook=HookSettings())
    prepare(host.kernel, plain)
    ((unit, command),) = host.services.items()
    assert unit == UNIT
    assert command[0] == "systemd-inhibit"
    assert {"--what=sleep", "--mode=block", f"--why=guest win has {GPU}"} <= {*command}
    assert set(host.allowed.values()) == {""}
    release(host.kernel, plain)
    assert host.services == {}


def test_a_guest_without_devices_lets_the_host_sleep(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    prepare(host.kernel, other(2, GIB))
    assert host.services == {}


def test_a_guest_starts_although_sleep_cannot_be_inhibited(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    del host.kernel.programs.known["/usr/bin/systemd-run"]
    plain = replace(GUEST, hook=HookSettings())
    with pytest.warns(UserWarning, match="the host may sleep while a guest has devices"):
        assert GPU in prepare(host.kernel, plain)
    release(host.kernel, plain)
    assert not host.kernel.exists(TUNED)


def test_an_inhibitor_that_logind_does_not_list_is_no_success(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.has_logind = False
    plain = replace(GUEST, hook=HookSettings())
    with pytest.warns(UserWarning, match=f"logind lists no inhibitor of {UNIT}"):
        assert GPU in prepare(host.kernel, plain)
    release(host.kernel, plain)


def test_without_systemd_nothing_is_inhibited(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    prepare(kernel, replace(GUEST, hook=HookSettings()))
    assert not kernel.exists(TUNED)


def test_interrupts_are_kept_on_the_guests_cpus_by_a_service(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    prepare(host.kernel, GUEST)
    assert host.services[WATCH] == (*PROGRAM.split(), "interrupts", "--cpus", "2-3", GPU)
    moved = replace(GUEST, cpu=DomainCpu(1, pins=((0, frozenset({1})),)))
    prepare(host.kernel, moved)
    assert host.services[WATCH] == (*PROGRAM.split(), "interrupts", "--cpus", "1", GPU)
    assert host.cpus() == "0,2-3"
    release(host.kernel, moved)
    assert host.services == {}


def test_a_guest_without_functions_has_no_interrupts(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    prepare(host.kernel, replace(GUEST, hostdevs=(), hook=HookSettings(interrupts=True)))
    assert host.services == {}


def test_a_service_needs_an_installed_vfiomgr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.tuning.apply.own_program", lambda: None)
    host = tunable(tmp_path)
    before = host.picture()
    with pytest.raises(RolledBack, match="cannot run vfiomgr from a service") as caught:
        prepare(host.kernel, GUEST)
    assert "README" in caught.value.hint
    assert host.picture() == before


def test_a_service_that_ends_at_once_is_no_success(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.ending = "vfiomgr-interrupts"
    before = host.picture()
    with pytest.raises(RolledBack, match=f"{WATCH} has ended"):
        prepare(host.kernel, GUEST)
    assert host.picture() == before


def test_two_guests_leave_the_rest_to_the_host_in_any_order(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    second = other(1, GIB // 2)
    prepare(host.kernel, GUEST)
    host.set_pages(1, 512, 0)
    prepare(host.kernel, second)
    assert host.cpus() == "0"
    assert host.pages(1) == (768, 256)
    host.set_pages(1, 768, 512)
    release(host.kernel, GUEST)
    assert host.cpus() == "0,2-3"
    assert host.allowed["system.slice"] == "0,2-3"
    assert host.pages(1) == (256, 0)
    host.set_pages(1, 256, 256)
    release(host.kernel, second)
    assert host.allowed["system.slice"] == ""
    assert host.pages(1) == (0, 0)


def test_only_the_missing_pages_are_added_and_those_of_others_stay(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.set_pages(1, 200, 100)
    prepare(host.kernel, GUEST)
    assert host.pages(1) == (612, 512)
    host.set_pages(1, 662, 562)  # an administrator adds 50
    release(host.kernel, GUEST)
    assert host.pages(1) == (250, 150)


def test_pages_still_in_use_stay_with_a_warning(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    prepare(host.kernel, GUEST)
    host.set_pages(1, 512, 500)
    with pytest.warns(UserWarning, match="12 huge pages on node 1 are still in use"):
        release(host.kernel, GUEST)
    assert host.pages(1) == (12, 0)


def test_fragmented_memory_is_compacted_and_tried_again(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.fragmented_kib[1] = 1536 * 1024
    prepare(host.kernel, GUEST)
    assert host.pages(1) == (512, 512)


def test_fragmented_memory_refuses_with_numbers_and_nothing_stays(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.fragmented_kib[1], host.stays_fragmented = 1536 * 1024, True
    before, first = kept(host.kernel), host.picture()
    with pytest.raises(RolledBack) as caught:
        prepare(host.kernel, GUEST)
    assert "cannot allocate 512 huge pages of 2 MiB on node 1" in str(caught.value)
    assert "allocated 256; free memory: 1.5 GiB" in str(caught.value)
    assert host.picture() == first
    assert changes(before, kept(host.kernel)) == {}


def test_pages_of_1_gib_name_the_kernel_parameter(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    large = replace(PAGES, total_bytes=4 * GIB, hugepage_bytes=(GIB,))
    with pytest.raises(Refusal, match="2 GiB do not fit into the free memory") as caught:
        prepare(host.kernel, replace(GUEST, memory=large))
    assert "hugepagesz=1G hugepages=4" in caught.value.hint
    prepare(host.kernel, replace(GUEST, memory=replace(large, total_bytes=2 * GIB)))
    assert host.pages(1, 1 << 20) == (2, 2)


def test_cells_have_their_pages_on_their_nodes(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    cells = tuple(NumaCell(n, 512 * MIB, frozenset({n})) for n in (0, 1))
    memory = replace(
        PAGES,
        host_nodes=frozenset({0, 1}),
        cell_nodes=((0, frozenset({0})), (1, frozenset({1}))),
    )
    prepare(host.kernel, replace(GUEST, memory=memory, cpu=replace(PINNED, cells=cells)))
    assert (host.pages(0), host.pages(1)) == ((256, 256), (256, 256))


def test_memory_of_any_node_is_taken_where_it_is_free(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    memory = replace(PAGES, total_bytes=3 * GIB, host_nodes=frozenset())
    prepare(host.kernel, replace(GUEST, memory=memory))
    assert host.pages(0)[0] + host.pages(1)[0] == 1536


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": DomainCpu(2)}, "it is not pinned to any"),
        ({"cpu": DomainCpu(1, pins=((0, frozenset(range(4))),))}, "no CPU remains for the host"),
        ({"memory": DomainMemory(GIB)}, "its memory is not backed by huge pages"),
        ({"memory": replace(PAGES, hugepage_bytes=(2 * MIB, GIB))}, "several page sizes"),
        ({"memory": replace(PAGES, hugepage_bytes=(16 * MIB,))}, "the kernel has none of 16 MiB"),
        ({"memory": replace(PAGES, total_bytes=8 * GIB)}, "do not fit into the free memory"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    host = tunable(tmp_path)
    before = host.picture()
    with pytest.raises(Refusal, match=message) as caught:
        prepare(host.kernel, replace(GUEST, **change))
    assert caught.value.hint
    assert host.picture() == before
    assert read_records(host.kernel) == ()


def test_cpus_that_somebody_else_set_are_left_alone(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.set_property("user.slice", "0")
    with pytest.raises(RolledBack, match=r"AllowedCPUs= of user\.slice is already set: 0"):
        prepare(host.kernel, GUEST)
    assert host.pages(1) == (0, 0)
    assert host.allowed == {"system.slice": "", "user.slice": "0", "init.scope": ""}


def test_cpus_that_somebody_sets_meanwhile_stay(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    prepare(host.kernel, GUEST)
    host.set_property("user.slice", "0")
    release(host.kernel, GUEST)
    assert host.allowed == {"system.slice": "", "user.slice": "0", "init.scope": ""}


def test_a_cgroup_that_does_not_follow_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.tuning.apply.ANSWER_DEADLINE", 0.1)
    host = tunable(tmp_path)
    host.kernel.sysfs.put("/sys/fs/cgroup/init.scope/cpuset.cpus", "0-3")
    host.lost.add("init.scope")
    with pytest.raises(RolledBack, match=r"of init\.scope has no effect: cpuset\.cpus is 0-3"):
        prepare(host.kernel, GUEST)


@pytest.mark.parametrize("after", [False, True], ids=["undo", "do"])
@pytest.mark.parametrize("kind", [IsolateCpus, InhibitSleep, KeepInterrupts])
def test_the_run_waits_longer_for_a_step_than_the_step_for_systemd(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[IsolateCpus | InhibitSleep | KeepInterrupts],
    *,
    after: bool,
) -> None:
    """A run that is abandoned is not rolled back."""
    host = tunable(tmp_path)
    for unit in host.allowed:
        host.kernel.sysfs.put(f"/sys/fs/cgroup/{unit}/cpuset.cpus", "0-3")
    steps = (
        IsolateCpus(OTHER, (2, 3), (0, 1), before=not after, after=after),
        InhibitSleep(OTHER, "a guest", before=not after, after=after),
        KeepInterrupts(OTHER, PLACED, before=not after, after=after),
    )
    (step,) = (one for one in steps if isinstance(one, kind))
    if not after:
        perform(step.inverse(), host.kernel)
    waits = list[float]()
    call, ask = host.kernel.call, host.kernel.ask

    def called(*command: str, limit: float) -> None:
        waits.append(limit)
        call(*command, limit=limit)

    def asked(command: Sequence[str], seconds: float = 0) -> ProgramAnswer | None:
        waits.append(seconds)
        return ask(command, seconds)

    def waited(condition: Callable[[], bool], limit: float) -> bool:
        waits.append(limit)
        return condition()

    monkeypatch.setattr(host.kernel, "call", called)
    monkeypatch.setattr(host.kernel, "ask", asked)
    monkeypatch.setattr("vfiomgr.tuning.apply.becomes_true", waited)
    perform(step, host.kernel)
    assert len(waits) > 1
    assert (step.deadline or DEADLINE) > sum(waits)


def test_a_damaged_record_stops_the_start(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    host.kernel.sysfs.put(TUNED, "{}")
    with pytest.raises(InvalidDocument, match=r"tuned\.json is not a valid record"):
        prepare(host.kernel, GUEST)
    assert parse_tuned(None) == ()


# ---- faults


def _operations(tmp_path: Path) -> range:
    host = tunable(tmp_path / "count")
    before = len(host.kernel.operations)
    prepare(host.kernel, GUEST)
    return range(1, len(host.kernel.operations) - before + 1)


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_of_any_operation_restores_the_host(tmp_path: Path, *, late: bool) -> None:
    failed = 0
    for at in _operations(tmp_path)[late::STRIDE]:
        host = tunable(tmp_path / str(at))
        before = host.picture()
        (host.kernel.fail_after if late else host.kernel.fail)(at=at, errno=errno.EIO)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prepare(host.kernel, GUEST)
        except (VfiomgrError, OSError):
            failed += 1
            assert host.picture() == before, at
            assert not host.kernel.exists(TUNED), at
            assert read_records(host.kernel) == (), at
    assert failed


@pytest.mark.parametrize("then", ["recover", "prepare", "release"])
def test_a_death_at_any_operation_restores_the_host(tmp_path: Path, then: str) -> None:
    for at in _operations(tmp_path)[::STRIDE]:
        host = tunable(tmp_path / str(at))
        before = host.picture()
        host.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            prepare(host.kernel, GUEST)
        host.kernel.revive()
        if then == "recover":
            api.recover(tree=host.kernel)
        elif then == "prepare":
            prepare(host.kernel, GUEST)
            assert (host.cpus(), host.pages(1)) == ("0-1", (512, 512)), at
        release(host.kernel, GUEST)
        assert host.picture() == before, at
        assert not host.kernel.exists(TUNED), at
        api.recover(tree=host.kernel)
        assert host.picture() == before, at
        assert cut_off_runs(host.kernel, host.kernel.read(BOOT_ID)) == [], at


def test_a_death_of_the_release_is_ended_by_the_next_one(tmp_path: Path) -> None:
    first = tunable(tmp_path / "count")
    prepare(first.kernel, GUEST)
    earlier = len(first.kernel.operations)
    release(first.kernel, GUEST)
    for at in range(1, len(first.kernel.operations) - earlier + 1, STRIDE):
        host = tunable(tmp_path / str(at))
        before = host.picture()
        prepare(host.kernel, GUEST)
        host.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            release(host.kernel, GUEST)
        host.kernel.revive()
        release(host.kernel, GUEST)
        assert host.picture() == before, at
        assert not host.kernel.exists(TUNED), at


# ---- check domain, hook install


def _checked(host: TunableHost, settings: HookSettings, before: str) -> dict[str, str]:
    """The findings about settings of a domain, by rule."""
    mark = render_settings(settings).replace("<devices", f"<devices xmlns='{NAMESPACE}'")
    text = xml(GPU, f"<metadata>{mark}</metadata>{before}").replace(">64<", ">1024<")
    host.kernel.sysfs.put(SCRIPT, "#!/bin/sh")
    report = check_domain(api.host_at(host.kernel), text)
    return {each.rule: str(each) for each in report.findings}


_HUGE = "<memoryBacking><hugepages/></memoryBacking>"
_PINS = "<vcpu>1</vcpu><cputune><vcpupin vcpu='0' cpuset='2'/></cputune>"


def test_check_domain_reports_what_the_hook_would_refuse(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    cpus, pages = HookSettings(isolate_cpus=True), HookSettings(hugepages=True)
    interrupts = HookSettings(interrupts=True)
    assert "cannot keep the interrupts" in _checked(host, interrupts, "")["hook-refused"]
    assert "hook-refused" not in _checked(host, interrupts, _PINS)
    assert "it is not pinned to any" in _checked(host, cpus, "")["hook-refused"]
    assert "hook-refused" not in _checked(host, cpus, _PINS)
    assert "not backed by huge pages" in _checked(host, pages, "")["hook-refused"]
    assert "hook-refused" not in _checked(host, pages, _HUGE)
    host.free_kib = dict.fromkeys(host.free_kib, 0)
    for node in host.free_kib:
        host._show(node)
    assert "do not fit into the free memory" in _checked(host, pages, _HUGE)["hook-refused"]


def test_huge_pages_that_the_hook_allocates_are_not_too_few(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    assert "hugepages-too-few" in _checked(host, HookSettings(), _HUGE)
    assert "hugepages-too-few" not in _checked(host, HookSettings(hugepages=True), _HUGE)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A host for commands."""
    return tunable(tmp_path / "host").kernel


def test_settings_are_written_into_the_domain(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VFIOMGR_CONNECT", node_uri(tmp_path))
    options = ("--isolate-cpus", "--hugepages", "--interrupts")
    answer = run("libvirt", "hook", "install", "test", *options)
    assert answer.status == 0, answer.stderr
    assert "test: the hook is enabled" in answer.stdout
    assert "nothing to do" not in answer.stderr
    for option in options:
        answer = run("libvirt", "hook", "install", option)
        assert answer.status == 2
        assert f"{option} does nothing without DOMAIN" in answer.stderr


def test_the_plan_can_be_pasted(tmp_path: Path) -> None:
    host = tunable(tmp_path)
    hosted = api.host_at(host.kernel)
    shown = str(hosted.plan(tuning_of(api.scan(host.kernel), GUEST)))
    for line in (
        "allocate 512 huge pages of 2 MiB on node 1",
        "keep the host's processes off CPUs 2-3",
        "systemctl set-property --runtime user.slice AllowedCPUs=0-1",
        f"inhibit sleep: guest win has {GPU}",
        f"systemd-run --quiet --collect --unit={UNIT}",
        f"keep interrupts of {GPU} on CPUs 2-3",
        f"-- vfiomgr interrupts --cpus 2-3 {GPU}",
    ):
        assert line in shown
    prepare(host.kernel, GUEST)
    shown = str(hosted.plan(RestoreHost(GUEST.uuid or "", GUEST.name)))
    for line in (
        "free 512 huge pages of 2 MiB on node 1",
        "no longer keep the host's processes off CPUs 2-3",
        "systemctl set-property --runtime user.slice AllowedCPUs=0-3",
        f"systemctl stop {UNIT}",
        f"systemctl stop {WATCH}",
    ):
        assert line in shown


TUNE = TuneHost(
    OTHER,
    "lin",
    cpus=(2, 3),
    hugepages=HugepageNeeds((), (MemoryPart((1,), GIB),)),
    interrupts=PLACED,
)
RESTORE = RestoreHost(OTHER, "lin")
EARLIER = (TUNE, RESTORE)
"""Afterwards the cgroups have all CPUs, which systemd does not reset."""


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told(
        {
            "tune": (EARLIER, TUNE),
            "pinned-anew": ((*EARLIER, TUNE), replace(TUNE, cpus=(1,))),
            "restore": ((*EARLIER, TUNE), RESTORE),
        },
        lambda place: tunable(place).kernel,
    )
