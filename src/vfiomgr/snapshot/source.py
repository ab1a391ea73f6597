"""The source of facts about a host: a tree as it is now, or a snapshot from a document."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from vfiomgr.errors import HostError, InvalidDocument, UsageError, require_known
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import MACHINE, PCI_DEVICES
from vfiomgr.pci.facts import list_addresses
from vfiomgr.pci.model import PciAddress, PciDevice, device_text, identifiers_in, is_address
from vfiomgr.snapshot.created import Created, created_now
from vfiomgr.snapshot.document import REMEDY, load_dated
from vfiomgr.snapshot.named import ambiguous, find_address, with_identifiers, with_name
from vfiomgr.snapshot.scan import FurtherFacts, scan, scan_devices
from vfiomgr.users.node_agent import PATIENCE, find_pods
from vfiomgr.users.processes import read_holders, read_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.pci.function import Purpose
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder
    from vfiomgr.users.model import UnknownUsers


_NVIDIA = "10de"
_ROOT_HINT = "--root requires the root directory of a host"


class HostSource:
    """A host to read: the tree below `root`, or the file `snapshot`.

    A tree is read again for each question, a snapshot only once.
    """

    root: str = MACHINE
    snapshot: str | None = None

    def on_note(self, text: str) -> None:
        """Receive a note for the reader: an assumption or an omission."""

    def share_with(self, other: HostSource) -> None:
        """Let another source read the same host, with the snapshot that was already read."""
        shared = ("root", "snapshot", "tree", "files", "machine", "_dated")
        vars(other).update({name: vars(self)[name] for name in shared if name in vars(self)})

    @property
    def _has_sys(self) -> bool:
        return os.path.isdir(os.path.join(self.root, "sys"))

    @cached_property
    def tree(self) -> HostTree:
        """The tree to read and change.

        Raises:
            UsageError: the root is not that of a host.
        """
        if not self._has_sys:
            message = f"not a host root: {self.root!r} (no sys/ directory)"
            raise UsageError(message, _ROOT_HINT)
        return HostTree(self.root)

    @cached_property
    def files(self) -> HostTree:
        """The tree for changes of files only: any directory, e.g. an image.

        Raises:
            UsageError: the directory does not exist.
        """
        if not os.path.isdir(self.root):
            message = f"not a directory: {self.root!r}"
            raise UsageError(message, _ROOT_HINT)
        return HostTree(self.root)

    @cached_property
    def machine(self) -> HostTree:
        """The machine that runs vfiomgr, whose tables name hardware that `tree` does not."""
        return HostTree(MACHINE)

    def scan(
        self,
        *,
        serials_of: frozenset[tuple[int, int, int]] = frozenset(),
        **further: Unpack[FurtherFacts],
    ) -> HostSnapshot:
        """The facts of the host at one moment; for a snapshot, those it was made with.

        Serial numbers are read in the slots of `serials_of`.

        Raises:
            UsageError: the root is not that of a host, or the snapshot cannot be read.
            InvalidDocument: the snapshot is malformed.
            HostError: this machine's PCI devices cannot be listed.
        """
        require_known(further, FurtherFacts)
        if self.snapshot is not None:
            return self._loaded
        return self._required(scan(self.tree, self.machine, serials_of=serials_of, **further))

    def scan_or_image(self) -> HostSnapshot:
        """Like `scan`, for changes of files only: the devices of an image are unknown."""
        is_image = self.snapshot is None and self.root != MACHINE and not self._has_sys
        return scan(self.files, self.machine) if is_image else self.scan()

    def scan_devices(
        self, purpose: Purpose | None = None, about: frozenset[PciAddress] | None = None
    ) -> HostSnapshot:
        """Like `scan`, but a tree is only scanned for devices, which is much faster.

        A `purpose` leaves out what is not shown; `about` is described in `FurtherFacts`.
        """
        if self.snapshot is not None:
            return self._loaded
        return self._required(scan_devices(self.tree, self.machine, purpose=purpose, about=about))

    def slots_of(self, names: Iterable[str]) -> HostSnapshot:
        """Like `scan_devices`, but if possible only for the functions in these slots.

        Physical functions of virtual ones are read too: on a VFIO driver, the virtual ones need a
        token. For names of vGPUs and of absent functions, the entire host is scanned, since only
        that can explain them. NVIDIA's virtual functions are judged by their siblings on the driver
        (vgpu/facts.py).
        """
        if self.snapshot is not None:
            return self._loaded

        wanted = self.addresses_in(names)
        if wanted is None:
            return self.scan_devices()
        only = frozenset(address.slot for address in wanted)
        host = scan_devices(self.tree, self.machine, only=only)
        there = {device.address for device in host.devices}
        is_vendors = any(d.vendor_id == _NVIDIA and d.physical_function for d in host.devices)
        return self.scan_devices() if is_vendors or not wanted <= there else host

    def addresses_in(self, names: Iterable[str]) -> frozenset[PciAddress] | None:
        """The addresses of functions; None if a name is not an address."""
        if self.snapshot is not None:
            return None
        known = list_addresses(self.tree)
        try:
            return frozenset(PciAddress.parse(name, known) for name in names)
        except UsageError:
            return None

    def with_vgpu_users(
        self, host: HostSnapshot, functions: tuple[PciDevice, ...] = ()
    ) -> HostSnapshot:
        """The host with the users of its vGPUs only, which is many times faster than all users.

        All users are read if one of the virtual `functions` that are vGPUs has nodes of a host
        driver: a process can have those mapped without having them open.
        """
        if self.snapshot is not None:
            return host
        if any(device.nodes for device in functions):
            users = replace(host.users, processes=read_users(self.tree))
            return self._with_agent(replace(host, users=users))
        holders: tuple[Holder, ...] = (*host.vgpus.active, *functions)
        nodes = {node for holder in holders for node in host.guest_nodes(holder)}
        return self.with_holders(host, nodes)

    def with_holders(self, host: HostSnapshot, nodes: AbstractSet[str]) -> HostSnapshot:
        """With the processes that have one of these nodes open, and no others, and with pods.

        Of a snapshot those that were found when it was made.
        """
        if self.snapshot is not None:
            return host
        unknown: list[UnknownUsers] = []
        processes = read_holders(self.tree, nodes, unknown.append)
        users = replace(host.users, processes=processes, unknown=(*host.users.unknown, *unknown))
        return self._with_agent(replace(host, users=users))

    def _with_agent(self, host: HostSnapshot) -> HostSnapshot:
        """The snapshot with the state of the agent, for a list; if unknown, the reason is noted."""
        unknown: list[UnknownUsers] = []
        agent = find_pods(self.tree, unknown.append, PATIENCE)
        users = replace(host.users, agent=agent, unknown=(*host.users.unknown, *unknown))
        host = replace(host, users=users)
        self.note_unknown_users(host)
        return host

    def note_unknown_users(self, host: HostSnapshot) -> None:
        """Note the sources that could name users of devices and could not be read."""
        for each in host.users.unknown:
            self.on_note(each.why)

    def require_live(self, why: str, remedy: str) -> None:
        """Require a tree.

        Raises:
            UsageError: the source is a snapshot.
        """
        if self.snapshot is not None:
            raise UsageError(why, remedy)

    def addresses(self, texts: Iterable[str | PciAddress]) -> tuple[PciAddress, ...]:
        """Addresses as typed by users; the domain may be omitted if it is unambiguous.

        PCI IDs such as `10de:2235` match all functions that have them, which are noted.

        Raises:
            UsageError: a text is not an address, or matches several domains.
        """
        names = [name for text in texts for name in self._named(device_text(text))]
        if self.snapshot is not None:
            return tuple(find_address(self._loaded, name) for name in names)
        known = () if all(map(is_address, names)) else list_addresses(self.tree)
        return tuple(PciAddress.parse(name, known) for name in names)

    def address(self, text: str | PciAddress) -> PciAddress:
        """The address of one function, as typed by a user.

        Raises:
            UsageError: as in `addresses`, or the text matches several functions.
        """
        first, *others = self.addresses((text,))
        if others:
            raise ambiguous(str(text), (first, *others))
        return first

    def matching(self, text: str) -> str:
        """The address of the function whose name contains `text`, which is noted.

        Raises:
            UsageError: there is none, or there are several.
        """
        device = with_name(self.scan_devices(), text)
        self.on_note(f"{text}: {device.address} ({device.name})")
        return str(device.address)

    def _named(self, text: str) -> Sequence[str]:
        if identifiers_in(text) is None:
            return (text,)
        host = self.scan_devices()
        found = with_identifiers(host, text)
        names = dict.fromkeys(host.device(address).name for address in found)
        self.on_note(f"{text} ({', '.join(names)}): {', '.join(map(str, found))}")
        return tuple(map(str, found))

    def _required(self, host: HostSnapshot) -> HostSnapshot:
        """The same snapshot; without a list of functions, all answers would be wrong."""
        if host.pci_unlisted is None:
            return host
        why = f"cannot list {PCI_DEVICES}: {host.pci_unlisted}"
        if self.root != MACHINE:
            message = f"not a host root: {self.root!r} ({why})"
            raise UsageError(message, _ROOT_HINT)
        remedy = "mount sysfs on /sys, or run vfiomgr where the host's /sys is visible"
        raise HostError(why, remedy)

    @property
    def created(self) -> Created:
        """The creation of the snapshot; of a tree that of a snapshot of it at this moment."""
        return created_now(self.tree) if self.snapshot is None else self._dated[1]

    @property
    def _loaded(self) -> HostSnapshot:
        return self._dated[0]

    @cached_property
    def _dated(self) -> tuple[HostSnapshot, Created]:
        if self.root != MACHINE:
            message = f"--snapshot {self.snapshot} and --root {self.root} name different hosts"
            raise UsageError(message, "pass only one of them (VFIOMGR_SNAPSHOT, VFIOMGR_ROOT)")
        host, created = load_dated(self.snapshot or "")
        if host.pci_unlisted is not None:
            message = f"cannot use the snapshot {self.snapshot}: {PCI_DEVICES}: {host.pci_unlisted}"
            raise InvalidDocument(message, REMEDY)
        return host, created
