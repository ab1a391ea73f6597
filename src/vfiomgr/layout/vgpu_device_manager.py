"""Configurations of NVIDIA's vGPU Device Manager (version v1), as parsed by its api/spec/v1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from vfiomgr.documents.reader import read_values
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.layout.diagnostics import EarlierRules, covers
from vfiomgr.layout.model import Layout, Selector, VgpuRequest, VgpuRule
from vfiomgr.value import Value
from vfiomgr.vgpu.model import lives_in_gpu_instance

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_VERSION = "v1"
_CONFIGS = "vgpu-configs"
_KEYS = frozenset({"devices", "device-filter", "vgpu-devices"})
_REMEDY = (
    "pass the file that vgpu-device-manager reads; for a ConfigMap, the part below config.yaml"
)
_NUMBER = expression(r"0[xX][0-9a-fA-F_]+|[1-9][0-9_]*")
_HEXADECIMAL = "0x"
_VENDOR_BITS = 16
_IDENTIFIER_BITS = 32


class GpuConfig(Value):
    """Some GPUs of a node, and the vGPUs of each."""

    place: str
    """`A40-4Q, entry 1`, the place of the entry."""
    indices: tuple[int, ...] | None
    """Indices among all NVIDIA GPUs of the node, by address; None for all."""
    filters: tuple[str, ...]
    """Device and vendor as one number, `0x223510DE`; None for any."""
    vgpus: dict[str, int]
    """The number of each type on each GPU."""


VgpuConfigs = dict[str, tuple[GpuConfig, ...]]
"""The configurations of a file by name. If several entries concern a GPU, the last one applies."""


def read_vgpu_configs(text: str, source: str) -> VgpuConfigs:
    """Read a configuration file.

    Raises:
        InvalidDocument: vgpu-device-manager would not accept it.
    """
    document = read_values(text, source, _REMEDY)
    try:
        return dict(_configs(document))
    except ValueError as error:
        message = f"{source}: {error}"
        raise InvalidDocument(message, _REMEDY) from None


def identifier_of(text: str) -> str | None:
    """vendor:device of a filter; None if it is not a number, which matches no GPU."""
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
        found_version = (
            "missing key: version" if version is None else f"unsupported version {version}"
        )
        _reject(f"{found_version} (must be {_VERSION})")
    unknown = sorted(map(str, set(found) - {"version", _CONFIGS}))
    if unknown:
        _reject(f"unexpected keys: {', '.join(unknown)}")
    configs = _mapping(found.get(_CONFIGS), _CONFIGS)
    if not configs:
        _reject(f"{_CONFIGS} is empty")
    for name, entries in configs.items():
        if not isinstance(entries, list) or not entries:
            _reject(f"{name}: not a list of entries")
        numbered = enumerate(entries, start=1)
        yield str(name), tuple(_entry(entry, f"{name}, entry {n}") for n, entry in numbered)


def _entry(entry: object, place: str) -> GpuConfig:
    if isinstance(entry, str):
        _reject(f"{place}: {entry!r} has the format before v1, which does not give the number")
    found = _mapping(entry, place)
    unknown = sorted(map(str, set(found) - _KEYS))
    if unknown:
        _reject(f"{place}: unexpected keys: {', '.join(unknown)}")
    for key in ("devices", "vgpu-devices"):
        if key not in found:
            _reject(f"{place}: {key} is missing")
    devices, filters = found["devices"], found.get("device-filter") or []
    if devices != "all" and not (
        isinstance(devices, list) and all(type(index) is int for index in devices)
    ):
        _reject(f"{place}: devices is {devices!r}, expected all or a list of numbers")
    filters = [filters] if isinstance(filters, str) else filters
    if not isinstance(filters, list) or not all(isinstance(one, str) for one in filters):
        given = found["device-filter"]
        _reject(f"{place}: device-filter is {given!r}, expected a text or a list of texts")
    return GpuConfig(
        place,
        None if devices == "all" else tuple(devices),
        tuple(filter(None, filters)),
        dict(_vgpus(found["vgpu-devices"], place)),
    )


def _vgpus(found: object, place: str) -> Iterator[tuple[str, int]]:
    for name, count in _mapping(found, f"{place}, vgpu-devices").items():
        if type(count) is not int or count <= 0:
            _reject(f"{place}: {count!r} is not a number of {name}")
        yield str(name), count


def _mapping(value: object, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _reject(f"{what}: not a mapping")
    return value


def _reject(why: str) -> NoReturn:
    raise ValueError(why)


_NVIDIA = "10de"
_GPU_CLASSES = ("0300", "0302")
"""The classes that NVIDIA's own tools treat as GPUs (go-nvlib, pkg/nvpci)."""


def layouts_of(
    configs: VgpuConfigs, host: HostSnapshot | None, left: list[str]
) -> dict[str, Layout]:
    """A layout for each configuration; what is not carried over is added to `left`."""
    return {
        name: Layout(devices=tuple(_Rules(host, left).rules(entries)))
        for name, entries in configs.items()
    }


class _Rules:
    """The rules of one configuration."""

    def __init__(self, host: HostSnapshot | None, left: list[str]) -> None:
        self._left = left
        self._gpus = None if host is None else tuple(_gpus(host))
        self._before = EarlierRules()
        self._has_all = False
        self._named: set[PciAddress] = set()

    def rules(self, entries: tuple[GpuConfig, ...]) -> Iterator[VgpuRule]:
        """The rules, the last entry first; entries without remaining GPUs are reported."""
        for index in reversed(range(len(entries))):
            entry = entries[index]
            select = self._selector(entry)
            if select is None:
                continue
            before = self._before.before(select)
            if self._has_all or any(covers(earlier, select) for _, earlier in before):
                self._tell(entry, "a later entry covers all of its GPUs, so it never applies")
                continue
            self._before.add(index, select)
            self._has_all |= select == _selector_of((f"{_NVIDIA}:*",))
            self._named.update(select.address)
            self._tell_of_types(entry)
            yield VgpuRule(
                select=select,
                state="vgpu",
                at_least=0 if entry.filters else 1,
                vgpus=tuple(VgpuRequest(type=t, per_gpu=count) for t, count in entry.vgpus.items()),
            )

    def _selector(self, entry: GpuConfig) -> Selector | None:
        identifiers = self._identifiers(entry)
        if entry.filters and not identifiers:
            return None
        if entry.indices is None:
            self._tell_of_display(entry, identifiers)
            return _selector_of(identifiers or (f"{_NVIDIA}:*",))
        addresses = tuple(self._addresses(entry, identifiers))
        if not addresses:
            self._tell(entry, "no GPU of this host remains for it")
            return None
        return Selector(address=addresses)

    def _identifiers(self, entry: GpuConfig) -> tuple[str, ...]:
        found: list[str] = []
        for text in entry.filters:
            identifier = identifier_of(text)
            if identifier is None:
                self._tell(entry, f"the device-filter {text!r} is not a number and matches no GPU")
            elif identifier not in found:
                found.append(identifier)
        return tuple(found)

    def _addresses(self, entry: GpuConfig, identifiers: tuple[str, ...]) -> Iterator[PciAddress]:
        """The GPUs of the indices, which count all GPUs of the node."""
        if self._gpus is None:
            self._tell(entry, "its indices refer to GPUs of a host: import it there")
            return
        for index in dict.fromkeys(entry.indices or ()):
            if not 0 <= index < len(self._gpus):
                have = f"this host has {len(self._gpus)} NVIDIA GPUs"
                self._tell(entry, f"GPU {index} not found: {have}")
                continue
            gpu = self._gpus[index]
            if identifiers and f"{gpu.vendor_id}:{gpu.device_id}" not in identifiers:
                self._tell(entry, f"GPU {index}, {gpu}, does not match its device-filter")
            elif gpu.address in self._named:
                self._tell(
                    entry, f"GPU {index}, {gpu.address}, belongs to a later entry, which applies"
                )
            else:
                self._tell(entry, f"GPU {index} is {gpu.address} on this host; other hosts differ")
                yield gpu.address

    def _tell_of_display(self, entry: GpuConfig, identifiers: tuple[str, ...]) -> None:
        for gpu in self._gpus or ():
            is_meant = not identifiers or f"{gpu.vendor_id}:{gpu.device_id}" in identifiers
            if gpu.is_boot_display and is_meant:
                why = "is the console's display, which only its address selects"
                self._tell(entry, f"{gpu.address} {why}")

    def _tell_of_types(self, entry: GpuConfig) -> None:
        if any(map(lives_in_gpu_instance, entry.vgpus)):
            why = (
                "its types require MIG, which mig-parted enables there; to enable it here, add "
                "mig: true"
            )
            self._tell(entry, why)
        elif len(entry.vgpus) > 1:
            why = "types of several sizes on one GPU require heterogeneous: true, if it is not set"
            self._tell(entry, why)

    def _tell(self, entry: GpuConfig, what: str) -> None:
        self._left.append(f"vgpu-device-manager, {entry.place}: {what}")


def _selector_of(identifiers: tuple[str, ...]) -> Selector:
    return Selector.model_validate({"id": identifiers, "class": _GPU_CLASSES})


def _gpus(host: HostSnapshot) -> Iterator[PciDevice]:
    """NVIDIA's physical GPUs by address, in the order of the indices."""
    for device in sorted(host.devices, key=lambda known: known.address):
        is_gpu = device.vendor_id == _NVIDIA and device.class_code.startswith(_GPU_CLASSES)
        if is_gpu and device.physical_function is None:
            yield device
