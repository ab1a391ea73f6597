"""How this vfiomgr was installed, for remedies about Python libraries that it lacks."""

from __future__ import annotations

import sys

PACKAGED = "/usr/lib/vfiomgr"
"""The virtual environment in the .deb and the .rpm, which has no pip."""


def remedy_for_extra(extra: str) -> str:
    """How to install the libraries of an extra; the packages contain those of all extras."""
    if sys.prefix == PACKAGED:
        return "install the package vfiomgr again: it contains this library"
    return f"in the source directory of vfiomgr: {sys.prefix}/bin/pip install '.[{extra}]'"


def remedy_for_libvirt() -> str:
    """How to install libvirt-python; the packages use that of the system's libvirt."""
    if sys.prefix == PACKAGED:
        return "install the system's package python3-libvirt"
    needs = "needs gcc, pkg-config, python3-dev and libvirt-dev"
    return f"{sys.executable} -m pip install libvirt-python ({needs})"
