"""Layouts made from a host: its present state, or the configuration of other tools.

An exported layout changes nothing when it is applied to the same host. It has no `vf_msix`: the
MSI-X table of a virtual function shows its present number, but nothing shows whether it was set.
sriov_vf_msix_count is write-only (drivers/pci/iov.c), and defaults depend on the driver, its
firmware and the number of functions (mlx5_get_default_msix_vec_count in mlx5/core/pci_irq.c).

driverctl and `vfio-pci.ids=` move single functions, and so do the rules made from them: `only` if a
slot has others. mdevctl names the parent device of a vGPU; a rule names its GPU.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from vfiomgr.errors import UsageError
from vfiomgr.host.owners import ROOT_ONLY
from vfiomgr.layout.compare import compare
from vfiomgr.layout.identifiers import identifier_rules, is_alone
from vfiomgr.layout.model import (
    VERSION,
    Layout,
    LayoutFile,
    PassthroughRule,
    Selector,
    VgpuRequest,
    VgpuRule,
)
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.layout.vgpu_device_manager import layouts_of
from vfiomgr.pci.capabilities import RESET_METHODS
from vfiomgr.pci.drivers import PLAIN
from vfiomgr.pci.model import PciAddress, is_vfio_driver
from vfiomgr.persistence.model import DRIVERCTL
from vfiomgr.persistence.plan import accesses
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.model import PARAMETERS, types_called

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.layout.identifiers import Boards
    from vfiomgr.layout.model import Rule
    from vfiomgr.layout.vgpu_device_manager import VgpuConfigs
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import Vgpu, VgpuType

    _Rule = dict[str, Any]


def export(host: HostSnapshot) -> Layout:
    """The devices that are passed through or divided; the others stay with the host."""
    carrying = [gpu for gpu in gpus(host) if gpu.instances]
    divided = {gpu.name for gpu in carrying}
    rules = [
        *(rule for device in host.devices for rule in _functions(host, device, divided)),
        *_passthrough(host),
        *(_vgpus(host, gpu) for gpu in carrying),
    ]
    return Layout.model_validate({"description": "as the host was found", "devices": rules})


def _functions(host: HostSnapshot, device: PciDevice, divided: set[str]) -> Iterator[_Rule]:
    """Physical functions with virtual ones; those that are vGPUs belong to their GPU's rule."""
    if not device.sriov_numvfs:
        return
    if str(device.address) in divided:
        for vf in (host.device(address) for address in device.virtual_functions):
            if vf.is_on_vfio:
                yield _one(host, vf)
        return
    rule: _Rule = {
        "select": {"address": str(device.address)},
        "state": "sriov",
        "count": device.sriov_numvfs,
    }
    virtual = [host.device(address) for address in device.virtual_functions]
    of_guests = [vf for vf in virtual if vf.is_on_vfio]
    settings = {tuple(_settings(host, vf).items()) for vf in of_guests}
    if of_guests == virtual and len(settings) == 1:
        common: _Rule = dict(*settings)
        if common.keys() <= {"driver", "owner"}:
            yield {**rule, "functions": "passthrough", **common}
            return
    yield rule
    yield from (_one(host, vf) for vf in of_guests)


def _one(host: HostSnapshot, function: PciDevice) -> _Rule:
    """A virtual function that can be passed through."""
    return {
        "select": {"address": str(function.address)},
        "state": "passthrough",
        **_settings(host, function),
    }


def _passthrough(host: HostSnapshot) -> Iterator[_Rule]:
    """Entire slots if all functions are passed through alike; otherwise single functions."""
    of_guests = [d for d in host.devices if d.is_on_vfio and d.physical_function is None]
    told: set[PciDevice] = set()
    for device in of_guests:
        if device in told:
            continue
        slot = host.slot(device)
        rule: _Rule = {"state": "passthrough", **_settings(host, device)}
        is_whole = all(
            other.is_on_vfio and _settings(host, other) == _settings(host, device) for other in slot
        )
        if is_whole:
            told.update(slot)
        else:
            rule["only"] = True
        names = [str(other.address) for other in (slot if is_whole else (device,))]
        yield {"select": {"address": names}, **rule}


def _settings(host: HostSnapshot, device: PciDevice) -> _Rule:
    """The settings of a function that differ from the defaults of `bind`."""
    found: _Rule = {}
    if device.driver != PLAIN:
        found["driver"] = device.driver
    access = next(iter(accesses(host, device)), ROOT_ONLY)
    if access != ROOT_ONLY:
        found["owner"] = f"{access.uid}:{access.gid}" if access.gid else str(access.uid)
    origin = host.origin(device)
    if origin is not None:
        methods = " ".join(device.reset_method)
        if methods in RESET_METHODS and methods != origin.state.reset_method:
            found["reset_method"] = methods
        if origin.state.d3cold_allowed and device.d3cold_allowed is False:
            found["d3cold"] = False
    return found


def _vgpus(host: HostSnapshot, gpu: Gpu) -> _Rule:
    """All vGPUs of a GPU, by type and parameters."""
    key = "parent" if gpu.device is None else "address"
    rule: _Rule = {"select": {key: gpu.name}, "state": "vgpu"}
    if gpu.device is not None and gpu.device.sriov_numvfs:
        rule["functions"] = gpu.device.sriov_numvfs
    if gpu.is_heterogeneous:
        rule["heterogeneous"] = True
    if gpu.mode is not None and gpu.mode.mig:
        rule["mig"] = True
    batches: dict[tuple[str, str], list[Vgpu]] = {}
    for vgpu in gpu.instances:
        kind = gpu.type_of(vgpu)
        name = _called(gpu, kind) if kind else vgpu.type
        parameters = dict(host.defined.attributes_of(vgpu.name)).get(PARAMETERS, "").strip()
        batches.setdefault((name, parameters), []).append(vgpu)
    rule["vgpus"] = [_vgpu_request(*batch, vgpus) for batch, vgpus in batches.items()]
    return rule


def _called(gpu: Gpu, kind: VgpuType) -> str:
    """The short name of a type, if it is unique on the GPU."""
    name = kind.short_name
    return name if name and types_called(gpu.types, name) == [kind] else kind.id


def _vgpu_request(kind: str, parameters: str, vgpus: Sequence[Vgpu]) -> _Rule:
    request: _Rule = {"type": kind, "count": len(vgpus)}
    names = [vgpu.uuid for vgpu in vgpus if vgpu.uuid is not None]
    if names:
        request["uuids"] = names
    pairs = [pair.partition("=") for pair in parameters.replace(" ", "").split(",") if "=" in pair]
    if pairs:
        request["parameters"] = {key: value for key, _, value in pairs}
    return request


_NAME = "imported"
_SECOND_NAME = "imported-host"
"""The position of the first one in a vgpu-config."""


class Import(Struct):
    """What is carried over, and why other items are not."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    diagnostics: tuple[Diagnostic, ...] = ()
    """What would prevent applying the host's own layout now."""

    @property
    def file(self) -> LayoutFile | None:
        """The layouts as one file; None if there are none."""
        if not self.layouts:
            return None
        return LayoutFile(version=VERSION, layouts=self.layouts)


def import_layouts(
    host: HostSnapshot | None, configs: VgpuConfigs | None, boards: Boards = frozenset()
) -> Import:
    """A layout for each vgpu-config, and one for the configuration of the host itself.

    Without a host there are only the vgpu-configs.

    Raises:
        Refusal: boards share an ID of vfio-pci, and `boards` does not say which go to guests.
        UsageError: a board is not one of those.

    """
    found = Import()
    if configs is not None:
        found.layouts |= layouts_of(configs, host, found.left)
    if host is not None:
        rules = tuple(_HostRules(host, found.left, boards).rules())
        if rules:
            name = _SECOND_NAME if _NAME in found.layouts else _NAME
            found.layouts[name] = Layout(devices=rules)
            found.diagnostics = _diagnostics(host, ApplyLayout(name, found.layouts[name]))
    return found


def _diagnostics(host: HostSnapshot, request: ApplyLayout) -> tuple[Diagnostic, ...]:
    compared = compare(host, request)
    diagnostics = [*compared.diagnostics, *(o for part in compared.parts for o in part.diagnostics)]
    return tuple(dict.fromkeys(diagnostics))


class _HostRules:
    """Rules from driverctl, the PCI IDs of vfio-pci, and mdevctl on a host."""

    def __init__(self, host: HostSnapshot, left: list[str], boards: Boards) -> None:
        self._host = host
        self._left = left
        self._boards = boards
        self._taken: dict[PciAddress, str] = {}

    def rules(self) -> Iterator[Rule]:
        """The rules with addresses first, since they are narrower."""
        yield from self._of_driverctl()
        of_identifiers = identifier_rules(self._host, self._taken, self._left, self._boards)
        yield from self._of_mdevctl()
        yield from of_identifiers

    def _of_driverctl(self) -> Iterator[Rule]:
        kept: dict[tuple[str, tuple[int, int, int]], list[PciAddress]] = {}
        for entry in self._host.files.driverctl_overrides:
            where = f"driverctl, {entry.file.path}"
            if not is_vfio_driver(entry.driver):
                why = (
                    "layouts only choose drivers for guests; state: host restores the original "
                    "driver"
                )
                self._left.append(f"{where}: {entry.driver} is not a VFIO driver: {why}")
            elif entry.address not in self._taken:
                self._taken[entry.address] = "driverctl"
                kept.setdefault((entry.driver, entry.address.slot), []).append(entry.address)
        read = {entry.file.path for entry in self._host.files.driverctl_overrides}
        for file in self._host.files.texts:
            if file.path.startswith(f"{DRIVERCTL}/") and file.path not in read:
                self._left.append(f"driverctl, {file.path}: not a PCI function with a driver")
        for (driver, _), addresses in kept.items():
            yield self._of_functions(driver, addresses)

    def _of_functions(self, driver: str, addresses: list[PciAddress]) -> Rule:
        present = [d for d in self._host.devices if d.address in addresses]
        if not present:
            text = ", ".join(map(str, addresses))
            self._left.append(f"driverctl: {text} is not present now, so its rule has at_least: 0")
        return PassthroughRule(
            select=Selector(address=tuple(addresses)),
            state="passthrough",
            driver=driver,
            only=is_alone(self._host, present, self._taken, "driverctl", self._left),
            at_least=1 if present else 0,
        )

    def _of_mdevctl(self) -> Iterator[Rule]:
        for problem in self._host.defined.problems:
            self._left.append(f"mdevctl, {problem.path}: {problem.reason}")
        defined = [d for d in self._host.defined.vgpus if self._starts_by_itself(d)]
        once: dict[str, VgpuDefinition] = {}
        for definition in defined:
            if definition.uuid in once:
                other = once[definition.uuid].parent
                why = f"{other} already uses this UUID, and a layout may name each only once"
                self._left.append(f"mdevctl, {definition.path}: {why}")
            once.setdefault(definition.uuid, definition)
        ordered = sorted(once.values(), key=lambda d: (_order(self._gpu(d.parent)), d.uuid))
        for gpu, group in groupby(ordered, key=lambda d: self._gpu(d.parent)):
            definitions = list(group)
            if isinstance(gpu, PciAddress) and gpu in self._taken:
                holder = self._taken[gpu]
                for definition in definitions:
                    why = f"{holder} passes {gpu} through, so it cannot create vGPUs"
                    self._left.append(f"mdevctl, {definition.path}: {why}")
                continue
            yield self._of_gpu(gpu, definitions)

    def _starts_by_itself(self, definition: VgpuDefinition) -> bool:
        if not definition.autostart:
            why = "it is started manually (start: manual), but a layout starts all its vGPUs"
            self._left.append(f"mdevctl, {definition.path}: {why}")
        return definition.autostart

    def _gpu(self, parent: str) -> PciAddress | str:
        """The GPU of a parent: itself, or the physical function; a name if it is not a function."""
        try:
            address = PciAddress.parse(parent)
        except UsageError:
            return parent
        device = self._host.device_named(str(address))
        return (device and device.physical_function) or address

    def _of_gpu(self, gpu: PciAddress | str, definitions: list[VgpuDefinition]) -> Rule:
        kinds: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
        for definition in definitions:
            key = (definition.type_id, tuple(self._parameters(definition)))
            kinds.setdefault(key, []).append(definition.uuid)
            if isinstance(gpu, PciAddress) and definition.parent != str(gpu):
                why = f"the place on {gpu} is chosen again, possibly not {definition.parent}"
                self._left.append(f"mdevctl, {definition.path}: {why}")
        is_there = isinstance(gpu, str) or self._host.device_named(str(gpu)) is not None
        if not is_there:
            self._left.append(f"mdevctl: {gpu} is not present now, so its rule has at_least: 0")
        return VgpuRule(
            select=Selector(address=(gpu,))
            if isinstance(gpu, PciAddress)
            else Selector(parent=(gpu,)),
            state="vgpu",
            at_least=1 if is_there else 0,
            vgpus=tuple(
                VgpuRequest(
                    type=type_id,
                    count=len(uuids),
                    uuids=tuple(uuids),
                    parameters=dict(parameters) or None,
                )
                for (type_id, parameters), uuids in kinds.items()
            ),
        )

    def _parameters(self, definition: VgpuDefinition) -> Iterator[tuple[str, str]]:
        """The parameters in the last `vgpu_params`; other attributes are reported."""
        given = dict(definition.attributes)
        for name in given:
            if name != PARAMETERS:
                why = "layouts only set vgpu_params"
                self._left.append(f"mdevctl, {definition.path}: the attribute {name}: {why}")
        for pair in given.get(PARAMETERS, "").split(","):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if name and equals:
                yield name, value
            elif pair.strip():
                why = "not name=value"
                self._left.append(f"mdevctl, {definition.path}: {pair.strip()!r}: {why}")


def _order(gpu: PciAddress | str) -> tuple[int, PciAddress, str]:
    """Functions by number, then others by name."""
    if isinstance(gpu, PciAddress):
        return 0, gpu, ""
    return 1, PciAddress(0, 0, 0, 0), gpu
