"""The persistent bindings of a host, and the program that its units, hooks and rules run.

The program is this vfiomgr, isolated, and writable only by root.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal

import vfiomgr
from vfiomgr.diagnostic import refuse
from vfiomgr.host.owners import NodeOwner, weakness
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.persistence.facts import has_systemd, read_keeping
from vfiomgr.persistence.installed_layout import of_layout
from vfiomgr.persistence.model import require_plain
from vfiomgr.persistence.reservation import reservations
from vfiomgr.persistence.systems import why_lost
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class PersistedFunction(Value):
    """A function that is bound at each boot, or reserved."""

    address: PciAddress
    driver: str | None
    """None if it is only reserved, and stays on its host driver."""
    owner: Literal["vfiomgr", "layout", "driverctl"]
    """The owner of the rule: vfiomgr, a layout or driverctl."""
    device: Literal["same", "another", "absent", "unrecorded"]
    """Whether the recorded device is at the address now."""
    recorded: DeviceIdentity | None
    node_owner: NodeOwner | None
    """The owner of the VFIO nodes."""
    driver_now: str | None
    reserved: bool = False
    """Whether compositors leave it alone (`bind --reserve`)."""

    @property
    def is_pending(self) -> bool:
        """Whether the device exists, is on a host driver, and is bound at the next boot."""
        is_same = self.device == "same" and self.driver is not None
        return is_same and self.driver_now not in (None, self.driver)


def persisted(host: HostSource) -> tuple[PersistedFunction, ...]:
    """The bindings and reservations of vfiomgr, of an installed layout, and of driverctl."""
    found = host.scan()
    reserved = reservations(found.files)
    own = (
        PersistedFunction(
            binding.address,
            binding.driver,
            "vfiomgr" if of_layout(found, binding.address) is None else "layout",
            _state(found, binding.address, binding.device),
            binding.device,
            binding.owner,
            _driver_now(found, binding.address),
            binding.address in reserved,
        )
        for binding in found.files.bindings
    )
    unbound = (
        PersistedFunction(
            address,
            None,
            "vfiomgr",
            _state(found, address, card.device),
            card.device,
            None,
            _driver_now(found, address),
            reserved=True,
        )
        for address, card in reserved.items()
        if found.files.binding(address) is None
    )
    others = (
        PersistedFunction(
            entry.address,
            entry.driver,
            "driverctl",
            _state(found, entry.address, None),
            None,
            None,
            _driver_now(found, entry.address),
        )
        for entry in found.files.driverctl_overrides
    )
    return (*sorted((*own, *unbound), key=lambda each: each.address), *others)


def _state(
    host: HostSnapshot, address: PciAddress, recorded: DeviceIdentity | None
) -> Literal["same", "another", "absent", "unrecorded"]:
    present = next((d.identity for d in host.devices if d.address == address), None)
    if present is None:
        return "absent"
    if recorded is None:
        return "unrecorded"
    return "same" if recorded.is_same_as(present) else "another"


def _driver_now(host: HostSnapshot, address: PciAddress) -> str | None:
    return next((d.driver for d in host.devices if d.address == address), None)


_MODULE = ("-I", "-m", "vfiomgr")
_ASK = "import json, sys, vfiomgr; print(json.dumps([vfiomgr.__file__, sys.prefix, sys.path]))"
_SECONDS = 30


def keeps_files(host: HostSource) -> bool:
    """Whether what is written to /etc lasts, as far as is known."""
    return not why_lost(read_keeping(host.tree))


def program_for_units(host: HostSource) -> str | None:
    """Return `own_program`; None without systemd, as no unit is written then."""
    return own_program() if has_systemd(host.files) else None


def own_program() -> str | None:
    """The command that runs this vfiomgr isolated; None if it is not installed.

    Raises:
        Refusal: users other than root could replace the program.
    """
    places = _isolated_places() if _is_command() else None
    if places is None:
        return None
    machine = HostTree("/")
    for place in (sys.executable, os.path.dirname(sys.executable), *places):
        why = weakness(machine, place)
        if why:
            message = f"cannot run {sys.executable} as a root service: {why}"
            remedy = "install vfiomgr in /opt/vfiomgr (see README.md), and run that command"
            refuse("program-not-trusted", sys.executable, message, remedy)
    return " ".join((require_plain(sys.executable), *_MODULE))


def _is_command() -> bool:
    """Whether it runs as the command vfiomgr, or already isolated."""
    import shutil  # noqa: PLC0415 - slow to import

    name = sys.argv[0]
    is_named = os.path.basename(name) == "vfiomgr" and shutil.which(name) is not None
    return is_named or bool(sys.flags.isolated)


def _isolated_places() -> list[str] | None:
    """The directories that Python reads in isolated mode; None if vfiomgr cannot run that way."""
    import subprocess  # noqa: PLC0415 - slow to import

    command = [sys.executable, "-I", "-c", _ASK]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SECONDS, cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    import json  # noqa: PLC0415 - a dry run of `bind` needs none

    file, prefix, searched = json.loads(answer.stdout)
    if file != vfiomgr.__file__:
        return None
    return [prefix, os.path.dirname(file), *searched]
