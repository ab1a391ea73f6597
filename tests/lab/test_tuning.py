"""The host while a guest runs, for real: before its start, meanwhile, and after its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import cores, desktop, hooked, vectors
from tests.lab.progress import Patience
from tests.lab.systemd import systemctl
from vfiomgr.libvirt.model import HookSettings
from vfiomgr.tuning.model import TUNED
from vfiomgr.tuning.steps import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("cores"),
    pytest.mark.platforms("debian12"),
    pytest.mark.thorough,
]

_POOL = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB")
_INHIBITOR = f"vfiomgr-inhibit-{hooked.UUID}.service"
_WATCH = f"vfiomgr-interrupts-{hooked.UUID}.service"
_LOOKS = 30.0
"""Seconds of standing still, in which the service has looked several times."""
_PARTS = """\
<memoryBacking><hugepages/></memoryBacking>
  <vcpu>2</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='2'/><vcpupin vcpu='1' cpuset='3'/></cputune>
"""
_MEMORY = ("-object", "memory-backend-memfd,id=memory,size=64M,hugetlb=on,prealloc=on")
_GUEST = ("systemd-run", "--quiet", "--scope", "--slice=machine.slice")


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, int]]:
    """A program in each slice, by the slice."""
    cores.start_all()
    desktop.start_logind()
    groups = ("system.slice", "user.slice")
    yield {group: cores.start_program(f"of-{group.partition('.')[0]}", group) for group in groups}
    systemctl("stop", "of-system", "of-user")


def pages() -> tuple[int, int]:
    """How many huge pages there are, and how many of them are free."""
    total, free = (int((_POOL / name).read_text()) for name in ("nr_hugepages", "free_hugepages"))
    return total, free


def of_host(programs: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """For each unit of the host AllowedCPUs=, and the CPUs of its group and of a process in it."""
    pids = {**programs, "init.scope": 1}
    return {u: (cores.allowed(u), cores.effective(u), cores.of_process(pids[u])) for u in UNITS}


def test_cpus_and_huge_pages_are_the_guests_while_it_runs(
    programs: dict[str, int], topology: Topology
) -> None:
    address = topology.addresses["gpu"]
    settings = HookSettings(isolate_cpus=True, hugepages=True)
    xml = hooked.domain(address, settings, _PARTS)
    untouched = dict.fromkeys(UNITS, ("", "0-3", "0-3"))
    assert of_host(programs) == untouched
    assert pages() == (0, 0)

    hooked.run_hook(xml, "prepare")
    assert pages() == (32, 32)
    with hooked.guest(address, *_MEMORY, "-machine", "memory-backend=memory", before=_GUEST) as pid:
        meanwhile = of_host(programs)
        print(f"while the guest runs: {meanwhile}, huge pages {pages()}")
        assert meanwhile == dict.fromkeys(UNITS, ("0-1", "0-1", "0-1"))
        assert cores.of_process(pid) == "0-3"
        assert pages() == (32, 0)
        assert systemctl("is-active", _INHIBITOR) == "active"

    hooked.run_hook(xml, "release")
    after = of_host(programs)
    print(f"after it: {after}, huge pages {pages()}")
    assert after == untouched
    assert pages() == (0, 0)
    assert systemctl("is-active", _INHIBITOR, must_work=False) == "inactive"
    assert not Path(TUNED).exists()


def await_cpus(interrupt: Path, expected: str) -> None:
    """Wait until an interrupt is allowed on exactly these CPUs."""
    patience = Patience(_LOOKS, int(systemctl("show", "--value", "--property=MainPID", _WATCH)))
    while (found := (interrupt / "smp_affinity_list").read_text().strip()) != expected:
        assert not patience.is_over, found
        time.sleep(0.1)


@pytest.mark.usefixtures("programs")
def test_interrupts_are_on_the_guests_cpus_whenever_its_driver_enables_them(
    topology: Topology,
) -> None:
    address = topology.addresses["gpu_audio"]
    xml = hooked.domain(address, HookSettings(interrupts=True), _PARTS)
    hooked.run_hook(xml, "prepare")
    with vectors.opened(address) as function:
        for start in ("first", "after a reboot of the guest"):
            with function.enabled() as interrupt:
                (handler,) = (path.name for path in interrupt.iterdir() if path.is_dir())
                assert handler == f"vfio-msi[0]({address})"
                await_cpus(interrupt, "2-3")
                arrives = (interrupt / "effective_affinity_list").read_text().strip()
                print(f"{start}: {handler} on CPUs 2-3, arrives on CPU {arrives}")
                assert arrives in {"2", "3"}
                (interrupt / "smp_affinity_list").write_text("0")
                await_cpus(interrupt, "2-3")
            assert not interrupt.exists()
    print(systemctl("status", "--no-pager", _WATCH))
    hooked.run_hook(xml, "release")
    assert systemctl("is-active", _WATCH, must_work=False) == "inactive"
    assert not Path(TUNED).exists()
