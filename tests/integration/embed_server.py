"""libvirt's QEMU driver in this process, without a daemon: asked and answering by lines of JSON.

It imports nothing of vfiomgr.
"""

from __future__ import annotations

import json
import sys
import threading

import libvirt


def main(uri: str) -> None:
    """Open the driver, and answer until the input ends."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()
    libvirt.virEventAddTimeout(100, lambda *_: None, None)
    threading.Thread(target=_run_events, daemon=True).start()
    connection = libvirt.open(uri)
    _say({"version": connection.getLibVersion()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, object] = {"text": _answer(connection, request["do"], request["xml"])}
        except libvirt.libvirtError as error:
            answer = {"error": str(error)}
        _say(answer)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(connection: libvirt.virConnect, what: str, xml: str) -> str:
    """`define` (and what libvirt makes of it), or `native`: QEMU's arguments."""
    if what == "native":
        return str(connection.domainXMLToNative("qemu-argv", xml, 0))
    domain = connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    try:
        return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    finally:
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)


def _run_events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


if __name__ == "__main__":
    main(sys.argv[1])
