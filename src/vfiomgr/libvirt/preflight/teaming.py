"""The MAC addresses of a network device and of the interface that replaces it in a migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.preflight.context import PreflightContext


def mac_addresses(context: PreflightContext) -> Iterator[Diagnostic]:
    """A pair with two MAC addresses: neither libvirt nor QEMU compares them.

    The guest pairs by them (failover_get_bymac in net/core/failover.c of Linux,
    docs/system/virtio-net-failover.rst of QEMU). libvirt sets that of `<interface type='hostdev'>`,
    and chooses one if none is written.
    """
    for hostdev in context.hostdevs:
        interface = context.domain.interface_of(hostdev)
        if interface is None:
            continue
        is_set = hostdev.element == "interface"
        if interface.mac is not None and (not is_set or hostdev.mac == interface.mac):
            continue
        own = hostdev.mac if is_set else None
        wanted = interface.mac or own or "ADDRESS"
        lines = [interface.line] if interface.mac is None else []
        lines += [hostdev.line] if is_set and own != wanted else []
        shown = interface.mac or "no <mac>"
        shown += f" and {own or 'no <mac>'}" if is_set else ""
        summary = f"{interface.alias} and the device that it replaces have different MAC addresses"
        fix = f"write <mac address='{wanted}'/> in line {' and '.join(map(str, lines))}"
        if interface.mac is None and own is None:
            summary = f"{interface.alias} has no <mac> that the device that it replaces could have"
            fix = f"write <mac> with the address of {hostdev.name} in line {interface.line}"
        yield finding(
            "teaming-mac",
            "warning",
            summary,
            (
                f"{context.at(interface.line)}: {interface.alias}, {shown}",
                context.cite(hostdev, f"persistent='{interface.alias}'"),
            ),
            "the guest pairs the two by their MAC address; otherwise it loses the connection "
            "during a migration",
            fix,
            subject=hostdev.name,
        )


def unseen(context: PreflightContext) -> Iterator[str]:
    """Devices whose MAC address is set on the host, where the kernel does not show it in files."""
    for hostdev in context.hostdevs:
        interface = context.domain.interface_of(hostdev)
        mac = None if interface is None or hostdev.element == "interface" else interface.mac
        if mac is not None:
            yield f"whether {hostdev.name} has the MAC address of {hostdev.partner}: {mac}"
