"""The pages of an agent of a node, read through its socket."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


async def page(socket: Path, path: str) -> tuple[int, str]:
    """The status and the text of a page."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def is_guest_known(socket: Path, device: str) -> bool:
    """Whether a scan saw a device open, and knew its pod."""
    _, body = await page(socket, "/metrics")
    lines = [line for line in body.splitlines() if f'address="{device}"' in line]
    is_open = any("_open" in line and line.endswith(" 1.0") for line in lines)
    return is_open and any("_allocated" in line and 'pod=""' not in line for line in lines)


async def until_guest_is_known(socket: Path, device: str) -> None:
    """Wait for a scan that saw a device open, and knew its pod."""
    end = time.monotonic() + 20
    while not await is_guest_known(socket, device):
        assert time.monotonic() < end, device
        await asyncio.sleep(0.05)
