"""Steps that change labels."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.plan import Step
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value

LABELS = HostPath("/etc/vfiomgr/labels")


def label_file(device: DeviceIdentity) -> HostPath:
    """Where the label of a device is kept."""
    return LABELS / str(device.address)


class SetLabel(Step, Value):
    """Give a device another label; None for no label."""

    device: DeviceIdentity
    before: str | None
    after: str | None
    kind: ClassVar[str] = "toy-set-label"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: label {self.before or 'none'} -> {self.after or 'none'}"

    def commands(self) -> tuple[str, ...]:
        """The shell command that does the same."""
        if self.after is None:
            return (f"rm {label_file(self.device)}",)
        return (f"echo {self.after} > {label_file(self.device)}",)

    def inverse(self) -> SetLabel:
        """The label from before."""
        return SetLabel(self.device, before=self.after, after=self.before)
