"""Guests that the machine reaches over SSH, each on a port of its own.

sshd and python3-apt, which Ansible needs on Debian, are fetched on the machine and not installed
there, where the package would start a service.
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.debian import unpacked
from tests.lab.machine import Guest, Job
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

_RELEASE = "bookworm"
_SCRIPT = Path(__file__).parent / "guest/sshd"
_STILL = 120.0
"""Seconds in which a guest that boots has to compute something."""
_BOOT = 900.0
"""Seconds that a guest may compute until sshd answers."""
_POLL = 0.5
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """A guest, as SSH reaches it."""

    name: str
    guest: Guest
    port: int
    keys: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The options of ssh."""
        known = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        return tuple(word for option in known for word in ("-o", option))

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs another one on the host."""
        key = str(self.keys / "user")
        return ("ssh", *self.options, "-i", key, "-p", str(self.port), f"root@{_LOOPBACK}")

    @property
    def variables(self) -> dict[str, object]:
        """How an inventory of Ansible names it."""
        return {
            "ansible_host": _LOOPBACK,
            "ansible_port": self.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.keys / "user"),
            "ansible_ssh_common_args": " ".join(self.options),
            "ansible_python_interpreter": "/usr/bin/python3",
        }

    def run(self, command: str, *, must_work: bool = True) -> str:
        """Run a shell command on the host, and return what it prints."""
        ran = subprocess.run((*self.command, command), check=False, capture_output=True, text=True)
        assert not must_work or ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a shell command on the host."""
        return subprocess.Popen((*self.command, command), stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Wait until a login over SSH succeeds."""
        patience = Patience(_STILL, self.guest.pid, most=_BOOT)
        while not (self.guest.results / "ready").exists() or self._answer() != 0:
            assert self.guest.running, self.guest.output.read_text()
            assert not patience.is_over, patience.why + self.guest.console_text()[-2000:]
            time.sleep(_POLL)

    def _answer(self) -> int:
        return subprocess.run((*self.command, "true"), check=False, capture_output=True).returncode


@contextmanager
def hosts(topology: Topology, place: Path, *names: str) -> Iterator[list[Host]]:
    """Boot a guest for each name; `place` is a directory for keys."""
    for key in ("host", "user"):
        made = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / key))
        subprocess.run(made, check=True)
    with ExitStack() as stack:
        found = [Host(name, *_boot(stack, topology, place), place) for name in names]
        for host in found:
            host.wait()
        yield found


def _boot(stack: ExitStack, topology: Topology, keys: Path) -> tuple[Guest, int]:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        port = free.getsockname()[1]
    network = (
        *("-netdev", f"user,id=ssh,restrict=on,hostfwd=tcp:{_LOOPBACK}:{port}-:22"),
        *("-device", "virtio-net-pci,netdev=ssh,romfile=,bus=pcie.0,addr=0x14"),
    )
    environment = {
        "LAB_SSH": f"/run/lab/machine{keys}",
        "LAB_SSHD": f"/run/lab/machine{unpacked(_RELEASE, 'openssh-server')}",
        "LAB_APT": f"/run/lab/machine{unpacked(_RELEASE, 'python3-apt')}",
    }
    reached = replace(topology, arguments=(*topology.arguments, *network))
    job = Job(["/bin/bash", str(_SCRIPT)], environment=environment)
    return stack.enter_context(Guest(reached, job)), port
