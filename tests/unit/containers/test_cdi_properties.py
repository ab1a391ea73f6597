"""What is generated for any host is read by every consumer, and leads where it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.devices import specification_of
from vfiomgr.containers.cdi.document import parse_specification, render_specification
from vfiomgr.containers.cdi.model import CdiFile, Naming, NodeForm, OfferRequest
from vfiomgr.containers.cdi.rules import CONSUMERS
from vfiomgr.errors import Refusal
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_LETTERS = st.text("abcXYZ019._-", max_size=8)
_PARTS = st.builds(
    lambda first, middle, last: f"{first}{middle}{last}",
    st.sampled_from("aZ"),
    _LETTERS,
    st.sampled_from("b9"),
)
_KINDS = st.builds(lambda vendor, name: f"{vendor}/{name}", _PARTS, _PARTS)
_ADDRESSES = st.builds(
    PciAddress,
    st.sampled_from([0, 1, 0x10000]),
    st.integers(0, 255),
    st.integers(0, 31),
    st.integers(0, 7),
)


@st.composite
def hosts(draw: st.DrawFn) -> HostSnapshot:
    """Functions in a few groups, on VFIO or on drivers of the host, with and without cdevs."""
    addresses = draw(st.lists(_ADDRESSES, min_size=1, max_size=8, unique=True))
    has_cdevs = draw(st.booleans())
    devices = []
    for number, address in enumerate(addresses):
        is_bound = draw(st.booleans())
        device: PciDevice = replace(
            pci_device(),
            address=address,
            class_code=draw(st.sampled_from(["030200", "040300", "120000"])),
            driver="vfio-pci" if is_bound else draw(st.sampled_from(["nvidia", None])),
            vfio_device=f"vfio{number}" if is_bound else None,
            vfio_cdev=is_bound and has_cdevs,
            iommu_group=draw(st.integers(0, 5)),
        )
        devices.append(device)
    host = host_of(*devices)
    has_nodes = draw(st.booleans()) or not has_cdevs
    groups = tuple(replace(group, has_node=has_nodes) for group in host.groups)
    return with_facts(host, groups=groups)


@settings(max_examples=300)
@given(
    host=hosts(),
    wanted=st.builds(
        OfferRequest,
        kind=_KINDS,
        node=st.sampled_from(get_args(NodeForm)),
        name_by=st.sampled_from(get_args(Naming)),
        is_plain=st.booleans(),
    ),
)
def test_all_consumers_read_it_and_it_leads_to_what_is_ready(
    host: HostSnapshot, wanted: OfferRequest
) -> None:
    try:
        made = specification_of(host, wanted)
    except Refusal:
        assert "cdev" in (wanted.node, wanted.name_by)
        return
    if not made.devices:
        return
    text = render_specification(made)
    assert parse_specification(text) == made
    is_dotted = "." in made.device_class
    readers = [c for c in CONSUMERS if not is_dotted or c.library >= Version(0, 6)]
    report = check([CdiFile("/etc/cdi/x.json", text)], readers, host, {})
    assert report.findings == ()
    assert {verdict.verdict for verdict in report.verdicts} == {"ok"}
    bound = {d.address for d in host.devices if d.is_on_vfio and host.is_viable(d.iommu_group or 0)}
    groups = {d.iommu_group for d in host.devices if d.address in bound}
    assert len(made.devices) == len(groups)
