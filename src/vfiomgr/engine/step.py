"""The elements of a plan: a step names the state it leads to, and its properties for the engine.

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
"""Seconds for one step; a GPU's driver may need many to release a device or to start."""


class Step:
    """A change of the host, as data; repeating it leads to the same state.

    Steps are values (`vfiomgr.value`) of a `kind`, which identifies them in journals.
    """

    __slots__ = ()
    kind: ClassVar[str]

    deadline: ClassVar[float | None] = None
    """Time limit in seconds if it waits for programs; None for the default deadline."""
    outlasts_reboot: ClassVar[bool] = False
    """Whether its effect outlasts a reboot."""
    is_record: ClassVar[bool] = False
    """Whether it only changes files of vfiomgr, so that no child process is needed."""
    is_setting: ClassVar[bool] = False
    """Whether it changes what a later step of the same plan restores."""
    is_program: ClassVar[bool] = False
    """Whether a program that exceeds the deadline is left running."""
    is_harmless: ClassVar[bool] = False
    """Whether it may differ from a reviewed plan."""
    needs_all_undone: ClassVar[bool] = False
    """Whether it is skipped during a rollback if a step undone before it failed."""
    needs_udev: ClassVar[bool] = False
    """Whether udev rules decide when it is done."""
    affects: ClassVar[str] = ""
    """What it changes, if steps of several kinds change the same; otherwise its kind."""

    from_document: ClassVar[Any]
    """Reads a step of any kind; set by the registry."""

    def __init_subclass__(cls) -> None:
        """Register the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @property
    def subject(self) -> str | None:
        """The function or vGPU that it concerns; None for neither."""
        device: DeviceIdentity | None = getattr(self, "device", None)
        return None if device is None else str(device.address)

    @property
    def topic(self) -> Topic:
        """What it changes: two steps with the same topic set states of the same thing."""
        return (self.affects or self.kind, self.subject)

    def describe(self) -> str:
        """One line for people."""
        raise NotImplementedError

    def commands(self) -> tuple[str, ...]:
        """The equivalent shell commands; empty for records of vfiomgr itself."""
        raise NotImplementedError

    def inverse(self) -> Step | None:
        """The step back to the previous state; None if nothing needs to be undone."""
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
        """The device that must still be the same one, or the step cannot be undone."""
        return None

    @property
    def recreates_below(self) -> str | None:
        """The bridge below which undoing it recreates virtual functions."""
        return None

    def is_effective_after_reboot(self, _device: PciDevice) -> bool:
        """Whether, after a reboot, its device still is where the step put it."""
        return False

    def is_moved_by_undo(self, _device: PciDevice) -> bool:
        """Whether undoing it moves its device from its present driver."""
        return False

    def made_vgpu(self, _host: HostSnapshot) -> Vgpu | None:
        """The vGPU that it created and that undoing it removes."""
        return None

    def functions_removed_by_undo(self, _host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that undoing it removes."""
        return []

    def functions_reduced_by_undo(self, _host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that lose memory by undoing it."""
        return []


KINDS: dict[str, type[Step]] = {}
"""Classes of the imported modules by kind; for all: `vfiomgr.engine.registry`."""
