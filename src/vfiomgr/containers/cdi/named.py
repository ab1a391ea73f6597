"""CDI specifications, which name the devices of a host for container runtimes and Kata."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from string import digits
from typing import TYPE_CHECKING, Annotated, Unpack, cast

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.containers.cdi import check as judge
from vfiomgr.containers.cdi import devices as cdi_devices
from vfiomgr.containers.cdi.devices import CdiEntry, kind_notes, nothing_ready, specification_of
from vfiomgr.containers.cdi.document import is_called, is_readable, read_file, render_specification
from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.containers.cdi.model import (
    DEFAULT_KIND,
    DIRECTORIES,
    CdiFile,
    Lifetime,
    Naming,
    NodeForm,
    OfferRequest,
)
from vfiomgr.containers.cdi.readers import READER_RULES, read_readers
from vfiomgr.containers.cdi.requests import RemoveCdi, WriteCdi
from vfiomgr.containers.cdi.rules import ANY, NAMES, CdiFinding, consumers_named
from vfiomgr.documents.text import STANDARD_INPUT, text_of
from vfiomgr.errors import UsageError, require_choice
from vfiomgr.paths import MACHINE, HostPath
from vfiomgr.rules.runner import by_severity

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.check import CdiReport
    from vfiomgr.containers.cdi.model import CdiSpecification
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.engine.run import Outcome
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

__all__ = [
    "CdiOptions",
    "check",
    "named_devices",
    "removal",
    "request",
    "specification",
    "to_json",
    "write",
]


class CdiOptions(Keywords, total=False):
    """Options of a specification; each may be omitted."""

    kind: Annotated[
        str,
        Option(
            "Set the kind; for Kata the device plugin's resource name.",
            metavar="VENDOR/CLASS",
            default=DEFAULT_KIND,
            complete="containers.cdi.completion:complete_cdi_kind",
        ),
    ]
    name_by: Annotated[
        Naming,
        Option("Name devices this way; for Kata like the device plugin does.", default="address"),
    ]
    node: Annotated[
        NodeForm,
        Option("Use /dev/vfio/N or /dev/vfio/devices/vfioN; auto prefers N.", default="auto"),
    ]
    consumer: Annotated[
        str,
        Option(
            "Set the reader; containerd and podman also get mdevs.",
            metavar="NAME",
            choices=NAMES,
            default=ANY,
        ),
    ]


def specification(
    host: HostSource, *devices: str | PciAddress, **options: Unpack[CdiOptions]
) -> CdiSpecification:
    """The specification of these devices, or of all available ones.

    Raises:
        UsageError: an address, the kind or the consumer is invalid.
        UnknownDevice: the host has no such device.
        Refusal: a device is not available, or none is; the message names the remedy.
    """
    return made(host, offer(host, devices, options))


def to_json(specification: CdiSpecification) -> str:
    """The specification as JSON, for consumers."""
    return render_specification(specification)


def request(
    host: HostSource,
    *devices: str | PciAddress,
    lifetime: Lifetime = "static",
    **options: Unpack[CdiOptions],
) -> WriteCdi:
    """The request to write a specification to /etc/cdi, or, if `dynamic`, to /run/cdi.

    Raises:
        UsageError: an address or the consumer is invalid.
    """
    require_choice("--lifetime", lifetime, tuple(DIRECTORIES))
    return WriteCdi(offer(host, devices, options), lifetime)


def write(
    host: ManagedHost,
    *devices: str | PciAddress,
    lifetime: Lifetime = "static",
    **options: Unpack[CdiOptions],
) -> Outcome:
    """Write a specification for container runtimes; vfiomgr removes devices that disappear later.

    Raises:
        VfiomgrError: as `specification`, and as `Host.apply`.
    """
    return host.apply(request(host, *devices, lifetime=lifetime, **options))


def removal(
    host: HostSource, *names: str, kind: str | None = None, every: bool = False, stale: bool = False
) -> RemoveCdi:
    """The request to remove devices from the files that vfiomgr wrote.

    Raises:
        UsageError: a name is in no specification; the hint is the nearest one.
    """
    if names:
        is_live = host.snapshot is None
        files = read_cdi_files(host.files) if is_live else host.scan().cdi_files
        _require_known(tuple(map(read_file, files)), names)
    return RemoveCdi(names, of_kind=kind, every=every, stale=stale)


def _require_known(every: tuple[CdiSpecification, ...], names: Iterable[str]) -> None:
    """Make sure that the names are in specifications, as far as these are readable."""
    if not all(map(is_readable, every)):
        return
    known = [each.qualified(device) for each in every for device in each.devices]
    short = {qualified.partition("=")[2]: qualified for qualified in known}
    for name in names:
        if any(is_called(qualified, name) for qualified in known):
            continue
        near = get_close_matches(name, [*known, *short], 1)
        meant = f"did you mean {short.get(near[0], near[0])}? " if near else ""
        message = f"no such device in the CDI specifications: {name}"
        raise UsageError(message, f"{meant}vfiomgr cdi list shows the names")


def check(host: HostSource, *files: str, consumer: str = ANY) -> CdiReport:
    """Check which consumers cannot read which specification, with reason and remedy.

    Checks all files in /etc/cdi and /run/cdi, or `files` as if they were alone in one directory.

    Raises:
        UsageError: a file is not readable, or there is no such consumer.
        InvalidDocument: a file is not text.
    """
    readers = consumers_named(consumer)
    seen = host.scan_or_image()
    found = tuple(_named_file(host, path) for path in files) if files else seen.cdi_files
    is_image = seen.pci_unlisted is not None
    nodes = _present_nodes(host, seen, found)
    report = judge.check(found, readers, None if is_image else seen, nodes)
    if not is_image and host.snapshot is None and not files and consumer == ANY:
        report = _with_readers(report, host.tree, found)
    if not is_image or not found:
        return report
    unread = f"whether the devices exist: {host.root} contains only files"
    return replace(report, unknown=(*report.unknown, unread))


def _with_readers(report: CdiReport, tree: HostTree, files: tuple[CdiFile, ...]) -> CdiReport:
    """Also whether the programs of the host read specifications at all."""
    more = READER_RULES.run(read_readers(tree, files))
    findings = cast("Iterable[CdiFinding]", more.findings)
    own = [f for f in findings if files or f.rule == "refresh-missing"]
    unread = {(found.subject, name) for found in own for name in found.consumers}
    return replace(
        report,
        findings=tuple(sorted((*report.findings, *own), key=by_severity)),
        verdicts=tuple(
            replace(each, verdict="not read") if (each.file, each.consumer) in unread else each
            for each in report.verdicts
        ),
        unknown=(*report.unknown, *(more.unknown if files else ())),
    )


def named_devices(host: HostSource) -> tuple[tuple[CdiEntry, ...], tuple[str, ...]]:
    """The CDI devices in /etc/cdi and /run/cdi, and the files there that are not specifications."""
    seen = host.scan_or_image()
    nodes = _present_nodes(host, seen, seen.cdi_files) or {}
    unreadable = (file.path for file in seen.cdi_files if not is_readable(read_file(file)))
    return tuple(cdi_devices.entries(seen, nodes)), tuple(unreadable)


def _present_nodes(
    source: HostSource, host: HostSnapshot, files: Iterable[CdiFile]
) -> dict[str, bool] | None:
    """Which nodes other than VFIO's exist, and which mounted files; None without a host."""
    if source.snapshot is not None or host.pci_unlisted is not None:
        return None
    names = sorted(judge.other_nodes(files))
    there = {name: source.tree.exists(HostPath(os.path.normpath(name))) for name in names}
    for name in [name for name, is_there in there.items() if not is_there]:
        path = HostPath(os.path.normpath(name))
        others = (path.parent / other for other in source.tree.children(path.parent))
        there |= {p: True for p in others if p.rstrip(digits) == path.rstrip(digits) != p}
    for name in sorted(judge.host_files(files)):
        path = HostPath(os.path.normpath(name))
        if source.tree.exists(path.parent):  # else the tree may only be a part of a host
            there[name] = source.tree.exists(path)
    return there


def _named_file(host: HostSource, path: str) -> CdiFile:
    """A file of this machine that a user named; - is read as JSON."""
    name = "<stdin>.json" if path == STANDARD_INPUT else path
    try:
        return CdiFile(name, text_of(path, "a CDI specification"))
    except UsageError as error:
        if host.root == MACHINE:
            raise
        hint = f"FILE is on this machine; omit it to check the files below {host.root}"
        raise UsageError(error.message, hint) from None


def offer(
    host: HostSource, devices: tuple[str | PciAddress, ...], options: CdiOptions
) -> OfferRequest:
    """The requested properties of a specification, on this host."""
    is_plain = not any(reader.is_kata for reader in consumers_named(options.get("consumer", ANY)))
    fields = fields_of(CdiOptions, options)
    return OfferRequest(addresses=host.addresses(devices), is_plain=is_plain, **fields)


def made(host: HostSource, wanted: OfferRequest) -> CdiSpecification:
    """Create the requested specification, with notes about omitted devices."""
    seen = host.scan()
    found = specification_of(seen, wanted)
    if not found.devices:
        raise nothing_ready(seen)
    for text in kind_notes(seen, found):
        host.on_note(text)
    if not wanted.is_plain and any(vgpu.uuid is not None for vgpu in seen.vgpus.active):
        host.on_note(
            "mediated vGPUs are omitted, because Kata cannot attach them; use --consumer "
            "containerd or podman for containers that run a guest themselves"
        )
    return found
