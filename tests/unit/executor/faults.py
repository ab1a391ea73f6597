"""Plans with a fault at each of their operations, and what must be true after each."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import PowerCut
from tests.fakes.hosts import network_adapter
from vfiomgr import api
from vfiomgr.errors import RollbackIncomplete, VfiomgrError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.model.intent import Intent

    Host = Callable[[Path], FakeKernel]


def prepared(
    tmp_path: Path, earlier: tuple[Intent, ...], host: Host = network_adapter
) -> FakeKernel:
    """A host (a network adapter's) on which the earlier intents were carried out."""
    kernel = host(tmp_path)
    for intent in earlier:
        api.apply(intent, tree=kernel)
    return kernel


def operations_of(
    tmp_path: Path, earlier: tuple[Intent, ...], intent: Intent, host: Host = network_adapter
) -> int:
    """How many operations an intent takes."""
    kernel = prepared(tmp_path / "count", earlier, host)
    before = len(kernel.operations)
    api.apply(intent, tree=kernel)
    return len(kernel.operations) - before


def kept(kernel: FakeKernel) -> dict[str, str]:
    """The state of a kernel without the numbers that it counts up."""
    passing = ("iommu_group", "/dev/vfio/", "vfio-dev")
    return {
        path: text
        for path, text in kernel.state().items()
        if not any(part in path or part in text for part in passing)
    }


def assert_all_faults_are_undone(
    tmp_path: Path,
    earlier: tuple[Intent, ...],
    intent: Intent,
    *,
    late: bool,
    host: Host = network_adapter,
) -> None:
    """A failure at any operation leaves everything as it was."""
    failed = 0
    for at in range(1, operations_of(tmp_path, earlier, intent, host) + 1):
        kernel = prepared(tmp_path / str(at), earlier, host)
        before = kept(kernel)
        (kernel.fail_after if late else kernel.fail)(at=at, errno=errno.EIO)
        error = _failure(kernel, intent)
        if error is not None:
            failed += 1
            assert not isinstance(error, RollbackIncomplete), (at, error)
            assert kept(kernel) == before, (at, error)
    assert failed


def _failure(kernel: FakeKernel, intent: Intent) -> Exception | None:
    try:
        api.apply(intent, tree=kernel)
    except (VfiomgrError, OSError) as error:
        return error
    return None


def assert_all_power_cuts_can_be_ended(
    tmp_path: Path,
    earlier: tuple[Intent, ...],
    intent: Intent,
    *,
    finish: bool,
    host: Host = network_adapter,
) -> None:
    """Recovery leads on to the end, or back, from any operation."""
    done = prepared(tmp_path / "done", earlier, host)
    api.apply(intent, tree=done)
    for at in range(1, operations_of(tmp_path, earlier, intent, host) + 1):
        kernel = prepared(tmp_path / str(at), earlier, host)
        before = kept(kernel)
        kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            api.apply(intent, tree=kernel)
        kernel.revive()
        if not api.recover(tree=kernel, finish=finish) and finish:
            api.apply(intent, tree=kernel)
        assert kept(kernel) == (kept(done) if finish else before), at
