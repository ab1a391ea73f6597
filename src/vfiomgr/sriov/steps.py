"""A step about the quotas of one function of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.step import Step
from vfiomgr.paths import HostPath, echo
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value
from vfiomgr.vgpu.quota.model import QUANTITIES, in_bytes

if TYPE_CHECKING:
    from vfiomgr.engine.step import Topic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


ALL = -1
"""In the place of a function's number: all of them."""


class QuotaChange(Value):
    """One attribute, by its path below the directory of the GPU's quotas."""

    name: str
    before: str
    after: str
    shown: str | None = None
    """Where its effect is read; None where it can be read itself."""

    def inverse(self) -> QuotaChange:
        """As it was."""
        return QuotaChange(self.name, before=self.after, after=self.before, shown=self.shown)


class SetQuotas(Step, Value):
    """Give a function of a GPU its share; where before and after are the same, make sure of it."""

    device: DeviceIdentity
    directory: str
    function: int
    """0 is the physical function, virtual ones count from 1."""
    changes: tuple[QuotaChange, ...]
    kind: ClassVar[str] = "set-quotas"

    @property
    def topic(self) -> Topic:
        """The same attributes of the same function."""
        names = frozenset(change.name for change in self.changes)
        return (self.kind, self.subject, self.function, names)

    def functions_reduced_by_undo(self, host: HostSnapshot) -> list[PciDevice]:
        """The virtual function that it gave memory to."""
        if not self.is_of_memory:
            return []
        return host.virtual_functions(self.device)[self.function - 1 : self.function]

    def describe(self) -> str:
        """Describe the step in one line."""
        words = dict.fromkeys(_in_words(change) for change in self.changes)
        verb = "make sure of " if self.is_check else ""
        return f"{self.device.address}: {self.who}: {verb}{', '.join(words)}"

    @property
    def who(self) -> str:
        """Whose share it is."""
        named = {0: "physical function", ALL: "all functions"}
        return named.get(self.function, f"VF {self.function}")

    @property
    def is_check(self) -> bool:
        """Whether it only makes sure of what an earlier step did."""
        return all(change.before == change.after for change in self.changes)

    @property
    def is_of_memory(self) -> bool:
        """Whether it gives a virtual function other memory."""
        kinds = {QUANTITIES.get(c.name.rpartition("/")[2]) for c in self.changes}
        return "memory" in kinds and self.function > 0 and not self.is_check

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        root = HostPath(self.directory)
        if self.is_check:
            return tuple(f"cat {root / (c.shown or c.name)}" for c in self.changes)
        return tuple(f"echo {c.after} > {root / c.name}" for c in self.changes)

    def inverse(self) -> SetQuotas | None:
        """As it was, the last change first; None of what changes nothing."""
        if self.is_check:
            return None
        changes = tuple(change.inverse() for change in reversed(self.changes))
        return SetQuotas(self.device, self.directory, self.function, changes)


def _in_words(change: QuotaChange) -> str:
    name = change.name.rpartition("/")[2]
    shown = change.after
    if QUANTITIES.get(name) == "memory" or name == "ggtt_quota":
        shown = in_bytes(int(change.after))
    return f"{name} {shown}"


class SetAutoprobe(Step, Value):
    """Let host drivers take the virtual functions that are made from now on, or not."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-autoprobe"

    is_setting: ClassVar[bool] = True

    def describe(self) -> str:
        """Describe the step in one line."""
        word = "let host drivers take" if self.after else "keep host drivers off"
        return f"{self.device.address}: {word} its new virtual functions"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        directory = paths.pci_device(self.device.address)
        return (echo(str(int(self.after)), directory / "sriov_drivers_autoprobe"),)

    def inverse(self) -> SetAutoprobe:
        """As it was."""
        return SetAutoprobe(self.device, before=self.after, after=self.before)


class SetVfCount(Step, Value):
    """Have so many virtual functions; the kernel wants 0 between two other numbers.

    With `shares` the driver forgets their quotas with them, so that these are set before they are
    made, by the step itself or by its inverse.
    """

    device: DeviceIdentity
    before: int
    after: int
    shares: tuple[SetQuotas, ...] = ()
    kind: ClassVar[str] = "set-vf-count"

    affects: ClassVar[str] = "functions"

    @property
    def recreates_below(self) -> str | None:
        """The bridge of the physical function, if there were virtual ones before."""
        return self.device.bridge_path if self.before > 0 else None

    def functions_removed_by_undo(self, host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that it made."""
        return host.virtual_functions(self.device) if self.after else []

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        target = paths.pci_device(self.device.address) / "sriov_numvfs"
        clearing = (echo("0", target),) if self.before and self.after else ()
        sharing = [line for share in self.shares for line in share.commands()] if self.after else ()
        return (*clearing, *sharing, echo(str(self.after), target))

    def inverse(self) -> SetVfCount:
        """As many as before."""
        return SetVfCount(self.device, before=self.after, after=self.before, shares=self.shares)
