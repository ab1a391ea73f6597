"""ResourceClaims of the Kubernetes API, as far as this driver is concerned."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.dra.model import DRIVER, AllocatedDevice, Claim, Parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    ReadParameters = Callable[[object, str], Parameters]
    """Reads opaque parameters; the text says where they are, for error messages."""

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""The annotation of claims that were made from a template."""
_PRECEDENCE = {"FromClass": 0, "FromClaim": 1}


def read_claim(
    document: Mapping[str, Any], pools: Container[str], read_parameters: ReadParameters
) -> Claim:
    """Read a ResourceClaim; `pools` are those of this node.

    Raises:
        Refusal: it is not allocated, or to devices that this node cannot prepare.
        UsageError: a field has the wrong type, or its parameters are invalid.

    """
    reader = _Reader(document)
    status = reader.mapping(document, "status")
    if not status.get("allocation"):
        reader.refuse("status.allocation", "it is missing", "wait until the claim is allocated")
    allocation = reader.mapping(status, "allocation", "status")
    devices = reader.mapping(allocation, "devices", "status.allocation")
    metadata = reader.mapping(document, "metadata")
    annotations = reader.mapping(metadata, "annotations", "metadata")
    return Claim(
        namespace=reader.namespace,
        name=reader.name,
        uid=reader.text(metadata, "uid", "metadata"),
        pod_claim_name=reader.text(annotations, POD_CLAIM_NAME, "metadata.annotations", ""),
        devices=tuple(reader.allocated(devices, pools)),
        parameters=tuple(reader.parameters(devices, read_parameters)),
    )


def parameters_of(claim: Claim, request: str) -> Parameters:
    """The parameters of a request; those of the claim replace those of the DeviceClass."""
    names = {request, request.partition("/")[0]}
    fitting = [p for p in claim.parameters if not p.requests or not names.isdisjoint(p.requests)]
    return fitting[-1] if fitting else Parameters()


class _Reader:
    """Reads fields of one claim; errors name the claim and the field."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.namespace = self.name = "?"
        metadata = self.mapping(document, "metadata")
        self.namespace = self.text(metadata, "namespace", "metadata")
        self.name = self.text(metadata, "name", "metadata")

    def allocated(
        self, devices: Mapping[str, Any], pools: Container[str]
    ) -> Iterator[AllocatedDevice]:
        """The devices of this driver."""
        for result, where in self._items(devices, "results"):
            if self.text(result, "driver", where) != DRIVER:
                continue
            found = AllocatedDevice(
                request=self.text(result, "request", where),
                pool=self.text(result, "pool", where),
                device=self.text(result, "device", where),
            )
            if found.pool not in pools:
                self.refuse(
                    f"{where}.pool",
                    f"this node does not have the pool {found.pool}",
                    "delete the pod, so that its claim is allocated again",
                )
            if result.get("adminAccess"):
                self.refuse(
                    f"{where}.adminAccess",
                    "a VFIO device cannot be shared with an administrator",
                    "request the device without adminAccess",
                )
            yield found

    def parameters(
        self, devices: Mapping[str, Any], read_parameters: ReadParameters
    ) -> Iterator[Parameters]:
        """The parameters for this driver, those of the DeviceClass first."""
        found = []
        for entry, where in self._items(devices, "config"):
            opaque = self.mapping(entry, "opaque", where)
            if opaque.get("driver") != DRIVER:
                continue
            source = self.text(entry, "source", where)
            if source not in _PRECEDENCE:
                self.fail(f"{where}.source", f"expected FromClass or FromClaim, not {source!r}")
            place = f"{self.claim}: {where}.opaque.parameters"
            read = read_parameters(opaque.get("parameters"), place)
            requests = self._texts(entry, "requests", where)
            found.append((_PRECEDENCE[source], replace(read, requests=requests)))
        return (read for _, read in sorted(found, key=lambda each: each[0]))

    @property
    def claim(self) -> str:
        """The claim in messages."""
        return f"claim {self.namespace}/{self.name}"

    def mapping(self, parent: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
        """The object of a key; empty if it is missing."""
        value = parent.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fail(_join(where, key), f"expected an object, not {value!r:.40}")
        return value

    def text(
        self, parent: Mapping[str, Any], key: str, where: str, default: str | None = None
    ) -> str:
        """The string of a key, which must not be empty."""
        value = parent.get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            self.fail(_join(where, key), f"expected a string, not {value!r:.40}")
        return value

    def _items(
        self, devices: Mapping[str, Any], key: str
    ) -> Iterator[tuple[Mapping[str, Any], str]]:
        """The objects of a list below status.allocation.devices, each with its place."""
        where = f"status.allocation.devices.{key}"
        for number, item in enumerate(self._list(devices, key, where)):
            if not isinstance(item, Mapping):
                self.fail(f"{where}[{number}]", f"expected an object, not {item!r:.40}")
            yield item, f"{where}[{number}]"

    def _texts(self, parent: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
        values = self._list(parent, key, _join(where, key))
        if not all(isinstance(value, str) for value in values):
            self.fail(_join(where, key), "expected a list of strings")
        return tuple(values)

    def _list(self, parent: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
        value = parent.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.fail(where, f"expected a list, not {value!r:.40}")
        return value

    def refuse(self, where: str, why: str, hint: str) -> NoReturn:
        """Refuse the claim.

        Raises:
            Refusal: always.

        """
        message = f"cannot prepare {self.claim}: {where}: {why}"
        raise Refusal(message, hint)

    def fail(self, where: str, why: str) -> NoReturn:
        """Reject the document.

        Raises:
            UsageError: always.

        """
        message = f"cannot read {self.claim}: {where}: {why}"
        raise UsageError(message, "check the claim with: kubectl get resourceclaims -o yaml")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
