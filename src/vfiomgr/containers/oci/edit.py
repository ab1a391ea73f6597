"""Add devices to an OCI configuration, and remove exactly what was added.

https://github.com/opencontainers/runtime-spec config.md and config-linux.md. Nothing else changes:
values are edited here, and unchanged parts keep their text (documents.json_text).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from vfiomgr.containers.oci.nodes import RULE_ACCESS, DeviceNode, Injection
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.json_text import JsonDocument, Verbatim
from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.host.owners import NodeAccess
from vfiomgr.value import Value

CDI_ANNOTATION = "cdi.k8s.io/vfiomgr"
_DEVICES = ("linux", "devices")
_RULES = ("linux", "resources", "devices")
_ANNOTATIONS = ("annotations",)
_KNOWN = ("ociVersion", "process", "root", "linux", "mounts", "annotations")
_NOT_OCI = "name the config.json of an OCI bundle; runc spec creates one"
_CHANGED = "was changed since it was added, and stays"
_CHARACTER = ("c", "u")
"""Character devices, buffered and unbuffered: Linux treats them alike."""
_SHAPE = "let the runtime write it again; see config-linux.md of the OCI runtime specification"


RECORD = "io.vfiomgr.injected"
"""The annotation; runtimes ignore unknown ones (config.md, "Annotations")."""
_VERSION = 1
Number = tuple[int, int]


class RecordedDevice(Value):
    """An added device; its nodes may have existed before."""

    functions: tuple[str, ...]
    nodes: tuple[str, ...]
    cdi: tuple[str, ...]


class Record(Struct, forbid_unknown_fields=True):
    """Everything that was added, and the values that its lists replaced."""

    version: int = _VERSION
    devices: dict[str, RecordedDevice] = field(default_factory=dict)
    nodes: dict[str, tuple[int, int, int, int, int]] = field(default_factory=dict)
    """By path: the added entries of `linux.devices`, with numbers, mode and owner."""
    rules: dict[str, Number] = field(default_factory=dict)
    """By path: the added rules of `linux.resources.devices`."""
    made: dict[str, str | None] = field(default_factory=dict)
    """By key path, joined by dots: the original text, None if there was none."""
    stood: list[str] = field(default_factory=list)
    """CDI names of devices that another program requested before."""

    def named(self, text: str) -> str | None:
        """The device with a name, or with a function of that name."""
        wanted = text.lower()
        for name, device in self.devices.items():
            known = (name, *device.functions)
            if wanted in known or f"0000:{wanted}" in known:
                return name
        return None


class Edit(Value):
    """A configuration before and after, and the added and removed devices."""

    before: JsonDocument
    after: JsonDocument
    added: tuple[Injection, ...] = ()
    already: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """Added parts that were changed since: they stay."""

    @property
    def is_changed(self) -> bool:
        """Whether there is a change to write."""
        return self.after.text != self.before.text


def inject(document: JsonDocument, injections: Iterable[Injection]) -> Edit:
    """Add devices to a configuration; a device with outdated numbers is added again.

    Raises:
        InvalidDocument: it is not an OCI configuration.
        Refusal: another program added one of the nodes with other numbers.
    """
    editor = _Editor(document)
    added, already = [], []
    for injection in injections:
        if editor.has(injection):
            already.append(injection.device.name)
            continue
        editor.take_out(injection.device.name)
        editor.put_in(injection)
        added.append(injection)
    editor.write_record()
    return Edit(document, editor.edited(), tuple(added), tuple(already), left=tuple(editor.left))


def eject(document: JsonDocument, names: Iterable[str] | None) -> Edit:
    """Remove added devices, by the name of any of their functions; None for all.

    Raises:
        InvalidDocument: it is not an OCI configuration.
    """
    editor = _Editor(document)
    removed: dict[str, None] = {}
    absent = []
    for text in names if names is not None else tuple(editor.record.devices):
        name = editor.record.named(text)
        if name is not None:
            editor.take_out(name)
            removed[name] = None
        elif text not in removed:
            absent.append(text)
    editor.write_record()
    return Edit(
        document,
        editor.edited(),
        removed=tuple(removed),
        absent=tuple(absent),
        left=tuple(editor.left),
    )


class _Editor:
    """Changes the values of a document step by step, and records what it added."""

    def __init__(self, document: JsonDocument) -> None:
        _check(document)
        self._before = document
        self._values: dict[str, Any] = copy.deepcopy(document.root.value)
        self.record = _record_of(document)
        self.left: list[str] = []
        self._cdi = {name for device in self.record.devices.values() for name in device.cdi}

    def edited(self) -> JsonDocument:
        """The changed document."""
        return self._before.with_value(self._values)

    def has(self, injection: Injection) -> bool:
        """Whether the device is already present with its current numbers."""
        known = self.record.devices.get(injection.device.name)
        return known == _recorded(injection) and all(
            self._has_node(node) and _is_allowed(self._get(_RULES, ()), node.number)
            for node in injection.nodes
        )

    def _has_node(self, node: DeviceNode) -> bool:
        """Compare nodes without mode and owner, which other programs may set differently."""
        entries = self._entries(node.path)
        if node.path in self.record.nodes:
            return bool(entries) and all(entry == _entry(node) for entry in entries)
        return bool(entries) and all(_is_node(entry, node) for entry in entries)

    def _entries(self, path: str) -> list[Mapping[str, Any]]:
        return [entry for entry in self._get(_DEVICES, ()) if entry["path"] == path]

    def put_in(self, injection: Injection) -> None:
        """Add the missing parts of a device."""
        for node in injection.nodes:
            self._put_node(node)
            if self.record.rules.get(node.path, node.number) != node.number:
                self._drop_rule(node.path)
            if not _is_allowed(self._get(_RULES, ()), node.number):
                self._append(_RULES, _rule(node.number))
                self.record.rules[node.path] = node.number
        self.record.devices[injection.device.name] = _recorded(injection)
        present = self._names_of_cdi()
        stood = [name for name in injection.cdi if name in present and name not in self._cdi]
        self.record.stood = [*dict.fromkeys([*self.record.stood, *stood])]

    def _put_node(self, node: DeviceNode) -> None:
        if self.record.nodes.get(node.path, _packed(node)) != _packed(node):
            self._drop_node(node.path)
        entries = self._entries(node.path)
        if node.path in self.record.nodes and any(entry != _entry(node) for entry in entries):
            self.left.append(f"device {node.path} {_CHANGED}")
            del self.record.nodes[node.path]
        for entry in entries:
            _refuse_other(self._before.source, entry, node)
        if not entries:
            self._append(_DEVICES, _entry(node))
            self.record.nodes[node.path] = _packed(node)

    def take_out(self, name: str) -> None:
        """Remove the parts of a device that no other device needs."""
        device = self.record.devices.pop(name, None)
        if device is None:
            return
        needed = {node for other in self.record.devices.values() for node in other.nodes}
        for path in device.nodes:
            if path not in needed:
                self._drop_node(path)
                self._drop_rule(path)

    def _drop_node(self, path: str) -> None:
        packed = self.record.nodes.pop(path, None)
        if packed is not None:
            self._drop(_DEVICES, _entry(_unpacked(path, packed)), f"device {path}")

    def _drop_rule(self, path: str) -> None:
        number = self.record.rules.pop(path, None)
        if number is not None:
            self._drop(_RULES, _rule(number), f"cgroup rule of {path}")

    def write_record(self) -> None:
        """Update the annotations, and restore the original values if nothing is left."""
        self._write_cdi()
        if self.record.devices:
            self._ensure(_ANNOTATIONS, {})
            text = json.dumps(to_jsonable(self.record), separators=(",", ":"))
            self._annotate(RECORD, text)
        else:
            self._annotate(RECORD, None)
        deepest_first = sorted(self.record.made, key=lambda path: path.count("."), reverse=True)
        for path in deepest_first:
            self._restore(path)

    def _write_cdi(self) -> None:
        now = [name for device in self.record.devices.values() for name in device.cdi]
        mine = self._cdi.difference(self.record.stood)
        foreign = [name for name in self._names_of_cdi() if name not in mine]
        names = list(dict.fromkeys([*foreign, *now]))
        self.record.stood = [name for name in self.record.stood if name in now]
        if names:
            self._ensure(_ANNOTATIONS, {})
        if now or self._cdi:
            self._annotate(CDI_ANNOTATION, ",".join(names) or None)

    def _names_of_cdi(self) -> list[str]:
        present = self._get(_ANNOTATIONS, {}).get(CDI_ANNOTATION, "")
        return [name for name in present.split(",") if name]

    def _annotate(self, key: str, value: str | None) -> None:
        present = self._get(_ANNOTATIONS, {})
        if value is None:
            present.pop(key, None)
        else:
            present[key] = value

    def _restore(self, path: str) -> None:
        """Restore the value that an empty list or object replaced."""
        *above, key = path.split(".")
        parent = self._get(above)
        if not isinstance(parent, dict) or parent.get(key, 1) or self.record.devices:
            return
        text = self.record.made[path]
        if text is None:
            del parent[key]
        else:
            parent[key] = Verbatim(text)

    def _get(self, path: Iterable[str], otherwise: Any = None) -> Any:  # noqa: ANN401 - JSON
        found: Any = self._values
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return otherwise if found is None else found

    def _append(self, path: tuple[str, ...], value: object) -> None:
        for depth in range(1, len(path)):
            self._ensure(path[:depth], {})
        self._ensure(path, [])
        self._get(path).append(value)

    def _ensure(self, path: tuple[str, ...], empty: object) -> None:
        """Create a list or object at a path, and record the value that it replaces."""
        parent, key, name = self._get(path[:-1]), path[-1], ".".join(path)
        if not parent.get(key) and name not in self.record.made:
            text = self._text(path, parent[key]) if key in parent else None
            self.record.made[name] = text
        if parent.get(key) is None:
            parent[key] = empty

    def _text(self, path: tuple[str, ...], value: object) -> str:
        """The text of a value, as in the original text if it is there."""
        part = self._before.root.at(path)
        is_old = part is not None and part.value == value
        return self._before.text_of(part) if part is not None and is_old else json.dumps(value)

    def _drop(self, path: tuple[str, ...], entry: dict[str, object], what: str) -> None:
        """Remove the last equal entry of a list."""
        entries = self._get(path, [])
        found = [number for number, present in enumerate(entries) if present == entry]
        if found:
            del entries[found[-1]]
        else:
            self.left.append(f"{what} {_CHANGED}")


def _record_of(document: JsonDocument) -> Record:
    node = document.root.at((*_ANNOTATIONS, RECORD))
    if node is None:
        return Record()
    try:
        body = parse_json(node.value)
        if not isinstance(body, dict) or body.get("version") != _VERSION:
            message = "it is of another version"
            raise ValueError(message)
        return from_jsonable(Record, body)
    except ValueError as error:
        what = f"annotation {RECORD} is not what vfiomgr wrote ({error})"
        document.fail(node, what, "remove it, with the devices that it lists")


def _recorded(injection: Injection) -> RecordedDevice:
    device = injection.device
    return RecordedDevice(device.functions, device.nodes, injection.cdi)


def _packed(node: DeviceNode) -> tuple[int, int, int, int, int]:
    """A node as the record has it, without its path."""
    return node.major, node.minor, node.access.mode, node.access.uid, node.access.gid


def _unpacked(path: str, packed: tuple[int, int, int, int, int]) -> DeviceNode:
    major, minor, mode, uid, gid = packed
    return DeviceNode(path, major, minor, NodeAccess(uid, gid, mode))


def _entry(node: DeviceNode) -> dict[str, object]:
    """An entry of `linux.devices`; fileMode is a number, not octal text."""
    return {
        "path": node.path,
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "fileMode": node.access.mode,
        "uid": node.access.uid,
        "gid": node.access.gid,
    }


def _rule(number: Number) -> dict[str, object]:
    major, minor = number
    return {"allow": True, "type": "c", "major": major, "minor": minor, "access": RULE_ACCESS}


def _number(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("major"), entry.get("minor")


def _is_node(entry: Mapping[str, Any], node: DeviceNode) -> bool:
    """Whether an entry creates this node, whatever its mode and owner."""
    return entry.get("type") in _CHARACTER and _number(entry) == node.number


def _is_allowed(rules: Iterable[Mapping[str, Any]], number: Number) -> bool:
    """Whether rules let a container read, write and create a node: the last matching rule applies.

    A missing number, or -1, matches all (config-linux.md, "Allowed Device list").
    """
    allowed: set[str] = set()
    for rule in rules:
        is_about = rule.get("type") in (None, "", "a", "c") and all(
            wanted in (None, -1, own) for wanted, own in zip(_number(rule), number, strict=True)
        )
        access = set(rule.get("access") or RULE_ACCESS) if is_about else set()
        allowed = allowed | access if rule.get("allow") else allowed - access
    return allowed.issuperset(RULE_ACCESS)


def _refuse_other(source: str, entry: Mapping[str, Any], node: DeviceNode) -> None:
    """Refuse to change a node that another program added."""
    if not _is_node(entry, node):
        major, minor = _number(entry)
        is_character = entry.get("type") in _CHARACTER
        kind = "" if is_character else f"{entry.get('type') or 'no type'} "
        message = (
            f"{source} already has {node.path} as {kind}{major}:{minor}, which vfiomgr did not "
            f"add, but on this host it is {'' if is_character else 'c '}{node.major}:{node.minor}"
        )
        refuse(
            "oci-node-taken",
            source,
            message,
            "remove it from linux.devices, then run the command again",
        )


def _check(document: JsonDocument) -> None:
    """Make sure that the relevant parts have the specified types."""
    root = document.root
    if not any(root.child(key) for key in _KNOWN):
        what = f"not an OCI configuration: it has none of {', '.join(_KNOWN)}"
        document.fail(root, what, _NOT_OCI)
    for path, kind in (
        (_DEVICES[:1], dict),
        (_DEVICES, list),
        (_RULES[:2], dict),
        (_RULES, list),
        (_ANNOTATIONS, dict),
    ):
        node = root.at(path)
        if node is not None and not isinstance(node.value, kind | None):
            called = "an object" if kind is dict else "a list"
            document.fail(node, f"{'.'.join(path)} is not {called}", _SHAPE)
    _check_parts(document)


_NUMBER = int | None
_MEMBERS = (
    ("access", str | None, "not a string"),
    ("type", str | None, "not a string"),
    ("allow", bool | None, "neither true nor false"),
    ("major", _NUMBER, "not a number"),
    ("minor", _NUMBER, "not a number"),
)
"""For devices and rules that have them (config-linux.md)."""


def _check_parts(document: JsonDocument) -> None:
    for path in (_DEVICES, _RULES):
        node = document.root.at(path)
        for number, item in enumerate((node and node.items) or ()):
            name = f"{'.'.join(path)}[{number}]"
            if not isinstance(item.value, dict):
                document.fail(item, f"{name} is not an object", _SHAPE)
            if path == _DEVICES and not isinstance(item.value.get("path"), str):
                document.fail(item, f"{name} has no path", _SHAPE)
            for key, kinds, called in _MEMBERS:
                if not isinstance(value := item.value.get(key), kinds) or (
                    kinds is _NUMBER and isinstance(value, bool)
                ):
                    document.fail(item, f"the {key} of {name} is {called}", _SHAPE)
    annotations = document.root.at(_ANNOTATIONS)
    for key, value in ((annotations and annotations.members) or {}).items():
        if not isinstance(value.scalar, str):
            document.fail(value, f"annotation {key} is not a string", _SHAPE)
