"""The pods that have devices: from the agent of a node, or else from the kubelet's own record.

The agent answers on its socket with its state, and to requests.
"""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.expressions import expression
from vfiomgr.paths import IOMMU_GROUPS, RUNTIME, VFIO_NODES, HostPath
from vfiomgr.pci.model import PciAddress, is_address, pci_device
from vfiomgr.users.model import Report, UnknownUsers, warn
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

CONTROL = RUNTIME / "node.sock"
"""The agent's own socket; its path is fixed, since other commands find the agent by it."""
DEADLINE = 10.0
"""Seconds to wait for an answer that a decision depends on."""
PATIENCE = 1.0
"""Seconds to wait in lists, which do not depend on an agent."""
_CLAIMS = RUNTIME / "dra"
"""Records of ResourceClaims that an agent prepared."""
_RESTART = "restart the agent: systemctl restart vfiomgr-node, or delete its pod"
_MOST_BYTES = 16 << 20
_MOST_QUOTED = 200
"""Characters of an answer in a message."""
_OK, _NOT_FOUND = 200, 404
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_POD = expression(rf"{_LABEL}/(?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/{_LABEL}")
"""NAMESPACE/NAME/CONTAINER, as Kubernetes accepts them; commands that users paste have them."""


class DeviceStatus(Value):
    """A device that is offered to the kubelet."""

    id: str
    addresses: tuple[str, ...]
    numa_nodes: tuple[int, ...]
    is_healthy: bool
    used_by: str
    """A pod as NAMESPACE/NAME/CONTAINER, a guest or a process."""
    pod: str = ""
    """The container that the kubelet gave it to, NAMESPACE/NAME/CONTAINER."""
    reasons: tuple[Diagnostic, ...] = ()
    """Why it is not healthy."""
    allocated_ago: float | None = None
    """Seconds since the kubelet gave it to a pod, until the kubelet names the pod."""


class ResourceStatus(Value):
    """A resource, and whether the kubelet lists its devices."""

    name: str
    consumer: str
    is_registered: bool
    devices: tuple[DeviceStatus, ...] = ()


class ClaimStatus(Value):
    """A device that a ResourceClaim has."""

    device: str
    """A PCI address or a UUID."""
    claim: str
    """NAMESPACE/NAME."""
    driver: str | None = None
    """The driver that it was bound from for the claim, empty for none; None if it was not."""
    since: float | None = None
    """When, in seconds since 1970."""
    returns: bool = False
    """Whether it returns to that driver with the end of the claim."""

    @property
    def origin(self) -> str:
        """From which driver it was bound for the claim, and what its end does; or nothing."""
        if self.driver is None or self.since is None:
            return ""
        driver = self.driver or "no driver"
        end = f"returns to {driver}" if self.returns else "stays on its VFIO driver"
        return f"bound from {driver} at {time_text(self.since)}; {end} when the claim ends"


def time_text(seconds: float) -> str:
    """A time as ISO 8601, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class NodeStatus(Value, dict=True):
    """The state of an agent."""

    pid: int
    plugin_directory: str
    has_kubelet: bool
    """Whether a kubelet accepts registrations."""
    resources: tuple[ResourceStatus, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    """Devices that are not offered, and why."""
    error: str = ""
    """Why the last scan failed."""
    is_dra_registered: bool | None = None
    """Whether the kubelet accepted the DRA driver; None if the agent serves no claims."""
    claims: tuple[ClaimStatus, ...] = ()
    """The devices that ResourceClaims have."""
    on_demand: tuple[DeviceStatus, ...] = ()
    """The devices that claims bind, and return."""
    pods_unknown: str = ""
    """Why it is unknown which pods have devices; empty if it is known."""

    @cached_property
    def pods(self) -> Mapping[str, str]:
        """The pods, NAMESPACE/NAME, by the addresses and UUIDs of the devices that they have."""
        return {name: d.pod.rpartition("/")[0] for name, d in self._devices() if d.pod}

    @cached_property
    def claimed(self) -> Mapping[str, str]:
        """The ResourceClaims, NAMESPACE/NAME, by the addresses and UUIDs of their devices."""
        claims = {each.device: each.claim for each in self.claims}
        more = {name: claims[d.id] for name, d in self._devices() if d.id in claims}
        return claims | more

    @cached_property
    def bound_by_claims(self) -> frozenset[str]:
        """The addresses of the devices that claims bind, and return."""
        return frozenset(name for device in self.on_demand for name in device.addresses)

    @cached_property
    def allocated(self) -> Mapping[str, float]:
        """The seconds since devices were given to pods that the kubelet has not named yet."""
        ages = ((name, device.allocated_ago) for name, device in self._devices())
        return {name: age for name, age in ages if age is not None}

    def _devices(self) -> Iterator[tuple[str, DeviceStatus]]:
        """The devices by the addresses and UUIDs of what containers receive."""
        offered = (device for resource in self.resources for device in resource.devices)
        for device in (*offered, *self.on_demand):
            for name in device.addresses if is_address(device.id) else (device.id,):
                yield name, device


def find_status(
    tree: HostTree, report: Report = warn, seconds: float = PATIENCE
) -> NodeStatus | None:
    """The state of the agent of a host; None if none runs, or this user may not ask it.

    An agent that exists but does not report which pods have devices is noted as unknown.
    """
    if not tree.exists(CONTROL):
        _report_claims(tree, report)
        return None
    path = tree.locate(CONTROL)
    why, remedy = "", _RESTART
    try:
        found = _read(*_exchange(path, "GET", "/status", b"", seconds))
    except FileNotFoundError:
        _report_claims(tree, report)
        return None  # the agent has ended
    except ConnectionRefusedError:
        why = "it was killed and left its socket"
        remedy = f"start the agent again; if no agent should run here: rm {shlex.quote(path)}"
    except PermissionError as error:
        if os.geteuid() != 0:
            return None
        why = str(error.strerror)
    except Misfit as error:
        why = f"it has another version, restart it ({_quoted(str(error))})"
    except (OSError, ValueError) as error:
        why = _quoted(getattr(error, "strerror", None) or str(error)) or "timed out"
    else:
        if found.pods_unknown:
            why = f"the node agent does not know which pods have devices: {found.pods_unknown}"
            report(UnknownUsers("pods", why, "see vfiomgr node status, then repeat the command"))
        return found
    text = f"cannot ask the node agent on {path} which pods have devices: {why}"
    report(UnknownUsers("pods", text, remedy))
    return None


def is_running(tree: HostTree) -> bool:
    """Whether an agent of any version serves its socket; True if this is unknown.

    With another root than `/` its path can be longer than that of a socket (sun_path in unix(7)).
    """
    import socket  # noqa: PLC0415 - most hosts have no agent

    try:
        with (
            tree.directory(CONTROL.parent) as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(PATIENCE)
            connection.connect(f"/proc/self/fd/{directory}/{CONTROL.name}")
    except ConnectionRefusedError:
        return False
    except FileNotFoundError:
        return tree.exists(CONTROL)
    except OSError:
        return True
    return True


def _report_claims(tree: HostTree, report: Report) -> None:
    """Report prepared claims of an agent that has ended; their pods may run."""
    if any(name.endswith(".json") for name in tree.children(_CLAIMS)):
        why = f"ResourceClaims are prepared ({_CLAIMS}), and no node agent runs"
        place = shlex.quote(tree.locate(_CLAIMS))
        remedy = f"start the agent; if no agent should run here: rm {place}/*.json"
        report(UnknownUsers("pods", why, remedy))


def _require_own_socket(path: str) -> None:
    """Accept only what no other user can have made; a link could lead out of another root.

    Raises:
        OSError: it is absent, no socket, or that of another user.
    """
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        message = "it is not a socket"
        raise OSError(message)
    if found.st_uid not in (0, os.geteuid()):
        message = f"user {found.st_uid} owns it"
        raise OSError(message)


def _quoted(text: str) -> str:
    """The beginning of a text, in one line."""
    return " ".join(text[: 2 * _MOST_QUOTED].split())[:_MOST_QUOTED]


def read_status(path: str) -> NodeStatus:
    """The state of the agent with this socket.

    Raises:
        HostError: no agent answers.
    """
    try:
        return _read(*_ask(path, "GET", "/status"))
    except ValueError as error:
        message = f"cannot read the answer of the agent on {path}: {_quoted(str(error))}"
        raise HostError(message, "restart the agent, so that it has the same version") from None


def release(path: str, device: str) -> None:
    """End the quarantine of a device, and forgive its errors.

    Raises:
        UsageError: the agent does not offer it.
        HostError: no agent answers.
    """
    remedy = "vfiomgr node status lists the devices"
    if not device.isprintable():
        message = f"not a device of the agent: {device!r}"
        raise UsageError(message, remedy)
    status, text = _ask(path, "POST", "/release", device)
    if status == _NOT_FOUND:
        raise UsageError(text.decode().strip(), remedy)


def _read(status: int, content: bytes) -> NodeStatus:
    """Read an answer, without the fields that only a newer version has.

    Raises:
        ValueError: it is an error, incomplete, or that of another version.
    """
    if status != _OK:
        raise ValueError(content.decode(errors="replace").strip())
    try:
        data = msgspec.json.decode(content)
    except RecursionError:
        message = "its answer is nested too deeply"
        raise ValueError(message) from None
    found = from_jsonable(NodeStatus, _known(NodeStatus, data))
    pods = (device.pod for resource in found.resources for device in resource.devices)
    for pod in pods:
        if pod and not is_pod(pod):
            message = f"this is not a container of a pod: {pod!r}"
            raise ValueError(message)
    return found


def is_pod(text: str) -> bool:
    """Whether a text is NAMESPACE/NAME/CONTAINER."""
    return _POD.fullmatch(text) is not None


def _known(kind: Any, data: Any) -> Any:  # noqa: ANN401 - types and JSON have no narrower type
    """The members of a value that this class has fields for."""
    if isinstance(data, dict) and isinstance(kind, type) and issubclass(kind, Value):
        types = _types_of_fields(kind)
        return {name: _known(types[name], data[name]) for name in data if name in types}
    if isinstance(data, list) and (items := get_args(kind)):
        return [_known(items[0], item) for item in data]
    return data


@lru_cache
def _types_of_fields(kind: type[Value]) -> Mapping[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _ask(path: str, method: str, page: str, body: str = "") -> tuple[int, bytes]:
    """The status and the body of an answer.

    Raises:
        HostError: no agent answers.
    """
    try:
        return _exchange(path, method, page, body.encode(), DEADLINE)
    except PermissionError:
        what = "querying the agent"
        raise NeedsRoot(what, has_plan=False) from None
    except OSError as error:
        message = f"cannot query the agent on {path}: {error.strerror or error}"
        raise HostError(
            message, "start it: systemctl start vfiomgr-node, or vfiomgr node run"
        ) from None


def _exchange(path: str, method: str, page: str, body: bytes, seconds: float) -> tuple[int, bytes]:
    """A request of HTTP over a Unix socket; the server closes the connection after its answer.

    Raises:
        OSError: it is no socket of root or this user, the agent does not answer in time, or the
            answer is not one of HTTP.
    """
    import socket  # noqa: PLC0415 - most hosts have no agent

    _require_own_socket(path)
    end = time.monotonic() + seconds
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        head = f"{method} {page} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while data := connection.recv(1 << 16):
            answer += data
            left = end - time.monotonic()
            if len(answer) > _MOST_BYTES:
                message = "its answer is too long"
                raise OSError(message)
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
    first, _, content = bytes(answer).partition(b"\r\n\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():  # noqa: PLR2004 - the version and the status
        message = "its answer is not HTTP"
        raise OSError(message)
    return int(words[1]), content


_PLUGINS = HostPath("/var/lib/kubelet/device-plugins")
RECORD = _PLUGINS / "kubelet_internal_checkpoint"
"""The devices of pods, in the same place with every --root-dir (pkg/kubelet/cm/devicemanager)."""
_PODS = HostPath("/var/lib/kubelet/pods")
"""A directory for each pod, named after its UID, until the pod is deleted."""
_LOGS = HostPath("/var/log/pods")
"""Likewise NAMESPACE_NAME_UID (BuildPodLogsDirectory in pkg/kubelet/kuberuntime/helpers.go)."""
_UUID = expression(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLAIN = expression(r"[0-9A-Za-z][0-9A-Za-z.-]{0,127}")
"""UIDs of pods and names of containers, which users paste into commands."""


class _Entry(msgspec.Struct):
    """The devices of one resource in a container, by NUMA node."""

    pod: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    devices: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs")

    def names(self, tree: HostTree) -> Iterator[str]:
        """The addresses and UUIDs of its devices; plugins with other identifiers name no device.

        KubeVirt's device IDs are numbers of IOMMU groups, so a number with a VFIO node is a group.
        """
        for name in (name for found in (self.devices or {}).values() for name in found or ()):
            is_group = name.isdecimal() and tree.exists(VFIO_NODES / name)
            members = tree.children(IOMMU_GROUPS / name / "devices") if is_group else (name,)
            yield from (each for each in members if is_address(each) or _UUID.fullmatch(each))


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries")


class _Record(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


def find_pods(tree: HostTree, report: Report, seconds: float) -> NodeStatus | None:
    """The answer of the node agent; without an answer, the pods of the kubelet's record.

    Sources that could name pods and cannot be read are reported.
    """
    return find_status(tree, report, seconds) or _recorded(tree, report)


def _recorded(tree: HostTree, report: Report) -> NodeStatus | None:
    """The devices of the kubelet's record whose pods exist, as an agent reports them."""
    if not tree.exists(RECORD):
        return None
    try:
        entries = _entries(tree)
    except PermissionError:
        return None  # lists of other users do not name pods with an agent either
    except (OSError, HostError, ValueError, RecursionError) as error:
        why = f"cannot read from {RECORD} which pods have devices: {error}"
        remedy = (
            "start vfiomgr's node agent if this node has one, since it asks the kubelet; if no "
            f"kubelet should run here: rm {shlex.quote(tree.locate(RECORD))}"
        )
        report(UnknownUsers("pods", why, remedy))
        return None
    names, kept = pod_names(tree), set(tree.children(_PODS))
    is_in_use = not kept.isdisjoint(names)  # with another --root-dir, _PODS is absent, empty or old
    found = []
    for entry in entries:
        if is_in_use and entry.pod not in names and entry.pod not in kept:
            continue  # the kubelet removes ended pods when it assigns devices to another pod
        named = f"{names.get(entry.pod, '')}/{entry.container}"
        pod = named if is_pod(named) else f"{entry.pod}/{entry.container}"
        devices = tuple(_status(tree, name, pod) for name in dict.fromkeys(entry.names(tree)))
        if devices:
            found.append(ResourceStatus(entry.resource, "", is_registered=False, devices=devices))
    return NodeStatus(0, _PLUGINS, has_kubelet=False, resources=tuple(found)) if found else None


def _entries(tree: HostTree) -> list[_Entry]:
    """The entries of the record.

    Raises:
        PermissionError: only root may read it.
        OSError: it cannot be opened.
        HostError: it is too large.
        ValueError: it is not such a record, or has names that no pod has.
        RecursionError: it is nested too deeply.
    """
    data = tree.read_whole(RECORD)
    if data is None and os.geteuid() != 0:
        raise PermissionError
    if data is None:
        message = "it cannot be opened"
        raise OSError(message)
    entries = msgspec.json.decode(data, type=_Record).data.entries or []
    for text in (text for entry in entries for text in (entry.pod, entry.container)):
        if not _PLAIN.fullmatch(text):
            message = f"no pod or container is called {text!r}"
            raise ValueError(message)
    return entries


def pod_names(tree: HostTree) -> dict[str, str]:
    """The pods of the host by UID, as NAMESPACE/NAME."""
    found = (name.rpartition("_") for name in tree.children(_LOGS))
    return {uid: pod.replace("_", "/") for pod, _, uid in found}


def _status(tree: HostTree, name: str, pod: str) -> DeviceStatus:
    """A device of a pod, with all functions of its IOMMU group, which belong together."""
    members: tuple[str, ...] = ()
    if is_address(name):
        group = pci_device(PciAddress.parse(name)) / "iommu_group/devices"
        members = tuple(dict.fromkeys((name, *tree.children(group))))
    return DeviceStatus(name, members, (), is_healthy=True, used_by=pod, pod=pod)
