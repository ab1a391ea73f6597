"""The units of the packages, what they need, and the scripts that stop them."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from tools.package.__main__ import scripts
from tools.package.tree import HOME, packaged_units, template
from tools.package.wheels import CHECKOUT, REQUIREMENTS


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
    line = next(t for t in scripts()["before_removal"].splitlines() if "systemctl disable" in t)
    assert set(line.split()[3:-1]) == set(packaged_units())


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm", "vfiomgr.spec"])
def test_no_failure_of_systemctl_ends_a_script(name: str) -> None:
    """It fails in containers, and where the system is going down."""
    text = (CHECKOUT / "packaging" / name).read_text()
    parts = [text, *(part for key, part in scripts().items() if key in text)]
    commands = [line.strip() for part in parts for line in part.splitlines()]
    found = [line for line in commands if line.startswith("systemctl ")]
    assert found
    assert [line for line in found if "||" not in line] == []


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_scripts_are_those_of_a_plain_shell(name: str) -> None:
    script = template(name, **scripts(), compile="true", clean="true")
    subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=True)


def test_the_packages_have_the_libraries_of_their_units_and_of_the_simulation() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    pinned = [line.partition("==")[0] for line in REQUIREMENTS.read_text().splitlines()]
    for extra in ("node", "simulate"):
        for one in project["optional-dependencies"][extra]:
            assert one.partition(">=")[0] in pinned
