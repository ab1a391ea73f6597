"""Plans with a fault at each of their operations, and what must be true after each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from vfiomgr.engine.journal import Journal
from vfiomgr.engine.plan import Request
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import RollbackIncomplete, VfiomgrError
from vfiomgr.passthrough.steps import Reset
from vfiomgr.paths import BOOT_ID

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel


def kept(kernel: FakeKernel) -> dict[str, str]:
    """The state of a kernel, and vfiomgr's records, without the numbers that it counts up."""
    numbered = ("iommu_group", "/dev/vfio/", "vfio-dev", "/sys/class/vfio")
    files = {path: text for path, text in kernel.sysfs.picture("/etc").items() if text != "/"}
    state = {
        path: text
        for path, text in (kernel.state(modules=False) | files).items()
        if not any(part in path or part in text for part in numbered)
    }
    host = api.scan(kernel, with_gpu_modes=True)
    vgpus = {f"vGPU {vgpu.name}": f"{vgpu.parent} {vgpu.type}" for vgpu in host.vgpus.active}
    modes = {f"mode of {m.gpu}": f"{m.heterogeneous} {m.mig}" for m in host.vgpus.modes}
    places = {f"instances of {p.gpu}": str(p.places) for p in host.vgpus.partitions}
    gpus = kernel.nvidia.gpus
    modes |= {f"persistence of {g.address}": str(gpus.is_persistent(g)) for g in gpus.visible()}
    marks = {mark.path: mark.text for mark in host.vgpus.marks}
    own = {f"own {vgpu.name}": str(host.vgpus.is_own(vgpu)) for vgpu in host.vgpus.active}
    origins = {f"origin of {o.device.address}": str(o.state) for o in host.origins}
    cdi = {f"CDI of {file.path}": str(file.text) for file in host.cdi_files}
    return state | vgpus | modes | places | marks | own | origins | cdi


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, ...]]:
    """What differs between two states; pytest would take minutes to tell."""
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


def dies_at_record(monkeypatch: pytest.MonkeyPatch, number: int, run: Callable[[], object]) -> bool:
    """Run something with a power cut before that record of its journals; whether it came to it."""
    numbers, record = count(1), Journal.record

    def deadly(*arguments: Any, **options: Any) -> None:
        if next(numbers) == number:
            raise PowerCut
        record(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", deadly)
        try:
            run()
        except PowerCut:
            return True
    return False


class Whole(NamedTuple):
    """A run without a fault, on a host that is the same each time that it is made."""

    intent: Request
    operations: range
    before: dict[str, str]
    after: dict[str, str]


class Cut(NamedTuple):
    """A run that was cut off, on a host that runs again."""

    at: int
    """The number of the operation."""
    kernel: FakeKernel
    intent: Request
    before: dict[str, str]


STRIDE = 1 if os.environ.get(EVERY_MOMENT_VARIABLE) else 3
"""Every third operation is tried, and all of them with `make lab-faults`; an odd number, so that
operations that alternate are tried alike."""


def is_even(at: int) -> bool:
    """Every second operation."""
    return at % 2 == 0


def _is_after(at: int) -> bool:
    """Every second one of those that are tried."""
    return is_even(at // STRIDE)


@dataclass(frozen=True)
class Course:
    """A host, and what is then to be done with it."""

    tmp_path: Path
    prepared: Callable[[Path], tuple[FakeKernel, Request]]
    back: Callable[[FakeKernel], object] | None = None
    """What leads back once it is done."""

    @cached_property
    def whole(self) -> Whole:
        """It, without a fault."""
        kernel, intent = self.prepared(self.tmp_path / "whole")
        before, earlier = kept(kernel), len(kernel.operations)
        api.apply(intent, tree=kernel)
        operations = range(1, len(kernel.operations) - earlier + 1)
        return Whole(intent, operations, before, kept(kernel))

    def operations(self) -> range:
        """The number of each operation that it takes."""
        return self.whole.operations

    def done(self) -> dict[str, str]:
        """What is kept once it is done."""
        whole = self.whole
        told = changes(whole.before, whole.after) or isinstance(whole.intent, Reset)
        assert told, "a reset is an event"
        return whole.after

    def cuts(self, *, after: Callable[[int], bool] = is_even, every: int = 1) -> Iterator[Cut]:
        """A power cut at operations, the last one first, before each or `after` it."""
        for at in self.operations()[::-every]:
            kernel, intent = self.prepared(self.tmp_path / str(at))
            kernel.kill(at=at, after=after(at))
            with pytest.raises(PowerCut):
                api.apply(intent, tree=kernel)
            kernel.revive()
            yield Cut(at, kernel, intent, self.whole.before)

    def assert_all_faults_are_undone(self, *, late: bool) -> None:
        """A failure at any operation leaves everything as it was.

        An operation is refused, or, where `late`, takes effect and fails.
        """
        failed = 0
        for at in self.operations()[late::STRIDE] or self.operations():
            kernel, intent = self.prepared(self.tmp_path / str(at))
            (kernel.fail_after if late else kernel.fail)(at=at, errno=errno.EIO)
            error = _failure(kernel, intent)
            if error is not None:
                failed += 1
                assert not isinstance(error, RollbackIncomplete), (at, error)
                assert changes(self.whole.before, kept(kernel)) == {}, (at, error)
            assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == [], at
        assert failed

    def assert_all_power_cuts_can_be_ended(self, *, finish: bool) -> None:
        """Recovery leads on to the end, and from there back, or back from any operation."""
        done = self.done()
        recovered = 0
        for at, kernel, intent, before in self.cuts(every=_FINISHED if finish else STRIDE):
            ended = api.recover(tree=kernel, finish=finish)
            recovered += len(ended)
            if not ended and finish:
                api.apply(intent, tree=kernel)
            assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
            assert changes(done if finish else before, kept(kernel)) == {}, at
            if finish and self.back is not None:
                self.back(kernel)
                assert changes(before, kept(kernel)) == {}, at
        assert recovered

    def assert_the_same_request_ends_all_power_cuts(self) -> None:
        """Repeated, the request leads to its end, which `recover` then leaves alone."""
        done = self.done()
        for at, kernel, intent, _ in self.cuts(after=_is_after, every=STRIDE):
            api.apply(intent, tree=kernel)
            assert changes(done, now := kept(kernel)) == {}, at
            assert api.recover(tree=kernel) == (), at
            assert changes(now, kept(kernel)) == {}, at
            if self.back is not None:
                self.back(kernel)
                assert changes(self.whole.before, kept(kernel)) == {}, at


_FINISHED = STRIDE + 2
"""`recover --finish` is tried at fewer operations: it ends like the same request."""
_WHOLES: dict[Callable[[Path], Course], Whole] = {}
_MOST_WHOLES = 16
"""How many are kept: the tests of a course follow each other, and each of them is large."""


def known(made: Callable[[Path], Course], tmp_path: Path) -> Course:
    """A course, with its run without a fault where another test of this process has made that."""
    course = made(tmp_path)
    if made in _WHOLES:
        vars(course)["whole"] = _WHOLES[made]
        return course
    if len(_WHOLES) == _MOST_WHOLES:
        _WHOLES.pop(next(iter(_WHOLES)))
    _WHOLES[made] = course.whole
    return course


Courses = Mapping[str, Callable[[Path], Course]]
Stories = Mapping[str, tuple[tuple[Request, ...], Request]]


class EveryFault:
    """The tests that any course must pass; a subclass says which courses a module has."""

    courses: ClassVar[Courses]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test with each course."""
        metafunc.parametrize("made", self.courses.values(), ids=self.courses.keys())

    @pytest.mark.parametrize("late", [False, True], ids=["rejected", "half-done"])
    def test_a_fault_at_any_operation_leaves_everything_as_it_was(
        self, tmp_path: Path, made: Callable[[Path], Course], *, late: bool
    ) -> None:
        """Whether the operation was refused, or took effect and failed."""
        known(made, tmp_path).assert_all_faults_are_undone(late=late)

    @pytest.mark.parametrize("finish", [True, False], ids=["finished", "undone"])
    def test_a_death_at_any_operation_can_be_finished_and_undone(
        self, tmp_path: Path, made: Callable[[Path], Course], *, finish: bool
    ) -> None:
        """By `recover`, from the middle of each."""
        known(made, tmp_path).assert_all_power_cuts_can_be_ended(finish=finish)

    def test_the_same_request_after_a_death_is_complete_and_recover_leaves_it(
        self, tmp_path: Path, made: Callable[[Path], Course]
    ) -> None:
        """It also restores settings, and closes the interrupted run."""
        known(made, tmp_path).assert_the_same_request_ends_all_power_cuts()


def named(
    course: Callable[[Path, str], Course], names: Iterable[str]
) -> dict[str, Callable[[Path], Course]]:
    """Courses that a module makes by their names."""

    def made(name: str) -> Callable[[Path], Course]:
        return lambda tmp_path: course(tmp_path, name)

    return {name: made(name) for name in names}


def told(
    stories: Stories, host: Callable[[Path], FakeKernel]
) -> dict[str, Callable[[Path], Course]]:
    """Courses by what was carried out earlier on a host, and what is to be now."""
    return {name: partial(_of_host, host=host, story=story) for name, story in stories.items()}


def _of_host(
    tmp_path: Path, host: Callable[[Path], FakeKernel], story: tuple[tuple[Request, ...], Request]
) -> Course:
    earlier, intent = story

    def prepared(place: Path) -> tuple[FakeKernel, Request]:
        kernel = host(place)
        for before in earlier:
            api.apply(before, tree=kernel)
        return kernel, intent

    return Course(tmp_path, prepared)


def _failure(kernel: FakeKernel, intent: Request) -> Exception | None:
    try:
        api.apply(intent, tree=kernel)
    except (VfiomgrError, OSError) as error:
        return error
    return None
