"""Definitions of mediated devices, in mdevctl's files: /etc/mdevctl.d/PARENT/UUID (mdevctl(8)).

What mdevctl wrote stays as it is to the byte, until something in it changes; then it is written as
mdevctl writes (serde_json's pretty form, no newline at the end), with all keys that it had.
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
"""Names, relative to the device's directory, and texts, in the order of writing; any may recur."""

DIRECTORY = HostPath("/etc/mdevctl.d")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REMEDY = "mend the file, or remove it with vfiomgr vgpu undefine"
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_SELF_DESTRUCTION = "remove"
"""The attribute that destroys a mediated device (mdev_device_remove)."""


class VgpuDefinition(Value):
    """A mediated device that is to be, whether it is there now or not."""

    parent: str
    uuid: str
    type_id: str
    autostart: bool = False
    attributes: Attributes = ()
    text: str | None = None
    """The file that it was read from."""

    def __eq__(self, other: object) -> bool:
        """Whatever files they were read from."""
        return isinstance(other, VgpuDefinition) and self._compared() == other._compared()

    def __hash__(self) -> int:
        """As equality is."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return (self.parent, self.uuid, self.type_id, self.autostart, self.attributes)

    @property
    def path(self) -> HostPath:
        """Its file."""
        return definition_file(self.parent, self.uuid)

    @property
    def start(self) -> Start:
        """Whether it starts by itself, in mdevctl's words."""
        return "auto" if self.autostart else "manual"

    @property
    def directory(self) -> HostPath:
        """Where its attributes are while it is active."""
        return MDEV_DEVICES / self.uuid

    def __str__(self) -> str:
        """`vGPU f715f63c-… (mtty-2 on mtty)`."""
        return f"vGPU {self.uuid} ({self.type_id} on {self.parent})"


def definition_file(parent: str, uuid: str) -> HostPath:
    """The file of a definition; one UUID may be defined on several parents."""
    return DIRECTORY / parent / uuid


def parse_definition(file: TextFile) -> VgpuDefinition:
    """Read a file of mdevctl, or one that mdevctl would read.

    Raises:
        InvalidDocument: why it is none.

    """
    path = HostPath(file.path)
    if not _UUID.fullmatch(path.name):
        _reject("its name is no UUID in lower case, so that mdevctl would not find it")
    read = read_configuration(file.text)
    attributes = read.attributes
    return VgpuDefinition(
        path.parent.name, path.name, read.type_id, read.autostart, attributes, file.text
    )


class Configuration(Value):
    """What a file of mdevctl says; parent and UUID are in its path alone."""

    type_id: str
    autostart: bool
    attributes: Attributes


def read_configuration(text: str, *, is_input: bool = False) -> Configuration:
    """Read the text of a definition; of an input document unknown keys are refused.

    Raises:
        InvalidDocument: no JSON, or not what mdevctl would read.

    """
    document = _document(text)
    unknown = sorted(set(document) - {"mdev_type", "start", "attrs"})
    if is_input and unknown:
        _reject(f"unknown keys: {', '.join(unknown)}")
    type_id, start = document.get("mdev_type"), document.get("start")
    if not isinstance(type_id, str) or not is_name(type_id):
        _reject(f"mdev_type is {type_id!r}, and no name of a type")
    if start not in ("auto", "manual"):
        _reject(f"start is {start!r}, neither auto nor manual")
    attributes = document.get("attrs")
    if not isinstance(attributes, list | None):
        _reject("attrs is no list")
    return Configuration(type_id, start == "auto", tuple(map(_attribute, attributes or [])))


def render_definition(definition: VgpuDefinition) -> str:
    """The file of a definition; the old text where that says the same."""
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
    """Whether a text can be the name of a file: of a type, a parent."""
    return text not in ("", ".", "..") and not set("/\0\n") & set(text)


def check_attribute(name: str) -> str | None:
    """Why a name is none of an attribute of a device; None where it is."""
    if not all(map(is_name, name.split("/"))):
        return f"{name!r} is no path below the directory of the device"
    if name == _SELF_DESTRUCTION:
        return f"{name!r} would remove the device"
    return None


def differing(attributes: Attributes, found: Iterable[tuple[str, str]]) -> Attributes:
    """The attributes that read otherwise than they were written last; unreadable ones are none."""
    present = dict(found)
    return tuple(
        (name, text)
        for name, text in dict(attributes).items()
        if name in present and not is_same_text(text, present[name])
    )


def _document(text: str) -> dict[str, Any]:

    if _UNDECODED in text:
        _reject("it is no UTF-8 text")
    try:
        document = parse_json(text)
    except ValueError as error:
        _reject(f"no JSON: {error}" if text.strip() else "it is empty")
    if not isinstance(document, dict):
        _reject("no JSON object")
    return document


def _attribute(entry: object) -> tuple[str, str]:
    """One attribute: an object with a single member (MDev::add_attributes in mdevctl)."""
    if not isinstance(entry, dict) or len(entry) != 1:
        _reject(f"{entry!r} in attrs is no object of one name and its text")
    (name, text), *_ = entry.items()
    if not isinstance(text, str):
        _reject(f"the attribute {name!r} is {text!r}, and no text")
    why = check_attribute(name)
    if why is not None:
        _reject(f"the attribute {why}")
    return name, text


def _reject(reason: str) -> NoReturn:
    raise InvalidDocument(reason, _REMEDY) from None
