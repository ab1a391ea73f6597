"""gpusim is built when its sources change, and only then; this needs neither kernel nor guest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab.errors import BuildError
from tests.lab.gpusim import build
from tests.lab.kernel import Kernel, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    directory = tmp_path / "cache/6.1.0-1-amd64/kernel-0"
    directory.mkdir(parents=True)
    return Kernel(directory, "6.1.0-1-amd64")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    for name in ("Kbuild", "main.c", "gpusim.h"):
        (directory / name).write_text(name)
    monkeypatch.setattr(build, "_SOURCES", directory)
    return directory


def compiler(built: list[str]) -> Callable[[Kernel, Path], None]:
    """What stands for make: the module is the source."""

    def compile_all(kernel: Kernel, source: Path) -> None:
        assert kernel.headers.name == "linux-headers-6.1.0-1-amd64"
        built.append((source / "main.c").read_text())
        (source / "gpusim.ko").write_text(built[-1])

    return compile_all


def test_a_source_that_changes_is_built_once(
    kernel: Kernel, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(build, "build_modules", compiler(built))
    first = build.provide(kernel)
    assert build.provide(kernel) == first
    (sources / "README.md").write_text("no source")
    assert build.provide(kernel) == first
    (sources / "main.c").write_text("another")
    second = build.provide(kernel)
    assert second != first
    assert built == [first.read_text(), second.read_text()] == ["main.c", "another"]


@pytest.mark.usefixtures("sources")
def test_a_build_that_fails_leaves_nothing_to_be_taken_for_a_module(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kernel: Kernel, source: Path) -> None:
        run(["sh", "-c", "echo main.c:1: no such thing; exit 2", kernel.release, str(source)])

    monkeypatch.setattr(build, "build_modules", fail)
    with pytest.raises(BuildError, match=r"main\.c:1: no such thing"):
        build.provide(kernel)
    assert [path.name for path in kernel.directory.parent.iterdir() if path.name != ".lock"] == [
        "kernel-0"
    ]
