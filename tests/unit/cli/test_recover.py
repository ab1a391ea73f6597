"""`vfiomgr recover` and `bind` beside files that are no journals of vfiomgr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from vfiomgr.engine.journal import DIRECTORY
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = PciAddress.parse("0000:01:00.0")
JOURNAL = DIRECTORY / "000000000007.jsonl"


@pytest.fixture
def place(kernel: FakeKernel) -> Path:
    kernel.make_directory(DIRECTORY)
    return Path(kernel.locate(DIRECTORY))


def test_a_file_of_somebody_else_is_named_and_nothing_stops(
    run: Run, kernel: FakeKernel, place: Path
) -> None:
    (place / "5").write_text("[]")
    answer = run("bind", str(GPU), "--yes")
    assert answer.status == 0
    assert f"ignoring {DIRECTORY / '5'}: not a journal of vfiomgr" in answer.stderr
    assert kernel.driver_of(str(GPU)) == "vfio-pci"


def test_a_journal_that_cannot_be_read_is_a_refusal_with_a_remedy(
    run: Run, kernel: FakeKernel, place: Path
) -> None:
    (place / JOURNAL.name).write_text("[]\n")
    why = f"{JOURNAL} cannot be read and may contain the original state of devices"
    for line, status in {f"bind {GPU} --yes": 4, "recover": 65}.items():
        answer = run(*line.split())
        assert answer.status == status
        assert "record 1 does not match its checksum" in answer.stderr
        assert f"mv {JOURNAL} /root/" in answer.stderr
        assert (why in answer.stderr) is (status == 4)
    assert kernel.driver_of(str(GPU)) == "nvidia"


def test_a_dry_run_of_recover_calls_no_unreadable_journal_nothing(run: Run, place: Path) -> None:
    (place / JOURNAL.name).write_text("[]\n")
    answer = run("recover", "--dry-run")
    assert answer.stdout == ""
    assert f"cannot read {JOURNAL}: record 1 does not match its checksum" in answer.stderr


def test_a_dry_run_of_recover_names_all(run: Run, kernel: FakeKernel, place: Path) -> None:
    kernel.kill(at=8)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    (place / JOURNAL.name).write_text("[]\n")
    (place / "notes.txt").touch()
    answer = run("recover", "--dry-run", "--format", "json")
    assert answer.status == 0
    assert [item["state"] for item in json.loads(answer.stdout)["items"]] == ["left"]
    assert f"cannot read {JOURNAL}: record 1 does not match its checksum" in answer.stderr
    assert f"ignoring {DIRECTORY / 'notes.txt'}: not a journal of vfiomgr" in answer.stderr


@pytest.mark.parametrize("line", ["recover", "recover --finish", "recover --dry-run"])
def test_a_user_who_may_not_read_the_journal_is_told_no_other_way(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    kernel.make_directory(DIRECTORY)

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("vfiomgr.engine.survey.names", forbidden)
    monkeypatch.setattr("vfiomgr.engine.locks.os.geteuid", lambda: 1000)
    monkeypatch.setattr("vfiomgr.engine.locks.os.access", lambda *_: False)
    answer = run(*line.split())
    assert answer.status == 1
    first, second = answer.stderr.splitlines()
    assert first.endswith(" requires root")
    assert second == "  remedy: run the command as root, e.g. with sudo"
