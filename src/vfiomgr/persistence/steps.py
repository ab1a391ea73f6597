"""Steps about the host around its devices: its configuration, and the nodes of its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.step import DEADLINE, Step
from vfiomgr.host.accounts import NodeAccess
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.step import Topic


class ReplaceFile(Step, Value):
    """Exchange the whole text of a file of the host's configuration; None where there is none."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644
    kind: ClassVar[str] = "replace-file"

    deadline: ClassVar[float | None] = DEADLINE
    """The readers of the file have their own, which is shorter."""
    outlasts_reboot: ClassVar[bool] = True

    @property
    def topic(self) -> Topic:
        """The same file."""
        return (self.kind, self.path)

    def describe(self) -> str:
        """Describe the step in one line."""
        verb = "remove" if self.after is None else "write" if self.before is None else "change"
        return f"{verb} {self.path}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        if self.after is None:
            return (f"rm {self.path}",)
        lines = self.after.splitlines()
        return (f"cat > {self.path} <<'END'", *lines, "END", f"chmod {self.mode:04o} {self.path}")

    def inverse(self) -> ReplaceFile:
        """The text that was there."""
        return ReplaceFile(self.path, before=self.after, after=self.before, mode=self.mode)


class SetNodeAccess(Step, Value):
    """Give the nodes through which a guest opens a function to a user."""

    device: DeviceIdentity
    group: int | None
    before: NodeAccess
    after: NodeAccess
    kind: ClassVar[str] = "set-node-access"

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: its nodes of VFIO {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        if self.group is None:
            return ()
        node, access = paths.vfio_group_node(self.group), self.after
        return (f"chown {access.uid}:{access.gid} {node}", f"chmod {access.mode:04o} {node}")

    def inverse(self) -> SetNodeAccess:
        """Back to whom they belonged; nodes that are gone by then need nothing."""
        return SetNodeAccess(self.device, self.group, before=self.after, after=self.before)


class RebuildInitramfs(Step, Value):
    """Make the host's initramfs anew, from the configuration as it is then."""

    command: tuple[str, ...]
    kind: ClassVar[str] = "rebuild-initramfs"

    deadline: ClassVar[float | None] = 900.0
    """An image for each installed kernel is made and compressed."""
    is_program: ClassVar[bool] = True

    def describe(self) -> str:
        """Describe the step in one line."""
        return "make the initramfs anew; this takes a while"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (" ".join(self.command),)

    def inverse(self) -> None:
        """None: it follows the files that it reads, and a tool that fails leaves the old image."""
