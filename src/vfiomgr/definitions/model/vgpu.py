"""Definitions of mediated devices, in mdevctl's files: /etc/mdevctl.d/PARENT/UUID (mdevctl(8)).

Files of mdevctl are kept byte for byte until their content changes; then they are written in
mdevctl's format (serde_json's pretty form, no newline at the end), with all existing keys.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from vfiomgr.documents.parsed import parse_json
from vfiomgr.documents.text_file import TextFile
from vfiomgr.errors import InvalidDocument
from vfiomgr.paths import MDEV_DEVICES, HostPath
from vfiomgr.value import Value
from vfiomgr.vgpu.attributes import is_same_text

if TYPE_CHECKING:
    from collections.abc import Iterable


Start = Literal["auto", "manual"]
Attributes = tuple[tuple[str, str], ...]
"""Names relative to the device's directory, and values, in writing order; names may repeat."""

DIRECTORY = HostPath("/etc/mdevctl.d")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REMEDY = "correct the file, or remove it with: vfiomgr vgpu undefine"
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_SELF_DESTRUCTION = "remove"
"""The attribute that destroys a mediated device (mdev_device_remove)."""


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
    return DIRECTORY / parent / uuid


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
