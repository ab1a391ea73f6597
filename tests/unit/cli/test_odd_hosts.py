"""Commands on hosts with odd addresses, groups and attributes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.snapshot.test_odd_trees import (
    DOMAINS,
    WITHOUT,
    add_gpu,
    garbage,
    machine,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


def wide_domains(tmp_path: Path) -> FakeKernel:
    kernel = machine(tmp_path)
    for number, domain in enumerate(DOMAINS):
        add_gpu(kernel, f"{domain}:0{number}:00.0", group=number * 1000)
    return kernel


def many_functions(tmp_path: Path) -> FakeKernel:
    kernel = machine(tmp_path)
    for number in range(64):
        add_gpu(kernel, f"10000:01:{number >> 3:02x}.{number & 7}", group=number >> 3)
    return kernel


def twins(tmp_path: Path) -> FakeKernel:
    kernel = machine(tmp_path)
    for number, domain in enumerate(("0000", "10000")):
        add_gpu(kernel, f"{domain}:04:00.0", group=number)
    return kernel


def says_nonsense(tmp_path: Path) -> FakeKernel:
    kernel = twins(tmp_path)
    directory = Path(kernel.root, "sys/bus/pci/devices/0000:04:00.0")
    for attribute in WITHOUT:
        if (directory / attribute).exists() and attribute not in ("vendor", "device", "class"):
            garbage(directory / attribute)
    return kernel


def says_nothing(tmp_path: Path) -> FakeKernel:
    kernel = twins(tmp_path)
    directory = Path(kernel.root, "sys/bus/pci/devices/0000:04:00.0")
    for attribute in WITHOUT:
        if (directory / attribute).exists() and attribute != "modalias":
            unreadable(directory / attribute)
    for name in ("type", "reserved_regions"):
        unreadable(Path(kernel.root, "sys/kernel/iommu_groups/0", name))
    return kernel


HOSTS = (wide_domains, many_functions, twins, says_nonsense, says_nothing)


@pytest.mark.parametrize("make", HOSTS)
def test_every_command_answers_for_every_function(
    run: Run, tmp_path: Path, make: Callable[[Path], FakeKernel]
) -> None:
    root = make(tmp_path / "odd").root
    items = json.loads(run("--root", root, "list", "--all", "--format", "json").stdout)["items"]
    names = [item["address"] for item in items]
    assert [line.split()[0] for line in run("--root", root, "list", "--all").stdout.splitlines()][
        1:
    ] == names
    groups = run("--root", root, "groups").stdout
    for name in names[:8]:
        assert name in groups
        shown = run("--root", root, "show", name)
        assert (shown.status, shown.stdout.splitlines()[0][: len(name)]) == (0, name)
        planned = run("--root", root, "bind", name, "--allow", "boot-display", "--dry-run")
        assert planned.status == 0
        assert f"{name}: nvidia" in planned.stdout
        assert "-> vfio-pci (driver_override vfio-pci)" in planned.stdout


@pytest.mark.parametrize("make", HOSTS)
def test_a_snapshot_of_it_answers_as_it_does(
    run: Run, tmp_path: Path, make: Callable[[Path], FakeKernel]
) -> None:
    root = make(tmp_path / "odd").root
    file = tmp_path / "host.json"
    file.write_text(run("--root", root, "snapshot").stdout)
    first = json.loads(file.read_text())["devices"][0]["address"]
    for command in (
        ["list", "--all", "--format", "json"],
        ["groups", "--format", "json"],
        ["show", first],
        ["bind", first, "--allow", "boot-display", "--dry-run"],
    ):
        answer = run("--snapshot", str(file), *command)
        assert (answer.status, answer.stdout) == (0, run("--root", root, *command).stdout)


def test_a_short_address_that_fits_two_functions_is_told_with_both(
    run: Run, tmp_path: Path
) -> None:
    root = twins(tmp_path / "odd").root
    for command in (["show"], ["bind", "--dry-run"], ["unbind", "--dry-run"]):
        answer = run("--root", root, *command, "04:00.0")
        assert answer.status == 2
        assert "'04:00.0' is ambiguous: it matches 0000:04:00.0, 10000:04:00.0" in answer.stderr


def test_a_short_address_names_the_only_function_of_any_domain(run: Run, tmp_path: Path) -> None:
    root = wide_domains(tmp_path / "odd").root
    for number, domain in enumerate(DOMAINS):
        shown = run("--root", root, "show", f"{number}:0.0")
        assert shown.stdout.startswith(f"{domain}:0{number}:00.0 (")
    assert run("--root", root, "show", "9:0.0").status == 2


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", [f"{domain}:0{number}:00.0" for number, domain in enumerate(DOMAINS)]),
        ("1", ["10000:02:00.0", "123abc:03:00.0"]),
        ("fffff", ["fffffffe:05:00.0"]),
        ("04:", ["04:00.0"]),
        ("9", []),
    ],
)
def test_completion_knows_all_domains_and_no_nonsense(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, expected: list[str]
) -> None:
    root = wide_domains(tmp_path / "odd").root
    Path(root, "sys/bus/pci/devices/9999:zz:00.0").mkdir()
    monkeypatch.setenv("_VFIOMGR_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"vfiomgr --root {root} bind {typed}")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert run().stdout.split() == [f"plain,{name}" for name in expected]


def test_a_host_without_functions_says_so(run: Run, tmp_path: Path) -> None:
    root = machine(tmp_path / "odd").root
    answer = run("--root", root, "list", "--all")
    assert (answer.status, answer.stdout) == (0, "")
    assert "no PCI devices" in answer.stderr
    assert run("--root", root, "show", "0000:01:00.0").status == 2
