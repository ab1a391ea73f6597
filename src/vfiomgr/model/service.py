"""The service that watches for hot-plugged functions, as a unit of systemd (systemd.service(5))."""

from __future__ import annotations

import re

from vfiomgr.errors import Refusal
from vfiomgr.model.path import RUNTIME, HostPath

UNITS = HostPath("/etc/systemd/system")
UNIT = UNITS / "vfiomgr-persist.service"
SWEPT = RUNTIME / "persist-swept"
"""Tells the service that it has looked at all functions in this boot."""
_PLAIN = re.compile(r"/[A-Za-z0-9._+/-]+( -I -m vfiomgr)?")
_CAPABILITIES = (
    "CAP_SYS_ADMIN CAP_SYS_MODULE CAP_SYS_PTRACE CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH "
    "CAP_CHOWN CAP_FOWNER CAP_MKNOD"
)
SANDBOX = f"""\
NoNewPrivileges=yes
CapabilityBoundingSet={_CAPABILITIES}
ProtectSystem=strict
StateDirectory=vfiomgr
ReadWritePaths=/run -/etc/cdi -/etc/vfiomgr -/etc/mdevctl.d
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_NETLINK
IPAddressDeny=any
RestrictNamespaces=net
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service @module
SystemCallErrorNumber=EPERM
"""
"""What a service of vfiomgr may do (systemd.exec(5)): docs/decisions/0014-programs-and-services.md.

Not protected is what its work is about: /sys, kernel modules, device nodes, other processes (who
holds a device), the host's own network namespace (events of udev, routes)."""

_REAL_TIME = """\
CapabilityBoundingSet=CAP_SYS_NICE
RestrictRealtime=no
"""
"""For the listeners (host/hotplug.py), which race with the kernel; it adds to what is above."""


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
{SANDBOX}{_REAL_TIME}"""


def require_plain(program: str) -> str:
    """The words that run vfiomgr, as a unit and a shell can hold them: a path, or an interpreter's.

    Raises:
        Refusal: it would have to be quoted.

    """
    if not _PLAIN.fullmatch(program):
        message = f"no unit of systemd can be written for {program!r}"
        raise Refusal(message, "install vfiomgr at a path of letters, digits and ._+/- only")
    return program
