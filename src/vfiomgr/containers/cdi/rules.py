"""What the library of a consumer refuses in one file, in the order of its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.grammar import (
    ACCEPTS_DOT_IN_CLASS,
    ACCEPTS_NO_PERMISSIONS,
    ACCEPTS_NODE_TYPES,
    ACCEPTS_ROOT_CLOS,
    ACCEPTS_V,
    CHECKS_ANNOTATIONS,
    CHECKS_NET_DEVICES,
    CHECKS_RDT,
    COMPARES_STATED_VERSION,
    COUNTS_DISABLED_MONITORING,
    FIRST,
    KEYS,
    MINDS_CASE,
    PANICS_AT_ONE_LETTER,
    REFUSES_EMPTY_EDITS,
    REFUSES_KEYS_OF_LATER_VERSIONS_THAN_STATED,
    REFUSES_KEYS_REMOVED_BEFORE_STATED_VERSION,
    REFUSES_NO_DEVICES,
    REFUSES_REMOVED_KEYS,
    REFUSES_SECOND_DOCUMENT,
    REFUSES_UNKNOWN_KEYS,
    REQUIRES_KEY_OF_DEVICES,
    is_annotation_key,
    is_device_name,
    is_part,
    key_at,
    needs,
    version_of,
)
from vfiomgr.containers.cdi.model import fault
from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.text import shown_path
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.containers.cdi.grammar import Consumer, Key
    from vfiomgr.containers.cdi.model import (
        CdiDeviceNode,
        CdiHook,
        CdiIntelRdt,
        CdiNetDevice,
        CdiOddity,
        CdiSpecification,
    )
    from vfiomgr.documents.text import Path

    Rule = Callable[[CdiSpecification, Consumer], Iterator[Diagnostic]]
    Distinction = Callable[[Consumer], tuple[object, ...]]
    """What a rule asks of a consumer: those for which it is equal are alike."""

Known = dict[tuple[object, tuple[object, ...]], tuple[Diagnostic, ...]]
"""What was found in a specification, by the rule and what it asks of a consumer."""
_V_1_0, _V_1_1 = Version(1, 0), Version(1, 1)
_ASKED_OF_EDITS = (
    ACCEPTS_NODE_TYPES,
    ACCEPTS_NO_PERMISSIONS,
    ACCEPTS_ROOT_CLOS,
    CHECKS_RDT,
    CHECKS_NET_DEVICES,
)
_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_NODE_TYPES = ("", "b", "c", "u", "p")
_LONGEST_CLOS = 4096
_MOST_ANNOTATIONS = 256 * 1024
"""The size limit for all annotations together (TotalAnnotationSizeLimitB)."""
_OF_SOME_VERSIONS = frozenset(
    name
    for keys in KEYS.values()
    for name, key in keys.items()
    if key.until is not None or key.since > FIRST
)
"""The names of keys that were added after the first version, or removed."""
_EDITS = 3
"""Length of the path of a device's edits: devices, a number, containerEdits."""
_LETTERS = "letters, digits, and . - _ between them"


def faults(
    specification: CdiSpecification, consumer: Consumer, known: Known | None = None
) -> tuple[Diagnostic, ...]:
    """All reasons for which a consumer refuses a file; it stops at the first.

    `known` keeps what was found in this specification for consumers that are alike.
    """
    known = {} if known is None else known
    found: dict[Diagnostic, None] = {}
    for rule, distinction in _RULES[:1] if _is_no_mapping(specification) else _RULES:
        asked = (rule, distinction(consumer))
        if asked not in known:
            known[asked] = tuple(rule(specification, consumer))
        found.update(dict.fromkeys(known[asked]))
    return tuple(found)


def _is_no_mapping(spec: CdiSpecification) -> bool:
    return not spec.lines and any(oddity.path == () for oddity in spec.oddities)


def _text(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    """Content that values cannot hold: yaml.UnmarshalStrict, which ignores case, and serde_yaml."""
    for oddity in spec.oddities:
        if oddity.found.rule == "document-second" and not consumer.has(REFUSES_SECOND_DOCUMENT):
            continue
        if oddity.found.rule == "key-case" and not _minds_case(oddity, consumer):
            continue
        if oddity.found.rule == "key-unknown" and not consumer.has(REFUSES_UNKNOWN_KEYS):
            continue
        is_about_devices = (oddity.found.rule, oddity.path) == ("key-missing", ("devices",))
        if is_about_devices and not consumer.has(REQUIRES_KEY_OF_DEVICES):
            continue
        yield oddity.found


def _minds_case(oddity: CdiOddity, consumer: Consumer) -> bool:
    """Whether a key in another case is refused: as unknown, or as a missing required key."""
    if not consumer.has(MINDS_CASE) or consumer.has(REFUSES_UNKNOWN_KEYS):
        return consumer.has(MINDS_CASE)
    written = str(oddity.path[-1]).lower()
    meant = {name for keys in KEYS.values() for name in keys if name.lower() == written}
    keys = (key_at((*oddity.path[:-1], name)) for name in meant)
    return any(key is not None and key.needed for key in keys)


def _keys_in(spec: CdiSpecification) -> Iterator[tuple[Path, int, Key]]:
    """The keys of a file that not all versions of CDI have, with their paths and lines."""
    for path, line in spec.lines.items():
        if path[-1] in _OF_SOME_VERSIONS and (key := key_at(path)) is not None:
            yield path, line, key


def _known_keys(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    if not consumer.has(REFUSES_UNKNOWN_KEYS):
        return
    for path, line, key in _keys_in(spec):
        if consumer.has(REFUSES_REMOVED_KEYS):
            yield from _removed(path, line, key, consumer.library)
        if key.since > consumer.library:
            what = f"{shown_path(path)} needs CDI {_short(key.since)}"
            remedy = f"remove it, or use only consumers with CDI {_short(key.since)}"
            yield fault("key-newer", line, what, remedy)


def _removed(path: Path, line: int, key: Key, version: Version) -> Iterator[Diagnostic]:
    if key.until is not None and version >= key.until:
        what = f"{shown_path(path)} was removed in CDI {_short(key.until)}"
        yield fault("key-gone", line, what, "remove it")


def _version(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    line = spec.line(("cdiVersion",))
    if ("cdiVersion",) not in spec.lines:
        return  # told as a key that is missing
    stated = version_of(spec.version)
    has_v = spec.version.startswith("v")
    if stated is None or (has_v and not consumer.has(ACCEPTS_V)):
        what = f"invalid cdiVersion: {spec.version!r}"
        yield fault("version-unknown", line, what, 'write e.g. cdiVersion: "0.5.0"')
        return
    if stated > consumer.library:
        what = f"cdiVersion {spec.version} is newer than CDI {_short(consumer.library)}"
        lowest = max(version for version, _ in needs(spec))
        remedy = (
            f"write cdiVersion {lowest}, which supports all used features"
            if lowest <= consumer.library
            else f"remove what needs CDI {_short(lowest)}"
        )
        yield fault("version-newer", line, what, remedy)
    if not consumer.has(COMPARES_STATED_VERSION):
        return
    for version, what in needs(spec):
        if stated < version <= min(consumer.library, _V_1_0):  # newer keys are told by themselves
            remedy = f"write cdiVersion {version}"
            told = f"{what} needs cdiVersion {version}, but the file has {spec.version}"
            yield fault("version-too-low", line, told, remedy)


def _kind(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    if ("kind",) not in spec.lines:
        return
    line = spec.line(("kind",))
    if not spec.vendor:
        what = f"kind {spec.kind!r} is not VENDOR/CLASS"
        yield fault("kind", line, what, "write e.g. kind: nvidia.com/pgpu")
        return
    for name, part in (("vendor", spec.vendor), ("class", spec.device_class)):
        if not is_part(part):
            what = f"invalid {name} in the kind: {part!r}"
            yield fault("kind", line, what, f"start it with a letter; use {_LETTERS}")
        elif len(part) == 1 and consumer.has(PANICS_AT_ONE_LETTER):
            what = f"the {name} {part!r} has one letter, which makes the library panic"
            yield fault("kind-one-letter", line, what, "use two letters or more")
    if "." in spec.device_class and not consumer.has(ACCEPTS_DOT_IN_CLASS):
        what = f"the class {spec.device_class} has a dot, which CDI allows since 0.6"
        yield fault("kind", line, what, "use a dash instead")


def _annotations(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    if not consumer.has(CHECKS_ANNOTATIONS):
        return
    parts: list[tuple[Path, tuple[tuple[str, str], ...]]] = [(("annotations",), spec.annotations)]
    parts += [(("devices", n, "annotations"), d.annotations) for n, d in enumerate(spec.devices)]
    for path, written in parts:
        for key, _ in written:
            if not is_annotation_key(key):
                what = f"{shown_path(path)}: {key!r} is not a Kubernetes name"
                remedy = "use NAME or DOMAIN/NAME"
                yield fault("annotation", spec.line(path), what, remedy)
        if sum(len(k.encode()) + len(v.encode()) for k, v in written) > _MOST_ANNOTATIONS:
            what = f"{shown_path(path)} is larger than 256 KiB"
            yield fault("annotation", spec.line(path), what, "shorten it")


def _devices(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    seen: dict[str, int] = {}
    invalid = {oddity.path[:_EDITS] for oddity in spec.oddities}
    for number, device in enumerate(spec.devices):
        path: Path = ("devices", number)
        line = spec.line((*path, "name"))
        if (*path, "name") in spec.lines and not is_device_name(device.name):
            what = f"{shown_path(path)}: invalid device name: {device.name!r}"
            remedy = f"start and end it with a letter or digit; use {_LETTERS} and :"
            yield fault("device-name", line, what, remedy)
        elif device.name and device.name in seen:
            what = f"duplicate device {device.name}, first in line {seen[device.name]}"
            remedy = "give each its own name, or move the nodes of both into one device"
            yield fault("device-twice", line, what, remedy)
        seen.setdefault(device.name, line)
        begin = (*path, "containerEdits")
        is_empty = device.edits.is_empty and begin not in invalid  # invalid parts are present
        if is_empty and begin in spec.lines and consumer.has(REFUSES_EMPTY_EDITS):
            what = f"device {device.name} has no edits"
            yield fault("device-empty", spec.line(path), what, "add its device nodes, or remove it")
    if not spec.devices and ("devices",) in spec.lines and consumer.has(REFUSES_NO_DEVICES):
        what = "the file has no devices"
        yield fault("no-devices", spec.line(("devices",)), what, "remove the file, or add a device")


def _edits(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    for path, edits in spec.all_edits():
        yield from _env(spec, (*path, "env"), edits.env)
        for number, node in enumerate(edits.device_nodes):
            yield from _node(spec, (*path, "deviceNodes", number), node, consumer)
        for number, hook in enumerate(edits.hooks):
            yield from _hook(spec, (*path, "hooks", number), hook)
        for number, mount in enumerate(edits.mounts):
            here = (*path, "mounts", number)
            yield from _not_empty(spec, (*here, "hostPath"), mount.host_path)
            yield from _not_empty(spec, (*here, "containerPath"), mount.container_path)
        if edits.intel_rdt is not None and consumer.has(CHECKS_RDT):
            yield from _rdt(spec, (*path, "intelRdt"), edits.intel_rdt, consumer)
        if consumer.has(CHECKS_NET_DEVICES):
            yield from _net_devices(spec, (*path, "netDevices"), edits.net_devices)


def _env(spec: CdiSpecification, path: Path, env: Iterable[str]) -> Iterator[Diagnostic]:
    for number, text in enumerate(env):
        if text.find("=") <= 0:
            what = f"{shown_path((*path, number))}: {text!r} is not NAME=VALUE"
            yield fault("env", spec.line((*path, number)), what, "write NAME=VALUE")


def _node(
    spec: CdiSpecification, path: Path, node: CdiDeviceNode, consumer: Consumer
) -> Iterator[Diagnostic]:
    line, name = spec.line(path), node.path or shown_path(path)
    yield from _not_empty(spec, (*path, "path"), node.path)
    if not consumer.has(ACCEPTS_NODE_TYPES):
        if node.type and node.type in _NODE_TYPES:
            what = f"{name}: crate 0.1 refuses the valid type {node.type!r}"
            yield fault("node-type-given", line, what, "remove it: the type is read from the node")
    elif node.type not in _NODE_TYPES:
        what = f"{name}: invalid type {node.type!r} (allowed: b, c, u, p)"
        yield fault("node-type", line, what, "write c for a character device, or remove it")
    is_none = node.permissions == "none" and consumer.has(ACCEPTS_NO_PERMISSIONS)
    if set(node.permissions) - set("rwm") and not is_none:
        what = f"{name}: invalid permissions {node.permissions!r} (allowed: r, w, m)"
        yield fault("node-permissions", line, what, "write rw or rwm, or remove it")


def _hook(spec: CdiSpecification, path: Path, hook: CdiHook) -> Iterator[Diagnostic]:
    if hook.name not in _HOOKS and (*path, "hookName") in spec.lines:
        what = f"{shown_path(path)}: unknown hook {hook.name!r}"
        yield fault("hook", spec.line((*path, "hookName")), what, f"use one of {', '.join(_HOOKS)}")
    yield from _not_empty(spec, (*path, "path"), hook.path)
    yield from _env(spec, (*path, "env"), hook.env)


def _rdt(
    spec: CdiSpecification, path: Path, rdt: CdiIntelRdt, consumer: Consumer
) -> Iterator[Diagnostic]:
    name = rdt.clos_id
    is_root = name == "/" and consumer.has(ACCEPTS_ROOT_CLOS)
    if not is_root and (
        len(name) >= _LONGEST_CLOS or name in (".", "..") or "/" in name or "\n" in name
    ):
        what = f"{shown_path((*path, 'closID'))}: {name[:40]!r} is not a directory name"
        yield fault("clos-id", spec.line((*path, "closID")), what, "use a name without slashes")


def _net_devices(
    spec: CdiSpecification, path: Path, devices: Iterable[CdiNetDevice]
) -> Iterator[Diagnostic]:
    seen: set[tuple[str, str]] = set()
    for number, device in enumerate(devices):
        here = (*path, number)
        for key, text in (("hostInterfaceName", device.host_interface), ("name", device.name)):
            yield from _not_empty(spec, (*here, key), text)
            if text and (key, text) in seen:
                what = f"{shown_path((*here, key))}: duplicate {text}"
                yield fault("net-device", spec.line(here), what, "name each interface once")
            seen.add((key, text))


def _not_empty(spec: CdiSpecification, path: Path, text: str) -> Iterator[Diagnostic]:
    if not text and path in spec.lines:
        yield fault("empty", spec.line(path), f"{shown_path(path)} is empty", "write a value")


def _declared(spec: CdiSpecification, consumer: Consumer) -> Iterator[Diagnostic]:
    """Keys of other versions than the stated one (checked by libraries since 1.1)."""
    stated = version_of(spec.version)
    if stated is None or not consumer.has(REFUSES_KEYS_OF_LATER_VERSIONS_THAN_STATED):
        return
    counting = _counting(spec, consumer)
    for path, line, key in _keys_in(spec):
        if consumer.has(REFUSES_KEYS_REMOVED_BEFORE_STATED_VERSION):
            yield from _removed(path, line, key, stated)
        if key.since == _V_1_1 > stated and path in counting:
            what = f"{shown_path(path)} needs cdiVersion 1.1.0, but the file has {spec.version}"
            yield fault("version-too-low", line, what, "write cdiVersion 1.1.0")


def _counting(spec: CdiSpecification, consumer: Consumer) -> set[Path]:
    """The keys of CDI 1.1 whose values need it (requiresV110 in specs-go/version.go)."""
    found: set[Path] = set()
    for path, edits in spec.all_edits():
        rdt = edits.intel_rdt
        if edits.net_devices:
            found.add((*path, "netDevices"))
        if rdt is not None:
            found.add((*path, "intelRdt", "schemata"))
            if rdt.enable_monitoring or consumer.has(COUNTS_DISABLED_MONITORING):
                found.add((*path, "intelRdt", "enableMonitoring"))
    return found


def _short(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def _library(consumer: Consumer) -> tuple[object, ...]:
    return consumer.family, consumer.library


def _checks(consumer: Consumer) -> tuple[object, ...]:
    return consumer.has(REFUSES_EMPTY_EDITS), consumer.has(REFUSES_NO_DEVICES)


def _forms(consumer: Consumer) -> tuple[object, ...]:
    """What `_edits` asks of a consumer."""
    return tuple(map(consumer.has, _ASKED_OF_EDITS))


_RULES: tuple[tuple[Rule, Distinction], ...] = (
    (_text, _library),
    (_known_keys, _library),
    (_version, _library),
    (_declared, _library),
    (_kind, _library),
    (_annotations, _library),
    (_devices, _checks),
    (_edits, _forms),
)
