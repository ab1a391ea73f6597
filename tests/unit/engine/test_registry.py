"""A capability from outside the package: planned, run, recorded, recovered, with a command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.unit.engine.faults import Courses, EveryFault, told
from tests.unit.engine.toy.requests import Label, LabelCheckpoint
from tests.unit.engine.toy.steps import LABELS, SetLabel
from vfiomgr import capability
from vfiomgr.capability import Capability
from vfiomgr.engine import registry
from vfiomgr.engine.journal import names
from vfiomgr.engine.plan import Request, Step
from vfiomgr.engine.unfinished import read_unfinished
from vfiomgr.errors import Refusal
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

TOY = Capability(
    "tests.unit.engine.toy",
    values=("requests", "steps"),
    plans=("plan",),
    applies=("apply",),
    commands={"toy-label": "commands"},
)
GPU = PciAddress.parse("0000:01:00.0")
FILE = LABELS / str(GPU)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """The capability, for one test."""
    known = dict(capability._KNOWN)
    capability.register(TOY)
    yield
    capability._KNOWN.clear()
    capability._KNOWN.update(known)


class TestEveryFault(EveryFault):
    """A fault, and a death, at each operation of the toy's step."""

    courses: ClassVar[Courses] = told({"label": ((), Label(GPU, "left"))}, workstation)


def test_it_is_planned_run_and_undone(kernel: FakeKernel) -> None:
    outcome = api.apply(Label(GPU, "left"), tree=kernel)
    assert [step.describe() for step in outcome.plan.steps] == ["0000:01:00.0: label none -> left"]
    assert kernel.read_text(FILE) == "left"


def test_its_step_is_read_from_the_journal_by_its_kind(kernel: FakeKernel) -> None:
    kernel.kill(at=len(kernel.operations) + 3, after=True)
    with pytest.raises(PowerCut):
        api.apply(Label(GPU, "left"), tree=kernel)
    kernel.revive()
    (run,) = api.recover(tree=kernel)
    assert run.summary == f"label {GPU}"
    assert kernel.read_text(FILE) is None
    assert registry.step_kinds()["toy-set-label"] is SetLabel


def test_its_checkpoint_goes_from_the_journal_to_the_plan_that_finishes_it(
    kernel: FakeKernel,
) -> None:
    request = Label(GPU, "left", with_driver=True)
    before = api.scan(kernel).device(GPU).driver
    kernel.kill(at=3, after=True)
    with pytest.raises(PowerCut):
        api.apply(request, tree=kernel)
    kernel.revive()
    (name,) = names(kernel)
    run = read_unfinished(kernel, name)
    assert (run.request, run.checkpoint) == (request, LabelCheckpoint(before))
    kernel.write(PCI_DEVICES / str(GPU) / "driver/unbind", str(GPU))
    assert registry.resolve(api.scan(kernel), request) == LabelCheckpoint(None)
    api.recover(tree=kernel, finish=True)
    assert kernel.read_text(FILE) == f"left {before}"


def test_its_diagnostic_refuses(kernel: FakeKernel) -> None:
    bridge = next(device for device in api.scan(kernel).devices if device.is_bridge)
    with pytest.raises(Refusal, match="is a bridge"):
        api.apply(Label(bridge.address, "left"), tree=kernel)


def test_its_command_is_there_with_all_that_commands_have(run: Run, kernel: FakeKernel) -> None:
    answer = run("toy-label", str(GPU), "left", "--dry-run", "--format", "json")
    (step,) = json.loads(answer.stdout)["steps"]
    assert (step["kind"], step["commands"]) == ("toy-set-label", [f"echo left > {FILE}"])
    assert kernel.read_text(FILE) is None
    assert run("toy-label", str(GPU), "left").stdout == f"{GPU}: left\n"
    assert kernel.read_text(FILE) == "left"
    assert "toy-label" in run("--help").stdout


def test_what_no_capability_plans_or_performs_is_said(kernel: FakeKernel) -> None:
    with pytest.raises(LookupError, match="no registered capability plans Request"):
        registry.plan(api.scan(kernel), Request())
    with pytest.raises(LookupError, match="no registered capability performs Step"):
        registry.perform(Step(), kernel)


def test_each_kind_is_planned_or_performed() -> None:
    """So that no class is without its function."""
    for kind in registry.request_kinds().values():
        assert callable(registry._required(registry._PLANNERS, kind, "plans"))
    for step in registry.step_kinds().values():
        assert callable(registry._required(registry._PERFORMERS, step, "applies"))


def test_what_takes_part_in_every_change_does_not_import_pydantic() -> None:
    """It takes a process of vfiomgr as long to import as most of a change."""
    program = (
        "import sys; import vfiomgr.library; from vfiomgr.engine import registry; "
        "registry.undo_guards(); "
        "registry.read_request({'kind': 'bind', 'addresses': ['0000:04:00.0']}); "
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
