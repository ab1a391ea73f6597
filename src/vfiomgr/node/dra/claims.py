"""ResourceClaims of the Kubernetes API, and the driver's parameters in them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.api_server import name_of
from vfiomgr.node.dra.model import DRIVER, AllocatedDevice, Claim, Parameters
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

API_VERSION = "vfiomgr.io/v1alpha1"
KIND = "VfioDeviceConfig"
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""The annotation of claims that were made from a template."""
_NUMA = "numaPolicy"
_DEVICES = "status.allocation.devices"
_SOURCES = ("FromClass", "FromClaim")
"""Of parameters, in order of precedence, the least first."""
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Object(Value, forbid_unknown_fields=False):
    """A part of an object of the API, with the fields that the driver reads."""


class _Metadata(_Object):
    namespace: _Text
    name: _Text
    uid: _Text
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class _Result(_Object):
    driver: _Text
    request: _Text
    pool: _Text
    device: _Text
    adminAccess: bool | None = None  # noqa: N815 - the field of Kubernetes


class _Opaque(_Object):
    driver: _Text
    parameters: Any = None


class _Config(_Object):
    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...] = ()
    opaque: _Opaque | None = None


class _Devices(_Object):
    results: tuple[_Result, ...] = ()
    config: tuple[_Config, ...] = ()


class _Allocation(_Object):
    devices: _Devices = _Devices()


class _Status(_Object):
    allocation: _Allocation | None = None


class _ResourceClaim(_Object):
    metadata: _Metadata
    status: _Status = _Status()


def read_claim(document: Mapping[str, Any], node: str) -> Claim:
    """Read a ResourceClaim; its devices are in pools of this node.

    Raises:
        Refusal: it is not allocated, or to devices that this node cannot prepare.
        UsageError: a field has the wrong type, or its parameters are invalid.

    """
    try:
        found = from_jsonable(_ResourceClaim, document)
    except Misfit as misfit:
        message = f"cannot read claim {name_of(document)}: {misfit}"
        hint = "check the claim with: kubectl get resourceclaims -o yaml"
        raise UsageError(message, hint) from None
    metadata = found.metadata
    named = f"claim {metadata.namespace}/{metadata.name}"
    if found.status.allocation is None:
        message = f"cannot prepare {named}: status.allocation: it is missing"
        raise Refusal(message, "wait until the claim is allocated")
    devices = found.status.allocation.devices
    return Claim(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        pod_claim_name=metadata.annotations.get(POD_CLAIM_NAME, ""),
        devices=tuple(_allocated(devices.results, node, named)),
        parameters=tuple(_parameters(devices.config, named)),
    )


def is_of_node(pool: str, node: str) -> bool:
    """Whether a pool is one of a node."""
    return pool == node or pool.startswith(f"{node}/")


def _allocated(results: Iterable[_Result], node: str, named: str) -> Iterator[AllocatedDevice]:
    """The devices of this driver."""
    for number, result in enumerate(results):
        if result.driver != DRIVER:
            continue
        place = f"cannot prepare {named}: {_DEVICES}.results[{number}]"
        if not is_of_node(result.pool, node):
            message = f"{place}.pool: this node does not have the pool {result.pool}"
            raise Refusal(message, "delete the pod, so that its claim is allocated again")
        if result.adminAccess:
            message = f"{place}.adminAccess: a VFIO device cannot be shared with an administrator"
            raise Refusal(message, "request the device without adminAccess")
        yield AllocatedDevice(result.request, result.pool, result.device)


def _parameters(config: Iterable[_Config], named: str) -> Iterator[Parameters]:
    """The parameters for this driver, those of the DeviceClass first."""
    ordered = sorted(enumerate(config), key=lambda item: _SOURCES.index(item[1].source))
    for number, entry in ordered:
        if entry.opaque is not None and entry.opaque.driver == DRIVER:
            place = f"{named}: {_DEVICES}.config[{number}].opaque.parameters"
            yield replace(read_parameters(entry.opaque.parameters, place), requests=entry.requests)


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


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    ReadParameters = Callable[[object, str], Parameters]
    """Reads opaque parameters; the text says where they are, for error messages."""
