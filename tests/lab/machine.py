"""Boots a topology and runs one command in it.

The machine and its guest share a job directory. Files in it:
    directory, environment, command   where, with which variables and what to run (NUL separated)
    load, drivers                     modules to load; lines of address and driver to wait for
    modules, shown                    the kernel's modules; directories of the machine to show
    files/                            what is copied to the guest's root
    terminal                          rows and columns, where the command is interactive
    status                            the exit status of the command, written by the guest
    results/                          what the command leaves for the machine
    output.log, console.log           what the command printed; the guest's serial console
    qemu.log                          what QEMU itself printed
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from tests.costs import leave_out
from tests.lab import desktop, gpusim, initramfs, kernel, platforms
from tests.lab.errors import GuestDied, GuestPanic, GuestTimeout, LabError, last_lines
from tests.lab.gpusim import build
from tests.lab.platforms import PLATFORM_VARIABLE, Platform
from tests.lab.progress import processor_time
from tests.lab.topology import CURRENT_VARIABLE, EVERY_MOMENT_VARIABLE, JOB, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

CHECKOUT = Path(__file__).resolve().parents[2]
GUEST_RESULTS = Path("/run/lab/job/results")
RESULTS_VARIABLE = "VFIOMGR_LAB_RESULTS"
_MEMORY = 6144
_LEAST_MEMORY = 2048
_POLL = 0.1
_KERNEL_ARGUMENTS = (
    "panic=-1",
    "mitigations=off",
    "nokaslr",
    "random.trust_cpu=on",
    "init_on_alloc=0",
    "rcupdate.rcu_expedited=1",
    "audit=0",
    "selinux=0",
    "apparmor=0",
    "systemd.unified_cgroup_hierarchy=1",
)


@dataclass(frozen=True)
class Job:
    """A command for the guest, with files that it finds in its results directory."""

    command: Sequence[str]
    directory: Path = CHECKOUT
    platform: Platform = platforms.DEFAULT
    environment: Mapping[str, str] = field(default_factory=dict)
    interactive: bool = False
    results: Mapping[str, str] = field(default_factory=dict)


class Guest:
    """A booted guest and its one command. Leaving its context ends it.

    The job directory is removed then, but kept where `keep` was set.
    """

    def __init__(self, topology: Topology, job: Job) -> None:
        self.topology = topology
        self.directory = Path(tempfile.mkdtemp(prefix="vfiomgr-lab-"))
        self.results = self.directory / "results"
        self.console = self.directory / "console.log"
        self.output = self.directory / "output.log"
        self.keep = False
        self._computed = 0.0
        _write_job(self.directory, topology, job)
        command = _command_line(topology, self.directory, job)
        with (self.directory / "qemu.log").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=None if job.interactive else subprocess.DEVNULL,
                stdout=None if job.interactive else errors,
                stderr=errors,
            )

    def __enter__(self) -> Self:
        """Return the guest itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the guest; keep its logs where it failed."""
        self.kill()
        if not self.keep and not isinstance(error, LabError):
            shutil.rmtree(self.directory)

    @property
    def running(self) -> bool:
        """Whether QEMU still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._process.pid

    @property
    def processor_time(self) -> float:
        """The seconds that QEMU has computed."""
        self._computed = max(self._computed, processor_time(self.pid))
        return self._computed

    def kill(self) -> None:
        """End the guest at once."""
        leave_out(self.processor_time)
        self._computed = 0.0
        self._process.kill()
        self._process.wait()

    def wait(self, limit: float, follow: Callable[[], None] = lambda: None) -> int:
        """Return the exit status of the command; GuestError where there is none.

        Calls `follow` now and then, and once at the end.
        """
        deadline = time.monotonic() + limit
        while self.running and time.monotonic() < deadline:
            follow()
            time.sleep(_POLL)
        late = self.running
        self.kill()
        follow()
        if late:
            what = f"the command took longer than the {limit:.0f} s that it had"
            raise GuestTimeout(what, console=self.console)
        return self.status()

    def status(self) -> int:
        """Return the exit status that an ended guest left; GuestError where it left none."""
        status = self.directory / "status"
        if status.exists():
            return int(status.read_text())
        if "Kernel panic" in self.console_text():
            what = "the guest's kernel panicked"
            raise GuestPanic(what, console=self.console)
        errors = last_lines(self.directory / "qemu.log")
        what = f"QEMU ended ({self._process.returncode}) before the command did:\n{errors}"
        raise GuestDied(what, console=self.console)

    def console_text(self) -> str:
        """Return what the serial console showed so far."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""


def run(
    topology: Topology,
    job: Job,
    *,
    limit: float,
    results: Path | None = None,
    output: BinaryIO | None = None,
) -> int:
    """Run a job in a guest and return the exit status of its command.

    Its output goes to `output` (stdout) as it comes; files that it leaves in
    $VFIOMGR_LAB_RESULTS are copied to `results`.
    """
    sink = output or sys.stdout.buffer
    with Guest(topology, job) as guest, guest.output.open("rb") as source:
        status = guest.wait(limit, follow=lambda: _copy_new(source, sink))
        if results is not None:
            shutil.copytree(guest.results, results, dirs_exist_ok=True)
        return status


def shell(topology: Topology, platform: Platform) -> int:
    """Give the terminal to a root shell in a guest, and return its exit status."""
    variables = {"TERM": os.environ.get("TERM", "linux")}
    job = Job(["/bin/bash", "-i"], Path.cwd(), platform, variables, interactive=True)
    with _terminal_restored(), Guest(topology, job) as guest:
        return guest.wait(math.inf)


def _copy_new(source: BinaryIO, sink: BinaryIO) -> None:
    """Copy what a file grew by."""
    if content := source.read():
        sink.write(content)
        sink.flush()


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Restore the terminal that QEMU makes raw and does not give back if it is killed."""
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    try:
        yield
    finally:
        os.set_blocking(terminal, True)
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _write_job(directory: Path, topology: Topology, job: Job) -> None:
    """Write the files that the guest reads."""
    (directory / "results").mkdir()
    (directory / "output.log").touch()
    for name, content in job.results.items():
        (directory / "results" / name).write_text(content)
    (directory / "directory").write_text(f"{job.directory}\n")
    variables = _environment(topology, job.platform) | dict(job.environment)
    (directory / "environment").write_text(
        "".join(f"{name}={value}\0" for name, value in variables.items())
    )
    (directory / "command").write_text("".join(f"{part}\0" for part in job.command))
    (directory / "load").write_text("".join(f"{name}\n" for name in topology.modules))
    (directory / "drivers").write_text(
        "".join(f"{place} {driver}\n" for place, driver in topology.expected_drivers.items())
    )
    platforms.compile_checkout(job.platform)
    (directory / "modules").write_text(f"{job.platform.kernel().modules}\n")
    shown = _shown(job)
    (directory / "shown").write_text("".join(f"{path}\n" for path in shown))
    job.platform.write_files(directory / "files")
    if job.interactive:
        columns, rows = shutil.get_terminal_size()
        (directory / "terminal").write_text(f"{rows}\n{columns}\n")


def _environment(topology: Topology, platform: Platform) -> dict[str, str]:
    """Return the variables that every command has."""
    variables = {
        "HOME": str(Path.home()),
        "LANG": "C.UTF-8",
        "PATH": platform.path,
        CURRENT_VARIABLE: topology.name,
        PLATFORM_VARIABLE: platform.name,
        RESULTS_VARIABLE: str(GUEST_RESULTS),
    }
    if every_moment := os.environ.get(EVERY_MOMENT_VARIABLE):
        variables[EVERY_MOMENT_VARIABLE] = every_moment
    if topology.has_gpusim:
        variables[gpusim.MODULE_VARIABLE] = str(build.provide(platform.kernel()))
    if topology.has_desktop and platform.release is None:
        variables[desktop.PROGRAM_VARIABLE] = str(desktop.provide())
        if every_moment:
            variables[desktop.KWIN_VARIABLE] = str(desktop.provide_kwin())
    return variables


def _shown(job: Job) -> list[Path]:
    """Return the directories of the machine that a guest does not see in its root."""
    paths = {kernel.cache_root(), job.directory, CHECKOUT}
    if job.platform.release is None:  # an own /tmp hides what is below that of the machine
        paths |= {Path(sys.prefix), Path(sys.base_prefix)}
        paths = {path for path in paths if Path("/tmp") in path.parents}
    return sorted(paths)


def _command_line(topology: Topology, directory: Path, job: Job) -> list[str]:
    """Return the command that boots a guest and dies with this process."""
    current = job.platform.kernel()
    memory = _memory()
    architecture = job.platform.architecture
    arguments = [*architecture.kernel_arguments, *_KERNEL_ARGUMENTS]
    arguments += topology.kernel_arguments(architecture)
    # A port whose other end is closed, as a terminal's may be, blocks its writer for ever.
    port, sink = "virtserialport,name=lab", f"file,path={_escaped(directory / 'output.log')}"
    if job.interactive:
        port, sink = "virtconsole", "stdio,signal=off"
    return [
        *("setpriv", "--pdeathsig", "KILL", "--", *architecture.emulator),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *architecture.machine,
        *("-accel", "tcg,thread=multi,tb-size=1024"),
        *("-m", f"{memory}M", "-smp", str(topology.processors)),
        *("-kernel", str(current.image), "-initrd", str(initramfs.provide(current))),
        *("-append", " ".join(arguments)),
        *("-serial", f"file:{directory / 'console.log'}"),
        *(
            part.replace(JOB, str(directory))
            for part in topology.qemu_arguments(memory, architecture)
        ),
        *_share("root", job.platform.root, "readonly=on,multidevs=remap", slot=0x10),
        *_share("job", directory, "multidevs=remap", slot=0x11),
        *_share("machine", Path("/"), "readonly=on,multidevs=remap", slot=0x13),
        *("-device", "virtio-serial-pci,bus=pcie.0,addr=0x12"),
        *("-chardev", f"{sink},id=output"),
        *("-device", f"{port},chardev=output"),
    ]


def _share(tag: str, path: Path, options: str, *, slot: int) -> list[str]:
    """Return the arguments that give the guest a directory over 9p."""
    return [
        *("-fsdev", f"local,id={tag},path={_escaped(path)},security_model=none,{options}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0,addr={slot:#x}"),
    ]


def _escaped(path: Path) -> str:
    """Return a path as an option of QEMU takes it."""
    return str(path).replace(",", ",,")


def _memory() -> int:
    """Return the guest's memory in MiB: 6 GiB, or half of what the machine has free."""
    text = Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    available = int(fields["MemAvailable"].split()[0]) // 1024
    return max(_LEAST_MEMORY, min(_MEMORY, available // 2))
