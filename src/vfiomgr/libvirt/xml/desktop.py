"""Screen, input, sound and shared memory of a domain, from its XML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.desktop import DomainAudio, DomainScreen, SharedMemory
from vfiomgr.libvirt.xml.elements import attribute_of, size_of

if TYPE_CHECKING:
    from vfiomgr.documents.xml_text import Element


def read_shared(element: Element) -> SharedMemory:
    """`<shmem>`; its size is in bytes where no unit is written (formatdomain.html)."""
    size = element.find("size")
    return SharedMemory(
        line=element.line,
        name=element.get("name"),
        model=attribute_of(element, "model", "type") or "ivshmem",
        size_bytes=None if size is None else size_of(size, "bytes"),
    )


def read_screen(root: Element) -> DomainScreen:
    """What the guest is seen and used by."""
    balloons = root.each("devices/memballoon")
    return DomainScreen(
        inputs=tuple(
            (one.line, attribute_of(one, "source", "dev") or "")
            for one in root.each("devices/input")
            if one.get("type") == "evdev"
        ),
        audios=tuple(map(_audio, root.each("devices/audio"))),
        videos=tuple(
            (one.line, attribute_of(one, "model", "type") or "")
            for one in root.each("devices/video")
        ),
        has_balloon=not balloons or any(one.get("model") != "none" for one in balloons),
    )


def _audio(element: Element) -> DomainAudio:
    server = element.get("serverName").removeprefix("unix:")
    directory = server.removesuffix("/pulse/native") if server.startswith("/") else ""
    return DomainAudio(
        line=element.line,
        kind=element.get("type"),
        directory=element.get("runtimeDir") or directory or None,
    )
