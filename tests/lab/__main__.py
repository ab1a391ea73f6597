"""Command line of the laboratory: `python -m tests.lab --help`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tests.lab import initramfs, machine, packages, platforms
from tests.lab.errors import LabError
from tests.lab.machine import Job
from tests.lab.platforms import PLATFORMS
from tests.lab.topology import DEFAULT, TOPOLOGIES

_DEMO_LIMIT = 600.0  # seconds
_FAULTS_LIMIT = 3600.0


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; 125 where the laboratory itself failed."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.action(options))
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 125


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("shell", help="a root shell in a guest")
    _add_guest(command)
    command.set_defaults(action=_shell)

    command = commands.add_parser("run", help="one command in a guest; exits with its status")
    _add_guest(command)
    command.add_argument("--timeout", type=float, default=600, metavar="SECONDS")
    command.add_argument(
        "--results", type=Path, metavar="DIR", help="where $VFIOMGR_LAB_RESULTS goes"
    )
    command.add_argument("argv", nargs="+", metavar="CMD")
    command.set_defaults(action=_run)

    command = commands.add_parser("demo", help="the main job, told in a guest")
    command.set_defaults(action=_demo)
    command = commands.add_parser(
        "deaths", help="vfiomgr is killed at every step of bind and unbind, and recovers"
    )
    command.set_defaults(action=_deaths)
    command = commands.add_parser("build", help="fill the cache: root, kernel, modules, initramfs")
    _add_platform(command)
    command.set_defaults(action=_build)
    command = commands.add_parser(
        "topologies", help="the machines, and the addresses of their devices"
    )
    command.set_defaults(action=_topologies)
    command = commands.add_parser("missing", help="packages to install; exits with 1 if any")
    command.set_defaults(action=_missing)
    return parser


def _add_guest(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a topology and a platform."""
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default=DEFAULT.name)
    _add_platform(parser)


def _add_platform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", choices=sorted(PLATFORMS), default=platforms.DEFAULT.name)


def _shell(options: argparse.Namespace) -> int:
    if not sys.stdin.isatty():
        reason = "a shell needs a terminal; `run` needs none"
        raise LabError(reason)
    return machine.shell(TOPOLOGIES[options.topology], PLATFORMS[options.platform])


def _run(options: argparse.Namespace) -> int:
    return machine.run(
        TOPOLOGIES[options.topology],
        Job(options.argv, platform=PLATFORMS[options.platform]),
        limit=options.timeout,
        results=options.results,
    )


def _demo(_: argparse.Namespace) -> int:
    print("The laboratory boots: a real kernel with an IOMMU, in QEMU.", flush=True)
    job = Job([sys.executable, "-m", "tests.lab.story"])
    return machine.run(DEFAULT, job, limit=_DEMO_LIMIT)


def _deaths(_: argparse.Namespace) -> int:
    program = Job([sys.executable, "-m", "tests.lab.deaths"])
    machines = (TOPOLOGIES["workstation"], TOPOLOGIES["sriov"])
    return max(machine.run(each, program, limit=_FAULTS_LIMIT) for each in machines)


def _build(options: argparse.Namespace) -> int:
    current = PLATFORMS[options.platform].kernel()
    print(current.directory)
    print(initramfs.provide(current))
    return 0


def _topologies(_: argparse.Namespace) -> int:
    for topology in TOPOLOGIES.values():
        print(f"{topology.name}: {topology.summary}")
        for name, address in topology.addresses.items():
            print(f"  {address}  {name:<11} {topology.drivers.get(name, '')}".rstrip())
    return 0


def _missing(_: argparse.Namespace) -> int:
    names = packages.missing()
    if names:
        print(shlex.join(names))
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
