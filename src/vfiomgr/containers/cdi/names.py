"""Names in CDI, and the version that a specification needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.cdi.model import CdiSpecification

VERSIONS = tuple(
    Version(*numbers)
    for numbers in (
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (0, 5),
        (0, 6),
        (0, 7),
        (0, 8),
        (1, 0),
        (1, 1),
    )
)
"""Released versions of the specification (validSpecVersions in specs-go/version.go)."""
_PART = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
_WRITTEN = re.compile(r"v?(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_PREFIX = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
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
    return device in (wanted, f"0000:{wanted.lower()}") or device == wanted.lower()
