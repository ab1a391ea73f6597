"""Stands for QEMU on a host that starts SEV-SNP guests: libvirt asks the real one through it.

    qemu_relay.py QEMU ARGUMENT…

Only two answers are changed: that KVM is in use, and what SEV offers. It imports nothing of
vfiomgr.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

_SEV = {
    "cbitpos": 51,
    "reduced-phys-bits": 1,
    "pdh": "AA==",
    "cert-chain": "AA==",
    "cpu0-id": "AA==",
}


def main(qemu: str, *arguments: str) -> None:
    """Start QEMU in the background, as libvirt asks, with a relay at its monitor's address."""
    if "-qmp" not in arguments or not any(",accel=kvm" in value for value in arguments):
        os.execv(qemu, [qemu, *arguments])  # noqa: S606 - libvirt's own arguments
    address, _, options = arguments[arguments.index("-qmp") + 1].partition(",")
    own = address.removeprefix("unix:")
    monitor = f"{own}.qemu"
    changed = [f"unix:{monitor},{options}" if a.startswith(address) else a for a in arguments]
    status = subprocess.run([qemu, *changed], check=False).returncode
    if status != 0:
        sys.exit(status)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(own)
        listening.listen()
        if os.fork() == 0:
            _relay(listening, monitor)


def _relay(listening: socket.socket, monitor: str) -> None:
    """Pass lines on until QEMU ends; libvirt waits for the end of the program that it started."""
    os.setsid()
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    client, _ = listening.accept()
    server = socket.socket(socket.AF_UNIX)
    server.connect(monitor)
    asked: dict[str, str] = {}
    threading.Thread(target=_ask, args=(client, server, asked), daemon=True).start()
    for line in server.makefile("rb"):
        client.sendall(json.dumps(_changed(json.loads(line), asked)).encode() + b"\r\n")


def _ask(client: socket.socket, server: socket.socket, asked: dict[str, str]) -> None:
    for line in client.makefile("rb"):
        question = json.loads(line)
        asked[question["id"]] = question["execute"]
        server.sendall(line)


def _changed(answer: dict[str, Any], asked: dict[str, str]) -> dict[str, Any]:
    match asked.get(answer.get("id", "")):
        case "query-accelerators":
            answer["return"]["enabled"] = "kvm"
        case "query-sev-capabilities":
            answer = {"id": answer["id"], "return": _SEV}
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
