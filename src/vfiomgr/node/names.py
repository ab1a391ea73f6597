"""Names of extended resources, as users of NVIDIA's plugins know them, and labels of the node.

The rule for models is that of NVIDIA's kubevirt-gpu-device-plugin (getDeviceName): upper case, `/`,
`.` and white space become `_`, the rest is removed. vGPU types keep their case and `-`.
A name must also be the class of a CDI kind, which begins with a letter. Labels are lines for the
local source of Node Feature Discovery (features.d).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.grammar import is_kind
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.node.model import DEFAULT_PREFIX
from vfiomgr.pci.names import maker_and_model
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.node.model import Inventory, NodeSettings
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

LONGEST = 63
"""Characters of a resource name."""
_LONGEST_PREFIX = 40
_DIGEST = 4
_UNDERSCORE = expression(r"[/.\s]")
_OTHERS = expression(r"[^A-Za-z0-9_-]")
_SPACES = expression(r"\s+")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_DOMAIN = expression(rf"[a-z]([a-z0-9-]*[a-z0-9])?(\.{_LABEL})+")
_UNNAMED = expression(r"(.*?)\s*\b([0-9a-f]{4}:[0-9a-f]{4})")
"""A device that pci.ids does not have (pci/names.py)."""
_RESERVED = "kubernetes.io"


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


def name_resources(kinds: Iterable[DeviceKind], settings: NodeSettings) -> Mapping[str, str]:
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
    for suffix_of in (_no_suffix, _id_suffix, _digest_suffix):
        names = {k.key: _fitted(prefix, k.name, suffix_of(k)) for k in open_kinds}
        counts = Counter(names.values())
        used = {*taken, *found.values()}
        unique = {key for key, name in names.items() if counts[name] == 1 and name not in used}
        found |= {key: names[key] for key in unique}
        open_kinds = [kind for kind in open_kinds if kind.key not in unique]
    return found


def _no_suffix(_kind: DeviceKind) -> str:
    return ""


def _id_suffix(kind: DeviceKind) -> str:
    return f"_{kind.suffix}"


def _digest_suffix(kind: DeviceKind) -> str:
    return f"_{_digest(kind.key, 2 * _DIGEST).upper()}"


def qualified(name: str, settings: NodeSettings) -> str:
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


_MOST = 63
"""Characters of the name of a label."""
_INVALID = expression(r"[^A-Za-z0-9._-]+")


def labels(
    inventory: Inventory, host: HostSnapshot, handlers: Iterable[str] = ()
) -> tuple[str, ...]:
    """`DOMAIN/NAME=VALUE` of each label, sorted; `handlers` are those of Kata.

    They say what a node has, not what is free: a label that changes with every pod is a load for
    the API server.
    """
    found = dict(_labels(inventory, host, handlers))
    return tuple(sorted(f"{DEFAULT_PREFIX}/{name}={value}" for name, value in found.items()))


def _labels(
    inventory: Inventory, host: HostSnapshot, handlers: Iterable[str]
) -> Iterator[tuple[str, str]]:
    yield "iommu", _flag(is_set=host.iommu.is_on)
    yield "iommufd", _flag(is_set=any(device.vfio_cdev for device in host.devices))
    for resource in inventory.resources:
        model = resource.name.partition("/")[2]
        is_vgpu = any(unit.kind != "function" for unit in resource.units)
        yield _name("vgpu" if is_vgpu else "model", model), str(len(resource.units))
    for driver in sorted({unit.driver for unit in inventory.units if unit.driver}):
        yield _name("driver", driver), "true"
    for handler in handlers:
        yield _name("kata", handler), "true"


def _name(kind: str, text: str) -> str:
    """`model.GA102GL_A40`; cut to the longest valid name."""
    return f"{kind}.{_INVALID.sub('_', text)}"[:_MOST].rstrip("._-")


def _flag(*, is_set: bool) -> str:
    return "true" if is_set else "false"
