"""The units of the packages, what they need, and the scripts that stop them."""

from __future__ import annotations

import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest

from tools.package.__main__ import scripts
from tools.package.tree import HOME, packaged_units, template
from tools.package.wheels import CHECKOUT, REQUIREMENTS

if TYPE_CHECKING:
    from pathlib import Path


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


CLAIMS = "refused: pods of this node have 1 ResourceClaim\n  remedy: drain the node"
AGENT = "refused: the node agent is running\n  explain: vfiomgr explain uninstall-agent"


@pytest.mark.parametrize(
    ("running", "stopped", "calls", "told"),
    [
        (f"{CLAIMS}; then stop the agent", f"start the agent; {CLAIMS}", "vs", "  remedy: drain"),
        (AGENT, "", "vsv", "files written by vfiomgr remain on this host"),
        (AGENT, AGENT, "vsv", "vfiomgr explain uninstall-agent"),
        ("", "start the agent first", "vs", "files written by vfiomgr remain on this host"),
    ],
)
def test_a_removal_asks_what_stays_while_the_agent_runs(
    tmp_path: Path, running: str, stopped: str, calls: str, told: str
) -> None:
    """Only with the agent can pods be ended, so the remedy must not begin with its start."""
    log, systemd = tmp_path / "calls", tmp_path / "systemd"
    systemd.mkdir()
    for name, mark, then in (
        ("vfiomgr", "v", f'if grep -q s {log}; then said="$STOPPED"; else said="$RUNNING"; fi'),
        ("systemctl", "s", "exit 0"),
    ):
        answer = 'echo "${said:-remove the file}"; [ -z "$said" ]'
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf {mark} >> {log}\n{then}\n{answer}\n")
        program.chmod(0o755)
    script = scripts()["before_removal"].replace("/usr/bin/vfiomgr", str(tmp_path / "vfiomgr"))
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input=script.replace("/run/systemd/system", str(systemd)),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RUNNING": running, "STOPPED": stopped},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (log.read_text(), told in done.stderr) == (calls, True), done.stderr


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm", "vfiomgr.spec", "vfiomgr.install"])
def test_no_failure_of_systemctl_ends_a_script(name: str) -> None:
    """It fails in containers, and where the system is going down."""
    text = (CHECKOUT / "packaging" / name).read_text()
    parts = [text, *(part for key, part in scripts().items() if key in text)]
    commands = [line.strip() for part in parts for line in part.splitlines()]
    found = [line for line in commands if line.startswith("systemctl ")]
    assert found
    assert [line for line in found if "||" not in line] == []


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm", "vfiomgr.install"])
def test_scripts_are_those_of_a_plain_shell(name: str) -> None:
    script = template(name, **scripts(), compile="true", clean="true")
    subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=True)


def test_the_packages_have_the_libraries_of_their_units_and_of_the_simulation() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    pinned = [line.partition("==")[0] for line in REQUIREMENTS.read_text().splitlines()]
    for extra in ("node", "simulate"):
        for one in project["optional-dependencies"][extra]:
            assert one.partition(">=")[0] in pinned
