"""What libvirt's domain capabilities tell of devices (formatdomaincaps.html)."""

from __future__ import annotations

from xml.etree import ElementTree as ET


def offers_vfio(capabilities: str) -> bool | None:
    """Whether PCI devices can be passed through by VFIO; None where nothing is told."""
    hostdev = _root(capabilities).find("devices/hostdev")
    if hostdev is None:
        return None
    if hostdev.get("supported") != "yes":
        return False
    backends = hostdev.find("enum[@name='pciBackend']")
    if backends is None:
        return None
    return any(value.text == "vfio" for value in backends.findall("value"))


def _root(capabilities: str) -> ET.Element:
    return ET.fromstring(capabilities)  # noqa: S314 - of the daemon that runs the guests


def has_kvm(capabilities: str) -> bool:
    """Whether guests of the type kvm can run, by the host's capabilities (formatcaps.html)."""
    return any(domain.get("type") == "kvm" for domain in _root(capabilities).iter("domain"))
