"""The steps from a pod to its devices, and the problems of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Remedy, Severity

LIST = "; "
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
"""In the order of the chain."""


NUMBERS: dict[str, int] = {
    "kata-annotation-alone": 1,
    "kata-annotation-ignored": 1,
    "kata-annotation-not-enabled": 1,
    "kata-annotation-refused": 1,
    "kata-claim": 2,
    "kata-foreign-resource": 3,
    "kata-cdi-unreadable": 4,
    "kata-cdi-precedence": 5,
    "kata-drop-in-ending": 6,
    "kata-drop-in-key-ignored": 6,
    "kata-drop-in-key-refused": 6,
    "kata-drop-ins-shared": 6,
    "kata-kernel-params-replaced": 6,
    "kata-conf-file": 7,
    "kata-pci-domain": 8,
    "kata-port-order": 8,
    "kata-overhead": 9,
    "kata-kubelet-timeout": 10,
    "kata-crio-sizes": 11,
    "kata-privileged": 12,
}
"""The rules of the silent or confusing problems that docs/kata.md numbers."""
SILENT = frozenset(
    {
        "kata-annotation-alone",
        "kata-annotation-ignored",
        "kata-annotation-unknown",
        "kata-annotations-not-passed",
        "kata-annotations-overruled",
        "kata-annotations-unread",
        "kata-cdi-precedence",
        "kata-claim",
        "kata-crio-sizes",
        "kata-devices-unnamed",
        "kata-drop-in-ending",
        "kata-drop-in-key-ignored",
        "kata-drop-ins-shared",
        "kata-handler-not-kata",
        "kata-kernel-params-replaced",
        "kata-maxmemory",
        "kata-no-cold-plug",
        "kata-no-device-requested",
        "kata-no-pod-resources",
        "kata-no-runtime-class",
        "kata-not-plugged-silently",
        "kata-overhead",
        "kata-pci-domain",
        "kata-port-order",
        "kata-privileged",
        "kata-runtime-drop-in-replaced",
        "kata-runtime-versions-mixed",
        "kata-window",
    }
)
"""The rules of problems that no component reports: the pod runs without its device, or with a
wrong one."""


def chain_break(
    rule: str,
    subject: object,
    summary: str,
    *remedies: str | Remedy,
    is_certain: bool = True,
    evidence: tuple[str, ...] = (),
) -> Diagnostic:
    """A problem that keeps a device from a guest; a warning if it only may."""
    severity: Severity = "blocker" if is_certain else "warning"
    return finding(rule, severity, summary, evidence, "", *remedies, subject=subject)


def is_broken(breaks: Iterable[Diagnostic]) -> bool:
    """Whether one of them certainly breaks the chain."""
    return any(found.severity == "blocker" for found in breaks)


class TraceStep(Value):
    """A step from the pod to its devices."""

    name: StepName
    state: StepState
    parts: tuple[str, ...]
    """The state; for a step with many devices, of each device."""
    looked_at: tuple[str, ...] = ()
    """The evidence: files and facts."""
    breaks: tuple[Diagnostic, ...] = ()

    @property
    def what(self) -> str:
        """All parts in one line."""
        return LIST.join(self.parts)


def judged(
    name: StepName,
    what: str | Iterable[str],
    looked_at: tuple[str, ...] = (),
    breaks: Iterable[Diagnostic] = (),
    otherwise: StepState = "ok",
) -> TraceStep:
    """A step that is broken if one of its problems is certain."""
    found = tuple(breaks)
    parts = (what,) if isinstance(what, str) else tuple(what)
    return TraceStep(name, "broken" if is_broken(found) else otherwise, parts, looked_at, found)


class PassedFunction(Value):
    """A PCI function assigned to a guest."""

    address: PciAddress
    name: str
    driver: str | None
    is_ready: bool
    port: str | None
    """`rp0`; None without a port."""
    guest_index: int | None
    """The index in the guest's nvidia.com/gpu; None if Kata does not tell the agent."""


class DeviceChain(Value):
    """The chain of one device that the kubelet could assign."""

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
    """Whether its chain is complete."""


class Difference(Value):
    """A property in which the candidate devices of a resource differ."""

    resource: str
    aspect: str
    ids: tuple[tuple[str, tuple[str, ...]], ...]
    """Each value, and the devices that have it."""

    def __str__(self) -> str:
        """`RESOURCE, ASPECT: VALUE: ID, ID; VALUE: …`."""
        values = (f"{value}: {', '.join(ids)}" for value, ids in self.ids)
        return f"{self.resource}, {self.aspect}: {LIST.join(values)}"


class KataTrace(Value):
    """All steps of a pod."""

    pod: str
    kind: str
    source: str
    line: int
    handler: str | None
    release: str
    release_source: str
    steps: tuple[TraceStep, ...]
    devices: tuple[DeviceChain, ...]
    """Each candidate; the kubelet chooses among them."""
    differences: tuple[Difference, ...]
    """How they differ."""

    @property
    def is_broken(self) -> bool:
        """Whether a step is certainly broken."""
        return any(step.state == "broken" for step in self.steps)

    is_blocked = is_broken

    @property
    def is_fine(self) -> bool:
        """Whether all steps are ok, and none has a possible problem."""
        return all(step.state == "ok" and not step.breaks for step in self.steps)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The steps that could not be checked."""
        return tuple(step.name for step in self.steps if step.state == "unknown")

    @property
    def breaks(self) -> tuple[Diagnostic, ...]:
        """All problems, in the order of the steps."""
        return tuple(found for step in self.steps for found in step.breaks)
