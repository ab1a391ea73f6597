"""Definitions of vGPUs on virtual functions of a vendor driver, which mdevctl does not support.

One document per GPU, /etc/vfiomgr/vgpu.d/ADDRESS.json, with all settings that a reboot resets:
virtual functions, mode and GPU instances of the GPU; type and parameters of each virtual function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.definitions.model.vgpu import Start
from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.documents.parsed import Malformed, parse_json
from vfiomgr.documents.reader import misfit_in
from vfiomgr.errors import InvalidDocument
from vfiomgr.paths import HostPath, pci_device
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.documents.text_file import TextFile

DIRECTORY = HostPath("/etc/vfiomgr/vgpu.d")
VERSION: Literal["vfiomgr/v1"] = "vfiomgr/v1"
_SUFFIX = ".json"
_REMEDY = "correct the file, or remove it and define the vGPUs again"


class FunctionDefinition(Value):
    """The vGPU definition of a virtual function."""

    address: PciAddress
    type_id: str
    """The number to write; valid for one GPU model and one driver branch."""
    type_name: str | None = None
    """The name of that number when it was defined; a different name means another type."""
    parameters: str = ""
    """`name=value,…`, written at once."""
    start: Start = "manual"

    @property
    def autostart(self) -> bool:
        """Whether it starts at boot."""
        return self.start == "auto"

    @property
    def directory(self) -> HostPath:
        """The directory of its attributes."""
        return pci_device(self.address)

    def __str__(self) -> str:
        """`vGPU 0000:41:00.4 (NVIDIA L40S-2Q)`."""
        return f"vGPU {self.address} ({self.type_name or self.type_id})"


class GpuDefinition(Value):
    """The definition of a GPU and of the vGPUs on its virtual functions."""

    version: Literal["vfiomgr/v1"]
    gpu: DeviceIdentity
    virtual_functions: int
    vgpus: tuple[FunctionDefinition, ...]
    heterogeneous: bool = False
    """Whether vGPUs of different sizes are allowed."""
    mig: tuple[str, ...] | None = None
    """The profiles of its GPU instances, one entry per instance; None without MIG."""

    @property
    def path(self) -> HostPath:
        """Its file."""
        return gpu_file(self.gpu.address)

    @property
    def autostarting(self) -> tuple[FunctionDefinition, ...]:
        """The vGPUs that start at boot."""
        return tuple(function for function in self.vgpus if function.autostart)

    def function(self, address: PciAddress) -> FunctionDefinition | None:
        """The definition of one of its virtual functions."""
        return next((known for known in self.vgpus if known.address == address), None)

    def with_function(self, function: FunctionDefinition) -> GpuDefinition:
        """Return a copy with a virtual function added or replaced."""
        others = (known for known in self.vgpus if known.address != function.address)
        vgpus = sorted((*others, function), key=lambda known: known.address)
        return replace(self, vgpus=tuple(vgpus))

    def without(self, address: PciAddress) -> GpuDefinition | None:
        """Return a copy without a virtual function; None if it was the last."""
        vgpus = tuple(known for known in self.vgpus if known.address != address)
        return replace(self, vgpus=vgpus) if vgpus else None


def gpu_file(address: PciAddress) -> HostPath:
    """The file of a GPU's definition."""
    return DIRECTORY / f"{address}{_SUFFIX}"


def render_gpu_definition(definition: GpuDefinition) -> str:
    """Render the document of a GPU."""
    import json  # noqa: PLC0415 - `list` needs none

    return json.dumps(to_jsonable(definition), indent=2, ensure_ascii=False) + "\n"


def parse_gpu_definition(file: TextFile) -> GpuDefinition:
    """Read the document of a GPU.

    Raises:
        InvalidDocument: the document is invalid; the message names the place and the cause.

    """
    try:
        definition = from_jsonable(GpuDefinition, parse_json(file.text))
    except Malformed as error:
        message = f"not JSON: {error}"
        raise InvalidDocument(message, _REMEDY) from None
    except Misfit as error:
        raise InvalidDocument(misfit_in(error, file.text), _REMEDY) from None
    for reason in _contradictions(definition, file.path):
        raise InvalidDocument(reason, _REMEDY)
    return definition


def _contradictions(definition: GpuDefinition, path: str) -> Iterator[str]:
    """Yield contradictions between valid fields."""
    addresses = [function.address for function in definition.vgpus]
    if path != definition.path:
        yield f"the file name does not match the GPU address {definition.gpu.address}"
    if len(set(addresses)) < len(addresses):
        yield "a virtual function is defined twice"
    if not len(addresses) <= definition.virtual_functions:
        yield f"{len(addresses)} vGPUs need more than {definition.virtual_functions} functions"
    for function in definition.vgpus:
        if not function.type_id.isdecimal() or not int(function.type_id):
            yield f"{function.address}: invalid type number: {function.type_id!r}"
