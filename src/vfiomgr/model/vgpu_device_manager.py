"""Configurations of NVIDIA's vGPU Device Manager (version v1), as its api/spec/v1 reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vfiomgr.errors import InvalidDocument
from vfiomgr.model.document import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERSION = "v1"
_CONFIGS = "vgpu-configs"
_KEYS = frozenset({"devices", "device-filter", "vgpu-devices"})
_REMEDY = "give the file that vgpu-device-manager reads; of a ConfigMap, what is below config.yaml"
_NUMBER = re.compile(r"0[xX][0-9a-fA-F_]+|[1-9][0-9_]*")
_HEXADECIMAL = "0x"
_VENDOR_BITS = 16
_IDENTIFIER_BITS = 32


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """Some GPUs of a node, and the vGPUs that each of them is to have."""

    place: str
    """`A40-4Q, entry 1`."""
    indices: tuple[int, ...] | None
    """Numbers among all NVIDIA GPUs of the node, by address; None for all."""
    filters: tuple[str, ...]
    """Device and vendor as one number, `0x223510DE`; none for any."""
    vgpus: dict[str, int]
    """How many of each type, on each of the GPUs."""


@dataclass(frozen=True, slots=True)
class VgpuConfigs:
    """A whole file."""

    configs: dict[str, tuple[GpuConfig, ...]]
    """By name. Of entries that are about the same GPU the last one holds."""


def read_vgpu_configs(text: str, source: str) -> VgpuConfigs:
    """Read a configuration file.

    Raises:
        InvalidDocument: it is none that vgpu-device-manager would take.

    """
    document = parse_document(text, source, _REMEDY)
    try:
        return VgpuConfigs(dict(_configs(document)))
    except ValueError as error:
        message = f"{source}: {error}"
        raise InvalidDocument(message, _REMEDY) from None


def identifier_of(text: str) -> str | None:
    """vendor:device of a filter; None where it is no number, and then it means no GPU."""
    if not _NUMBER.fullmatch(text):
        return None
    is_hexadecimal = text.lower().startswith(_HEXADECIMAL)
    number = int(text.replace("_", ""), 16 if is_hexadecimal else 10)
    if number >> _IDENTIFIER_BITS:
        return None
    device, vendor = divmod(number, 1 << _VENDOR_BITS)
    return f"{vendor:04x}:{device:04x}"


def _configs(document: object) -> Iterator[tuple[str, tuple[GpuConfig, ...]]]:
    found = _mapping(document, "the file")
    version = found.get("version")
    if version != _VERSION:
        _reject(f"version is {version!r}, and vgpu-device-manager has {_VERSION!r} alone")
    unknown = sorted(map(str, set(found) - {"version", _CONFIGS}))
    if unknown:
        _reject(f"unexpected keys: {', '.join(unknown)}")
    configs = _mapping(found.get(_CONFIGS), _CONFIGS)
    if not configs:
        _reject(f"{_CONFIGS} is empty")
    for name, entries in configs.items():
        if not isinstance(entries, list) or not entries:
            _reject(f"{name}: it is no list of entries")
        numbered = enumerate(entries, start=1)
        yield str(name), tuple(_entry(entry, f"{name}, entry {n}") for n, entry in numbered)


def _entry(entry: object, place: str) -> GpuConfig:
    if isinstance(entry, str):
        _reject(f"{place}: {entry!r} is of the form before v1, which does not say how many")
    found = _mapping(entry, place)
    unknown = sorted(map(str, set(found) - _KEYS))
    if unknown:
        _reject(f"{place}: unexpected keys: {', '.join(unknown)}")
    for key in ("devices", "vgpu-devices"):
        if key not in found:
            _reject(f"{place}: {key} is missing")
    return GpuConfig(
        place,
        _indices(found["devices"], place),
        _filters(found.get("device-filter"), place),
        dict(_vgpus(found["vgpu-devices"], place)),
    )


def _indices(devices: object, place: str) -> tuple[int, ...] | None:
    if devices == "all":
        return None
    if not isinstance(devices, list) or not all(type(index) is int for index in devices):
        _reject(f"{place}: devices is {devices!r}, neither all nor a list of numbers")
    return tuple(devices)


def _filters(found: object, place: str) -> tuple[str, ...]:
    listed = [found] if isinstance(found, str) else found or []
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        _reject(f"{place}: device-filter is {found!r}, and no text or list of texts")
    return tuple(one for one in listed if one)


def _vgpus(found: object, place: str) -> Iterator[tuple[str, int]]:
    for name, count in _mapping(found, f"{place}, vgpu-devices").items():
        if type(count) is not int or count <= 0:
            _reject(f"{place}: {count!r} is no number of {name}")
        yield str(name), count


def _mapping(value: object, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _reject(f"{what}: it is no mapping")
    return value


def _reject(why: str) -> NoReturn:
    raise ValueError(why)
