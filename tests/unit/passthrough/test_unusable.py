"""Functions that no guest can use, whatever driver they are on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.guards import unusable
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.iommu import IommuState
from vfiomgr.pci.model import IN_ITS_MEMORY, Bar
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.hardware import direct_mapping

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run
    from vfiomgr.diagnostic import Override
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device("0000:04:00.0")
AUDIO = replace(pci_device("0000:04:00.1"), class_code="040300", driver="snd_hda_intel")
HBA = replace(GPU, class_code="010700", driver="mpt3sas", device_id="0087", vendor_id="1000")
BRIDGE = replace(pci_device("0000:00:01.0"), class_code="060400", header_type=1, driver="pcieport")
BOOTFB = (f"BOOTFB{IN_ITS_MEMORY}",)
BAR = Bar(1, 0, 32 << 30, True, True, True, (), True)  # noqa: FBT003 - memory of 64 bits, unset
UNITS = {"Intel": "dmar0", "AMD": "ivhd0", "Arm": "smmu3.0x0000000005000000"}


def reserving(
    *members: PciDevice, release: str | None = "6.12.0", iommu: str = "Intel", **changes: Any
) -> HostSnapshot:
    """A host whose only group has memory that the firmware wants mapped 1:1."""
    host = host_of(*members)
    (group,) = host.groups
    return with_facts(
        host,
        groups=(replace(group, direct_regions=("f4000-f4fff",)),),
        iommu=IommuState((UNITS[iommu],), (), has_groups=True),
        kernel_release=release,
        **changes,
    )


def refusal(host: HostSnapshot, *allow: Override) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(host, Bind((host.devices[-1].address,), allow=frozenset(allow)))
    return caught.value


@pytest.mark.parametrize(
    ("members", "release", "iommu", "is_refused"),
    [
        ((HBA,), "6.12.0", "Intel", True),
        ((HBA,), "6.6.0", "AMD", True),
        ((HBA,), "6.14.0-1013-nvidia", "Arm", True),
        ((HBA,), "6.5.0", "AMD", False),  # drivers/iommu/iommu.c has no such test yet
        ((HBA,), "5.15.0", "Arm", False),
        ((HBA,), None, "AMD", False),
        ((HBA,), "5.4.73-1-pve", "Intel", True),
        ((GPU,), "5.3.0", "Intel", True),  # otherwise it would be direct-relaxable
        ((GPU,), "5.2.0", "Intel", None),
        ((BRIDGE, GPU), "4.19.0", "Intel", None),
        ((HBA,), "4.19.0", "Intel", True),
        ((GPU, AUDIO), "4.19.0", "Intel", False),  # the memory may be that of the GPU
    ],
)
def test_what_the_kernel_refuses_depends_on_its_release_and_the_iommu(
    members: tuple[PciDevice, ...], release: str | None, iommu: str, *, is_refused: bool | None
) -> None:
    found = direct_mapping(reserving(*members, release=release, iommu=iommu), 4)
    assert (found.is_refused if found else None) is is_refused


def test_groups_without_such_memory_are_free() -> None:
    host = host_of(HBA)
    assert direct_mapping(host, 4) is None
    (group,) = host.groups
    known = with_facts(host, groups=(replace(group, direct_regions=()),))
    assert direct_mapping(known, 4) is None
    assert direct_mapping(host, None) is None


def test_what_the_kernel_refuses_cannot_be_allowed() -> None:
    refused = refusal(reserving(HBA), "reserved-region")
    assert refused.message == (
        "IOMMU group 4 has memory that the firmware requires mapped 1:1 (f4000-f4fff), so the "
        "kernel refuses it for guests"
    )
    assert "--allow" not in refused.hint


def test_what_the_kernel_may_accept_can_be_allowed() -> None:
    host = reserving(HBA, release="6.1.0", iommu="AMD")
    assert "pass --allow reserved-region" in refusal(host).hint
    allowed = plan(host, Bind((HBA.address,), allow=frozenset({"reserved-region"})))
    assert any("may cut off" in note for note in allowed.notes)
    assert not any("--allow" in note for note in allowed.notes)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({}, "only kernels with the patch relax_rmrr assign it"),
        (
            {"kernel_command_line": "intel_iommu=on,relax_rmrr"},
            "this kernel does not know intel_iommu=relax_rmrr",
        ),
        ({"release": "6.8.12-4-pve"}, "write intel_iommu=on,relax_rmrr on the kernel command line"),
        ({"release": "5.15.30-2-pve"}, "only kernels with the patch relax_rmrr assign it"),
        ({"iommu": "Arm"}, "ask the vendor for firmware without this region"),
        ({"iommu": "AMD"}, "ask the vendor for firmware without this region"),
    ],
)
def test_the_remedy_depends_on_the_kernel(changes: dict[str, Any], hint: str) -> None:
    told = refusal(reserving(HBA, **changes)).hint
    assert hint in told
    assert ("relax_rmrr" in told) == ("iommu" not in changes)


@pytest.mark.parametrize(
    ("vendor", "code", "is_named"),
    [("HP", "020000", True), ("HPE", "020000", True), ("HP", "010700", False), (None, "020000", 0)],
)
def test_the_shared_memory_of_hps_cards_can_be_disabled(
    vendor: str | None, code: str, *, is_named: bool
) -> None:
    host = reserving(replace(HBA, class_code=code), machine_vendor=vendor)
    assert ("HP Shared Memory" in refusal(host).hint) is bool(is_named)


@pytest.mark.parametrize(
    ("changes", "release", "is_unusable"),
    [
        ({"class_code": "030000"}, "5.15.0", True),
        ({"class_code": "030000"}, "6.1.0", False),  # vfio-pci will remove it
        ({"class_code": "030000", "driver": "vfio-pci"}, "6.1.0", True),
        ({"class_code": "038000"}, "6.18.48-talos", True),
        ({"class_code": "038000", "display_signs": ("boot_vga is 1",)}, "6.18.48-talos", False),
    ],
)
def test_the_framebuffer_of_the_firmware_keeps_guests_from_the_memory(
    changes: dict[str, Any], release: str, *, is_unusable: bool
) -> None:
    gpu = replace(GPU, **{"display_signs": BOOTFB, **changes})
    host = with_facts(host_of(gpu), kernel_release=release)
    assert [d.rule for d in unusable(host, gpu)] == ["firmware-framebuffer"] * is_unusable


def test_an_override_of_the_display_leaves_a_note_about_its_memory() -> None:
    gpu = replace(GPU, class_code="038000", is_boot_display=True, display_signs=BOOTFB)
    host = host_of(gpu)
    refused = refusal(host)
    assert "the firmware's framebuffer in its memory (BOOTFB)" in refused.message
    allowed = plan(host, Bind((gpu.address,), allow=frozenset({"boot-display"})))
    assert any("add initcall_blacklist=sysfb_init" in note for note in allowed.notes)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"is_responsive": False}, "it does not answer"),
        ({"display_signs": BOOTFB}, "it has the firmware's framebuffer in its memory (BOOTFB)"),
        ({}, "IOMMU group 4 has memory that the firmware requires mapped 1:1"),
    ],
)
def test_what_is_bound_is_not_ready_for_that_alone(
    run: Run, tmp_path: Path, changes: dict[str, Any], because: str
) -> None:
    bound = replace(GPU, driver="vfio-pci", driver_override="vfio-pci")
    bad = replace(bound, **changes)
    host = with_facts(host_of(bad) if changes else reserving(bad), kernel_release="6.12.0")
    file = tmp_path / "host.json"
    for made, expected in ((host, f"no: {because}"), (host_of(bound), "yes, VFIO node")):
        file.write_text(write_snapshot(made))
        shown = run("--snapshot", str(file), "show", "0000:04:00.0").stdout
        assert f"guest-ready      {expected}" in shown


def test_groups_tell_of_memory_of_the_firmware(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(reserving(replace(HBA, driver="vfio-pci"))))
    answer = run("--snapshot", str(file), "groups")
    assert "IOMMU group 4 has memory that the firmware requires mapped 1:1" in answer.stderr
    document = run("--snapshot", str(file), "groups", "--format", "json").stdout
    assert '"state": "blocked"' in document
    assert "so the kernel refuses it for guests" in document


@pytest.mark.parametrize(
    ("bits", "size", "words", "expected", "absent"),
    [
        (36, 32, "quiet", "use another host, or less memory: this CPU has 36", "above-4G"),
        (46, 32, "quiet", "above-4G", "another host"),
        (46, 32, "pci=realloc", "above-4G", "pci=realloc"),
        (
            None,
            16,
            "quiet",
            "add pci=realloc to the kernel command line and reboot",
            "another host",
        ),
    ],
)
def test_a_bar_without_an_address(
    bits: int | None, size: int, words: str, expected: str, absent: str
) -> None:
    gpu = replace(GPU, bars=(replace(BAR, size=size << 30),))
    facts = {"cpu_address_bits": bits, "kernel_command_line": words}
    refused = refusal(with_facts(host_of(gpu), **facts))
    assert f"no address for BAR 1 ({size} GiB), so the kernel cannot enable it" in refused.message
    assert expected in refused.hint
    assert absent not in refused.hint
    bound = replace(gpu, driver="vfio-pci")
    assert [found.rule for found in unusable(host_of(bound), bound)] == ["bar-not-assigned"]


def test_the_window_of_a_guest_is_enlarged_on_its_host() -> None:
    gpu = replace(GPU, bars=(BAR,))
    hint = refusal(with_facts(host_of(gpu), runs_on="guest", cpu_address_bits=46)).hint
    assert "larger window for BARs, on its host" in hint
    assert "firmware setup" not in hint


def test_a_bar_with_an_address_is_fine() -> None:
    gpu = replace(GPU, bars=(replace(BAR, is_unassigned=False, start=1 << 40),))
    assert plan(host_of(gpu), Bind((gpu.address,))).steps


@pytest.mark.parametrize(
    ("architecture", "modules", "is_refused"),
    [
        ("ppc64le", ("vfio", "vfio_pci", "vfio_iommu_type1"), True),
        ("ppc64le", ("vfio", "vfio_pci", "vfio_iommu_spapr_tce"), False),
        ("ppc64le", None, False),
        ("x86_64", ("vfio", "vfio_pci", "vfio_iommu_type1"), False),
    ],
)
def test_power_needs_its_own_backend(
    architecture: str, modules: tuple[str, ...] | None, *, is_refused: bool
) -> None:
    bound = replace(GPU, driver="vfio-pci")
    facts: dict[str, Any] = {"architecture": architecture, "vfio_modules": modules}
    host = with_facts(host_of(bound), **facts)
    assert [found.rule for found in unusable(host, bound)] == ["iommu-backend"] * is_refused
    if is_refused:
        hint = refusal(with_facts(host_of(GPU), **facts)).hint
        assert "CONFIG_SPAPR_TCE_IOMMU" in hint
        assert "type1" not in hint


@pytest.mark.parametrize(
    ("state", "status", "is_found"),
    [("D3cold", "error", True), ("D3cold", "suspended", False), ("D3hot", "error", False)],
)
def test_a_function_that_does_not_wake_up_is_of_no_use(
    state: str, status: str, *, is_found: bool
) -> None:
    """kata-containers#11708: it is on vfio-pci, and each guest with it fails."""
    gpu = replace(GPU, driver="vfio-pci", power_state=state, runtime_status=status)
    rules = {each.rule for each in unusable(host_of(gpu), gpu)}
    assert ("stuck-in-d3cold" in rules) == is_found
