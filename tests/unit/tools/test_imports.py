"""The script that counts knots and upward imports, on small packages, and on vfiomgr itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tools.imports.__main__ import largest_knot, main, read_imports, upward_imports

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = """\
[tool.vfiomgr]
largest_knot = 2
upward_imports = 1
layers = ["high | beside", "low"]
[tool.vfiomgr.upward]
"house.low.cellar -> house.high" = "a reason"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with three packages, and the limits for it."""
    root = tmp_path / "house"
    for name in ("", "high", "beside", "low"):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    (tmp_path / "imports.toml").write_text(SETTINGS)
    return root


def test_imports_for_types_in_functions_and_by_name_are_counted(package: Path) -> None:
    (package / "high/roof.py").touch()
    (package / "low/cellar.py").write_text(
        "import importlib\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from house.high.roof import Tile\n"
        "def carry() -> None:\n"
        "    import house.beside\n"
        "importlib.import_module('house.low')\n"
        "importlib.import_module('elsewhere')\n"
    )
    imports = read_imports(package)
    assert imports["house.low.cellar"] == {"house.high.roof", "house.beside", "house.low"}


def test_a_module_imported_from_its_package_imports_the_package_too(package: Path) -> None:
    (package / "low/cellar.py").touch()
    (package / "high/roof.py").write_text("from house.low import cellar\n")
    assert read_imports(package)["house.high.roof"] == {"house.low", "house.low.cellar"}


def test_a_name_of_the_root_package_is_imported_from_its_module(package: Path) -> None:
    (package / "high/roof.py").write_text("class Tile: ...\n")
    (package / "__init__.py").write_text("from house.high.roof import Tile\n__version__ = '1'\n")
    (package / "low/cellar.py").write_text("from house import Tile, __version__\n")
    (package / "low/wall.py").write_text("import house\nprint(house.Tile, house.__file__)\n")
    (package / "low/floor.py").write_text("from house import low\n")
    imports = read_imports(package)
    assert imports["house.low.cellar"] == {"house.high.roof"}
    assert imports["house.low.wall"] == {"house.high.roof"}
    assert imports["house.low.floor"] == {"house.low"}


def test_a_knot_is_what_imports_each_other_and_nothing_beside_it() -> None:
    graph = {
        "a": {"b"},
        "b": {"c", "below"},
        "c": {"a"},
        "below": {"deeper"},
        "deeper": {"below"},
        "above": {"a", "below"},
    }
    assert largest_knot({name: frozenset(each) for name, each in graph.items()}) == ("a", "b", "c")


def test_without_circles_there_is_no_knot() -> None:
    assert largest_knot({"a": frozenset({"b"}), "b": frozenset()}) == ()


def test_upward_are_imports_of_a_higher_and_of_the_same_layer() -> None:
    graph = {
        "house.low": frozenset({"house.high.roof", "house.low.cellar"}),
        "house.low.cellar": frozenset(),
        "house.high.roof": frozenset({"house.low", "house.beside", "house"}),
        "house.beside": frozenset(),
        "house": frozenset({"house.high.roof"}),
    }
    assert upward_imports(graph, {"low": 0, "high": 1, "beside": 1}) == [
        ("house.high.roof", "house"),
        ("house.high.roof", "house.beside"),
        ("house.low", "house.high.roof"),
    ]


@pytest.mark.parametrize(
    ("modules", "status"),
    [
        ({"low/cellar": "import house.high"}, 0),
        ({"low/cellar": "import house.high", "low/wall": "import house.high"}, 1),
        ({}, 1),
        ({"low/wall": "import house.high"}, 1),
        (
            {
                "low/cellar": "import house.high",
                "low/a": "import house.low.b",
                "low/b": "import house.low.a",
            },
            0,
        ),
        (
            {
                "low/cellar": "import house.high",
                "low/a": "import house.low.b",
                "low/b": "import house.low.c",
                "low/c": "import house.low.a",
            },
            1,
        ),
    ],
)
def test_the_status_is_1_above_a_limit_or_if_an_upward_import_has_no_reason(
    package: Path, modules: dict[str, str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in modules.items():
        (package / f"{name}.py").write_text(f"{text}\n")
    assert main(package, package.parent / "imports.toml") == status
    printed = capsys.readouterr().out
    assert "largest knot: " in printed
    assert "upward imports: " in printed


def test_a_package_without_a_layer_is_refused(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "low/cellar.py").write_text("import house.high\n")
    (package / "new.py").touch()
    assert main(package, package.parent / "imports.toml") == 1
    assert capsys.readouterr().out == "not in layers, or not in house: new\n"


def test_vfiomgr_keeps_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
