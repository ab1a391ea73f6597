"""Steps on configuration files, VFIO nodes and the initramfs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.step import DEADLINE, Step
from vfiomgr.host.accounts import NodeAccess
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.step import Topic


class ReplaceFile(Step, Value):
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

    def describe(self) -> str:
        """Describe the step in one line."""
        verb = "remove" if self.after is None else "write" if self.before is None else "change"
        return f"{verb} {self.path}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        path = shlex.quote(self.path)
        if self.after is None:
            return (f"rm {path}",)
        lines, end = self.after.splitlines(), "END"
        while end in lines:
            end += "_"
        return (f"cat > {path} <<'{end}'", *lines, end, f"chmod {self.mode:04o} {path}")

    def inverse(self) -> ReplaceFile:
        """Return the step that restores the former text."""
        return ReplaceFile(self.path, before=self.after, after=self.before, mode=self.mode)


class SetNodeAccess(Step, Value):
    """Set the owner of the VFIO nodes of a function."""

    device: DeviceIdentity
    group: int | None
    before: NodeAccess
    after: NodeAccess
    kind: ClassVar[str] = "set-node-access"

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: owner of VFIO nodes {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        if self.group is None:
            return ()
        node, access = paths.vfio_group_node(self.group), self.after
        return (f"chown {access.uid}:{access.gid} {node}", f"chmod {access.mode:04o} {node}")

    def inverse(self) -> SetNodeAccess:
        """Return the step that restores the former owner."""
        return SetNodeAccess(self.device, self.group, before=self.after, after=self.before)


class RebuildInitramfs(Step, Value):
    """Rebuild the initramfs of the host from its current configuration."""

    command: tuple[str, ...]
    kind: ClassVar[str] = "rebuild-initramfs"

    deadline: ClassVar[float | None] = 900.0
    """Time to build and compress an image for each installed kernel."""
    is_program: ClassVar[bool] = True

    def describe(self) -> str:
        """Describe the step in one line."""
        return "rebuild the initramfs (may take minutes)"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.command),)

    def inverse(self) -> None:
        """Return None: a failed tool keeps the old image."""
