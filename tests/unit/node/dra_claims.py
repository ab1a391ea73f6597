"""What tests of prepared claims share: claims, and a creator in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.errors import HostError, Refusal
from vfiomgr.library import Host
from vfiomgr.node.dra.model import AllocatedDevice, Claim, DraDevice, Parameters, Target
from vfiomgr.node.dra.preparing import Preparing
from vfiomgr.node.dra.vgpus import Vgpus
from vfiomgr.node.messages import Order, Result
from vfiomgr.node.model import NodeSettings
from vfiomgr.node.plan import inventory
from vfiomgr.node.processes import Creating
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from vfiomgr.node.dra.model import AttributeValue
    from vfiomgr.node.model import NodeUnit, OnDemand

NODE = "node-1"
UID = "5b1f5d1e-0a5c-4f43-9c3e-8c8f1a2b3c4d"
GPU = "0000:21:00.0"
"""The GPU of hosts with vGPUs."""


def claim_for(*devices: str, uid: str = UID, name: str = "gpu", **fields: Any) -> Claim:
    """A claim for devices of the pool of the node, each for a request of its own."""
    allocated = tuple(
        AllocatedDevice(f"r{number}", NODE, device) for number, device in enumerate(devices)
    )
    return Claim("ml", name, uid, devices=allocated, **fields)


def with_reset(claim: Claim, **fields: Any) -> Claim:
    """The claim with parameters for all of its requests."""
    return Claim(claim.namespace, claim.name, claim.uid, "", claim.devices, (Parameters(**fields),))


def passthrough(address: str) -> DraDevice:
    """The device of a function."""
    label = address.replace(":", "-").replace(".", "-")
    attributes: dict[str, AttributeValue] = {
        "model": "A40",
        "resource.kubernetes.io/pciBusID": address,
    }
    return DraDevice(f"pci-{label}", Target(unit=address), attributes)


def creatable(type_id: str, number: int = 0, gpu: str = GPU) -> DraDevice:
    """The device of a vGPU that can be created."""
    return DraDevice(f"gpu-{type_id}-{number}", Target(parent=gpu, type=type_id))


class Direct(Creating):
    """Carries out orders in this process."""

    def __init__(self, kernel: FakeKernel) -> None:
        super().__init__("/")
        self.vgpus = Vgpus(Host(kernel))
        self.orders: list[str] = []

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU."""
        unit = self._done(Order("create", owner, parent, type_id)).unit
        assert unit is not None
        return unit

    async def remove(self, owner: str) -> None:
        """Remove a vGPU."""
        self._done(Order("remove", owner))

    async def bind(self, device: str, how: OnDemand, owner: str, seconds: float = 40.0) -> NodeUnit:
        """Bind a device."""
        assert seconds >= 1
        order = Order("bind", owner, addresses=(PciAddress.parse(device),), on_demand=how)
        unit = self._done(order).unit
        assert unit is not None
        return unit

    async def give_back(self, device: str, owner: str, *, stays: bool = False) -> str:
        """Return a device."""
        addresses = (PciAddress.parse(device),)
        return self._done(Order("return", owner, addresses=addresses, stays=stays)).note

    async def reset(self, unit: NodeUnit) -> str:
        """Reset a device."""
        return self._done(Order("reset", addresses=unit.addresses)).note

    def _done(self, order: Order) -> Result:
        self.orders.append(order.verb)
        result = self.vgpus.perform(order)
        if result.error:
            raise (Refusal if result.is_refused else HostError)(result.error, result.hint)
        return result


class Node:
    """A node: its kernel, what it publishes, and an agent that can be restarted."""

    def __init__(self, kernel: FakeKernel, *devices: DraDevice) -> None:
        self.kernel = kernel
        self.published = {device.name: device for device in devices}
        self.quarantined: list[str] = []
        self.notes: list[str] = []
        self.woken: list[tuple[str, ...]] = []
        """The units that were asked whether they answer, for each claim."""
        self.silent: set[str] = set()
        """The units that do not."""
        self.units: dict[str, NodeUnit] = {}
        self.scan()
        self.restart()

    def scan(self) -> None:
        """Scan the host, as the scanning process does."""
        on_demand = {
            d.target.unit: how for d in self.published.values() if (how := d.target.on_demand)
        }
        found = inventory(Host(self.kernel).scan(), NodeSettings(on_demand=on_demand))
        self.units.clear()
        self.units.update({unit.id: unit for unit in found.units})

    def restart(self) -> None:
        """Start the agent again."""
        self.creating = Direct(self.kernel)
        self.preparing = Preparing(
            self.kernel,
            lambda pool, name: self.published.get(name) if pool == NODE else None,
            self.units.get,
            self.creating,
            quarantine=lambda unit, _text: self.quarantined.append(unit),
            note=lambda unit, text: self.notes.append(f"{unit}: {text}"),
            require_answer=self._require_answer,
        )

    async def _require_answer(self, units: tuple[str, ...]) -> None:
        self.woken.append(units)
        silent = self.silent.intersection(units)
        if silent:
            message = f"{min(silent)} does not answer"
            raise HostError(message)

    @property
    def files(self) -> dict[str, str]:
        """The files for claims, without the temporary ones of a process that was killed."""
        places = ("/run/vfiomgr/dra", "/run/cdi", "/var/lib/kubelet/plugins")
        found = {p: t for place in places for p, t in self.kernel.sysfs.picture(place).items()}
        return {path: text for path, text in found.items() if path.endswith(".json")}

    @property
    def vgpus(self) -> list[tuple[str, str]]:
        """The names and types of the vGPUs that exist."""
        return [(vgpu.name, vgpu.type) for vgpu in Host(self.kernel).vgpus]
