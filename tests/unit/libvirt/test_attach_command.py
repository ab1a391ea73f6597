"""`vfiomgr libvirt detach` of several devices, one of which the guest keeps."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import pytest

from tests.unit.libvirt.domains import EMPTY, hostdev, known, with_hostdevs
from vfiomgr.errors import GuestKeepsDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Run
    from vfiomgr.libvirt.attach.claims import Scope
    from vfiomgr.libvirt.client.connection import Connection
    from vfiomgr.libvirt.client.domains import Removal
    from vfiomgr.libvirt.model import KnownDomain

DEVICES = ("0000:41:00.4", "0000:42:00.4", "0000:43:00.4")
DOMAIN = with_hostdevs(EMPTY, *map(hostdev, DEVICES))


class FakeConnection:
    """A guest that runs, and keeps the second device."""

    def domain(self, _name: str) -> KnownDomain:
        """It is defined so, too."""
        return known(DOMAIN, DOMAIN)

    def domain_xml(self, _name: str, **_: bool) -> bytes:
        """Nothing is put back."""
        return b"<domain type='kvm'><name>win</name></domain>"

    def detach(self, _name: str, _element: str, _scope: Scope, removal: Removal) -> None:
        """As libvirt does it."""
        if removal.device == DEVICES[1]:
            message = f"the guest win refused: {removal.device}"
            raise GuestKeepsDevice(message, "wait")


@pytest.fixture(autouse=True)
def _guest(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[Connection]:
        yield cast("Connection", FakeConnection())

    monkeypatch.setattr("vfiomgr.libvirt.commands.attach.connected", connected)


def test_what_was_done_before_and_what_was_not_tried_is_told(run: Run) -> None:
    answer = run("libvirt", "detach", "win", *DEVICES)
    assert answer.status == GuestKeepsDevice.exit_code
    where = "(the running guest and the definition of win)"
    assert answer.stdout.splitlines() == [
        f"detached: {DEVICES[0]} {where}",
        f"not detached: {DEVICES[1]} {where}",
        f"not tried: {DEVICES[2]} {where}",
    ]
    assert f"refused: {DEVICES[1]}" in answer.stderr


def test_programs_are_told_so_too(run: Run) -> None:
    answer = run("libvirt", "detach", "win", *DEVICES, "--format", "json")
    assert answer.status == GuestKeepsDevice.exit_code
    document = json.loads(answer.stdout)
    assert document["kind"] == "DetachOutcome"
    assert document["changed"] is True
    states = [(item["device"], item["state"]) for item in document["items"]]
    assert states == list(zip(DEVICES, ("done", "kept", "not tried"), strict=True))


def test_what_goes_is_done(run: Run) -> None:
    answer = run("libvirt", "detach", "win", DEVICES[0], "--format", "json")
    assert answer.status == 0, answer.stderr
    assert [item["state"] for item in json.loads(answer.stdout)["items"]] == ["done"]
