"""CDI specifications: the devices of a host, named for container runtimes and Kata."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack

from vfiomgr.containers.cdi.consumers import ANY, consumers_named
from vfiomgr.containers.cdi.document import render_specification
from vfiomgr.containers.cdi.generate import nothing_ready, specification_of
from vfiomgr.containers.cdi.model import (
    DEFAULT_KIND,
    DIRECTORIES,
    NAMINGS,
    NODE_FORMS,
    Lifetime,
    OfferRequest,
)
from vfiomgr.containers.cdi.requests import WriteCdi
from vfiomgr.usage import require_choice

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.model import CdiSpecification, Naming, NodeForm
    from vfiomgr.engine.run import Outcome
    from vfiomgr.library import Host
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.source import HostSource

__all__ = ["CdiOptions", "request", "specification", "to_json", "write"]


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


def made(host: HostSource, wish: OfferRequest) -> CdiSpecification:
    """The specification that is wanted; what it cannot have is noted."""
    seen = host.scan()
    found = specification_of(seen, wish)
    if not found.devices:
        raise nothing_ready(seen)
    if not wish.is_plain and any(vgpu.uuid is not None for vgpu in seen.vgpus):
        host.on_note(
            "vGPUs that are mediated devices are left out, since Kata cannot attach them: "
            "--consumer containerd or podman has them, for containers that run a guest themselves"
        )
    return found
