"""The errors of the libvirt of this machine have causes, and its texts are those of its release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.integration import error_maker
from tests.integration.embed import AS_USER, WITH_VFIO
from tests.unit.libvirt import errors_seen
from vfiomgr.libvirt.client.errors import ReportedError
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(error_maker.__file__)
INSTALLED = str(Version.from_number(libvirt.getVersion()))
NEEDS_VFIO = ("memory_not_locked", "no_iommufd", "no_vgpu", "no_kvm", "hook_script")
"""Or the hook script that with_vfio.sh has, or no KVM."""
NAMES = tuple(error_maker.MAKERS)
_DEADLINE = 300


def make(names: list[str], user: tuple[str, ...]) -> Iterator[tuple[str, ReportedError]]:
    """Have errors made in a directory of their own, whose path is short for the sake of sockets."""
    # A daemon that was told to end may still write when its directory is removed.
    with tempfile.TemporaryDirectory("", "mistakes-", ignore_cleanup_errors=True) as directory:
        places = {"HOME": directory, "XDG_RUNTIME_DIR": directory, "XDG_CONFIG_HOME": directory}
        answer = subprocess.run(
            [*user, sys.executable, "-I", PROGRAM, directory, *names],
            env=os.environ | places | {"LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_DEADLINE,
        )
        for name, code, text, domain, errno in map(json.loads, answer.stdout.splitlines()):
            plain = re.sub(r"process \d+", "process 4711", text.replace(directory, "/run/user"))
            without = re.sub(r"Child process \(.*? (?=/etc/)", "Child process (", plain)
            yield name, ReportedError(code, without, domain, errno)


def make_all() -> dict[str, ReportedError]:
    """All errors of this libvirt."""
    others = [name for name in NAMES if name not in NEEDS_VFIO]
    return {**dict(make(others, AS_USER)), **dict(make([*NEEDS_VFIO], WITH_VFIO))}


@pytest.fixture(scope="module")
def made() -> dict[str, ReportedError]:
    return make_all()


@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_has_the_cause_that_it_had(made: dict[str, ReportedError], name: str) -> None:
    row = errors_seen.row_of(made[name])
    assert row is not None, made[name]
    assert row in {errors_seen.row_of(seen) for seen in errors_seen.of(name)}


def test_the_texts_are_those_that_were_recorded_of_this_release(
    made: dict[str, ReportedError],
) -> None:
    """`python -m tests.integration.test_libvirt_errors` records those of another."""
    recorded = errors_seen.SEEN.get(INSTALLED)
    if recorded is None:
        return
    assert {n: made[n] for n in NAMES if n not in errors_seen.VARY} == {
        n: recorded[n] for n in NAMES if n not in errors_seen.VARY
    }


def main() -> None:
    """Record the errors of this libvirt."""
    errors_seen.record(INSTALLED, make_all())


if __name__ == "__main__":
    main()
