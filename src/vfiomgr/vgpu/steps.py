"""A step about one attribute of a vGPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from vfiomgr import paths
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.vgpu.attributes import PARAMETERS


@dataclass(frozen=True, slots=True)
class SetVgpuAttribute:
    """Write an attribute of a vGPU; `before` is None where nobody knows what it read, or need to.

    So it is of a vGPU that the same plan makes: undone, the vGPU goes, and its attributes with it.
    """

    vgpu: str
    """Its UUID, or the address of its virtual function."""
    directory: str
    attribute: str
    """Its path below the directory."""
    before: str | None
    after: str
    kind: Literal["set-vgpu-attribute"] = "set-vgpu-attribute"

    def describe(self) -> str:
        """One line for people."""
        if self.before == self.after:
            return f"{self.vgpu}: remember that {self.attribute} is {self.after!r}"
        return f"{self.vgpu}: set {self.attribute} to {self.after!r}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        if self.before == self.after:
            return ()
        text = shlex.quote(self.written.removesuffix("\n"))
        end = "\\n" if self.written.endswith("\n") else ""
        return (f"printf '%s{end}' {text} > {self.directory}/{self.attribute}",)

    @property
    def written(self) -> str:
        """What is written.

        NVIDIA's driver takes the last byte for a newline, whatever it is, and wants a blank for
        nothing (vgpu_params_store in its nvidia-vgpu-vfio).
        """
        if self.attribute != PARAMETERS:
            return self.after
        return f"{self.after.rstrip() or ' '}\n"

    def inverse(self) -> SetVgpuAttribute | None:
        """What it read before, where that is known."""
        if self.before is None:
            return None
        return SetVgpuAttribute(
            self.vgpu, self.directory, self.attribute, before=self.after, after=self.before
        )


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
        return (f"echo 1 > {paths.MDEV_DEVICES / self.uuid / 'remove'}",)

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
        target = paths.pci_device(self.device.address) / "nvidia/current_vgpu_type"
        return (f"echo {self.after} > {target}",)

    def inverse(self) -> SetVgpuType:
        """As it was."""
        return SetVgpuType(self.device, before=self.after, after=self.before)
