"""Functions of a host as people name them: by short addresses, PCI IDs, or parts of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vfiomgr.errors import UnknownDevice, UsageError
from vfiomgr.pci.model import PciAddress, PciDevice, identifiers_in

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

UNIDENTIFIED = "no modalias, and no vendor, device and class"
"""The reason why a function is omitted: it cannot be identified."""
_LIST_ALL = "list all devices: vfiomgr list --all"


def find_device(host: HostSnapshot, text: str) -> PciDevice:
    """The function with the address or the PCI IDs `text`; errors are those of `find_address`."""
    return host.device(find_address(host, text))


def find_address(host: HostSnapshot, text: str) -> PciAddress:
    """Read an address as typed by a user; the domain may be omitted if it is unambiguous.

    PCI IDs such as `10de:2235` are accepted if only one function has them.

    Raises:
        UsageError: it is not an address, or matches several functions.
    """
    if identifiers_in(text) is None:
        return PciAddress.parse(text, {device.address for device in host.devices})
    first, *others = with_identifiers(host, text)
    if others:
        raise ambiguous(text, (first, *others))
    return first


def with_identifiers(host: HostSnapshot, text: str) -> tuple[PciAddress, ...]:
    """The functions with the PCI IDs `text`, such as `10de:2235`; at least one.

    Raises:
        UnknownDevice: there is none.
    """
    wanted = identifiers_in(text)
    found = tuple(d.address for d in host.devices if (d.vendor_id, d.device_id) == wanted)
    if not found:
        message = f"no such PCI device: {text}"
        raise UnknownDevice(message, _LIST_ALL)
    return found


def with_name(host: HostSnapshot, text: str) -> PciDevice:
    """The function whose name contains `text`, such as `A40`; virtual functions are excluded.

    Of several functions of one slot it is the first.

    Raises:
        UsageError: there is none, or there are several.
    """
    low = text.lower()
    found = [d for d in host.devices if low in d.name.lower() and not d.physical_function]
    if not found:
        message = f"no such PCI device: no name contains {text!r}"
        raise UnknownDevice(message, _LIST_ALL)
    slots = {d.address.slot: d for d in reversed(found)}
    if len(slots) > 1:
        raise ambiguous(repr(text), [f"{d.address} ({d.name})" for d in reversed(slots.values())])
    return found[0]


def ambiguous(text: str, found: Iterable[object]) -> UsageError:
    """The error for a text that matches several functions."""
    message = f"{text} is ambiguous: it matches {', '.join(map(str, found))}"
    return UsageError(message, "give the address of one of them")


def unknown_device(host: HostSnapshot, address: PciAddress) -> UnknownDevice:
    """The error for an address at which no function was found."""
    if str(address) in host.pci_unidentified:
        message = f"cannot identify {address}: {UNIDENTIFIED}"
        hint = "add these files to the recording, or examine the device on the host: lspci -vv"
        return UnknownDevice(message, hint)
    message = f"no such PCI device: {address}"
    if function := _missing_function(host, address):
        return UnknownDevice(f"{message}: {function[0]}", function[1])
    near = " or ".join(map(str, _near(host, address)))
    meant = f"did you mean {near}? " if near else ""
    return UnknownDevice(message, f"{meant}{_LIST_ALL}")


def _missing_function(host: HostSnapshot, address: PciAddress) -> tuple[str, str] | None:
    """What is known of an address that a virtual function would have, and how to create it.

    Without offset and stride, which Linux shows since 4.14, it may be any beside its device.
    """
    for device in host.devices:
        index = device.index_of_function(address)
        is_unknown = device.sriov_totalvfs and not (device.sriov_offset and device.sriov_stride)
        is_beside = device.address.slot == address.slot and is_unknown
        if index is not None or is_beside:
            count = "COUNT" if index is None else max(index + 1, device.sriov_numvfs or 0)
            has = f"{device}, which has {device.sriov_numvfs or 0} of {device.sriov_totalvfs}"
            what = f"{'it may be' if index is None else 'it is'} a virtual function of {has}"
            create = f"create virtual functions: vfiomgr sriov set {device.address} {count}"
            return what, f"{create}; a list that is bound at boot, before that, cannot have them"
    return None


def _near(host: HostSnapshot, address: PciAddress) -> list[PciAddress]:
    """Functions at the same place in other domains; else the first one of the same slot."""
    known = [device.address for device in host.devices]
    place = (address.bus, address.device, address.function)
    same = [a for a in known if (a.bus, a.device, a.function) == place]
    return same or [a for a in known if a.slot == address.slot][:1]
