"""Programs of several releases, each of which a test is run with, and the packages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import libvirt
import pytest

from tests.integration import programs
from tests.integration.installed import WHEELS, Built
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from tools.package.__main__ import build
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.debian import Program


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of a libvirt that is later than this one; `make test-releases` runs them.

    And those that take long, which `make lab-faults` runs.
    """
    installed = Version.from_number(libvirt.getVersion())
    excluded = [item for item in items if _first_libvirt(item) > installed]
    if not os.environ.get(EVERY_MOMENT_VARIABLE):
        excluded += [item for item in items if item.get_closest_marker("thorough")]
    if excluded:
        items[:] = [item for item in items if item not in excluded]
        config.hook.pytest_deselected(items=excluded)


def _first_libvirt(item: pytest.Item) -> Version:
    marker = item.get_closest_marker("libvirt")
    return Version(0, 0) if marker is None else marker.args[0]


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
    """The packages, built once, and compressed but lightly: most of the time is dpkg-deb's."""
    place = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPKG_DEB_COMPRESSOR_LEVEL", "0")
        return Built(*build(place / "dist", place / "work", WHEELS), place / "work")
