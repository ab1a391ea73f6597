"""Specifications of the Container Device Interface, as written in a file.

https://github.com/cncf-tags/container-device-interface SPEC.md and specs-go/config.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import field

from vfiomgr.diagnostic import Diagnostic, Position, flaw
from vfiomgr.documents.text import Path
from vfiomgr.expressions import expression
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

STATIC = HostPath("/etc/cdi")
DYNAMIC = HostPath("/run/cdi")
OLD_DYNAMIC = HostPath("/var/run/cdi")
"""The directories of consumers (pkg/cdi/spec-dirs.go); /var/run is usually a link to /run."""
OWN_PREFIX = "vfiomgr-"
_OWN_VENDOR = "vfiomgr.io/"
DEFAULT_KIND = f"{_OWN_VENDOR}vfio"
CLAIM_KIND = f"{_OWN_VENDOR}claim"
"""The devices of ResourceClaims, with a file for each claim."""
METADATA_KIND = f"{_OWN_VENDOR}metadata"
"""The files that describe the devices of ResourceClaims."""


NodeForm = Literal["auto", "group", "cdev"]
"""/dev/vfio/GROUP, or /dev/vfio/devices/vfioN."""
Naming = Literal["address", "group", "cdev", "index"]
Lifetime = Literal["static", "dynamic"]
"""In /etc/cdi, or in /run/cdi, which is emptied at reboot."""
PGPU = "nvidia.com/pgpu"
"""The resource of NVIDIA's sandbox-device-plugin, whose device IDs are no addresses."""
_GROUP_NAME = expression(r"[0-9]+")
_CDEV_NAME = expression(r"vfio[0-9]+")
DIRECTORIES: dict[Lifetime, HostPath] = {"static": STATIC, "dynamic": DYNAMIC}


class OfferRequest(Value):
    """How to offer devices."""

    kind: str = DEFAULT_KIND
    addresses: tuple[PciAddress, ...] = ()
    """Only these, with their entire groups; empty for all available ones."""
    node: NodeForm = "auto"
    name_by: Naming = "address"
    is_plain: bool = False
    """For containers without a guest: the program in the container opens VFIO itself."""
    consumer: str = "any"
    """Who must be able to read it: a consumer or a family; `any` for no requirement."""


class CdiFile(Value):
    """A file in or below one of the directories, with the name of a specification."""

    path: str
    text: str | None
    why: str | None = None
    """Why it is not readable, if so."""

    @property
    def directory(self) -> str:
        """The directory that it is in or below; the second one has a single name."""
        return STATIC if self.path.startswith(f"{STATIC}/") else DYNAMIC

    @property
    def below(self) -> str:
        """Its path below the directory; for a file in neither, its name."""
        for directory in (STATIC, DYNAMIC, OLD_DYNAMIC):
            if self.path.startswith(f"{directory}/"):
                return self.path.removeprefix(f"{directory}/")
        return self._name

    @property
    def _name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_own(self) -> bool:
        """Whether vfiomgr wrote it: the names of its files have a common prefix."""
        places = (f"{directory}/{self._name}" for directory in (STATIC, DYNAMIC, OLD_DYNAMIC))
        is_ours = self._name.startswith(OWN_PREFIX) and self._name.endswith(".json")
        return is_ours and self.path in places


def own_file(directory: HostPath, kind: str) -> HostPath:
    """The file for vfiomgr's devices of a kind; each kind has its own.

    The slash becomes `_`, and each `_` becomes `__`: a vendor never ends, and a class never begins,
    with one.
    """
    return directory / f"{OWN_PREFIX}{kind.replace('_', '__').replace('/', '_')}.json"


class CdiOddity(Value):
    """Something that values cannot hold: consumers read it differently."""

    path: Path
    found: Diagnostic


def fault(rule: str, line: int, what: str, remedy: str) -> Diagnostic:
    """A reason for which a library refuses a specification."""
    return flaw(rule, Position(line), "", what, remedy)


class CdiDeviceNode(Value):
    """A device node for the container; values that are None or empty come from the host's node."""

    path: str
    host_path: str = ""
    """Its path on the host; empty for the same path."""
    type: str = ""
    """b, c, u or p, as in mknod(1)."""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = ""
    """Cgroup permissions: some of r, w and m."""
    uid: int | None = None
    gid: int | None = None

    @property
    def on_host(self) -> str:
        """The path on the host."""
        return self.host_path or self.path


_FOR_ALL = NodeAccess(0, 0, 0o666)


def device_nodes(paths: Iterable[str], access: NodeAccess = ROOT_ONLY) -> tuple[CdiDeviceNode, ...]:
    """Nodes with an owner and a mode; without them, runtimes give all users access."""
    return tuple(
        CdiDeviceNode(path, file_mode=access.mode, uid=access.uid or None, gid=access.gid or None)
        for path in paths
    )


def shared_nodes(paths: Iterable[str], accesses: Iterable[NodeAccess]) -> tuple[CdiDeviceNode, ...]:
    """The nodes that all devices need, which give no access to a device by themselves.

    If a user other than root may open the node of a device, all users may open these.
    """
    is_for_root = all(access == ROOT_ONLY for access in accesses)
    return device_nodes(paths, ROOT_ONLY if is_for_root else _FOR_ALL)


class CdiMount(Value):
    """A directory or file of the host for the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


class CdiHook(Value):
    """A program that runs at a stage of the container."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class CdiNetDevice(Value):
    """A network interface of the host for the container."""

    host_interface: str
    name: str


class CdiIntelRdt(Value):
    """Shares of caches and memory bandwidth (resctrl)."""

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool | None = None
    enable_cmt: bool | None = None
    enable_mbm: bool | None = None


class CdiEdits(Value):
    """The changes to a container with the device."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[CdiDeviceNode, ...] = ()
    net_devices: tuple[CdiNetDevice, ...] = ()
    hooks: tuple[CdiHook, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    intel_rdt: CdiIntelRdt | None = None
    additional_gids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there are no changes; all consumers refuse a device without edits."""
        return self == CdiEdits()


class CdiDevice(Value):
    """A device of a kind."""

    name: str
    edits: CdiEdits = CdiEdits()
    annotations: tuple[tuple[str, str], ...] = ()


class CdiSpecification(Value):
    """A file: devices of one kind."""

    version: str
    """`cdiVersion`, as written."""
    kind: str
    """VENDOR/CLASS."""
    devices: tuple[CdiDevice, ...] = ()
    edits: CdiEdits = CdiEdits()
    """For containers with any of the devices."""
    annotations: tuple[tuple[str, str], ...] = ()
    file: HostPath | None = None
    """The file that it was read from; None for a new one."""
    oddities: tuple[CdiOddity, ...] = ()
    lines: Mapping[Path, int] = field(default_factory=dict)
    """The lines of all parts of the file, including those without a field here."""

    def __eq__(self, other: object) -> bool:
        """Compare without the texts and lines."""
        return isinstance(other, CdiSpecification) and self._compared() == other._compared()

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return (self.version, self.kind, self.devices, self.edits, self.annotations, self.file)

    @property
    def vendor(self) -> str:
        """The part before the slash; empty if the kind is not VENDOR/CLASS."""
        return _qualifier(self.kind)[0]

    @property
    def device_class(self) -> str:
        """The part after the slash; the entire kind if it is not VENDOR/CLASS."""
        return _qualifier(self.kind)[1]

    def qualified(self, device: CdiDevice) -> str:
        """VENDOR/CLASS=NAME, as in requests and annotations."""
        return f"{self.kind}={device.name}"

    def line(self, path: Path) -> int:
        """The line of a part, or of the nearest enclosing part that exists."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def all_edits(self) -> Iterator[tuple[Path, CdiEdits]]:
        """The edits of the specification and of its devices, with their paths."""
        yield ("containerEdits",), self.edits
        for number, device in enumerate(self.devices):
            yield ("devices", number, "containerEdits"), device.edits


def generating(kind: str, name: str = "") -> str:
    """The command that writes a specification of a kind, with names like `name` or the plugin's.

    The agent of a node writes those of its own resources.
    """
    if kind.startswith(_OWN_VENDOR) and kind != DEFAULT_KIND:
        return "vfiomgr node run"
    if _GROUP_NAME.fullmatch(name) or (kind == PGPU and not name):
        naming = " --name-by group"
    else:
        naming = " --name-by cdev" if _CDEV_NAME.fullmatch(name) else ""
    return f"vfiomgr cdi generate --kind {kind}{naming} --write"


def _qualifier(kind: str) -> tuple[str, str]:
    """Like ParseQualifier of pkg/parser: exactly one slash, with text before and after."""
    vendor, slash, name = kind.partition("/")
    return (vendor, name) if slash and vendor and name and "/" not in name else ("", kind)


def further_request(request: str, number: int) -> str:
    """The request by which a VM of KubeVirt gets a further function of a device, from 1 on."""
    return f"{request}-function-{number}"
