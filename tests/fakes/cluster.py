"""A cluster of one node for tests: the API server, and the parts of the kubelet that agents see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from tests.fakes.api_server import ApiServer
from tests.fakes.dra_kubelet import DraKubelet
from tests.fakes.kubelet import DIAL, Claimed, Kubelet
from tests.fakes.scheduler import Scheduler
from vfiomgr.node.dra.model import DRIVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODE = "gpu-1"
_ROLES = Path(__file__).parents[2] / "kata/node-agent"


def rights(*directories: str) -> frozenset[tuple[str, str]]:
    """What the agent may do, as resources and verbs of its ClusterRoles."""
    yaml = YAML(typ="safe", pure=True)
    files = [_ROLES / name / "clusterrole.yaml" for name in ("dra", *directories)]
    rules = [rule for file in files for rule in yaml.load(file.read_text())["rules"]]
    return frozenset((kind, verb) for r in rules for kind in r["resources"] for verb in r["verbs"])


class Cluster:
    """An API server with a node, and its kubelet; everything happens within some seconds."""

    def __init__(self, place: Path, seconds: float = 30, dial: float = DIAL) -> None:
        self.place = place
        self._seconds = seconds
        self.server = ApiServer(place)
        self.server.put("nodes", {"metadata": {"name": NODE, "uid": "uid-of-node"}})
        self.directory = place / "d"
        self.directory.mkdir(exist_ok=True)
        self.server.rights = rights()
        self.plugins = Kubelet(self.directory, dial=dial)
        self.plugins.claims = self._claimed
        self.claims = DraKubelet(place / "k", lambda _: self.server.wipe())
        self.scheduler = Scheduler(self.server, NODE)
        self._names: dict[str, tuple[str, str]] = {}
        """The pod and the name of each claim, by UID."""

    async def start(self) -> None:
        """Start the kubelet, which deletes the slices of its node."""
        await self.claims.start()
        await self.plugins.start()

    async def stop(self) -> None:
        """End the kubelet and the server."""
        await self.claims.stop()
        await self.plugins.stop()
        self.server.stop()

    @property
    def options(self) -> tuple[str, ...]:
        """The options of an agent of the node."""
        return (
            *("--dra", f"--credentials={self.server.directory}"),
            f"--kubelet-root={self.place / 'k'}",
            f"--plugin-directory={self.directory}",
            f"--pod-resources={self.plugins.pod_resources}",
            *("--scan-interval=0.3", "--pods-interval=0.3", "--debounce=0.2"),
        )

    @property
    def environment(self) -> dict[str, str]:
        """What an agent knows of its cluster from its environment."""
        port = str(self.server.port)
        names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME")
        return dict(zip(names, ("127.0.0.1", port, NODE), strict=True))

    def allocate(self, device: str, *, pool: str = NODE, name: str = "gpu", uid: str = "1") -> None:
        """Create a claim that has a device, for a pod, as the scheduler does."""
        self._names[f"uid-{uid}"] = "ml/train-0", f"ml/{name}"
        result = {"driver": DRIVER, "pool": pool, "device": device, "request": "gpu"}
        self.server.put(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": "ml", "uid": f"uid-{uid}"},
                "status": {
                    "allocation": {"devices": {"results": [result]}},
                    "reservedFor": [{"resource": "pods", "name": "train-0", "uid": f"pod-{uid}"}],
                },
            },
        )

    async def prepare(self, name: str = "gpu", uid: str = "1") -> list[Any]:
        """Prepare a claim until it works."""
        return await self.claims.prepare(DRIVER, "ml", name, f"uid-{uid}")

    async def unprepare(self, name: str = "gpu", uid: str = "1") -> None:
        """Unprepare a claim until it works, and delete it."""
        await self.claims.unprepare(DRIVER, "ml", name, f"uid-{uid}")
        self.server.remove("resourceclaims", f"ml/{name}")

    def _claimed(self) -> Iterator[Claimed]:
        """The prepared claims, as the kubelet lists them."""
        for uid, devices in self.claims.prepared.items():
            held = [(device.pool_name, device.device_name) for device in devices]
            yield Claimed(*self._names.get(uid, ("ml/train-0", "ml/gpu")), DRIVER, held)

    def published(self) -> dict[str, set[str]]:
        """The devices of each pool that is complete."""
        found: dict[str, dict[int, list[Any]]] = {}
        for each in self.server.objects("resourceslices"):
            pool = each["spec"]["pool"]
            found.setdefault(pool["name"], {}).setdefault(pool["generation"], []).append(each)
        newest = {name: generations[max(generations)] for name, generations in found.items()}
        return {
            name: {device["name"] for each in slices for device in each["spec"].get("devices", ())}
            for name, slices in newest.items()
            if len(slices) == slices[0]["spec"]["pool"]["resourceSliceCount"]
        }

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so."""
        await self.plugins.until(condition, self._seconds)
