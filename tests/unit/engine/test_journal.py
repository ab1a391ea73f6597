"""The journal: in order, durable, intact after a full disk, and robust against other files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import mixed
from vfiomgr.engine import journal as journal_module
from vfiomgr.engine.journal import (
    DIRECTORY,
    FIRST_STEPS,
    LAST,
    Journal,
    decode,
    encode,
    names,
    read_journal,
)
from vfiomgr.engine.survey import cut_off_runs, survey
from vfiomgr.errors import HostError, InvalidDocument, Refusal, VfiomgrError
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID, HostPath
from vfiomgr.pci.drivers import origin_file
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.fakes.kernel import FakeKernel

GPU, AUDIO = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:01:00.1")
ADAPTER = PciAddress.parse("0000:05:00.0")
CHANGED = "record 2 does not match its checksum"
LATER = "000000000900.jsonl"
PLAN = {
    "event": "plan",
    "summary": "s",
    "boot_id": "b",
    "request": {"kind": "bind"},
    "checkpoint": None,
    "locks": ["l"],
    "steps": [{"kind": "k"}, {"kind": "k"}],
    "descriptions": ["d", "e"],
    "subjects": ["0000:01:00.0", None],
}


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return mixed(tmp_path)


@pytest.fixture
def directory(kernel: FakeKernel) -> Path:
    kernel.make_directory(DIRECTORY)
    return Path(kernel.locate(DIRECTORY))


def begun(kernel: FakeKernel) -> Journal:
    """The journal of a bind that is about to begin."""
    host = api.scan(kernel, with_users=True)
    return Journal.create(kernel, api.plan(host, Bind((GPU,))), Bind((GPU,)), host.kernel.boot_id)


def cut_off(kernel: FakeKernel) -> str:
    """The name of the journal of a bind that was cut off."""
    kernel.kill(at=8, after=True)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    (run,) = cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)
    return run.name


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # that of the list itself
    return [name for name in found if "vfiomgr" in name]


# ---- order


def test_runs_are_numbered_and_no_number_comes_twice(kernel: FakeKernel, directory: Path) -> None:
    for _ in range(3):
        begun(kernel).__exit__()
    assert names(kernel) == [f"{number:012}.jsonl" for number in (1, 2, 3)]
    (directory / "000000000003.jsonl").unlink()
    (directory / "000000000002.jsonl").unlink()
    begun(kernel).__exit__()
    assert names(kernel)[-1] == "000000000004.jsonl"


@pytest.mark.parametrize(
    "text", [None, b"", b"rubbish", b"9" * 18 + b"\n", b"000000000000000001\n"]
)
def test_where_the_counter_is_lost_the_names_say_the_number(
    kernel: FakeKernel, text: bytes | None
) -> None:
    for _ in range(2):
        begun(kernel).__exit__()
    counter = Path(kernel.locate(LAST))
    counter.unlink() if text is None else counter.write_bytes(text)
    begun(kernel).__exit__()
    assert names(kernel)[-1] == "000000000003.jsonl"
    assert int(counter.read_text()) == 3


def test_a_counter_that_is_no_file_is_named_and_the_names_are_enough(kernel: FakeKernel) -> None:
    begun(kernel).__exit__()
    counter = Path(kernel.locate(LAST))
    counter.unlink()
    counter.mkdir()
    with pytest.warns(UserWarning, match=f"cannot use {LAST}"):
        begun(kernel).__exit__()
    assert names(kernel)[-1] == "000000000002.jsonl"


def test_interrupted_runs_are_in_the_order_of_their_numbers(
    kernel: FakeKernel, directory: Path
) -> None:
    """The newest one, which is undone first, is the last; a number may have more digits."""
    in_order = ["000000000010.jsonl", "999999999999.jsonl", "1000000000000.jsonl"]
    for name in in_order:
        (directory / name).write_bytes(encode(PLAN))
    assert names(kernel) == in_order
    assert [run.name for run in cut_off_runs(kernel, "b")] == in_order
    begun(kernel).__exit__()
    assert names(kernel)[-1] == "1000000000001.jsonl"


def ended(number: int, kind: str) -> tuple[str, bytes]:
    """The name and the content of a journal of a run that is done."""
    plan = encode({**PLAN, "request": {"kind": kind}})
    return f"{number:012}.jsonl", plan + encode({"event": "end", "outcome": "done"})


def test_the_newest_runs_are_kept_and_the_newest_about_layouts_that_are_older(
    kernel: FakeKernel, directory: Path
) -> None:
    """A revert takes the layouts back, the newest first."""
    layouts = [ended(number, "apply-layout") for number in range(1, 151)]
    others = [ended(number, "bind") for number in range(151, 300)]
    for name, content in (*layouts, *others):
        (directory / name).write_bytes(content)
    begun(kernel).__exit__()
    kept = [*layouts[-100:], *others[-100:]]
    assert names(kernel) == [*(name for name, _ in kept), "000000000300.jsonl"]


def test_a_run_that_ends_while_it_is_examined_is_not_interrupted(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is written before it releases its journal, so that is what is looked at first."""
    journal, flock = begun(kernel), fcntl.flock

    def ends_before(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_SH | fcntl.LOCK_NB:
            monkeypatch.setattr(fcntl, "flock", flock)
            with journal:
                journal.record("end", {"outcome": "done"})
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", ends_before)
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
    assert read_journal(kernel, journal.name)[-1]["event"] == "end"


# ---- durable, and whole


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The files that were made durable, by inode, and how long they were then."""
    found: list[tuple[int, int]] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        found.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", recorded)
    return found


def sizes_at_writes(
    kernel: FakeKernel, request: Bind, synced: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """How much of the journal was on disk, and how much written, at each write to the kernel."""
    sizes: list[tuple[int, int]] = []

    def look(_path: str, _text: str) -> None:
        (name,) = names(kernel)
        status = os.stat(kernel.locate(DIRECTORY / name))
        assert read_journal(kernel, name)[-1]["event"] == "begin"
        sizes.append((dict(synced)[status.st_ino], status.st_size))

    kernel.before_write = look
    api.apply(request, tree=kernel)
    return sizes


def many(kernel: FakeKernel) -> tuple[PciAddress, ...]:
    """Twenty adapters, which a bind moves in sixty steps."""
    kernel.add_driver("iavf", ids=[("8086", "1889", "02")])
    addresses = [f"0000:40:{number:02x}.0" for number in range(20)]
    for number, address in enumerate(addresses, start=100):
        kernel.add_pci(
            address,
            vendor="8086",
            device="1889",
            class_code="020000",
            group=100 + number,
            driver="iavf",
        )
    return tuple(map(PciAddress.parse, addresses))


def test_what_is_begun_is_on_disk_before_anything_is_written(
    kernel: FakeKernel, synced: list[tuple[int, int]]
) -> None:
    sizes = sizes_at_writes(kernel, Bind((GPU,)), synced)
    assert sizes
    assert all(on_disk == written for on_disk, written in sizes)


@pytest.mark.parametrize("what", [DIRECTORY, LAST], ids=["its name", "its number"])
def test_a_new_journal_survives_a_power_cut_with(
    kernel: FakeKernel, synced: list[tuple[int, int]], what: HostPath
) -> None:
    """A file whose name is not on disk is lost, and a number that is not could be used twice."""
    at_first: list[bool] = []

    def look(_path: str, _text: str) -> None:
        at_first.append(os.stat(kernel.locate(what)).st_ino in dict(synced))

    kernel.before_write = look
    api.apply(Bind((GPU,)), tree=kernel)
    assert at_first[0]


def test_of_many_steps_the_later_ones_are_made_durable_together(
    kernel: FakeKernel, synced: list[tuple[int, int]]
) -> None:
    sizes = sizes_at_writes(kernel, Bind(many(kernel)), synced)
    (name,) = names(kernel)
    begun = [r["step"] for r in read_journal(kernel, name) if r["event"] == "begin"]
    inode = os.stat(kernel.locate(DIRECTORY / name)).st_ino
    syncs = sum(file == inode for file, _ in synced)
    assert len(begun) >= 40
    assert syncs == 1 + (FIRST_STEPS - 1) + len(begun) // FIRST_STEPS + 1  # the plan and the end
    assert sizes[0][0] == sizes[0][1]
    assert any(on_disk < written for on_disk, written in sizes)


def test_of_many_steps_all_are_durable_if_one_outlasts_a_reboot(
    kernel: FakeKernel, synced: list[tuple[int, int]]
) -> None:
    sizes = sizes_at_writes(kernel, Bind(many(kernel), persist=True), synced)
    assert len(sizes) >= 40
    assert all(on_disk == written for on_disk, written in sizes)


def test_a_power_cut_loses_no_step_of_a_run_that_outlasts_a_reboot(kernel: FakeKernel) -> None:
    kernel.kill(at=50)
    with pytest.raises(PowerCut):
        api.apply(Bind(many(kernel), persist=True), tree=kernel)
    kernel.revive()
    kernel.reboot()
    (run,) = cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)
    assert run.step.endswith("-> vfio-pci (driver_override vfio-pci)")


@pytest.mark.parametrize("lost", [False, True])
def test_a_power_cut_among_many_steps_leaves_nothing_to_undo(
    kernel: FakeKernel, synced: list[tuple[int, int]], *, lost: bool
) -> None:
    addresses = many(kernel)
    before = [read_driver_state(kernel, address) for address in addresses]
    kernel.kill(at=50)
    with pytest.raises(PowerCut):
        api.apply(Bind(addresses), tree=kernel)
    kernel.revive()
    (name,) = names(kernel)
    file = Path(kernel.locate(DIRECTORY / name))
    on_disk, written = dict(synced)[file.stat().st_ino], file.stat().st_size
    assert on_disk < written
    if lost:
        os.truncate(file, on_disk)
    (run,) = cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)
    assert "later" not in run.step
    kernel.reboot()
    (run,) = cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)
    assert run.step.endswith(", or a later one")
    assert len(api.recover(tree=kernel)) == 1
    assert [read_driver_state(kernel, address) for address in addresses] == before
    assert cut_off_runs(kernel, api.scan(kernel).kernel.boot_id) == []


def test_a_journal_that_cannot_be_begun_leaves_neither_file_nor_descriptor(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(HostError, match="No space left"):
            api.apply(Bind((GPU,)), tree=kernel)
    assert open_files() == []
    assert names(kernel) == []
    assert api.apply(Bind((GPU,)), tree=kernel).is_changed
    assert survey(kernel, api.scan(kernel).kernel.boot_id).cut_off == ()


def test_a_journal_that_cannot_be_resumed_leaves_no_descriptor(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = cut_off(kernel)

    def broken(_data: bytes) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(journal_module, "decode", broken)
    with pytest.raises(OSError, match="Input/output"):
        Journal.resume(kernel, name)
    assert open_files() == []


def test_a_record_that_was_written_in_part_is_not_in_the_way_of_the_next(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with begun(kernel) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
            with pytest.raises(OSError, match="No space left"):
                journal.record("done", {"step": 0})
        assert [record["event"] for record in read_journal(kernel, journal.name)] == ["plan"]
        journal.begin([0])
        journal.record("end", {"outcome": "done"})
    events = [record["event"] for record in read_journal(kernel, journal.name)]
    assert events == ["plan", "begin", "end"]


@pytest.mark.parametrize("torn", [b'{"event": "do', b"\0" * 40, b"x"])
def test_a_journal_is_resumed_behind_its_last_whole_record(kernel: FakeKernel, torn: bytes) -> None:
    name = cut_off(kernel)
    file = Path(kernel.locate(DIRECTORY / name))
    before = file.read_bytes()
    file.write_bytes(before + torn)
    assert len(cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)) == 1
    assert len(api.recover(tree=kernel)) == 1
    assert file.read_bytes().startswith(before + b'{"event":"undo-begin"')
    assert read_journal(kernel, name)[-1]["event"] == "end"
    assert read_driver_state(kernel, GPU).driver == "nvidia"


def test_a_record_holds_paths_and_names_that_are_not_text() -> None:
    for value in (HostPath("/dev/vfio/7"), "\udcff", "ü"):
        data = encode(PLAN | {"summary": value})
        assert decode(data).records[0]["summary"] == value
        assert decode(data).damage == ""
    with pytest.raises(TypeError):
        encode(PLAN | {"summary": object()})


# ---- checksums


def test_a_record_that_was_changed_is_told_from_one_that_is_torn() -> None:
    lines = [encode(PLAN), encode({"event": "begin", "step": 0}), encode({"event": "end"})]
    whole = b"".join(lines)
    assert decode(whole).damage == ""
    assert decode(whole[:-1]).damage == ""
    assert [record["event"] for record in decode(whole[:-1]).records] == ["plan", "begin"]
    assert decode(whole[:-1]).length == len(whole) - len(lines[-1])
    for number, line in enumerate(lines):
        changed = line.replace(b'"event":"', b'"event":"x')
        damaged = decode(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        assert damaged.damage == f"record {number + 1} does not match its checksum"


@pytest.mark.parametrize("line", [b"[]", b"5", b'"x"', b"{}", b'{"event": 5}', b"[" * 100_000])
def test_a_line_that_is_no_record_is_damage(line: bytes) -> None:
    head = encode(PLAN)
    for text in (line, summed(line)):
        assert decode(head + text + b"\n").damage.startswith("record 2 ")
        assert decode(text + b"\n" + head).damage.startswith("record 1 ")


def summed(text: bytes) -> bytes:
    """Any text with a checksum that matches."""
    return b'%b, "crc32": "%08x"}' % (text[:-1], zlib.crc32(text))


def of_version(version: object, *records: Mapping[str, object]) -> bytes:
    """Records as another version of vfiomgr may write them."""
    lines = (json.dumps({**record, "version": version}).encode() for record in records)
    return b"".join(summed(line) + b"\n" for line in lines)


UNVERSIONED = b"".join(
    summed(json.dumps(record).encode()) + b"\n" for record in (PLAN, {"event": "end"})
)


@pytest.mark.parametrize("version", [0, 2, "1", None], ids=repr)
def test_a_record_of_another_version_is_damage(version: object) -> None:
    contents = decode(of_version(version, PLAN, {"event": "end"}))
    assert contents.damage == f"record 1 is of version {version!r}; this vfiomgr reads version 1"
    assert contents.records == []
    later = encode(PLAN) + of_version(version, {"event": "end"})
    assert decode(later).damage.startswith("record 2 is of version ")
    assert decode(UNVERSIONED).damage.startswith("record 1 is of version None")


def test_a_record_that_is_nested_too_deeply_is_damaged() -> None:
    steps: list[object] = []
    for _ in range(700):
        steps = [steps]
    damage = decode(encode({"event": "plan", "steps": steps})).damage
    assert "not a record" in damage or "not a plan" in damage, "depends on the release of Python"


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 5},
        {"steps": [[]]},
        {"subjects": []},
        {"descriptions": [1, 2]},
        {"request": "bind"},
        {"summary": None},
        {"boot_id": 5},
    ],
    ids=str,
)
def test_a_plan_of_another_shape_is_damage(change: dict[str, object]) -> None:
    assert decode(encode({**PLAN, **change})).damage == "record 1 is not a plan of vfiomgr"


@pytest.mark.parametrize("step", [2, -1, "0", None, True], ids=str)
def test_a_step_that_was_not_planned_is_damage(step: object) -> None:
    data = encode(PLAN) + encode({"event": "begin", "step": step})
    assert decode(data).damage == "a record is about a step that is not planned"


# ---- what else lies in the directory


ENDED = {"event": "end", "outcome": "done"}


def _write_for_all(file: Path) -> None:
    file.write_bytes(encode(PLAN))
    file.chmod(0o666)


MADE: dict[str, Callable[[Path], object]] = {
    "a list": lambda file: file.write_text("[]\n"),
    "a number": lambda file: file.write_text("5\n"),
    "rubbish": lambda file: file.write_bytes(bytes(range(256)) * 9 + b"\n"),
    "a foreign record": lambda file: file.write_text('{"event": "plan"}\n'),
    "another's end": lambda file: file.write_text('[{"event": "end"}]\n'),
    "of another version": lambda file: file.write_bytes(of_version(2, PLAN)),
    "without a version": lambda file: file.write_bytes(summed(json.dumps(PLAN).encode()) + b"\n"),
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link": lambda file: file.symlink_to("/etc/passwd"),
    "a dangling link": lambda file: file.symlink_to("/nowhere/at/all"),
    "for others to write": _write_for_all,
}


@pytest.mark.parametrize("name", ["5", "notes.txt", "7.jsonl", "x.jsonl", LATER + ".bak"])
@pytest.mark.parametrize("kind", ["a list", "rubbish", "a directory", "a FIFO", "a dangling link"])
def test_what_is_no_journal_by_its_name_is_named_and_ignored(
    kernel: FakeKernel, directory: Path, name: str, kind: str
) -> None:
    MADE[kind](directory / name)
    notes: list[str] = []
    assert api.apply(Bind((GPU,)), tree=kernel, on_note=notes.append).is_changed
    assert notes == [f"ignoring {DIRECTORY / name}: not a journal of vfiomgr"]
    assert api.recover(tree=kernel) == ()
    assert os.path.lexists(directory / name)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_journal_that_cannot_be_read_may_hold_the_state_of_any_device(
    kernel: FakeKernel, directory: Path, made: Callable[[Path], object]
) -> None:
    name = LATER
    made(directory / name)
    notes: list[str] = []
    before = kernel.operations
    for attempt in (
        lambda: api.apply(Bind((GPU,)), tree=kernel, on_note=notes.append),
        lambda: api.recover(tree=kernel),
    ):
        with pytest.raises(VfiomgrError) as caught:
            attempt()
        assert isinstance(caught.value, Refusal | InvalidDocument)
        assert f"{DIRECTORY / name}" in caught.value.message
        assert f"mv {DIRECTORY / name} /root/" in caught.value.hint
    assert notes[0].startswith(f"cannot read {DIRECTORY / name}: ")
    assert kernel.operations == before
    os.rename(directory / name, directory.parent / "looked-at")
    assert api.apply(Bind((GPU,)), tree=kernel).is_changed


@pytest.mark.parametrize(
    "text",
    [UNVERSIONED, of_version(0, PLAN, ENDED), of_version(2, PLAN, ENDED)],
    ids=["without a version", "version 0", "version 2"],
)
def test_a_journal_that_ended_in_another_version_hinders_nothing(
    kernel: FakeKernel, directory: Path, text: bytes
) -> None:
    (directory / LATER).write_bytes(text)
    notes: list[str] = []
    assert api.apply(Bind((GPU,)), tree=kernel, on_note=notes.append).is_changed
    assert notes == []
    assert api.recover(tree=kernel) == ()


def test_a_journal_of_another_user_is_not_carried_out(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kernel.locate(DIRECTORY / cut_off(kernel))
    if os.geteuid() == 0:
        os.chown(file, 4711, 4711)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(InvalidDocument, match=r"its owner is user \d+, not root"):
        api.recover(tree=kernel)


def test_a_journal_that_is_too_large_is_not_read(
    kernel: FakeKernel, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.engine.survey.MOST_BYTES", 1000)
    (directory / LATER).write_bytes(b"\0" * 1002)
    with pytest.raises(Refusal, match="too large"):
        api.apply(Bind((GPU,)), tree=kernel)


@pytest.mark.parametrize("text", [b"", b"\0" * 200, b'{"event": "plan", "su'])
def test_a_journal_without_a_whole_record_was_never_acted_upon(
    kernel: FakeKernel, directory: Path, text: bytes
) -> None:
    """The plan is on disk before the first step: a power cut leaves a file like this before it."""
    (directory / LATER).write_bytes(text)
    notes: list[str] = []
    assert api.apply(Bind((GPU,)), tree=kernel, on_note=notes.append).is_changed
    assert notes == []


def test_a_damaged_journal_of_a_run_that_ended_is_in_nobodys_way(kernel: FakeKernel) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    damage(kernel, names(kernel)[0])
    notes: list[str] = []
    assert api.apply(Unbind((GPU,)), tree=kernel, on_note=notes.append).is_changed
    assert notes == []


def damage(kernel: FakeKernel, name: str) -> None:
    """Change one byte of the second record."""
    file = Path(kernel.locate(DIRECTORY / name))
    lines = file.read_bytes().split(b"\n")
    lines[1] = re.sub(rb'"step":0', b'"step":1', lines[1])
    file.write_bytes(b"\n".join(lines))


def test_a_damaged_journal_keeps_only_its_own_devices(kernel: FakeKernel) -> None:
    name = cut_off(kernel)
    damage(kernel, name)
    notes: list[str] = []
    assert api.apply(Bind((ADAPTER,)), tree=kernel, on_note=notes.append).is_changed
    assert notes == [
        f"cannot read {DIRECTORY / name} (about {GPU}, {AUDIO}): {CHANGED}",
    ]
    with pytest.raises(
        Refusal, match=r"cannot be read and may .* state of 0000:01:00\.0, 0000:01:00\.1: "
    ):
        api.apply(Unbind((GPU,)), tree=kernel)
    with pytest.raises(InvalidDocument, match=CHANGED):
        api.recover(tree=kernel)


@pytest.mark.parametrize(
    ("lock", "subject", "refused"),
    [
        ("group-21", "0000:05:00.7", True),
        ("group-99", str(ADAPTER), True),
        ("group-99", "0000:05:00.7", False),
    ],
    ids=["the lock alone is the same", "the device alone is the same", "neither"],
)
def test_a_damaged_journal_keeps_what_has_its_lock_or_its_device(
    kernel: FakeKernel, directory: Path, lock: str, subject: str, *, refused: bool
) -> None:
    """The lock is that of the group of the adapter, which another function may have left."""
    plan = encode({**PLAN, "locks": [lock], "subjects": [subject, None]})
    begin = encode({"event": "begin", "step": 0}).replace(b'"step":0', b'"step":1')
    (directory / LATER).write_bytes(plan + begin)
    assert survey(kernel, "b").damaged[0].why == CHANGED
    if not refused:
        assert api.apply(Bind((ADAPTER,)), tree=kernel).is_changed
        return
    before = read_driver_state(kernel, ADAPTER)
    with pytest.raises(Refusal, match=f"may contain the original state of {subject}"):
        api.apply(Bind((ADAPTER,)), tree=kernel)
    assert read_driver_state(kernel, ADAPTER) == before


def test_recover_ends_the_other_runs_all_the_same(kernel: FakeKernel, directory: Path) -> None:
    cut_off(kernel)
    (directory / LATER).mkdir()
    notes: list[str] = []
    with pytest.raises(InvalidDocument, match="it is a directory"):
        api.recover(tree=kernel, on_note=notes.append)
    assert "undone: bind 0000:01:00.0 to vfio-pci" in notes
    assert read_driver_state(kernel, GPU).driver == "nvidia"


# ---- saved states of functions

ORIGINS: dict[str, Callable[[Path], object]] = {
    name: MADE[name]
    for name in ("a list", "a number", "rubbish", "a directory", "a FIFO", "a link")
} | {
    "deep": lambda file: file.write_text("[" * 60_000),
    "another function": lambda file: file.write_text(
        file.with_name("0000:01:00.1.json").read_text()
    ),
    "wrong types": lambda file: file.write_text(
        file.with_name("0000:01:00.1.json").read_text().replace('"snd_hda_intel"', "5")
    ),
}


@pytest.mark.parametrize("made", ORIGINS.values(), ids=ORIGINS)
def test_a_saved_state_that_cannot_be_read_keeps_its_function_where_it_is(
    kernel: FakeKernel, made: Callable[[Path], object]
) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    file = Path(kernel.locate(origin_file(GPU)))
    file.unlink()
    made(file)
    with (
        pytest.warns(UserWarning, match=re.escape(f"ignoring {origin_file(GPU)}: ")),
        pytest.raises(Refusal, match=f"may contain the original state of {GPU}") as caught,
    ):
        api.apply(Unbind((GPU,)), tree=kernel)
    assert f"mv {origin_file(GPU)} /root/" in caught.value.hint
    assert read_driver_state(kernel, GPU).driver == "vfio-pci"
    with pytest.warns(UserWarning, match="ignoring"):
        assert api.apply(Bind((ADAPTER,)), tree=kernel).is_changed


def test_an_empty_saved_state_is_what_a_power_cut_leaves(kernel: FakeKernel) -> None:
    """It was good for the boot that the power cut ended."""
    api.apply(Bind((GPU,)), tree=kernel)
    kernel.reboot()
    Path(kernel.locate(origin_file(GPU))).write_bytes(b"")
    with pytest.warns(UserWarning, match="it is empty"):
        assert api.apply(Bind((GPU,)), tree=kernel).is_changed
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU).driver == "nvidia"


def test_no_number_is_taken_from_a_name_that_nobody_counted_to(
    kernel: FakeKernel, directory: Path
) -> None:
    (directory / f"{'9' * 18}.jsonl").write_bytes(b"")
    begun(kernel).__exit__()
    assert "000000000001.jsonl" in names(kernel)
