"""Arguments of QEMU, and a guest that they start."""

from __future__ import annotations

from vfiomgr.guests.model import GuestPlan, GuestRequest, QemuProperty
from vfiomgr.units import Version
from vfiomgr.value import Value

VF_TOKEN = Version(8, 1)
"""The QEMU whose vfio-pci has the property vf-token."""
GENERIC_INITIATOR = Version(9, 0)
"""The QEMU that has acpi-generic-initiator (hw/acpi/acpi_generic_initiator.c)."""


class QemuArgument(Value):
    """An option with its value: `-device pcie-root-port,id=bus1,chassis=1`."""

    option: str
    """Without the hyphen: `device`."""
    head: str = ""
    """The first word of the value, which has no name: a driver, a type, a size."""
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def value(self) -> str:
        """The value as QEMU reads it; it reads two commas as one."""
        words = [self.head] if self.head else []
        words += [f"{name}={text}" for name, text in self.properties]
        return ",".join(word.replace(",", ",,") for word in words)


def properties_of(*pairs: tuple[str, object]) -> tuple[tuple[str, str], ...]:
    """Properties as text; those that are None are left out."""
    return tuple((name, str(value)) for name, value in pairs if value is not None)


def text_of(known: QemuProperty) -> tuple[str, str]:
    """A property of a device as QEMU's command line has it."""
    if known.type == "bool":
        return known.name, "on" if known.value == "true" else "off"
    return known.name, known.value


class QemuPlan(Value):
    """The arguments of a guest, and what they were made from."""

    request: GuestRequest
    guest: GuestPlan
    arguments: tuple[QemuArgument, ...]
    notes: tuple[str, ...] = ()
    """What a user should know, and do before the start."""
