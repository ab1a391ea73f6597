"""How the agent runs, and what its processes send to each other, as lines of JSON.

Also what they keep in files of /run: values that only root can have written.
"""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from msgspec import field

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.errors import HostError
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.node.dra.model import Pool
from vfiomgr.node.model import Inventory, NodeSettings, NodeUnit, OnDemand
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.pci.error_counters import HealthFacts
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.value import Value as AnyValue

_T = TypeVar("_T", bound=Value)
_R = TypeVar("_R")

KUBELET_DIRECTORY = HostPath("/var/lib/kubelet")
"""The default of the kubelet's --root-dir, which plugins and plugins_registry are in."""
PLUGIN_DIRECTORY = HostPath("/var/lib/kubelet/device-plugins")
"""A constant of the kubelet, whatever its --root-dir is (DevicePluginPath in constants.go)."""
BINDER = RUNTIME / "binder" / "orders.sock"
"""The socket of the pod that binds devices for an agent that may not (dra/binder.py)."""
POD_RESOURCES = HostPath("/var/lib/kubelet/pod-resources/kubelet.sock")


class Settings(Value):
    """How to scan."""

    node: NodeSettings = NodeSettings()
    interval: float = 120.0
    """Seconds between scans without events."""
    layout: str | None = None
    """A layout in the node's file, if it is not the installed one."""
    dra_node: str = ""
    """The name of the node whose pools are reported; empty for none."""


class EventSettings(Value):
    """How events of the node reach the Kubernetes API."""

    directory: str
    """With `token` and `ca.crt`, as a pod has for its service account."""
    server: str
    """https://HOST:PORT."""
    node: str
    """The name of the node."""


class DraSettings(Value):
    """How ResourceClaims are served."""

    kubelet_directory: str
    """With `plugins` and `plugins_registry`, on this machine."""
    directory: str
    """With `token` and `ca.crt`, as a pod has for its service account."""
    server: str
    """https://HOST:PORT."""
    node: str
    """The name of the node."""
    instance: str = ""
    """The UID of the agent's pod, which its sockets are named after."""
    binds_early: bool = False
    """Whether pods are placed only after their devices were bound (BindingConditions)."""


class ClaimFacts(Value):
    """What the scanning process must know of the ResourceClaims of this node."""

    number: int = 0
    """Of the state; a report has that of the state that it was made with."""
    allocated: tuple[tuple[str, str], ...] = ()
    """The pools and devices that claims have."""
    held: dict[str, str] = field(default_factory=dict)
    """The claim that has each unit, NAMESPACE/NAME."""
    created: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The vGPUs that were created for claims, each with its pool and device."""
    pods: dict[str, str] = field(default_factory=dict)
    """The pod of each claim that only one pod has: NAMESPACE/NAME."""
    unreadable: tuple[Diagnostic, ...] = ()
    """The records of prepared claims that cannot be read: any device may be theirs."""
    has_groups: bool = False
    """Whether the API server stores compatibility groups."""


class AgentSettings(Value):
    """The places and intervals of an agent."""

    root: str
    """The root of the host."""
    plugin_directory: str
    """Of the kubelet, on this machine."""
    pod_resources: str
    """The socket of the kubelet's pod resources."""
    control: str
    """The agent's own socket."""
    metrics: str | None = None
    """HOST:PORT or unix:PATH."""
    scan: Settings = Settings()
    debounce: float = 10.0
    """Seconds until a device that becomes unhealthy is reported."""
    pods_interval: float = 30.0
    """Seconds between questions which pods have devices; the kubelet limits their rate."""
    events: EventSettings | None = None
    """None for no events."""
    dra: DraSettings | None = None
    """None for no ResourceClaims."""
    tick: float = 0.1
    """Seconds between looks at the kubelet's sockets; 0.9 s after its start, it restores pods."""


class Question(Value):
    """A request to the scanning process; each part is optional, and a scan follows."""

    settings: Settings | None = None
    pods: dict[str, str] | None = None
    """The pod that has each device."""
    quarantine: dict[str, Diagnostic] | None = None
    previous: Inventory | None = None
    """The last inventory of the process before, for a new one."""
    before: HealthFacts | None = None
    """The errors that the process before forgave, for a new one."""
    forgive: str = ""
    """The device whose errors up to now are forgiven."""
    verify: tuple[str, ...] = ()
    """The devices of a container that is about to start."""
    resource: str = ""
    """Of the devices to verify; for devices of claims it is empty, and they must only answer."""
    number: int = 0
    """Of a verification; the report has the same."""
    allocated: tuple[str, ...] = ()
    """Devices that a pod was just given; alone, it leads to no scan."""
    claims: ClaimFacts | None = None


class Problem(Value):
    """Why a container must not start with a device."""

    device: str
    message: str
    has_failed_reset: bool = False


class Report(Value):
    """The result of a scan, or of a verification."""

    inventory: Inventory | None = None
    before: HealthFacts | None = None
    """The errors that are forgiven."""
    seconds: float = 0.0
    """The duration of the scan."""
    metrics: str = ""
    number: int = 0
    problems: tuple[Problem, ...] = field(default=())
    crashes: dict[str, Diagnostic] = field(default_factory=dict)
    """Why devices are to be withheld, because their guests crashed."""
    error: str = ""
    """Why a scan failed; with an inventory, why the last valid layout is still in use."""
    drift: dict[str, str] = field(default_factory=dict)
    """The devices that are not on the drivers that their rules of the layout say, and why."""
    claims: int = 0
    """The number of the claims' state."""
    knows_pods: bool = False
    """Whether the process knows which pods have devices."""
    pools: tuple[Pool, ...] | None = None
    """What is published for claims; None if it is the same as before."""
    created: tuple[NodeUnit, ...] = ()
    """The vGPUs that were created for claims, which the inventory does not have."""
    is_unchanged: bool = False
    """Whether the host is as the last report with an inventory says."""


class Order(Value):
    """A change of the host for a claim."""

    verb: Literal["create", "remove", "reset", "bind", "return"]
    owner: str = ""
    """Who a vGPU or a bound device is for; the same owner gets the same again."""
    parent: str = ""
    """The GPU of a new vGPU."""
    type: str = ""
    """The ID of its type."""
    addresses: tuple[PciAddress, ...] = ()
    """The functions to reset, or the device to bind."""
    on_demand: OnDemand | None = None
    """How to bind it."""
    stays: bool = False
    """Whether a device that is returned stays on its VFIO driver."""


class Result(Value):
    """What became of an order."""

    unit: NodeUnit | None = None
    """The vGPU that was created, or the device that was bound."""
    note: str = ""
    """Why a device was not reset, if nothing is wrong with it, or what is not as before a bind."""
    error: str = ""
    """Why the order failed."""
    hint: str = ""
    is_refused: bool = False
    """Whether a safety check refused it; nothing was changed."""


def read_record(kind: type[_R], tree: HostTree, file: HostPath) -> _R | None:
    """A value in a file; None if there is no file.

    Raises:
        HostError: it cannot be read, e.g. since another version wrote it.
    """
    try:
        return from_jsonable(kind, json.loads(read_own(tree, file)))
    except FileNotFoundError:
        return None
    except (OSError, NotARecord, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read {file}: {why}"
        remove = f"rm {shlex.quote(tree.locate(file))}"
        hint = f"run the version that wrote it, or, if no pod has its devices: {remove}"
        raise HostError(message, hint) from None


def write_record(tree: HostTree, file: HostPath, value: object) -> None:
    """Keep a value in a file until the host is rebooted.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(to_jsonable(value), indent=2) + "\n"
    tree.make_directory(file.parent)
    tree.replace(file, text.encode(), mode=0o600, durable=False)


def send(sink: int, message: AnyValue) -> None:
    """Write a message to a pipe."""
    data = write(message)
    while data:
        data = data[os.write(sink, data) :]


def write(message: AnyValue) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(to_jsonable(message)) + b"\n"


def read(kind: type[_T], line: bytes) -> _T:
    """Read a line.

    Raises:
        ValueError: it is not such a message.
    """
    return from_jsonable(kind, msgspec.json.decode(line))
