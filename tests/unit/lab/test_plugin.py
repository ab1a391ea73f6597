"""Which machine of the laboratory a test runs in."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from tests.lab.errors import LabError
from tests.lab.plugin import is_for_platform, topology_of

SRIOV = pytest.mark.topology("sriov")
TOGETHER = pytest.mark.platforms("debian13", topology="all")
APART = pytest.mark.platforms("debian13-iommufd", only=True)


def item(platform: str, *marks: pytest.MarkDecorator) -> pytest.Function:
    """A test with these marks, the closest first, on a platform."""
    test = create_autospec(pytest.Function, instance=True)
    test.nodeid = f"test_something[{platform}]"
    test.callspec = SimpleNamespace(params={"platform": platform})
    found = {one.name: one.mark for one in reversed(marks)}
    test.get_closest_marker = found.get
    assert isinstance(test, pytest.Function)
    return test


@pytest.mark.parametrize(
    ("platform", "marks", "expected"),
    [
        ("debian12", (SRIOV, TOGETHER), "sriov"),
        ("debian13", (SRIOV, TOGETHER), "all"),
        ("sid", (SRIOV, TOGETHER), "sriov"),
        ("debian13", (SRIOV,), "sriov"),
        ("debian13", (SRIOV, pytest.mark.platforms("debian12"), TOGETHER), "sriov"),
        ("debian13", (SRIOV, pytest.mark.platforms("debian13")), "sriov"),
    ],
)
def test_a_platform_may_have_a_topology_of_its_own(
    platform: str, marks: tuple[pytest.MarkDecorator, ...], expected: str
) -> None:
    assert topology_of(item(platform, *marks)).name == expected


@pytest.mark.parametrize(
    ("platform", "marks", "expected"),
    [
        ("debian12", (SRIOV,), True),
        ("debian12", (SRIOV, TOGETHER), True),
        ("debian12", (SRIOV, APART), False),
        ("sid", (SRIOV, APART), False),
        ("debian13-iommufd", (SRIOV, APART), True),
        ("debian12", (SRIOV, pytest.mark.platforms("sid"), APART), True),
    ],
)
def test_a_test_may_be_for_some_platforms_only(
    platform: str, marks: tuple[pytest.MarkDecorator, ...], *, expected: bool
) -> None:
    assert is_for_platform(item(platform, *marks)) == expected


def test_a_topology_that_there_is_not_is_told() -> None:
    unknown = pytest.mark.platforms("debian13", topology="nowhere")
    assert topology_of(item("debian12", SRIOV, unknown)).name == "sriov"
    with pytest.raises(LabError, match=r"needs pytest\.mark\.topology"):
        topology_of(item("debian13", SRIOV, unknown))
