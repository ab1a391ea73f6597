"""Specifications of the Container Device Interface, as a file has them.

https://github.com/cncf-tags/container-device-interface SPEC.md and specs-go/config.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import field

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.located import Path
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

STATIC = HostPath("/etc/cdi")
DYNAMIC = HostPath("/run/cdi")
OLD_DYNAMIC = HostPath("/var/run/cdi")
"""Where consumers look (pkg/cdi/spec-dirs.go); /var/run is a link to /run almost everywhere."""
OWN_PREFIX = "vfiomgr-"
DEFAULT_KIND = "vfiomgr.io/vfio"


NodeForm = Literal["auto", "group", "cdev"]
"""/dev/vfio/GROUP, or /dev/vfio/devices/vfioN."""
Naming = Literal["address", "group", "cdev", "index"]
Lifetime = Literal["static", "dynamic"]
"""In /etc/cdi, or in /run/cdi, which a reboot empties."""
NODE_FORMS: tuple[NodeForm, ...] = get_args(NodeForm)
NAMINGS: tuple[Naming, ...] = get_args(Naming)
DIRECTORIES: dict[Lifetime, HostPath] = {"static": STATIC, "dynamic": DYNAMIC}


class OfferRequest(Value):
    """How devices are to be offered."""

    kind: str = DEFAULT_KIND
    addresses: tuple[PciAddress, ...] = ()
    """These alone, with all of their groups; all that is ready where empty."""
    node: NodeForm = "auto"
    name_by: Naming = "address"
    is_plain: bool = False
    """For containers without a guest of their own: whoever is inside opens VFIO by itself."""
    consumer: str = "any"
    """Who must be able to read it: one, or a family; `any` asks nobody."""


class CdiFile(Value):
    """A file in one of the directories, or below it, that is a specification by its name."""

    path: str
    text: str | None
    why: str | None = None
    """Why it cannot be read, where it cannot."""

    @property
    def directory(self) -> str:
        """Which of the two directories it is in, or below, as if the second had one name."""
        return STATIC if self.path.startswith(f"{STATIC}/") else DYNAMIC

    @property
    def below(self) -> str:
        """Its path below its directory; of a file that is in neither, its name."""
        for directory in (STATIC, DYNAMIC, OLD_DYNAMIC):
            if self.path.startswith(f"{directory}/"):
                return self.path.removeprefix(f"{directory}/")
        return self._name

    @property
    def _name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_own(self) -> bool:
        """Whether vfiomgr wrote it: the names of such files begin alike."""
        places = (f"{directory}/{self._name}" for directory in (STATIC, DYNAMIC, OLD_DYNAMIC))
        is_ours = self._name.startswith(OWN_PREFIX) and self._name.endswith(".json")
        return is_ours and self.path in places


def own_file(directory: HostPath, kind: str) -> HostPath:
    """Where vfiomgr keeps its devices of a kind; no two kinds have one file.

    The slash is one `_`, and each `_` two: neither a vendor ends with one, nor does a class begin.
    """
    return directory / f"{OWN_PREFIX}{kind.replace('_', '__').replace('/', '_')}.json"


class CdiOddity(Value):
    """Something in a file that the values cannot hold: consumers differ in what they make of it."""

    path: Path
    found: Diagnostic


class CdiDeviceNode(Value):
    """A device node for the container; what is None or empty is taken from the node of the host."""

    path: str
    host_path: str = ""
    """Where it is on the host; the same path where it is empty."""
    type: str = ""
    """b, c, u or p, as mknod(1) has them."""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = ""
    """Of the cgroup: some of r, w and m."""
    uid: int | None = None
    gid: int | None = None

    @property
    def on_host(self) -> str:
        """The path on the host."""
        return self.host_path or self.path


class CdiMount(Value):
    """A directory or file of the host for the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


class CdiHook(Value):
    """A program that runs at a point of the container's life."""

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
    """What is done to a container that gets the device."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[CdiDeviceNode, ...] = ()
    net_devices: tuple[CdiNetDevice, ...] = ()
    hooks: tuple[CdiHook, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    intel_rdt: CdiIntelRdt | None = None
    additional_gids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is done; a device without edits is refused by all consumers."""
        return self == CdiEdits()


class CdiDevice(Value):
    """A device of a kind."""

    name: str
    edits: CdiEdits = CdiEdits()
    annotations: tuple[tuple[str, str], ...] = ()


class CdiSpecification(Value):
    """A file: devices of one kind."""

    version: str
    """`cdiVersion`, as it is written."""
    kind: str
    """VENDOR/CLASS."""
    devices: tuple[CdiDevice, ...] = ()
    edits: CdiEdits = CdiEdits()
    """For containers that get any of the devices."""
    annotations: tuple[tuple[str, str], ...] = ()
    file: HostPath | None = None
    """Where it was read; None for one that is yet to be written."""
    oddities: tuple[CdiOddity, ...] = ()
    lines: Mapping[Path, int] = field(default_factory=dict)
    """Of all parts that are in the file, also of those that have no field here."""

    def __eq__(self, other: object) -> bool:
        """Whatever their texts looked like."""
        return isinstance(other, CdiSpecification) and self._compared() == other._compared()

    def __hash__(self) -> int:
        """As equality is."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return (
            self.version,
            self.kind,
            self.devices,
            self.edits,
            self.annotations,
            self.file,
        )

    @property
    def vendor(self) -> str:
        """What is before the slash; empty where the kind is not VENDOR/CLASS."""
        return _qualifier(self.kind)[0]

    @property
    def device_class(self) -> str:
        """What is behind the slash; the whole kind where it is not VENDOR/CLASS."""
        return _qualifier(self.kind)[1]

    def qualified(self, device: CdiDevice) -> str:
        """VENDOR/CLASS=NAME: what requests and annotations say."""
        return f"{self.kind}={device.name}"

    def line(self, path: Path) -> int:
        """Where a part stands, or the nearest part around it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def all_edits(self) -> Iterator[tuple[Path, CdiEdits]]:
        """The edits of the specification and of its devices, with where they are."""
        yield ("containerEdits",), self.edits
        for number, device in enumerate(self.devices):
            yield ("devices", number, "containerEdits"), device.edits


def _qualifier(kind: str) -> tuple[str, str]:
    """As ParseQualifier of pkg/parser: exactly one slash, something before and behind it."""
    vendor, slash, name = kind.partition("/")
    return (vendor, name) if slash and vendor and name and "/" not in name else ("", kind)
