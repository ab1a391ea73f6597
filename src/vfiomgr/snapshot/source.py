"""The source of facts about a host: a tree as it is now, or a snapshot from a document."""

from __future__ import annotations

import codecs
import os
import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from msgspec.structs import replace

from vfiomgr import documents
from vfiomgr.documents.jsonable import (
    API_VERSION,
    Misfit,
    from_jsonable,
    to_jsonable,
    wrong_version,
)
from vfiomgr.documents.text import GZIP, bytes_of
from vfiomgr.errors import HostError, InvalidDocument, UsageError, require_known
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import MACHINE, PCI_DEVICES
from vfiomgr.pci.facts import list_addresses
from vfiomgr.pci.model import PciAddress, device_text, identifiers_in, is_address
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.snapshot.named import ambiguous, find_address, with_identifiers, with_name
from vfiomgr.snapshot.scan import FurtherFacts, scan, scan_devices
from vfiomgr.units import Version
from vfiomgr.users.node_agent import PATIENCE, find_pods
from vfiomgr.users.processes import read_holders, read_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.pci.function import Purpose
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.values import Holder
    from vfiomgr.users.model import UnknownUsers


def to_document(host: HostSnapshot) -> dict[str, Any]:
    """The facts of a host as lists, dictionaries and scalars."""
    document: dict[str, Any] = {}
    for name in host.__struct_fields__:
        value = getattr(host, name)
        if name in HostSnapshot.facets:
            members = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            document |= {key: to_jsonable(getattr(value, field)) for key, field in members}
        else:
            document[name] = to_jsonable(value)
    return document


def from_document(document: dict[str, Any]) -> HostSnapshot:
    """Read what `to_document` wrote.

    Raises:
        Misfit: the members are not those of a snapshot; names the first wrong one.

    """
    facets = HostSnapshot.facets
    facet_of = {key: name for name, kind in facets.items() for key in kind.__struct_encode_fields__}
    own: dict[str, Any] = {}
    of_facets: dict[str, dict[str, Any]] = {}
    for key, value in document.items():
        if key in facet_of:
            of_facets.setdefault(facet_of[key], {})[key] = value
        elif key in facets or key not in HostSnapshot.__struct_fields__:
            what = "unknown field"
            raise Misfit(what, (key,))
        else:
            own[key] = value
    absent: dict[str, Any] = {name: {} for name in facets if name not in of_facets}
    try:
        return from_jsonable(HostSnapshot, {**own, **of_facets, **absent})
    except Misfit as error:
        if error.keys[:1] and error.keys[0] in facets:
            raise Misfit(error.what, error.keys[1:]) from None
        raise


KIND = "HostSnapshot"
CREATE = "vfiomgr snapshot > host.json"
REMEDY = f"create a new one on that host with: {CREATE}"
_NEWER = f"upgrade vfiomgr if a newer version created it, or {REMEDY}"


def write_snapshot(
    snapshot: HostSnapshot, redaction: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> str:
    """The snapshot as a JSON document, with the replacements of a `Redaction` if there is one."""
    import json  # noqa: PLC0415 - `list` needs none

    facts = to_document(snapshot)
    facts = facts if redaction is None else redaction(facts)
    return json.dumps({"api_version": API_VERSION, "kind": KIND, **facts}, indent=2) + "\n"


def read_snapshot(text: str, source: str) -> HostSnapshot:
    """Read what `write_snapshot` wrote, as JSON or YAML; `source` names the document in errors.

    Raises:
        InvalidDocument: not JSON or YAML, another kind of document, or wrong fields.

    """
    if not text.strip():
        message = f"{source}: the file is empty"
        raise InvalidDocument(message, REMEDY)
    document = documents.read_values(text, source, REMEDY)
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        message = f"{source}: not a document of kind {KIND}"
        raise InvalidDocument(message, REMEDY)
    version = document.pop("api_version", None)
    if version != API_VERSION:
        message = f"{source}: {wrong_version(version)}"
        raise InvalidDocument(message, _NEWER)
    return _validated(document, text, source)


def _validated(document: dict[str, Any], text: str, source: str) -> HostSnapshot:
    try:
        host = from_document(document)
        _check_versions(host)
    except Misfit as error:
        message = f"{source}:{documents.misfit_in(error, text)}"
        raise InvalidDocument(message, _NEWER) from None
    return host


def _check_versions(host: HostSnapshot) -> None:
    """Check the versions that rules compare.

    Raises:
        Misfit: one is not a version.

    """
    support = host.guest_support
    release = host.kernel.release if (host.kernel.release or "")[:1].isdecimal() else None
    libvirt, qemu = (support.libvirt, support.qemu) if support else (None, None)
    for text, *keys in (
        (release, "kernel_release"),
        (libvirt, "guest_support", "libvirt"),
        (qemu, "guest_support", "qemu"),
    ):
        if text is None:
            continue
        try:
            Version.parse(text)
        except UsageError as error:
            raise Misfit(error.message, tuple(keys)) from None


_NVIDIA = "10de"
_LONGEST_SNAPSHOT = 64 << 20
"""Bytes; a host with 16,384 functions needs less than half of that."""
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
        shared = ("root", "snapshot", "tree", "files", "machine", "_loaded")
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

    @cached_property
    def _loaded(self) -> HostSnapshot:
        if self.root != MACHINE:
            message = f"--snapshot {self.snapshot} and --root {self.root} name different hosts"
            raise UsageError(message, "pass only one of them (VFIOMGR_SNAPSHOT, VFIOMGR_ROOT)")
        host = _load_snapshot(self.snapshot or "")
        if host.pci_unlisted is not None:
            message = f"cannot use the snapshot {self.snapshot}: {PCI_DEVICES}: {host.pci_unlisted}"
            raise InvalidDocument(message, REMEDY)
        return host


def _load_snapshot(source: str) -> HostSnapshot:

    try:
        text = bytes_of(source, "the snapshot", _LONGEST_SNAPSHOT).decode()
    except OSError as error:
        message = f"cannot read the snapshot {source}: {error.strerror}"
        raise UsageError(message, f"create one with: {CREATE}") from None
    except UnicodeDecodeError as error:
        raise _not_text(source, error.object[:2]) from None
    return read_snapshot(text, source)


def _not_text(source: str, start: bytes) -> InvalidDocument:
    """The error for a file that is not UTF-8, by its first bytes."""
    file = shlex.quote(source)
    if start == GZIP:
        remedy = f"decompress it: gzip -dc {file} > host.json"
        return InvalidDocument(f"{source}: compressed with gzip", remedy)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        remedy = f"convert it: iconv -f UTF-16 -t UTF-8 {file} > host.json"
        return InvalidDocument(f"{source}: UTF-16 text instead of UTF-8", remedy)
    return InvalidDocument(f"{source}: not UTF-8 text", REMEDY)
