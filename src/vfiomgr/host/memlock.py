"""How much memory the services and users that run guests may lock (RLIMIT_MEMLOCK)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.text import account_names, configuration_files, exists, settings_of
from vfiomgr.model.readiness import MemlockLimit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from vfiomgr.host.tree import HostTree

_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_SERVICES: dict[str, Literal["virtualization", "container-runtime"]] = {
    "libvirtd.service": "virtualization",
    "virtqemud.service": "virtualization",
    "containerd.service": "container-runtime",
    "crio.service": "container-runtime",
}
_USERS = ("libvirt-qemu", "qemu")
_LIMITS = "/etc/security/limits.conf"
_LIMITS_DIRECTORY = "/etc/security/limits.d"
_FIELDS = 4
_UNLIMITED = frozenset({"infinity", "unlimited", "-1"})


def read_memlock(tree: HostTree) -> tuple[MemlockLimit, ...] | None:
    """The settings for those services and users that the host has; None where there is no place."""
    if not any(exists(tree, place) for place in (*_UNITS, _LIMITS, _LIMITS_DIRECTORY)):
        return None
    return (*_services(tree), *_users(tree))


def _services(tree: HostTree) -> Iterator[MemlockLimit]:
    """The last LimitMEMLOCK of a unit and its drop-ins counts (systemd.unit(5))."""
    for service, kind in _SERVICES.items():
        unit = next((f"{d}/{service}" for d in _UNITS if exists(tree, f"{d}/{service}")), None)
        if unit is None:
            continue
        drop_ins = configuration_files(tree, (f"{d}/{service}.d" for d in _UNITS))
        settings = [
            (line, file)
            for file in (unit, *drop_ins)
            for line in settings_of(tree, file)
            if line.startswith("LimitMEMLOCK=")
        ]
        line, file = settings[-1] if settings else ("", unit)
        value = line.partition("=")[2].strip()
        if value:
            is_unlimited = all(part in _UNLIMITED for part in value.split(":"))
            yield MemlockLimit(service, kind, line, is_unlimited, file)


def _users(tree: HostTree) -> Iterator[MemlockLimit]:
    """Lines of limits.conf(5) that name a user of QEMU: domain, type, item, value."""
    present = set(account_names(tree)[0].values()).intersection(_USERS)
    for file in (_LIMITS, *configuration_files(tree, (_LIMITS_DIRECTORY,))):
        for line in settings_of(tree, file):
            fields = line.split()
            if len(fields) >= _FIELDS and fields[0] in present and fields[2] == "memlock":
                setting = f"{fields[1]} memlock {fields[3]}"
                user = f"user {fields[0]}"
                yield MemlockLimit(user, "user", setting, fields[3] in _UNLIMITED, file)
