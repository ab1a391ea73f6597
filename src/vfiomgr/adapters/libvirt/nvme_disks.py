"""NVMe controllers of the host that QEMU itself drives as disks of a domain: `<disk type='nvme'>`.

libvirt binds such a controller to vfio-pci and QEMU opens its VFIO group, as for a `<hostdev>`; the
guest sees a virtio or other disk and no PCI function of the host (formatdomain.html, `nvme`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.values import host_address, is_on
from vfiomgr.model.domain import DomainHostdev

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.adapters.libvirt.document import Element

_TYPE = "nvme"
_VDPA = "vdpa"
_ADDRESS = "add <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/> to its <source>"


def read_nvme_disks(root: Element) -> tuple[DomainHostdev, ...]:
    """The controllers behind NVMe disks, in the order of the text; backing files and mirrors too.

    Raises:
        InvalidDocument: one has no source address.

    """
    return tuple(
        _controller(disk, layer)
        for disk in root.each("devices/disk")
        for layer in _layers(disk)
        if layer.get("type") == _TYPE
    )


def count_own_mappings(root: Element) -> int:
    """How many devices lock all memory of the guest for themselves: NVMe disks and vDPA interfaces.

    qemuDomainGetNumNVMeDisks and qemuDomainGetNumVDPANetDevices (src/qemu/qemu_domain.c).
    """
    disks = sum(
        any(layer.get("type") == _TYPE for layer in _layers(disk))
        for disk in root.each("devices/disk")
    )
    return disks + sum(one.get("type") == _VDPA for one in root.each("devices/interface"))


def _layers(element: Element) -> Iterator[Element]:
    """A disk with its chain of images: `<backingStore>`, `<mirror>` and `<dataStore>` of any depth.

    Walked with a list of its own: a document may be nested deeper than Python calls go.
    """
    waiting = [element]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(reversed([child for child in one.children if child.namespace is None]))


def _controller(disk: Element, layer: Element) -> DomainHostdev:
    source, address = layer.find("source"), layer.find("source/address")
    if source is None or address is None:
        layer.fail(f"<{layer.tag} type='{_TYPE}'> has no source address", _ADDRESS)
    alias, target = disk.find("alias"), disk.find("target")
    return DomainHostdev(
        line=disk.line,
        kind="pci",
        element="disk",
        address=host_address(address),
        managed=is_on(source, "managed"),
        alias=alias.get("name") or None if alias is not None else None,
        disk_target=target.get("dev") or None if target is not None else None,
    )
