"""Values that replace what is configured whole, and so have to hold it: lists within a string."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST_BITS = "host-phys-bits=on"
"""Physical addresses of the guest as wide as the host's (target/i386/cpu.c)."""
_OWN_FEATURES = "pmu=off"
"""What Kata takes where nothing is configured."""
_PREFIX = "io.katacontainers.config.hypervisor."
_ANNOTATION = re.compile(r"\^?([a-z][a-z0-9_]*)\$?")


def with_host_bits(configured: str) -> str:
    """CPU features, and addresses as wide as the host's."""
    features = [each.strip() for each in (configured or _OWN_FEATURES).split(",")]
    kept = [each for each in features if each and not each.startswith("host-phys-bits=")]
    return ",".join([*kept, HOST_BITS])


def with_params(configured: str, added: Iterable[str]) -> str:
    """Arguments of the guest's kernel; names may come several times, as pci= does."""
    return " ".join(dict.fromkeys([*configured.split(), *added]))


def with_annotations(configured: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Expressions of annotations; Kata lets any part of a name match, where nothing anchors it."""
    return tuple(dict.fromkeys([*configured, *(f"^{name}$" for name in names)]))


def annotation_name(text: str) -> str:
    """The name of an annotation, typed as such, in full, or as an expression of it.

    Raises:
        UsageError: it is none.

    """
    match = _ANNOTATION.fullmatch(text.strip().removeprefix(_PREFIX))
    if match is None:
        message = f"--annotations {text}: that is no name of an annotation"
        raise UsageError(message, "write names with commas between them, e.g. kernel_params")
    return match[1]
