"""How this vfiomgr was installed, for remedies about Python libraries that it lacks."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

PACKAGED = "/usr/lib/vfiomgr"
"""The virtual environment in the packages, which has no pip."""
BESIDE = Path(__file__).parents[2] / "msgspec"
"""A library in the .deb and the .rpm; the package of Arch Linux uses libraries of the system."""


def optional(name: str, verb: str, extra: str) -> ModuleType:
    """A module that needs the libraries of an extra; `verb` names the operation in an error.

    Raises:
        UsageError: one of them is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        message = f"cannot {verb}: the libraries of the extra {extra!r} are not installed"
        raise UsageError(message, remedy_for_extra(extra)) from None


def remedy_for_extra(extra: str) -> str:
    """How to install the libraries of an extra; the .deb and the .rpm contain those of all."""
    if sys.prefix != PACKAGED:
        return f"in the source directory of vfiomgr: {sys.prefix}/bin/pip install '.[{extra}]'"
    if BESIDE.exists():
        return "install the package vfiomgr again: it contains this library"
    return f"install for the system's Python: {', '.join(_required(extra))}"


def remedy_for_libvirt() -> str:
    """How to install libvirt-python; the packages use that of the system's libvirt."""
    if sys.prefix == PACKAGED:
        name = "python3-libvirt" if BESIDE.exists() else "libvirt-python"
        return f"install the system's package {name}"
    needs = "needs gcc, pkg-config, python3-dev and libvirt-dev"
    return f"{sys.executable} -m pip install libvirt-python ({needs})"


def _required(extra: str) -> list[str]:
    """The libraries of an extra, of which a package knows no version."""
    from importlib.metadata import requires  # noqa: PLC0415 - slow, and only for an error

    ends = f"; extra == {extra!r}"
    found = requires("vfiomgr") or []
    return [one.partition(">=")[0] for one in found if one.endswith(ends)]
