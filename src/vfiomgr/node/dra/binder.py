"""The part of a DaemonSet that binds devices, for an agent in a pod that may not write /sys.

It has a pod of its own: namespaces of the host are those of all containers of a pod, and the one
without privileges could then send signals to the processes of root. It takes orders from a Unix
socket that only root can open. Each connection has a process of its own, which an agent with the
rights would start itself.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import HostError
from vfiomgr.host.programs import PROGRAM_PATH, ProgramAnswer
from vfiomgr.host.tree import HostTree
from vfiomgr.node.dra.vgpus import Vgpus
from vfiomgr.node.messages import BINDER, Order, Result
from vfiomgr.node.model import NodeUnit, OnDemand
from vfiomgr.node.on_demand import unit_of
from vfiomgr.node.processes import own_command
from vfiomgr.passthrough.guards import PERSISTENCE_MODE
from vfiomgr.vgpu.nvidia_smi import read_persistence

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_NVIDIA = "nvidia"
_CREDENTIALS = struct.Struct("3i")
"""PID, UID and GID of a peer (SO_PEERCRED in unix(7))."""


_NODE = "/proc/1/root"
"""The root of the node, in its PID namespace."""
_ROOTS = (_NODE, f"{_NODE}/run/nvidia/driver")
"""Where programs of the node are; the second is that of the GPU Operator's driver container."""


class PodTree(HostTree):
    """The host of a privileged pod in the node's PID namespace; programs are those of the node.

    The image has none of the drivers, and systemctl reaches the node's systemd in its root only.
    """

    def ask(self, command: Sequence[str], seconds: float = 15.0) -> ProgramAnswer | None:
        """As on the node."""
        return super().ask(of_node(command), seconds)

    def call(self, *command: str, limit: float | None = 60) -> None:
        """As on the node."""
        super().call(*of_node(command), limit=limit)


def of_node(command: Sequence[str], roots: Iterable[str] = _ROOTS) -> Sequence[str]:
    """The command as it is run in the first root that has its program; links may be absolute."""
    for root in roots:
        places = (f"{root}{place}/{command[0]}" for place in PROGRAM_PATH.split(":"))
        if any(map(os.path.lexists, places)):
            return ("chroot", root, *command)
    return command


class Binder(Vgpus):
    """Carries out orders about on-demand devices of the node's layout: bind, reset, return."""

    layout: str | None = None
    """The name of the layout in its file, if it is not the installed one."""

    def _perform(self, order: Order) -> Result:
        match order.verb:
            case "bind":
                order = replace(order, on_demand=self._rule_of(order))
            case "reset" if not self.binding.is_bound(order.addresses[0]):
                return Result(note=f"{order.addresses[0]} was not bound for a claim")
            case "create" | "remove":
                refuse("not-in-layout", "", f"cannot {order.verb}: this pod only binds devices")
        return super()._perform(order)

    def _rule_of(self, order: Order) -> OnDemand:
        """How the layout of the node has a device bound, whatever the order says.

        Raises:
            Refusal: it does not name the device.
            VfiomgrError: the layout cannot be read, or the host does not have the device.
        """
        layouts = import_module("vfiomgr.node.layouts")  # pydantic is only needed here
        layout, seen = layouts.installed_layout(self._tree, self.layout), self._host.scan_devices()
        rules: dict[str, OnDemand] = {} if layout is None else layouts.on_demand(seen, layout)
        unit = unit_of(seen, order.addresses[0], OnDemand())
        self._require_known_mode(seen, unit)
        found = [rules[name] for name in map(str, unit.addresses) if name in rules]
        if not found:
            refuse(
                "not-in-layout",
                unit.id,
                f"cannot bind {unit.id}: the layout of this node has no on-demand rule for it",
                "use the same layout for all pods of vfiomgr, and restart them",
            )
        return found[0]

    def _require_known_mode(self, seen: HostSnapshot, unit: NodeUnit) -> None:
        """Refuse a GPU if it may be in persistence mode, in which NVIDIA's driver keeps it."""
        for device in map(seen.device, unit.addresses):
            if device.driver == _NVIDIA and read_persistence(self._tree, device.address) is None:
                refuse(
                    PERSISTENCE_MODE,
                    device,
                    f"cannot tell whether {device} is in persistence mode: no answer of nvidia-smi",
                    "install nvidia-smi on the node, or run the agent as a service",
                )


def run(tree: HostTree, layout: str | None = None) -> None:
    """Serve until SIGTERM; what was begun may end, for as long as the kubelet waits.

    `layout` is the name of the layout in its file, if it is not the installed one.

    Raises:
        HostError: the socket cannot be created.
    """
    import subprocess  # noqa: PLC0415 - nothing else here runs a program

    named = () if layout is None else ("--layout", layout)
    command = (*own_command(tree.root, "create"), "--bind-only", *named)
    working: list[subprocess.Popen[bytes]] = []

    def begin(connection: socket.socket) -> None:
        working[:] = [process for process in working if process.poll() is None]
        place = connection.fileno()
        working.append(subprocess.Popen(command, stdin=place, stdout=place))  # noqa: S603 - ours

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with listen(tree) as listening:
            serve(listening, begin)
    except OSError as error:
        message = f"cannot serve {BINDER}: {error.strerror}"
        raise HostError(message) from error
    except KeyboardInterrupt:
        with suppress(OSError):  # agents publish what is not bound only while it is there
            os.unlink(tree.locate(BINDER))
        for process in working:
            process.wait()


def listen(tree: HostTree) -> socket.socket:
    """The socket, which replaces that of an earlier process, and accepts orders at once.

    Raises:
        OSError: it cannot be created.
    """
    tree.make_directory(BINDER.parent, 0o700)
    os.chmod(tree.locate(BINDER.parent), 0o700)
    path = tree.locate(BINDER)
    new = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(new)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(new)
    listening.listen()
    os.replace(new, path)
    return listening


def serve(listening: socket.socket, begin: Callable[[socket.socket], object]) -> NoReturn:
    """Begin to carry out the orders of each connection of root, or of this user."""
    while True:
        connection, _ = listening.accept()
        with connection:
            if _user_of(connection) in {0, os.geteuid()}:
                begin(connection)


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid
