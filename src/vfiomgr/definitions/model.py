"""Definitions of vGPUs in /etc: mdevctl's files, vfiomgr's own, and what starts them at boot.

Files of mdevctl are kept byte for byte until their content changes; then they are written in
mdevctl's format (serde_json's pretty form, no newline at the end), with all existing keys.

vfiomgr's: one document per GPU, /etc/vfiomgr/vgpu.d/ADDRESS.json, with all settings that a reboot
resets: virtual functions, mode and GPU instances of the GPU; type and parameters of each function.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from msgspec import field
from msgspec.structs import replace

from vfiomgr import documents
from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.documents.text import Malformed, TextFile, parse_json
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.paths import MDEV_DEVICES, HostPath
from vfiomgr.pci.model import DeviceIdentity, PciAddress, pci_device
from vfiomgr.persistence.model import RULES, UNITS
from vfiomgr.value import Value
from vfiomgr.vgpu.model import PARAMETERS, is_same_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


Start = Literal["auto", "manual"]
Attributes = tuple[tuple[str, str], ...]
"""Names relative to the device's directory, and values, in writing order; names may repeat."""

MDEVCTL_DIRECTORY = HostPath("/etc/mdevctl.d")
SERVICE = UNITS / "vfiomgr-vgpu.service"
INSTANCE = UNITS / "vfiomgr-vgpu@.service"
WANTED = UNITS / "multi-user.target.d" / "vfiomgr-vgpu.conf"
"""Starts the service at boot; a file instead of the link that `systemctl enable` creates."""
RULE = RULES / "61-vfiomgr-vgpu.rules"
FILES = (SERVICE, INSTANCE, WANTED, RULE)
_UUID = expression(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REMEDY = "correct the file, or remove it with: vfiomgr vgpu undefine"
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_SELF_DESTRUCTION = "remove"
"""The attribute that destroys a mediated device (mdev_device_remove)."""


def canonical(text: str) -> str:
    """Normalize the name of a parent if it is a PCI address."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return text


class VgpuDefinition(Value):
    """The definition of a mediated device, active or not."""

    parent: str
    uuid: str
    type_id: str
    autostart: bool = False
    attributes: Attributes = ()
    text: str | None = None
    """The text of its file."""

    def __eq__(self, other: object) -> bool:
        """Compare without the text of the files."""
        return isinstance(other, VgpuDefinition) and self._compared() == other._compared()

    def __hash__(self) -> int:
        """Hash the compared fields."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return (self.parent, self.uuid, self.type_id, self.autostart, self.attributes)

    @property
    def name(self) -> str:
        """Its name in commands."""
        return self.uuid

    @property
    def type_name(self) -> None:
        """Unknown: mdevctl's files have no names of types."""

    @property
    def path(self) -> HostPath:
        """Its file."""
        return definition_file(self.parent, self.uuid)

    @property
    def start(self) -> Start:
        """The value of `start` in mdevctl's format."""
        return "auto" if self.autostart else "manual"

    @property
    def directory(self) -> HostPath:
        """The directory of its attributes while it is active."""
        return MDEV_DEVICES / self.uuid

    def __str__(self) -> str:
        """`vGPU f715f63c-… (mtty-2 on mtty)`."""
        return f"vGPU {self.uuid} ({self.type_id} on {self.parent})"


def definition_file(parent: str, uuid: str) -> HostPath:
    """The file of a definition; one UUID may be defined on several parents."""
    return MDEVCTL_DIRECTORY / parent / uuid


def parse_definition(file: TextFile) -> VgpuDefinition:
    """Parse a definition file of mdevctl.

    Raises:
        InvalidDocument: the file is not a valid definition; the message names the cause.
    """
    path = HostPath(file.path)
    if not _UUID.fullmatch(path.name):
        _reject("the file name is not a lower-case UUID, which mdevctl requires")
    read = read_configuration(file.text)
    attributes = read.attributes
    return VgpuDefinition(
        path.parent.name, path.name, read.type_id, read.autostart, attributes, file.text
    )


class Configuration(Value):
    """The content of a file of mdevctl; parent and UUID are in its path."""

    type_id: str
    autostart: bool
    attributes: Attributes


def read_configuration(text: str, *, is_input: bool = False) -> Configuration:
    """Parse the text of a definition; unknown keys of an input document are refused.

    Raises:
        InvalidDocument: not JSON, or not mdevctl's format.
    """
    document = _document(text)
    unknown = sorted(set(document) - {"mdev_type", "start", "attrs"})
    if is_input and unknown:
        _reject(f"unknown keys: {', '.join(unknown)}")
    type_id, start = document.get("mdev_type"), document.get("start")
    if not isinstance(type_id, str) or not is_name(type_id):
        _reject(f"invalid mdev_type: {type_id!r}")
    if start not in ("auto", "manual"):
        _reject(f"invalid start: {start!r} (expected auto or manual)")
    attributes = document.get("attrs")
    if not isinstance(attributes, list | None):
        _reject("attrs is not a list")
    return Configuration(type_id, start == "auto", tuple(map(_attribute, attributes or [])))


def render_definition(definition: VgpuDefinition) -> str:
    """Render a definition; keep the old text if it is equivalent."""
    import json  # noqa: PLC0415 - `list` needs none

    document: dict[str, Any] = {}
    if definition.text is not None:
        if parse_definition(TextFile(definition.path, definition.text)) == definition:
            return definition.text
        document = _document(definition.text)
    document["mdev_type"] = definition.type_id
    document["start"] = definition.start
    document["attrs"] = [{name: text} for name, text in definition.attributes]
    return json.dumps(document, indent=2, ensure_ascii=False)


def is_name(text: str) -> bool:
    """Whether a text is a valid file name, as types and parents need."""
    return text not in ("", ".", "..") and not set("/\0\n") & set(text)


def check_attribute(name: str) -> str | None:
    """Return why an attribute name is invalid; None if it is valid."""
    if not all(map(is_name, name.split("/"))):
        return f"{name!r} is not a path below the directory of the device"
    if name == _SELF_DESTRUCTION:
        return f"{name!r} would remove the device"
    return None


def differing(attributes: Attributes, found: Iterable[tuple[str, str]]) -> Attributes:
    """The readable attributes whose current value differs from the definition."""
    present = dict(found)
    return tuple(
        (name, text)
        for name, text in dict(attributes).items()
        if name in present and not is_same_text(text, present[name])
    )


def _document(text: str) -> dict[str, Any]:

    if _UNDECODED in text:
        _reject("not UTF-8 text")
    try:
        document = parse_json(text)
    except ValueError as error:
        _reject(f"not JSON: {error}" if text.strip() else "the file is empty")
    if not isinstance(document, dict):
        _reject("not a JSON object")
    return document


def _attribute(entry: object) -> tuple[str, str]:
    """Parse an attribute: an object with a single member (MDev::add_attributes in mdevctl)."""
    if not isinstance(entry, dict) or len(entry) != 1:
        _reject(f"invalid entry in attrs: {entry!r} (expected an object with one name and text)")
    (name, text), *_ = entry.items()
    if not isinstance(text, str):
        _reject(f"the value of attribute {name!r} is not a string: {text!r}")
    why = check_attribute(name)
    if why is not None:
        _reject(f"invalid attribute: {why}")
    return name, text


def _reject(reason: str) -> NoReturn:
    raise InvalidDocument(reason, _REMEDY) from None


GPU_DIRECTORY = HostPath("/etc/vfiomgr/vgpu.d")
VERSION: Literal["vfiomgr/v1"] = "vfiomgr/v1"
_SUFFIX = ".json"
_GPU_REMEDY = "correct the file, or remove it and define the vGPUs again"


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
    def name(self) -> str:
        """Its name in commands."""
        return str(self.address)

    @property
    def parent(self) -> str:
        """The function itself."""
        return self.name

    @property
    def attributes(self) -> Attributes:
        """Its parameters as an attribute."""
        return ((PARAMETERS, self.parameters),) if self.parameters.strip() else ()

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


Definition = VgpuDefinition | FunctionDefinition


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
    return GPU_DIRECTORY / f"{address}{_SUFFIX}"


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
        raise InvalidDocument(message, _GPU_REMEDY) from None
    except Misfit as error:
        raise InvalidDocument(documents.misfit_in(error, file.text), _GPU_REMEDY) from None
    for reason in _contradictions(definition, file.path):
        raise InvalidDocument(reason, _GPU_REMEDY)
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


if TYPE_CHECKING:
    _Parse = Callable[[TextFile], "_Definition"]

_Definition = TypeVar("_Definition")


class DefinitionProblem(Value):
    """A file that is not a valid definition, and why."""

    path: str
    reason: str


class MdevctlRule(Value):
    """mdevctl's udev rule, which starts mediated devices when their parent appears."""

    path: str
    program: str
    """The program that it runs."""
    has_program: bool
    """Whether the program exists; Debian 12 installs mdevctl at another path than its rule."""


class VgpuAttribute(Value):
    """The value of an attribute of an active vGPU."""

    vgpu: str
    name: str
    text: str


class DefinitionFacts(Value, dict=True):
    """The complete definition files, and related facts."""

    files: tuple[TextFile, ...] = ()
    """Definitions of mdevctl and vfiomgr, and the files of vfiomgr that start them."""
    unreadable: tuple[str, ...] = ()
    mdevctl: MdevctlRule | None = None
    callouts: tuple[str, ...] = ()
    """Programs that mdevctl runs for some types; vfiomgr does not."""
    attributes: tuple[VgpuAttribute, ...] = field(default=())

    @cached_property
    def vgpus(self) -> tuple[VgpuDefinition, ...]:
        """The mediated devices that are defined, by parent and UUID."""
        return self._mdevs[0]

    @cached_property
    def gpus(self) -> tuple[GpuDefinition, ...]:
        """The GPUs whose virtual functions are defined, by address."""
        return tuple(sorted(self._gpus[0], key=lambda known: known.gpu.address))

    @property
    def every(self) -> tuple[Definition, ...]:
        """The definitions of both families."""
        return (*self.vgpus, *(function for gpu in self.gpus for function in gpu.vgpus))

    @cached_property
    def problems(self) -> tuple[DefinitionProblem, ...]:
        """Files that are not valid definitions."""
        unread = (DefinitionProblem(path, "cannot be read") for path in self.unreadable)
        return (*self._mdevs[1], *self._gpus[1], *unread)

    @property
    def is_started_by_mdevctl(self) -> bool:
        """Whether mdevctl's rule starts autostart mediated devices."""
        return self.mdevctl is not None and self.mdevctl.has_program

    def file(self, path: str) -> str | None:
        """The text of one of the files."""
        return next((file.text for file in self.files if file.path == path), None)

    def attributes_of(self, vgpu: str) -> Attributes:
        """The attributes of an active vGPU, by name."""
        return tuple((fact.name, fact.text) for fact in self.attributes if fact.vgpu == vgpu)

    @cached_property
    def _mdevs(self) -> tuple[tuple[VgpuDefinition, ...], tuple[DefinitionProblem, ...]]:
        return self._parsed(MDEVCTL_DIRECTORY, parse_definition)

    @cached_property
    def _gpus(self) -> tuple[tuple[GpuDefinition, ...], tuple[DefinitionProblem, ...]]:
        return self._parsed(GPU_DIRECTORY, parse_gpu_definition)

    def _parsed(
        self, directory: str, parse: _Parse[_Definition]
    ) -> tuple[tuple[_Definition, ...], tuple[DefinitionProblem, ...]]:
        """Parse the files of a directory; return definitions and invalid files."""
        found: list[_Definition] = []
        problems: list[DefinitionProblem] = []
        for file in self.files:
            if not file.path.startswith(f"{directory}/"):
                continue
            try:
                found.append(parse(file))
            except InvalidDocument as error:
                problems.append(DefinitionProblem(file.path, error.message))
        return tuple(found), tuple(problems)
