"""Run vfiomgr as a service of systemd, if its terminal belongs to a session that may end.

Whatever ends the service, systemd then runs `vfiomgr recover`, which does nothing after a success
and brings the screen back after anything else (ExecStopPost= in systemd.service(5)).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.persistence.facts import has_systemd

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress

_CGROUP = HostPath("/proc/self/cgroup")
_USERS = "/user.slice/"


AGREED = "VFIOMGR_AGREED_SESSIONS"
"""The variable with the sessions that a person agreed to end, for the service."""


def agreed_sessions() -> tuple[str, ...] | None:
    """The sessions that a person agreed to end; None for any."""
    agreed = os.environ.get(AGREED)
    return None if agreed is None else tuple(agreed.split())


def is_in_session(tree: HostTree) -> bool:
    """Whether this process is in a user's session, or among the services of one."""
    return _USERS in (tree.read_text(_CGROUP) or "")


class DetachedRun:
    """The command line of this process, run again as a transient service."""

    def __init__(
        self,
        tree: HostTree,
        address: PciAddress,
        program: str,
        agreed: tuple[str, ...] | None = None,
    ) -> None:
        """`program` is the command vfiomgr; `address` gives the service its name.

        `agreed` are the only sessions that may end.

        Raises:
            HostError: systemd does not run this host.
        """
        if not has_systemd(tree):
            message = "cannot release a display from a session: systemd does not run this host"
            raise HostError(message, "run the command from a text console that is in no session")
        self.unit = f"vfiomgr-release-{str(address).replace(':', '-').replace('.', '-')}"
        # Another run for this display, which systemd refuses to start twice, has its own.
        self.log = RUNTIME / f"{self.unit}-{os.getpid()}.log"
        self._tree = tree
        self._program = program.split()
        self._agreed = agreed

    @property
    def command(self) -> list[str]:
        """The command that starts the service and waits for its end.

        systemd sets no limit for the recovery, which a limit would cut off between two steps: each
        of its steps has its own.
        """
        agreed = () if self._agreed is None else (f"--setenv={AGREED}={' '.join(self._agreed)}",)
        recover = " ".join((*self._program, "--yes", "recover"))
        return [
            *("systemd-run", "--quiet", "--collect", "--wait", f"--unit={self.unit}"),
            "--description=Release a display for a guest",
            f"--property=ExecStopPost={recover}",
            "--property=TimeoutStopSec=infinity",
            f"--property=StandardOutput=append:{self.log}",
            *agreed,
            *("--", *self._program, "--yes", *sys.argv[1:]),
        ]

    def run(self) -> tuple[int, str]:
        """Run it; returns its exit status and output. The terminal may be gone before.

        Raises:
            ProgramFailed: it cannot be started, or another one releases the same display.
        """
        self._tree.make_directory(RUNTIME)
        self._tree.remove(self.log)
        try:
            self._tree.call(*self.command, limit=None)
        except ProgramFailed as error:
            if error.status is None or not self._tree.exists(self.log):
                raise
            status = error.status
        else:
            status = 0
        output = self._tree.read_text(self.log) or ""
        self._tree.remove(self.log)
        return status, output
