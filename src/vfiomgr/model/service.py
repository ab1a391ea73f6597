"""The service that watches for hot-plugged functions, as a unit of systemd (systemd.service(5))."""

from __future__ import annotations

import re

from vfiomgr.errors import Refusal
from vfiomgr.model.path import RUNTIME, HostPath

UNITS = HostPath("/etc/systemd/system")
UNIT = UNITS / "vfiomgr-persist.service"
SWEPT = RUNTIME / "persist-swept"
"""Tells the service that it has looked at all functions in this boot."""
_PLAIN = re.compile(r"/[A-Za-z0-9._+/-]+")


def render_unit(program: str) -> str:
    """The unit; udev starts it with the first persisted function (SYSTEMD_WANTS in its rule).

    Raises:
        Refusal: a path that would have to be quoted.

    """
    return f"""\
# vfiomgr: removed with the last rule, by vfiomgr persist remove.
[Unit]
Description=Persisted PCI functions go to their VFIO drivers, also when they are hot-plugged
After=local-fs.target

[Service]
ExecStart={require_plain(program)} persist watch
Restart=on-failure
SuccessExitStatus=130
"""


def require_plain(program: str) -> str:
    """A path that a unit can hold as it is.

    Raises:
        Refusal: it would have to be quoted.

    """
    if not _PLAIN.fullmatch(program):
        message = f"no unit of systemd can be written for {program!r}"
        raise Refusal(message, "install vfiomgr at a path of letters, digits and ._+/- only")
    return program
