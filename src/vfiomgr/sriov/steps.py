"""Requests about virtual functions and their quotas, and the steps that they consist of."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.engine.plan import Checkpoint, Exchange, FunctionRequest, Step, Topic, UndoEffects
from vfiomgr.engine.registry import reports_undo
from vfiomgr.paths import HostPath, echo
from vfiomgr.pci.model import DeviceIdentity, PciAddress, pci_device
from vfiomgr.units import counted
from vfiomgr.value import Value
from vfiomgr.vgpu.instance_model import InstancePlace
from vfiomgr.vgpu.quota.model import QUANTITIES, VfQuota, in_bytes
from vfiomgr.vgpu.steps import FunctionsStep

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class FunctionsCheckpoint(Checkpoint):
    """The state of a physical function before a change; None for unchanged values."""

    autoprobe: bool | None = None
    """Whether host drivers bind new virtual functions."""
    heterogeneous: bool | None = None
    """Whether vGPUs of different sizes were allowed."""
    instances: tuple[InstancePlace, ...] | None = None
    """The GPU instances (MIG), which are removed with the functions of a GPU."""
    priority: str | None = None
    """The priority of the physical function, which changes temporarily."""


class QuotasCheckpoint(Checkpoint):
    """The state of the physical function before quotas change."""

    priority: str | None = None
    """Its priority, which changes temporarily; None if unchanged."""


class SetVirtualFunctions(FunctionRequest):
    """Set the number of virtual functions; existing ones are removed."""

    count: int
    autoprobe: bool = False
    """Let host drivers bind the new functions."""
    share: VfQuota | None = None
    """The quotas of each function; None to let the driver decide."""
    vectors: int | None = None
    """The MSI-X vectors of each function; None to let the driver decide."""
    kind: ClassVar[str] = "set-virtual-functions"
    checkpoint = FunctionsCheckpoint

    needs_gpu_modes: ClassVar[bool] = True

    def not_checked(self, host: HostSnapshot) -> Iterator[str]:
        """What is unknown about the MSI-X vectors, if they are to be set."""
        if self.vectors is not None:
            yield from unknown_vectors(host, self.address)


class ChangeVectors(FunctionRequest):
    """Set the MSI-X vectors of existing virtual functions.

    The address is that of one virtual function, or of the physical function for all of them.
    """

    vectors: int
    kind: ClassVar[str] = "change-vectors"

    def not_checked(self, host: HostSnapshot) -> Iterator[str]:
        """What is unknown about the present MSI-X vectors."""
        yield from unknown_vectors(host, self.address)


def unknown_vectors(host: HostSnapshot, address: PciAddress) -> Iterator[str]:
    """What a plan for MSI-X vectors could not check."""
    named = host.device(address)
    physical = host.device(named.physical_function or address)
    if physical.sriov_vf_total_msix is None:
        yield f"whether MSI-X vectors can be set: no sriov_vf_total_msix of {physical.address}"
    if any(host.vectors_of(each) is None for each in physical.virtual_functions):
        yield f"the present MSI-X vectors of virtual functions of {physical.address}: requires root"


class ChangeQuotas(FunctionRequest):
    """Change the quotas of existing functions of a GPU.

    The address is that of one virtual function, or of the physical function for all of them.
    """

    share: VfQuota
    is_physical: bool = False
    """Change the quotas of the physical function itself."""
    kind: ClassVar[str] = "change-quotas"
    checkpoint = QuotasCheckpoint


ALL = -1
"""Stands for all functions in place of a number."""


class QuotaChange(Value):
    """One attribute, by its path below the directory of the GPU's quotas."""

    name: str
    before: str
    after: str
    shown: str | None = None
    """The attribute that shows the effect; None if it is the attribute itself."""

    def inverse(self) -> QuotaChange:
        """Return the change back."""
        return QuotaChange(self.name, before=self.after, after=self.before, shown=self.shown)


class SetQuotas(Step, Value):
    """Set the quotas of a function; verify them if before and after are equal."""

    device: DeviceIdentity
    directory: str
    function: int
    """0 is the physical function; virtual functions start at 1."""
    changes: tuple[QuotaChange, ...]
    kind: ClassVar[str] = "set-quotas"

    @property
    def topic(self) -> Topic:
        """Identify the attributes of the function."""
        names = frozenset(change.name for change in self.changes)
        return (self.kind, self.subject, self.function, names)

    def describe(self) -> str:
        words = dict.fromkeys(_in_words(change) for change in self.changes)
        verb = "verify " if self.is_check else ""
        return f"{self.device.address}: {self.who}: {verb}{', '.join(words)}"

    @property
    def who(self) -> str:
        """The functions whose quotas the step sets."""
        named = {0: "physical function", ALL: "all functions"}
        return named.get(self.function, f"VF {self.function}")

    @property
    def is_check(self) -> bool:
        """Whether the step only verifies an earlier one."""
        return all(change.before == change.after for change in self.changes)

    @property
    def is_of_memory(self) -> bool:
        """Whether the step changes the memory of a virtual function."""
        kinds = {QUANTITIES.get(c.name.rpartition("/")[2]) for c in self.changes}
        return "memory" in kinds and self.function > 0 and not self.is_check

    def commands(self) -> tuple[str, ...]:
        root = HostPath(self.directory)
        if self.is_check:
            return tuple(f"cat {shlex.quote(root / (c.shown or c.name))}" for c in self.changes)
        return tuple(echo(c.after, root / c.name) for c in self.changes)

    def inverse(self) -> SetQuotas | None:
        """Return the step that restores the former values; None for a verification."""
        if self.is_check:
            return None
        changes = tuple(change.inverse() for change in reversed(self.changes))
        return SetQuotas(self.device, self.directory, self.function, changes)


@reports_undo(SetQuotas)
def reduced_function(host: HostSnapshot, step: SetQuotas) -> UndoEffects:
    """The virtual function whose memory the step sets."""
    number = step.function
    functions = host.virtual_functions(step.device)[number - 1 : number]
    return UndoEffects(reduced=tuple(functions) if step.is_of_memory else ())


def _in_words(change: QuotaChange) -> str:
    name = change.name.rpartition("/")[2]
    shown = change.after
    if QUANTITIES.get(name) == "memory" or name == "ggtt_quota":
        shown = in_bytes(int(change.after))
    return f"{name} {shown}"


class SetAutoprobe(Exchange, Value):
    """Allow or forbid host drivers to bind new virtual functions."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-autoprobe"

    is_setting: ClassVar[bool] = True

    def describe(self) -> str:
        word = "let host drivers bind" if self.after else "keep host drivers from binding"
        return f"{self.device.address}: {word} new virtual functions"

    def commands(self) -> tuple[str, ...]:
        directory = pci_device(self.device.address)
        return (echo(str(int(self.after)), directory / "sriov_drivers_autoprobe"),)


class SetVfCount(FunctionsStep):
    """Set the number of virtual functions; the kernel requires 0 between two other numbers.

    `shares` are quotas that the driver drops with the functions; the step or its inverse sets them
    before the functions are created. `vectors` are the MSI-X vectors of the functions that the step
    or its inverse creates; without them, and where they are None, the driver decides.
    """

    shares: tuple[SetQuotas, ...] = ()
    vectors: tuple[int | None, ...] = ()
    """In the order of the functions."""
    kind: ClassVar[str] = "set-vf-count"

    def describe(self) -> str:
        numbers = _numbers_of(self.vectors) if self.after else ""
        return f"{super().describe()}{f', with {numbers}' if numbers else ''}"

    def commands(self) -> tuple[str, ...]:
        target = pci_device(self.device.address) / "sriov_numvfs"
        clearing = (echo("0", target),) if self.before and self.after else ()
        sharing = [line for share in self.shares for line in share.commands()] if self.after else ()
        setting = vector_commands(self.device, self.vectors) if self.after else ()
        return (*clearing, *sharing, echo(str(self.after), target), *setting)


class SetVectors(Exchange, Value):
    """Set the MSI-X vectors of virtual functions, by their order; None leaves one as it is.

    The numbers are those of the Table Size in the configuration space.
    """

    device: DeviceIdentity
    before: tuple[int | None, ...]
    after: tuple[int | None, ...]
    kind: ClassVar[str] = "set-vectors"

    @property
    def topic(self) -> Topic:
        """Identify the functions that are changed."""
        changed = (index for index, count in enumerate(self.after) if count is not None)
        return (self.kind, self.subject, *changed)

    def describe(self) -> str:
        return f"{self.device.address}: virtual functions with {_numbers_of(self.after)}"

    def commands(self) -> tuple[str, ...]:
        return vector_commands(self.device, self.after)


def vector_commands(device: DeviceIdentity, vectors: tuple[int | None, ...]) -> tuple[str, ...]:
    """The shell commands that set MSI-X vectors of virtual functions."""
    directory = pci_device(device.address)
    return tuple(
        echo(str(count), directory / f"virtfn{index}/sriov_vf_msix_count")
        for index, count in enumerate(vectors)
        if count is not None
    )


def _numbers_of(vectors: tuple[int | None, ...]) -> str:
    """`64 MSI-X vectors each`, or `64 MSI-X vectors (VF 1, 2), 32 (VF 3)`; VFs count from 1."""
    named: dict[int, list[str]] = {}
    for number, count in enumerate(vectors, start=1):
        if count is not None:
            named.setdefault(count, []).append(str(number))
    if not named:
        return ""
    if len(named) == 1 and None not in vectors:
        return f"{next(iter(named))} MSI-X vectors each"
    first, *rest = (f"(VF {', '.join(numbers)})" for numbers in named.values())
    counts = list(named)
    others = (f", {count} {who}" for count, who in zip(counts[1:], rest, strict=True))
    return f"{counted(counts[0], 'MSI-X vector')} {first}{''.join(others)}"
