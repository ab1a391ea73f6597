"""The fake kernel against the real one: the same operations, the same results, step by step."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import workstation
from vfiomgr.errors import WriteFailed
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.topology("workstation")

TYPES = MDEV_PARENTS / "mbochs" / "mdev_supported_types"
NAMES = ("mbochs-small", "mbochs-medium", "mbochs-large")
STEPS = 500
_UUIDS = [f"00000000-0000-4000-8000-{number:012x}" for number in range(90)]
_MALFORMED = ("", "no-uuid", _UUIDS[0][:-1], f"{_UUIDS[0]}0", _UUIDS[0].replace("-", "x"))


@dataclass(frozen=True)
class Operation:
    """One write, and what it was for."""

    path: HostPath
    text: str


@dataclass(frozen=True)
class Answer:
    """What came of a write (0, or an errno), and what the parent shows then."""

    errno: int
    available: tuple[str | None, ...]
    active: tuple[str, ...]


def operations(seed: int) -> Iterator[Operation]:
    """Creates and removes at random, some of them wrong; more creates while there is little."""
    chance = random.Random(seed)  # noqa: S311 - a sequence of a test
    for _ in range(STEPS):
        kind, uuid = chance.choice(NAMES), chance.choice(_UUIDS)
        match chance.choices(("create", "remove", "malformed", "zero"), (55, 40, 3, 2))[0]:
            case "create":
                text = uuid.upper() if chance.random() < 0.2 else uuid
                yield Operation(TYPES / kind / "create", text)
            case "remove":
                yield Operation(MDEV_DEVICES / uuid / "remove", "1")
            case "malformed":
                yield Operation(TYPES / kind / "create", chance.choice(_MALFORMED))
            case "zero":
                yield Operation(MDEV_DEVICES / uuid / "remove", chance.choice(("0", "x")))


def answer(tree: HostTree, operation: Operation) -> Answer:
    """Carry an operation out, and look."""
    number = 0
    try:
        tree.write(operation.path, operation.text)
    except WriteFailed as error:
        number = error.errno
    return Answer(
        number,
        tuple(tree.read(TYPES / name / "available_instances") for name in NAMES),
        tuple(tree.children(MDEV_DEVICES)),
    )


@pytest.mark.parametrize("seed", [1, pytest.param(20, marks=pytest.mark.thorough)])
def test_mbochs_answers_alike(tmp_path: Path, seed: int) -> None:
    real, fake = HostTree("/"), workstation(tmp_path)
    seen: set[int] = set()
    try:
        for number, operation in enumerate(operations(seed)):
            here, there = answer(real, operation), answer(fake, operation)
            assert here == there, (number, operation)
            seen.add(here.errno)
    finally:
        for uuid in real.children(MDEV_DEVICES):
            real.write(MDEV_DEVICES / uuid / "remove", "1")
    assert {0, errno.EINVAL, errno.EEXIST, errno.ENOENT, errno.ENOSPC} <= seen
