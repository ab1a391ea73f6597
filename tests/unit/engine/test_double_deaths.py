"""Two runs on one device that die one after the other, at every pair of operations; `recover`.

Nothing of either may be left, whatever the wall clock did between them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import mixed
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from tests.unit.engine.faults import changes, dies_at_record, kept
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request

GPU = PciAddress.parse("0000:01:00.0")
ADAPTER = PciAddress.parse("0000:05:00.0")
FUNCTION = PciAddress.parse("0000:05:10.0")
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
BIND, UNBIND = Bind((GPU,)), Unbind((GPU,))
CREATE, REMOVE = CreateVgpu((UUID,), type="mtty-1", parent="mtty"), RemoveVgpu((UUID,))
TWO, THREE = (SetVirtualFunctions(ADAPTER, number) for number in (2, 3))
TAKE = Bind((FUNCTION,))
DAY = 86400.0
_STRIDE = 1 if os.environ.get(EVERY_MOMENT_VARIABLE) else 2
"""All pairs of operations with `make lab-faults`, else every second one."""


@dataclass(frozen=True)
class Pair:
    """What is done on a host, and the two runs that die."""

    earlier: tuple[Request, ...]
    first: Request
    second: Request


PAIRS = {
    "bind, bind": Pair((), BIND, BIND),
    "bind, unbind": Pair((), BIND, UNBIND),
    "unbind, bind": Pair((BIND,), UNBIND, BIND),
    "create, remove": Pair((), CREATE, REMOVE),
    "remove, create": Pair((CREATE,), REMOVE, CREATE),
    "sriov set, bind": Pair((), TWO, TAKE),
    "bind, sriov set": Pair((TWO,), TAKE, THREE),
    "sriov set, sriov set": Pair((TWO,), THREE, SetVirtualFunctions(ADAPTER, 0)),
}


class WallClock:
    """What the wall clock says; a person, or NTP, may set it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now, parts = time.time, time.gmtime
        self.offset = 0.0
        monkeypatch.setattr(time, "time", lambda: now() + self.offset)
        monkeypatch.setattr(
            time, "gmtime", lambda at=None: parts(now() + self.offset if at is None else at)
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def prepared(place: Path, pair: Pair) -> FakeKernel:
    """A host with VFIO loaded, and all directories of vfiomgr made."""
    kernel = mixed(place)
    earlier: tuple[Request, ...] = (BIND, UNBIND, CREATE, REMOVE, *pair.earlier)
    for intent in earlier:
        api.apply(intent, tree=kernel)
    return kernel


def dies(kernel: FakeKernel, intent: Request, at: int, *, after: bool) -> bool:
    """Whether a run comes to that operation, and so dies at it."""
    kernel.kill(at=at, after=after)
    try:
        api.apply(intent, tree=kernel)
    except PowerCut:
        return True
    except (Refusal, UnknownDevice):
        return False  # the first run did not come so far that there is anything to do
    finally:
        kernel.revive()
    return False


def deaths(
    tmp_path: Path, pair: Pair, clock: WallClock
) -> Iterator[tuple[FakeKernel, dict[str, str], tuple[int, int]]]:
    """Both runs dead, at pairs of operations: just before one of them, and after the other.

    Between them the clock is set back, each second time.
    """
    for first in count(1):
        kernel = prepared(tmp_path / str(first), pair)
        before = kept(kernel)
        for second in count(1 + first % _STRIDE, _STRIDE):
            is_even = (first // _STRIDE + second) % 2 == 0
            if not dies(kernel, pair.first, first, after=is_even):
                return
            clock.offset -= DAY * (second // 2 % 2)
            if not dies(kernel, pair.second, second, after=not is_even):
                break
            yield kernel, before, (first, second)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_deaths_leave_nothing(tmp_path: Path, pair: Pair, clock: WallClock) -> None:
    both = 0
    for kernel, before, at in deaths(tmp_path, pair, clock):
        both += len(api.recover(tree=kernel)) == len(("first", "second"))
        assert changes(before, kept(kernel)) == {}, at
        assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
    assert both, "some pair left two runs to be undone"


@pytest.mark.parametrize("name", ["bind, unbind", "unbind, bind", "bind, sriov set"])
def test_a_recovery_that_dies_before_any_of_its_records_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is left where a later run could be found alone, whose state before is half-done."""
    pair = PAIRS[name]
    for at in count(1):
        kernel = prepared(tmp_path / str(at), pair)
        before = kept(kernel)
        assert dies(kernel, pair.first, 4, after=True)
        assert dies(kernel, pair.second, 3, after=True)
        if not dies_at_record(monkeypatch, at, partial(api.recover, tree=kernel)):
            assert at > len(("first", "second")), "each record is tried"
            return
        kernel.revive()
        api.recover(tree=kernel)
        assert changes(before, kept(kernel)) == {}, at
        assert api.recover(tree=kernel) == ()
