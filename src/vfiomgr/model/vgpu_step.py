"""Steps that make and remove vGPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model import path
from vfiomgr.model.pci import DeviceIdentity


@dataclass(frozen=True, slots=True)
class CreateMdev:
    """Make a mediated device."""

    parent: str
    parent_path: str
    type_id: str
    uuid: str
    kind: Literal["create-mdev"] = "create-mdev"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.parent}: create vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        target = f"{self.parent_path}/mdev_supported_types/{self.type_id}/create"
        return (f"echo {self.uuid} > {target}",)

    def inverse(self) -> RemoveMdev:
        """Remove it again."""
        return RemoveMdev(self.parent, self.parent_path, self.type_id, self.uuid)


@dataclass(frozen=True, slots=True)
class RemoveMdev:
    """Remove a mediated device."""

    parent: str
    parent_path: str
    type_id: str
    uuid: str
    kind: Literal["remove-mdev"] = "remove-mdev"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.parent}: remove vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"echo 1 > {path.MDEV_DEVICES / self.uuid / 'remove'}",)

    def inverse(self) -> CreateMdev:
        """Make it again, with the same UUID."""
        return CreateMdev(self.parent, self.parent_path, self.type_id, self.uuid)


@dataclass(frozen=True, slots=True)
class SetVgpuType:
    """Make a virtual function a vGPU of a type of the vendor's driver, or none with the type 0."""

    device: DeviceIdentity
    before: int
    after: int
    kind: Literal["set-vgpu-type"] = "set-vgpu-type"

    def describe(self) -> str:
        """One line for people."""
        if not self.after:
            return f"{self.device.address}: remove its vGPU of type {self.before}"
        return f"{self.device.address}: make it a vGPU of type {self.after}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        target = path.pci_device(self.device.address) / "nvidia/current_vgpu_type"
        return (f"echo {self.after} > {target}",)

    def inverse(self) -> SetVgpuType:
        """As it was."""
        return SetVgpuType(self.device, before=self.after, after=self.before)
