"""Programs of several releases, each of which a test is run with, and the packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration import programs
from tests.integration.installed import Built
from tools.package.__main__ import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.debian import Program


@pytest.fixture(params=[programs.HERE, "trixie", "sid"])
def containerd(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Any:
    """Each containerd; the end of the run says which were run."""
    return _noted(programs.containerd(request.param), record_property)


@pytest.fixture(params=["trixie", "sid"])
def dockerd(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Any:
    """Each dockerd."""
    return _noted(programs.dockerd(request.param), record_property)


def _noted(program: Program, record_property: Callable[[str, Any], None]) -> Program:
    record_property("program", str(program))
    return program


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The packages, built once."""
    place = tmp_path_factory.mktemp("packages")
    return Built(*build(place / "dist", place / "work"), place / "work")
