"""Definitions of vGPUs on virtual functions of the vendor's driver, which mdevctl does not know.

One document for each GPU, /etc/vfiomgr/vgpu.d/ADDRESS.json: all that a reboot takes away. Virtual
functions, mode and GPU instances are the GPU's; a type and its parameters are a virtual function's.
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
_REMEDY = "mend the file, or remove it and define the vGPUs anew"


class FunctionDefinition(Value):
    """What a virtual function is to be."""

    address: PciAddress
    type_id: str
    """The number that is written; good for one model of GPU and one branch of its driver."""
    type_name: str | None = None
    """What the number meant when it was defined: another name by now is another type."""
    parameters: str = ""
    """`name=value,…`, written as one."""
    start: Start = "manual"

    @property
    def autostart(self) -> bool:
        """Whether it starts by itself."""
        return self.start == "auto"

    @property
    def directory(self) -> HostPath:
        """Where its attributes are."""
        return pci_device(self.address)

    def __str__(self) -> str:
        """`vGPU 0000:41:00.4 (NVIDIA L40S-2Q)`."""
        return f"vGPU {self.address} ({self.type_name or self.type_id})"


class GpuDefinition(Value):
    """What a GPU is to be before its virtual functions become vGPUs, and what they become."""

    version: Literal["vfiomgr/v1"]
    gpu: DeviceIdentity
    virtual_functions: int
    vgpus: tuple[FunctionDefinition, ...]
    heterogeneous: bool = False
    """Whether vGPUs of different sizes go together."""
    mig: tuple[str, ...] | None = None
    """The profiles of its GPU instances, as many as there are to be; None without MIG."""

    @property
    def path(self) -> HostPath:
        """Its file."""
        return gpu_file(self.gpu.address)

    @property
    def autostarting(self) -> tuple[FunctionDefinition, ...]:
        """Those that start by themselves."""
        return tuple(function for function in self.vgpus if function.autostart)

    def function(self, address: PciAddress) -> FunctionDefinition | None:
        """What one of its virtual functions is to be."""
        return next((known for known in self.vgpus if known.address == address), None)

    def with_function(self, function: FunctionDefinition) -> GpuDefinition:
        """The same with another virtual function, or with one that is to be something else."""
        others = (known for known in self.vgpus if known.address != function.address)
        vgpus = sorted((*others, function), key=lambda known: known.address)
        return replace(self, vgpus=tuple(vgpus))

    def without(self, address: PciAddress) -> GpuDefinition | None:
        """The same without a virtual function; None where it was the last."""
        vgpus = tuple(known for known in self.vgpus if known.address != address)
        return replace(self, vgpus=vgpus) if vgpus else None


def gpu_file(address: PciAddress) -> HostPath:
    """The file of a GPU's definition."""
    return DIRECTORY / f"{address}{_SUFFIX}"


def render_gpu_definition(definition: GpuDefinition) -> str:
    """The document of a GPU."""
    import json  # noqa: PLC0415 - `list` needs none

    return json.dumps(to_jsonable(definition), indent=2, ensure_ascii=False) + "\n"


def parse_gpu_definition(file: TextFile) -> GpuDefinition:
    """Read the document of a GPU.

    Raises:
        InvalidDocument: why it is none: the place in it, and what is wrong there.

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
    """What fits its fields, and makes no sense."""
    addresses = [function.address for function in definition.vgpus]
    if path != definition.path:
        yield f"it is about {definition.gpu.address}, which its name does not say"
    if len(set(addresses)) < len(addresses):
        yield "it defines a virtual function twice"
    if not len(addresses) <= definition.virtual_functions:
        yield f"{len(addresses)} vGPUs need more than {definition.virtual_functions} functions"
    for function in definition.vgpus:
        if not function.type_id.isdecimal() or not int(function.type_id):
            yield f"{function.address}: {function.type_id!r} is no number of a type"
