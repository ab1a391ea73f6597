"""libvirt's QEMU driver without a daemon, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SERVER = Path(__file__).with_name("embed_server.py")
_FIRMWARE = {
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


class RejectedError(Exception):
    """What libvirt said."""


@contextmanager
def embedded() -> Iterator[Embed]:
    """Start it, with all its files in a directory that goes with it."""
    with tempfile.TemporaryDirectory(prefix="embed-") as home:
        firmware = Path(home, "config/qemu/firmware")
        firmware.mkdir(parents=True)
        (firmware / "50-test.json").write_text(json.dumps(_FIRMWARE))
        for place in (Path(home), *Path(home).rglob("*")):
            place.chmod(0o777)
        environment = {"HOME": home, "XDG_RUNTIME_DIR": home, "XDG_CONFIG_HOME": f"{home}/config"}
        with subprocess.Popen(
            [sys.executable, "-I", _SERVER, f"{home}/root"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**environment, "PATH": os.environ["PATH"]},
        ) as process:
            embed = Embed(process)
            assert "version" in embed._answer()
            yield embed
            process.communicate()


@dataclass
class Embed:
    """Asks the driver in the other process."""

    _process: subprocess.Popen[str]

    def defined(self, xml: str) -> str:
        """What libvirt makes of a domain that it defines, with validation."""
        return self._ask("define", xml)

    def arguments(self, xml: str) -> str:
        """QEMU's arguments."""
        return self._ask("native", xml)

    def _ask(self, what: str, xml: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "xml": xml}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RejectedError(answer["error"])
        return answer["text"]

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer
