"""The Python interface: a host, its devices, and changes to it.

    import vfiomgr

    host = vfiomgr.Host()
    print(host.plan(vfiomgr.Bind("04:00.0")))
    host.bind("04:00.0")

All commands of vfiomgr use this interface.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, Self, TypedDict, Unpack

from msgspec.structs import replace

from vfiomgr import check, engine, topology
from vfiomgr import layout as layouts
from vfiomgr import vgpu as vgpu_requests
from vfiomgr.diagnostic import OVERRIDES, REVERSIBLE
from vfiomgr.engine import registry
from vfiomgr.engine.plan import Request
from vfiomgr.engine.survey import survey, unusable
from vfiomgr.engine.unfinished import completed, inherited, interrupted
from vfiomgr.errors import NeedsRoot, chosen, require_known
from vfiomgr.host.tree import HostTree
from vfiomgr.passthrough.named import Bind, Reset, Unbind
from vfiomgr.paths import BOOT_ID, MACHINE
from vfiomgr.pci.model import device_text
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.snapshot.named import find_device
from vfiomgr.snapshot.source import HostSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Plan, Step
    from vfiomgr.engine.run import Outcome
    from vfiomgr.engine.survey import CutOff, Survey
    from vfiomgr.errors import VfiomgrError
    from vfiomgr.layout import requests as layout_requests
    from vfiomgr.passthrough.named import BindOptions, UnbindOptions
    from vfiomgr.pci.capabilities import ResetMethod
    from vfiomgr.pci.iommu import IommuGroup
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.rules.report import Report
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.topology.model import Topology
    from vfiomgr.vgpu.model import Vgpu
    from vfiomgr.vgpu.named import VgpuOptions


class NamedRequest(Protocol):
    """A request with devices, sizes and files written as on the command line."""

    def request(self, host: HostSource) -> Request:
        """The request for a host, which resolves short addresses and accounts."""


class Reports(TypedDict, total=False):
    """Callbacks for reading and changing a host; each is optional."""

    on_note: Callable[[str], None] | None
    """Called with notes for the reader: assumptions, omissions, waiting."""
    on_step: Callable[[Step], None] | None
    """Called with each step as it begins."""
    on_plan: Callable[[Plan], None] | None
    """Called with each plan that is run; a plan can lead to another one."""


class Host(HostSource):
    """A host: this machine, another root than /, or (`from_snapshot`) a recorded one.

    Each property reads the host again; `scan` returns a consistent state.

    `on_note`, `on_step` and `on_plan` are described in `Reports`.
    `deadline` is the time limit for one step in seconds; None for the default (60; for an
    initramfs 900).
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | HostTree = MACHINE,
        *,
        deadline: float | None = None,
        **reports: Unpack[Reports],
    ) -> None:
        if isinstance(root, HostTree):
            self.tree = self.files = root
            self.root = root.root
        else:
            self.root = os.fspath(root)
        require_known(reports, Reports)
        if deadline is not None and deadline <= 0:
            message = f"deadline must be above 0 seconds, not {deadline}"
            raise ValueError(message)
        self._deadline = deadline
        self._reports = reports

    @classmethod
    def from_snapshot(cls, snapshot: str | os.PathLike[str], **reports: Unpack[Reports]) -> Self:
        """The host that a file written by `vfiomgr snapshot` describes; read-only.

        Raises:
            UsageError: the file cannot be read.
            InvalidDocument: it is not a snapshot.

        """
        host = cls(**reports)
        host.snapshot = os.fspath(snapshot)
        host.scan()
        return host

    def on_note(self, text: str) -> None:
        """Pass a note to `on_note`."""
        report = self._reports.get("on_note")
        if report is not None:
            report(text)

    # ---- what there is

    @property
    def devices(self) -> tuple[PciDevice, ...]:
        """All PCI functions, sorted by address."""
        return self.scan_devices().devices

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs and accelerators, including their virtual functions, sorted by address."""
        return tuple(device for device in self.devices if device.is_graphics_or_accelerator)

    @property
    def groups(self) -> tuple[IommuGroup, ...]:
        """The IOMMU groups, sorted by number."""
        return self.scan_devices().groups

    @property
    def vgpus(self) -> tuple[Vgpu, ...]:
        """The active vGPUs, sorted by parent and name."""
        return self.scan_devices().vgpus

    def device(self, address: str | PciAddress) -> PciDevice:
        """The PCI function at an address; a short one such as `04:00.0` must be unambiguous.

        Raises:
            UsageError: the text is not an address, or is ambiguous.
            UnknownDevice: there is no such function.

        """
        text = device_text(address)
        found = self.slots_of((text,))
        return find_device(found, text)

    def topology(self, *devices: str | PciAddress) -> Topology:
        """The PCI topology as a tree, from NUMA nodes to functions; of `devices`, their branches.

        Raises:
            UsageError: a text is no address, or is ambiguous.
            UnknownDevice: there is no such function.

        """
        host = self.scan(with_users=True, with_links=True, purpose="picture")
        return topology.tree_of(host, self.addresses(devices))

    def check(self) -> Report:
        """Check whether this host is ready for passthrough: findings with evidence and remedy."""
        return check.check(self.scan(with_readiness=True))

    # ---- what is changed

    def plan(self, request: Request | NamedRequest, *, only_files: bool = False) -> Plan:
        """The steps that fulfil a request on the host as it is; nothing is changed.

        With `only_files` no devices are involved, so an image is sufficient.

        Raises:
            Refusal: a safety check forbids it.
            UsageError: the request contradicts itself, or names what the host does not have.

        """
        wanted = self.request(request)
        runs = tell_of_cut_off_runs(self)
        host = self.scan_or_image() if only_files else self.facts_for(wanted)
        earlier = tuple(interrupted(wanted, runs, host, self.files))
        made = completed(registry.plan(host, wanted, inherited(earlier)), earlier)
        if only_files:
            return made
        return replace(made, not_checked=not_checked(host, wanted, made))

    def apply(
        self,
        request: Request | NamedRequest,
        *,
        reviewed: tuple[Step, ...] | None = None,
        only_files: bool = False,
    ) -> Outcome:
        """Plan a request on the host as it is, and run the plan: all of it, or nothing.

        With `reviewed`, the plan must have exactly these steps: `host.plan(request).steps`. With
        `only_files` no devices are involved, so an image is sufficient.

        Raises:
            Refusal: a safety check forbids it; nothing was changed.
            UsageError: as in `plan`, or the host is a recorded one; nothing was changed.
            NeedsRoot: the process may not change the host; nothing was changed.
            RolledBack: a step failed; everything is as it was before.
            RollbackIncomplete: a step and its rollback failed; the message says what is left.
            StuckInKernel: the kernel did not return from a step within the deadline.

        """
        self.require_live("a snapshot cannot be changed", "pass --dry-run to see the plan")
        wanted = self.request(request)
        tree = self.files if only_files else self.tree
        work = engine.ApplyContext(tree, reviewed=reviewed, **self.options)
        return engine.carry_out(wanted, work)

    def bind(self, *devices: str | PciAddress, **options: Unpack[BindOptions]) -> Outcome:
        """Bind devices to vfio-pci for passthrough, with all functions of their slots.

        Raises:
            VfiomgrError: as `apply`.

        """
        return self.apply(Bind(*devices, **options))

    def unbind(self, *devices: str | PciAddress, **options: Unpack[UnbindOptions]) -> Outcome:
        """Return devices to their original drivers.

        Raises:
            VfiomgrError: as `apply`.

        """
        return self.apply(Unbind(*devices, **options))

    def reset(
        self,
        device: str | PciAddress,
        method: ResetMethod | None = None,
        allow: Iterable[Override] = (),
        *,
        with_bus: bool = False,
    ) -> Outcome:
        """Reset a device, or all devices on its bus; verify that their configuration spaces answer.

        Raises:
            VfiomgrError: as `apply`.

        """
        return self.apply(Reset(device, method, allow, with_bus=with_bus))

    def create_vgpu(self, **options: Unpack[VgpuOptions]) -> vgpu_requests.VgpuOutcome:
        """Create vGPUs; `names` of the outcome are their UUIDs, or addresses.

        Raises:
            VfiomgrError: as `apply`.

        """
        request = vgpu_requests.CreateVgpu(**options).request(self)
        return vgpu_requests.created(request, self.apply(request))

    def remove_vgpu(
        self,
        *names: str,
        every: bool = False,
        parent: str | None = None,
        allow: Iterable[Override] = (),
    ) -> vgpu_requests.VgpuOutcome:
        """Remove vGPUs by UUID or address; with `every`, all that vfiomgr made (on `parent`).

        Raises:
            VfiomgrError: as `apply`.

        """
        request = vgpu_requests.RemoveVgpu(*names, every=every, parent=parent, allow=allow)
        return vgpu_requests.removed(self.apply(request))

    def apply_layout(
        self,
        file: str | os.PathLike[str],
        layout: str | None = None,
        allow: Iterable[Override] = (),
    ) -> Outcome:
        """Apply a layout of a file; `layout` is its name if the file has several.

        Raises:
            InvalidDocument: the file has no such layout, or a malformed one.
            VfiomgrError: as `apply`.

        """
        return self.apply(layouts.ApplyLayout(file, layout, chosen("--allow", allow, OVERRIDES)))

    def apply_each(
        self, request: layout_requests.ApplyLayout
    ) -> tuple[tuple[str, Outcome | VfiomgrError], ...]:
        """Apply the parts of a layout independently: if one fails, the others are still applied.

        Returns each device that differs, with the result; a missing device has no name.

        Raises:
            NeedsRoot: the process may not change the host; nothing was changed.

        """
        with self.changing() as work:
            return layouts.apply_parts(request, work)

    def revert_layout(self, allow: Iterable[Override] = ()) -> Outcome:
        """Revert the last applied layout, including its later corrections.

        Raises:
            Refusal: no layout was applied, or a device to be moved is in use.
            VfiomgrError: as `apply`.

        """
        self.require_live("a snapshot has no journal", "run vfiomgr layout revert on the host")
        overridden = chosen("--allow", allow, REVERSIBLE)
        return self.apply(layouts.reversion(self.tree, self.tree.read(BOOT_ID), overridden))

    def recover(
        self, *, finish: bool = False, allow: Iterable[Override] = ()
    ) -> tuple[CutOff, ...]:
        """Roll back interrupted operations, newest first, or `finish` them; returns them.

        Raises:
            Refusal: the kernel has not returned yet, or a safety check forbids it.
            InvalidDocument: a journal cannot be read.
            VfiomgrError: as `apply`.

        """
        self.require_live("a snapshot has no journal", "run vfiomgr recover on the host itself")
        overridden = chosen("--allow", allow, REVERSIBLE)
        try:
            with self.changing(only_files=not self.files.is_live) as work:
                return engine.recover(work, overridden, finish=finish)
        except NeedsRoot:
            message = "recovering interrupted operations"
            raise NeedsRoot(message, has_plan=False) from None

    def interrupted(self) -> Survey:
        """The interrupted operations that `recover` handles; unreadable journals are noted too.

        Raises:
            UsageError: the host is a recorded one.
            NeedsRoot: this user may not read the journals.

        """
        self.require_live("a snapshot has no journal", "run vfiomgr recover on the host itself")
        try:
            left = survey(self.files, self.files.read(BOOT_ID))
        except PermissionError:
            message = "reading the journal of interrupted operations"
            raise NeedsRoot(message, has_plan=False) from None
        for text in unusable(left):
            self.on_note(text)
        return left

    # ---- what a change is made of

    @contextmanager
    def changing(self, *, only_files: bool = False) -> Iterator[engine.ApplyContext]:
        """Context for several changes that belong together; `apply` makes a single one.

        Raises:
            NeedsRoot: the process may not change the host.

        """
        work = engine.ApplyContext(self.files if only_files else self.tree, **self.options)
        with engine.prepared(work, only_files=only_files):
            yield work

    @property
    def options(self) -> engine.Options:
        """How changes are made, and the callbacks for them."""
        options: engine.Options = {
            "machine": self.machine,
            "on_note": self.on_note,
            "deadline": self._deadline,
        }
        if (on_step := self._reports.get("on_step")) is not None:
            options["on_step"] = on_step
        if (on_plan := self._reports.get("on_plan")) is not None:
            options["on_plan"] = on_plan
        return options

    def request(self, request: Request | NamedRequest) -> Request:
        """The request with its names resolved on this host: addresses, accounts, files.

        Raises:
            UsageError: a name cannot be read, or options contradict each other.
            TypeError: it is not a request, e.g. an address.

        """
        if isinstance(request, Request):
            return request
        if not hasattr(request, "request"):
            message = f"expected a request such as vfiomgr.Bind('04:00.0'), not {request!r:.60}"
            raise TypeError(message)
        return request.request(self)

    def facts_for(self, request: Request) -> HostSnapshot:
        """The facts needed to plan a request."""
        slots: frozenset[tuple[int, int, int]] = frozenset()
        if self.snapshot is None and request.needs_serials:
            slots = engine.slots_with_serials(self.tree, request)
        host = self.scan(
            with_users=True,
            with_resets=request.needs_resets,
            with_gpu_modes=request.needs_gpu_modes,
            only_types=request.named_types,
            about=request.only_functions,
            purpose=request.purpose,
            serials_of=slots,
        )
        if self.snapshot is not None or not request.further_paths:
            return host
        return engine.with_further_files(host, (request,), self.files)


def tell_of_cut_off_runs(host: HostSource) -> tuple[CutOff, ...]:
    """Note interrupted operations, and return them, if this user may read the journal."""
    if host.snapshot is not None:
        return ()
    boot_id = host.files.read(BOOT_ID)
    with suppress(PermissionError):
        left = survey(host.files, boot_id)
        for run in left.cut_off:
            host.on_note(
                f"interrupted operation: {run.summary}, in step: {run.step}; to roll it back: "
                "vfiomgr recover"
            )
        for text in unusable(left):
            host.on_note(text)
        return left.cut_off
    return ()


def not_checked(host: HostSnapshot, request: Request, plan: Plan) -> tuple[str, ...]:
    """What a plan for this host could not check, and what is missing for it."""
    if plan.steps and all(isinstance(step, ReplaceFile) for step in plan.steps):
        return ()  # uses of devices do not matter for files
    return tuple(_not_checked(host, request))


def _not_checked(host: HostSnapshot, request: Request) -> Iterator[str]:
    if host.users is None:
        yield "processes that use the devices: requires root on a running host"
        if host.host_uses is not None:
            yield "mounts in other namespaces and disks in exclusive use: requires root"
    if host.host_uses is None:
        yield "mounted file systems and the default route: no /proc on this host"
    yield from request.not_checked(host)
