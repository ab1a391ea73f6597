"""What the DRA driver publishes and prepares: pools of devices, counters, and claims.

Source of the names and limits: api/resource/v1/types.go of k8s.io/api.
"""

from __future__ import annotations

from typing import Literal

from msgspec import field

from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.node.model import OnDemand
from vfiomgr.value import Value

DRIVER = "vfiomgr.io"
"""The driver's name, and the domain of its attributes and counters."""
STANDARD = "resource.kubernetes.io"
"""The domain of attributes that several drivers share: pciBusID, pcieRoot, numaNode."""
MOST_DEVICES = 64
"""Devices in a slice of which one has taints or consumes counters; 128 in others."""
LONGEST_TEXT = 64
"""Characters of an attribute that is a string."""
MOST_COUNTER_SETS = 8
"""Counter sets in a slice; a slice has either counter sets or devices."""
MOST_TAINTS = 16

AttributeValue = str | int | bool | tuple[int, ...]
"""Several numbers are published as a list, or else the first one."""
TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
BOUND, BIND_FAILED = f"{DRIVER}/Bound", f"{DRIVER}/BindFailed"
"""The conditions of a device in the status of its claim: one of them is awaited by the scheduler.
"""


class CounterSet(Value):
    """What devices share, e.g. the memory of a GPU."""

    name: str
    """A DNS label, unique in its pool."""
    counters: dict[str, int]
    """By name, a DNS label; memory in bytes."""


class Consumption(Value):
    """What a device takes from a counter set while it is allocated."""

    counter_set: str
    counters: dict[str, int]
    groups: tuple[str, ...] = ()
    """Compatibility groups: devices that consume the set are allocated together if they share one.
    """


class Taint(Value):
    """Why a device is not for pods without a toleration."""

    key: str
    """DOMAIN/NAME."""
    value: str
    effect: TaintEffect


class Target(Value):
    """What a claim receives: a unit of the inventory, or a vGPU that is created for it."""

    unit: str = ""
    """The ID of a `NodeUnit`; empty for a vGPU that does not exist yet."""
    parent: str = ""
    """The GPU of a vGPU that is created, a PCI address or the name of a virtual device."""
    type: str = ""
    """The ID of the type of a vGPU that is created."""
    on_demand: OnDemand | None = None
    """How the unit is bound, if it is on its host driver without a claim."""


class DraDevice(Value):
    """A device of a pool."""

    name: str
    """A DNS label that stays the same while other devices come and go."""
    target: Target
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    """By name; those without a domain belong to the driver."""
    capacity: dict[str, int] = field(default_factory=dict)
    """By name; memory in bytes."""
    consumes: tuple[Consumption, ...] = ()
    taints: tuple[Taint, ...] = ()
    is_awaited: bool = False
    """Whether pods are placed only when the device is bound, or the bind has failed."""


class Pool(Value):
    """Devices that are published together, in as many slices as the limits demand."""

    name: str
    """DNS subdomains, separated by `/`; unique among the nodes of a cluster."""
    devices: tuple[DraDevice, ...]
    counter_sets: tuple[CounterSet, ...] = ()

    def device(self, name: str) -> DraDevice | None:
        """The device of this name."""
        return next((each for each in self.devices if each.name == name), None)


class AllocatedDevice(Value):
    """A device that the scheduler chose for a request of a claim."""

    request: str
    """REQUEST, or REQUEST/SUBREQUEST for an alternative of a prioritized list."""
    pool: str
    device: str


class Parameters(Value):
    """The driver's parameters in a claim or a DeviceClass, of kind `VfioDeviceConfig`."""

    requests: tuple[str, ...] = ()
    """The requests they are for; empty for all."""
    reset: bool = False
    """Whether the devices are reset when the claim is unprepared."""
    form: Literal["", "group", "cdev"] = ""
    """Which device nodes a container gets; empty for the form of the host."""


class Claim(Value):
    """A ResourceClaim that is allocated, as far as this driver is concerned."""

    namespace: str
    name: str
    uid: str
    pod_claim_name: str = ""
    """The name of the claim in its pod, if it was made from a template."""
    devices: tuple[AllocatedDevice, ...] = ()
    """Those of this driver on this node."""
    parameters: tuple[Parameters, ...] = ()
    """In order of precedence, the least first: those of the DeviceClass, then of the claim."""

    def __str__(self) -> str:
        """NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"


class PreparedDevice(Value):
    """A device that a pod can use."""

    request: str
    pool: str
    device: str
    unit: str
    """The ID of the unit: a PCI address, or the UUID of a mediated device."""
    nodes: tuple[str, ...]
    cdi_devices: tuple[str, ...]
    """Qualified names of CDI devices."""
    is_created: bool = False
    """Whether the vGPU was created for the claim, and is removed with it."""
    target: Target = Target()
    """What was published as the device, in case it is not published any more."""
    reset: bool = False
    """Whether the device is reset when the claim is unprepared."""
    access: NodeAccess = ROOT_ONLY
    """The owner and mode of its nodes in a container."""
    functions: tuple[str, ...] = ()
    """The addresses of its functions besides the one that it is named after."""

    @property
    def is_taken(self) -> bool:
        """Whether the device is bound for the claim, and returned with it."""
        return self.target.on_demand is not None


class PreparedClaim(Value):
    """A claim that is prepared; kept in a file, so that a restart of the agent loses nothing."""

    namespace: str
    name: str
    uid: str
    boot: str
    """The kernel's boot_id: after a reboot, groups have other numbers and vGPUs are gone."""
    devices: tuple[PreparedDevice, ...]
    reset: bool = False
    """Whether one of its devices is reset when it is unprepared; the devices say which."""
    is_ready: bool = True
    """Whether pods can use it; False while it is prepared, and if that was interrupted."""
    is_early: bool = False
    """Whether the kubelet has not asked for it yet, so that it perhaps never unprepares it."""

    def __str__(self) -> str:
        """NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"
