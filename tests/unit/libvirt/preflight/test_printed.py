"""What `libvirt domain` plans and what a preflight judges are of one mind about addresses."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, bar, gpu, planned, two_sockets
from tests.unit.libvirt.preflight import situations as good
from tests.unit.libvirt.preflight.situations import libvirt, of, troubles
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.build.model import GuestDisk, GuestNetwork
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import GIB, Version

SIZES = (8, 16, 31, 32, 64, 128, 256, 512)
VENDORS = some.sampled_from(["GenuineIntel", "AuthenticAMD", "HygonGenuine", None])
WIDTHS = some.sampled_from([36, 38, 39, 40, 41, 42, 45, 46, 47, 48, 52, None])
NETWORK = GuestNetwork("network", "default")


@settings(max_examples=200)
@given(data=some.data(), bits=WIDTHS, vendor=VENDORS)
def test_a_domain_that_is_printed_has_room_for_what_it_gets(
    data: some.DataObject, bits: int | None, vendor: str | None
) -> None:
    sizes = data.draw(some.lists(some.sampled_from(SIZES), min_size=3, max_size=3), "GiB")
    names = data.draw(some.sets(some.sampled_from([GPU, NEAR, FAR])), "devices")
    memory = data.draw(some.sampled_from([1, 2, 3, 16, 64, 470, 900, 980, 1000, 4000]), "memory")
    version = data.draw(
        some.sampled_from([Version(8, 6), Version(9, 0), Version(12, 2)]), "libvirt"
    )
    changed = tuple(
        replace(gpu(name, group, 0), bars=(bar(size * GIB, index=1),))
        for name, group, size in zip((GPU, NEAR, FAR), (10, 11, 12), sizes, strict=True)
    )
    host = with_facts(
        two_sockets(*changed), topology=None, cpu_address_bits=bits, cpu_vendor=vendor
    )
    host = with_facts(host, devices=tuple({d.address: d for d in host.devices}.values()))
    try:
        plan = planned(
            *sorted(names),
            host=host,
            libvirt=version,
            memory_bytes=memory * GIB,
            kind=data.draw(some.sampled_from(["kvm", "qemu"]), "kind"),
            firmware=data.draw(some.sampled_from(["efi", "bios"]), "firmware"),
            disks=(GuestDisk("/a", "raw"),) * data.draw(some.integers(0, 3), "disks"),
            networks=(NETWORK,) * data.draw(some.integers(0, 2), "networks"),
            has_fixed_aperture=data.draw(some.booleans(), "fixed"),
            viommu=data.draw(some.sampled_from([None, "intel"]), "viommu"),
        )
    except Refusal:
        assume(False)  # noqa: FBT003 - hypothesis's own
        raise
    read = read_domain(render.domain(plan).encode(), "printed.xml")
    hypervisor = libvirt(libvirt=version, qemu=Version(7, 2))
    assert troubles(of(read, host, hypervisor)) == []


@pytest.mark.parametrize("viommu", [None, "intel"])
def test_a_guest_on_two_nodes_is_told_where_its_devices_are(viommu: str | None) -> None:
    plan = planned(GPU, NEAR, FAR, viommu=viommu)
    read = read_domain(render.domain(plan).encode(), "printed.xml")
    assert len(read.cpu.cells) == len(read.memory.cell_nodes) == 2
    assert troubles(of(read, two_sockets(), libvirt(libvirt=Version(9, 0)))) == []
    crossed = replace(
        read, memory=replace(read.memory, cell_nodes=((0, frozenset({1})), (1, frozenset({0}))))
    )
    assert troubles(of(crossed, two_sockets())) == ["device-of-other-cell"] * 3


def test_a_window_that_is_full_to_the_brim_has_no_room_for_disks() -> None:
    """Devices that QEMU emulates have 64-bit BARs behind ports as well."""
    host = with_facts(
        two_sockets(), devices=(replace(gpu(GPU, 10), bars=(bar(64 * GIB, index=1),)),)
    )
    host = with_facts(host, cpu_address_bits=39, cpu_vendor="GenuineIntel")
    plan = planned(GPU, host=host, disks=(GuestDisk("/a", "raw"),), networks=(NETWORK,))
    assert plan.cpus.aperture_mib == 128 << 10


@pytest.mark.parametrize(
    ("bits", "vendor", "kind", "size", "is_found"),
    [
        (36, "GenuineIntel", "kvm", 16, False),
        (39, "GenuineIntel", "kvm", 32, False),
        (39, "AuthenticAMD", "kvm", 32, True),
        (40, "GenuineIntel", "kvm", 64, True),
        (40, "AuthenticAMD", "kvm", 64, False),
        (46, "GenuineIntel", "qemu", 64, False),
        (52, "GenuineIntel", "kvm", 8 << 10, True),
    ],
)
def test_ovmf_has_the_window_that_it_is_known_to_take(
    bits: int, vendor: str, kind: str, size: int, *, is_found: bool
) -> None:
    large = replace(good.GPU, bars=good.bar(size))
    host = good.host(large, cpu_address_bits=bits, cpu_vendor=vendor)
    text = good.xml(
        good.BOTH + "<disk type='file'><target bus='virtio'/></disk>",
        firmware=" firmware='efi'",
        kind=kind,
        memory="4",
    )
    assert ("aperture-too-small" in troubles(good.judge(text, host))) is is_found


@pytest.mark.parametrize("kind", ["kvm", "qemu"])
def test_memory_beyond_the_last_address_is_refused(kind: str) -> None:
    host = with_facts(two_sockets(), topology=None, cpu_address_bits=40)
    with pytest.raises(Refusal, match="only 40 address bits") as refused:
        planned(AUDIO, host=host, memory_bytes=1024 * GIB, kind=kind)
    assert ("or use KVM" in refused.value.hint) is (kind == "qemu")
    amd = with_facts(host, cpu_vendor="AuthenticAMD")
    with pytest.raises(Refusal, match=r"end at 1\.\d+ TiB|end at 20\d\d GiB"):
        planned(AUDIO, host=amd, memory_bytes=985 * GIB, kind="kvm")
