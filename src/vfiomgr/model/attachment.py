"""What a domain of libvirt is given or gives back, as one device of the guest at a time."""

from __future__ import annotations

from dataclasses import dataclass

from vfiomgr.model.domain import DomainHostdev
from vfiomgr.model.pci import PciDevice


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a domain is changed: the running guest, its definition, or both."""

    live: bool
    config: bool

    def __bool__(self) -> bool:
        """Whether anything is."""
        return self.live or self.config

    def __str__(self) -> str:
        """`the running guest and the definition`."""
        parts = ("the running guest",) * self.live + ("the definition",) * self.config
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class NamedVgpu:
    """A mediated device, active or defined."""

    uuid: str
    parent: str
    type: str
    type_name: str | None
    device_api: str | None
    is_active: bool


@dataclass(frozen=True, slots=True)
class Attachment:
    """Functions that become one device of the guest, or a vGPU."""

    scope: Scope
    functions: tuple[PciDevice, ...] = ()
    vgpu: NamedVgpu | None = None
    bus: int | None = None
    """The guest's bus of several functions."""

    @property
    def names(self) -> tuple[str, ...]:
        """Addresses, or the UUID."""
        if self.vgpu is not None:
            return (self.vgpu.uuid,)
        return tuple(str(device.address) for device in self.functions)


@dataclass(frozen=True, slots=True)
class Detachment:
    """A device that a domain gives back."""

    scope: Scope
    hostdev: DomainHostdev


@dataclass(frozen=True, slots=True)
class AttachPlan:
    """What is to be given to a domain, and what there is to say of it."""

    items: tuple[Attachment, ...]
    already: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DetachPlan:
    """What a domain is to give back, and what there is to say of it."""

    items: tuple[Detachment, ...]
    already: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
