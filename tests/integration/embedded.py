"""libvirt's QEMU driver inside a process of ours: no daemon, no rights, nothing of the machine.

It stalls for root, so root runs it as another user of a user namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
_LIMIT = 120


@dataclass(frozen=True)
class Embedded:
    """A libvirt below a directory, and a host below another."""

    directory: Path
    host: str

    @property
    def uri(self) -> str:
        """What to connect to."""
        return f"qemu:///embed?root={self.directory}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`vfiomgr libvirt …`."""
        command, *rest = arguments
        return self._python(
            "-m", "vfiomgr", "--root", self.host, "libvirt", command, "-c", self.uri, *rest
        )

    def hook(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`vfiomgr libvirt hook …`."""
        root = ("-m", "vfiomgr", "--root", self.host, "libvirt", "hook", verb)
        return self._python(*root, "-c", self.uri, *arguments)

    def json(self, *arguments: str) -> dict[str, Any]:
        """What a command that succeeds prints as JSON."""
        answer = self.run(*arguments, "--format", "json")
        assert answer.returncode == 0, answer.stderr
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    def xml(self, domain: str) -> bytes:
        """A definition."""
        program = (
            "import sys; from vfiomgr.adapters.libvirt.connection import connect\n"
            "with connect(sys.argv[1]) as c: sys.stdout.buffer.write(c.domain_xml(sys.argv[2]))"
        )
        answer = self._python("-c", program, self.uri, domain)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.encode()

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        prefix = AS_USER if os.geteuid() == 0 else ()
        private = {
            "HOME": str(self.directory),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        return subprocess.run(
            [*prefix, sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT,
            env={**os.environ, **private},
        )
