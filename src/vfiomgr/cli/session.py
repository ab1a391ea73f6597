"""The options that every command takes, and the host that they select."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from vfiomgr.cli.options import Seconds, WholeNumber
from vfiomgr.errors import HostError, InvalidDocument, UsageError
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import BOOT_ID, PCI_DEVICES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

Format = Literal["table", "json", "yaml"]
_MACHINE = "/"
"""The root of the machine that vfiomgr runs on; nothing below the command line supplies it."""
_NVIDIA = "10de"
_LONGEST_SNAPSHOT = 512 << 20
"""Characters; a host of 16,384 functions takes a twentieth of it."""


@dataclass
class Session:
    """What these options say; those after a command override those before it."""

    format: Format = "table"
    root: str = _MACHINE
    snapshot: str | None = None
    dry_run: bool = False
    deadline: float | None = None
    """Seconds for one step of a change; None for the usual one."""
    yes: bool = False
    verbose: int = 0
    debug: bool = False
    _typed: set[str] = field(default_factory=set, init=False, repr=False)
    """Options that stand in the command line, which counts more than the environment."""

    def remember(self, name: str, value: object, *, is_typed: bool) -> None:
        """Take the value of an option; of two hosts, the one that was typed."""
        setattr(self, name, value)
        if is_typed:
            self._typed.add(name)
        if "snapshot" in self._typed and "root" not in self._typed:
            self.root = _MACHINE
        if "root" in self._typed and "snapshot" not in self._typed:
            self.snapshot = None

    @property
    def _has_sys(self) -> bool:
        return os.path.isdir(os.path.join(self.root, "sys"))

    @functools.cached_property
    def tree(self) -> HostTree:
        """The tree to read and change.

        Raises:
            UsageError: there is no host below the root.

        """
        if not self._has_sys:
            message = f"{self.root!r} holds no host: there is no directory sys in it"
            raise UsageError(message, "--root takes a directory that looks like the root of a host")
        return HostTree(self.root)

    @functools.cached_property
    def files(self) -> HostTree:
        """The tree for those who are about files of the host alone: any directory, e.g. an image.

        Raises:
            UsageError: there is no such directory.

        """
        if not os.path.isdir(self.root):
            message = f"{self.root!r} is no directory"
            raise UsageError(message, "--root takes a directory that looks like the root of a host")
        return HostTree(self.root)

    @functools.cached_property
    def machine(self) -> HostTree:
        """The machine that vfiomgr runs on."""
        return HostTree(_MACHINE)

    def host(
        self,
        *,
        with_users: bool = False,
        with_readiness: bool = False,
        with_resets: bool = False,
        with_gpu_modes: bool = False,
        serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> HostSnapshot:
        """The facts to answer from: of a snapshot file, or of the tree as it is now."""
        from vfiomgr.snapshot.scan import scan  # noqa: PLC0415 - not every command scans

        if self.snapshot is not None:
            return self._loaded(self.snapshot)
        host = scan(
            self.tree,
            self.machine,
            with_users=with_users,
            with_readiness=with_readiness,
            with_resets=with_resets,
            with_gpu_modes=with_gpu_modes,
            serials_of=serials_of,
        )
        return self._required(host)

    def host_or_image(self) -> HostSnapshot:
        """As `host`, for those who are about files: of an image the devices are not known."""
        from vfiomgr.snapshot.scan import scan  # noqa: PLC0415 - not every command scans

        is_image = self.snapshot is None and self.root != _MACHINE and not self._has_sys
        return scan(self.files, self.machine) if is_image else self.host()

    def with_vgpu_users(
        self, host: HostSnapshot, functions: tuple[PciDevice, ...] = ()
    ) -> HostSnapshot:
        """With those who use its vGPUs alone: a look for all users takes many times as long.

        It is taken where one of the virtual `functions` that are vGPUs has nodes of a host driver,
        which a process can also have mapped without having them open.
        """
        from vfiomgr.snapshot.users import read_holders, read_users  # noqa: PLC0415

        if self.snapshot is not None:
            return host
        if any(device.nodes for device in functions):
            return replace(host, users=read_users(self.tree))
        holders: tuple[PciDevice | Vgpu, ...] = (*host.vgpus, *functions)
        nodes = {node for holder in holders for node in host.guest_nodes(holder)}
        return replace(host, users=read_holders(self.tree, nodes))

    def require_live(self, why: str, remedy: str) -> None:
        """Make sure that a tree is meant.

        Raises:
            UsageError: a snapshot is.

        """
        if self.snapshot is not None:
            raise UsageError(why, remedy)

    def devices(self) -> HostSnapshot:
        """As `host`, but from a tree nothing besides the devices, which takes a fraction of it."""
        from vfiomgr.snapshot.scan import scan_devices  # noqa: PLC0415 - not every command scans

        if self.snapshot is not None:
            return self._loaded(self.snapshot)
        return self._required(scan_devices(self.tree, self.machine))

    def slots_of(self, names: Iterable[str]) -> HostSnapshot:
        """As `devices`, where it can be with the functions alone that share a slot with these.

        No names of vGPUs, nor of functions that are not there, which only the whole host explains.
        NVIDIA's virtual functions are what their siblings on the driver are (host/vendor_vgpu.py).
        """
        if self.snapshot is not None:
            return self.devices()
        from vfiomgr.pci.facts import list_addresses  # noqa: PLC0415 - few commands name devices
        from vfiomgr.pci.model import PciAddress  # noqa: PLC0415 - as the two
        from vfiomgr.snapshot.scan import scan_devices  # noqa: PLC0415 - not every command scans

        known = list_addresses(self.tree)
        try:
            wanted = frozenset(PciAddress.parse(name, known) for name in names)
        except UsageError:
            return self.devices()
        only = frozenset(address.slot for address in wanted)
        host = scan_devices(self.tree, self.machine, only=only)
        there = {device.address for device in host.devices}
        is_vendors = any(d.vendor_id == _NVIDIA and d.physical_function for d in host.devices)
        return self.devices() if is_vendors or not wanted <= there else host

    def _required(self, host: HostSnapshot) -> HostSnapshot:
        """The same, where its functions could be listed: else all answers about it were wrong."""
        if host.pci_unlisted is None:
            return host
        why = f"{PCI_DEVICES} cannot be listed: {host.pci_unlisted}"
        if self.root != _MACHINE:
            message = f"{self.root!r} holds no host: {why}"
            raise UsageError(message, "--root takes a directory that looks like the root of a host")
        remedy = "mount sysfs on /sys, or run vfiomgr where the host's own /sys is seen"
        raise HostError(why, remedy)

    def _loaded(self, snapshot: str) -> HostSnapshot:
        if self.root != _MACHINE:
            message = f"--snapshot {snapshot} and --root {self.root} name two different hosts"
            raise UsageError(message, "pass one of them (VFIOMGR_SNAPSHOT, VFIOMGR_ROOT)")
        host = _load_snapshot(snapshot)
        if host.pci_unlisted is not None:
            message = f"{snapshot} shows no host: {PCI_DEVICES}: {host.pci_unlisted}"
            raise InvalidDocument(message, "make it on the host, with: vfiomgr snapshot")
        return host

    def tell_of_cut_off_runs(self) -> None:
        """Say which earlier runs were left half done, where this user may read the journal."""
        from vfiomgr.cli.output import note  # noqa: PLC0415 - as the next one
        from vfiomgr.engine.journal import survey  # noqa: PLC0415 - `list` needs none
        from vfiomgr.engine.lost_state import unusable  # noqa: PLC0415 - as this one

        if self.snapshot is not None:
            return
        boot_id = self.files.read(BOOT_ID)
        with suppress(PermissionError):
            left = survey(self.files, boot_id)
            for run in left.cut_off:
                note(f"left half done: {run.summary}, in: {run.step}; vfiomgr recover ends it")
            for text in unusable(left):
                note(text)

    def addresses(self, texts: Iterable[str]) -> tuple[PciAddress, ...]:
        """Addresses as users type them; the domain may be left out where it is plain."""
        from vfiomgr.pci.model import PciAddress, is_address  # noqa: PLC0415 - not for --version

        if self.snapshot is not None:
            host = self.host()
            return tuple(host.parse_address(text) for text in texts)
        names = filter(is_address, self.tree.children(PCI_DEVICES))
        known = [PciAddress.parse(name) for name in names]
        return tuple(PciAddress.parse(text, known) for text in texts)


def _load_snapshot(source: str) -> HostSnapshot:
    from vfiomgr.snapshot.document import read_snapshot  # noqa: PLC0415 - brings pydantic

    try:
        with open(source, encoding="utf-8") as file:
            text = file.read(_LONGEST_SNAPSHOT + 1)
    except OSError as error:
        message = f"cannot read the snapshot {source}: {error.strerror}"
        raise UsageError(message, "make one with: vfiomgr snapshot > host.json") from None
    except UnicodeDecodeError:
        message = f"{source}: neither JSON nor YAML, not even text"
        raise InvalidDocument(message, "make one with: vfiomgr snapshot > host.json") from None
    if len(text) > _LONGEST_SNAPSHOT:
        most = _LONGEST_SNAPSHOT >> 20
        message = f"cannot read the snapshot {source}: it is larger than {most} MiB"
        raise InvalidDocument(message, "make one with: vfiomgr snapshot > host.json")
    return read_snapshot(text, source)


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    session = context.ensure_object(Session)
    name = str(parameter.name)
    source = context.get_parameter_source(name)
    if source is not click.core.ParameterSource.DEFAULT:
        is_typed = source is click.core.ParameterSource.COMMANDLINE
        session.remember(name, value, is_typed=is_typed)


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--format",),
        {
            "type": click.Choice(["table", "json", "yaml"]),
            "help": "How to print data.  [default: table]",
        },
    ),
    (("--root",), {"metavar": "DIR", "help": "Read the host below DIR, e.g. a recorded one."}),
    (("--snapshot",), {"metavar": "FILE", "help": "Answer from `vfiomgr snapshot` output."}),
    (("--dry-run",), {"is_flag": True, "help": "Print the plan and change nothing."}),
    (
        ("--deadline",),
        {
            "type": Seconds(),
            "metavar": "SECONDS",
            "help": "How long one step may take, or libvirt to answer.  [default: 60, 30]",
        },
    ),
    (("--yes",), {"is_flag": True, "help": "Answer every question with yes."}),
    (
        ("-v", "--verbose"),
        {
            "count": True,
            "type": WholeNumber(min=0),
            "help": "Say what is being done; -vv for more.",
        },
    ),
    (("--debug",), {"is_flag": True, "help": "Show the traceback of an error."}),
)


def session_options(*, from_environment: bool = False) -> Callable[[Any], Any]:
    """Decorate a command with the options of a session; the outermost also reads VFIOMGR_…."""

    def decorate(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        for names, settings in reversed(_OPTIONS):
            variable = f"VFIOMGR_{names[-1].lstrip('-').replace('-', '_').upper()}"
            function = click.option(
                *names,
                **settings,
                expose_value=False,
                callback=_remember,
                envvar=variable if from_environment else None,
            )(function)
        return function

    return decorate


def complete_address(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Addresses of the selected host that continue what is typed, with or without the domain."""
    session = context.find_object(Session) or Session()
    if session.snapshot is not None:
        names = [str(device.address) for device in session.host().devices]
    else:
        from vfiomgr.pci.model import is_address  # noqa: PLC0415 - not for --version

        found = filter(is_address, session.tree.children(PCI_DEVICES))
        names = sorted(found, key=lambda name: (len(name), name))
    full = [name for name in names if name.startswith(incomplete)]
    return full or [name for name in names if name.partition(":")[2].startswith(incomplete)]
