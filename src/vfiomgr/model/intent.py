"""What a user wants; the planner turns an intent into a plan or a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from vfiomgr.model.cdi import Lifetime, OfferWish
from vfiomgr.model.definition import Attributes
from vfiomgr.model.gpu_instance import InstancePlace
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.persistence import NodeOwner
from vfiomgr.model.quota import Share
from vfiomgr.model.reset import ResetMethod

if TYPE_CHECKING:
    # Read by pydantic where a journal is, and not imported by commands without a layout.
    from vfiomgr.model.layout import Layout  # noqa: TC004
    from vfiomgr.model.step import Step  # noqa: TC004

Allowance = Literal["boot-display", "in-use", "mounted-disk", "vgpu-function", "default-route"]
"""The guards that a user may override, by the value of `--allow`."""

Strategy = Literal["pack", "spread"]
"""Fill one GPU after the other, or give each the same number of vGPUs."""

GpuUse = Literal["host", "passthrough", "vgpu"]
"""Who has a GPU: its host driver, one guest, or guests that share it."""

ALLOWANCES: tuple[Allowance, ...] = get_args(Allowance)
REVERSIBLE: tuple[Allowance, ...] = ("in-use", "mounted-disk", "default-route")
"""Those of them that may speak against undoing a run."""


@dataclass(frozen=True, slots=True)
class Bind:
    """Hand functions to guests: put them and their companions on a VFIO driver."""

    addresses: tuple[PciAddress, ...]
    driver: str | None = None
    """None: the variant of VFIO that fits each function best."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    with_group: bool = False
    """Take the foreign members of the IOMMU groups too."""
    allow: frozenset[Allowance] = frozenset()
    reset_method: ResetMethod | None = None
    """Reset the named functions by this method alone, until they are given back."""
    no_d3cold: bool = False
    """Keep the functions out of D3cold, until they are given back."""
    persist: bool = False
    """Bind them again whenever the kernel finds them."""
    owner: NodeOwner | None = None
    """Who may open their nodes besides root."""
    update_initramfs: bool = False
    """Make the initramfs anew where it must hold what `persist` writes."""
    program: str | None = None
    """Where vfiomgr itself is, for the service that watches for hot-plugged functions."""
    kind: Literal["bind"] = "bind"


@dataclass(frozen=True, slots=True)
class Unbind:
    """Give functions back to the drivers that they had."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False
    allow: frozenset[Allowance] = frozenset()
    forget: bool = False
    """Remove what `persist` wrote, too."""
    update_initramfs: bool = False
    kind: Literal["unbind"] = "unbind"


@dataclass(frozen=True, slots=True)
class ForgetPersisted:
    """Remove the rules of functions, of all with `every`; nothing moves now."""

    addresses: tuple[PciAddress, ...] = ()
    every: bool = False
    update_initramfs: bool = False
    kind: Literal["forget-persisted"] = "forget-persisted"


@dataclass(frozen=True, slots=True)
class ImportDriverctl:
    """Take over what driverctl keeps for VFIO drivers; nothing moves now."""

    update_initramfs: bool = False
    program: str | None = None
    kind: Literal["import-driverctl"] = "import-driverctl"


@dataclass(frozen=True, slots=True)
class CreateVgpu:
    """Make vGPUs: as many as there are UUIDs, all or none."""

    uuids: tuple[str, ...]
    """Names for those that are mediated devices; a virtual function keeps its address."""
    type: str | None = None
    """By its identifier, its number, its full or its short name."""
    framebuffer: int | None = None
    """MiB or more; the smallest type that serves is taken."""
    series: str | None = None
    heads: int | None = None
    parent: str | None = None
    """On this device alone: a GPU, or one of its virtual functions."""
    numa_node: int | None = None
    strategy: Strategy = "pack"
    places: tuple[tuple[str, str], ...] = ()
    """Parent and type of each, where they were chosen before: a run that is to be finished."""
    kind: Literal["create-vgpu"] = "create-vgpu"


@dataclass(frozen=True, slots=True)
class RemoveVgpu:
    """Remove vGPUs, by UUID or the address of a virtual function."""

    names: tuple[str, ...] = ()
    every: bool = False
    """All that vfiomgr made, and none that others did."""
    parent: str | None = None
    """With `every`: of this device alone."""
    allow: frozenset[Allowance] = frozenset()
    kind: Literal["remove-vgpu"] = "remove-vgpu"


@dataclass(frozen=True, slots=True)
class DefineVgpu:
    """Keep what a vGPU is to be; what is None stays as it is defined, or as it is active."""

    name: str
    """A UUID, or the address of a virtual function."""
    parent: str | None = None
    type: str | None = None
    attributes: Attributes | None = None
    autostart: bool | None = None
    program: str | None = None
    """Where vfiomgr itself is, for the service that starts vGPUs."""
    kind: Literal["define-vgpu"] = "define-vgpu"


@dataclass(frozen=True, slots=True)
class UndefineVgpu:
    """Forget what vGPUs are to be; those that are active stay."""

    names: tuple[str, ...]
    parent: str | None = None
    """None: on whatever parent they are defined."""
    kind: Literal["undefine-vgpu"] = "undefine-vgpu"


@dataclass(frozen=True, slots=True)
class StartVgpu:
    """Make vGPUs as they are defined."""

    names: tuple[str, ...]
    parent: str | None = None
    begun: tuple[str, ...] = ()
    """Those that were not there before: of a run that is to be finished."""
    kind: Literal["start-vgpu"] = "start-vgpu"


@dataclass(frozen=True, slots=True)
class StopVgpu:
    """Remove vGPUs, and keep their definitions."""

    names: tuple[str, ...]
    allow: frozenset[Allowance] = frozenset()
    kind: Literal["stop-vgpu"] = "stop-vgpu"


@dataclass(frozen=True, slots=True)
class RestoreVgpus:
    """Make all vGPUs that are defined to start by themselves, as far as they can be made."""

    parent: str | None = None
    """Of this device alone."""
    only: tuple[str, ...] = ()
    """Of these alone, by their names, and the GPUs that are prepared for them."""
    boot: bool = False
    """Leave to mdevctl what its own rule of udev starts."""
    begun: tuple[str, ...] = ()
    """Those that were not there before: of a run that is to be finished."""
    kind: Literal["restore-vgpus"] = "restore-vgpus"


@dataclass(frozen=True, slots=True)
class SetVirtualFunctions:
    """Have a number of virtual functions on a physical one; those that exist all go."""

    address: PciAddress
    count: int
    autoprobe: bool = False
    """Let the host's drivers take the new ones."""
    autoprobe_after: bool | None = None
    """None: as it is; else what a run that was cut off had found."""
    heterogeneous_after: bool | None = None
    """As `autoprobe_after`: whether vGPUs of different sizes may be on the new ones."""
    instances_after: tuple[InstancePlace, ...] | None = None
    """As `autoprobe_after`: the GPU instances (MIG), which go with the functions of a GPU."""
    share: Share | None = None
    """What each of them gets of the GPU; None: what its driver gives."""
    priority_after: str | None = None
    """As `autoprobe_after`: of the physical function, which has that of all others for a moment."""
    kind: Literal["set-virtual-functions"] = "set-virtual-functions"


@dataclass(frozen=True, slots=True)
class ChangeQuotas:
    """Give the functions of a GPU, or one of them, another share of it while they are there."""

    address: PciAddress
    """One virtual function, or the physical one, for all of its virtual ones."""
    share: Share
    is_physical: bool = False
    """Of the physical function itself."""
    priority_after: str | None = None
    """None: the physical function's own is as it is; else what a run that was cut off had found."""
    kind: Literal["change-quotas"] = "change-quotas"


@dataclass(frozen=True, slots=True)
class SetGpuMode:
    """Let a GPU divide its memory otherwise; None of a mode means: as it is."""

    address: PciAddress
    heterogeneous: bool | None = None
    mig: bool | None = None
    functions_after: int | None = None
    """None: as many virtual functions as there are; else what a run that was cut off had found."""
    kind: Literal["set-gpu-mode"] = "set-gpu-mode"


@dataclass(frozen=True, slots=True)
class DivideGpu:
    """Have these GPU instances (MIG) on a GPU and no others; none without any."""

    address: PciAddress
    instances: tuple[tuple[str, int], ...] = ()
    """Profiles, by name or number, and how many of each."""
    kind: Literal["divide-gpu"] = "divide-gpu"


@dataclass(frozen=True, slots=True)
class SwitchGpu:
    """Give a GPU, whole, to the host or to a guest, or make it ready to be divided into vGPUs."""

    address: PciAddress
    to: GpuUse
    functions: int | None = None
    """For vGPUs: so many virtual functions; None for as many as it makes."""
    heterogeneous: bool | None = None
    allow: frozenset[Allowance] = frozenset()
    vgpus: tuple[str, ...] = ()
    """The vGPUs that a run which was cut off was to remove."""
    autoprobe_after: bool | None = None
    """None: as it is; else what a run that was cut off had found."""
    instances_after: tuple[InstancePlace, ...] | None = None
    """As `autoprobe_after`, for vGPUs: the GPU instances (MIG)."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    autoprobe: bool = False
    """Let the host's drivers take new virtual functions."""
    kind: Literal["switch-gpu"] = "switch-gpu"


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset a function, by one method or by the first that works."""

    address: PciAddress
    method: ResetMethod | None = None
    allow: frozenset[Allowance] = frozenset()
    methods_after: str | None = None
    """None: as they are; else what a run that was cut off had found, e.g. `flr bus`."""
    kind: Literal["reset"] = "reset"


@dataclass(frozen=True, slots=True)
class FunctionBefore:
    """What a run that was cut off had found of a function that makes virtual ones."""

    address: PciAddress
    autoprobe: bool | None
    heterogeneous: bool | None
    instances: tuple[InstancePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class ApplyLayout:
    """Bring the host to a layout; what is so already is not touched."""

    name: str
    layout: Layout
    owners: tuple[NodeOwner, ...] = ()
    """Who those are that the layout gives nodes to."""
    seed: str = ""
    """What the names of vGPUs that the layout does not name are made from."""
    allow: frozenset[Allowance] = frozenset()
    only: tuple[str, ...] = ()
    """These parts alone, by the device that they stand under."""
    begun: tuple[str, ...] = ()
    """The vGPUs that a run which was cut off had made, or removed."""
    before: tuple[FunctionBefore, ...] = ()
    kind: Literal["apply-layout"] = "apply-layout"


@dataclass(frozen=True, slots=True)
class RevertLayout:
    """Take back what applying a layout did."""

    name: str
    steps: tuple[Step, ...]
    """What was done, in its order."""
    runs: tuple[str, ...]
    """The journals that tell of it."""
    allow: frozenset[Allowance] = frozenset()
    locks: tuple[str, ...] = ()
    """What those runs held."""
    kind: Literal["revert-layout"] = "revert-layout"

    def is_same_as(self, other: RevertLayout) -> bool:
        """Whether both take the same runs back."""
        return self.runs == other.runs


@dataclass(frozen=True, slots=True)
class InstallLayout:
    """Keep a layout, and have the host brought to it at each boot; nothing moves now."""

    wish: ApplyLayout
    text: str
    """The file that it stands in, whole."""
    enforce: bool = False
    """Have it kept after the boot, too."""
    update_initramfs: bool = False
    program: str | None = None
    """Where vfiomgr itself is, for the services."""
    kind: Literal["install-layout"] = "install-layout"


@dataclass(frozen=True, slots=True)
class UninstallLayout:
    """Take back what installing a layout wrote; nothing moves now."""

    update_initramfs: bool = False
    program: str | None = None
    """Where vfiomgr itself is, for the service of rules that are there again."""
    kind: Literal["uninstall-layout"] = "uninstall-layout"


@dataclass(frozen=True, slots=True)
class InstallHook:
    """Have libvirt run vfiomgr when guests start and end; no guest is concerned by that alone."""

    program: str | None = None
    """Where vfiomgr itself is, for the script."""
    kind: Literal["install-hook"] = "install-hook"


@dataclass(frozen=True, slots=True)
class UninstallHook:
    """Take back what installing the hook wrote."""

    kind: Literal["uninstall-hook"] = "uninstall-hook"


@dataclass(frozen=True, slots=True)
class WriteCdi:
    """Have a CDI specification of what is ready; devices of it that are not go."""

    wish: OfferWish
    lifetime: Lifetime = "static"
    kind: Literal["write-cdi"] = "write-cdi"


@dataclass(frozen=True, slots=True)
class RemoveCdi:
    """Take devices out of the CDI specifications that vfiomgr wrote."""

    names: tuple[str, ...] = ()
    """By name, with or without the kind before it."""
    of_kind: str | None = None
    """Of this kind alone."""
    every: bool = False
    stale: bool = False
    """All that no guest could have now."""
    kind: Literal["remove-cdi"] = "remove-cdi"


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file's whole text before and after; None where there is none."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class ChangeFiles:
    """Exchange files of the host's configuration, in this order, all or none.

    A file may be exchanged several times. Devices have no part in it: no kernel need be there.
    """

    summary: str
    changes: tuple[FileChange, ...]
    locks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    """What is told where there is nothing to change."""
    kind: Literal["change-files"] = "change-files"

    def inverse(self) -> ChangeFiles:
        """What takes all of it back."""
        back = (FileChange(c.path, c.after, c.before, c.mode) for c in reversed(self.changes))
        return ChangeFiles(f"take back: {self.summary}", tuple(back), self.locks)


def wished_layout(intent: Intent) -> ApplyLayout | None:
    """The layout that an intent looks at a host for."""
    match intent:
        case ApplyLayout():
            return intent
        case InstallLayout():
            return intent.wish
        case _:
            return None


def named_functions(intent: Intent) -> tuple[PciAddress, ...]:
    """The PCI functions that an intent names."""
    match intent:
        case Bind() | Unbind():
            return intent.addresses
        case (
            SetVirtualFunctions()
            | ChangeQuotas()
            | SetGpuMode()
            | DivideGpu()
            | SwitchGpu()
            | Reset()
        ):
            return (intent.address,)
        case _:
            return ()


def is_about_files(intent: Intent) -> bool:
    """Whether an intent is carried out in files alone, so that a tree without a kernel will do."""
    return isinstance(intent, ChangeFiles | WriteCdi | RemoveCdi)


def wants_resets(intent: Intent) -> bool:
    """Whether it may have to be told why a function cannot be reset in some way."""
    return isinstance(intent, Reset | ApplyLayout | InstallLayout) or (
        isinstance(intent, Bind) and intent.reset_method is not None
    )


def wants_gpu_modes(intent: Intent) -> bool:
    """Whether nvidia-smi has to be asked how GPUs divide their memory."""
    return isinstance(
        intent,
        CreateVgpu
        | DefineVgpu
        | StartVgpu
        | RestoreVgpus
        | SetVirtualFunctions
        | SetGpuMode
        | DivideGpu
        | SwitchGpu
        | ApplyLayout
        | InstallLayout,
    )


Intent = (
    Bind
    | Unbind
    | CreateVgpu
    | RemoveVgpu
    | DefineVgpu
    | UndefineVgpu
    | StartVgpu
    | StopVgpu
    | RestoreVgpus
    | SetVirtualFunctions
    | ChangeQuotas
    | SetGpuMode
    | DivideGpu
    | SwitchGpu
    | Reset
    | ForgetPersisted
    | ImportDriverctl
    | ApplyLayout
    | RevertLayout
    | InstallLayout
    | UninstallLayout
    | InstallHook
    | UninstallHook
    | WriteCdi
    | RemoveCdi
    | ChangeFiles
)
