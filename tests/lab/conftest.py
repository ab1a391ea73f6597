"""Fixtures of lab tests in a guest; on the machine, the hooks that send them to one."""

from __future__ import annotations

import os

import pytest

from tests.costs import by_test
from tests.lab import containers, platforms
from tests.lab import libvirtd as daemon
from tests.lab.outcomes import OUTCOMES
from tests.lab.outcomes import table as outcomes_table
from tests.lab.platforms import PLATFORMS, Platform
from tests.lab.plugin import LabRun, is_for_platform, is_of_laboratory
from tests.lab.topology import EVERY_MOMENT_VARIABLE, Topology, current

_RUN = pytest.StashKey[LabRun]()
_COSTS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    line = "topology(name, last): runs in a guest of that topology (see tests/lab/topology.py)"
    config.addinivalue_line("markers", line)
    line = (
        "platforms(name, ..., topology, only): runs on these, too, there in this topology; with "
        "only, on no others, and where --platform names one (see tests/lab/platforms.py)"
    )
    config.addinivalue_line("markers", line)
    config.addinivalue_line("markers", "pods: needs a containerd that the machine has to fetch")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test of the laboratory once for each platform; in a guest, for its own."""
    if metafunc.definition.get_closest_marker("topology") is None:
        return
    if current() is not None:
        names = [platforms.current().name]
    elif not (names := metafunc.config.getoption("platform")):
        further = metafunc.definition.get_closest_marker("platforms")
        more = further.args if further and not further.kwargs.get("only") else ()
        names = list(dict.fromkeys((platforms.DEFAULT.name, *more)))
    metafunc.parametrize("platform", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose marker excludes their platform, and those that take long."""
    excluded = [item for item in items if is_of_laboratory(item) and not is_for_platform(item)]
    asked = config.getoption("platform") or os.environ.get(EVERY_MOMENT_VARIABLE)
    if not asked and current() is None:  # a guest has the tests that the machine chose
        excluded += [item for item in items if item.get_closest_marker("thorough")]
    if excluded:
        items[:] = [item for item in items if item not in excluded]
        config.hook.pytest_deselected(items=excluded)


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
    """Say what each guest cost, and what became of each module on each platform."""
    stats = terminalreporter.stats
    reports = [one for some in stats.values() for one in some if isinstance(one, pytest.TestReport)]
    outcomes = [(one.nodeid, name) for name in OUTCOMES for one in stats.get(name, [])]
    if lines := outcomes_table(outcomes, by_test(reports)):
        terminalreporter.section("modules of the laboratory by platform")
        for line in lines:
            terminalreporter.write_line(line)
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


@pytest.fixture(scope="session", autouse=True)
def platform(request: pytest.FixtureRequest) -> Platform:
    """The platform of this guest."""
    return PLATFORMS[getattr(request, "param", platforms.DEFAULT.name)]


@pytest.fixture(scope="module")
def libvirtd() -> str:
    """The URI of a real libvirtd in this guest; a module before this one may have ended it."""
    return daemon.start()
