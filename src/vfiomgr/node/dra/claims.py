"""ResourceClaims of the Kubernetes API, and the driver's parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.dra.model import DRIVER, AllocatedDevice, Claim, Parameters
from vfiomgr.value import Value

API_VERSION = "vfiomgr.io/v1alpha1"
KIND = "VfioDeviceConfig"
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""The annotation of claims that were made from a template."""
_NUMA = "numaPolicy"
_DEVICES = ("status", "allocation", "devices")
_SOURCES = ("FromClass", "FromClaim")
"""Of parameters, in order of precedence, the least first."""
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_T = TypeVar("_T")


class _Object(Value, forbid_unknown_fields=False):
    """A part of an object of the API, with the fields that the driver reads; null is absent."""


class _Metadata(_Object):
    namespace: _Text
    name: _Text
    uid: _Text
    annotations: dict[str, str | None] | None = None


class _OfDriver(_Object):
    """A result of any driver; of other drivers nothing else is read."""

    driver: _Text


class _Result(_OfDriver):
    request: _Text
    pool: _Text
    device: _Text
    adminAccess: bool | None = None  # noqa: N815 - the field of Kubernetes


class _Opaque(_Object):
    driver: str | None = None
    parameters: Any = None


class _OpaqueConfig(_Object):
    """Parameters for any driver."""

    opaque: _Opaque | None = None


class _Config(_Object):
    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...] | None = None


class _Devices(_Object):
    results: tuple[dict[str, Any], ...] | None = None
    config: tuple[dict[str, Any], ...] | None = None


class _Status(_Object):
    allocation: dict[str, Any] | None = None


class _ResourceClaim(_Object):
    metadata: _Metadata
    status: _Status | None = None


class _Allocation(_Object):
    devices: _Devices | None = None


def read_claim(document: Mapping[str, Any], node: str) -> Claim:
    """Read a ResourceClaim; its devices are in pools of this node.

    Raises:
        Refusal: it is not allocated, or to devices that this node cannot prepare.
        UsageError: a field has the wrong type, or its parameters are invalid.
    """
    found = _read(_ResourceClaim, document, _called(document))
    metadata, status = found.metadata, found.status or _Status()
    named = f"claim {metadata.namespace}/{metadata.name}"
    if not status.allocation:
        message = f"cannot prepare {named}: status.allocation: it is missing"
        raise Refusal(message, "wait until the claim is allocated")
    allocation = _read(_Allocation, status.allocation, named, "status", "allocation")
    devices = allocation.devices or _Devices()
    return Claim(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        pod_claim_name=(metadata.annotations or {}).get(POD_CLAIM_NAME) or "",
        devices=tuple(_allocated(devices.results or (), node, named)),
        parameters=_parameters(devices.config or (), named),
    )


def _called(document: Mapping[str, Any]) -> str:
    """The claim for messages, of a document that was not read yet."""
    metadata = document.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    return f"claim {known.get('namespace', '?')}/{known.get('name', '?')}"


def _read(kind: type[_T], data: object, named: str, *place: str | int) -> _T:
    """Read a part of a claim, which is at a place in it; raises UsageError."""
    try:
        return from_jsonable(kind, data)
    except Misfit as misfit:
        where = Misfit(misfit.what, (*place, *misfit.keys))
        hint = "check the claim with: kubectl get resourceclaims -o yaml"
        message = f"cannot read {named}: {where}"
        raise UsageError(message, hint) from None


def is_of_node(pool: str, node: str) -> bool:
    """Whether a pool is one of a node."""
    return pool == node or pool.startswith(f"{node}/")


def _allocated(
    results: Iterable[dict[str, Any]], node: str, named: str
) -> Iterator[AllocatedDevice]:
    """The devices of this driver."""
    for number, each in enumerate(results):
        where = (*_DEVICES, "results", number)
        if _read(_OfDriver, each, named, *where).driver != DRIVER:
            continue
        result = _read(_Result, each, named, *where)
        place = f"cannot prepare {named}: {'.'.join(_DEVICES)}.results[{number}]"
        if not is_of_node(result.pool, node):
            message = f"{place}.pool: this node does not have the pool {result.pool}"
            raise Refusal(message, "delete the pod, so that its claim is allocated again")
        if result.adminAccess:
            message = f"{place}.adminAccess: a VFIO device cannot be shared with an administrator"
            raise Refusal(message, "request the device without adminAccess")
        yield AllocatedDevice(result.request, result.pool, result.device)


def _parameters(config: Iterable[dict[str, Any]], named: str) -> tuple[Parameters, ...]:
    """The parameters for this driver, those of the DeviceClass first."""
    found = []
    for number, each in enumerate(config):
        where = (*_DEVICES, "config", number)
        opaque = _read(_OpaqueConfig, each, named, *where).opaque
        if opaque is None or opaque.driver != DRIVER:
            continue
        entry = _read(_Config, each, named, *where)
        place = f"{named}: {'.'.join(_DEVICES)}.config[{number}].opaque.parameters"
        parameters = read_parameters(opaque.parameters, place)
        found.append((entry.source, replace(parameters, requests=entry.requests or ())))
    return tuple(each for source in _SOURCES for own, each in found if own == source)


def parameters_of(claim: Claim, request: str) -> Parameters:
    """The parameters of a request; those of the claim replace those of the DeviceClass."""
    names = {request, request.partition("/")[0]}
    fitting = [p for p in claim.parameters if not p.requests or not names.isdisjoint(p.requests)]
    return fitting[-1] if fitting else Parameters()


class DeviceConfig(Value):
    """The parameters of a `VfioDeviceConfig`."""

    apiVersion: Literal["vfiomgr.io/v1alpha1"]  # noqa: N815 - the field of Kubernetes
    kind: Literal["VfioDeviceConfig"]
    reset: bool = False
    """Whether the devices are reset after the last pod of the claim has ended."""
    form: Literal["group", "cdev"] | None = None
    """The device nodes of a container: of the IOMMU group, or of IOMMUFD."""


def read_parameters(document: object, where: str) -> Parameters:
    """Read the parameters; `where` is their place for messages, e.g. `claim default/gpu`.

    Raises:
        UsageError: the document is not a valid `VfioDeviceConfig`.
    """
    try:
        read = from_jsonable(DeviceConfig, document)
    except Misfit as misfit:
        key = str(misfit.keys[-1]) if misfit.keys else ""
        message = f"cannot read the parameters of {where}: {misfit}"
        raise UsageError(message, _remedy(key, document)) from None
    return Parameters(reset=read.reset, form=read.form or "")


def _remedy(key: str, document: object) -> str:
    if not isinstance(document, dict) or key in ("apiVersion", "kind"):
        return f"set apiVersion: {API_VERSION} and kind: {KIND}"
    if key == _NUMA:
        return "write a constraint of the claim: matchAttribute: resource.kubernetes.io/numaNode"
    settings = tuple(f.name for f in msgspec.structs.fields(DeviceConfig) if not f.required)
    close = get_close_matches(key, settings, 1)
    if key in settings:
        return "reset is true or false; form is group or cdev"
    return f"did you mean {close[0]}?" if close else f"use {' and '.join(settings)} only"
