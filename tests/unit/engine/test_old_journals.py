"""Journals of earlier versions: read by their old names, and finished with what they held."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import network_adapter
from vfiomgr.engine import journal_files, registry
from vfiomgr.engine.journal_files import DIRECTORY, current, decode, encode, names
from vfiomgr.passthrough.steps import Reset
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

NIC = PciAddress.parse("0000:05:00.0")


def test_an_intent_is_taken_apart_into_request_and_checkpoint() -> None:
    intent = {"address": "0000:41:00.0", "mig": True, "functions_after": 4, "kind": "set-gpu-mode"}
    assert current({"event": "plan", "intent": intent, "steps": []}) == {
        "event": "plan",
        "request": {"address": "0000:41:00.0", "mig": True, "kind": "set-gpu-mode"},
        "checkpoint": {"functions": 4},
        "steps": [],
    }


@pytest.mark.parametrize("kind", sorted(journal_files._CHECKPOINTS))
def test_each_field_of_an_old_request_is_one_of_its_checkpoint(kind: str) -> None:
    checkpoint = registry.request_kinds()[kind].checkpoint
    assert checkpoint is not None
    names = journal_files._CHECKPOINTS[kind]
    assert {*names.values()} <= {*checkpoint.__struct_fields__}
    old = {"intent": {**dict.fromkeys(names, 1), "kind": kind}}
    told = current(old)
    assert told["request"] == {"kind": kind}
    assert told["checkpoint"] == dict.fromkeys(names.values(), 1)


def test_the_old_kinds_are_those_of_no_class_any_more() -> None:
    kinds = {*registry.step_kinds(), *registry.request_kinds()}
    assert {*journal_files._KINDS.values()} <= kinds
    assert not {*journal_files._KINDS} & kinds


def test_a_record_that_is_nested_too_deeply_is_damaged() -> None:
    steps: list[Any] = []
    for _ in range(700):
        steps = [steps]
    line = encode({"event": "plan", "steps": steps})
    damage = decode(line).damage  # how deep is too deep depends on the release of Python
    assert any(why in damage for why in ("nested too deeply", "not a record", "not a plan"))


def test_old_kinds_have_their_present_names_however_deep_they_are() -> None:
    origin = {"origin": {"driver": "nvidia"}, "kind": "remember-origin"}
    told = current({"intent": {"steps": [origin], "kind": "revert-layout"}, "steps": [origin]})
    kept = {"origin": {"driver": "nvidia"}, "kind": "save-original-state"}
    assert told["request"] == {"steps": [kept], "kind": "revert-layout"}
    assert told["steps"] == [kept]
    assert told["checkpoint"] is None


@pytest.mark.parametrize(
    "record",
    [
        {"event": "begin", "step": 3},
        {"event": "plan", "request": {"kind": "create-vgpu", "places": 1}, "checkpoint": None},
        {"event": "plan", "steps": ["no step", {"kind": 4}]},
    ],
)
def test_what_is_current_or_no_plan_stays(record: dict[str, Any]) -> None:
    assert current(record) == record


def test_an_old_run_that_was_cut_off_is_finished_with_what_it_had_found(tmp_path: Path) -> None:
    """The methods of a function are another version's to restore: only its journal has them."""
    kernel = network_adapter(tmp_path, "ice")
    methods = api.scan(kernel).device(NIC).reset_method
    assert len(methods) > 1
    _cut_off_with_another_method(kernel)
    assert len(api.scan(kernel).device(NIC).reset_method) == 1
    (name,) = names(kernel)
    file = kernel.locate(DIRECTORY / name)
    with open(file, encoding="utf-8") as journal:
        plan, *rest = map(json.loads, journal)
    intent = {**plan.pop("request"), "methods_after": plan.pop("checkpoint")["methods"]}
    assert intent["methods_after"] == " ".join(methods)
    with open(file, "wb") as journal:
        journal.writelines(
            encode({k: v for k, v in record.items() if k != "crc32"})
            for record in ({**plan, "intent": intent}, *rest)
        )
    api.recover(tree=kernel, finish=True)
    assert api.scan(kernel).device(NIC).reset_method == methods


def _cut_off_with_another_method(kernel: FakeKernel) -> None:
    """Let a reset by the method of the bus die once that method is chosen."""
    for at in range(1, 20):
        kernel.kill(at=at, after=True)
        with pytest.raises(PowerCut):
            api.apply(Reset(NIC, "bus"), tree=kernel)
        kernel.revive()
        if len(api.scan(kernel).device(NIC).reset_method) == 1:
            return
        api.recover(tree=kernel)
        for name in names(kernel):
            kernel.remove(DIRECTORY / name)
    pytest.fail("the method was never another one")
