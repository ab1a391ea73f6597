"""The command line works with the click of Debian 13, which is older than the one of the tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.debian import unpacked


@pytest.mark.parametrize("command", [("list",), ("kata",), ("libvirt", "domain")])
def test_commands_load_with_an_older_click(command: tuple[str, ...]) -> None:
    place = unpacked("trixie", "python3-click") / "usr/lib/python3/dist-packages"
    code = "import click, sys; print(click.__file__); from vfiomgr.main.program import main; main()"
    answer = subprocess.run(
        (sys.executable, "-c", code, *command, "--help"),
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, _, rest = answer.stdout.partition("\n")
    assert first.startswith(str(place)), "the older one is used"
    assert (answer.returncode, "Usage:" in rest) == (0, True), answer.stderr
