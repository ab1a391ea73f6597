"""CDI specifications: the devices of a host, named for container runtimes and Kata."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict, Unpack

from msgspec.structs import replace

from vfiomgr.containers.cdi import check as judge
from vfiomgr.containers.cdi import listing
from vfiomgr.containers.cdi.consumers import ANY, consumers_named
from vfiomgr.containers.cdi.document import is_readable, read_file, render_specification
from vfiomgr.containers.cdi.generate import nothing_ready, specification_of
from vfiomgr.containers.cdi.model import (
    DEFAULT_KIND,
    DIRECTORIES,
    NAMINGS,
    NODE_FORMS,
    CdiFile,
    Lifetime,
    OfferRequest,
)
from vfiomgr.containers.cdi.requests import WriteCdi
from vfiomgr.documents.named_file import STANDARD_INPUT, text_of
from vfiomgr.paths import HostPath
from vfiomgr.usage import require_choice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.containers.cdi.check import CdiReport
    from vfiomgr.containers.cdi.listing import CdiEntry
    from vfiomgr.containers.cdi.model import CdiSpecification, Naming, NodeForm
    from vfiomgr.engine.run import Outcome
    from vfiomgr.library import Host
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

__all__ = [
    "CdiOptions",
    "check",
    "named_devices",
    "request",
    "specification",
    "to_json",
    "write",
]


class CdiOptions(TypedDict, total=False):
    """What a specification is for; all of it may be left out."""

    kind: str
    """VENDOR/CLASS; Kata requires the resource name of the kubelet plugin here."""
    name_by: Naming
    """What devices are named by: `address`, `group`, `cdev` or `index`.  [address]"""
    node: NodeForm
    """`group` (/dev/vfio/N), `cdev` (/dev/vfio/devices/vfioN), or `auto`.  [auto]"""
    consumer: str
    """Who must read it: `any`, `kata`, `containerd`, `podman`, or a release of one.  [any]"""


def specification(
    host: HostSource, *devices: str | PciAddress, **options: Unpack[CdiOptions]
) -> CdiSpecification:
    """The specification of these devices, or of all that a guest can take now.

    Raises:
        UsageError: an address, the kind or the consumer cannot be read.
        UnknownDevice: the host has no such device.
        Refusal: no guest can take one of them, or none is ready; it says what makes them so.

    """
    return made(host, offer(host, devices, options))


def to_json(specification: CdiSpecification) -> str:
    """The specification as consumers read it."""
    return render_specification(specification)


def request(
    host: HostSource,
    *devices: str | PciAddress,
    lifetime: Lifetime = "static",
    **options: Unpack[CdiOptions],
) -> WriteCdi:
    """The request to keep a specification in /etc/cdi, or `dynamic` in /run/cdi until a reboot.

    Raises:
        UsageError: an address or the consumer cannot be read.

    """
    require_choice("--lifetime", lifetime, tuple(DIRECTORIES))
    return WriteCdi(offer(host, devices, options), lifetime)


def write(
    host: Host,
    *devices: str | PciAddress,
    lifetime: Lifetime = "static",
    **options: Unpack[CdiOptions],
) -> Outcome:
    """Keep a specification where container runtimes look; removed devices leave it by themselves.

    Raises:
        VfiomgrError: as `specification`, and as `Host.apply`.

    """
    return host.apply(request(host, *devices, lifetime=lifetime, **options))


def check(host: HostSource, *files: str, consumer: str = ANY) -> CdiReport:
    """Which consumers cannot read which specification, why, and what would be right.

    All of /etc/cdi and /run/cdi, or `files` as if they were alone in one directory.

    Raises:
        UsageError: a file cannot be read, or there is no such consumer.
        InvalidDocument: a file is no text.

    """
    readers = consumers_named(consumer)
    seen = host.scan_or_image()
    found = tuple(map(_named_file, files)) if files else seen.cdi_files
    is_image = seen.pci_unlisted is not None
    nodes = _present_nodes(host, seen, found)
    report = judge.check(found, readers, None if is_image else seen, nodes)
    if not is_image:
        return report
    unseen = f"what devices are there: {host.root} holds files alone"
    return replace(report, not_checked=(*report.not_checked, unseen))


def named_devices(host: HostSource) -> tuple[tuple[CdiEntry, ...], tuple[str, ...]]:
    """The CDI devices in /etc/cdi and /run/cdi, and the files there that are no specification."""
    seen = host.scan_or_image()
    nodes = _present_nodes(host, seen, seen.cdi_files) or {}
    unreadable = (file.path for file in seen.cdi_files if not is_readable(read_file(file)))
    return tuple(listing.entries(seen, nodes)), tuple(unreadable)


def _present_nodes(
    source: HostSource, host: HostSnapshot, files: Iterable[CdiFile]
) -> dict[str, bool] | None:
    """Which nodes that are not VFIO's exist; None where there is no host to look at."""
    if source.snapshot is not None or host.pci_unlisted is not None:
        return None
    names = sorted(judge.other_nodes(files))
    return {name: source.tree.exists(HostPath(os.path.normpath(name))) for name in names}


def _named_file(path: str) -> CdiFile:
    """A file of this machine that a user named; - is taken for JSON."""
    name = "<stdin>.json" if path == STANDARD_INPUT else path
    return CdiFile(name, text_of(path, "a CDI specification"))


def offer(
    host: HostSource, devices: tuple[str | PciAddress, ...], options: CdiOptions
) -> OfferRequest:
    """What is wanted of a specification, on this host."""
    consumer = options.get("consumer", ANY)
    node, name_by = options.get("node", "auto"), options.get("name_by", "address")
    require_choice("--node", node, NODE_FORMS)
    require_choice("--name-by", name_by, NAMINGS)
    return OfferRequest(
        kind=options.get("kind", DEFAULT_KIND),
        addresses=host.addresses(devices),
        node=node,
        name_by=name_by,
        is_plain=not any(reader.is_kata for reader in consumers_named(consumer)),
        consumer=consumer,
    )


def made(host: HostSource, wanted: OfferRequest) -> CdiSpecification:
    """The specification that is wanted; what it cannot have is noted."""
    seen = host.scan()
    found = specification_of(seen, wanted)
    if not found.devices:
        raise nothing_ready(seen)
    if not wanted.is_plain and any(vgpu.uuid is not None for vgpu in seen.vgpus):
        host.on_note(
            "vGPUs that are mediated devices are left out, since Kata cannot attach them: "
            "--consumer containerd or podman has them, for containers that run a guest themselves"
        )
    return found
