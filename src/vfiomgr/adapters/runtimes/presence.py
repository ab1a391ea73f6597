"""Whether a file gives a runtime an entry of some name, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import template, text, values
from vfiomgr.adapters.runtimes.containerd import CRI_NAMES

if TYPE_CHECKING:
    from vfiomgr.model.runtime import ConfigFile, Key, ProgramName

_KEYS: dict[ProgramName, tuple[Key, ...]] = {
    "containerd": tuple(("plugins", cri, "containerd", "runtimes") for cri in CRI_NAMES),
    "crio": (("crio", "runtime", "runtimes"),),
    "docker": (("runtimes",),),
}


def has_entry(file: ConfigFile, program: ProgramName, name: str) -> bool:
    """Whether there is one.

    Raises:
        InvalidDocument: the file cannot be read.

    """
    if file.text is None:
        return False
    if program not in _KEYS:
        return template.names(file.text, name)
    data = text.parse(file.text, file.path)
    return any(values.found(data, (*key, name)) is not values.ABSENT for key in _KEYS[program])
