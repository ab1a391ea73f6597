"""Measure, and print one table: `make bench`, or python -m benchmarks --help."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import agent, simulation
from benchmarks.domains import COUNT, make_node
from benchmarks.guest import FUNCTIONS, RESULT
from benchmarks.measure import medians, seconds
from benchmarks.table import Row, render
from benchmarks.trees import BLOCK, make_tree
from tests.fakes.vgpu_trees import make_vgpu_tree
from tests.lab import machine
from tests.lab.command import VFIOMGR
from tests.lab.errors import LabError
from tests.lab.topology import SRIOV

_SIZES = (64, 1024, 16384)
_VGPU_FAMILIES: tuple[Literal["mdev-sriov", "vendor"], ...] = ("mdev-sriov", "vendor")
_VGPU_BUDGET = 0.5
"""Seconds for the types of 8 GPUs with 32 virtual functions each and 20 types."""
_HANDED_OVER = tuple(f"0000:02:01.{n}" for n in range(8)) + tuple(
    f"0000:02:02.{n}" for n in range(8)
)
"""Virtual functions of a made tree, which are told to be ready for guests."""
_PREFLIGHT_BUDGET = 2.0
"""Seconds for all domains of a libvirt on a host of as many functions as the middle tree."""
_LAYOUT_GPUS = (8, 32, 64)
_LAYOUT_BUDGET = 1.5
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
_LIMIT = 3600.0
"""Seconds for all that is measured in the laboratory."""


def main() -> int:
    """Measure, print, and return 1 where a budget is exceeded."""
    options = _parser().parse_args()
    rows = [*_native(options.rounds, options.trees)]
    _say("the agent of a Kubernetes node")
    rows += agent.measure(options.trees)
    _say("simulations")
    rows += simulation.measure(options.trees)
    if not options.no_lab:
        rows += _laboratory(options.rounds, options.bind_rounds)
    print(render(rows))
    exceeded = [row for row in rows if not row.is_kept]
    if exceeded:
        print(f"{len(exceeded)} of {sum(row.budget is not None for row in rows)} over budget")
    return 1 if exceeded else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="of what only reads (11)")
    parser.add_argument("--bind-rounds", type=int, default=5, help="of binding functions (5)")
    parser.add_argument("--no-lab", action="store_true", help="leave the laboratory out")
    parser.add_argument(
        "--trees",
        metavar="DIR",
        default="/dev/shm" if os.path.isdir("/dev/shm") else None,
        help="where made trees lie meanwhile (/dev/shm; they take 0.6 GB there)",
    )
    return parser


def _native(rounds: int, place: str | None) -> list[Row]:
    """Start-up and made trees, on this machine."""
    _say("on this machine")
    with tempfile.TemporaryDirectory(prefix="vfiomgr-bench-", dir=place) as directory:
        for size in _SIZES:
            make_tree(f"{directory}/{size}", size)
        make_tree(f"{directory}/bound", BLOCK, "vfio-pci")
        for family in _VGPU_FAMILIES:
            make_vgpu_tree(f"{directory}/{family}", gpus=8, vfs=32, types=20, family=family)
        layout = f"{directory}/layout.yaml"
        with open(layout, "w", encoding="utf-8") as file:
            file.write(_LAYOUT)
        for gpus in _LAYOUT_GPUS:
            make_vgpu_tree(f"{directory}/{gpus} GPUs", gpus=gpus, vfs=32, types=20)
        middle = _SIZES[1]
        node = make_node(f"{directory}/node.xml", middle // BLOCK)
        commands: dict[str, tuple[str, ...]] = {
            "click": (sys.executable, "-c", "import click"),
            "version": (VFIOMGR, "--version"),
            **{
                f"{name} {size}": (VFIOMGR, "--root", f"{directory}/{size}", *arguments)
                for name, arguments in (
                    ("list", ("list", "--all")),
                    ("groups", ("groups")),
                )
                for size in _SIZES
            },
            **{
                f"vgpus {family}": (
                    VFIOMGR,
                    "--root",
                    f"{directory}/{family}",
                    "vgpu",
                    "list",
                    "--types",
                )
                for family in _VGPU_FAMILIES
            },
            "list bound": (VFIOMGR, "--root", f"{directory}/bound", "list", "--all"),
            "hostdev": (
                VFIOMGR,
                "--root",
                f"{directory}/bound",
                "libvirt",
                "hostdev",
                *_HANDED_OVER,
            ),
            **{
                f"plan {gpus}": (VFIOMGR, "--root", f"{directory}/{gpus} GPUs", "plan", layout)
                for gpus in _LAYOUT_GPUS
            },
            "preflight": (
                *(VFIOMGR, "--root", f"{directory}/{middle}", "libvirt", "preflight"),
                *("--all", "--connect", node),
            ),
        }
        runs = {name: partial(seconds, command) for name, command in commands.items()}
        times = medians(runs, rounds)
    start = Row("vfiomgr --version", times["version"], "import click", times["click"], 2.0)
    types = [
        Row(
            f"vgpu list --types, 8 GPUs x 32 VFs x 20 types, {family}",
            times[f"vgpus {family}"],
            "at most",
            _VGPU_BUDGET,
            1.0,
        )
        for family in _VGPU_FAMILIES
    ]
    lists = _scaling("list --all", "list", times)
    what = f"libvirt hostdev, {len(_HANDED_OVER)} of {BLOCK} functions"
    hostdev = Row(what, times["hostdev"], "list --all", times["list bound"], 1.5)
    preflight = Row(
        f"libvirt preflight of {COUNT} domains, {middle} functions",
        times["preflight"],
        "at most",
        _PREFLIGHT_BUDGET,
        1.0,
    )
    groups = _scaling("groups", "groups", times)
    return [start, *lists, *groups, *types, *_plans(times), hostdev, preflight]


def _plans(times: dict[str, float]) -> list[Row]:
    """A layout against hosts of several sizes: at most so long, and no dearer with the size."""
    small, middle, large = _LAYOUT_GPUS
    each = [
        (times[f"plan {b}"] - times[f"plan {a}"]) / (b - a)
        for a, b in ((small, middle), (middle, large))
    ]
    what = f"plan, {large} GPUs x 32 VFs, 4 vGPUs on each"
    return [
        Row(what, times[f"plan {large}"], "at most", _LAYOUT_BUDGET, 1.0),
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
        Row(f"{what}, each of {large}", each[large], f"each of {small}", each[small], 1.3),
        Row(
            f"{what}, each more to {large}",
            more[middle, large],
            f"each more to {middle}",
            more[small, middle],
            1.3,
        ),
    ]


def _laboratory(rounds: int, bind_rounds: int) -> list[Row]:
    """What a real kernel answers, in a guest."""
    _say("in the laboratory, which takes its time")
    command = [sys.executable, "-m", "benchmarks.guest"]
    command += ["--list-rounds", str(rounds), "--bind-rounds", str(bind_rounds)]
    with tempfile.TemporaryDirectory() as directory:
        status = machine.run(
            SRIOV, command, limit=_LIMIT, results=Path(directory), output=sys.stderr.buffer
        )
        if status:
            message = f"the guest's part ended with {status}"
            raise LabError(message)
        return _rows(json.loads(Path(directory, RESULT).read_text()))


def _rows(found: dict[str, Any]) -> list[Row]:
    listing, binding = found["listing"], found["binding"]
    functions = found["functions"]
    start = Row(
        "lab: vfiomgr --version", listing["--version"], "import click", listing["import click"], 2.0
    )
    lists = [
        Row(f"lab: {what}, {functions} functions", listing[what], other, listing[other], budget)
        for what, other, budget in (
            ("list --all", "lspci -D -nn -k", None),
            ("list --all", "driverctl list-devices", 1.0),
            ("list --all", "dpdk-devbind.py -s", 0.35),
            ("groups", "lspci -D -nn -k", None),
            ("groups", "driverctl list-devices", None),
            ("groups", "dpdk-devbind.py -s", None),
        )
    ]
    binds = [
        Row(f"lab: bind of {FUNCTIONS} VFs", binding["vfiomgr"], other, binding[other], budget)
        for other, budget in (
            ("shell loop", 1.3),
            ("shell loop, settled", None),
            ("driverctl", 0.2),
            ("dpdk-devbind", None),
        )
    ]
    return [start, *lists, *binds]


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
