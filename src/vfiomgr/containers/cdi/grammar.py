"""The grammar of CDI: keys, names and YAML scalars, by version, and the consumers that read them.

From specs-go/config.go of every version. A library knows the keys up to its own version, and
refuses a file with any other (yaml.UnmarshalStrict, serde's deny_unknown_fields).

Go: sigs.k8s.io/yaml over go-yaml 2 (resolve.go), which is YAML 1.1; a string gets the reformatted
value. Rust: serde_yaml 0.9 (de.rs), in which a string stays as written.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.cdi.model import CdiFile, CdiSpecification
    from vfiomgr.documents.text import Path


ANY = "any"
_EXACT = (".json", ".yaml")


FIRST = Version(0, 3)
_V_0_5, _V_0_6, _V_0_7 = Version(0, 5), Version(0, 6), Version(0, 7)
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


Form = Literal["text", "number", "truth", "texts", "numbers", "strings by key", "part", "parts"]


class Key(Value):
    """The type of a key's value."""

    form: Form = "text"
    of: str = ""
    """The name of the table of its parts."""
    field: str = ""
    """The field of the model; empty if it has the key's name."""
    since: Version = FIRST
    needed: bool = False
    is_natural: bool = False
    """For numbers: unsigned, with 32 bits."""
    until: Version | None = None
    """The version that removed it."""

    def is_gone(self, version: Version) -> bool:
        """Whether a version does not have it any more."""
        return self.until is not None and version >= self.until


TOP = "specification"
KEYS: dict[str, dict[str, Key]] = {
    TOP: {
        "cdiVersion": Key(field="version", needed=True),
        "kind": Key(needed=True),
        "annotations": Key("strings by key", since=_V_0_6),
        "devices": Key("parts", "device", needed=True),
        "containerEdits": Key("part", "edits", field="edits"),
    },
    "device": {
        "name": Key(needed=True),
        "annotations": Key("strings by key", since=_V_0_6),
        "containerEdits": Key("part", "edits", field="edits", needed=True),
    },
    "edits": {
        "env": Key("texts"),
        "deviceNodes": Key("parts", "deviceNode", field="device_nodes"),
        "netDevices": Key("parts", "netDevice", field="net_devices", since=_V_1_1),
        "hooks": Key("parts", "hook"),
        "mounts": Key("parts", "mount"),
        "intelRdt": Key("part", "intelRdt", field="intel_rdt", since=_V_0_7),
        "additionalGids": Key("numbers", field="additional_gids", since=_V_0_7, is_natural=True),
    },
    "deviceNode": {
        "path": Key(needed=True),
        "hostPath": Key(field="host_path", since=_V_0_5),
        "type": Key(),
        "major": Key("number"),
        "minor": Key("number"),
        "fileMode": Key("number", field="file_mode", is_natural=True),
        "permissions": Key(),
        "uid": Key("number", is_natural=True),
        "gid": Key("number", is_natural=True),
    },
    "mount": {
        "hostPath": Key(field="host_path", needed=True),
        "containerPath": Key(field="container_path", needed=True),
        "options": Key("texts"),
        "type": Key(since=Version(0, 4)),
    },
    "hook": {
        "hookName": Key(field="name", needed=True),
        "path": Key(needed=True),
        "args": Key("texts"),
        "env": Key("texts"),
        "timeout": Key("number"),
    },
    "netDevice": {
        "hostInterfaceName": Key(field="host_interface", needed=True),
        "name": Key(needed=True),
    },
    "intelRdt": {
        "closID": Key(field="clos_id"),
        "l3CacheSchema": Key(field="l3_cache_schema"),
        "memBwSchema": Key(field="mem_bw_schema"),
        "schemata": Key("texts", since=_V_1_1),
        "enableMonitoring": Key("truth", field="enable_monitoring", since=_V_1_1),
        "enableCMT": Key("truth", field="enable_cmt", until=_V_1_1),
        "enableMBM": Key("truth", field="enable_mbm", until=_V_1_1),
    },
}


@lru_cache(maxsize=1 << 16)
def key_at(path: Path) -> Key | None:
    """The key at the end of a path; None if no CDI version has it."""
    table, key = TOP, None
    for part in path:
        if isinstance(part, str):
            key = KEYS.get(table, {}).get(part)
            table = key.of if key else ""
    return key


VERSIONS = tuple(
    Version(*numbers)
    for numbers in ((0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 8), (1, 0), (1, 1))
)
"""Released versions of the specification (validSpecVersions in specs-go/version.go)."""
_PART = expression(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DEVICE = expression(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
_WRITTEN = expression(r"v?(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
"""A part of a domain."""
_PREFIX = expression(rf"{LABEL}(\.{LABEL})*")
_NAME = expression(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
_MOST_OF_PREFIX, _MOST_OF_NAME = 253, 63


def version_of(text: str) -> Version | None:
    """The version that a file states; None if CDI never had it."""
    match = _WRITTEN.fullmatch(text)
    found = Version(*map(int, match.groups())) if match else None
    return found if found in VERSIONS else None


def is_part(text: str) -> bool:
    """Whether a text is valid as vendor or class (validateVendorOrClassName in pkg/parser)."""
    return _PART.fullmatch(text) is not None


def is_kind(text: str) -> bool:
    """Whether every consumer accepts a text as VENDOR/CLASS.

    For a vendor or class of one letter the Go library slices from 1 to 0, and panics.
    """
    vendor, slash, name = text.partition("/")
    return bool(slash) and all(is_part(part) and len(part) > 1 for part in (vendor, name))


def is_device_name(text: str) -> bool:
    """Whether a text is a valid device name (ValidateDeviceName in pkg/parser)."""
    return _DEVICE.fullmatch(text) is not None


def is_qualified(text: str) -> bool:
    """Whether a text is VENDOR/CLASS=NAME (ParseQualifiedName)."""
    kind, sign, name = text.partition("=")
    return bool(sign) and is_kind(kind) and is_device_name(name)


def is_annotation_key(text: str) -> bool:
    """Whether a text is a qualified name of Kubernetes, in any case."""
    prefix, slash, name = text.lower().rpartition("/")
    if slash and (len(prefix) > _MOST_OF_PREFIX or not _PREFIX.fullmatch(prefix)):
        return False
    return len(name) <= _MOST_OF_NAME and _NAME.fullmatch(name) is not None


def needs(specification: CdiSpecification) -> Iterator[tuple[Version, str]]:
    """The CDI versions that a specification needs (requiresV040 … in specs-go/version.go)."""
    yield Version(0, 3), "every specification"
    edits = [edits for _, edits in specification.all_edits()]
    if any(mount.type for edit in edits for mount in edit.mounts):
        yield Version(0, 4), "the type of a mount"
    for device in specification.devices:
        if device.name[:1].isdecimal():
            yield Version(0, 5), f"the name {device.name}, which begins with a digit,"
            break
    if any(node.host_path for edit in edits for node in edit.device_nodes):
        yield Version(0, 5), "hostPath of a device node"
    if specification.annotations or any(d.annotations for d in specification.devices):
        yield Version(0, 6), "annotations"
    if "." in specification.device_class and specification.vendor:
        yield Version(0, 6), f"the class {specification.device_class}, which has a dot,"
    if any(edit.intel_rdt is not None for edit in edits):
        yield Version(0, 7), "intelRdt"
    if any(edit.additional_gids for edit in edits):
        yield Version(0, 7), "additionalGids"
    if any(edit.net_devices for edit in edits):
        yield Version(1, 1), "netDevices"


def needed_version(specification: CdiSpecification) -> Version:
    """The lowest version that supports all parts."""
    return max(version for version, _ in needs(specification))


def is_called(qualified: str, name: str) -> bool:
    """Whether a name is that of a device, with or without its kind and its PCI domain."""
    kind, _, device = qualified.partition("=")
    wanted_kind, equals, wanted = name.rpartition("=")
    if equals and wanted_kind != kind:
        return False
    return device in (wanted, wanted.lower(), _full_address(wanted))


def _full_address(text: str) -> str | None:
    """An address with its domain and all its digits; None if it is another name."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return None


Family = Literal["go", "rust"]
"""The two libraries."""
Scalar = str | int | float | bool | None

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE, _FALSE = (
    frozenset(form for word in words for form in (word, word.capitalize(), word.upper()))
    for words in (("true",), ("false",))
)
_GO_TRUE, _GO_FALSE = (
    more | frozenset(form for word in words for form in (word, word.capitalize(), word.upper()))
    for more, words in ((_TRUE, ("y", "yes", "on")), (_FALSE, ("n", "no", "off")))
)
_RADIX = {"0x": 16, "0b": 2, "0o": 8}
_GO_INTEGER = expression(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-7]*|[1-9][0-9]*)")
_GO_FLOAT = expression(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_RUST_INTEGER = expression(r"[-+]?(0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+|0|[1-9][0-9]*)")
_FEWEST, _MOST = -4, 6
"""Powers of ten that strconv.FormatFloat writes out (ftoa.go, %g with the shortest digits)."""


def scalar_of(text: str, family: Family) -> Scalar:
    """The value that a library reads from an unquoted text."""
    if text in _NULLS:
        return None
    is_go = family == "go"
    if text in (_GO_TRUE if is_go else _TRUE):
        return True
    if text in (_GO_FALSE if is_go else _FALSE):
        return False
    return _go_number(text) if is_go else _rust_number(text)


def text_of(text: str, family: Family) -> str:
    """The string that a library reads where a string is expected."""
    if family == "rust":
        return text
    match scalar_of(text, family):
        case bool() as truth:
            return str(truth).lower()
        case int() as number:
            return str(number)
        case float() as number:
            return _float_text(number)
    return text


def _go_number(text: str) -> Scalar:
    if text[0] not in "+-.0123456789":
        return text
    plain = text.replace("_", "")
    if _GO_INTEGER.fullmatch(plain):
        number = _integer(plain, is_old_octal=True)
        if -(2**63) <= number < 2**64:
            return number
    value = float(plain) if _GO_FLOAT.fullmatch(plain) else math.inf
    return value if math.isfinite(value) else text  # ErrRange of ParseFloat


def _rust_number(text: str) -> Scalar:
    """Digits after a 0 are a string (digits_but_not_number)."""
    return _integer(text, is_old_octal=False) if _RUST_INTEGER.fullmatch(text) else text


def _integer(text: str, *, is_old_octal: bool) -> int:
    digits = text.lstrip("+-").lower()
    base = _RADIX.get(digits[:2], 8 if is_old_octal and digits.startswith("0") else 10)
    number = int(Decimal(digits)) if base == 10 else int(digits, base)  # noqa: PLR2004
    return -number if text.startswith("-") else number


def _float_text(number: float) -> str:
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - neither infinite nor no number
    power = len(digits) + exponent - 1
    written = "".join(map(str, digits))
    if power < _FEWEST or power >= _MOST:
        fraction = f".{written[1:]}" if len(written) > 1 else ""
        written = f"{written[0]}{fraction}e{'-' if power < 0 else '+'}{abs(power):02}"
    else:
        written = f"{Decimal((0, digits, exponent)):f}"
    return f"-{written}" if sign else written
