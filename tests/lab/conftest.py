"""Fixtures of lab tests in a guest; on the machine, the hooks that send them to one."""

from __future__ import annotations

import pytest

from tests.lab import containers
from tests.lab import libvirtd as daemon
from tests.lab.plugin import LabRun, is_of_laboratory
from tests.lab.topology import Topology, current

_RUN = pytest.StashKey[LabRun]()
_COSTS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    line = "topology(name, last): runs in a guest of that topology (see tests/lab/topology.py)"
    config.addinivalue_line("markers", line)
    config.addinivalue_line("markers", "pods: needs a containerd that the machine has to fetch")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report a lab test from its guest; in a guest, let pytest run it.

    The guests work from the first test of the session on, of whatever kind that is.
    """
    if current() is not None:
        return None
    stash = item.session.stash
    if _RUN not in stash and any(map(is_of_laboratory, item.session.items)):
        if any(one.get_closest_marker("pods") for one in item.session.items):
            containers.for_pods()
        stash[_RUN] = LabRun(item.session)
    if not is_of_laboratory(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_RUN].reports(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What pytest kept set up for this test is not needed here; nothing else tears it down.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the guests."""
    if _RUN in session.stash:
        session.stash[_RUN].close()
        session.config.stash[_COSTS] = session.stash[_RUN].lines()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what each guest cost."""
    if lines := config.stash.get(_COSTS, []):
        terminalreporter.section("processor time of the laboratory's guests")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def topology() -> Topology:
    """The topology of this guest."""
    here = current()
    assert here is not None
    return here


@pytest.fixture(scope="module")
def libvirtd() -> str:
    """The URI of a real libvirtd in this guest; a module before this one may have ended it."""
    return daemon.start()
