"""Layout: the desired state of a host, as a document.

A file contains layouts by name; a layout contains rules; a rule selects devices and says what state
they should have. A device belongs to the first rule that selects it; other devices are left alone.
Attribute docstrings are the descriptions of the JSON schema (`schema`).
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self

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
from pydantic_core import CoreSchema, core_schema

from vfiomgr.diagnostic import Override
from vfiomgr.expressions import expression
from vfiomgr.pci.capabilities import ResetMethod
from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.names import LAYOUT_CLASSES
from vfiomgr.units import parse_size
from vfiomgr.users.model import Monitor
from vfiomgr.value import Value
from vfiomgr.vgpu.steps import Strategy

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

_SIZE_PATTERN = r"^\s*[0-9]+[MGTmgt]([Ii]?[Bb])?\s*$"
_SIZE = expression(_SIZE_PATTERN)
_UUID = r"^{digit}{{8}}-{digit}{{4}}-{digit}{{4}}-{digit}{{4}}-{digit}{{12}}$"


class WrongValue(ValueError):  # noqa: N818 - said of a document
    """A value that the model rejects: what is wrong with it, and the remedy if there is one."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__("; ".join(filter(None, (what, remedy))))
        self.what, self.remedy = what, remedy


def refuse_value(what: str, remedy: str = "") -> NoReturn:
    """Reject a value; without `what`, the diagnostic only says that it is invalid.

    Raises:
        WrongValue: always.
    """
    raise WrongValue(what, remedy)


def is_hex(text: str) -> bool:
    """Whether all are hexadecimal digits as in sysfs."""
    return all(digit in "0123456789abcdef" for digit in text)


def _as_list(value: object) -> object:
    """A single value becomes a list of one."""
    if isinstance(value, list | tuple) and not isinstance(value, PciAddress):
        return tuple(value)
    return (value,)


def _as_mebibytes(value: object) -> object:
    """`6G`, `512M`, or a number of MiB; text has a unit."""
    if not isinstance(value, str):
        return value
    size = parse_size(value) if _SIZE.fullmatch(value) else None
    if size is not None:
        return size
    refuse_value("", "use a size such as 512M, 6G or a number of MiB")


def _as_text(value: object) -> object:
    """Numbers and booleans in parameters become text."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def _as_lower(value: object) -> object:
    """Hexadecimal digits may be upper case."""
    return value.lower() if isinstance(value, str) else value


def _as_class(value: object) -> object:
    """Class codes in lower case; names are unchanged."""
    return value.lower() if isinstance(value, str) and is_hex(value.lower()) else value


class _OneOrMany(Value):
    """A list, or a single value that becomes a list of one."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_list, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


ONE_OR_MANY = _OneOrMany()
"""The type for a field that is a tuple."""
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Names = Annotated[tuple[Text, ...], ONE_OR_MANY]
_Id = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9a-f]{4}:([0-9a-f]{4}|\*)$"),
    BeforeValidator(_as_lower),
    WithJsonSchema(
        {"type": "string", "pattern": r"^[0-9a-fA-F]{4}:([0-9a-fA-F]{4}|\*)$"}, mode="validation"
    ),
]
Ids = Annotated[tuple[_Id, ...], ONE_OR_MANY]
_Class = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9a-f]{2}){1,3}$|^[a-z]+$|^3d$"),
    BeforeValidator(_as_class),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": sorted(LAYOUT_CLASSES)},
                {"type": "string", "pattern": "^([0-9a-fA-F]{2}){1,3}$"},
            ]
        },
        mode="validation",
    ),
]
Classes = Annotated[tuple[_Class, ...], ONE_OR_MANY]
Addresses = Annotated[tuple[PciAddress, ...], ONE_OR_MANY]
Numbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], ONE_OR_MANY]
Mebibytes = Annotated[
    int,
    BeforeValidator(_as_mebibytes),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": _SIZE_PATTERN},
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
ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9-]+(\.[a-z0-9-]+)+/)?[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]$", max_length=63
    ),
]
Owner = Annotated[str, StringConstraints(pattern=r"^[^:\s]+(:[^:\s]+)?$", strip_whitespace=True)]


VERSION: Literal["vfiomgr/v1"] = "vfiomgr/v1"

UNKNOWABLE: frozenset[Override] = frozenset({"in-use"})
"""Overrides that depend on the moment: allowed on the command line, but not in a file."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Selector(_Document):
    """Selects the devices that meet all criteria; of several values, one must match."""

    address: Addresses = ()
    """PCI addresses, e.g. 0000:41:00.0. The console's display can only be selected this way."""
    id: Ids = ()
    """vendor:device in hexadecimal, e.g. 10de:2235, or 10de:* for all of a vendor."""
    classes: Classes = Field(default=(), alias="class")
    """The class: its first digits as a string, e.g. "0302", or a name, e.g. display."""
    name: Names = ()
    """The model name, with * and ?, case-insensitive: "*A40*"."""
    numa_node: Numbers = ()
    """The NUMA node of the device."""
    serial: Names = ()
    """The serial number in the vital product data."""
    physical_function: Addresses = ()
    """The virtual functions of these physical functions."""
    parent: Names = ()
    """Devices that create vGPUs and are not PCI functions, e.g. mtty."""
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
            if not value[0].isdecimal() and value not in LAYOUT_CLASSES and not is_hex(value):
                names = ", ".join(sorted(LAYOUT_CLASSES))
                refuse_value(
                    f"{value!r} is not a class", f"use its digits, e.g. '0302', or one of {names}"
                )
        return values

    @model_validator(mode="after")
    def _not_empty(self) -> Selector:
        if not self.criteria:
            refuse_value("a selector needs a criterion, e.g. address, id, class, or all")
        if self.parent and len(self.criteria) > 1:
            refuse_value(
                "parent cannot be combined: its devices have no PCI address, class or model",
                "remove parent, or all other criteria",
            )
        return self

    @property
    def criteria(self) -> tuple[str, ...]:
        """The names of the given criteria."""
        return tuple(name for name in type(self).model_fields if getattr(self, name))

    @property
    def class_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the class codes."""
        found = (LAYOUT_CLASSES.get(value, (value,)) for value in self.classes)
        return tuple(prefix for prefixes in found for prefix in prefixes)

    def fits_name(self, name: str) -> bool:
        """Whether a model name matches."""
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in self.name)

    def __str__(self) -> str:
        """`class 0302, numa_node 0`."""
        return ", ".join(map(self._criterion, self.criteria))

    def _criterion(self, name: str) -> str:
        values = getattr(self, name)
        if name == "all":
            return "all GPUs and accelerators"
        return f"{'class' if name == 'classes' else name} {' or '.join(map(str, values))}"


class _Rule(_Document):
    """Devices and the state that they should have."""

    select: Selector
    """The devices."""
    at_least: Annotated[int, Field(ge=0)] = 1
    """The number of devices that must be present, or nothing is done; 0 if there may be none."""
    allow: Annotated[tuple[Override, ...], ONE_OR_MANY] = ()
    """Safety checks to override for these devices."""

    @field_validator("allow")
    @classmethod
    def _not_in_use(cls, values: tuple[Override, ...]) -> tuple[Override, ...]:
        for value in UNKNOWABLE.intersection(values):
            refuse_value(
                f"a file cannot allow changes to devices in use: apply --allow {value}",
                f"remove it, and pass it when applying: --allow {value}",
            )
        return values


class HostRule(_Rule):
    """Undivided devices for the host: on their original drivers, without virtual functions."""

    state: Literal["host"]


class _OfferedRule(_Rule):
    """Devices that pods of Kubernetes can request."""

    resource: ResourceName | None = None
    """The extended resource: auto for one by model or type, NAME or DOMAIN/NAME."""
    consumer: Literal["default", "kata", "kubevirt", "container"] | None = None
    """Who receives the devices of the resource; by default Kata and containers, by CDI."""
    reset: bool | None = None
    """Whether devices of the resource are reset before each container."""

    @model_validator(mode="after")
    def _is_offered(self) -> Self:
        given = [name for name in ("consumer", "reset") if getattr(self, name) is not None]
        if given and self.resource is None:
            refuse_value(f"{given[0]} requires a resource", "add resource: auto, or remove the key")
        return self


class PassthroughRule(_OfferedRule):
    """Undivided devices for guests, each with the other functions of its slot."""

    state: Literal["passthrough"]
    driver: Text | None = None
    """A VFIO driver; by default the VFIO variant that fits the device best."""
    reset_method: ResetMethod | None = None
    """Reset the devices only by this method."""
    d3cold: Literal[False] | None = None
    """false keeps the devices out of D3cold."""
    owner: Owner | None = None
    """USER or USER:GROUP that may open their nodes besides root."""
    only: bool = False
    """Leave the other functions of the slot on their drivers."""
    with_group: bool = False
    """Include foreign members of the IOMMU groups."""


class OnDemandRule(_Rule):
    """Undivided devices of the host that ResourceClaims bind for a guest, and return."""

    state: Literal["on-demand"]
    driver: Text | None = None
    """A VFIO driver; by default the VFIO variant that fits the device best."""
    sticky: bool = False
    """Leave the devices on their VFIO drivers after a claim."""
    stop: Annotated[tuple[Monitor, ...], ONE_OR_MANY] = ()
    """Monitoring that may be stopped while a claim binds a device."""


class SriovRule(_OfferedRule):
    """Physical functions with virtual ones."""

    state: Literal["sriov"]
    count: Annotated[int, Field(ge=0)] | Literal["max"]
    """The number of virtual functions of each device."""
    vf_msix: Annotated[int, Field(ge=1, le=2048)] | None = None
    """The MSI-X vectors of each virtual function; by default those of the driver."""
    functions: Literal["any", "passthrough", "host"] = "any"
    """Who gets the virtual functions; any leaves that open."""
    driver: Text | None = None
    """With passthrough: a VFIO driver for the virtual functions."""
    owner: Owner | None = None
    """With passthrough: USER or USER:GROUP that may open their nodes besides root."""

    @model_validator(mode="after")
    def _belongs(self) -> SriovRule:
        keys = ("driver", "owner", "resource")
        given = [name for name in keys if getattr(self, name) is not None]
        if given and self.functions != "passthrough":
            refuse_value(
                f"{given[0]} requires functions: passthrough",
                "add functions: passthrough, or remove the key",
            )
        if self.vf_msix is not None and (self.functions == "host" or self.count == 0):
            refuse_value(
                "vf_msix requires virtual functions without a driver of the host",
                "remove the key, or use functions: passthrough and a count from 1",
            )
        return self


class VgpuRequest(_Document):
    """vGPUs of one kind: by type, or by requirements."""

    type: Text | None = None
    """By name (A40-4Q, NVIDIA A40-4Q) or identifier (nvidia-558, 1148)."""
    framebuffer: Mebibytes | None = None
    """Minimum amount of memory: 6G, 512M."""
    series: Annotated[str, StringConstraints(pattern="^[ABCQ]$")] | None = None
    """NVIDIA's series: A, B, C or Q."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Minimum number of displays."""
    count: Annotated[int, Field(ge=1)] | None = None
    """The number on all devices of the rule together, placed by its strategy."""
    per_gpu: Annotated[int, Field(ge=1)] | None = None
    """The number on each device of the rule."""
    uuids: tuple[Uuid, ...] = ()
    """Names for mediated devices; by default names that stay the same on this host."""
    parameters: dict[Text, Parameter] | None = None
    """The driver's parameters (vgpu_params), all of them; by default those of the driver."""

    @model_validator(mode="after")
    def _is_whole(self) -> VgpuRequest:
        need = (self.framebuffer, self.series, self.heads)
        if (self.type is None) is all(part is None for part in need):
            refuse_value(
                "give either type, or requirements: framebuffer, series, heads",
                "e.g. {type: A40-4Q, per_gpu: 4} or {framebuffer: 6G, per_gpu: 4}",
            )
        if (self.count is None) is (self.per_gpu is None):
            refuse_value(
                "give a number: either count (in total) or per_gpu (on each)",
                "e.g. {type: A40-4Q, per_gpu: 4}, or count: 8 for all together",
            )
        if self.uuids and self.count != len(self.uuids):
            refuse_value(
                f"{len(self.uuids)} uuids require a count of {len(self.uuids)}",
                "use that count, or that many uuids",
            )
        if len(set(self.uuids)) < len(self.uuids):
            refuse_value("two uuids are the same")
        return self

    def __str__(self) -> str:
        """`A40-4Q`, or `6144 MiB or more, series Q`."""
        if self.type is not None:
            return self.type
        parts = [f"{self.framebuffer} MiB or more"] if self.framebuffer is not None else []
        parts += [f"series {self.series}"] if self.series is not None else []
        parts += [f"{self.heads} heads or more"] if self.heads is not None else []
        return ", ".join(parts)


class VgpuRule(_OfferedRule):
    """GPUs that are divided into vGPUs, and the vGPUs."""

    state: Literal["vgpu"]
    vgpus: tuple[VgpuRequest, ...] = ()
    """The vGPUs; others that vfiomgr created there are removed."""
    strategy: Strategy = "pack"
    """Fill one GPU after the other, or distribute evenly."""
    heterogeneous: bool | None = None
    """Whether vGPUs of different sizes may share a GPU; by default unchanged."""
    mig: bool | None = None
    """Whether the GPUs are divided into GPU instances (MIG); by default unchanged."""
    functions: Annotated[int, Field(ge=1)] | None = None
    """The number of virtual functions; by default all that a GPU supports, or its present ones."""


Rule = Annotated[
    HostRule | PassthroughRule | OnDemandRule | SriovRule | VgpuRule, Field(discriminator="state")
]
WholeRule = PassthroughRule | OnDemandRule
"""Guests get the devices of these rules, each with the other functions of its slot."""


class Layout(_Document):
    """The desired state of a host."""

    description: str | None = None
    """A description for people."""
    devices: tuple[Rule, ...]
    """The rules; the first that selects a device has it."""

    @property
    def owners(self) -> tuple[str, ...]:
        """All owners of device nodes."""
        named = (r.owner for r in self.devices if isinstance(r, PassthroughRule | SriovRule))
        return tuple(dict.fromkeys(owner for owner in named if owner is not None))

    @property
    def selects_by_serial(self) -> bool:
        """Whether serial numbers must be read, which takes a while."""
        return any(rule.select.serial for rule in self.devices)

    @property
    def gives_to_guests(self) -> bool:
        """Whether only devices that an IOMMU isolates can meet the rule."""
        return any(isinstance(rule, WholeRule | VgpuRule) for rule in self.devices)

    @property
    def chooses_resets(self) -> bool:
        """Whether a rule names a reset method."""
        return any(isinstance(r, PassthroughRule) and r.reset_method for r in self.devices)

    @property
    def named_types(self) -> frozenset[str] | None:
        """The vGPU types that it names; None if some are chosen by requirements."""
        types = {request.type for request in self._vgpu_requests()}
        return None if None in types else frozenset(filter(None, types))

    @model_validator(mode="after")
    def _uuids_once(self) -> Layout:
        seen: set[str] = set()
        for uuid in (uuid for request in self._vgpu_requests() for uuid in request.uuids):
            if uuid in seen:
                refuse_value(f"two vGPUs are to have the UUID {uuid}")
            seen.add(uuid)
        return self

    def _vgpu_requests(self) -> Iterator[VgpuRequest]:
        for rule in self.devices:
            if isinstance(rule, VgpuRule):
                yield from rule.vgpus


class LayoutFile(_Document):
    """Layouts by name."""

    version: Literal["vfiomgr/v1"]
    """The version of this format."""
    layouts: Annotated[dict[Text, Layout], Field(min_length=1)]
    """Layouts by name; one of them is applied at a time."""
