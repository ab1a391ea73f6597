"""Names of extended resources, in the style of NVIDIA's device plugins.

The node agent offers devices under these names, and `kata pod` requests them.

The rule for models is that of NVIDIA's kubevirt-gpu-device-plugin (getDeviceName): upper case, `/`,
`.` and white space become `_`, the rest is removed. vGPU types keep their case and `-`.
A name must also be the class of a CDI kind, which begins with a letter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from vfiomgr.containers.cdi.document import LABEL, is_kind
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import AssignableGroup, offers
from vfiomgr.pci.names import maker_and_model
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

DEFAULT_PREFIX = "vfiomgr.io"
"""The domain of resource names."""
_NVIDIA = "10de"
_MIB, _GIB = 1 << 20, 1 << 30
LONGEST = 63
"""Characters of a resource name."""
_LONGEST_PREFIX = 40
_DIGEST = 4
_UNDERSCORE = expression(r"[/.\s]")
_OTHERS = expression(r"[^A-Za-z0-9_-]")
_SPACES = expression(r"\s+")
_DOMAIN = expression(rf"(?=[a-z]){LABEL}(\.{LABEL})+")
_UNNAMED = expression(r"(.*?)\s*\b([0-9a-f]{4}:[0-9a-f]{4})")
"""A device that pci.ids does not have (pci/names.py)."""
_RESERVED = "kubernetes.io"


class NameSettings(Protocol):
    """Settings of names."""

    @property
    def prefix(self) -> str:
        """The domain of the names."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Chosen names of models and vGPU types."""


class _Defaults(Value):
    prefix: str = DEFAULT_PREFIX
    aliases: Mapping[str, str] = MappingProxyType({})


class DeviceKind(Value):
    """The devices that one resource has, unless an alias joins several."""

    key: str
    """Identifies the kind on every host: `10de:2235`, or a vGPU type."""
    name: str
    """The name of its resource, without the domain."""
    suffix: str
    """Distinguishes it from another kind of the same name."""
    aliases: tuple[str, ...] = ()
    """The texts that name it in settings, in lower case."""


def kind_of_model(device: PciDevice, *, quota: str | None = None) -> DeviceKind:
    """The kind of a function: its model; of a virtual one with the IDs of a model, its quota too.

    `quota` is None for a function that has its own PCI IDs.
    """
    pci_id = f"{device.vendor_id}:{device.device_id}"
    name = _of_model(device)
    if quota is None:
        return DeviceKind(pci_id, name, device.device_id.upper(), (pci_id, name.lower()))
    name = "_".join(filter(None, (name, "VF", quota)))
    return DeviceKind(f"{pci_id} VF {quota}", name, device.device_id.upper(), (name.lower(),))


def kind_of_type(type_id: str, type_name: str | None) -> DeviceKind:
    """The kind of a vGPU: its type."""
    known = type_name or type_id
    name = _class_name(_SPACES.sub("_", known.strip()), "VGPU")
    maker, short = known.rpartition(" ")[::2]
    spoken = (known, known.removeprefix("NVIDIA ").removeprefix("GRID "), type_id, name)
    texts = dict.fromkeys(text.lower() for text in (*spoken, short if maker else known))
    return DeviceKind(f"vGPU {known}", name, _digest(type_id).upper(), tuple(texts))


def name_resources(kinds: Iterable[DeviceKind], settings: NameSettings) -> Mapping[str, str]:
    """DOMAIN/NAME by the key of each kind; different kinds only share a name given by an alias.

    Raises:
        UsageError: the prefix or an alias is invalid.
    """
    _check_prefix(settings.prefix)
    aliases = {key.lower(): qualified(name, settings) for key, name in settings.aliases.items()}
    found: dict[str, str] = {}
    plain: list[DeviceKind] = []
    for kind in {kind.key: kind for kind in kinds}.values():
        alias = next((aliases[text] for text in kind.aliases if text in aliases), None)
        if alias is None:
            plain.append(kind)
        else:
            found[kind.key] = alias
    return found | _distinct(plain, settings.prefix, frozenset(found.values()))


def _distinct(kinds: Sequence[DeviceKind], prefix: str, taken: AbstractSet[str]) -> dict[str, str]:
    """Names for kinds: kinds of the same name have their IDs in it, or else digests."""
    found: dict[str, str] = {}
    open_kinds = list(kinds)
    for place in range(3):
        names = {k.key: _fitted(prefix, k.name, _suffixes(k)[place]) for k in open_kinds}
        counts = Counter(names.values())
        used = {*taken, *found.values()}
        unique = {key for key, name in names.items() if counts[name] == 1 and name not in used}
        found |= {key: names[key] for key in unique}
        open_kinds = [kind for kind in open_kinds if kind.key not in unique]
    return found


def _suffixes(kind: DeviceKind) -> tuple[str, str, str]:
    return "", f"_{kind.suffix}", f"_{_digest(kind.key, 2 * _DIGEST).upper()}"


def qualified(name: str, settings: NameSettings) -> str:
    """The name of a resource as a user wrote it, with the domain if it has none.

    Raises:
        UsageError: it is not a valid name.
    """
    full = name if "/" in name else f"{settings.prefix}/{name}"
    domain, _, last = full.partition("/")
    if not is_kind(full) or len(full) > LONGEST or _OTHERS.search(last.replace(".", "")):
        message = f"invalid resource name: {name!r}"
        hint = f"use letters, digits, - and _, beginning with a letter, e.g. {settings.prefix}/GPU"
        raise UsageError(message, f"{hint}, with at most {LONGEST} characters")
    _check_prefix(domain)
    return full


def _check_prefix(prefix: str) -> None:
    is_reserved = prefix == _RESERVED or prefix.endswith(f".{_RESERVED}")
    if is_reserved or len(prefix) > _LONGEST_PREFIX or not _DOMAIN.fullmatch(prefix):
        message = f"invalid domain of resource names: {prefix!r}"
        why = f"a domain of your own, at most {_LONGEST_PREFIX} characters"
        raise UsageError(message, f"use {why}, e.g. example.com")


def _of_model(device: PciDevice) -> str:
    """`GA102GL_A40`; with the maker if the model begins with a digit or is unknown."""
    unnamed = _UNNAMED.fullmatch(device.name)
    if unnamed is not None:
        return _class_name(f"{device.vendor_id}_{device.device_id}".upper(), "PCI")
    maker, model = maker_and_model(device.name)
    plain = model.upper().replace("/", "_").replace("-", "")
    return _class_name(_SPACES.sub("_", plain), maker.upper() or "PCI")


def _class_name(text: str, before: str) -> str:
    """A valid class of CDI; `before` precedes a name that is a letter or begins with none."""
    plain = _OTHERS.sub("", _UNDERSCORE.sub("_", text)).rstrip("_-").lstrip("_-")
    if plain[:1].isalpha() and len(plain) > 1:
        return plain
    return f"{_OTHERS.sub('', _UNDERSCORE.sub('_', before))}_{plain}".rstrip("_")


def _fitted(prefix: str, name: str, suffix: str = "") -> str:
    """The full name; a long one is cut, and ends with a digest of all of it."""
    room = LONGEST - len(prefix) - 1 - len(suffix)
    if len(name) > room:
        name = f"{name[: room - _DIGEST - 1].rstrip('_-')}_{_digest(name)}"
    return f"{prefix}/{name}{suffix}"


def _digest(text: str, length: int = _DIGEST) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def is_fit(host: HostSnapshot, offer: AssignableGroup) -> bool:
    """Whether a guest can use all functions of a group that the kernel allows it to open."""
    members = host.group_members(offer.group)
    return not any(
        device.virtual_functions
        or is_without_memory(host, device)
        or not (device.is_bridge or host.vgpus.is_ready_for_guests(device))
        for device in members
    )


def is_without_memory(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether it is a virtual function of an NVIDIA GPU on a VFIO driver, which has no memory."""
    physical = host.device_named(str(device.physical_function))
    if physical is None or not device.is_on_vfio or device.vendor_id != _NVIDIA:
        return False
    return physical.is_graphics_or_accelerator


def kind_of_function(host: HostSnapshot, device: PciDevice) -> DeviceKind:
    """The kind of a function: its model, its quota, or the type of the vGPU that it is."""
    vgpu = host.vgpus.named(str(device.address)) if host.vgpus.is_vendor_function(device) else None
    if vgpu is not None and vgpu.family == "vendor-vfio":
        return kind_of_vgpu(host, vgpu)
    physical = host.device_named(str(device.physical_function))
    ids = (device.vendor_id, device.device_id)
    if physical is None or (physical.vendor_id, physical.device_id) != ids:
        return kind_of_model(device)
    return kind_of_model(device, quota=_memory(host, device))


def _memory(host: HostSnapshot, device: PciDevice) -> str:
    """The memory of a virtual function in a name: `4G`, `1536M`; empty if unknown."""
    quotas = host.function_quotas(device)
    memory = quotas.memory if quotas is not None else None
    if not memory:
        return ""
    return f"{memory // _GIB}G" if memory % _GIB == 0 else f"{memory // _MIB}M"


def kind_of_vgpu(host: HostSnapshot, vgpu: Vgpu) -> DeviceKind:
    """The kind of a vGPU, with the name of its type as the host has it."""
    name = vgpu.type_name or next(
        (t.name for p in host.vgpus.parents for t in p.types if t.id == vgpu.type and t.name), None
    )
    return kind_of_type(vgpu.type, name)


def default_names(host: HostSnapshot, functions: Iterable[PciDevice]) -> Mapping[PciAddress, str]:
    """The names under which an agent without settings offers functions, ready or not."""
    kinds = {device.address: kind_of_function(host, device) for device in functions}
    ready = [
        kind_of_vgpu(host, offer.vgpu) if offer.vgpu else kind_of_function(host, first_of(offer))
        for offer in offers(host, with_mediated=True)
        if offer.vgpu is not None or is_fit(host, offer)
    ]
    names = name_resources([*ready, *kinds.values()], _Defaults())
    return {address: names[kind.key] for address, kind in kinds.items()}


def first_of(offer: AssignableGroup) -> PciDevice:
    """The function that names a group."""
    return next(d for d in offer.functions if str(d.address) == offer.name)
