"""Calls of libvirt that are interrupted, without a libvirt."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from vfiomgr.errors import LibvirtSilent
from vfiomgr.libvirt.client.binding import converse


class Handle:
    """An object of libvirt whose calls take as long as they are told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attachDeviceFlags(self, seconds: float) -> None:  # noqa: N802 - libvirt's own name
        """Take longer than other calls may."""
        time.sleep(seconds)
        self.calls.append("attached")

    def info(self) -> list[str]:
        """What has been done."""
        return list(self.calls)

    def slow(self, seconds: float) -> None:
        """Take long where that is not foreseen."""
        time.sleep(seconds)

    def name(self) -> str:
        """Say what the object knows by itself."""
        return "guest"

    def close(self) -> None:
        """End it."""


Handle.__module__ = "libvirt"


def interrupt_soon() -> None:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()


def test_what_is_asked_after_an_interrupt_waits_for_the_call_that_goes_on() -> None:
    with converse(lambda _uri: Handle(), "test:///default", 0.3) as handle:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            handle.attachDeviceFlags(1.5)
        assert handle.info() == ["attached"]


def test_it_is_waited_for_no_longer_than_it_may_take() -> None:
    with converse(lambda _uri: Handle(), "test:///default", 0.4) as handle:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            handle.slow(2)
        with pytest.raises(LibvirtSilent, match=r"did not answer within 0\.4 s"):
            handle.info()


def test_names_are_told_while_libvirt_is_silent() -> None:
    with converse(lambda _uri: Handle(), "test:///default", 0.2) as handle:
        with pytest.raises(LibvirtSilent):
            handle.slow(1)
        assert handle.name() == "guest"
        with pytest.raises(LibvirtSilent):
            handle.info()
