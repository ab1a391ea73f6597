"""Requests about vGPUs whose names and sizes are written as on the command line."""

from __future__ import annotations

import uuid as uuids
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from vfiomgr.engine.run import Outcome
from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import mebibytes
from vfiomgr.usage import chosen, require_choice, require_whole
from vfiomgr.vgpu import requests
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Override
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class VgpuOutcome(Outcome):
    """What a run did, and to which vGPUs: UUIDs, or addresses of virtual functions."""

    names: tuple[str, ...] = ()


class VgpuOptions(TypedDict, total=False):
    """Which vGPUs are made; a type, a framebuffer, a series or heads must be given."""

    type: str | None
    """By identifier, number or name: `A40-4Q`, `nvidia-754`, `754`."""
    framebuffer: str | None
    """So much memory or more, with its unit: `6G`, `6144M`; the smallest type that serves."""
    series: Literal["A", "B", "C", "Q"] | str | None  # noqa: PYI051 - in either case of letters
    """NVIDIA's letter: A(pplications), B(usiness), C(ompute), Q(uadro)."""
    heads: int | None
    """So many displays or more."""
    count: int
    """How many: all or none are made.  [1]"""
    parent: str | None
    """On this GPU, or this virtual function."""
    numa_node: int | None
    """On a GPU of this NUMA node."""
    strategy: requests.Strategy
    """Fill GPUs one after the other (`pack`), or all alike (`spread`).  [pack]"""
    uuid: str | None
    """The name of the one that is made; a random one by default."""


class CreateVgpu:
    """Create vGPUs of a type, or of the smallest type that serves; all of them or none."""

    def __init__(self, **options: Unpack[VgpuOptions]) -> None:
        self.options = options

    def request(self, _host: HostSource) -> requests.CreateVgpu:
        """Build the request for a host.

        Raises:
            UsageError: nothing says which type, a size cannot be read, or a UUID is no UUID.

        """
        said = self.options
        kind, framebuffer = said.get("type"), said.get("framebuffer")
        series, heads = said.get("series"), said.get("heads")
        if kind is None and framebuffer is None and series is None and heads is None:
            message = "which vGPU? There is no --type, and no --framebuffer, --series or --heads"
            raise UsageError(message, "vfiomgr vgpu types shows what there is, e.g. --type A10-4Q")
        count, uuid = said.get("count", 1), said.get("uuid")
        if uuid is not None and count > 1:
            message = f"one UUID names one vGPU, and --count asks for {count}"
            raise UsageError(message, "leave out one of them")
        require_whole("--count", count, 1)
        require_whole("--heads", heads, 1)
        require_whole("--numa", said.get("numa_node"), 0)
        require_choice("--series", series and series.upper(), ("A", "B", "C", "Q"))
        strategy = said.get("strategy", "pack")
        require_choice("--strategy", strategy, ("pack", "spread"))
        names = (uuid_of(uuid),) if uuid else tuple(str(uuids.uuid4()) for _ in range(count))
        return requests.CreateVgpu(
            uuids=names,
            type=kind,
            framebuffer=None if framebuffer is None else mebibytes("--framebuffer", framebuffer),
            series=series.upper() if series else None,
            heads=heads,
            parent=said.get("parent"),
            numa_node=said.get("numa_node"),
            strategy=strategy,
        )


class RemoveVgpu:
    """Remove vGPUs by UUID or address, or `every` one that vfiomgr made."""

    def __init__(
        self,
        *names: str,
        every: bool = False,
        parent: str | None = None,
        allow: Iterable[Override] = (),
    ) -> None:
        self.names = names
        self.every = every
        self.parent = parent
        self.allow = chosen("--allow", allow, ("in-use",))

    def request(self, host: HostSource) -> requests.RemoveVgpu:
        """Build the request for a host.

        Raises:
            UsageError: no vGPU is named, or a name is neither a UUID nor an address.

        """
        if bool(self.names) is self.every or (self.parent is not None and not self.every):
            message = "name vGPUs, or pass --all (and then perhaps --parent)"
            raise UsageError(message, "vfiomgr vgpu list shows all")
        seen = host.scan_devices() if self.names else None
        chosen = tuple(_known_name(seen, text) for text in self.names) if seen else ()
        return requests.RemoveVgpu(chosen, every=self.every, parent=self.parent, allow=self.allow)


def created(request: requests.CreateVgpu, outcome: Outcome) -> VgpuOutcome:
    """With the names of the vGPUs that there are now."""
    steps = outcome.plan.steps
    made = [step.uuid for step in steps if isinstance(step, CreateMdev)]
    made += [str(s.device.address) for s in steps if isinstance(s, SetVgpuType) and s.after]
    return VgpuOutcome(outcome.plan, outcome.is_changed, tuple(made) or request.uuids)


def removed(outcome: Outcome) -> VgpuOutcome:
    """With the names of the vGPUs that were removed."""
    steps = outcome.plan.steps
    gone = [step.uuid for step in steps if isinstance(step, RemoveMdev)]
    gone += [str(step.device.address) for step in steps if isinstance(step, SetVgpuType)]
    return VgpuOutcome(outcome.plan, outcome.is_changed, tuple(gone))


def uuid_of(text: str) -> str:
    """A UUID in the form that the kernel shows: lower case, with dashes."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        message = f"{text!r} is no UUID"
        raise UsageError(
            message, "write it like f715f63c-0d00-4007-9c5a-b07b0c6c05de; vfiomgr vgpu list"
        ) from None


def name_of(text: str) -> str:
    """A UUID, or the address of a virtual function that need not be there."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return uuid_of(text)


def _known_name(host: HostSnapshot, text: str) -> str:
    """A UUID, or an address in any way of writing it."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        pass
    try:
        return str(host.parse_address(text))
    except UsageError as error:
        if ":" in text:
            raise
        message = f"{text!r} is neither a UUID nor the address of a virtual function"
        raise UsageError(message, "vfiomgr vgpu list shows what vGPUs are called") from error
