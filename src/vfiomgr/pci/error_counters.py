"""The counters of PCI Express errors that the kernel keeps for each function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_TOTAL = "TOTAL_ERR_"
_UPTIME = HostPath("/proc/uptime")
_SECONDS = expression(r"\d{1,12}(?:\.\d{1,6})?")


class FunctionHealth(Value):
    """Numbers of errors of a function since boot, from AER; None where it has no counters."""

    address: PciAddress
    fatal: int | None = None
    """Fatal errors (`aer_dev_fatal`)."""
    nonfatal: int | None = None
    """Non-fatal errors (`aer_dev_nonfatal`)."""
    correctable: int | None = None
    """Corrected errors (`aer_dev_correctable`)."""
    reported: int | None = None
    """Messages about corrected errors that a root port received, its own included."""
    kinds: tuple[str, ...] = ()
    """The kinds of its errors, with their numbers, e.g. `BadTLP 3`; only if asked for."""


class HealthFacts(Value, dict=True):
    """The numbers of errors of functions at one moment."""

    functions: tuple[FunctionHealth, ...] = ()
    """The functions that have counters."""
    seconds: float = 0.0
    """The moment, in seconds since boot; 0 if unknown."""

    @cached_property
    def _by_address(self) -> dict[PciAddress, FunctionHealth]:
        return {function.address: function for function in self.functions}

    def of(self, address: PciAddress) -> FunctionHealth | None:
        """The numbers of a function."""
        return self._by_address.get(address)


def read_health(tree: HostTree, addresses: Iterable[PciAddress]) -> HealthFacts:
    """The error counters of functions, which the kernel keeps in memory: no device is woken.

    See Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
    """
    found = []
    for address in dict.fromkeys(addresses):
        fatal, nonfatal, correctable = (
            _total(tree.read_in(pci_device(address), f"aer_dev_{kind}"))
            for kind in ("fatal", "nonfatal", "correctable")
        )
        if (fatal, nonfatal, correctable) != (None, None, None):
            found.append(FunctionHealth(address, fatal, nonfatal, correctable))
    return HealthFacts(tuple(found))


def read_error_kinds(tree: HostTree, addresses: Iterable[PciAddress]) -> HealthFacts:
    """The error counters of functions at this moment, with their kinds and those of root ports."""
    found = read_health(tree, addresses).functions
    seconds = (tree.read(_UPTIME) or "").partition(" ")[0]
    return HealthFacts(
        tuple(
            replace(
                each,
                reported=tree.read_number(pci_device(each.address) / "aer_rootport_total_err_cor"),
                kinds=tuple(_kinds(tree, each)),
            )
            for each in found
        ),
        float(seconds) if _SECONDS.fullmatch(seconds) else 0.0,
    )


def _kinds(tree: HostTree, errors: FunctionHealth) -> Iterator[str]:
    for kind in ("fatal", "nonfatal", "correctable"):
        if getattr(errors, kind):
            text = tree.read_in(pci_device(errors.address), f"aer_dev_{kind}") or ""
            lines = (line.split() for line in text.splitlines() if not line.startswith(_TOTAL))
            yield from (f"{w[0]} {w[1]}" for w in lines if len(w) == 2 and w[1].strip("0"))  # noqa: PLR2004


def with_present_fatal(tree: HostTree, health: FunctionHealth) -> FunctionHealth:
    """The errors of a function with the present number of fatal ones: one file of three."""
    fatal = _total(tree.read_in(pci_device(health.address), "aer_dev_fatal"))
    return health if fatal == health.fatal else replace(health, fatal=fatal)


def _total(text: str | None) -> int | None:
    """The number in the last line, `TOTAL_ERR_FATAL 3` (aer_stats_dev_attr in pcie/aer.c)."""
    name, _, number = (text or "").rstrip().rpartition("\n")[2].partition(" ")
    return int(number) if name.startswith(_TOTAL) and number.isdecimal() else None
