"""libvirt's QEMU driver inside a process of ours: no daemon, no rights, nothing of the machine.

It stalls for root, so root runs it as another user of a user namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000") if os.geteuid() == 0 else ()
"""What goes before a command that root is not to run as root."""
WITH_VFIO = (
    *("unshare", "--user", "--map-root-user", "--mount"),
    *("sh", str(Path(__file__).with_name("with_vfio.sh"))),
)
"""The same, where the machine seems to have VFIO: libvirt 12 asks for it before arguments."""
_SERVER = Path(__file__).with_name("embed_server.py")
_LIMIT = 120
_FIRMWARE: dict[str, Any] = {
    "description": "stands for OVMF: definitions need no more than its description",
    "interface-types": ["uefi"],
    "mapping": {
        "device": "flash",
        "mode": "split",
        "executable": {"filename": "/fw/CODE.fd", "format": "raw"},
        "nvram-template": {"filename": "/fw/VARS.fd", "format": "raw"},
    },
    "targets": [{"architecture": "x86_64", "machines": ["pc-q35-*"]}],
    "features": ["acpi-s3"],
    "tags": [],
}
_SIGNED = {
    **_FIRMWARE,
    "features": ["acpi-s3", "enrolled-keys", "requires-smm", "secure-boot"],
}
"""libvirt 9.0 chooses a firmware when a guest starts, later releases when it is defined."""


_PROGRAM = """
import runpy
from vfiomgr.snapshot.session import Session
Session.is_live = True
runpy.run_module("vfiomgr", run_name="__main__", alter_sys=True)
"""
"""vfiomgr on a host that stands for the running one, whose libvirt this is."""


class RejectedError(Exception):
    """What libvirt said."""


@contextmanager
def embedded(host: str = "/") -> Iterator[Embed]:
    """One that knows a firmware, in a directory that goes with it.

    Its path is short, for it has libvirt's sockets: theirs have 107 bytes at most (unix(7)).
    """
    with tempfile.TemporaryDirectory(prefix="embed-") as name:
        firmware = Path(name, "config/qemu/firmware")
        firmware.mkdir(parents=True)
        (firmware / "50-test.json").write_text(json.dumps(_FIRMWARE))
        (firmware / "60-signed.json").write_text(json.dumps(_SIGNED))
        embed = Embed(Path(name), host)
        try:
            yield embed
        finally:
            embed.close()


@dataclass
class Embed:
    """A libvirt below a directory, and a host below another."""

    directory: Path
    host: str
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables of what runs there."""
    _server: subprocess.Popen[str] | None = field(default=None, init=False)

    @property
    def uri(self) -> str:
        """What to connect to."""
        return f"qemu:///embed?root={self.directory}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`vfiomgr libvirt …`."""
        command, *rest = arguments
        root = ("-c", _PROGRAM, "--root", self.host, "libvirt", command)
        return self.python(*root, "-c", self.uri, *rest)

    def hook(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`vfiomgr libvirt hook …`."""
        root = ("-c", _PROGRAM, "--root", self.host, "libvirt", "hook", verb)
        return self.python(*root, "-c", self.uri, *arguments)

    def json(self, *arguments: str) -> dict[str, Any]:
        """What a command that succeeds prints as JSON."""
        answer = self.run(*arguments, "--format", "json")
        assert answer.returncode == 0, answer.stderr
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    def xml(self, domain: str) -> bytes:
        """A definition."""
        program = (
            "import sys; from vfiomgr.libvirt.client.connection import connect\n"
            "with connect(sys.argv[1]) as c: sys.stdout.buffer.write(c.domain_xml(sys.argv[2]))"
        )
        answer = self.python("-c", program, self.uri, domain)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.encode()

    def defined(self, xml: str) -> str:
        """What libvirt makes of a domain that it defines, with validation, and forgets again."""
        return self._ask("define", xml)

    def arguments(self, xml: str) -> str:
        """QEMU's arguments."""
        return self._ask("native", xml)

    def close(self) -> None:
        """End what was begun to ask it."""
        if self._server is not None:
            self._server.communicate()
            self._server = None

    def _ask(self, what: str, xml: str) -> str:
        if self._server is None:
            self._server = self._serve()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"do": what, "xml": xml}) + "\n")
        self._server.stdin.flush()
        answer = _answer(self._server)
        if "error" in answer:
            raise RejectedError(answer["error"])
        return answer["text"]

    def _serve(self) -> subprocess.Popen[str]:
        """A process that keeps the driver: it starts in two seconds."""
        server = subprocess.Popen(
            [*WITH_VFIO, sys.executable, "-I", _SERVER, self.uri],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert "version" in _answer(server)
        return server

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Python as the user of this libvirt."""
        return subprocess.run(
            [*AS_USER, sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT,
            env={**self._environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    @property
    def _environment(self) -> dict[str, str]:
        own = {
            "HOME": str(self.directory),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            "XDG_CONFIG_HOME": str(self.directory / "config"),
        }
        return {**os.environ, **own, **self.variables}


def _answer(server: subprocess.Popen[str]) -> dict[str, str]:
    assert server.stdout is not None
    answer: dict[str, str] = json.loads(server.stdout.readline())
    return answer
