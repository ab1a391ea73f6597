"""Real libvirt and QEMU take the domains of desktops, and keep all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import libvirt
import pytest
from lxml import etree

from tests.integration.embed import Embed, embedded
from tests.integration.test_libvirt_domain import (
    INSTALLED,
    SCHEMA,
    assert_kept,
)
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import GPU, two_sockets
from tests.unit.guests.test_cores import COMPLEXES, RYZEN, host_of
from vfiomgr.libvirt.build.named import request_of
from vfiomgr.libvirt.build.plan import plan_domain
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.releases import PIPEWIRE
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from collections.abc import Iterator


HOST = with_facts(two_sockets(), topology=host_of(RYZEN, COMPLEXES), cpu_vendor="AuthenticAMD")
KEYBOARD = "/dev/input/by-id/usb-Logitech_K120-event-kbd"
MOUSE = "/dev/input/by-id/usb-Logitech_G502-event-mouse"
DESKTOP: dict[str, Any] = {"memory": "16G", "vcpus": 8, "desktop": True, "devices": [GPU]}
FULL: dict[str, Any] = {
    **DESKTOP,
    "disks": ["/vm/a.qcow2,bus=virtio"],
    "cdroms": ["/iso/w11.iso", "/iso/virtio-win.iso"],
    "evdev": [f"{KEYBOARD},toggle=scrolllock", MOUSE],
    "usb": ["046d:c52b"],
}
WANTED: dict[str, dict[str, Any]] = {
    "linux": DESKTOP,
    "windows": {**FULL, "system": "windows"},
    "kvmfr": {**FULL, "looking_glass": "2560x1440,kvmfr", "video": "none"},
    "pulseaudio": {**FULL, "audio": "pulseaudio,user=1000"},
    "pipewire": {**FULL, "audio": "pipewire,user=1000"},
}


@pytest.fixture(scope="module")
def connection() -> Iterator[libvirt.virConnect]:
    opened = libvirt.open("test:///default")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def embed() -> Iterator[Embed]:
    with embedded() as started:
        yield started


def text_of(name: str, **changes: Any) -> str:
    request = request_of("pc", {**WANTED[name], **changes})  # type: ignore[typeddict-item]
    return render.domain(plan_domain(HOST, request, INSTALLED), with_reasons=True)


def known() -> list[str]:
    return [name for name in WANTED if name != "pipewire" or PIPEWIRE.is_in(INSTALLED)]


@pytest.mark.parametrize("name", known())
def test_the_schema_accepts_a_desktop(name: str) -> None:
    SCHEMA.assertValid(etree.fromstring(text_of(name)))


@pytest.mark.parametrize("name", known())
def test_libvirt_defines_a_desktop_and_keeps_all_of_it(embed: Embed, name: str) -> None:
    """Without KVM, which is not on every machine, and without a TPM, which needs swtpm."""
    xml = text_of(name, virt_type="qemu", tpm=None, secure_boot=False)
    assert_kept(etree.fromstring(xml), etree.fromstring(embed.defined(xml)))


@pytest.mark.parametrize("name", known())
def test_what_only_kvm_has_is_kept_too(connection: libvirt.virConnect, name: str) -> None:
    """Hyper-V, Secure Boot, a TPM, pairs of CPUs: as a domain of libvirt's test driver."""
    xml = text_of(name).partition("<qemu:commandline>")[0]
    xml = xml.replace("<domain type='kvm'", "<domain type='test'").replace(" firmware='efi'", "")
    xml = re.sub(r"<firmware>.*</firmware>", "", xml, flags=re.DOTALL)
    xml = xml if xml.rstrip().endswith("</domain>") else f"{xml}</domain>"
    defined = connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    try:
        kept = etree.fromstring(defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        assert_kept(etree.fromstring(xml), kept)
    finally:
        defined.undefine()


@pytest.mark.parametrize("name", known())
def test_the_check_of_a_desktop_finds_nothing(name: str) -> None:
    domain = read_domain(text_of(name, video="none").encode(), "pc")
    (report,) = preflight(HOST, [domain])
    assert [f for f in report.findings if f.severity != "info"] == []
