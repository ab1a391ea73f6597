"""Builds against the kernel of a root; nothing is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import kernel
from tests.lab.kernel import Kernel, build_modules

_RELEASE = "7.2.13-amd64"
_HEADERS = f"/usr/src/linux-headers-{_RELEASE}"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run within a root."""
    told: list[list[str]] = []

    def note(_root: Path, command: list[str], _shown: Path) -> str:
        told.append(command)
        return ""

    monkeypatch.setattr(kernel, "run_within", note)
    return told


@pytest.mark.parametrize(
    ("variant", "headers"), [(None, _HEADERS), (Path("/made"), f"/made{_HEADERS}")]
)
def test_headers_are_called_by_the_path_that_they_have_within_the_root(
    commands: list[list[str]], variant: Path | None, headers: str
) -> None:
    """KBUILD_OUTPUT in the Makefile of Linux 7's headers is that path."""
    build_modules(Kernel(Path("/home/root"), _RELEASE, is_root=True, variant=variant), Path("/s"))
    ((*_, flag, directory),) = commands
    assert (flag, directory) == ("-C", headers)
