"""The units of the packages: enabled by hand, disabled when a package is removed."""

from __future__ import annotations

from tools.package.__main__ import _STOP
from tools.package.tree import HOME, packaged_units


def test_the_packages_have_the_units_of_a_layout_and_of_the_node_agent() -> None:
    assert list(packaged_units()) == [
        "vfiomgr-layout.service",
        "vfiomgr-watch.service",
        "vfiomgr-node.service",
        "vfiomgr-node-cdi.service",
    ]


def test_each_unit_runs_the_program_of_the_package_and_can_be_enabled() -> None:
    for text in packaged_units().values():
        assert f"\nExecStart=/{HOME}/bin/python -I -m vfiomgr " in text
        assert text.endswith("\n\n[Install]\nWantedBy=multi-user.target\n")


def test_units_that_a_package_takes_with_it_are_stopped_first() -> None:
    (line,) = (line for line in _STOP.splitlines() if "systemctl" in line)
    assert set(line.split()[3:]) == set(packaged_units())
