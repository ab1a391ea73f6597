"""10,000 hosts of eight GPUs, each as a snapshot in a file: `vfiomgr fleet`."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from benchmarks.table import Row, mebibytes
from tests.fakes.servers import dgx
from tests.lab.command import VFIOMGR
from vfiomgr.snapshot.created import Created
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.scan import scan
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

HOSTS = 10_000
_LISTED, _PLACED = 10.0, 1.0
"""Seconds; the budgets of `list` and `place` with an index."""
_READ = 0.05
"""Seconds to read one snapshot, on all processors."""
_MEMORY = 1 << 30
"""Of one process."""
_KEPT, _FILE = 8192, 32768
"""Bytes per host."""
_MOST_USED = 9
_NAME = "NAME-OF-THE-HOST"


def make_fleet(directory: Path, count: int, place: str | None = None) -> int:
    """Write snapshots of DGX servers whose guests have different GPUs; the bytes of all files."""
    with tempfile.TemporaryDirectory(prefix="vfiomgr-bench-", dir=place) as root:
        kernel = dgx(Path(root))
        host = scan(
            kernel,
            kernel,
            with_users=True,
            with_readiness=True,
            with_links=True,
            with_resets=True,
            with_guests=True,
        )
    texts = []
    for used in range(_MOST_USED):
        known = _with_guests(host, used)
        texts.append(write_snapshot(known, None, Created("2026-11-29T08:00:00Z", _NAME, "1.0.0")))
    size = 0
    for number in range(count):
        text = texts[number % len(texts)].replace(_NAME, f"gpu{number}", 1)
        data = gzip.compress(text.encode(), 1)
        (directory / f"gpu{number}.json.gz").write_bytes(data)
        size += len(data)
    return size


def _with_guests(host: HostSnapshot, used: int) -> HostSnapshot:
    """The host with so many guests, each with a GPU."""
    gpus = [d for d in host.devices if d.class_code.startswith("0302")][:used]
    bound = {d.address: replace(d, driver="vfio-pci", nodes=()) for d in gpus}
    devices = tuple(bound.get(d.address, d) for d in host.devices)
    known = replace(host, devices=devices)
    nodes = [node for d in bound.values() for node in sorted(known.guest_nodes(d))[:1]]
    users = tuple(DeviceUser(n, 7, "qemu", None, (), f"guest{i}") for i, n in enumerate(nodes))
    return replace(known, users=replace(host.users, processes=users))


def measure(place: str | None, count: int = HOSTS) -> list[Row]:
    """The first run, which makes the index, and those after it."""
    with tempfile.TemporaryDirectory(prefix="vfiomgr-bench-", dir=place) as root:
        directory = Path(root, "hosts")
        directory.mkdir()
        per_host = make_fleet(directory, count, place) / count
        time.sleep(2.1)  # a file that just changed is read again
        environment = {**os.environ, "XDG_CACHE_HOME": f"{root}/cache"}
        wanted = ("--gpu", "2xA100", "--same-numa", "--vcpus", "32")
        first, _ = _run(environment, "list", str(directory))
        listed, memory = _run(environment, "list", str(directory))
        placed, _ = _run(environment, "place", str(directory), *wanted)
        one = next(directory.iterdir())
        os.utime(one)
        changed, _ = _run(environment, "list", str(directory))
        index = sum(file.stat().st_size for file in Path(root, "cache").rglob("*.sqlite"))
    what = f"fleet, {count} hosts with 8 GPUs"
    return [
        Row(f"{what}: first list, per host", first / count, "at most", _READ, 1.0),
        Row(f"{what}: list", listed, "at most", _LISTED, 1.0),
        Row(f"{what}: list after a change", changed, "at most", _LISTED, 1.0),
        Row(f"{what}: place 2xA100 --same-numa", placed, "at most", _PLACED, 1.0),
        Row(f"{what}: memory", memory, "at most", _MEMORY, 1.0, mebibytes),
        Row(f"{what}: index, per host", index / count, "at most", _KEPT, 1.0, _kibibytes),
        Row(f"{what}: snapshot, gzip", per_host, "at most", _FILE, 1.0, _kibibytes),
    ]


def _kibibytes(size: float) -> str:
    return f"{size / 1024:.1f} KiB"


def _run(environment: dict[str, str], *words: str) -> tuple[float, float]:
    """The seconds that a command takes, and the memory of the largest process so far."""
    start = time.perf_counter()
    subprocess.run(
        (VFIOMGR, "fleet", *words),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    spent = time.perf_counter() - start
    return spent, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
