"""Consumers of CDI specifications, and the rules of one file: what their libraries refuse in it.

A finding names the consumers whose libraries refuse the file for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from msgspec.structs import asdict

from vfiomgr.containers.cdi.document import (
    FIRST,
    KEYS,
    digit_name,
    is_annotation_key,
    is_device_name,
    is_part,
    key_at,
    needed_version,
    needs,
    version_of,
)
from vfiomgr.containers.cdi.model import CdiSpecification, fault
from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.text import Path, shown_path
from vfiomgr.errors import UsageError
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import Version
from vfiomgr.value import Value, values_by_key

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.document import Family, Key
    from vfiomgr.containers.cdi.model import (
        CdiDeviceNode,
        CdiFile,
        CdiHook,
        CdiNetDevice,
        CdiOddity,
    )

ANY = "any"
_EXACT = (".json", ".yaml")


_V_0_6, _V_0_7 = Version(0, 6), Version(0, 7)
_V_1_0, _V_1_1 = Version(1, 0), Version(1, 1)


class Trait(Value):
    """What the libraries do since a version of CDI; None: never. The first crate has 0.7."""

    go: Version | None
    rust: Version | None


REFUSES_UNKNOWN_KEYS = Trait(FIRST, _V_1_0)
REFUSES_REMOVED_KEYS = Trait(FIRST, None)
"""Keys that its own version does not have any more."""
REFUSES_KEYS_REMOVED_BEFORE_STATED_VERSION = Trait(None, _V_1_1)
REFUSES_KEYS_OF_LATER_VERSIONS_THAN_STATED = Trait(_V_1_1, _V_1_1)
MINDS_CASE = Trait(None, FIRST)
"""The crate before 1.0 ignores a key in another case, unless the key is required."""
REFUSES_SECOND_DOCUMENT = Trait(None, FIRST)
"""The others read the first one."""
REFUSES_NO_DEVICES = Trait(_V_1_0, _V_1_0)
"""validate of pkg/cdi/spec.go."""
REQUIRES_KEY_OF_DEVICES = Trait(_V_1_0, FIRST)
REFUSES_EMPTY_EDITS = Trait(FIRST, _V_1_0)
ACCEPTS_NODE_TYPES = Trait(FIRST, _V_1_0)
"""The first crate has the test inverted."""
ACCEPTS_NO_PERMISSIONS = Trait(None, _V_1_1)
"""`permissions: none`."""
ACCEPTS_V = Trait(_V_0_6, FIRST)
"""`cdiVersion: v0.6.0`."""
COMPARES_STATED_VERSION = Trait(Version(0, 5, 4), FIRST)
"""Whether the stated version supports all used features."""
ACCEPTS_DOT_IN_CLASS = Trait(_V_0_6, FIRST)
PANICS_AT_ONE_LETTER = Trait(FIRST, None)
CHECKS_ANNOTATIONS = Trait(None, FIRST)
"""ValidateSpecAnnotations in Go gets a type that it ignores."""
CHECKS_RDT = Trait(_V_0_7, _V_0_7)
ACCEPTS_ROOT_CLOS = Trait(_V_1_1, None)
CHECKS_NET_DEVICES = Trait(_V_1_1, _V_1_1)
COUNTS_DISABLED_MONITORING = Trait(None, _V_1_1)
"""`enableMonitoring: false` needs 1.1 too (requiresV110 in specs-go/version.go)."""
PREFERS_STATIC = Trait(None, FIRST)
"""If both directories have a name: the crate gets them in reverse order."""


class Consumer(Value):
    """A program that reads specifications.

    The Go library is tags.cncf.io/container-device-interface, the Rust library is the crate
    container-device-interface; the version is that of the newest CDI that they support (go.mod and
    Cargo.lock at the tags; Debian builds with its own library).
    """

    name: str
    title: str
    library: Version
    is_rust: bool = False
    is_kata: bool = False
    """Whether one unreadable file, or a duplicate name, makes all requests for CDI devices fail.

    Go: WithCDI of Kata's src/runtime returns the error of Refresh, which others only log. Rust: so
    does handle_cdi_devices of pod-resources-rs, and its cache also stops at the first such file."""

    def has(self, trait: Trait) -> bool:
        """Whether its library has a trait."""
        since = trait.rust if self.is_rust else trait.go
        return since is not None and self.library >= since

    @property
    def family(self) -> Family:
        """The family of its library."""
        return "rust" if self.is_rust else "go"

    def reads(self, file: CdiFile) -> bool:
        """Whether it reads a file (scanSpecDirs; traverse_dir and is_cdi_spec in Rust)."""
        if self.is_rust:
            return file.path.lower().endswith(_EXACT)
        return file.path.endswith(_EXACT) and "/" not in file.below

    def __str__(self) -> str:
        """`Kata's Go runtime (CDI library 0.6)`."""
        kind = "crate" if self.is_rust else "library"
        return f"{self.title} (CDI {kind} {self.library.major}.{self.library.minor})"


CONSUMERS = (
    Consumer("kata-go", "Kata's Go runtime", Version(0, 6), is_kata=True),
    Consumer("kata-rs-3.31", "Kata's runtime-rs 3.31", Version(0, 7), is_rust=True, is_kata=True),
    Consumer("kata-rs", "Kata's runtime-rs", Version(1, 1), is_rust=True, is_kata=True),
    Consumer("containerd-1.7", "containerd 1.7", Version(0, 5, 4)),
    Consumer("containerd-1.7.12", "containerd 1.7.12", Version(0, 6)),
    Consumer("containerd-1.7.16", "containerd 1.7.16", Version(0, 7)),
    Consumer("containerd-1.7.27", "containerd 1.7.27", Version(0, 8)),
    Consumer("containerd-2.0", "containerd 2.0", Version(0, 8)),
    Consumer("containerd-2.1", "containerd 2.1", Version(1, 0)),
    Consumer("containerd-2.3", "containerd 2.3", Version(1, 1)),
    Consumer("podman-4.3", "Podman 4.3", Version(0, 5, 2)),
    Consumer("podman-4.9", "Podman 4.9", Version(0, 6)),
    Consumer("podman-5.4", "Podman 5.4", Version(0, 8)),
    Consumer("podman-5.8", "Podman 5.8", Version(1, 0)),
)
"""Each name stands for that release and later ones: runtime-rs has crate 0.1.2 up to 3.32 and
1.1.1 since 4.0, containerd-2.1 is 2.0.5 to 2.2.0, and containerd-2.3 is 2.2.1 and later."""
NAMES = (
    ANY,
    *dict.fromkeys(c.name.partition("-")[0] for c in CONSUMERS),
    *(c.name for c in CONSUMERS),
)


def consumers_named(name: str) -> tuple[Consumer, ...]:
    """One consumer, all of a family (`kata`, `containerd`, `podman`), or all.

    Raises:
        UsageError: the consumer is unknown.
    """
    found = tuple(c for c in CONSUMERS if name in (ANY, c.name, c.name.partition("-")[0]))
    if not found:
        message = f"unknown CDI consumer: {name!r}"
        raise UsageError(message, f"use one of {', '.join(NAMES)}")
    return found


_V_1_0, _V_1_1 = Version(1, 0), Version(1, 1)
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


class CdiFinding(Diagnostic):
    """A problem, and the consumers that it affects; its subject is the file."""

    consumers: tuple[str, ...] = ()
    """The affected consumers, by name."""
    breaks_all: tuple[str, ...] = ()
    """Those of them that provide no CDI device of any file until it is solved."""


def for_consumers(found: Diagnostic, consumers: Iterable[Consumer]) -> Iterator[CdiFinding]:
    """The finding, if it affects a consumer."""
    names = tuple(consumer.name for consumer in consumers)
    if names:
        yield CdiFinding(**{**asdict(found), "consumers": names})


class Reading(Value):
    """A specification, and consumers whose libraries read the same in it."""

    spec: CdiSpecification
    consumers: tuple[Consumer, ...]

    def having(self, trait: Trait) -> list[Consumer]:
        """The consumers whose libraries have a trait."""
        return [consumer for consumer in self.consumers if consumer.has(trait)]

    def lacking(self, trait: Trait) -> list[Consumer]:
        """The other consumers."""
        return [consumer for consumer in self.consumers if not consumer.has(trait)]

    def refused(
        self,
        rule: str,
        path: Path,
        what: str,
        remedy: str,
        by: Iterable[Consumer] | None = None,
    ) -> Iterator[CdiFinding]:
        """A reason to refuse a part of the file, for some consumers or all."""
        found = fault(rule, self.spec.line(path), what, remedy)
        return for_consumers(found, self.consumers if by is None else by)

    def changing_keys(self) -> Iterator[tuple[Path, Key]]:
        """The keys of the file that not all versions of CDI have, with their paths."""
        for path in self.spec.lines:
            if path[-1] in _OF_SOME_VERSIONS and (key := key_at(path)) is not None:
                yield path, key


def faults(
    specification: CdiSpecification, consumers: Iterable[Consumer]
) -> tuple[CdiFinding, ...]:
    """All reasons for which consumers refuse a file; each stops at its first."""
    found = FILE_RULES.find(Reading(specification, tuple(consumers)))
    return cast("tuple[CdiFinding, ...]", tuple(dict.fromkeys(found)))


def _text(file: Reading) -> Iterator[CdiFinding]:
    """Content that values cannot hold: yaml.UnmarshalStrict, which ignores case, and serde_yaml."""
    for oddity in file.spec.oddities:
        refusing: Iterable[Consumer] = file.consumers
        match oddity.found.rule:
            case "document-second":
                refusing = file.having(REFUSES_SECOND_DOCUMENT)
            case "key-case":
                refusing = [c for c in file.having(MINDS_CASE) if _minds_case(oddity, c)]
            case "key-unknown":
                refusing = file.having(REFUSES_UNKNOWN_KEYS)
            case "key-missing" if oddity.path == ("devices",):
                refusing = file.having(REQUIRES_KEY_OF_DEVICES)
        yield from for_consumers(oddity.found, refusing)


def _minds_case(oddity: CdiOddity, consumer: Consumer) -> bool:
    """Whether a key in another case is refused: as unknown, or as a missing required key."""
    if consumer.has(REFUSES_UNKNOWN_KEYS):
        return True
    written = str(oddity.path[-1]).lower()
    meant = {name for keys in KEYS.values() for name in keys if name.lower() == written}
    keys = (key_at((*oddity.path[:-1], name)) for name in meant)
    return any(key is not None and key.needed for key in keys)


def _known_keys(file: Reading) -> Iterator[CdiFinding]:
    strict = file.having(REFUSES_UNKNOWN_KEYS)
    for path, key in file.changing_keys():
        refusing = [c for c in strict if c.has(REFUSES_REMOVED_KEYS) and key.is_gone(c.library)]
        yield from _removed(file, path, key, refusing)
        what = f"{shown_path(path)} needs CDI {_short(key.since)}"
        remedy = f"remove it, or use only consumers with CDI {_short(key.since)}"
        older = [consumer for consumer in strict if consumer.library < key.since]
        yield from file.refused("key-newer", path, what, remedy, older)


def _removed(
    file: Reading, path: Path, key: Key, refusing: Iterable[Consumer]
) -> Iterator[CdiFinding]:
    if key.until is not None:
        what = f"{shown_path(path)} was removed in CDI {_short(key.until)}"
        yield from file.refused("key-gone", path, what, "remove it", refusing)


def _version(file: Reading) -> Iterator[CdiFinding]:
    path = ("cdiVersion",)
    if path not in file.spec.lines:
        return  # reported as a missing key
    version = file.spec.version
    stated = version_of(version)
    refusing = file.lacking(ACCEPTS_V) if version.startswith("v") else ()
    what, remedy = f"invalid cdiVersion: {version!r}", 'write e.g. cdiVersion: "0.5.0"'
    if stated is None:
        yield from file.refused("version-unknown", path, what, remedy)
        return
    yield from file.refused("version-unknown", path, what, remedy, refusing)
    others = ((c.library, c) for c in file.consumers if c not in refusing)
    features = tuple(needs(file.spec))
    for library, consumers in values_by_key(others).items():
        if stated > library:
            yield from _newer(file, library, consumers)
        comparing = [c for c in consumers if c.has(COMPARES_STATED_VERSION)]
        for needed, feature in features:
            if stated < needed <= min(library, _V_1_0):  # newer keys have findings of their own
                what = f"{feature} needs cdiVersion {needed}, but the file has {version}"
                remedy = f"write cdiVersion {needed}"
                if feature == digit_name(file.spec):
                    remedy += ", or for older readers begin the name with a letter"
                yield from file.refused("version-too-low", path, what, remedy, comparing)


def _newer(file: Reading, library: Version, consumers: Iterable[Consumer]) -> Iterator[CdiFinding]:
    what = f"cdiVersion {file.spec.version} is newer than CDI {_short(library)}"
    lowest = needed_version(file.spec)
    remedy = f"remove what needs CDI {_short(lowest)}"
    if lowest <= library:
        remedy = f"write cdiVersion {lowest}, which supports all used features"
    yield from file.refused("version-newer", ("cdiVersion",), what, remedy, consumers)


def _declared(file: Reading) -> Iterator[CdiFinding]:
    """Keys of other versions than the stated one (checked by libraries since 1.1)."""
    stated = version_of(file.spec.version)
    strict = file.having(REFUSES_KEYS_OF_LATER_VERSIONS_THAN_STATED)
    if stated is None or not strict:
        return
    for path, key in file.changing_keys():
        if key.is_gone(stated):
            removing = REFUSES_KEYS_REMOVED_BEFORE_STATED_VERSION
            yield from _removed(file, path, key, [c for c in strict if c.has(removing)])
        if key.since == _V_1_1 > stated:
            what = (
                f"{shown_path(path)} needs cdiVersion 1.1.0, but the file has {file.spec.version}"
            )
            refusing = [c for c in strict if _needs_1_1(file.spec, path, c)]
            yield from file.refused(
                "version-too-low", path, what, "write cdiVersion 1.1.0", refusing
            )


def _needs_1_1(spec: CdiSpecification, path: Path, consumer: Consumer) -> bool:
    """Whether the value of a key of CDI 1.1 needs it (requiresV110 in specs-go/version.go)."""
    for place, edits in spec.all_edits():
        rdt = edits.intel_rdt
        if path == (*place, "netDevices"):
            return bool(edits.net_devices)
        if rdt is not None and path == (*place, "intelRdt", "enableMonitoring"):
            return bool(rdt.enable_monitoring) or consumer.has(COUNTS_DISABLED_MONITORING)
        if rdt is not None and path == (*place, "intelRdt", "schemata"):
            return True
    return False


def _short(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def _kind(file: Reading) -> Iterator[CdiFinding]:
    spec, path = file.spec, ("kind",)
    if path not in spec.lines:
        return
    if not spec.vendor:
        what = f"kind {spec.kind!r} is not VENDOR/CLASS"
        yield from file.refused("kind", path, what, "write e.g. kind: nvidia.com/pgpu")
        return
    for name, part in (("vendor", spec.vendor), ("class", spec.device_class)):
        if not is_part(part):
            what = f"invalid {name} in the kind: {part!r}"
            yield from file.refused("kind", path, what, f"start it with a letter; use {_LETTERS}")
        elif len(part) == 1:
            what = f"the {name} {part!r} has one letter, which makes the library panic"
            panicking = file.having(PANICS_AT_ONE_LETTER)
            yield from file.refused(
                "kind-one-letter", path, what, "use two letters or more", panicking
            )
    if "." in spec.device_class:
        what = f"the class {spec.device_class} has a dot, which CDI allows since 0.6"
        refusing = file.lacking(ACCEPTS_DOT_IN_CLASS)
        yield from file.refused("kind", path, what, "use a dash instead", refusing)


def _annotations(file: Reading) -> Iterator[CdiFinding]:
    checking = file.having(CHECKS_ANNOTATIONS)
    parts: list[tuple[Path, tuple[tuple[str, str], ...]]]
    parts = [(("annotations",), file.spec.annotations)]
    parts += [
        (("devices", number, "annotations"), device.annotations)
        for number, device in enumerate(file.spec.devices)
        if device.annotations
    ]
    for path, written in parts:
        for key, _ in written:
            if not is_annotation_key(key):
                what = f"{shown_path(path)}: {key!r} is not a Kubernetes name"
                remedy = "use NAME or DOMAIN/NAME"
                yield from file.refused("annotation", path, what, remedy, checking)
        if sum(len(k.encode()) + len(v.encode()) for k, v in written) > _MOST_ANNOTATIONS:
            what = f"{shown_path(path)} is larger than 256 KiB"
            yield from file.refused("annotation", path, what, "shorten it", checking)


def _devices(file: Reading) -> Iterator[CdiFinding]:
    spec = file.spec
    seen: dict[str, int] = {}
    invalid = {oddity.path[:_EDITS] for oddity in spec.oddities}
    for number, device in enumerate(spec.devices):
        path: Path = ("devices", number)
        name: Path = (*path, "name")
        if name in spec.lines and not is_device_name(device.name):
            what = f"{shown_path(path)}: invalid device name: {device.name!r}"
            remedy = f"start and end it with a letter or digit; use {_LETTERS} and :"
            yield from file.refused("device-name", name, what, remedy)
        elif device.name and device.name in seen:
            what = f"duplicate device {device.name}, first in line {seen[device.name]}"
            remedy = "give each its own name, or move the nodes of both into one device"
            yield from file.refused("device-twice", name, what, remedy)
        seen.setdefault(device.name, spec.line(name))
        begin = (*path, "containerEdits")
        is_empty = device.edits.is_empty and begin not in invalid  # invalid parts are present
        if is_empty and begin in spec.lines:
            what, remedy = (
                f"device {device.name} has no edits",
                "add its device nodes, or remove it",
            )
            refusing = file.having(REFUSES_EMPTY_EDITS)
            yield from file.refused("device-empty", path, what, remedy, refusing)
    path = ("devices",)
    if not spec.devices and path in spec.lines:
        what, remedy = "the file has no devices", "remove the file, or add a device"
        refusing = file.having(REFUSES_NO_DEVICES)
        yield from file.refused("no-devices", path, what, remedy, refusing)


def _edits(file: Reading) -> Iterator[CdiFinding]:
    for path, edits in file.spec.all_edits():
        yield from _env(file, (*path, "env"), edits.env)
        for number, node in enumerate(edits.device_nodes):
            yield from _node(file, (*path, "deviceNodes", number), node)
        for number, hook in enumerate(edits.hooks):
            yield from _hook(file, (*path, "hooks", number), hook)
        for number, mount in enumerate(edits.mounts):
            here = (*path, "mounts", number)
            yield from _not_empty(file, (*here, "hostPath"), mount.host_path)
            yield from _not_empty(file, (*here, "containerPath"), mount.container_path)
        if edits.intel_rdt is not None:
            yield from _rdt(file, (*path, "intelRdt", "closID"), edits.intel_rdt.clos_id)
        if edits.net_devices:
            yield from _net_devices(file, (*path, "netDevices"), edits.net_devices)


def _env(file: Reading, path: Path, env: Iterable[str]) -> Iterator[CdiFinding]:
    for number, text in enumerate(env):
        if text.find("=") <= 0:
            what = f"{shown_path((*path, number))}: {text!r} is not NAME=VALUE"
            yield from file.refused("env", (*path, number), what, "write NAME=VALUE")


def _node(file: Reading, path: Path, node: CdiDeviceNode) -> Iterator[CdiFinding]:
    name = node.path or shown_path(path)
    yield from _not_empty(file, (*path, "path"), node.path)
    if node.type not in _NODE_TYPES:
        what = f"{name}: invalid type {node.type!r} (allowed: b, c, u, p)"
        remedy = "write c for a character device, or remove it"
        checking = file.having(ACCEPTS_NODE_TYPES)
        yield from file.refused("node-type", path, what, remedy, checking)
    elif node.type:
        what = f"{name}: crate 0.1 refuses the valid type {node.type!r}"
        remedy = "remove it: the type is read from the node"
        refusing = file.lacking(ACCEPTS_NODE_TYPES)
        yield from file.refused("node-type-given", path, what, remedy, refusing)
    if set(node.permissions) - set("rwm"):
        what = f"{name}: invalid permissions {node.permissions!r} (allowed: r, w, m)"
        is_none = node.permissions == "none"
        refusing = file.lacking(ACCEPTS_NO_PERMISSIONS) if is_none else [*file.consumers]
        remedy = "write rw or rwm, or remove it"
        yield from file.refused("node-permissions", path, what, remedy, refusing)


def _hook(file: Reading, path: Path, hook: CdiHook) -> Iterator[CdiFinding]:
    name = (*path, "hookName")
    if hook.name not in _HOOKS and name in file.spec.lines:
        what = f"{shown_path(path)}: unknown hook {hook.name!r}"
        yield from file.refused("hook", name, what, f"use one of {', '.join(_HOOKS)}")
    yield from _not_empty(file, (*path, "path"), hook.path)
    yield from _env(file, (*path, "env"), hook.env)


def _rdt(file: Reading, path: Path, name: str) -> Iterator[CdiFinding]:
    if len(name) < _LONGEST_CLOS and name not in (".", "..") and not {"/", "\n"} & set(name):
        return
    what = f"{shown_path(path)}: {name[:40]!r} is not a directory name"
    checking = file.having(CHECKS_RDT)
    refusing = [c for c in checking if name != "/" or not c.has(ACCEPTS_ROOT_CLOS)]
    yield from file.refused("clos-id", path, what, "use a name without slashes", refusing)


def _net_devices(
    file: Reading, path: Path, devices: Iterable[CdiNetDevice]
) -> Iterator[CdiFinding]:
    checking = file.having(CHECKS_NET_DEVICES)
    seen: set[tuple[str, str]] = set()
    for number, device in enumerate(devices):
        here = (*path, number)
        for key, text in (("hostInterfaceName", device.host_interface), ("name", device.name)):
            yield from _not_empty(file, (*here, key), text, checking)
            if text and (key, text) in seen:
                what = f"{shown_path((*here, key))}: duplicate {text}"
                remedy = "name each interface once"
                yield from file.refused("net-device", here, what, remedy, checking)
            seen.add((key, text))


def _not_empty(
    file: Reading, path: Path, text: str, checking: Iterable[Consumer] | None = None
) -> Iterator[CdiFinding]:
    if not text and path in file.spec.lines:
        what = f"{shown_path(path)} is empty"
        yield from file.refused("empty", path, what, "write a value", checking)


FILE_RULES: RuleSet[Reading] = register(
    RuleSet(
        "a CDI specification",
        rules=(
            rule(
                _text,
                "unreadable",
                "document-second",
                "key-case",
                "key-merged",
                "key-missing",
                "key-twice",
                "key-unknown",
                "type-wrong",
            ),
            rule(_known_keys, "key-gone", "key-newer"),
            rule(_version, "version-unknown", "version-newer", "version-too-low"),
            rule(_declared, "key-gone", "version-too-low"),
            rule(_kind, "kind", "kind-one-letter"),
            rule(_annotations, "annotation"),
            rule(_devices, "device-name", "device-twice", "device-empty", "no-devices"),
            rule(
                _edits,
                "env",
                "node-type-given",
                "node-type",
                "node-permissions",
                "hook",
                "empty",
                "clos-id",
                "net-device",
            ),
        ),
        host=lambda _file: None,
    )
)
