"""Requests and reservations as written by people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.fleet.hosts import a_gpu, a_host
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.fleet.model import fleet_of
from vfiomgr.fleet.named import read_reservations, request_of, wanted
from vfiomgr.fleet.placing import Reserved, Wanted
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

FLEET = fleet_of([("a.json", a_host(a_gpu(0), a_gpu(1)))])
NOON = 1796040000.0  # 2026-11-30T12:00:00Z


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("A40", 1, "A40"),
        ("2xA40", 2, "A40"),
        (" 2 X  NVIDIA A40 ", 2, "NVIDIA A40"),
        ("10de:2235", 1, "10de:2235"),
    ],
)
def test_a_number_stands_before_the_name(text: str, count: int, name: str) -> None:
    assert wanted("gpu", text) == Wanted("gpu", count, name)


def test_a_name_is_needed() -> None:
    with pytest.raises(UsageError, match="--vgpu: not a number and a name: ''") as caught:
        wanted("vgpu", "")
    assert caught.value.hint == "write e.g. --vgpu 2xA40-8Q"


@pytest.mark.parametrize("text", ["0xA40", "-1xA40", "2x", "12345 x A40"])
def test_a_wrong_number_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match=f"--gpu: not a number and a name: '{text}'"):
        wanted("gpu", text)


def test_sizes_are_bytes() -> None:
    found = request_of({"gpu": ("A40",)}, "16G", "1G", 4, is_on_one_node=True)
    assert (found.memory_bytes, found.page_bytes, found.cpus) == (16 * GIB, GIB, 4)


@pytest.mark.parametrize(
    ("memory", "hugepages", "why"),
    [
        (None, None, "missing option: what the guest needs"),
        ("lots", None, "--memory lots is not a size"),
        ("16", None, "missing unit: --memory 16"),
    ],
)
def test_a_request_needs_something(memory: str | None, hugepages: str | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        request_of({}, memory, hugepages, 0, is_on_one_node=False)


def test_huge_pages_need_memory() -> None:
    with pytest.raises(UsageError, match="--hugepages needs --memory"):
        request_of({"gpu": ("A40",)}, None, "1G", 0, is_on_one_node=False)


def reserved(tmp_path: Path, text: str) -> dict[str, Reserved]:
    file = tmp_path / "reserved.yaml"
    file.write_text(f"version: vfiomgr/v1\nreservations:\n{text}")
    return read_reservations(str(file), FLEET, NOON)


def test_what_is_reserved_is_added_up(tmp_path: Path) -> None:
    first = "- {host: gpu1, gpus: ['0000:01:00.0'], memory: 16G, note: for Ann}\n"
    second = "- {host: gpu1, memory: 16G}\n"
    gpus = frozenset({"0000:01:00.0"})
    assert reserved(tmp_path, first + second) == {"gpu1": Reserved(gpus, memory_bytes=32 * GIB)}
    assert reserved(tmp_path, "- {host: gpu1}\n") == {"gpu1": Reserved(is_entire=True)}


@pytest.mark.parametrize(
    ("until", "is_over"),
    [
        ("2026-11-30", False),
        ("2026-11-29", True),
        ("2026-11-30T12:00:00Z", True),
        ("2026-11-30T12:00:01Z", False),
    ],
)
def test_a_reservation_ends(tmp_path: Path, until: str, is_over: bool) -> None:  # noqa: FBT001
    found = reserved(tmp_path, f"- {{host: gpu1, until: {until}}}\n")
    assert found == ({} if is_over else {"gpu1": Reserved(is_entire=True)})


def test_a_reservation_that_ended_may_name_a_host_that_is_gone(tmp_path: Path) -> None:
    assert reserved(tmp_path, "- {host: gone, until: 2026-01-01}\n") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- {host: gpu9}\n", "no such host in the fleet: gpu9"),
        ("- {host: gpu1, gpus: ['0000:99:00.0']}\n", "gpu1 has no GPU 0000:99:00.0"),
    ],
)
def test_a_name_that_reserves_nothing_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        reserved(tmp_path, text)
    assert why in caught.value.message


def test_a_similar_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        reserved(tmp_path, "- {host: gpu11}\n")
    assert caught.value.remedy == "did you mean gpu1? hosts: gpu1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- {host: gpu1, until: soon}\n", ":3:16: reservations.0.until: not a day or a time"),
        ("- {host: gpu1, gpu: a}\n", "reservations.0.gpu: unknown field"),
        ("- {}\n", "reservations.0.host: the field is missing"),
        ("- [\n", "reserved.yaml:"),
        (
            "- {host: gpu1, memory: '64'}\n",
            ":3:16: reservations.0.memory: not a size with a unit such as 64G: '64'",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        reserved(tmp_path, text)
    assert why in caught.value.message


def test_the_version_is_required(tmp_path: Path) -> None:
    file = tmp_path / "reserved.yaml"
    file.write_text("version: v2\nreservations: []\n")
    with pytest.raises(InvalidDocument, match="unsupported version: v2"):
        read_reservations(str(file), FLEET, NOON)
