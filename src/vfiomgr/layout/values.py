"""The value types of layout fields: how they are written and how they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema
from pydantic_core import core_schema

from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.names import LAYOUT_CLASSES
from vfiomgr.units import parse_size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

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
    """`6G`, `512M`, or a number of MiB."""
    if not isinstance(value, str):
        return value
    size = parse_size(value)
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
ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9-]+(\.[a-z0-9-]+)+/)?[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]$", max_length=63
    ),
]
Owner = Annotated[str, StringConstraints(pattern=r"^[^:\s]+(:[^:\s]+)?$", strip_whitespace=True)]
