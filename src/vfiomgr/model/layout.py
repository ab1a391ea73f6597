"""Layout: the wanted state of a host, as a document.

A file holds several layouts by name; a layout holds rules; a rule selects devices and says what
they are to be. The first rule that selects a device has it; devices that no rule selects are left
alone.
Attribute docstrings are the descriptions of the JSON schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from vfiomgr.model.intent import Allowance, Strategy
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.reset import ResetMethod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

VERSION: Literal["vfiomgr/v1"] = "vfiomgr/v1"
CLASS_NAMES = {
    "display": "03",
    "vga": "0300",
    "3d": "0302",
    "network": "02",
    "ethernet": "0200",
    "nvme": "0108",
    "storage": "01",
    "audio": "0403",
    "usb": "0c03",
    "accelerator": "12",
    "infiniband": "0207",
}
"""Names of classes, by the digits that their codes begin with (pci.ids)."""

UNKNOWABLE: frozenset[Allowance] = frozenset({"in-use"})
"""Guards that depend on the moment: the command line overrides them, and no file."""

_MEBIBYTES = {"M": 1, "G": 1024, "T": 1024 * 1024}
_UUID = r"^{digit}{{8}}-{digit}{{4}}-{digit}{{4}}-{digit}{{4}}-{digit}{{12}}$"
_SIZE = re.compile(r"([0-9]+)([MGT])(?:I?B)?")


def _as_list(value: object) -> object:
    """One value stands for a list of one."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,)


def _as_mebibytes(value: object) -> object:
    """`6G`, `512M`, or a number of MiB."""
    if not isinstance(value, str):
        return value
    size = _SIZE.fullmatch(value.strip().upper())
    if size:
        return int(size[1]) * _MEBIBYTES[size[2]]
    message = "write a size as 512M, 6G or a number of MiB"
    raise ValueError(message)


def _as_text(value: object) -> object:
    """Numbers and truth values in parameters are what their text is."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def _as_lower(value: object) -> object:
    """Hexadecimal digits may be written large."""
    return value.lower() if isinstance(value, str) else value


def _as_class(value: object) -> object:
    """As the above, and names stay as they are."""
    return value.lower() if isinstance(value, str) and _is_hex(value.lower()) else value


@dataclass(frozen=True, slots=True)
class _OneOrMany:
    """A list, or one value that stands for a list of one."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_list, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


_ONE_OR_MANY = _OneOrMany()
_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Names = Annotated[tuple[_Text, ...], _ONE_OR_MANY]
_Id = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9a-f]{4}:([0-9a-f]{4}|\*)$"),
    BeforeValidator(_as_lower),
    WithJsonSchema(
        {"type": "string", "pattern": r"^[0-9a-fA-F]{4}:([0-9a-fA-F]{4}|\*)$"}, mode="validation"
    ),
]
Ids = Annotated[tuple[_Id, ...], _ONE_OR_MANY]
_Class = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9a-f]{2}){1,3}$|^[a-z]+$|^3d$"),
    BeforeValidator(_as_class),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": sorted(CLASS_NAMES)},
                {"type": "string", "pattern": "^([0-9a-fA-F]{2}){1,3}$"},
            ]
        },
        mode="validation",
    ),
]
Classes = Annotated[tuple[_Class, ...], _ONE_OR_MANY]
Addresses = Annotated[tuple[PciAddress, ...], _ONE_OR_MANY]
Numbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], _ONE_OR_MANY]
Mebibytes = Annotated[
    int,
    BeforeValidator(_as_mebibytes),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+[MGTmgt]([Ii]?[Bb])?\s*$"},
            ]
        },
        mode="validation",
    ),
]
Parameter = Annotated[
    str,
    BeforeValidator(_as_text),
    WithJsonSchema({"type": ["string", "number", "boolean"]}, mode="validation"),
]
Uuid = Annotated[
    str,
    StringConstraints(pattern=_UUID.format(digit="[0-9a-f]")),
    BeforeValidator(_as_lower),
    WithJsonSchema(
        {"type": "string", "pattern": _UUID.format(digit="[0-9a-fA-F]")}, mode="validation"
    ),
]
Owner = Annotated[str, StringConstraints(pattern=r"^[^:\s]+(:[^:\s]+)?$", strip_whitespace=True)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Selector(_Document):
    """Which devices are meant: those that meet all criteria; of several values, one of them."""

    address: Addresses = ()
    """PCI addresses, e.g. 0000:41:00.0. Only so is the console's display selected."""
    id: Ids = ()
    """vendor:device in hexadecimal, e.g. 10de:2235, or 10de:* for all of a vendor."""
    classes: Classes = Field(default=(), alias="class")
    """The class: its first digits as a string, e.g. "0302", or a name, e.g. display."""
    name: Names = ()
    """The model, with * and ?, whatever the case: "*A40*"."""
    numa_node: Numbers = ()
    """The NUMA node that the device is at."""
    serial: Names = ()
    """The serial number in the vital product data."""
    physical_function: Addresses = ()
    """Virtual functions of these physical ones."""
    parent: Names = ()
    """Devices that make vGPUs and are no PCI functions, e.g. mtty."""
    all: Literal[True] | None = None
    """All GPUs and accelerators."""

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:  # noqa: ANN401 - as pydantic has it
        return {"all": True} if value == "all" else value

    @field_validator("classes", mode="after")
    @classmethod
    def _known_class(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not value[0].isdecimal() and value not in CLASS_NAMES and not _is_hex(value):
                names = ", ".join(sorted(CLASS_NAMES))
                message = f"{value!r} is no class: write its digits, e.g. '0302', or one of {names}"
                raise ValueError(message)
        return values

    @model_validator(mode="after")
    def _not_empty(self) -> Selector:
        if not self.criteria:
            message = "a selector needs a criterion, e.g. address, id, class, or all"
            raise ValueError(message)
        if self.parent and len(self.criteria) > 1:
            message = "parent stands alone: what it names has no PCI address, class or model"
            raise ValueError(message)
        return self

    @property
    def criteria(self) -> tuple[str, ...]:
        """The names of those that are given."""
        return tuple(name for name in type(self).model_fields if getattr(self, name))

    @property
    def class_prefixes(self) -> tuple[str, ...]:
        """What the codes of the classes begin with."""
        return tuple(CLASS_NAMES.get(value, value) for value in self.classes)

    def fits_name(self, name: str) -> bool:
        """Whether a model's name is meant."""
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in self.name)

    def __str__(self) -> str:
        """`class 0302, numa_node 0`."""
        return ", ".join(_criterion(name, getattr(self, name)) for name in self.criteria)


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in text)


def _criterion(name: str, value: object) -> str:
    if not isinstance(value, tuple):
        return "all GPUs and accelerators"
    label = name.removesuffix("es") if name == "classes" else name
    return f"{label} {' or '.join(map(str, value))}"


class _Rule(_Document):
    """Devices and what they are to be."""

    select: Selector
    """Which devices."""
    at_least: Annotated[int, Field(ge=0)] = 1
    """So many devices must be there, or nothing is done. 0 where there may be none."""
    allow: Annotated[tuple[Allowance, ...], _ONE_OR_MANY] = ()
    """Guards to override for these devices."""

    @field_validator("allow")
    @classmethod
    def _not_in_use(cls, values: tuple[Allowance, ...]) -> tuple[Allowance, ...]:
        for value in UNKNOWABLE.intersection(values):
            message = f"a file cannot know that a device in use may be taken: apply --allow {value}"
            raise ValueError(message)
        return values


class HostRule(_Rule):
    """Whole devices for the host: on the drivers that they had, without virtual functions."""

    state: Literal["host"]


class PassthroughRule(_Rule):
    """Whole devices for guests, each with the other functions of its slot."""

    state: Literal["passthrough"]
    driver: _Text | None = None
    """A VFIO driver; else the variant of VFIO that fits the device best."""
    reset_method: ResetMethod | None = None
    """Reset the devices by this method alone."""
    d3cold: Literal[False] | None = None
    """false keeps the devices out of D3cold."""
    owner: Owner | None = None
    """USER or USER:GROUP that may open their nodes besides root."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    with_group: bool = False
    """Take foreign members of the IOMMU groups too."""


class SriovRule(_Rule):
    """Physical functions with virtual ones."""

    state: Literal["sriov"]
    count: Annotated[int, Field(ge=0)] | Literal["max"]
    """How many virtual functions each has."""
    functions: Literal["any", "passthrough", "host"] = "any"
    """Who has the virtual functions; with any, that is left to others."""
    driver: _Text | None = None
    """With passthrough: a VFIO driver for the virtual functions."""
    owner: Owner | None = None
    """With passthrough: USER or USER:GROUP that may open their nodes besides root."""

    @model_validator(mode="after")
    def _belongs(self) -> SriovRule:
        given = [name for name in ("driver", "owner") if getattr(self, name) is not None]
        if given and self.functions != "passthrough":
            message = f"{given[0]} is about functions that go to guests: functions: passthrough"
            raise ValueError(message)
        return self


class VgpuWish(_Document):
    """vGPUs of one kind: by their type, or by what is needed."""

    type: _Text | None = None
    """By name (A40-4Q, NVIDIA A40-4Q) or identifier (nvidia-558, 1148)."""
    framebuffer: Mebibytes | None = None
    """So much memory or more: 6G, 512M."""
    series: Annotated[str, StringConstraints(pattern="^[ABCQ]$")] | None = None
    """NVIDIA's letter: A, B, C or Q."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """So many displays or more."""
    count: Annotated[int, Field(ge=1)] | None = None
    """So many on all devices of the rule together, placed by its strategy."""
    per_gpu: Annotated[int, Field(ge=1)] | None = None
    """So many on each device of the rule."""
    uuids: tuple[Uuid, ...] = ()
    """Names for mediated devices; else names that stay the same on this host."""
    parameters: dict[_Text, Parameter] | None = None
    """The driver's parameters (vgpu_params), all of them; else as the driver sets them."""

    @model_validator(mode="after")
    def _is_whole(self) -> VgpuWish:
        need = (self.framebuffer, self.series, self.heads)
        if (self.type is None) is all(part is None for part in need):
            message = "say either type, or what is needed: framebuffer, series, heads"
            raise ValueError(message)
        if (self.count is None) is (self.per_gpu is None):
            message = "say how many: either count (in all) or per_gpu (on each)"
            raise ValueError(message)
        if self.uuids and self.count != len(self.uuids):
            message = f"{len(self.uuids)} uuids need a count of {len(self.uuids)}"
            raise ValueError(message)
        if len(set(self.uuids)) < len(self.uuids):
            message = "two uuids are the same"
            raise ValueError(message)
        return self

    def __str__(self) -> str:
        """`A40-4Q`, or `6144 MiB or more, series Q`."""
        if self.type is not None:
            return self.type
        parts = [f"{self.framebuffer} MiB or more"] if self.framebuffer is not None else []
        parts += [f"series {self.series}"] if self.series is not None else []
        parts += [f"{self.heads} heads or more"] if self.heads is not None else []
        return ", ".join(parts)


class VgpuRule(_Rule):
    """GPUs that are divided into vGPUs, and which."""

    state: Literal["vgpu"]
    vgpus: tuple[VgpuWish, ...] = ()
    """The vGPUs; others that vfiomgr made there are removed."""
    strategy: Strategy = "pack"
    """Fill one GPU after the other, or give each the same number."""
    heterogeneous: bool | None = None
    """Whether vGPUs of different sizes share a GPU; else as it is."""
    mig: bool | None = None
    """Whether the GPUs are divided into GPU instances (MIG); else as it is."""
    functions: Annotated[int, Field(ge=1)] | None = None
    """So many virtual functions; else all that a GPU makes, or as many as it has."""


Rule = Annotated[HostRule | PassthroughRule | SriovRule | VgpuRule, Field(discriminator="state")]


class Layout(_Document):
    """What a host is to be."""

    description: str | None = None
    """For people."""
    devices: tuple[Rule, ...]
    """The rules; the first that selects a device has it."""

    @property
    def owners(self) -> tuple[str, ...]:
        """All that are to have nodes of devices."""
        named = (getattr(rule, "owner", None) for rule in self.devices)
        return tuple(dict.fromkeys(owner for owner in named if owner is not None))

    @property
    def selects_by_serial(self) -> bool:
        """Whether serial numbers have to be read, which takes a while."""
        return any(rule.select.serial for rule in self.devices)

    @model_validator(mode="after")
    def _uuids_once(self) -> Layout:
        seen: set[str] = set()
        for uuid in self._uuids():
            if uuid in seen:
                message = f"two vGPUs are to have the UUID {uuid}"
                raise ValueError(message)
            seen.add(uuid)
        return self

    def _uuids(self) -> Iterator[str]:
        for rule in self.devices:
            if isinstance(rule, VgpuRule):
                for wish in rule.vgpus:
                    yield from wish.uuids


class LayoutFile(_Document):
    """Layouts by name."""

    version: Literal["vfiomgr/v1"]
    """The version of this format."""
    layouts: Annotated[dict[_Text, Layout], Field(min_length=1)]
    """Layouts by name; one of them is applied at a time."""
