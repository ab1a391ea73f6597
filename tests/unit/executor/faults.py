"""Plans with a fault at each of their operations, and what must be true after each."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.faults import PowerCut
from tests.fakes.hosts import network_adapter
from tests.fakes.kernel import FakeKernel
from vfiomgr import api
from vfiomgr.errors import RollbackIncomplete, VfiomgrError
from vfiomgr.executor.journal import cut_off_runs
from vfiomgr.model.intent import Intent, Reset


def kept(kernel: FakeKernel) -> dict[str, str]:
    """The state of a kernel, and vfiomgr's records, without the numbers that it counts up."""
    numbered = ("iommu_group", "/dev/vfio/", "vfio-dev", "/sys/class/vfio", "/sys/devices/virtual")
    passing = (*numbered, ".torn")  # a temporary file that a power cut left behind
    files = {path: text for path, text in kernel.sysfs.picture("/etc").items() if text != "/"}
    state = {
        path: text
        for path, text in (kernel.state(modules=False) | files).items()
        if not any(part in path or part in text for part in passing)
    }
    host = api.scan(kernel, with_gpu_modes=True)
    vgpus = {f"vGPU {vgpu.name}": f"{vgpu.parent} {vgpu.type}" for vgpu in host.vgpus}
    modes = {f"mode of {m.gpu}": f"{m.heterogeneous} {m.mig}" for m in host.gpu_modes}
    places = {f"instances of {p.gpu}": str(p.places) for p in host.gpu_partitions}
    marks = {mark.path: mark.text for mark in host.vgpu_marks}
    own = {f"own {vgpu.name}": str(host.is_own(vgpu)) for vgpu in host.vgpus}
    origins = {f"origin of {o.device.address}": str(o.state) for o in host.origins}
    return state | vgpus | modes | places | marks | own | origins


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, ...]]:
    """What differs between two states; pytest would take minutes to tell."""
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


@dataclass(frozen=True)
class Course:
    """A host, and what is then to be done with it."""

    tmp_path: Path
    prepared: Callable[[Path], tuple[FakeKernel, Intent]]

    def operations(self) -> range:
        """The number of each operation that it takes."""
        kernel, intent = self.prepared(self.tmp_path / "count")
        before = len(kernel.operations)
        api.apply(intent, tree=kernel)
        return range(1, len(kernel.operations) - before + 1)

    def assert_all_faults_are_undone(self, *, late: bool) -> None:
        """A failure at any operation leaves everything as it was."""
        failed = 0
        for at in self.operations():
            kernel, intent = self.prepared(self.tmp_path / str(at))
            before = kept(kernel)
            (kernel.fail_after if late else kernel.fail)(at=at, errno=errno.EIO)
            error = _failure(kernel, intent)
            if error is not None:
                failed += 1
                assert not isinstance(error, RollbackIncomplete), (at, error)
                assert changes(before, kept(kernel)) == {}, (at, error)
        assert failed

    def assert_all_power_cuts_can_be_ended(
        self, *, finish: bool, then: Callable[[FakeKernel], object] | None = None
    ) -> None:
        """Recovery leads on to the end, or back, from any operation; `then` leads back as well."""
        done, intent = self.prepared(self.tmp_path / "done")
        untouched = kept(done)
        api.apply(intent, tree=done)
        assert changes(untouched, kept(done)) or isinstance(intent, Reset), "a reset is an event"
        for at in self.operations():
            kernel, intent = self.prepared(self.tmp_path / str(at))
            before = kept(kernel)
            kernel.kill(at=at, after=at % 2 == 0)
            with pytest.raises(PowerCut):
                api.apply(intent, tree=kernel)
            kernel.revive()
            if not api.recover(tree=kernel, finish=finish) and finish:
                api.apply(intent, tree=kernel)
            assert cut_off_runs(kernel, api.scan(kernel).boot_id) == []
            assert changes(kept(done) if finish else before, kept(kernel)) == {}, at
            if then is not None:
                then(kernel)
                assert changes(before, kept(kernel)) == {}, at


def of_adapter(tmp_path: Path, earlier: tuple[Intent, ...], intent: Intent) -> Course:
    """A network adapter's host on which the earlier intents were carried out."""
    return of_host(tmp_path, network_adapter, earlier, intent)


def of_host(
    tmp_path: Path,
    host: Callable[[Path], FakeKernel],
    earlier: tuple[Intent, ...],
    intent: Intent,
) -> Course:
    """Any host, likewise."""

    def prepared(place: Path) -> tuple[FakeKernel, Intent]:
        kernel = host(place)
        for before in earlier:
            api.apply(before, tree=kernel)
        return kernel, intent

    return Course(tmp_path, prepared)


def _failure(kernel: FakeKernel, intent: Intent) -> Exception | None:
    try:
        api.apply(intent, tree=kernel)
    except (VfiomgrError, OSError) as error:
        return error
    return None
