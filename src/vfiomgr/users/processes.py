"""Users of a device: processes that have its nodes open or mapped, their units and pods.

Not visible: packet sockets, which the kernel removes with their interface (packet_notifier), and
module reference counts, which are not per device (/sys/module/MODULE/refcnt).
"""

from __future__ import annotations

import os
from errno import ENAMETOOLONG
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.host import bounded
from vfiomgr.paths import PCI_DRIVERS, HostPath
from vfiomgr.pci.model import PciAddress, is_address
from vfiomgr.users.disks import functions_below, remote_places
from vfiomgr.users.model import DeviceUser, Report, UnknownUsers, warn
from vfiomgr.users.node_agent import pod_names
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from vfiomgr.host.tree import HostTree

    Disks = Mapping[str, tuple[PciAddress, ...]]


_SANDBOX = expression(r"sandbox-([0-9a-f]{12,64})")
"""What Kata has QEMU call its guest: see buildName in virtcontainers/qemu.go."""
_BUNDLES = (
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json",
    "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json",
    "/run/containers/storage/overlay-containers/{}/userdata/config.json",
)
"""The OCI configuration of a sandbox or a container: of containerd, of the one in k3s and RKE2, of
CRI-O."""
_ANNOTATIONS = (
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"),
    ("io.kubernetes.cri-o.Namespace", "io.kubernetes.cri-o.KubeName"),
)
"""Where namespace and name of the pod are in it (containerd's and CRI-O's pkg/annotations)."""


def pod_of(tree: HostTree, guest: str | None) -> str | None:
    """The pod of a guest, `namespace/name`; None for other guests, and where no file names it."""
    found = _SANDBOX.fullmatch(guest or "")
    return None if found is None else _pod_of_bundle(tree, found[1])


def _pod_of_bundle(tree: HostTree, name: str) -> str | None:
    texts = (tree.read_text(HostPath(bundle.format(name))) for bundle in _BUNDLES)
    return next((pod for text in texts if text and (pod := _pod_in(text))), None)


def _pod_in(text: str) -> str | None:
    import json  # noqa: PLC0415 - few hosts have pods

    try:
        annotations = json.loads(text)["annotations"]
        for namespace, name in _ANNOTATIONS:
            if name in annotations:
                return f"{annotations[namespace]}/{annotations[name]}"
    except (ValueError, LookupError, TypeError):
        return None  # not what a runtime writes
    return None


_CGROUP = expression(
    r"/kube\S*[/-]pod([0-9a-f]{32}|[0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12})"
    r"(?![0-9a-z])(?:\S*?([0-9a-f]{64}))?"
)
"""The pod's UID and the container's ID in a path of /proc/PID/cgroup, in both versions of cgroups.

With cgroupfs `/kubepods/burstable/podUID/ID`, with systemd `kubepods-burstable-podUID.slice/PRE-ID.
scope`, where the UID has `_` (pod_container_manager_linux.go and cgroup_manager_linux.go in
pkg/kubelet/cm). The UID of a static pod is a hash (applyDefaults in pkg/kubelet/config/common.go).
PRE is `cri-containerd` of containerd (getCgroupsPath in internal/cri/server/helpers.go), `crio` of
CRI-O, also with cgroupfs (internal/config/cgmgr), and `docker`."""


def _pod_of_cgroup(tree: HostTree, cgroups: str | None) -> str | None:
    """The pod that a process is in, `namespace/name`, or its UID where no file names it."""
    found = _CGROUP.search(cgroups or "")
    if found is None:
        return None
    uid, container = found[1].replace("_", "-"), found[2]
    pod = pod_names(tree).get(uid) or (container and _pod_of_bundle(tree, container))
    return pod or uid


_PROC = HostPath("/proc")
_VFIO = "/dev/vfio/"
_WATCHED = (
    _VFIO,
    "/dev/dri/",
    "/dev/accel/",
    "/dev/snd/",
    "/dev/i2c-",
    "/dev/infiniband/",
    "/dev/uio",
    "/dev/nvidia",
    "/dev/kfd",
)
_FIRST_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO (include/linux/proc_ns.h)."""
_CLASSES = ("block", "nvme", "nvme-generic", "scsi_generic", "bsg", "ptp")
"""Classes whose nodes depend on functions in several ways: partitions, LVM, RAID; and the clocks of
network adapters, which time daemons have open."""
_PLACES = {"bsg": "/dev/bsg/"}
"""The place of udev's nodes of a class, if not /dev itself (bsg_devnode in block/bsg.c)."""
_NODES = "/dev/"
_NUMBERED = {
    "drm": "/dev/dri/",
    "accel": "/dev/accel/",
    "sound": "/dev/snd/",
    "infiniband_verbs": "/dev/infiniband/",
    "infiniband_mad": "/dev/infiniband/",
    "uio": "/dev/",
    "i2c-dev": "/dev/",
    "kfd": "/dev/",
    "vfio": _VFIO,
    "vfio-dev": "/dev/vfio/devices/",
}
"""The directory of the nodes of other classes in the kernel's devtmpfs."""
_UNIT = expression(r"[A-Za-z0-9_@][A-Za-z0-9:_.\\@-]*\.(?:service|scope)")
"""Names of units (systemd.unit(5))."""
_NVIDIA = expression(r"\s*(\d+) nvidia(?:-frontend)?")
"""Lines of /proc/devices. The driver has no class; its nodes count from 0, the last two
are not GPUs (NV_MINOR_DEVICE_NUMBER_CONTROL_DEVICE in nv.h of open-gpu-kernel-modules)."""
_NVIDIA_GPUS = range(254)
_MODESET = "/dev/nvidia-modeset"
"""One node for all GPUs (nvidia-modeset-linux.c of open-gpu-kernel-modules): a program can keep
GPUs open by it alone, and the driver's unbind waits for them. A client of the driver that has nodes
of GPUs open uses these; one that has none may use each of them."""
_MODESET_MINOR = 254
_NVIDIA_GPU = expression(r"/dev/nvidia\d+")
_MORE_TIMES = 5
"""How often a process is asked again; each takes some two seconds."""
_GONE = " (deleted)"
_UNNAMED = "/"
"""Replaces the path of a file whose path the kernel does not show."""
_END = "end that process: kill {pid}"


def read_users(tree: HostTree, report: Report = warn) -> tuple[DeviceUser, ...] | None:
    """Processes that use a watched node; None if a process cannot be examined.

    A process that does not answer is reported.
    Only root can read the descriptors of other users' processes; a recording has none.
    """
    descriptors = _all_descriptors(tree)
    if descriptors is None:
        return None
    disks = _nodes_of_disks(tree)
    functions = {disk.node: disk.functions for disk in disks}
    behind_disks = tuple(sorted({address for disk in disks for address in disk.functions}))
    by_number = {disk.number: disk.node for disk in disks} | _numbers_of_others(tree)
    mapped, silent = _mapped(tree, descriptors, by_number)
    found, unclear = _open_nodes(tree, descriptors, by_number)
    for pid in filter(partial(_lives, tree), silent):
        why = f"cannot read the mappings of process {pid}, which may include a device"
        report(UnknownUsers("processes", why, _END.format(pid=pid), behind_disks))
    _report_unclear(tree, unclear, report, behind_disks)
    watched: dict[str, set[str]] = {}
    for pid, opened in found.items():
        nodes = {*opened.values(), *mapped.get(pid, ())}
        watched[pid] = {n for n in nodes if n and (n.startswith(_WATCHED) or n in functions)}
        if any(map(_NVIDIA_GPU.fullmatch, watched[pid])):
            watched[pid].discard(_MODESET)  # it uses the GPUs that it has open
    if any(_MODESET in nodes for nodes in watched.values()):
        functions |= {_MODESET: _functions_of_nvidia(tree)}
    return _described(tree, watched, functions)


def _functions_of_nvidia(tree: HostTree) -> tuple[PciAddress, ...]:
    bound = filter(is_address, tree.children(PCI_DRIVERS / "nvidia"))
    return tuple(map(PciAddress.parse, sorted(bound)))


def _lives(tree: HostTree, pid: str) -> bool:
    return tree.exists(_PROC / pid)


def read_holders(
    tree: HostTree, nodes: AbstractSet[str], report: Report = warn
) -> tuple[DeviceUser, ...] | None:
    """Processes that have one of the nodes open; None where one cannot be looked into.

    A guest has the descriptor of its group or its cdev for as long as it has the device, and what
    it maps is the device's, not the node's: no table of mappings has to be read. Of other nodes a
    process that has only mapped one is not found (`read_users` finds it). A process whose files do
    not answer is reported.
    """
    if not nodes:
        return ()
    descriptors = _all_descriptors(tree)
    if descriptors is None:
        return None
    found, unclear = _open_nodes(tree, descriptors, _numbers_of_others(tree))
    _report_unclear(tree, unclear, report, ())
    return _described(tree, _held(found, nodes), {})


def read_holders_by_name(tree: HostTree, nodes: AbstractSet[str]) -> tuple[DeviceUser, ...] | None:
    """Like `read_holders`, without a file system call for each open file.

    For the agent, which looks every few seconds: a container that has a node under another name is
    not found.
    """
    if not nodes:
        return ()
    descriptors = _all_descriptors(tree)
    return None if descriptors is None else _described(tree, _held(descriptors, nodes), {})


def _held(
    opened: Mapping[str, Mapping[str, str]], nodes: AbstractSet[str]
) -> dict[str, AbstractSet[str]]:
    return {pid: nodes & frozenset(files.values()) for pid, files in opened.items()}


def _report_unclear(
    tree: HostTree, pids: Iterable[str], report: Report, devices: tuple[PciAddress, ...]
) -> None:
    for pid in filter(partial(_lives, tree), pids):
        why = f"process {pid} has a file open that does not answer and may be a device"
        report(UnknownUsers("open-files", why, _END.format(pid=pid), devices))


def runs_guest(tree: HostTree, guest: str, pids: Iterable[int]) -> bool:
    """Whether one of the processes runs the guest, with or without devices.

    A process that does not answer has not ended; one that has ended has no command line.
    """
    guests = _guests(tree, names := [str(pid) for pid in pids])
    return any(guests.get(name, guest) == guest for name in names)


def _all_descriptors(tree: HostTree) -> dict[str, dict[str, str]] | None:
    """The open files of each process; None if some process cannot be examined."""
    pids = [name for name in tree.children(_PROC) if name.isdecimal()]
    if not pids or not shows_all(tree):
        return None
    try:
        return {pid: opened for pid in pids if (opened := _opened(tree, pid)) is not None}
    except PermissionError:
        return None


def shows_all(tree: HostTree) -> bool:
    """Whether /proc is the host's and shows all processes.

    In a PID namespace it hides those of others, and with the option hidepid those of other users
    (proc(5)).
    """
    try:
        namespace = os.stat(tree.locate(_PROC / "self/ns/pid")).st_ino
    except FileNotFoundError:
        return True  # a tree of another host, or a simulated one
    except OSError:
        return False
    return namespace == _FIRST_NAMESPACE and tree.exists(_PROC / "1")


class _DiskNode(Value):
    """A node of a disk, partition, volume or controller, and the functions below it."""

    node: str
    number: str
    """`b259:0`: kind, major and minor."""
    functions: tuple[PciAddress, ...]


def _nodes_of_disks(tree: HostTree) -> tuple[_DiskNode, ...]:
    """The nodes that depend on functions in several ways, or on a controller's."""
    found: list[_DiskNode] = []
    for kind in _CLASSES:
        directory, place = HostPath("/sys/class") / kind, _PLACES.get(kind, _NODES)
        for name in tree.children(directory):
            functions = tuple(functions_below(tree, directory / name))
            if functions:
                number = tree.read(directory / name / "dev") or ""
                number = f"{'b' if kind == 'block' else 'c'}{number}"
                found.append(_DiskNode(place + name.replace("!", "/"), number, functions))
    return tuple(found)


def _opened(tree: HostTree, pid: str) -> dict[str, str] | None:
    """The open files of a process, by descriptor; None without any, as for kernel threads.

    Raises:
        PermissionError: this user may not see them.
    """
    directory = _PROC / pid / "fd"
    try:
        names = os.listdir(tree.locate(directory / ""))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended meanwhile
    targets = ((name, _target(tree, HostPath(f"{directory}/{name}"))) for name in names)
    return {n: _node(file) for n, file in targets if file and file[0] == "/"} if names else None


def _target(tree: HostTree, descriptor: HostPath) -> str | None:
    """The file of a descriptor; None if it was closed in the meantime.

    The kernel does not show a path that is longer than a page. No watched node has such a path, but
    a disk may have one under another name.

    Raises:
        PermissionError: it cannot be read.
    """
    try:
        return os.readlink(tree.locate(descriptor))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            return _UNNAMED
        raise PermissionError from error


def _node(target: str) -> str:
    """The name of an open node, which the kernel may have removed while it waits for the user."""
    return target.removesuffix(_GONE) if target.startswith(_WATCHED) else target


def _open_nodes(
    tree: HostTree, descriptors: Mapping[str, Mapping[str, str]], by_number: Mapping[str, str]
) -> tuple[Mapping[str, Mapping[str, str]], Iterable[str]]:
    """The open files of each process; nodes by their names on the host, whatever they are there.

    Also returns the processes that are without an answer.

    Guests of libvirt and containers have a /dev of their own, in which a name may be that of
    another device (`docker run --device /dev/dri/renderD129:/dev/dri/renderD128`). A child examines
    each file, which may be on a server that does not answer. Files on servers are not disk nodes,
    and hundreds of guests may have their images there.
    """
    if not by_number or not tree.is_machine:
        return descriptors, ()
    known, remote = frozenset(by_number.values()), remote_places(tree)
    host = tree.link(_PROC / "1/ns/mnt")
    unclear: dict[str, list[str]] = {}
    for pid, opened in descriptors.items():
        is_host = host is not None and tree.link(_PROC / pid / "ns/mnt") == host
        unclear[pid] = [
            name
            for name, target in opened.items()
            if _is_unclear(target, known, remote, is_host=is_host)
        ]
    questions = {
        pid: partial(_devices_of, tree, pid, names, by_number)
        for pid, names in unclear.items()
        if names
    }
    answers = bounded.ask_each(tree, questions)
    found = {pid: dict(opened) for pid, opened in descriptors.items()}
    for pid, nodes in answers.items():
        found[pid] |= {name: n for name, n in zip(unclear[pid], nodes, strict=True) if n}
    return found, questions.keys() - answers.keys()


def _numbers_of_others(tree: HostTree) -> dict[str, str]:
    """The nodes that are watched, by kind and number: `c195:0` is /dev/nvidia0.

    The host has no such node if its driver is in a container (/run/nvidia/driver).
    """
    found: dict[str, str] = {}
    for kind, place in _NUMBERED.items():
        directory = HostPath("/sys/class") / kind
        for name in tree.children(directory):
            if number := tree.read(directory / name / "dev"):
                found[f"c{number}"] = place + name
    majors = filter(None, map(_NVIDIA.fullmatch, (tree.read(_PROC / "devices") or "").splitlines()))
    for major in majors:
        found |= {f"c{major[1]}:{n}": f"/dev/nvidia{n}" for n in _NVIDIA_GPUS}
        found[f"c{major[1]}:{_MODESET_MINOR}"] = _MODESET
    return found


def _is_unclear(
    target: str, known: AbstractSet[str], remote: tuple[str, ...], *, is_host: bool
) -> bool:
    """Whether a file may be another device than its name says, as seen by the host or not."""
    if is_host and (target in known or target.startswith(_WATCHED)):
        return False
    return not target.startswith(("/memfd:", "/dev/null", *remote))


def _devices_of(
    tree: HostTree, pid: str, names: Iterable[str], by_number: Mapping[str, str]
) -> Iterator[str | None]:
    """The host's node of each descriptor; None for other files."""
    return (by_number.get(tree.device_of(_PROC / pid / "fd" / name) or "") for name in names)


def _mapped(
    tree: HostTree, pids: Iterable[str], by_number: Mapping[str, str]
) -> tuple[Mapping[str, Iterable[str | None]], Iterable[str]]:
    """Nodes below /dev that processes have mapped, with or without an open descriptor.

    Also returns the processes that do not answer. The kernel locks the maps of a process while it
    changes its memory, possibly forever (mmap_read_lock_killable in fs/proc/task_mmu.c), so a child
    reads them. A process that does not answer is read again after all others, for some time if it
    is not stuck itself: on a busy machine it may be forking.
    """
    questions = {pid: partial(_mapped_nodes, tree, pid, by_number) for pid in pids}
    found = bounded.ask_each(tree, questions)
    asked = questions.keys() - found.keys()
    for _ in range(_MORE_TIMES):
        found |= bounded.ask_each(tree, {pid: questions[pid] for pid in asked})
        status = {tree.locate(_PROC / pid / "status"): pid for pid in asked - found.keys()}
        if not status:
            break
        asked = {status[file] for file in bounded.coming_forward(status)}
    return found, questions.keys() - found.keys()


def _mapped_nodes(tree: HostTree, pid: str, by_number: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes below /dev in a table of mappings; the path is the last of six columns.

    Their numbers say what they are on the host, as of open files; each mapping has a link
    (/proc/PID/map_files in proc(5)), whose name lacks leading zeros.
    """
    table, node = tree.read_whole(_PROC / pid / "maps") or b"", b" " + _NODES.encode()
    if node not in table:
        return ()
    rows = (line.decode(errors="replace") for line in table.splitlines() if node in line)
    ranges = {fields[-1]: fields[0] for row in rows if (fields := row.split(None, 5))}
    found: set[str] = set()
    for path, addresses in ranges.items():
        link = "-".join(each.lstrip("0") for each in addresses.split("-"))
        number = tree.device_of(_PROC / pid / "map_files" / link)
        found.add(by_number.get(number or "", path.removesuffix(_GONE)))
    return tuple(sorted(found))


def _described(
    tree: HostTree, used: Mapping[str, AbstractSet[str]], disks: Disks
) -> tuple[DeviceUser, ...]:
    """The processes that use each node."""
    of_vfio = [pid for pid, nodes in used.items() if any(n.startswith(_VFIO) for n in nodes)]
    guests = _guests(tree, of_vfio)
    return tuple(
        user
        for pid, nodes in used.items()
        if nodes
        for user in _users(tree, pid, sorted(nodes), disks, guests.get(pid))
    )


def _users(
    tree: HostTree, pid: str, nodes: Iterable[str], disks: Disks, guest: str | None
) -> Iterator[DeviceUser]:
    command = tree.read(_PROC / pid / "comm") or "?"
    cgroups = tree.read(_PROC / pid / "cgroup")
    unit = unit_of(cgroups)
    pod = pod_of(tree, guest) or _pod_of_cgroup(tree, cgroups)
    for node in nodes:
        functions = disks.get(node, ())
        yield DeviceUser(node, int(pid), command, unit, functions, guest, pod)


def _guests(tree: HostTree, pids: Iterable[str]) -> dict[str, str | None]:
    """The names of the guests that processes run.

    The command line is in the memory of its process, which may be locked forever (get_mm_cmdline in
    fs/proc/base.c), so a child reads it.
    """
    answers = bounded.ask(tree, {pid: partial(_guest, tree, pid) for pid in pids})
    return {pid: name for pid, (name,) in answers.items()}


def _guest(tree: HostTree, pid: str) -> tuple[str | None]:
    """The name in `-name guest=win,debug-threads=on` or `-name win`; `,,` stands for a comma."""
    words = (tree.read_whole(_PROC / pid / "cmdline") or b"").decode(errors="replace").split("\0")
    for option, value in pairwise(words):
        if option in ("-name", "--name"):
            fields = [field.replace("\0", ",") for field in value.replace(",,", "\0").split(",")]
            named = [field.removeprefix("guest=") for field in fields if field[:6] == "guest="]
            plain = [] if "=" in fields[0] else fields[:1]
            return (next(filter(None, (*named, *plain)), None),)
    return (None,)


def unit_of(cgroups: str | None) -> str | None:
    """The innermost unit of a process, from hierarchy:controllers:path (cgroups(7)).

    Users name the groups below their own manager as they like, also like an option of systemctl.
    """
    for line in (cgroups or "").splitlines():
        path = line.split(":", 2)[-1]
        units = list(filter(_UNIT.fullmatch, path.split("/")))
        if units:
            return units[-1]
    return None
