"""`vfiomgr check migration --ask-qemu`, with a QEMU that libvirt has started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.embed import Embed, embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

QEMU = "/usr/bin/qemu-system-x86_64"
_PROGRAM = """
import runpy, sys
from contextlib import nullcontext
from vfiomgr.snapshot.session import Session
from vfiomgr.libvirt.client import connection
xml, uri, *options = sys.argv[1:]
with connection.connect(uri) as started:
    guest = started._handle.createXML(xml, 1)
    connection.event_loop = nullcontext
    Session.is_live = True
    sys.argv = ["vfiomgr", "check", "migration", "g", "-c", uri, "--format", "json", *options]
    try:
        runpy.run_module("vfiomgr", run_name="__main__", alter_sys=True)
    finally:
        print(*guest.messages(0), sep="\\n", file=sys.stderr)
        guest.destroy()
"""
"""A guest that runs as long as vfiomgr examines it; both have the driver in their process."""


UNMIGRATABLE = ("qemu-xhci,addr=0x10", "usb-mtp,rootdir=/")
"""Devices of which QEMU 7.2, 10.0 and 11.1 cannot migrate the last; 11.1 can migrate nvme."""


def domain(*devices: str) -> str:
    """A guest without a system, with devices of QEMU."""
    extra = "".join(f"<qemu:arg value='-device'/><qemu:arg value='{each}'/>" for each in devices)
    return f"""<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>g</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices><emulator>{QEMU}</emulator></devices>
<qemu:commandline>{extra}</qemu:commandline></domain>"""


@pytest.fixture(scope="module")
def embed() -> Iterator[Embed]:
    with embedded() as found:
        yield found


def check(embed: Embed, xml: str, *options: str) -> tuple[dict[str, Any], str]:
    """The report, and what libvirt says about the guest."""
    answer = embed.python("-c", _PROGRAM, xml, embed.uri, *options)
    assert answer.stdout, answer.stderr
    document: dict[str, Any] = json.loads(answer.stdout)
    return document, answer.stderr


def test_qemu_names_the_device_that_it_cannot_migrate(embed: Embed) -> None:
    report, said = check(embed, domain(*UNMIGRATABLE), "--ask-qemu")
    (found,) = (one for one in report["findings"] if one["id"] == "migration-blocked")
    assert found["title"].startswith("QEMU refuses to migrate g: non-migratable device: ")
    assert found["title"].endswith("usb-mtp")
    assert report["is_blocked"]
    assert "custom monitor control commands issued" in said
    assert not any("--ask-qemu" in text for text in report["not_checked"])


def test_qemu_has_no_reason(embed: Embed) -> None:
    report, _ = check(embed, domain(), "--ask-qemu")
    assert not report["is_blocked"]


def test_qemu_is_not_asked_without_the_option(embed: Embed) -> None:
    report, said = check(embed, domain(*UNMIGRATABLE))
    assert not report["is_blocked"]
    assert "custom monitor" not in said
    assert any("pass --ask-qemu (it taints the domain)" in text for text in report["not_checked"])
