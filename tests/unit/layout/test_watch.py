"""A watch of a layout, with events and a clock that a test makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.fakes.hosts import mixed, workstation
from tests.unit.layout.test_apply import GPU, NIC, WHOLE, drivers, functions, layout
from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.transaction import scan_for
from vfiomgr.errors import HostError, InvalidDocument, RolledBack, VfiomgrError
from vfiomgr.host.udev import DeviceEvents
from vfiomgr.layout import watch as layout_watch
from vfiomgr.layout import watch_layout
from vfiomgr.layout.compare import Comparison
from vfiomgr.layout.parts import Change, Difference
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.layout.watch import LayoutWatch, WatchEvent, await_reason
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.snapshot.health import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot

DRIFT = Difference(str(GPU), "A40", "host (nvidia)", "passthrough (VFIO)")
MOVED = Difference(str(GPU), "A40", "host (nouveau)", "passthrough (VFIO)")
OTHER = Difference(str(NIC), "", "host (igb)", "2 virtual functions")
HELD = blocker("held-by-guest", GPU, "it is held by qemu (PID 4711)", "shut the guest down")
SEVEN = blocker("layout-too-few", "", "at least 8 devices, but this host has 7", "")
DONE = api.Outcome(Plan("", ()), is_changed=True)
FAILURE = RolledBack("the kernel said no", "see dmesg")


@dataclass
class Story:
    """A host as a test has it, and what was said about it."""

    parts: tuple[Change, ...] = ()
    missing: tuple[Diagnostic, ...] = ()
    answers: dict[str, api.Outcome | VfiomgrError] = field(default_factory=dict)
    after: tuple[Change, ...] = ()
    """What there is once something was put right."""
    told: list[WatchEvent] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    now: float = 1000.0
    stale: bool = False
    wanted: list[ApplyLayout | VfiomgrError] = field(default_factory=lambda: [layout()])
    compared: list[str] = field(default_factory=list)
    broken: VfiomgrError | None = None

    def read(self) -> ApplyLayout:
        """The next layout."""
        self.stale = False
        wanted = self.wanted.pop(0)
        if isinstance(wanted, VfiomgrError):
            raise wanted
        return wanted

    def is_stale(self) -> bool:
        """Whether the test has another."""
        return self.stale

    def compare(self, intent: ApplyLayout) -> Comparison:
        """As the test has it."""
        self.compared.append(intent.name)
        if self.broken is not None:
            raise self.broken
        return Comparison(self.parts, self.missing)

    def correct(self, _intent: ApplyLayout, name: str) -> api.Outcome | VfiomgrError | None:
        """What the test answers."""
        self.tried.append(name)
        answer = self.answers.get(name, DONE)
        if not isinstance(answer, VfiomgrError):
            self.parts = tuple(part for part in self.parts if part.name != name)
        return answer

    def watch(self, *, enforce: bool = False) -> LayoutWatch:
        """A watch of this."""
        correct = self.correct if enforce else None
        return LayoutWatch(self, self.compare, self.told.append, correct, lambda: self.now)

    def events(self) -> list[tuple[str, str]]:
        """What was said since the last time."""
        said: list[tuple[str, str]] = [(event.event, event.device) for event in self.told]
        self.told.clear()
        return said


def part(*differences: Difference, refused: Diagnostic | None = None) -> Change:
    return Change(
        differences[0].device,
        differences=differences,
        diagnostics=() if refused is None else (refused,),
    )


def test_differences_are_told_once_as_they_come_and_go() -> None:
    story = Story((part(DRIFT), part(OTHER)))
    watch = story.watch()
    assert watch.look() == layout_watch.IDLE
    assert story.events() == [("drift", str(GPU)), ("drift", str(NIC))]
    watch.look()
    assert story.events() == []
    story.parts = (part(MOVED),)
    watch.look()
    assert [str(event) for event in story.told] == [
        f"resolved {NIC}: 2 virtual functions",
        f"drift {GPU} (A40): host (nouveau) -> passthrough (VFIO)",
    ]


def test_a_device_that_is_missing_is_a_difference() -> None:
    story = Story(missing=(SEVEN,))
    story.watch(enforce=True).look()
    (event,) = story.told
    assert (str(event), event.found) == (f"drift {SEVEN.summary}", "missing")
    assert story.tried == []


def test_what_differs_is_put_right_and_told_so() -> None:
    story = Story((part(DRIFT), part(OTHER)))
    watch = story.watch(enforce=True)
    watch.look()
    assert story.tried == [str(GPU), str(NIC)]
    assert story.events() == [
        ("drift", str(GPU)),
        ("drift", str(NIC)),
        ("corrected", str(GPU)),
        ("corrected", str(NIC)),
    ]
    watch.look()
    assert len(story.tried) == 2
    story.parts = (part(OTHER),)
    assert watch.look() == pytest.approx(10.0), "each is remembered"


def test_what_fails_keeps_no_other_from_it_and_is_told_once() -> None:
    story = Story((part(DRIFT), part(OTHER)), answers={str(GPU): FAILURE})
    watch = story.watch(enforce=True)
    assert watch.look() == pytest.approx(10.0)
    assert story.events()[-2:] == [("failed", str(GPU)), ("corrected", str(NIC))]
    story.now += 11
    watch.look()
    assert story.tried == [str(GPU), str(NIC), str(GPU)]
    assert story.events() == []


def test_a_failure_is_tried_again_with_growing_pauses() -> None:
    story = Story((part(DRIFT),), answers={str(GPU): FAILURE})
    watch = story.watch(enforce=True)
    pauses = []
    for _ in range(9):
        pauses.append(watch.look())
        assert watch.look() == pauses[-1], "an event alone is no reason to try again"
        story.now += pauses[-1]
    assert pauses[:4] == [10.0, 20.0, 40.0, 80.0]
    assert pauses[-1] == 900.0
    assert len(story.tried) == 9


def test_a_failure_is_tried_again_at_once_where_something_has_changed() -> None:
    story = Story((part(DRIFT),), answers={str(GPU): FAILURE})
    watch = story.watch(enforce=True)
    watch.look()
    story.parts = (part(MOVED),)
    assert watch.look() == 10.0, "and the pauses begin anew"
    assert len(story.tried) == 2


def test_what_a_guest_holds_is_told_once_and_not_tried() -> None:
    story = Story((part(DRIFT, refused=HELD), part(OTHER)))
    watch = story.watch(enforce=True)
    assert watch.look() == layout_watch.IDLE
    assert watch.look() == layout_watch.IDLE
    assert story.tried == [str(NIC)]
    assert story.events().count(("failed", str(GPU))) == 1
    story.parts = (part(DRIFT),)
    watch.look()
    assert story.tried[-1] == str(GPU), "the guest has gone"
    assert story.events() == [("corrected", str(GPU))]


def test_who_moves_it_again_and_again_is_not_fought() -> None:
    story = Story((part(DRIFT),))
    watch = story.watch(enforce=True)
    watch.look()
    story.events()
    story.parts = (part(DRIFT),)
    assert watch.look() == pytest.approx(10.0)
    assert story.events() == [("drift", str(GPU)), ("failed", str(GPU))]
    watch.look()
    assert (story.events(), len(story.tried)) == ([], 1)
    story.now += 10
    watch.look()
    assert story.events() == [("corrected", str(GPU))]
    story.parts = (part(DRIFT),)
    assert watch.look() == pytest.approx(20.0)
    story.parts = ()
    watch.look()
    story.now += 3600
    story.parts = (part(DRIFT),)
    watch.look()
    assert len(story.tried) == 3, "that was long ago"
    story.parts = (part(DRIFT),)
    assert watch.look() == pytest.approx(10.0), "and the pauses begin anew"


def test_a_host_that_cannot_be_read_is_told_and_looked_at_again() -> None:
    story = Story(broken=HostError("no /proc", "mount it"))
    watch = story.watch()
    assert watch.look() == 10.0
    watch.look()
    assert [str(event) for event in story.told] == ["failed no /proc; mount it"]


def test_another_layout_counts_and_a_broken_one_does_not() -> None:
    story = Story()
    watch = story.watch()
    story.wanted = [layout(name="new"), InvalidDocument("line 3: nonsense", "mend it")]
    story.stale = True
    watch.look()
    story.stale = True
    watch.look()
    assert story.compared == ["new", "new"]
    assert "the previous layout is still used" in story.told[0].message


def test_an_interrupted_correction_ends_the_watch() -> None:
    error = RolledBack("interrupted")
    error.__cause__ = KeyboardInterrupt()
    story = Story((part(DRIFT),))
    watch = story.watch(enforce=True)

    def interrupted(_intent: ApplyLayout, _name: str) -> None:
        raise error

    watch._correct = interrupted
    with pytest.raises(RolledBack):
        watch.look()


# ---- events


class Script:
    """Events at moments of a clock that waiting moves on."""

    def __init__(self, story: Story, *moments: float) -> None:
        self.story = story
        self.moments = list(moments)

    def take(self) -> DeviceEvents:
        """Not know what has changed."""
        return DeviceEvents(is_complete=False)

    def wait(self, seconds: float) -> bool:
        """Move the clock to the next event, or on."""
        if self.moments and self.moments[0] <= self.story.now + seconds:
            self.story.now = max(self.story.now, self.moments.pop(0))
            return True
        self.story.now += seconds
        return False


def test_a_look_is_due_once_it_is_quiet() -> None:
    story = Story()
    events = Script(story, 1010.0, 1010.2, 1010.4, 1020.0)
    await_reason(story.watch(), events, 300)
    assert story.now == pytest.approx(1010.4 + layout_watch.QUIET)
    assert events.moments == [1020.0]


def test_a_storm_does_not_put_it_off_for_ever() -> None:
    story = Story()
    events = Script(story, *(1010 + number / 10 for number in range(1000)))
    await_reason(story.watch(), events, 300)
    assert story.now == pytest.approx(1010 + layout_watch.STORM, abs=0.2)


def test_without_events_the_time_is_a_reason_and_another_layout_as_well() -> None:
    story = Story()
    await_reason(story.watch(), Script(story), 300)
    assert story.now == pytest.approx(1300)
    story.wanted, story.stale = [layout()], False
    watch = story.watch()
    story.stale = True
    await_reason(watch, Script(story), 300)
    assert story.now == pytest.approx(1300)


# ---- with a kernel


class Turns:
    """Lets a test act between two looks, and ends the watch as SIGTERM does."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)

    def take(self) -> DeviceEvents:
        """Not know what has changed."""
        return DeviceEvents(is_complete=False)

    def wait(self, seconds: float) -> bool:
        """Act, and say that something happened; then it is quiet."""
        if seconds == layout_watch.QUIET:
            return False
        if not self._acts:
            raise KeyboardInterrupt
        self._acts.pop(0)()
        return True


class Fixed:
    """A layout that stays as it is."""

    def __init__(self, intent: ApplyLayout) -> None:
        self._intent = intent

    def read(self) -> ApplyLayout:
        """Read it."""
        return self._intent

    def is_stale(self) -> bool:
        """Never."""
        return False


def watched(kernel: FakeKernel, *acts: Callable[[], object], enforce: bool) -> list[str]:
    """What a watch says of a kernel while a test acts."""
    told: list[WatchEvent] = []
    with pytest.raises(KeyboardInterrupt):
        watch_layout(
            api.host_at(kernel),
            Fixed(layout()),
            Turns(*acts),
            tell=told.append,
            enforce=enforce,
        )
    return [f"{event.event} {event.device}" for event in told]


def test_no_disk_is_opened_to_watch_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workstation(tmp_path)
    monkeypatch.setattr(kernel, "is_claimed", lambda *_: pytest.fail("a disk was opened"))
    assert watched(kernel, enforce=False)


def test_a_host_is_watched_and_not_touched(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(layout(), tree=kernel)
    said = watched(
        kernel,
        lambda: api.apply(Unbind((GPU,)), tree=kernel),
        lambda: api.apply(Bind((GPU,)), tree=kernel),
        enforce=False,
    )
    assert f"drift {GPU}" in said
    assert drivers(kernel, GPU) == ["vfio-pci"]


@pytest.mark.parametrize("enforce", [True, False])
def test_readings_of_devices_are_noted_by_root(tmp_path: Path, *, enforce: bool) -> None:
    kernel = mixed(tmp_path)
    api.apply(layout(), tree=kernel)
    watched(kernel, enforce=enforce)
    assert kernel.exists(RECORD) == enforce


def test_a_record_that_cannot_be_written_prevents_no_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        message = "cannot write the record: No space left on device"
        raise HostError(message, "remove files")

    monkeypatch.setattr(layout_watch, "keep_health", refuse)
    kernel = mixed(tmp_path)
    assert f"corrected {GPU}" in watched(kernel, enforce=True)
    assert drivers(kernel, GPU) == ["vfio-pci"]


def test_what_is_moved_by_hand_is_moved_back(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(layout(), tree=kernel)
    moved = functions(kernel)[0]
    said = watched(kernel, lambda: api.apply(Unbind((moved,)), tree=kernel), enforce=True)
    assert said == [f"drift {moved}", f"corrected {moved}"]
    assert drivers(kernel, moved) == ["vfio-pci"]


class Named(Turns):
    """Says which device an act has changed."""

    def take(self) -> DeviceEvents:
        """The network adapter and its first virtual function."""
        bridge = "/devices/pci0000:00/0000:00:1d.0"
        return DeviceEvents(frozenset({f"{bridge}/0000:05:00.0", f"{bridge}/0000:05:10.0"}))


def test_a_host_as_its_layout_says_is_not_scanned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mixed(tmp_path)
    api.apply(layout(), tree=kernel)
    (moved, *_), scans = functions(kernel), list[object]()

    def counted(request: ApplyLayout, tree: HostTree, *args: Any, **options: Any) -> HostSnapshot:
        scans.append(request)
        return scan_for(request, tree, *args, **options)

    monkeypatch.setattr(layout_watch, "scan_for", counted)
    monkeypatch.setattr("tests.unit.layout.test_watch.Turns", Named)
    assert watched(kernel, *([lambda: None] * 3), enforce=True) == []
    assert len(scans) == 1
    said = watched(kernel, lambda: api.apply(Unbind((moved,)), tree=kernel), enforce=True)
    assert said == [f"drift {moved}", f"corrected {moved}"]
    assert len(scans) == 4


def test_a_host_is_brought_to_its_layout_first(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    said = watched(kernel, enforce=True)
    names = [str(GPU), str(NIC), "mtty", "mtty"]
    assert said == [f"{event} {name}" for event in ("drift", "corrected") for name in names]
    assert not api.apply(layout(), tree=kernel).is_changed


def test_one_device_alone_is_put_right(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    intent = layout(*WHOLE[:2])
    alone = ApplyLayout(intent.name, intent.layout, intent.owners, only=(str(GPU),))
    results = dict(api.apply_each(alone, tree=kernel))
    assert list(results) == [str(GPU)]
    assert functions(kernel) == ()
