"""What configurations of Kata say of the guest: its files, and what its containers get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FILES = ("kernel", "image", "initrd")
_QEMU = "qemu"


@dataclass(frozen=True, slots=True)
class GuestSettings:
    """What is set; the empty text where nothing is."""

    hypervisor: str
    files: tuple[tuple[str, str], ...]
    """Key and path, of those that are named."""
    rootfs_type: str
    guest_hook_path: str
    vfio_mode: str


def read_guest(texts: Iterable[tuple[str, str]]) -> GuestSettings:
    """What a configuration and its drop-ins say: of each key the last (decodeDropIns in config.go).

    `texts` are names and contents, in the order in which Kata reads them.

    Raises:
        InvalidDocument: one of them is no TOML.

    """
    documents = [_parsed(name, text) for name, text in texts]
    hypervisor = _last(documents, "runtime", "hypervisor_name") or _hypervisor(documents)
    section = ("hypervisor", hypervisor)
    named = ((key, _last(documents, *section, key)) for key in _FILES)
    return GuestSettings(
        hypervisor,
        tuple((key, path) for key, path in named if path),
        _last(documents, *section, "rootfs_type"),
        _last(documents, *section, "guest_hook_path"),
        _last(documents, "runtime", "vfio_mode") or "guest-kernel",
    )


def _parsed(name: str, text: str) -> Mapping[str, Any]:
    import tomllib  # noqa: PLC0415 - few commands read TOML

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = f"{name} is no TOML: {error}"
        raise InvalidDocument(message, "Kata reads it no better: mend that place") from None


def _hypervisor(documents: Iterable[Mapping[str, Any]]) -> str:
    names = [
        name for d in documents if isinstance(d.get("hypervisor"), dict) for name in d["hypervisor"]
    ]
    return _QEMU if _QEMU in names or not names else str(names[0])


def _last(documents: Iterable[Mapping[str, Any]], *path: str) -> str:
    """The last text at a place; the empty one where there is none."""
    found = ""
    for document in documents:
        value: Any = document
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        found = value if isinstance(value, str) else found
    return found
