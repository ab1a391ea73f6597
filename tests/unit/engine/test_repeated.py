"""A run that dies, then another one that completes; `recover` leaves alone what that one did.

The same request after a death at each operation: `EveryFault` (faults.py), for every kind.
"""

from __future__ import annotations

import importlib
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import mixed, workstation
from tests.unit.engine.faults import EveryFault, changes, dies_at_record, kept
from tests.unit.engine.test_double_deaths import (
    ADAPTER,
    BIND,
    CREATE,
    FUNCTION,
    GPU,
    REMOVE,
    TAKE,
    THREE,
    TWO,
    UNBIND,
    dies,
)
from vfiomgr.engine import registry
from vfiomgr.engine.journal import DIRECTORY, Journal, read_journal
from vfiomgr.engine.survey import cut_off_runs, settle, supersede
from vfiomgr.engine.unfinished import read_unfinished
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.persistence.model import RULES
from vfiomgr.persistence.steps import ChangeFiles, FileChange, ForgetPersisted, ImportDriverctl
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request

AUDIO = PciAddress.parse("0000:01:00.1")
NONE = SetVirtualFunctions(ADAPTER, 0)
AUTOPROBE = pci_device(ADAPTER) / "sriov_drivers_autoprobe"
EARLIER: tuple[Request, ...] = (BIND, UNBIND, CREATE, REMOVE)
"""They create the directories of vfiomgr and load vfio-pci."""


def prepared(place: Path, *earlier: Request) -> FakeKernel:
    kernel = mixed(place)
    for request in (*EARLIER, *earlier):
        api.apply(request, tree=kernel)
    return kernel


def after_deaths(tmp_path: Path, first: Request, *earlier: Request) -> Iterator[FakeKernel]:
    """The host after a death of a request at each of its operations."""
    for at in count(1):
        kernel = prepared(tmp_path / str(at), *earlier)
        if not dies(kernel, first, at, after=at % 2 == 0):
            return
        yield kernel


REPLACED: dict[str, tuple[Request, Request, tuple[Request, ...]]] = {
    "other number": (TWO, THREE, ()),
    "no functions": (TWO, NONE, ()),
    "other number of functions that a guest has": (THREE, NONE, (TWO, TAKE)),
    "unbind": (BIND, UNBIND, ()),
    "bind": (UNBIND, BIND, (BIND,)),
    "remove": (CREATE, REMOVE, ()),
    "create": (REMOVE, CREATE, (CREATE,)),
}
"""A request that dies, one that replaces its result, and what the host was prepared with."""


@pytest.mark.parametrize("name", REPLACED)
def test_recover_keeps_what_another_request_for_the_same_devices_completed(
    tmp_path: Path, name: str
) -> None:
    first, second, earlier = REPLACED[name]
    whole = prepared(tmp_path / "whole", *earlier)
    api.apply(second, tree=whole)
    for kernel in after_deaths(tmp_path, first, *earlier):
        api.apply(second, tree=kernel)
        assert changes(kept(whole), kept(kernel)) == {}
        assert api.recover(tree=kernel) == ()
        assert changes(kept(whole), kept(kernel)) == {}


def test_recover_keeps_a_function_that_was_bound_after_its_creation_was_interrupted(
    tmp_path: Path,
) -> None:
    bound = 0
    for kernel in after_deaths(tmp_path, TWO):
        try:
            api.apply(TAKE, tree=kernel)
        except (Refusal, UnknownDevice):
            continue
        bound += 1
        api.recover(tree=kernel)
        assert read_driver_state(kernel, FUNCTION).driver == "vfio-pci"
        assert [str(origin.device.address) for origin in api.scan(kernel).origins] == [
            str(FUNCTION)
        ]
        assert kernel.read(AUTOPROBE) == "1"
        assert api.recover(tree=kernel) == ()
    assert bound


def test_recover_undoes_only_the_devices_that_no_later_run_has_bound(tmp_path: Path) -> None:
    bound = 0
    for kernel in after_deaths(tmp_path, BIND):
        try:
            api.apply(Bind((AUDIO,), only=True), tree=kernel)
        except Refusal:
            continue  # the GPU is still on its host driver
        bound += 1
        api.recover(tree=kernel)
        assert read_driver_state(kernel, AUDIO).driver == "vfio-pci"
        assert read_driver_state(kernel, GPU).driver == "nvidia"
        assert [origin.device.address for origin in api.scan(kernel).origins] == [AUDIO]
    assert bound


def write(path: str) -> ChangeFiles:
    return ChangeFiles(f"write {path}", (FileChange(path, None, "new\n"),), ("files",))


def test_a_change_of_files_settles_nothing_of_a_bind_that_loads_its_driver(tmp_path: Path) -> None:
    left = 0
    for at in count(1):
        kernel = workstation(tmp_path / str(at))
        before = read_driver_state(kernel, GPU)
        if not dies(kernel, BIND, at, after=True):
            break
        runs = cut_off_runs(kernel, kernel.read(BOOT_ID))
        api.apply(write("/etc/x.conf"), tree=kernel)
        assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == runs, at
        assert len(api.recover(tree=kernel)) == len(runs)
        assert read_driver_state(kernel, GPU) == before, at
        left += len(runs)
    assert left


def test_a_change_of_a_file_does_not_settle_that_of_another_file(tmp_path: Path) -> None:
    left = 0
    for kernel in after_deaths(tmp_path, write("/etc/x.conf")):
        runs = cut_off_runs(kernel, kernel.read(BOOT_ID))
        begun = [run for run in runs if read_unfinished(kernel, run.name).begun]
        api.apply(write("/etc/y.conf"), tree=kernel)
        assert set(begun) <= set(cut_off_runs(kernel, kernel.read(BOOT_ID)))
        left += len(begun)
    assert left


@pytest.mark.parametrize(
    "second",
    [ForgetPersisted((ADAPTER,)), ImportDriverctl(), ForgetPersisted((AUDIO,))],
    ids=["a request with nothing to do", "another kind", "the rest"],
)
def test_only_a_request_that_completes_a_removal_of_rules_settles_it(
    tmp_path: Path, second: Request
) -> None:
    """The locks are the same, and the first rule is removed."""
    kernel, before = forgotten_by_half(tmp_path)
    is_rest = second == ForgetPersisted((AUDIO,))
    assert api.apply(second, tree=kernel).is_changed is is_rest
    assert len(cut_off_runs(kernel, kernel.read(BOOT_ID))) == (not is_rest)
    api.recover(tree=kernel)
    wanted = {} if is_rest else before
    assert {name: kernel.read_text(RULES / name) for name in kernel.children(RULES)} == wanted


def forgotten_by_half(tmp_path: Path) -> tuple[FakeKernel, dict[str, str | None]]:
    """A host where only the first of two rules was removed, and its rules before."""
    for at in count(1):
        kernel = mixed(tmp_path / str(at))
        api.apply(Bind((GPU,), persist=True), tree=kernel)
        before = {name: kernel.read_text(RULES / name) for name in kernel.children(RULES)}
        assert dies(kernel, ForgetPersisted((GPU, AUDIO)), at, after=True)
        if len(kernel.children(RULES)) < len(before):
            return kernel, before
    raise AssertionError


def test_a_change_elsewhere_settles_nothing_of_a_device_that_is_gone(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    assert dies(kernel, BIND, 9, after=True)
    runs = cut_off_runs(kernel, kernel.read(BOOT_ID))
    kernel.unplug(str(GPU))
    kernel.unplug(str(AUDIO))
    api.apply(Bind((ADAPTER,)), tree=kernel)
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == runs


def test_nothing_is_added_to_a_journal_that_another_process_has_ended(tmp_path: Path) -> None:
    kernel = prepared(tmp_path)
    assert dies(kernel, BIND, 4, after=True)
    (run,) = cut_off_runs(kernel, kernel.read(BOOT_ID))
    told: list[str] = []
    api.recover(tree=kernel)
    records = read_journal(kernel, run.name)
    settle(kernel, run, [0], None, told.append)
    supersede(kernel, run, told.append)
    assert read_journal(kernel, run.name) == records
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
    kernel.remove(DIRECTORY / run.name)
    settle(kernel, run, [0], None, told.append)
    assert told == []


def test_a_wait_for_a_journal_that_another_process_uses_is_told(tmp_path: Path) -> None:
    kernel = prepared(tmp_path)
    assert dies(kernel, BIND, 4, after=True)
    (run,) = cut_off_runs(kernel, kernel.read(BOOT_ID))
    told: list[str] = []
    other = Journal.resume(kernel, run.name)

    def end_other(text: str) -> None:
        told.append(text)
        with other:
            other.record("end", {"outcome": "rolled-back"})

    settle(kernel, run, [0], None, end_other)
    assert told == [f"waiting for another vfiomgr, which uses {DIRECTORY / run.name}"]
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []


@pytest.mark.parametrize("name", ["sriov set", "bind"])
def test_a_death_at_any_record_of_the_second_run_leaves_the_state_before_or_the_wanted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What it settles of the first run counts only with its own end."""
    request: Request = TWO if name == "sriov set" else BIND
    at = 3 if name == "sriov set" else 5
    whole = prepared(tmp_path / "whole")
    before = kept(whole)
    api.apply(request, tree=whole)
    found: list[bool] = []
    for number in count(1):
        kernel = prepared(tmp_path / str(number))
        assert dies(kernel, request, at, after=True)
        repeat = partial(api.apply, request, tree=kernel)
        if not dies_at_record(monkeypatch, number, repeat):
            break
        kernel.revive()
        is_done = changes(kept(whole), kept(kernel)) == {}
        recovered = api.recover(tree=kernel)
        assert changes(before if recovered else kept(whole), kept(kernel)) == {}, number
        assert is_done or recovered
        assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
        found.append(bool(recovered))
    assert set(found) == {True, False}


def test_a_plan_after_an_interrupted_run_shows_the_settings_that_the_run_restores(
    tmp_path: Path,
) -> None:
    kernel = prepared(tmp_path)
    assert dies(kernel, TWO, 3, after=True)
    assert kernel.read(AUTOPROBE) == "0"
    host = api.host_at(kernel)
    assert "sriov_drivers_autoprobe" in str(host.plan(TWO))
    planned = host.plan(TWO).steps
    assert host.apply(TWO).plan.steps == planned
    assert kernel.read(AUTOPROBE) == "1"


def _classes() -> Iterator[type[EveryFault]]:
    root = Path(__file__).parents[3]
    for file in sorted((root / "tests/unit").rglob("test_*.py")):
        if "(EveryFault)" in file.read_text():
            module = importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
            found = (vars(module)[name] for name in dir(module) if name.startswith("Test"))
            yield from (one for one in found if issubclass(one, EveryFault))


def test_every_kind_of_request_is_killed_and_repeated(tmp_path: Path) -> None:
    """Courses from stories name their request; others are prepared until no kind is left."""
    courses = [made for one in _classes() for made in one.courses.values()]
    stories = [getattr(made, "keywords", {}).get("story") for made in courses]
    others = [made for made, story in zip(courses, stories, strict=True) if story is None]
    kinds = registry.request_kinds().values()
    left = {kind.kind for kind in kinds if kind.__module__.startswith("vfiomgr.")}
    left -= {story[1].kind for story in stories if story is not None}
    for number, made in enumerate(others):
        if left:
            left.discard(made(tmp_path).prepared(tmp_path / str(number))[1].kind)
    assert left == set(), "each kind of request needs a course of EveryFault"
