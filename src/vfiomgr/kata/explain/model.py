"""The chain by which a device reaches a pod's guest: each link, and what breaks it."""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

LIST = "; "
"""What stands between the parts of a step that tells of one device after the other."""
StepState = Literal["ok", "broken", "unknown"]
StepName = Literal[
    "pod",
    "runtime class",
    "handler",
    "configuration",
    "request",
    "CDI",
    "node",
    "functions",
    "root ports",
    "guest",
]
"""In the order in which a device passes them."""


class ChainBreak(Value):
    """Something that keeps a device from a guest, or that may."""

    what: str
    remedy: str
    number: int | None = None
    """Of the silent or confusing breaks that docs/kata.md numbers; None for any other."""
    is_silent: bool = False
    """Whether no component says a word: the pod runs, without its device or with a wrong one."""
    is_certain: bool = True
    """Whether it breaks the chain by itself; else it may."""
    issue: str | None = None
    """Where it is reported, e.g. `kata-containers/kata-containers#13322`."""


class TraceStep(Value):
    """A link of the chain."""

    name: StepName
    state: StepState
    what: str
    looked_at: tuple[str, ...] = ()
    """Files and facts that tell it."""
    breaks: tuple[ChainBreak, ...] = ()


class PassedFunction(Value):
    """A PCI function on its way into a guest."""

    address: PciAddress
    name: str
    driver: str | None
    is_ready: bool
    port: str | None
    """`rp0`; None where it has none."""
    guest_index: int | None
    """Of the guest's nvidia.com/gpu; None for what Kata tells the guest's agent nothing of."""


class DeviceChain(Value):
    """What becomes of one device that the kubelet could give."""

    resource: str
    id: str
    cdi_name: str
    source: str | None
    """The file with its CDI device."""
    nodes: tuple[str, ...]
    groups: tuple[int, ...]
    functions: tuple[PassedFunction, ...]
    annotations: tuple[tuple[str, str], ...]
    """What Kata writes for the agent in the guest."""
    is_complete: bool
    """Whether nothing breaks on the way of this device."""


class KataTrace(Value):
    """The whole chain of a pod."""

    pod: str
    kind: str
    source: str
    line: int
    handler: str | None
    release: str
    release_source: str
    steps: tuple[TraceStep, ...]
    devices: tuple[DeviceChain, ...]
    """Each that could be given; which ones are is for the kubelet to choose."""
    differences: tuple[str, ...]
    """Where these differ."""

    @property
    def is_broken(self) -> bool:
        """Whether a link is broken for certain."""
        return any(step.state == "broken" for step in self.steps)

    @property
    def breaks(self) -> tuple[ChainBreak, ...]:
        """All breaks, in the order of the links."""
        return tuple(found for step in self.steps for found in step.breaks)
