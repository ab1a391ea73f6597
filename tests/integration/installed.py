"""The packages as they are built, and systems in which they are installed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.lab.kernel import cache_root

if TYPE_CHECKING:
    from pathlib import Path

WHEELS = cache_root() / "wheels"
"""The libraries of the packages."""
OF_OTHERS = (
    "dev/",
    "proc/",
    "tmp/",
    "var/cache/ldconfig/",
    "var/cache/man/",
    "var/lib/dpkg/",
    "var/log/",
    "root/.rpmdb",
)
"""Where dpkg, rpm, ldconfig and man-db keep what they know."""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Built:
    """The packages, and what they were made of."""

    wheel: Path
    deb: Path
    rpm: Path
    arch: Path
    collection: Path
    work: Path


@dataclass(frozen=True)
class Root:
    """An empty system, and the commands that run in it."""

    place: Path

    def run(self, *command: str, status: int = 0) -> str:
        """What a command says; it ends with the status."""
        return self._said(["chroot", str(self.place), *command], status)

    def run_on(self, host: str, *command: str, status: int = 0) -> str:
        """What a command says on a recorded host; it ends with the status."""
        return self._said(self._on(host, command), status)

    def start_on(self, host: str, *command: str) -> subprocess.Popen[str]:
        """A command that runs on a recorded host until it is terminated."""
        within = self._on(host, command)
        return subprocess.Popen(within, stderr=subprocess.PIPE, text=True, env=_ENVIRONMENT)

    def _on(self, host: str, command: tuple[str, ...]) -> list[str]:
        """A command with /sys mounted, of files that stay as they are.

        The mounts are gone with the command. dracut needs devices, and the processes of /proc,
        but for the first one: in some containers not even root may see what it has open.
        """
        mounts = (
            "mount --rbind /dev dev && mount -t proc none proc && mount -t tmpfs none proc/1"
            " && mount -t tmpfs none sys"
        )
        script = f'cd $0 && {mounts} && cp -a .{host}/sys/. sys && exec chroot . "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(self.place), *command]

    def _said(self, command: list[str], status: int) -> str:
        ran = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_ENVIRONMENT,
        )
        assert ran.returncode == status, ran.stdout
        return ran.stdout

    def files(self) -> set[str]:
        """All that is in it, but for what package managers and man-db keep."""
        found = (str(place.relative_to(self.place)) for place in self.place.rglob("*"))
        return {name for name in found if not f"{name}/".startswith(OF_OTHERS)}
