"""CDI specifications as text: keys, names and YAML scalars, by version and library.

From specs-go/config.go of every version. A library knows the keys up to its own version, and
refuses a file with any other (yaml.UnmarshalStrict, serde's deny_unknown_fields). Consumers read
JSON as YAML too.

Go: sigs.k8s.io/yaml over go-yaml 2 (resolve.go), which is YAML 1.1; a string gets the reformatted
value. Rust: serde_yaml 0.9 (de.rs), in which a string stays as written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.containers.cdi.model import (
    CdiDevice,
    CdiDeviceNode,
    CdiEdits,
    CdiHook,
    CdiIntelRdt,
    CdiMount,
    CdiNetDevice,
    CdiOddity,
    CdiSpecification,
    fault,
)
from vfiomgr.documents.reader import Unreadable, Wording, read_located
from vfiomgr.documents.text import Located, Path, shown_path
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.model import CdiFile
    from vfiomgr.diagnostic import Diagnostic

FIRST = Version(0, 3)
_V_0_5, _V_0_6, _V_0_7 = Version(0, 5), Version(0, 6), Version(0, 7)
_V_1_0, _V_1_1 = Version(1, 0), Version(1, 1)


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


def digit_name(specification: CdiSpecification) -> str:
    """The first name that begins with a digit, in words; empty without any."""
    names = (device.name for device in specification.devices if device.name[:1].isdecimal())
    return next((f"the name {name}, which begins with a digit," for name in names), "")


def needs(specification: CdiSpecification) -> Iterator[tuple[Version, str]]:
    """The CDI versions that a specification needs (requiresV040 … in specs-go/version.go)."""
    yield Version(0, 3), "every specification"
    edits = [edits for _, edits in specification.all_edits()]
    if any(mount.type for edit in edits for mount in edit.mounts):
        yield Version(0, 4), "the type of a mount"
    if name := digit_name(specification):
        yield Version(0, 5), name
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
    if is_go:
        return _go_number(text)
    # Digits after a 0 are a string (digits_but_not_number).
    return _integer(text, is_old_octal=False) if _RUST_INTEGER.fullmatch(text) else text


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


_MOST_GUESSED = 100
"""Maximum number of errors of a file for which a similar key is suggested."""
_FORMS = {
    "text": "a string",
    "number": "an integer",
    "truth": "true or false",
    "texts": "a list of strings",
    "numbers": "a list of integers",
    "strings by key": "keys with a string each",
    "part": "keys with values",
    "parts": "a list",
}


_PARTS: dict[str, Callable[..., Any]] = {
    TOP: CdiSpecification,
    "device": CdiDevice,
    "edits": CdiEdits,
    "deviceNode": CdiDeviceNode,
    "mount": CdiMount,
    "hook": CdiHook,
    "netDevice": CdiNetDevice,
    "intelRdt": CdiIntelRdt,
}
"""The types of each table's keys."""


def read_file(file: CdiFile, family: Family = "go") -> CdiSpecification:
    """A file as a library reads it; the reason is the only oddity if it is not readable."""
    if file.text is not None:
        return parse_specification(file.text, HostPath(file.path), family)
    why = CdiOddity((), fault("unreadable", 1, file.why or "not readable", "make it readable text"))
    return CdiSpecification("", "", file=HostPath(file.path), oddities=(why,))


def is_readable(specification: CdiSpecification) -> bool:
    """Whether a file is a document."""
    return bool(specification.lines)


def parse_specification(
    text: str, file: HostPath | None = None, family: Family = "go"
) -> CdiSpecification:
    """Read a JSON or YAML text; what values cannot hold is in `oddities`.

    For an invalid document the reason is the only oddity.
    """
    return replace(_specification(text, family), file=file)


@lru_cache(maxsize=64)
def _specification(text: str, family: Family) -> CdiSpecification:
    """A text as a library reads it, which several consumers and commands use."""
    try:
        document, flaws = _document(text)
    except Unreadable as error:
        return CdiSpecification("", "", oddities=(CdiOddity((), error.flaw),))
    reader = _Reader(family)
    for found in flaws:
        reader.add_flaw(found)
    read: CdiSpecification = reader.part(document, TOP, ())
    oddities = tuple(sorted(reader.oddities, key=lambda oddity: oddity.found.line))
    return replace(read, oddities=oddities, lines=reader.lines)


@lru_cache(maxsize=64)
def _document(text: str) -> tuple[Located, list[Diagnostic]]:
    """A text with line numbers, which the libraries read differently."""
    wording = Wording(
        "a specification",
        "specifications",
        shown_path,
        'start with: cdiVersion: "0.5.0"',
        "write each into its own file",
        reads_first=True,
        merges="told",
    )
    return read_located(text, wording)


class _Reader(Struct):
    """Takes what matches the keys from a document, and collects the rest."""

    family: Family
    oddities: list[CdiOddity] = field(default_factory=list)
    lines: dict[Path, int] = field(default_factory=dict)

    def add(self, rule: str, path: Path, line: int, what: str, remedy: str) -> None:
        self.oddities.append(CdiOddity(path, fault(rule, line, what, remedy)))

    def add_flaw(self, found: Diagnostic) -> None:
        """Add a problem of the text itself; tags are ignored by all consumers.

        serde_yaml treats `<<` like any other key.
        """
        if found.rule == "yaml-tag" or (found.rule == "key-merged" and self.family != "rust"):
            return
        what = f"{found.subject}: {found.summary}" if found.subject else found.summary
        self.add(found.rule, (), found.line, what, found.remedy)

    def part(self, part: Located, table: str, path: Path) -> Any:  # noqa: ANN401 - as the table says
        """The value of a mapping."""
        keys = KEYS[table]
        found: dict[str, Any] = {
            key.field or name: "" for name, key in keys.items() if key.needed and key.form == "text"
        }
        if part.members is None:
            self._wrong(part, path, "part")
            return _PARTS[table](**found)
        for written, value in part.members.items():
            line = part.keys[written].line
            name = written if written in keys else self._strange((*path, written), keys, line)
            here = (*path, name or written)
            self.lines[here] = line
            if name is not None and not value.is_empty:
                found[keys[name].field or name] = self._value(value, keys[name], here)
        there = {written.lower() for written in part.members}
        for name, key in keys.items():
            if key.needed and name.lower() not in there:
                what = f"{shown_path(path) or 'the specification'} has no {name}"
                self.add("key-missing", (*path, name), part.place.line, what, f"add {name}")
        return _PARTS[table](**found)

    def _strange(self, path: Path, keys: Mapping[str, Key], line: int) -> str | None:
        """The key that is meant by one in another case; of others, what they could have been."""
        import difflib  # noqa: PLC0415 - slow, and few need it

        written = str(path[-1])
        for name in keys:
            if name.lower() == written.lower():
                what = f"{shown_path(path)} must be written {name}"
                self.add("key-case", path, line, what, f"write {name}")
                return name
        is_early = len(self.oddities) < _MOST_GUESSED
        near = difflib.get_close_matches(written, keys, 1) if is_early else []
        remedy = (
            f"did you mean {near[0]}?" if near else f"remove it; known keys are {', '.join(keys)}"
        )
        self.add("key-unknown", path, line, f"{shown_path(path)} is not a CDI key", remedy)
        return None

    def _value(self, value: Located, key: Key, path: Path) -> Any:  # noqa: ANN401 - as the key says
        match key.form:
            case "part":
                found: object = self.part(value, key.of, path)
            case "parts":
                items = self._items(value, path)
                found = tuple(self.part(item, key.of, at) for at, item in items)
            case "texts":
                found = tuple(self._text(item, at) for at, item in self._items(value, path))
            case "numbers":
                numbers = [self._number(item, at, key) for at, item in self._items(value, path)]
                found = tuple(number for number in numbers if number is not None)
            case "strings by key":
                if value.members is None:
                    self._wrong(value, path, "strings by key")
                members = (value.members or {}).items()
                found = tuple((name, self._text(item, (*path, name))) for name, item in members)
            case "number":
                found = self._number(value, path, key)
            case "truth":
                found = self._truth(value, path)
            case "text":
                found = self._text(value, path)
        return found

    def _items(self, value: Located, path: Path) -> list[tuple[Path, Located]]:
        if value.items is None:
            self._wrong(value, path, "parts")
        items = [((*path, number), item) for number, item in enumerate(value.items or ())]
        self.lines.update((at, item.place.line) for at, item in items)
        return items

    def _text(self, value: Located, path: Path) -> str:
        """Libraries accept a number or a boolean as a string; in Go it is reformatted."""
        if value.items is not None or value.members is not None:
            self._wrong(value, path, "text")
        return text_of(value.text, self.family) if value.is_plain else value.text

    def _scalar(self, value: Located) -> object:
        return scalar_of(value.text, self.family) if value.is_plain else value.scalar

    def _number(self, value: Located, path: Path, key: Key) -> int | None:
        number = self._scalar(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)  # only Go has any: it writes it as JSON, and reads that
        if isinstance(number, int) and not isinstance(number, bool):
            low, high = (0, 2**32) if key.is_natural else (-(2**63), 2**63)
            if low <= number < high:
                return number
        self._wrong(value, path, "number")
        return None

    def _truth(self, value: Located, path: Path) -> bool | None:
        truth = self._scalar(value)
        if isinstance(truth, bool):
            return truth
        self._wrong(value, path, "truth")
        return None

    def _wrong(self, value: Located, path: Path, form: str) -> None:
        what = f"{shown_path(path) or 'the specification'} is not {_FORMS[form]}"
        self.add("type-wrong", path, value.place.line, what, f"write {_FORMS[form]}")


def render_specification(specification: CdiSpecification) -> str:
    """The text of a file, with only the keys that are used."""
    import json  # noqa: PLC0415 - slow to import

    return json.dumps(document_of(specification), indent=2) + "\n"


def document_of(specification: CdiSpecification) -> dict[str, Any]:
    """A specification as lists, dictionaries and scalars."""
    return _written(specification, TOP)


def _written(part: object, table: str) -> dict[str, Any]:
    """The keys of a part that have a value."""
    values = {
        name: _value_written(getattr(part, key.field or name), key)
        for name, key in KEYS[table].items()
    }
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}


def _value_written(value: Any, key: Key) -> object:  # noqa: ANN401 - as the key says
    match key.form:
        case "part":
            return None if value is None else _written(value, key.of)
        case "parts":
            return [_written(item, key.of) for item in value]
        case "texts" | "numbers":
            return list(value)
        case "strings by key":
            return dict(value)
    return value
