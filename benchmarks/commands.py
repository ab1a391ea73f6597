"""Whole commands on this machine: beside other programs, and on made hosts of many sizes."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.domains import COUNT, make_node
from benchmarks.measure import medians, seconds
from benchmarks.table import Row
from benchmarks.trees import BLOCK, make_tree
from tests.fakes.vgpu_trees import make_vgpu_tree
from tests.lab.command import VFIOMGR

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIZES = (64, 1024, 8192)
_LARGE_TOPOLOGY = 2048
_VGPU_FAMILIES: tuple[Literal["mdev-sriov", "vendor"], ...] = ("mdev-sriov", "vendor")
_HANDED_OVER = tuple(f"0000:02:01.{n}" for n in range(8)) + tuple(
    f"0000:02:02.{n}" for n in range(8)
)
"""Virtual functions of a made tree, which are told to be ready for guests."""
_LAYOUT_GPUS = (8, 32, 64)
_CDI_DEVICES = 5000
_VERSION, _DRY_RUN, _LIST = 2.0, 2.0, 3.0
"""How many times longer than `import click`, and than lspci on the same host."""
_SCALING = 1.3
"""How many times dearer a function of a large host may be."""
_HOSTDEV = 1.5
_TYPES, _PREFLIGHT, _PLAN, _CDI, _TOPOLOGY = 0.5, 0.4, 0.6, 0.5, 0.5
"""Seconds."""
_LAYOUT = """\
version: vfiomgr/v1
layouts:
  large:
    devices:
      - select: {id: "10de:2235"}
        state: vgpu
        vgpus: [{type: A40-4Q, per_gpu: 4}]
"""
"""What is asked of all GPUs of the tree, each of which is an A40."""


def measure(rounds: int, place: str | None) -> list[Row]:
    """Start-up and made hosts; `place` is the directory in which these lie meanwhile."""
    with tempfile.TemporaryDirectory(prefix="vfiomgr-bench-", dir=place) as directory:
        commands = _commands(directory)
        times = medians({name: partial(seconds, each) for name, each in commands.items()}, rounds)
    return list(_rows(times))


def _commands(directory: str) -> dict[str, tuple[str, ...]]:
    """Make the hosts; the commands by the names that the rows have for them."""
    for size in (*_SIZES, _LARGE_TOPOLOGY):
        make_tree(f"{directory}/{size}", size)
    make_tree(f"{directory}/bound", BLOCK, "vfio-pci")
    for family in _VGPU_FAMILIES:
        make_vgpu_tree(f"{directory}/{family}", gpus=8, vfs=32, types=20, family=family)
    for gpus in _LAYOUT_GPUS:
        make_vgpu_tree(f"{directory}/{gpus} GPUs", gpus=gpus, vfs=32, types=20)
    layout = Path(directory, "layout.yaml")
    layout.write_text(_LAYOUT)
    specification = _specification(Path(directory))
    node = make_node(f"{directory}/node.xml", _SIZES[1] // BLOCK)

    def on(host: object, *arguments: object) -> tuple[str, ...]:
        return (VFIOMGR, "--root", f"{directory}/{host}", *map(str, arguments))

    return {
        "click": (sys.executable, "-c", "import click"),
        "version": (VFIOMGR, "--version"),
        "dry run": on(BLOCK, "bind", "--dry-run", "0000:01:00.0"),
        "list bound": on("bound", "list", "--all"),
        "hostdev": on("bound", "libvirt", "hostdev", *_HANDED_OVER),
        **{f"lspci {size}": _lspci(f"{directory}/{size}") for size in _SIZES},
        **{f"list {size}": on(size, "list", "--all") for size in _SIZES},
        **{f"groups {size}": on(size, "groups") for size in _SIZES},
        **{f"vgpus {family}": on(family, "vgpu", "list", "--types") for family in _VGPU_FAMILIES},
        **{f"plan {gpus}": on(f"{gpus} GPUs", "plan", layout) for gpus in _LAYOUT_GPUS},
        "preflight": on(_SIZES[1], "check", "domain", "--all", "--connect", node),
        "cdi": on("bound", "check", "cdi", specification),
        "topology": on(_LARGE_TOPOLOGY, "topology"),
    }


def _lspci(root: str) -> tuple[str, ...]:
    return ("lspci", "-D", "-nn", "-k", "-O", f"sysfs.path={root}/sys/bus/pci")


def _specification(directory: Path) -> Path:
    """A CDI specification of many devices, none of which has a node in /dev/vfio."""
    devices = [
        {"name": f"d{number}", "containerEdits": {"env": [f"DEVICE={number}"]}}
        for number in range(_CDI_DEVICES)
    ]
    path = directory / "vfiomgr-many.json"
    path.write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "vfiomgr.io/many", "devices": devices})
    )
    return path


def _rows(times: dict[str, float]) -> Iterator[Row]:
    def beside(what: str, ours: str, other: str, theirs: str, budget: float) -> Row:
        return Row(what, times[ours], other, times[theirs], budget)

    def within(what: str, ours: str, budget: float) -> Row:
        return Row(what, times[ours], "at most", budget, 1.0)

    yield beside("vfiomgr --version", "version", "import click", "click", _VERSION)
    dry_run = f"bind --dry-run, {BLOCK} functions"
    yield beside(dry_run, "dry run", "import click", "click", _DRY_RUN)
    for size in _SIZES:
        what = f"list --all, {size} functions"
        budget = _LIST if size > BLOCK else None
        yield Row(what, times[f"list {size}"], "lspci", times[f"lspci {size}"], budget)
    for name, what in (("list", "list --all"), ("groups", "groups")):
        yield from _scaling(what, name, times)
    for family in _VGPU_FAMILIES:
        what = f"vgpu list --types, 8 GPUs x 32 VFs x 20 types, {family}"
        yield within(what, f"vgpus {family}", _TYPES)
    yield from _plans(times)
    what = f"libvirt hostdev, {len(_HANDED_OVER)} of {BLOCK} functions"
    yield beside(what, "hostdev", "list --all", "list bound", _HOSTDEV)
    yield within(f"check domain, {COUNT} domains, {_SIZES[1]} functions", "preflight", _PREFLIGHT)
    yield within(f"check cdi, {_CDI_DEVICES} devices", "cdi", _CDI)
    yield within(f"topology, {_LARGE_TOPOLOGY} functions", "topology", _TOPOLOGY)


def _plans(times: dict[str, float]) -> list[Row]:
    """A layout against hosts of several sizes: at most so long, and no dearer with the size."""
    small, middle, large = _LAYOUT_GPUS
    each = [
        (times[f"plan {b}"] - times[f"plan {a}"]) / (b - a)
        for a, b in ((small, middle), (middle, large))
    ]
    what = f"plan, {large} GPUs x 32 VFs, 4 vGPUs on each"
    return [
        Row(what, times[f"plan {large}"], "at most", _PLAN, 1.0),
        Row(f"plan, each GPU more to {large}", each[1], f"each more to {middle}", each[0], 1.3),
    ]


def _scaling(what: str, name: str, times: dict[str, float]) -> list[Row]:
    """The cost of each function: with start-up in it, and of each more, which has none of it."""
    each = {size: times[f"{name} {size}"] / size for size in _SIZES}
    small, middle, large = _SIZES
    more = {
        (a, b): (times[f"{name} {b}"] - times[f"{name} {a}"]) / (b - a)
        for a, b in ((small, middle), (middle, large))
    }
    return [
        Row(f"{what}, each of {large}", each[large], f"each of {small}", each[small], _SCALING),
        Row(
            f"{what}, each more to {large}",
            more[middle, large],
            f"each more to {middle}",
            more[small, middle],
            _SCALING,
        ),
    ]
