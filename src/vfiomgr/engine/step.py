"""What a plan is made of: a step names the state it leads to, and what the engine must know of it.

A capability derives its steps from `Step` and says in its module `apply` how they are performed
(`vfiomgr.engine.registry`); the engine itself knows no kind of step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfiomgr.pci.model import DeviceIdentity, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

Topic = tuple[object, ...]
DEADLINE = 60.0
"""Seconds for one step; a GPU's driver may take many to let go, or to start."""


class Step:
    """A change of the host, as data: carried out again, it leads to the same state.

    Steps are values (`vfiomgr.value`) of a `kind`, by which journals name them.
    """

    __slots__ = ()
    kind: ClassVar[str]

    deadline: ClassVar[float | None] = None
    """Seconds it may take, where it waits for programs; None for the usual deadline."""
    outlasts_reboot: ClassVar[bool] = False
    """Whether a reboot leaves its effect in place."""
    is_record: ClassVar[bool] = False
    """Whether it changes files of vfiomgr alone: no child process is needed for it."""
    is_setting: ClassVar[bool] = False
    """Whether it changes what a later step of the same plan restores."""
    is_program: ClassVar[bool] = False
    """Whether a program that exceeds the deadline is left to end by itself."""
    is_harmless: ClassVar[bool] = False
    """Whether a reviewed plan may differ in it."""
    needs_all_undone: ClassVar[bool] = False
    """Whether it is left out while undoing where a step undone before it failed."""
    needs_udev: ClassVar[bool] = False
    """Whether udev's rules decide when it is done."""
    affects: ClassVar[str] = ""
    """What it changes, where steps of several kinds change the same; else its kind says it."""

    from_document: ClassVar[Any]
    """Reads a step of any kind; the registry knows them all."""

    def __init_subclass__(cls) -> None:
        """Note the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @property
    def subject(self) -> str | None:
        """The function or the vGPU that it is about; None where it is about neither."""
        device: DeviceIdentity | None = getattr(self, "device", None)
        return None if device is None else str(device.address)

    @property
    def topic(self) -> Topic:
        """What it changes: two steps with one topic lead to states of the same thing."""
        return (self.affects or self.kind, self.subject)

    def describe(self) -> str:
        """One line for people."""
        raise NotImplementedError

    def commands(self) -> tuple[str, ...]:
        """The shell commands that do the same; empty for records of vfiomgr itself."""
        raise NotImplementedError

    def inverse(self) -> Step | None:
        """The step back to the state before; None where nothing is to be undone."""
        raise NotImplementedError

    @classmethod
    def is_restored_later(
        cls, _own: Mapping[str, Any], _later: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether one of the `later` steps of a journal restores what this one changed."""
        return cls.is_setting

    # What `vfiomgr.engine.undo` asks of a step that an interrupted operation had begun.

    @property
    def tied_to(self) -> DeviceIdentity | None:
        """The device that must still be the same one for the step to be undone."""
        return None

    @property
    def recreates_below(self) -> str | None:
        """The bridge below which undoing it makes virtual functions again."""
        return None

    def is_effective_after_reboot(self, _device: PciDevice) -> bool:
        """Whether the device it is tied to is, after a reboot, where it put the device."""
        return False

    def is_moved_by_undo(self, _device: PciDevice) -> bool:
        """Whether undoing it takes the device it is tied to off its present driver."""
        return False

    def made_vgpu(self, _host: HostSnapshot) -> Vgpu | None:
        """The vGPU that it made, and that undoing it removes."""
        return None

    def functions_removed_by_undo(self, _host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that undoing it removes."""
        return []

    def functions_reduced_by_undo(self, _host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that undoing it takes memory from."""
        return []


KINDS: dict[str, type[Step]] = {}
"""By kind, of the modules that are imported; all of them: `vfiomgr.engine.registry`."""
