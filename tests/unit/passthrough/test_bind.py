from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from vfiomgr.diagnostic import diagnostics_of
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.host import not_checked
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.host.owners import NodeOwner
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    Bind,
    ChangeDriver,
    ReleaseDriver,
    SaveOriginalState,
    Unbind,
)
from vfiomgr.pci.drivers import DriverState, OriginalState, VfioVariant
from vfiomgr.pci.iommu import IommuState, VfioState
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.persistence.model import SWEPT, UNIT, rule_file
from vfiomgr.persistence.steps import LoadModule, ReplaceFile
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import Family, Vgpu, VgpuParent

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device("0000:04:00.0")
AUDIO = replace(
    pci_device("0000:04:00.1"), driver="snd_hda_intel", class_code="040300", name="NVIDIA audio"
)
NIC = replace(pci_device("0000:05:00.0"), driver="e1000e", class_code="020000", name="Intel NIC")
CONSOLE: dict[str, Any] = {"is_boot_display": True, "display_signs": ("boot_vga is 1",)}
BRIDGE = replace(pci_device("0000:00:01.0"), driver="pcieport", class_code="060400", header_type=1)


def bind(host: HostSnapshot, *addresses: str, **options: Any) -> tuple[Step, ...]:
    intent = replace(Bind(tuple(PciAddress.parse(a) for a in addresses)), **options)
    return plan(host, intent).steps


def refusal(host: HostSnapshot, address: str, *allow: Override) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(host, Bind((PciAddress.parse(address),), allow=frozenset(allow)))
    assert caught.value.exit_code == 4
    assert caught.value.hint
    return caught.value


def moved(steps: tuple[Step, ...]) -> list[str]:
    return [str(step.device.address) for step in steps if isinstance(step, ChangeDriver)]


def test_the_whole_slot_goes_and_each_origin_is_remembered_before_it_moves() -> None:
    steps = bind(host_of(GPU, AUDIO), "0000:04:00.1")
    vfio = DriverState("vfio-pci", "vfio-pci")
    gpu = DriverState("nvidia", None, "on", "flr bus", d3cold_allowed=True)
    audio = replace(gpu, driver="snd_hda_intel")
    assert steps == (
        SaveOriginalState(OriginalState(GPU.identity, gpu, "nvidia", "boot")),
        ChangeDriver(GPU.identity, gpu, vfio),
        SaveOriginalState(OriginalState(AUDIO.identity, audio, "nvidia", "boot")),
        ChangeDriver(AUDIO.identity, audio, vfio),
        AwaitVfioNode(4, GPU.identity),
    )


def test_companions_are_announced() -> None:
    made = plan(host_of(GPU, AUDIO), Bind((GPU.address,)))
    assert made.notes == ("also binding 0000:04:00.1 (NVIDIA audio) (same slot)",)
    assert made.locks == ("group-4",)


def test_a_function_of_another_domain_is_in_another_slot() -> None:
    far = replace(pci_device("0001:04:00.1"), iommu_group=9)
    assert moved(bind(host_of(GPU, AUDIO, far), "0000:04:00.0")) == ["0000:04:00.0", "0000:04:00.1"]


def test_a_virtual_function_in_the_slot_of_its_physical_function_stays() -> None:
    """Without ARI, the routing IDs of virtual functions follow in the same slot."""
    virtual = replace(
        pci_device("0000:04:00.4"), physical_function=GPU.address, driver="igbvf", iommu_group=9
    )
    assert moved(bind(host_of(GPU, AUDIO, virtual), "0000:04:00.0")) == [
        "0000:04:00.0",
        "0000:04:00.1",
    ]
    assert moved(bind(host_of(GPU, AUDIO, virtual), "0000:04:00.4")) == ["0000:04:00.4"]


def test_a_companion_of_another_group_can_be_left() -> None:
    host = host_of(GPU, replace(AUDIO, iommu_group=5))
    companion, other = plan(host, Bind((GPU.address,))).remarks
    assert companion.endswith("(NVIDIA audio) (same slot)")
    assert other == "to leave 0000:04:00.1: --function-only"
    assert plan(host, Bind((GPU.address,), with_group=True)).remarks == (companion,)


def test_a_missing_driver_is_loaded_first() -> None:
    host = with_facts(host_of(GPU), pci_drivers=("nvidia",))
    assert bind(host, "0000:04:00.0")[0] == LoadModule("vfio-pci", "vfio-pci")


def test_what_is_bound_already_is_left_alone() -> None:
    bound = replace(GPU, driver="vfio-pci", driver_override="vfio-pci")
    made = plan(host_of(bound), Bind((GPU.address,)))
    assert made.is_empty
    assert made.already == (f"{bound} is already on vfio-pci",)


def test_of_a_slot_only_what_is_missing_moves() -> None:
    bound = replace(GPU, driver="vfio-pci", driver_override="vfio-pci")
    assert moved(bind(host_of(bound, AUDIO), "0000:04:00.0")) == ["0000:04:00.1"]


def test_an_origin_is_not_overwritten_by_a_later_state() -> None:
    origin = OriginalState(GPU.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    host = with_facts(host_of(replace(GPU, driver=None)), origins=(origin,))
    assert not any(isinstance(s, SaveOriginalState) for s in bind(host, "0000:04:00.0"))


def test_foreign_members_are_refused_by_name_and_taken_with_consent() -> None:
    host = host_of(GPU, replace(NIC, iommu_group=4), replace(BRIDGE, iommu_group=4))
    refused = refusal(host, "0000:04:00.0")
    assert "IOMMU group 4 also holds 0000:05:00.0 (Intel NIC) on e1000e" in refused.message
    assert "--with-group" in refused.hint
    assert "0000:00:01.0" not in refused.message
    both = ["0000:04:00.0", "0000:05:00.0"]
    assert moved(bind(host, "0000:04:00.0", with_group=True)) == both


def test_functions_of_the_chipset_are_not_to_be_moved_to_another_slot() -> None:
    card = host_of(GPU, replace(NIC, iommu_group=4))
    assert "move the device to a slot" in refusal(card, "0000:04:00.0").hint
    built_in = replace(GPU, vendor_id="8086", bridge_path="pci0000:00")
    chipset = host_of(built_in, replace(NIC, iommu_group=4, bridge_path="pci0000:00"))
    hint = refusal(chipset, "0000:04:00.0").hint
    assert hint == "the group must be assigned together: pass --with-group to bind them too"


def _root_port(address: str, group: int) -> PciDevice:
    return replace(
        BRIDGE, address=PciAddress.parse(address), iommu_group=group, bridge_path="pci0000:00"
    )


JOINING = _root_port("0000:00:01.0", 4)
SHARING = replace(NIC, iommu_group=4, bridge_path="pci0000:00/0000:00:01.0")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("default-route", "carries the default route: interface eth0"),
        ("mounted-disk", "has a disk that the host uses: eth0"),
        ("network", "is in use by the host's network: eth0"),
    ],
)
def test_the_group_is_not_offered_with_a_member_that_the_host_keeps(kind: Any, reason: str) -> None:
    use = HostUse(NIC.address, kind, "eth0")
    host = with_facts(host_of(GPU, SHARING, JOINING), host_uses=(use,))
    refused = refusal(host, "0000:04:00.0")
    assert f"also holds {NIC} on e1000e, which {reason}" in refused.message
    assert "--with-group" not in refused.hint
    assert "enable ACS" in refused.hint


def test_the_controller_of_the_only_keyboard_goes_by_consent() -> None:
    use = HostUse(NIC.address, "keyboard", "Board, the only keyboard")
    host = with_facts(host_of(NIC), host_uses=(use,))
    refused = refusal(host, str(NIC.address))
    assert "has the host's keyboard: Board, the only keyboard" in refused.message
    assert "--allow host-peripheral" in refused.hint
    assert bind(host, str(NIC.address), allow=frozenset({"host-peripheral"}))
    with pytest.raises(Refusal, match="has the host's keyboard"):
        bind(host, str(NIC.address), allow=frozenset({"in-use"}))


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        ("mouse", "Mouse, the only mouse", "has the host's mouse: Mouse, the only mouse"),
        ("watchdog", "watchdog0", "has a watchdog of the host: watchdog0"),
        ("tpm", "tpm0", "serves the host's TPM: tpm0"),
        ("console", "ttyS4", "has a console of the host: ttyS4"),
    ],
)
def test_what_serves_the_host_goes_by_consent(kind: Any, what: str, said: str) -> None:
    use = HostUse(NIC.address, kind, what)
    host = with_facts(host_of(NIC), host_uses=(use,))
    refused = refusal(host, str(NIC.address))
    assert f"{NIC} {said}" in refused.message
    assert "--allow host-peripheral" in refused.hint
    assert bind(host, str(NIC.address), allow=frozenset({"host-peripheral"}))
    elsewhere = HostUse(PciAddress.parse("0000:77:00.0"), kind, what)
    assert bind(with_facts(host_of(NIC), host_uses=(elsewhere,)), str(NIC.address))
    shared = with_facts(host_of(GPU, SHARING, JOINING), host_uses=(use,))
    assert "--with-group" not in refusal(shared, "0000:04:00.0").hint


def test_the_group_is_offered_with_members_in_use_by_processes_or_by_consent() -> None:
    user = DeviceUser("/dev/dri/card1", 812, "gnome-shell")
    drawn = replace(SHARING, nodes=("/dev/dri/card1",))
    in_use = with_facts(host_of(GPU, drawn, JOINING), users=(user,))
    assert "--with-group" in refusal(in_use, "0000:04:00.0").hint
    route = HostUse(NIC.address, "default-route", "eth0")
    kept = with_facts(host_of(GPU, SHARING, JOINING), host_uses=(route,))
    assert "--with-group" in refusal(kept, "0000:04:00.0", "default-route").hint


def test_ports_without_acs_are_named_and_another_slot_only_where_one_may_be() -> None:
    second = _root_port("0000:00:01.1", 4)
    nic = replace(SHARING, bridge_path="pci0000:00/0000:00:01.1")
    hint = refusal(host_of(GPU, nic, JOINING, second), "0000:04:00.0").hint
    assert "behind 0000:00:01.0, 0000:00:01.1 is not isolated (no ACS)" in hint
    assert "to a slot" not in hint
    apart = _root_port("0000:00:1c.0", 9)
    assert "to a slot" in refusal(host_of(GPU, nic, JOINING, second, apart), "0000:04:00.0").hint
    assert "to a slot" in refusal(host_of(GPU, SHARING, JOINING), "0000:04:00.0").hint


def test_what_no_slot_and_no_acs_separates() -> None:
    with pytest.raises(Refusal) as caught:
        bind(host_of(GPU, AUDIO), "0000:04:00.0", only=True)
    assert caught.value.hint == "the group must be assigned together: leave out --function-only"
    conventional = replace(SHARING, address=PciAddress.parse("0000:04:02.0"))
    hint = refusal(host_of(GPU, conventional, JOINING), "0000:04:00.0").hint
    assert "to a slot" in hint
    assert "ACS" not in hint
    power = replace(host_of(GPU, SHARING, JOINING).kernel, architecture="ppc64le")
    fixed = refusal(replace(host_of(GPU, SHARING, JOINING), kernel=power), "0000:04:00.0").hint
    assert "partitionable endpoint" in fixed
    assert "to a slot" not in fixed
    assert "ACS" not in fixed


def test_acs_that_the_command_line_turns_off_is_the_one_remedy() -> None:
    host = host_of(GPU, SHARING, JOINING)
    words = replace(host.kernel, command_line="ro pci=config_acs=000@pci:0:0")
    hint = refusal(replace(host, kernel=words), "0000:04:00.0").hint
    assert "remove pci=config_acs=000@pci:0:0 from the kernel command line" in hint
    assert "firmware" not in hint


def test_a_companion_is_left_out_only_if_its_group_is_another() -> None:
    route = HostUse(AUDIO.address, "default-route", "eth0")
    beside = refusal(with_facts(host_of(GPU, AUDIO), host_uses=(route,)), "0000:04:00.0").hint
    assert beside.startswith("the group must be assigned together: move the route")
    assert "--function-only" not in beside
    apart = with_facts(host_of(GPU, replace(AUDIO, iommu_group=5)), host_uses=(route,))
    assert "leave it out with --function-only" in refusal(apart, "0000:04:00.0").hint


def _of_chipset(address: str, kind: str, driver: str | None = None, **facts: Any) -> PciDevice:
    return replace(
        pci_device(address),
        vendor_id="8086",
        class_code=f"{kind}00",
        name=kind,
        driver=driver,
        bridge_path="pci0000:00",
        iommu_group=14,
        **facts,
    )


LAN = _of_chipset("0000:00:1f.6", "0200", "e1000e")
SOUND = _of_chipset("0000:00:1f.3", "0403", "snd_hda_intel")
SMBUS = _of_chipset("0000:00:1f.4", "0c05", "i801_smbus")
SPI = _of_chipset("0000:00:1f.5", "0c80")


@pytest.mark.parametrize("with_group", [False, True])
def test_what_the_host_needs_of_its_chipset_stays_and_blocks_its_group(*, with_group: bool) -> None:
    with pytest.raises(Refusal) as caught:
        bind(host_of(LAN, SOUND, SMBUS, SPI), "0000:00:1f.6", with_group=with_group)
    assert "also holds 0000:00:1f.4 (0c05) on i801_smbus, which must stay with the host" in str(
        caught.value
    )
    hint = caught.value.hint or ""
    assert "--with-group" not in hint
    assert "to a slot" not in hint
    assert "add-in card or a USB device" in hint


def test_without_a_driver_it_blocks_nothing_and_still_stays() -> None:
    host = host_of(LAN, SOUND, replace(SMBUS, driver=None), SPI)
    assert "--with-group" in refusal(host, "0000:00:1f.6").hint
    both = ["0000:00:1f.3", "0000:00:1f.6"]
    assert moved(bind(host, "0000:00:1f.6", with_group=True)) == both


@pytest.mark.parametrize("driver", [None, "i801_smbus"])
def test_functions_of_the_chipset_are_refused_by_name(driver: str | None) -> None:
    host = host_of(replace(SMBUS, driver=driver, iommu_group=15))
    refused = refusal(host, "0000:00:1f.4", "in-use", "boot-display")
    assert "is the SMBus of the chipset, which must stay with the host" in refused.message


def test_of_what_stays_with_the_host_no_use_is_said_to_be_lifted() -> None:
    use = HostUse(SMBUS.address, "watchdog", "watchdog0")
    refused = refusal(with_facts(host_of(SMBUS), host_uses=(use,)), "0000:00:1f.4")
    assert "SMBus" in refused.message
    assert "watchdog" not in refused.message
    assert "--allow" not in refused.hint


def test_what_another_tool_bound_of_the_chipset_can_be_returned() -> None:
    bound = replace(SMBUS, driver="vfio-pci", driver_override="vfio-pci")
    steps = plan(host_of(LAN, bound), Unbind((bound.address,))).steps
    assert [str(step.device.address) for step in steps if isinstance(step, ReleaseDriver)] == [
        "0000:00:1f.4"
    ]


def test_of_a_slot_of_the_chipset_only_the_named_function_goes() -> None:
    usb = replace(_of_chipset("0000:00:14.0", "0c03", "xhci_hcd"), iommu_group=6)
    wifi = replace(_of_chipset("0000:00:14.3", "0280", "iwlwifi"), iommu_group=7)
    assert moved(bind(host_of(usb, wifi), "0000:00:14.3")) == ["0000:00:14.3"]


@pytest.mark.parametrize(("group", "expected"), [(5, ["05:00.1"]), (6, ["05:00.0", "05:00.1"])])
def test_other_ports_go_if_they_share_the_group(group: int, expected: list[str]) -> None:
    port = replace(NIC, iommu_group=6)
    other = replace(NIC, address=PciAddress.parse("0000:05:00.1"), iommu_group=group)
    assert moved(bind(host_of(port, other), "05:00.1")) == [f"0000:{name}" for name in expected]


@pytest.mark.parametrize("driver", [None, "vfio-pci", "pci-stub"])
def test_members_that_spoil_nothing_stay(driver: str | None) -> None:
    host = host_of(GPU, replace(NIC, iommu_group=4, driver=driver))
    assert moved(bind(host, "0000:04:00.0")) == ["0000:04:00.0"]


def test_only_leaves_companions_unless_the_group_forbids_it() -> None:
    apart = replace(AUDIO, iommu_group=5)
    assert moved(bind(host_of(GPU, apart), "0000:04:00.0", only=True)) == ["0000:04:00.0"]
    with pytest.raises(Refusal, match=r"also holds 0000:04:00\.1") as caught:
        bind(host_of(GPU, AUDIO), "0000:04:00.0", only=True)
    assert "leave out --function-only" in caught.value.hint


def test_bridges_are_refused() -> None:
    assert "is a bridge" in refusal(host_of(BRIDGE), "0000:00:01.0").message


@pytest.mark.parametrize(
    ("vendor", "tables", "command_line", "hint"),
    [
        (
            "GenuineIntel",
            (),
            "quiet",
            "enable VT-d in the firmware setup, add intel_iommu=on to the kernel command line",
        ),
        ("GenuineIntel", ("DMAR",), "quiet", "add intel_iommu=on to the kernel command line"),
        (
            "GenuineIntel",
            ("DMAR",),
            "quiet intel_iommu=off",
            "remove intel_iommu=off from the kernel command line",
        ),
        ("AuthenticAMD", (), "quiet", "enable AMD-Vi (IOMMU) in the firmware setup"),
        ("AuthenticAMD", ("IVRS",), "quiet", "check dmesg for IOMMU"),
        (
            "AuthenticAMD",
            (),
            "quiet intel_iommu=off",
            (
                "enable AMD-Vi (IOMMU) in the firmware setup, "
                "remove intel_iommu=off from the kernel command line"
            ),
        ),
        ("AuthenticAMD", ("IVRS",), "quiet intel_iommu=off", "check dmesg for IOMMU"),
        (
            "AuthenticAMD",
            ("IVRS",),
            "amd_iommu=off",
            "remove amd_iommu=off from the kernel command line",
        ),
        ("HygonGenuine", ("IVRS",), "quiet", "check dmesg for IOMMU"),
        (None, ("IVRS",), "quiet", "check dmesg for IOMMU"),
        (
            None,
            ("IORT",),
            "quiet",
            (
                "enable the SMMU (IOMMU) in the firmware setup, or check dmesg for smmu if it is "
                "enabled"
            ),
        ),
        (None, ("DMAR",), "quiet", "add intel_iommu=on to the kernel command line"),
        (
            None,
            (),
            None,
            (
                "enable VT-d or AMD-Vi (IOMMU) in the firmware setup, "
                "add intel_iommu=on to the kernel command line (on an Intel host)"
            ),
        ),
    ],
)
def test_an_iommu_that_is_off_is_refused_with_what_switches_it_on(
    vendor: str | None, tables: tuple[str, ...], command_line: str | None, hint: str
) -> None:
    host = with_facts(
        host_of(replace(GPU, iommu_group=None, **CONSOLE)),
        cpu_vendor=vendor,
        kernel_command_line=command_line,
        iommu=IommuState(units=(), firmware_tables=tables, has_groups=False),
    )
    refused = refusal(host, "0000:04:00.0")
    assert refused.message.startswith("the IOMMU is off")
    assert "console" not in refused.message
    assert refused.hint == f"{hint}; then reboot and run: vfiomgr groups"


@pytest.mark.parametrize(
    ("known", "hint"),
    [
        ({"architecture": "aarch64"}, "use firmware with the ACPI table IORT"),
        ({"kernel_release": "6.1.0-18-arm64"}, "use firmware with the ACPI table IORT"),
        (
            {"kernel_release": "5.14.0-503.el9.aarch64+64k"},
            "use firmware with the ACPI table IORT",
        ),
        ({"architecture": "ppc64le"}, "enable the IOMMU in the firmware setup"),
    ],
)
def test_other_platforms_are_not_told_of_intels_options(known: dict[str, str], hint: str) -> None:
    host = with_facts(
        host_of(replace(GPU, iommu_group=None)),
        cpu_vendor=None,
        iommu=IommuState(units=(), firmware_tables=(), has_groups=False),
        **known,
    )
    told = refusal(host, "0000:04:00.0").hint
    assert told.startswith(hint)
    assert told.endswith("; then reboot and run: vfiomgr groups")
    assert "intel" not in told


def test_a_device_outside_of_all_groups_is_refused() -> None:
    host = host_of(NIC, replace(GPU, iommu_group=None))
    assert "has no IOMMU group" in refusal(host, "0000:04:00.0").message


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({}, "intel_iommu=on", "move it to a slot that an IOMMU covers"),
        ({"bridge_path": "pci0000:00"}, "intel_iommu=on", "move it to a slot that an IOMMU covers"),
        (
            {"bridge_path": "pci0000:00", "vendor_id": "8086", "class_code": "030000"},
            "intel_iommu=on,igfx_off",
            "remove igfx_off from intel_iommu= on the kernel command line, and reboot",
        ),
        (
            {"bridge_path": "pci0000:00", "vendor_id": "8086", "class_code": "040300"},
            "intel_iommu=on,igfx_off",
            "assign another device: no IOMMU covers",
        ),
    ],
)
def test_how_a_device_gets_a_group_depends_on_what_it_is(
    changes: dict[str, Any], words: str, hint: str
) -> None:
    lone = replace(GPU, iommu_group=None, **changes)
    host = with_facts(host_of(NIC, lone), kernel_command_line=words)
    assert refusal(host, "0000:04:00.0").hint.startswith(hint)


def on_arm(**changes: Any) -> HostSnapshot:
    """A host of Linux 6.12 on ARM, whose GPU has no driver, and so no group."""
    host = host_of(NIC, replace(GPU, iommu_group=None, driver=None))
    smmu = IommuState(("smmu3.0x0000000009050000",), firmware_tables=("IORT",), has_groups=True)
    common = {"cpu_vendor": None, "kernel_release": "6.12.48-arm64", "iommu": smmu}
    return with_facts(host, **{**common, **changes})


def test_on_arm_a_function_gets_its_group_with_its_driver() -> None:
    host, request = on_arm(), Bind((GPU.address,))
    assert moved(bind(host, "0000:04:00.0")) == ["0000:04:00.0"]
    told = "the IOMMU group of 0000:04:00.0: this kernel assigns it to bound functions"
    assert told in not_checked(host, request, plan(host, request))


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel_release": "6.15.0"},
        {"iommu": IommuState(("dmar0",), firmware_tables=("DMAR",), has_groups=True)},
        {"vfio": VfioState(is_noiommu_on=True)},
        {"devices": (NIC, replace(GPU, iommu_group=None, driver="nouveau"))},
    ],
)
def test_elsewhere_it_has_one_or_is_not_isolated(changes: dict[str, Any]) -> None:
    assert "has no IOMMU group" in refusal(on_arm(**changes), "0000:04:00.0").message


def test_active_virtual_functions_are_refused_with_what_they_carry() -> None:
    virtual = replace(
        pci_device("0000:04:00.4"), physical_function=GPU.address, iommu_group=9, driver="nvidia"
    )
    host = host_of(replace(GPU, virtual_functions=(virtual.address,)), virtual)
    assert "1 active virtual function" in refusal(host, "0000:04:00.0").message
    vgpu = Vgpu("u", "mdev", "0000:04:00.4", "nvidia-1", None, None, 7, None, None)
    carrying = with_facts(host, vgpus=(vgpu,))
    assert "with 1 vGPU" in refusal(carrying, "0000:04:00.0").message
    assert "has 1 active vGPU: u" in refusal(carrying, "0000:04:00.4").message
    assert moved(bind(host, "0000:04:00.4")) == ["0000:04:00.4"]


def test_virtual_functions_of_gim_are_removed_with_its_module() -> None:
    virtual = replace(pci_device("0000:04:00.4"), physical_function=GPU.address, iommu_group=9)
    physical = replace(GPU, virtual_functions=(virtual.address,), driver="nvidia")
    hints = {
        driver: refusal(host_of(replace(physical, driver=driver), virtual), "0000:04:00.0").hint
        for driver in ("nvidia", "gim")
    }
    assert "remove the virtual functions: vfiomgr sriov set 0000:04:00.0 0; or" in hints["nvidia"]
    assert "remove the virtual functions: modprobe -r gim (removes those of all" in hints["gim"]
    assert "sriov set" not in hints["gim"]


def allowable() -> list[tuple[Override, HostSnapshot, str]]:
    console = replace(GPU, **CONSOLE)
    drawn = replace(GPU, nodes=("/dev/dri/card1",))
    user = DeviceUser("/dev/dri/card1", 812, "gnome-shell")
    disk = HostUse(GPU.address, "mounted-disk", "/dev/sda1 on /srv")
    route = HostUse(GPU.address, "default-route", "eth0")
    network = HostUse(GPU.address, "network", "interface eth1: part of br0")
    return [
        (
            "in-use",
            with_facts(host_of(GPU), host_uses=(network,)),
            "network: interface eth1: part of",
        ),
        ("boot-display", host_of(console), "the console's display"),
        (
            "in-use",
            with_facts(host_of(drawn), users=(user,)),
            r"in use by: gnome-shell \(PID 812\)",
        ),
        ("mounted-disk", with_facts(host_of(GPU), host_uses=(disk,)), "/dev/sda1 on /srv"),
        ("default-route", with_facts(host_of(GPU), host_uses=(route,)), "interface eth0"),
        ("vgpu-function", vgpu_function("mdev"), "virtual function for nvidia vGPUs"),
    ]


@pytest.mark.parametrize(
    ("use", "first"),
    [
        (HostUse(GPU.address, "mounted-disk", "/dev/sda1 on /m", "umount /m"), "umount /m"),
        (HostUse(GPU.address, "mounted-disk", "/dev/sda1 as swap"), "unmount it"),
        (
            HostUse(GPU.address, "network", "interface eth1: x", "ip link set eth1 down"),
            "ip link set eth1 down",
        ),
    ],
)
def test_a_use_of_the_host_is_refused_with_the_command_that_ends_it(
    use: HostUse, first: str
) -> None:
    hint = refusal(with_facts(host_of(GPU), host_uses=(use,)), "0000:04:00.0").hint
    assert hint.startswith(f"{first}, or pass --allow ")


def test_the_root_file_system_has_no_remedy_but_another_disk() -> None:
    root = HostUse(GPU.address, "mounted-disk", "/dev/sda1 on /")
    refused = refusal(with_facts(host_of(GPU), host_uses=(root,)), "0000:04:00.0")
    assert refused.hint == "use another disk controller for the guest"
    allowed = bind(
        with_facts(host_of(GPU), host_uses=(root,)),
        "0000:04:00.0",
        allow=frozenset({"mounted-disk"}),
    )
    assert allowed


def test_what_the_host_uses_is_told_although_the_iommu_is_off() -> None:
    disk = HostUse(GPU.address, "mounted-disk", "/dev/sda1 on /srv")
    off = IommuState((), (), has_groups=False)
    alone = replace(GPU, iommu_group=None)
    both = refusal(with_facts(host_of(alone), host_uses=(disk,), iommu=off), "0000:04:00.0")
    assert [one.rule for one in diagnostics_of(both)] == ["iommu", "mounted-disk"]
    one = refusal(with_facts(host_of(alone), host_uses=(), iommu=off), "0000:04:00.0")
    assert [each.rule for each in diagnostics_of(one)] == ["iommu"]


def vgpu_function(family: Family) -> HostSnapshot:
    """A virtual function at the place of the GPU, which carries nothing yet."""
    virtual = replace(GPU, physical_function=PciAddress(0, 3, 0, 0))
    parent = VgpuParent(str(GPU.address), "/sys/x", family, "nvidia", "0000:03:00.0", (), ())
    return with_facts(host_of(virtual), vgpu_parents=(parent,))


@pytest.mark.parametrize(("family", "given"), [("mdev", "UUID"), ("vendor-vfio", "0000:04:00.0")])
def test_a_function_that_could_be_a_vgpu_is_made_one(family: Family, given: str) -> None:
    hint = refusal(vgpu_function(family), "0000:04:00.0").hint
    first = "vfiomgr vgpu create --parent 0000:04:00.0 --type TYPE, then vfiomgr libvirt hostdev"
    assert hint.startswith(f"{first} {given} or vfiomgr qemu args {given}; or pass --allow vgpu-")


def test_functions_that_go_whole_and_gpus_with_types_are_bound() -> None:
    assert moved(bind(vgpu_function("sriov-vf"), "0000:04:00.0")) == ["0000:04:00.0"]
    whole = with_facts(vgpu_function("mdev"), devices=(GPU,))
    assert moved(bind(whole, "0000:04:00.0")) == ["0000:04:00.0"]


@pytest.mark.parametrize(
    ("family", "uuid", "reason", "remedy"),
    [
        (
            "mdev",
            "u",
            "has the active vGPU u",
            "assign the vGPU: vfiomgr libvirt hostdev u or vfiomgr qemu args u;",
        ),
        (
            "vendor-vfio",
            None,
            "is an active vGPU and must stay on nvidia",
            "assign the vGPU: vfiomgr libvirt hostdev 0",
        ),
    ],
)
def test_the_vgpu_of_a_function_is_given_not_the_function(
    family: Family, uuid: str | None, reason: str, remedy: str
) -> None:
    vgpu = Vgpu(uuid, family, "0000:04:00.0", "1", None, None, 4, None, None)
    refused = refusal(with_facts(vgpu_function(family), vgpus=(vgpu,)), "0000:04:00.0")
    assert reason in refused.message
    assert refused.hint.startswith(remedy)
    assert "--allow" not in refused.hint
    (found,) = diagnostics_of(refused)
    assert [str(each).count("vfiomgr ") for each in found.remedies] == [1, 1, 1]


def test_a_gpu_with_such_functions_is_no_reason_to_bind_one() -> None:
    host = vgpu_function("mdev")
    physical = replace(
        GPU, address=PciAddress(0, 3, 0, 0), virtual_functions=(GPU.address,), iommu_group=3
    )
    assert "or create a vGPU on one: vfiomgr vgpu create --parent 0000:03:00.0" in (
        refusal(with_facts(host, devices=(physical, *host.devices)), "0000:03:00.0").hint
    )


@pytest.mark.parametrize(("allowance", "host", "reason"), allowable())
def test_a_guard_is_overridden_by_its_own_flag_alone(
    allowance: Override, host: HostSnapshot, reason: str
) -> None:
    others = [other for other, _, _ in allowable() if other != allowance]
    refused = refusal(host, "0000:04:00.0", *others)
    assert refused.message
    with pytest.raises(Refusal, match=reason):
        bind(host, "0000:04:00.0")
    assert f"--allow {allowance}" in refused.hint
    assert moved(bind(host, "0000:04:00.0", allow=frozenset({allowance}))) == ["0000:04:00.0"]


def test_all_obstacles_are_named_at_once() -> None:
    host = host_of(
        replace(GPU, **CONSOLE),
        replace(NIC, iommu_group=4),
    )
    refused = refusal(host, "0000:04:00.0")
    assert "console" in refused.message
    assert "also holds" in refused.message


def test_only_vfio_drivers_hand_devices_to_guests() -> None:
    for driver in ("nvidia", "vfio", "vfio-pci-core"):
        with pytest.raises(UsageError, match=f"{driver} is not a VFIO driver"):
            bind(host_of(GPU), "0000:04:00.0", driver=driver)
    assert moved(bind(host_of(GPU), "0000:04:00.0", driver="nvgrace-gpu-vfio-pci"))


LISTED = with_facts(
    host_of(GPU), vfio_modules=("mlx5_vfio_pci", "vfio", "vfio_pci", "vfio_pci_core")
)


@pytest.mark.parametrize("driver", ["vfio-pci", "vfio_pci", "mlx5_vfio_pci", "mlx5-vfio-pci"])
def test_a_driver_that_the_kernel_has_or_can_load_is_taken(driver: str) -> None:
    assert moved(bind(LISTED, "0000:04:00.0", driver=driver))
    registered = with_facts(LISTED, vfio_modules=(), pci_drivers=(driver,))
    assert moved(bind(registered, "0000:04:00.0", driver=driver))


@pytest.mark.parametrize(
    ("driver", "near"),
    [
        ("xvfiox", "vfio-pci"),
        ("vfio-pcie", "vfio-pci"),
        ("mlx_vfio_pci", "mlx5_vfio_pci"),
        ("nvgrace_vfio", "nvgrace_gpu_vfio_pci"),
    ],
)
def test_a_driver_that_the_kernel_has_not_is_refused_with_the_nearest_names(
    driver: str, near: str
) -> None:
    variant = VfioVariant("vfio_pci:v000010DEd*", "nvgrace_gpu_vfio_pci", None)
    host = with_facts(LISTED, variants=(variant,))
    with pytest.raises(UsageError, match=f"driver not found: {driver} ") as caught:
        bind(host, "0000:04:00.0", driver=driver)
    assert near in caught.value.hint
    assert moved(bind(with_facts(host, vfio_modules=None), "0000:04:00.0", driver=driver))


@pytest.mark.parametrize("driver", ["../evil", "", "a/b", ".hidden"])
def test_a_driver_has_a_name(driver: str) -> None:
    with pytest.raises(UsageError, match="invalid driver name"):
        bind(host_of(GPU), "0000:04:00.0", driver=driver)


@pytest.mark.parametrize("device", [GPU, AUDIO])
def test_a_plan_is_its_own_undoing_backwards(device: PciDevice) -> None:
    for step in bind(host_of(GPU, AUDIO), str(device.address)):
        inverse = step.inverse()
        if inverse is not None:
            assert inverse.inverse() == step


def test_a_bridge_on_a_driver_spoils_the_group_with_no_way_round() -> None:
    isa = replace(BRIDGE, class_code="060100", header_type=0, driver="lpc_ich", iommu_group=4)
    for with_group in (False, True):
        with pytest.raises(Refusal, match=r"group 4 also holds 0000:00:01\.0") as caught:
            bind(host_of(GPU, isa), "0000:04:00.0", with_group=with_group)
        assert "--with-group" not in caught.value.hint


def test_a_vendor_vfio_function_that_a_guest_holds_stays() -> None:
    held = replace(GPU, driver="nvidia", vfio_device="vfio0")
    for node in ("/dev/vfio/4", "/dev/vfio/devices/vfio0"):
        user = DeviceUser(node, 4711, "qemu-system-x86")
        refused = refusal(with_facts(host_of(held), users=(user,)), "0000:04:00.0")
        assert "in use by: qemu-system-x86 (PID 4711)" in refused.message


def test_a_group_node_of_another_member_does_not_hold_a_native_function() -> None:
    user = DeviceUser("/dev/vfio/4", 4711, "qemu-system-x86")
    assert moved(bind(with_facts(host_of(GPU), users=(user,)), "0000:04:00.0")) == ["0000:04:00.0"]


@pytest.mark.parametrize("given", [{"pod": "ml/train-0/main"}, {"claim": "ml/gpu"}, {"ago": 2.4}])
@pytest.mark.parametrize("driver", [None, "mlx5_core"])
def test_a_function_of_a_pod_that_left_its_vfio_driver_is_bound_again(
    given: dict[str, Any], driver: str | None
) -> None:
    agent = agent_of("0000:05:00.0", **given)
    lost = with_facts(host_of(replace(MLX5, driver=driver)), agent=agent)
    assert moved(bind(lost, "0000:05:00.0")) == ["0000:05:00.0"]
    held = with_facts(host_of(replace(MLX5, driver="vfio-pci")), agent=agent, variants=(VARIANT,))
    with pytest.raises(Refusal, match=r"belongs to|was given to"):
        bind(held, "0000:05:00.0", driver="mlx5_vfio_pci")


def test_a_silent_device_is_refused() -> None:
    silent = replace(GPU, is_responsive=False, header_type=None)
    assert "does not answer" in refusal(host_of(silent), "0000:04:00.0").message


MLX5 = replace(NIC, vendor_id="15b3", modalias="pci:v000015B3d0000101Esv*sd*bc02sc00i00")
VARIANT = VfioVariant("vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*", "mlx5_vfio_pci", None)


def test_the_variant_that_fits_is_loaded_and_taken() -> None:
    host = with_facts(host_of(GPU, MLX5), variants=(VARIANT,))
    steps = bind(host, "0000:04:00.0", "0000:05:00.0")
    assert steps[0] == LoadModule("mlx5_vfio_pci", "mlx5_vfio_pci")
    drivers = [step.after.driver for step in steps if isinstance(step, ChangeDriver)]
    assert drivers == ["vfio-pci", "mlx5_vfio_pci"]


def test_driver_overrides_the_variant() -> None:
    host = with_facts(host_of(MLX5), variants=(VARIANT,))
    steps = bind(host, "0000:05:00.0", driver="vfio-pci")
    assert moved(steps) == ["0000:05:00.0"]
    assert not any(isinstance(step, LoadModule) for step in steps)


def test_what_is_on_a_vfio_driver_stays_there_unless_another_is_asked_for() -> None:
    held = replace(MLX5, driver="vfio-pci", driver_override="vfio-pci")
    host = with_facts(host_of(held), variants=(VARIANT,))
    assert bind(host, "0000:05:00.0") == ()
    assert moved(bind(host, "0000:05:00.0", driver="mlx5_vfio_pci")) == ["0000:05:00.0"]


def test_a_function_that_is_stuck_in_the_kernel_is_refused_and_its_holder_named() -> None:
    stuck = replace(GPU, stuck="nvidia -> vfio-pci (PID 77)", nodes=("/dev/nvidia0",))
    host = with_facts(host_of(stuck), users=(DeviceUser("/dev/nvidia0", 4711, "Xorg"),))
    refused = refusal(host, "0000:04:00.0", "in-use")
    assert "nvidia -> vfio-pci (PID 77) has not returned, in use by: Xorg (PID 4711)" in str(
        refused
    )
    assert "vfiomgr recover" in refused.hint


def test_a_rollback_is_refused_for_data_of_the_host_and_not_for_persistence_mode() -> None:
    mode = HostUse(GPU.address, "persistence-mode", "nvidia-smi shows it")
    disk = HostUse(GPU.address, "mounted-disk", "/dev/sda1 is mounted on /mnt")
    host = with_facts(host_of(GPU), host_uses=(mode, disk))
    assert [d.rule for d in guards.undoing(host, [GPU])] == ["mounted-disk"]
    assert [d.rule for d in guards.kept_initialised(host, GPU)] == ["persistence-mode"]


def test_persistence_mode_is_refused_and_can_be_overridden() -> None:
    host = with_facts(
        host_of(GPU), host_uses=(HostUse(GPU.address, "persistence-mode", "nvidia-smi shows it"),)
    )
    refused = refusal(host, "0000:04:00.0")
    assert "is in persistence mode" in refused.message
    assert "nvidia-smi -i 0000:04:00.0 -pm 0" in refused.hint
    assert bind(host, "0000:04:00.0", allow=frozenset({"in-use"}))


def test_a_card_that_a_desktop_shows_is_bound_at_the_next_boot_and_not_touched_now() -> None:
    shown = replace(GPU, nodes=("/dev/dri/card0",))
    user = DeviceUser("/dev/dri/card0", 4711, "gnome-shell")
    host = with_facts(host_of(shown, AUDIO), users=(user,), has_systemd=True)
    command = "bind it at the next boot: vfiomgr bind --at-boot 0000:04:00.0"
    assert command in refusal(host, "0000:04:00.0").hint
    assert f"{command} --owner qemu" in plan_refused(host, owner=NodeOwner("qemu", 64055)).hint

    request = Bind((GPU.address,), persist=True, at_boot=True, program="/usr/bin/vfiomgr")
    made = plan(host, request)
    texts = [step for step in made.steps if isinstance(step, ReplaceFile)]
    written = [step.path for step in texts]
    assert written == [SWEPT, *map(rule_file, (GPU.address, AUDIO.address)), UNIT]
    assert len(made.steps) == len(written)
    assert "0000:04:00.0 stays on nvidia until reboot" in made.notes
    assert f"also binding at the next boot: {AUDIO} (same slot)" in made.notes
    assert not [note for note in made.notes if "also binding 0000" in note]
    assert made.resolves == ()

    files = tuple(TextFile(s.path, s.after or "") for s in texts)
    kept = with_facts(host, files=files)
    assert plan(kept, request).is_empty
    undone = plan(kept, Unbind((GPU.address,)))
    assert [n for n in undone.notes if n.startswith("rules bind ") and "again" not in n]
    assert "--at-boot" not in refusal(kept, "0000:04:00.0").hint


def plan_refused(host: HostSnapshot, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        bind(host, "0000:04:00.0", **options)
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [{"gpu": CONSOLE}, {"uses": "mounted-disk"}, {"uses": "network"}, {"pod": "ml/train"}],
    ids=["console", "disk", "network", "pod"],
)
def test_what_must_not_be_bound_at_boot_is_refused_and_not_offered(changes: Any) -> None:
    shown = replace(GPU, nodes=("/dev/dri/card0",), **changes.get("gpu", {}))
    host = with_facts(host_of(shown), users=(DeviceUser("/dev/dri/card0", 4711, "Xorg"),))
    if "uses" in changes:
        host = with_facts(host, host_uses=(HostUse(GPU.address, changes["uses"], "it"),))
    if "pod" in changes:
        host = with_facts(host, agent=agent_of(str(GPU.address), pod=changes["pod"]))
    refused = refusal(host, "0000:04:00.0")
    assert "in use by: Xorg" in refused.message
    assert "--at-boot" not in refused.hint
    later = plan_refused(host, persist=True, at_boot=True)
    assert ("Xorg" in later.message) is ("pod" in changes)


def test_a_disk_that_a_process_has_open_is_refused() -> None:
    user = DeviceUser("/dev/nvme0n1", 7, "qemu-system-x86", None, (GPU.address,))
    host = with_facts(host_of(GPU), users=(user,))
    assert "is in use by: qemu-system-x86 (PID 7)" in refusal(host, "0000:04:00.0").message
    assert bind(host, "0000:04:00.0", allow=frozenset({"in-use"}))


QAT = replace(NIC, vendor_id="8086", device_id="37c9", modalias="pci:v00008086d000037C9sv*")


def test_what_vfio_pci_denies_is_refused_unless_a_variant_or_a_parameter_allows_it() -> None:
    refused = refusal(host_of(QAT), "0000:05:00.0")
    assert "vfio-pci's denylist" in refused.message
    assert "disable_denylist=1" in refused.hint
    assert bind(with_facts(host_of(QAT), vfio=VfioState(is_denylist_off=True)), "0000:05:00.0")
    variant = VfioVariant("vfio_pci:v00008086d000037C9sv*", "qat_vfio_pci", None)
    assert bind(with_facts(host_of(QAT), variants=(variant,)), "0000:05:00.0")
    assert not replace(QAT, device_id="10d3").is_denied


def test_no_iommu_mode_is_no_way_out() -> None:
    bare = replace(GPU, iommu_group=None)
    host = with_facts(
        host_of(bare),
        iommu=IommuState(units=(), firmware_tables=(), has_groups=False),
        vfio=VfioState(is_noiommu_on=True),
    )
    assert "no-IOMMU mode is on, which lets" in refusal(host, "0000:04:00.0").message


def test_a_kernel_without_vfio_pci_keeps_its_host_drivers() -> None:
    lacking = with_facts(host_of(GPU), vfio_modules=("vfio",), pci_drivers=("nvidia",))
    assert [d.rule for d in diagnostics_of(refusal(lacking, "0000:04:00.0"))] == ["vfio-pci"]
    for facts in (
        {"vfio_modules": ("vfio", "vfio_pci")},
        {"vfio_modules": None},  # no modules.dep on this host
        {"pci_drivers": ("nvidia", "vfio-pci")},  # built in
        {"pci_drivers": ()},  # not in the recording
    ):
        assert moved(bind(with_facts(lacking, **facts), "0000:04:00.0"))
    variant = VfioVariant("vfio_pci:v000010DEd*", "nvgrace_gpu_vfio_pci", None)
    suited = replace(
        lacking, devices=(replace(GPU, modalias="pci:v000010DEd00002342"),), variants=(variant,)
    )
    assert moved(bind(suited, "0000:04:00.0"))
    bound = replace(lacking, devices=(replace(GPU, driver="vfio-pci"),))
    assert not moved(bind(bound, "0000:04:00.0"))
    for groups, rule in ((True, "vfio-pci"), (False, "iommu")):
        state = IommuState((), (), has_groups=groups)
        xen = with_facts(lacking, runs_on="xen", iommu=state)
        assert [d.rule for d in diagnostics_of(refusal(xen, "0000:04:00.0"))] == [rule]
