"""Confidential guests and libvirt 12, that of Debian sid: its schema, and what it accepts.

The second needs that release: `make test-releases RELEASES=sid`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree

from tests.debian import unpacked
from tests.integration.embed import Embed, RejectedError, embedded
from tests.unit.guest_hosts import FAR, GPU, planned
from tests.unit.libvirt.test_confidential import AMD, INTEL, NEWEST
from vfiomgr.libvirt.build.confidential import FEATURES
from vfiomgr.libvirt.xml import render

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {"tdx": INTEL, "sev-snp": AMD}
RELAY = Path(__file__).with_name("qemu_relay.py")
needs_tdx = pytest.mark.libvirt(FEATURES["tdx"].since)


@pytest.fixture(scope="module")
def schemas() -> Path:
    """The schemas of the package libvirt0, which virt-xml-validate uses."""
    return unpacked("sid", "libvirt-clients") / "usr/share/libvirt/schemas"


@pytest.fixture(scope="module")
def embed() -> Iterator[Embed]:
    """A libvirt on a machine that seems to start both kinds of guests, with Debian's firmware.

    libvirt and QEMU are real. Of QEMU, a relay changes two answers. Whether KVM starts TDX guests
    libvirt asks KVM itself, so this is added to what libvirt remembers of QEMU.
    """
    with embedded() as started:
        programs = started.directory / "bin"
        programs.mkdir()
        emulator = programs / "qemu-system-x86_64"
        real = shutil.which(emulator.name)
        assert real is not None
        relay = shlex.join((sys.executable, "-I", str(RELAY), real))
        emulator.write_text(f'#!/bin/sh\nexec {relay} "$@"\n')
        emulator.chmod(0o755)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        started.variables = {"PATH": path, "SEEMS_TO_HAVE_KVM": "1"}
        for description in (unpacked("sid", "ovmf") / "usr/share/qemu/firmware").glob("60-*"):
            shutil.copy(description, started.directory / "config/qemu/firmware")
        with pytest.raises(RejectedError, match="'tdx' launch security is not supported with this"):
            started.defined(text("tdx"))
        started.close()
        (cache,) = (started.directory / "cache/qemu/capabilities").glob("*.xml")
        known = cache.read_text()
        cache.write_text(known.replace("<version>", "<flag name='tdx-guest'/>\n<version>", 1))
        yield started


def text(kind: str, **changes: Any) -> str:
    """The domain with host devices near two sockets."""
    plan = planned(GPU, FAR, host=KINDS[kind], libvirt=NEWEST, launch_security=kind, **changes)
    return render.domain(plan, with_reasons=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"hugepage_bytes": 1 << 30}, {"has_tpm": True}, {"system": "windows"}],
    ids=["plain", "hugepages", "tpm", "windows"],
)
def test_the_schema_accepts_it(schemas: Path, kind: str, changes: dict[str, Any]) -> None:
    schema = etree.RelaxNG(file=str(schemas / "domain.rng"))
    written = text(kind, **changes)
    assert schema.validate(etree.fromstring(written)), schema.error_log
    wrong = written.replace("<launchSecurity type='", "<launchSecurity type='x")
    assert not schema.validate(etree.fromstring(wrong)), "the schema knows the kinds"


@needs_tdx
@pytest.mark.parametrize(
    ("kind", "firmware"),
    [("tdx", "/usr/share/ovmf/OVMF.inteltdx.ms.fd"), ("sev-snp", "/usr/share/ovmf/OVMF.amdsev.fd")],
)
@pytest.mark.parametrize("changes", [{}, {"hugepage_bytes": 1 << 30}], ids=["plain", "hugepages"])
def test_libvirt_defines_it(
    embed: Embed, kind: str, firmware: str, changes: dict[str, Any]
) -> None:
    written = etree.fromstring(text(kind, **changes))
    kept = etree.fromstring(embed.defined(text(kind, **changes)))
    (launch,), (loader,) = kept.findall("launchSecurity"), kept.findall("os/loader")
    assert launch.get("type") == kind
    assert launch.findtext("policy") == written.findtext("launchSecurity/policy")
    assert (loader.text, loader.get("type")) == (firmware, "rom")
    devices = [document.findall("devices/hostdev") for document in (written, kept)]
    assert len(devices[0]) == len(devices[1]) > 1


@needs_tdx
@pytest.mark.parametrize("kind", KINDS)
def test_qemu_is_told_of_it(embed: Embed, kind: str) -> None:
    command = embed.arguments(text(kind, numa="off", has_pinning=False))
    words = shlex.split(command.replace("\\\n", " "))
    objects = [json.loads(word) for word in words if word.startswith('{"qom-type"')]
    (guest,) = (found for found in objects if found["qom-type"] == f"{kind}-guest")
    machine = words[words.index("-machine") + 1].split(",")
    assert f"confidential-guest-support={guest['id']}" in machine
    assert "smm=off" in machine
    assert ("kernel_irqchip=split" in machine) is (kind == "tdx")
    assert guest.get("policy") == (None if kind == "tdx" else 0x30000)


@needs_tdx
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<pmu state='off'/>", "<pmu state='on'/>", "not supported with PMU enabled"),
        ("<smm state='off'/>", "<smm state='on'/>", "not supported with SMM enabled"),
        ("<ioapic driver='qemu'/>", "<ioapic driver='kvm'/>", "needs split kernel irqchip"),
        (" firmware='efi'>", "><loader type='pflash'>/fw/CODE.fd</loader>", "with pflash loader"),
        ("type='tdx'/>", "type='tdx'><policy>0x2</policy></launchSecurity>", "Only bit0"),
        ("type='tdx'/>", "type='sev-snp'/>", "Expecting an element policy"),
        ("type='tdx'/>", "type='tdy'/>", "failed to validate against schema"),
    ],
)
def test_libvirt_refuses_a_wrong_one(embed: Embed, old: str, new: str, said: str) -> None:
    """What vfiomgr writes differently, or does not write at all."""
    right = text("tdx")
    assert right.count(old) == 1
    with pytest.raises(RejectedError, match=said):
        embed.defined(right.replace(old, new))


@needs_tdx
@pytest.mark.parametrize(
    "part", ["<pmu state='off'/>", "<smm state='off'/>", "<ioapic driver='qemu'/>"]
)
def test_libvirt_leaves_the_rest_to_qemu(embed: Embed, part: str) -> None:
    """So `check domain` does not require these elements."""
    right = text("tdx")
    assert part in right
    assert "type='tdx'" in embed.defined(right.replace(part, ""))
