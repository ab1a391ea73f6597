"""A snapshot of a host as a document, written and read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.reader import first_error, read_values
from vfiomgr.errors import InvalidDocument
from vfiomgr.host.accounts import NodeAccess
from vfiomgr.pci.iommu import IommuGroup, IommuState, VfioState
from vfiomgr.pci.model import Bar, DeviceIdentity, PciDevice
from vfiomgr.pci.original_state import DriverState, OriginalState
from vfiomgr.snapshot.model import DeviceUser, HostSnapshot, HostUse, NodeFact
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, VgpuType, WedgedFunction

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KIND = "HostSnapshot"

_PARTS: tuple[Any, ...] = (
    HostSnapshot,
    DeviceUser,
    HostUse,
    IommuState,
    IommuGroup,
    PciDevice,
    Bar,
    DeviceIdentity,
    OriginalState,
    DriverState,
    VgpuParent,
    VgpuType,
    Vgpu,
    GpuMode,
    WedgedFunction,
    VfioState,
    NodeFact,
    NodeAccess,
)


def write_snapshot(snapshot: HostSnapshot) -> str:
    """The snapshot as a JSON document."""
    import json  # noqa: PLC0415 - slow to import, and lists need none

    document = {"api_version": API_VERSION, "kind": KIND, **to_jsonable(snapshot)}
    return json.dumps(document, indent=2) + "\n"


def read_snapshot(text: str, source: str) -> HostSnapshot:
    """Read what `write_snapshot` wrote, as JSON or YAML; `source` names the document in errors.

    Raises:
        InvalidDocument: neither of them, another kind of document, or fields that do not fit.

    """
    remedy = "make it anew with: vfiomgr snapshot > host.json"
    document = read_values(text, source, remedy)
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        message = f"{source}: not a document of kind {KIND}"
        raise InvalidDocument(message, remedy)
    version = document.pop("api_version", None)
    if version != API_VERSION:
        message = f"{source}: api_version is {version!r}, this vfiomgr reads {API_VERSION!r}"
        raise InvalidDocument(message, remedy)
    return _validated(document, text, source, remedy)


@functools.cache
def _adapter() -> TypeAdapter[HostSnapshot]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - documents only

    from vfiomgr.check.model import PARTS, Readiness  # noqa: F401, PLC0415
    from vfiomgr.containers.cdi.model import CdiFile  # noqa: PLC0415

    # pydantic looks for the names of fields' types among those of this function.
    from vfiomgr.definitions.model import kept  # noqa: PLC0415
    from vfiomgr.definitions.model.kept import DefinitionFacts  # noqa: F401, PLC0415
    from vfiomgr.documents.text_file import TextFile  # noqa: PLC0415
    from vfiomgr.pci import numa  # noqa: PLC0415
    from vfiomgr.pci.numa import HostTopology  # noqa: F401, PLC0415
    from vfiomgr.pci.reset_capabilities import ResetCapabilities  # noqa: PLC0415
    from vfiomgr.pci.vfio_drivers import VfioVariant  # noqa: PLC0415
    from vfiomgr.persistence.model import Initramfs  # noqa: PLC0415
    from vfiomgr.vgpu.mig.model import GpuInstance, GpuPartition, InstanceProfile  # noqa: PLC0415
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas, QuotaAttribute  # noqa: PLC0415

    gpus = (GpuPartition, GpuInstance, InstanceProfile, GpuQuotas, FunctionQuotas, QuotaAttribute)
    others = (CdiFile, Initramfs, TextFile, ResetCapabilities, VfioVariant)
    for part in (*_PARTS, *PARTS, *kept.PARTS, *numa.PARTS, *gpus, *others):
        part.__pydantic_config__ = {"extra": "forbid"}
    return TypeAdapter(HostSnapshot)


def _validated(document: dict[str, Any], text: str, source: str, remedy: str) -> HostSnapshot:
    from pydantic import ValidationError  # noqa: PLC0415 - documents only

    try:
        return _adapter().validate_python(document)
    except ValidationError as error:
        message = f"{source}:{first_error(error, text)}"
        raise InvalidDocument(message, remedy) from None
