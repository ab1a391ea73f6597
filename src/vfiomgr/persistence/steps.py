"""Requests about persistent bindings and configuration files, and steps on files and modules."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.plan import DEADLINE, Exchange, Request, Step, Topic
from vfiomgr.host.owners import NodeAccess
from vfiomgr.pci.model import DeviceIdentity, PciAddress, pci_device, vfio_group_node_text
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.model import HostSnapshot

    Bindings = dict[PciAddress, PersistedBinding]


class ForgetPersisted(Request, Value):
    """Remove the rules of functions, or all with `every`; drivers do not change now."""

    addresses: tuple[PciAddress, ...] = ()
    every: bool = False
    update_initramfs: bool = False
    kind: ClassVar[str] = "forget-persisted"


class ImportDriverctl(Request, Value):
    """Import driverctl entries for VFIO drivers; drivers do not change now."""

    update_initramfs: bool = False
    program: str | None = None
    kind: ClassVar[str] = "import-driverctl"


class FileChange(Value):
    """The text of a file before and after; None if the file does not exist."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644


class ChangeFiles(Request, Value):
    """Replace configuration files of the host, in this order, all or none.

    A file may be replaced several times. No devices are involved, so no running kernel is needed.
    """

    summary: str
    changes: tuple[FileChange, ...]
    locks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    """The note if there is nothing to change."""
    kind: ClassVar[str] = "change-files"

    is_about_files: ClassVar[bool] = True

    @property
    def only_paths(self) -> tuple[str, ...]:
        """The files that it replaces."""
        return tuple(dict.fromkeys(change.path for change in self.changes))

    def inverse(self) -> ChangeFiles:
        """Return the request that undoes all changes."""
        back = (FileChange(c.path, c.after, c.before, c.mode) for c in reversed(self.changes))
        return ChangeFiles(f"undo: {self.summary}", tuple(back), self.locks)


class ReplaceFile(Exchange, Value):
    """Replace the text of a configuration file; None if the file does not exist."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644
    kind: ClassVar[str] = "replace-file"

    deadline: ClassVar[float | None] = DEADLINE
    """No deadline of its own; the reload of the file has a shorter one."""
    outlasts_reboot: ClassVar[bool] = True

    @property
    def topic(self) -> Topic:
        """Identify the file."""
        return (self.kind, self.path)

    @property
    def replaces(self) -> tuple[str, str | None]:
        """The file and its new text."""
        return self.path, self.after

    def describe(self) -> str:
        verb = "remove" if self.after is None else "write" if self.before is None else "change"
        return f"{verb} {self.path}"

    def report(self) -> str:
        verb = "removed" if self.after is None else "wrote" if self.before is None else "changed"
        return f"{verb} {self.path}"

    def commands(self) -> tuple[str, ...]:
        path = shlex.quote(self.path)
        if self.after is None:
            return (f"rm {path}",)
        lines, end = self.after.splitlines(), "END"
        while end in lines:
            end += "_"
        return (f"cat > {path} <<'{end}'", *lines, end, f"chmod {self.mode:04o} {path}")


class SetNodeAccess(Exchange, Value):
    """Set the owner of the VFIO nodes of a function."""

    device: DeviceIdentity
    group: int | None
    """None if the function has none before its driver is bound."""
    before: NodeAccess
    after: NodeAccess
    has_groups: bool = True
    """False on a kernel without nodes of groups, where each function has a cdev."""
    has_cdevs: bool = False
    """True on a kernel where each function has a cdev, in addition to the node of its group."""
    kind: ClassVar[str] = "set-node-access"

    def describe(self) -> str:
        return f"{self.device.address}: owner of VFIO nodes {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        access = self.after
        group = vfio_group_node_text(self.group, self.device.address)
        nodes = [group] if self.has_groups else []
        if self.has_cdevs or not self.has_groups:
            name = f"$(ls {pci_device(self.device.address)}/vfio-dev)"
            nodes.append(f"{paths.VFIO_CDEVS}/{name}")
        shown = " ".join(nodes)
        return (f"chown {access.uid}:{access.gid} {shown}", f"chmod {access.mode:04o} {shown}")


class RebuildInitramfs(Step, Value):
    """Rebuild the initramfs of the host from its current configuration."""

    command: tuple[str, ...]
    kind: ClassVar[str] = "rebuild-initramfs"

    deadline: ClassVar[float | None] = 900.0
    """Time to build and compress an image for each installed kernel."""
    outlasts_reboot: ClassVar[bool] = True
    is_program: ClassVar[bool] = True
    leaves_no_trace: ClassVar[bool] = True

    def describe(self) -> str:
        return "rebuild the initramfs (may take minutes)"

    def report(self) -> str:
        return "rebuilt the initramfs"

    def commands(self) -> tuple[str, ...]:
        return (shlex.join(self.command),)

    def inverse(self) -> None:
        """Return None: a failed tool keeps the old image, and undoing rebuilds it."""


class LoadModule(Step, Value):
    """Load a kernel module that brings `driver`; it stays loaded."""

    module: str
    driver: str
    kind: ClassVar[str] = "load-module"

    is_harmless: ClassVar[bool] = True

    def describe(self) -> str:
        return f"load the kernel module {self.module}"

    def commands(self) -> tuple[str, ...]:
        return (f"modprobe {shlex.quote(self.module)}",)

    def inverse(self) -> None:
        """Return None: a loaded module is harmless and may be in use by then."""


class Part(Value):
    """The steps and notes that persistence adds to a plan."""

    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> Part:
        """Return a copy with these notes first."""
        return Part(self.steps, (*notes, *self.notes), self.already, self.locks)


def bindings(host: HostSnapshot) -> Bindings:
    """The bindings of the current rules."""
    return {binding.address: binding for binding in host.files.bindings}


def replaced(
    host: HostSnapshot, path: str, after: str | None, mode: int = 0o644
) -> Iterator[ReplaceFile]:
    """The step to a file's new text, unless it is equal."""
    before = host.files.text(path)
    if before != after:
        yield ReplaceFile(path, before, after, mode)
