"""The step that loads a kernel module."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.plan import Step
from vfiomgr.engine.registry import performs
from vfiomgr.errors import HostError
from vfiomgr.pci import drivers
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


class LoadModule(Step, Value):
    """Load a kernel module that brings `driver`; it stays loaded."""

    module: str
    driver: str
    kind: ClassVar[str] = "load-module"

    is_harmless: ClassVar[bool] = True

    def describe(self) -> str:
        """One line for people."""
        return f"load the kernel module {self.module}"

    def commands(self) -> tuple[str, ...]:
        """The equivalent shell commands."""
        return (f"modprobe {shlex.quote(self.module)}",)

    def inverse(self) -> None:
        """None: a loaded module is harmless and may be in use by then."""


@performs(LoadModule)
def load_module(tree: HostTree, step: LoadModule) -> None:
    """Load the module and verify that it provides the driver."""
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        tree.load_module(step.module)
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        brought = drivers.driver_of_module(tree, step.module)
        other = f" but {brought}" if brought else ""
        message = (
            f"the module {step.module} is loaded but does not provide the driver "
            f"{step.driver}{other}"
        )
        raise HostError(
            message,
            "run the command again, or choose another driver (--driver; in a layout: driver)",
        )
