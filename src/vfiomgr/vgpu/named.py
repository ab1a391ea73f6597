"""Requests to create and remove vGPUs, with the arguments of the command line."""

from __future__ import annotations

import shlex
import uuid as uuids
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.engine.run import Outcome
from vfiomgr.errors import UsageError, chosen, require_known
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.named import find_address
from vfiomgr.units import mebibytes
from vfiomgr.vgpu import steps as vgpu_steps
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class VgpuOutcome(Outcome):
    """The outcome of a run, with its vGPUs: UUIDs, or addresses of virtual functions."""

    names: tuple[str, ...] = ()


class VgpuOptions(Keywords, total=False):
    """Options of CreateVgpu; one of type, framebuffer, series and heads is required."""

    type: Annotated[
        str | None,
        Option(
            "Type by ID, number or name (A10-4Q).",
            metavar="TYPE",
            complete="vgpu.completion:complete_type",
        ),
    ]
    framebuffer: Annotated[
        str | None,
        Option(
            "Require at least this memory, e.g. 6G.",
            metavar="SIZE",
            parse=partial(mebibytes, "--framebuffer"),
        ),
    ]
    series: Annotated[
        Literal["A", "B", "C", "Q"] | str | None,  # noqa: PYI051 - in either case of letters
        Option(
            "NVIDIA series: A(pps), B(usiness), C(ompute), Q(uadro).",
            metavar="[A|B|C|Q]",
            any_case=True,
        ),
    ]
    heads: Annotated[int | None, Option("Require at least N displays.", metavar="N", least=1)]
    count: Annotated[
        int,
        Option(
            "Create N vGPUs, all or none.", metavar="N", default=1, shows_default=False, least=1
        ),
    ]
    parent: Annotated[
        str | None,
        Option(
            "Use this GPU or virtual function.",
            metavar="DEVICE",
            complete="vgpu.completion:complete_parent",
        ),
    ]
    numa_node: Annotated[
        int | None,
        Option(
            "Use a GPU of this NUMA node.",
            flags=("--numa",),
            metavar="NODE",
            least=0,
            complete="snapshot.completion:complete_numa_node",
        ),
    ]
    strategy: Annotated[
        vgpu_steps.Strategy,
        Option("Fill one GPU after the other, or spread evenly.", default="pack"),
    ]
    uuid: str | None
    """The UUID of the new vGPU; random by default."""


class CreateVgpu:
    """Create vGPUs of a type, or of the smallest matching type, all or none."""

    def __init__(self, **options: Unpack[VgpuOptions]) -> None:
        require_known(options, VgpuOptions)
        self.options = options

    def request(self, _host: HostSource) -> vgpu_steps.CreateVgpu:
        """Build the request for a host.

        Raises:
            UsageError: no type is specified, or a size or UUID is invalid.
        """
        fields = fields_of(VgpuOptions, self.options)
        count, uuid = fields.pop("count"), fields.pop("uuid", None)
        if fields.keys().isdisjoint({"type", "framebuffer", "series", "heads"}):
            message = "missing option: --type, --framebuffer, --series or --heads"
            guess = f"for a type: vfiomgr vgpu create --type {shlex.quote(uuid)}; " if uuid else ""
            raise UsageError(message, f"{guess}list the types with: vfiomgr vgpu list --types")
        if uuid is not None and count > 1:
            message = f"cannot create {count} vGPUs with one UUID"
            raise UsageError(message, "leave out the UUID or --count")
        names = (uuid_of(uuid),) if uuid else tuple(str(uuids.uuid4()) for _ in range(count))
        return vgpu_steps.CreateVgpu(uuids=names, **fields)


class RemoveVgpu:
    """Remove vGPUs by UUID or address, or `every` vGPU created by vfiomgr."""

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

    def request(self, host: HostSource) -> vgpu_steps.RemoveVgpu:
        """Build the request for a host.

        Raises:
            UsageError: no vGPU is named, or a name is neither a UUID nor an address.
        """
        if bool(self.names) is self.every or (self.parent is not None and not self.every):
            message = "expected vGPU names, or --all (optionally with --parent)"
            raise UsageError(message, "list the vGPUs with: vfiomgr vgpu list")
        seen = host.scan_devices() if self.names else None
        chosen = tuple(_known_name(seen, text) for text in self.names) if seen else ()
        return vgpu_steps.RemoveVgpu(chosen, every=self.every, parent=self.parent, allow=self.allow)


def created(request: vgpu_steps.CreateVgpu, outcome: Outcome) -> VgpuOutcome:
    """Add the names of the created vGPUs."""
    steps = outcome.plan.steps
    made = [step.uuid for step in steps if isinstance(step, CreateMdev)]
    made += [str(s.device.address) for s in steps if isinstance(s, SetVgpuType) and s.after]
    return VgpuOutcome(outcome.plan, outcome.is_changed, tuple(made) or request.uuids)


def removed(outcome: Outcome) -> VgpuOutcome:
    """Add the names of the removed vGPUs."""
    steps = outcome.plan.steps
    gone = [step.uuid for step in steps if isinstance(step, RemoveMdev)]
    gone += [str(step.device.address) for step in steps if isinstance(step, SetVgpuType)]
    return VgpuOutcome(outcome.plan, outcome.is_changed, tuple(gone))


def uuid_of(text: str) -> str:
    """Normalize a UUID to the kernel's form: lower case, with dashes."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        message = f"invalid UUID: {text!r}"
        raise UsageError(
            message, "use the form f715f63c-0d00-4007-9c5a-b07b0c6c05de; see vfiomgr vgpu list"
        ) from None


def name_of(text: str) -> str:
    """Normalize a UUID, or an address of a virtual function that need not exist."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return uuid_of(text)


def _known_name(host: HostSnapshot, text: str) -> str:
    """Normalize a UUID, or an address in any accepted form."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        pass
    try:
        return str(find_address(host, text))
    except UsageError as error:
        if ":" in text:
            raise
        message = f"not a UUID or virtual function address: {text!r}"
        raise UsageError(message, "list the vGPUs with: vfiomgr vgpu list") from error
