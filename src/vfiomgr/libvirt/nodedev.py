"""A mediated device that libvirt is to own: whether its parent makes such, and has room.

libvirt asks neither: it keeps a definition of any type, and tells at the start that it failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.definitions.plan import find_type, types_of
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class MdevRequest(Value):
    """A type, by its identifier, and the function that makes it."""

    parent: PciAddress
    type: str


def wished_mdev(host: HostSnapshot, parent: PciAddress, wanted: str) -> MdevRequest:
    """What is meant by a type's name on a parent.

    Raises:
        UnknownDevice: there is no such function or type.
        Refusal: the function makes no mediated devices.

    """
    device = host.device(parent)
    found = next((known for known in host.vgpu_parents if known.name == str(parent)), None)
    if found is None:
        message = f"{device} makes no vGPUs"
        raise Refusal(message, "vfiomgr vgpu types shows the parents of this host")
    if found.family != "mdev":
        message = f"{device} makes vGPUs that are virtual functions, which libvirt does not define"
        raise Refusal(message, f"vfiomgr vgpu define {parent} --type {wanted}")
    return MdevRequest(parent, find_type(types_of(host, found), wanted, str(parent)).id)


def refuse_without_room(host: HostSnapshot, parent: str, type_id: str) -> None:
    """Make sure that a mediated device can be made now.

    Raises:
        UnknownDevice: its parent is not there.
        Refusal: the parent's driver would make no more of that type.

    """
    found = next((known for known in host.vgpu_parents if known.name == parent), None)
    if found is None:
        message = f"there is no parent {parent} of vGPUs now"
        raise UnknownDevice(message, "is its driver loaded? vfiomgr vgpu types shows the parents")
    if found.offers(type_id) == 0:
        message = f"{parent} makes no more vGPUs of the type {type_id}"
        raise Refusal(message, f"vfiomgr vgpu types --parent {parent} tells why, and what has room")
