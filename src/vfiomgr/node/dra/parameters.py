"""The driver's parameters in claims and DeviceClasses, as people write them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

import msgspec

from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import UsageError
from vfiomgr.node.dra.model import Parameters
from vfiomgr.value import Value

if TYPE_CHECKING:
    from typing import NoReturn

API_VERSION = "vfiomgr.io/v1alpha1"
KIND = "VfioDeviceConfig"
_NUMA = "numaPolicy"


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
        _refuse(misfit, document, where)
    return Parameters(reset=read.reset, form=read.form or "")


def _refuse(misfit: Misfit, document: object, where: str) -> NoReturn:
    """Explain what is wrong with a document.

    Raises:
        UsageError: always.

    """
    key = str(misfit.keys[-1]) if misfit.keys else ""
    message = f"cannot read the parameters of {where}: {misfit}"
    raise UsageError(message, _remedy(key, document)) from None


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
