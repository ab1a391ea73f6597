from __future__ import annotations

from tests.lab.outcomes import table


def test_a_line_for_each_module_and_a_column_for_each_platform() -> None:
    outcomes = [
        ("tests/lab/test_two.py::test_b[debian12]", "passed"),
        ("tests/lab/test_one.py::test_a[debian12-mtty]", "passed"),
        ("tests/lab/test_one.py::test_a[mbochs-sid]", "failed"),
        ("tests/lab/test_one.py::test_c[sid]", "passed"),
        ("tests/unit/test_other.py::test_d[one]", "passed"),
    ]
    costs = {"tests/lab/test_one.py::test_a[mbochs-sid]": 2.6, "tests/unit/test_other.py::t": 9.0}
    assert table(outcomes, costs) == [
        "          debian12                  sid",
        "test_one  1 passed, 0 s             1 passed, 1 failed, 3 s",
        "test_two  1 passed, 0 s             -",
    ]


def test_one_platform_is_not_compared() -> None:
    assert table([("tests/lab/test_one.py::test_a[sid]", "passed")], {}) == []
