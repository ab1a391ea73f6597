from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import InvalidDocument, Refusal, UsageError
from vfiomgr.layout.compare import plan_layout
from vfiomgr.layout.document import read_layouts, render_layouts
from vfiomgr.layout.imports import Import, import_layouts
from vfiomgr.layout.model import PassthroughRule
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.layout.vgpu_device_manager import identifier_of, read_vgpu_configs
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.layout.imports import Boards
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

A40 = "0x223510DE"
UUIDS = tuple(f"f715f63c-0d00-4007-9c5a-b07b0c6c05d{n}" for n in "abcdef")


def gpu(address: str, device_id: str = "2235", **changes: object) -> PciDevice:
    return replace(pci_device(address), device_id=device_id, **changes)


HOST = host_of(
    gpu("0000:41:00.0", iommu_group=41),
    gpu("0000:42:00.0", "20b5", iommu_group=42),
    gpu("0000:43:00.0", iommu_group=43),
    gpu("0000:43:00.1", "22ba", class_code="040300", iommu_group=44),
)


def configs(text: str, host: HostSnapshot | None = HOST) -> Import:
    found = import_layouts(host, read_vgpu_configs(f"version: v1\nvgpu-configs:\n{text}", "c.yaml"))
    return replace(found, left=[left for left in found.left if "modprobe.d" not in left])


def yaml_of(found: Import) -> str:
    """The file without its head; what is written is read, too."""
    assert found.file is not None
    text = render_layouts(found.file)
    assert read_layouts(text, "x") == found.file
    return text.removeprefix("version: vfiomgr/v1\nlayouts:\n")


def test_a_count_is_one_for_each_gpu() -> None:
    found = configs("  A40-4Q:\n  - devices: all\n    vgpu-devices: {A40-4Q: 12}\n")
    assert yaml_of(found) == (
        "  A40-4Q:\n"
        "    devices:\n"
        "      - select:\n"
        "          id: 10de:*\n"
        "          class:\n"
        '            - "0300"\n'
        '            - "0302"\n'
        "        state: vgpu\n"
        "        vgpus:\n"
        "          - type: A40-4Q\n"
        "            per_gpu: 12\n"
    )
    assert found.left == []


def test_a_filter_is_device_and_vendor_and_may_mean_nothing() -> None:
    found = configs(
        f"  a:\n  - {{device-filter: [{A40!r}, '0x20B510DE'], devices: all, vgpu-devices: {{}}}}\n"
    )
    (rule,) = found.layouts["a"].devices
    assert rule.select.id == ("10de:2235", "10de:20b5")
    assert rule.at_least == 0


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        (A40, "10de:2235"),
        ("573903070", "10de:2235"),
        ("A40", None),
        ("0x1223510DE", None),
        ("0x10DE", "10de:0000"),
    ],
)
def test_identifiers_of_filters(text: str, identifier: str | None) -> None:
    assert identifier_of(text) == identifier


def test_a_filter_that_is_no_number_means_no_gpu() -> None:
    found = configs("  a:\n  - {device-filter: A40, devices: all, vgpu-devices: {A40-4Q: 1}}\n")
    assert found.layouts["a"].devices == ()
    assert found.left == [
        (
            "vgpu-device-manager, a, entry 1: "
            "the device-filter 'A40' is not a number and matches no GPU"
        )
    ]


def test_indices_count_all_gpus_of_the_node_by_address() -> None:
    found = configs(
        f"  a:\n  - {{device-filter: {A40!r}, devices: [2, 1, 7], vgpu-devices: {{A40-4Q: 1}}}}\n"
    )
    (rule,) = found.layouts["a"].devices
    assert list(map(str, rule.select.address)) == ["0000:43:00.0"]
    assert [left.partition(": ")[2] for left in found.left] == [
        "GPU 2 is 0000:43:00.0 on this host; other hosts differ",
        (
            "GPU 1, 0000:42:00.0 (NVIDIA Corporation GA107GL [A2 / A16]), "
            "does not match its device-filter"
        ),
        "GPU 7 not found: this host has 3 NVIDIA GPUs",
    ]


def test_indices_mean_nothing_without_a_host() -> None:
    found = configs("  a:\n  - {devices: [0], vgpu-devices: {A40-4Q: 1}}\n", None)
    assert found.layouts["a"].devices == ()
    assert "import it there" in found.left[0]


def test_of_entries_about_one_gpu_the_last_holds() -> None:
    found = configs(
        "  a:\n"
        "  - {devices: [0], vgpu-devices: {A40-1Q: 1}}\n"
        "  - {devices: [0, 1], vgpu-devices: {A40-2Q: 1}}\n"
        "  b:\n"
        "  - {devices: [0], vgpu-devices: {A40-1Q: 1}}\n"
        "  - {devices: all, vgpu-devices: {A40-4Q: 1}}\n"
        "  overlap:\n"
        "  - {devices: [0, 1], vgpu-devices: {A40-1Q: 1}}\n"
        "  - {devices: [1, 2], vgpu-devices: {A40-2Q: 1}}\n"
        "  c:\n"
        "  - {devices: all, vgpu-devices: {A40-4Q: 1}}\n"
        f"  - {{device-filter: {A40!r}, devices: all, vgpu-devices: {{A40-8Q: 1}}}}\n"
    )
    types = {
        name: [wanted.type for rule in layout.devices for wanted in rule.vgpus]  # type: ignore[union-attr]
        for name, layout in found.layouts.items()
    }
    assert types == {
        "a": ["A40-2Q"],
        "b": ["A40-4Q"],
        "overlap": ["A40-2Q", "A40-1Q"],
        "c": ["A40-8Q", "A40-4Q"],
    }
    assert [len(r.select.address) for r in found.layouts["overlap"].devices] == [2, 1]
    assert "vgpu-device-manager, b, entry 1: a later entry covers all of its GPUs, so it never" in (
        "".join(found.left)
    )
    yaml_of(found)


def test_what_types_need_besides_is_told() -> None:
    found = configs(
        "  mig:\n  - {devices: all, vgpu-devices: {A100-1-5CME: 7}}\n"
        "  sizes:\n  - {devices: all, vgpu-devices: {A40-4Q: 1, A40-8Q: 1}}\n"
    )
    assert ["mig: true" in found.left[0], "heterogeneous: true" in found.left[1]] == [True, True]


def test_a_console_on_a_gpu_is_told() -> None:
    host = host_of(gpu("0000:41:00.0", is_boot_display=True))
    found = configs("  a:\n  - {devices: all, vgpu-devices: {A40-4Q: 1}}\n", host)
    assert "0000:41:00.0 is the console's display" in found.left[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version: v2\nvgpu-configs: {}", "unsupported version v2"),
        ("- a", "the file: not a mapping"),
        ("version: v1\nvgpu-configs: {}", "vgpu-configs is empty"),
        ("version: v1\nvgpu-configs: {a: []}", "a: not a list of entries"),
        ("version: v1\nvgpu-configs: {a: [A40-4Q]}", "the format before v1"),
        ("version: v1\nvgpu-configs: {a: [{devices: all}]}", "vgpu-devices is missing"),
        (
            "version: v1\nvgpu-configs: {a: [{devices: some, vgpu-devices: {}}]}",
            "expected all or a list",
        ),
        (
            "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {A: 0}}]}",
            "0 is not a number",
        ),
        ("version: v1\nvgpu-configs: {a: [{devices: all, vgpus: {}}]}", "unexpected keys: vgpus"),
        ("version: v1\nconfigs: {}", "unexpected keys: configs"),
        (
            "version: v1\nvgpu-configs: {a: [{device-filter: 5, devices: all, vgpu-devices: {}}]}",
            "device-filter is 5",
        ),
    ],
)
def test_what_vgpu_device_manager_would_not_take_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidDocument, match=why):
        read_vgpu_configs(text, "c.yaml")


def _of_host(host: HostSnapshot, boards: Boards = "all") -> Import:
    found = import_layouts(host, None, boards)
    return replace(found, left=[left for left in found.left if "modprobe.d" not in left])


def _driverctl(**drivers: str) -> tuple[TextFile, ...]:
    """Entries by address, e.g. `x41_00_0`."""
    return tuple(
        TextFile("/etc/driverctl.d/0000:{}:{}.{}".format(*name[1:].split("_")), f"{driver}\n")
        for name, driver in drivers.items()
    )


def test_driverctl_moves_single_functions_and_so_does_the_layout() -> None:
    files = _driverctl(
        x41_00_0="vfio-pci", x42_00_0="nvidia", x43_00_0="vfio-pci", x99_00_0="vfio-pci"
    )
    found = _of_host(with_facts(HOST, files=(*files, TextFile("/etc/driverctl.d/README", "x"))))
    assert yaml_of(found) == (
        "  imported:\n"
        "    devices:\n"
        "      - select:\n"
        '          address: "0000:41:00.0"\n'
        "        state: passthrough\n"
        "        driver: vfio-pci\n"
        "      - select:\n"
        '          address: "0000:43:00.0"\n'
        "        state: passthrough\n"
        "        driver: vfio-pci\n"
        "        only: true\n"
        "      - select:\n"
        '          address: "0000:99:00.0"\n'
        "        state: passthrough\n"
        "        at_least: 0\n"
        "        driver: vfio-pci\n"
    )
    assert [left.partition(":")[0] for left in found.left] == [
        "driverctl, /etc/driverctl.d/0000",
        "driverctl, /etc/driverctl.d/README",
        "driverctl",
        "driverctl",
    ]
    assert "nvidia is not a VFIO driver" in found.left[0]
    assert "0000:43:00.1 of the same slot stays with the host" in found.left[2]


def test_a_slot_of_which_driverctl_has_all_goes_whole() -> None:
    files = _driverctl(x43_00_0="vfio-pci", x43_00_1="vfio-pci")
    found = _of_host(with_facts(HOST, files=files))
    (rule,) = found.layouts["imported"].devices
    assert list(map(str, rule.select.address)) == ["0000:43:00.0", "0000:43:00.1"]
    assert found.left == []


@pytest.mark.parametrize(
    ("words", "ids", "left"),
    [
        ("vfio-pci.ids=10de:2235,10de:22ba", ("10de:2235", "10de:22ba"), []),
        ("vfio_pci.ids=0x10DE:2235", ("10de:2235",), ["0000:43:00.1 of the same slot"]),
        ("vfio-pci.ids=10de:ffffffff", ("10de:*",), []),
        ("vfio-pci.ids=10de:2235:10df", (), ["no device matches now"]),
        ("vfio-pci.ids=10de:20b5:ffffffff:ffffffff:0:0", ("10de:20b5",), []),
        ("vfio-pci.ids=ffffffff:2235", (), ["it matches every vendor"]),
        ("vfio-pci.ids=10de", (), ["not vendor:device"]),
        ("vfio-pci.ids=1002:66af", ("1002:66af",), ["no other device has 1002:66af now"]),
    ],
)
def test_identifiers_of_the_command_line(words: str, ids: tuple[str, ...], left: list[str]) -> None:
    found = _of_host(with_facts(HOST, kernel_command_line=f"quiet {words} iommu=pt"))
    rules = found.layouts["imported"].devices if ids else ()
    assert [rule.select.id for rule in rules] == ([ids] if ids else [])
    assert [rule.at_least for rule in rules] == ([0 if "1002" in words else 1] if ids else [])
    assert len(found.left) == len(left)
    assert all(part in told for part, told in zip(left, found.left, strict=True))


def _slot_of_four(*drivers: str | None, group: int | None = 43) -> HostSnapshot:
    """A card with graphics, audio, USB and UCSI, and these drivers."""
    kinds = (("1e84", "030000"), ("10f8", "040300"), ("1ad8", "0c0330"), ("1ad9", "0c8000"))
    return host_of(
        *(
            gpu(
                f"0000:43:00.{number}",
                device_id,
                class_code=class_code,
                driver=driver,
                iommu_group=group or 50 + number,
            )
            for number, ((device_id, class_code), driver) in enumerate(
                zip(kinds, drivers, strict=True)
            )
        )
    )


FOUR = ("nvidia", "snd_hda_intel", "xhci_hcd", "nvidia-gpu")
TWO_IDS = "vfio-pci.ids=10de:1e84,10de:10f8"


@pytest.mark.parametrize(
    ("host", "only", "told"),
    [
        (
            _slot_of_four(*FOUR),
            False,
            "gets 0000:43:00.2, 0000:43:00.3 of the same slot: IOMMU group 43 cannot",
        ),
        (_slot_of_four(*FOUR, group=None), True, "stays with the host (`only: true`)"),
        (_slot_of_four("vfio-pci", "vfio-pci", None, None), True, "stays with the host"),
        (_slot_of_four("vfio-pci", "vfio-pci", None, "pci-stub"), True, "stays with the host"),
    ],
)
def test_two_identifiers_of_a_slot_of_four_make_a_layout_that_can_be_applied(
    host: HostSnapshot, told: str, *, only: bool
) -> None:
    found = _of_host(with_facts(host, kernel_command_line=TWO_IDS))
    (rule,) = found.layouts["imported"].devices
    assert isinstance(rule, PassthroughRule)
    assert rule.only is only
    (left,) = found.left
    assert told in left
    assert found.diagnostics == ()
    plan_layout(host, ApplyLayout("imported", found.layouts["imported"]))


def test_driverctl_of_a_part_of_a_group_makes_a_layout_that_can_be_applied() -> None:
    files = _driverctl(x43_00_0="vfio-pci", x43_00_1="vfio-pci")
    found = _of_host(with_facts(_slot_of_four(*FOUR), files=files))
    (rule,) = found.layouts["imported"].devices
    assert isinstance(rule, PassthroughRule)
    assert not rule.only
    assert found.diagnostics == ()


def test_slots_that_need_different_rules_get_them() -> None:
    whole = _slot_of_four(*FOUR).devices
    alone = [
        replace(d, address=moved(d.address, bus=0x44), iommu_group=60 + d.address.function)
        for d in whole
    ]
    host = with_facts(host_of(*whole, *alone), kernel_command_line=TWO_IDS)
    found = _of_host(host)
    rules = [r for r in found.layouts["imported"].devices if isinstance(r, PassthroughRule)]
    assert [([str(a) for a in r.select.address], r.only) for r in rules] == [
        (["0000:43:00.0", "0000:43:00.1"], False),
        (["0000:44:00.0", "0000:44:00.1"], True),
    ]
    assert found.diagnostics == ()


def test_what_keeps_the_layout_from_being_applied_is_said() -> None:
    host = _slot_of_four(*FOUR)
    nic = gpu("0000:44:00.0", "10d3", class_code="020000", driver="e1000e", iommu_group=43)
    found = _of_host(with_facts(host_of(*host.devices, nic), kernel_command_line=TWO_IDS))
    (diagnostic,) = found.diagnostics
    assert diagnostic.summary.startswith("IOMMU group 43 also holds 0000:44:00.0")


TWINS = (
    gpu("0000:41:00.0", iommu_group=41, subsystem_id="1458:1111", driver="vfio-pci"),
    gpu("0000:42:00.0", iommu_group=42, subsystem_id="1043:2222"),
    gpu("0000:43:00.0", "20b5", iommu_group=43),
)
TWIN_IDS = "vfio-pci.ids=10de:2235,10de:20b5"


def test_boards_that_share_an_id_are_named_and_asked_for() -> None:
    host = with_facts(host_of(*TWINS), kernel_command_line=TWIN_IDS)
    with pytest.raises(Refusal) as caught:
        _of_host(host, frozenset())
    (question,) = caught.value.diagnostics
    for part in (
        "vfio-pci.ids=10de:2235 matches 2 boards",
        "0000:41:00.0 (NVIDIA Corporation GA107GL [A2 / A16]), subsystem 1458:1111, on vfio-pci",
        "0000:42:00.0 (NVIDIA Corporation GA107GL [A2 / A16]), subsystem 1043:2222, on nvidia",
    ):
        assert part in question.summary
    assert "layout import --board 0000:41:00.0 --board 0000:42:00.0;" in question.remedy
    assert question.remedy.endswith("vfiomgr layout import --board all")


@pytest.mark.parametrize(
    ("boards", "addresses"),
    [
        (["0000:42:00.0"], ["0000:42:00.0", "0000:43:00.0"]),
        (["0000:41:00.0"], ["0000:41:00.0", "0000:43:00.0"]),
        (["0000:41:00.1", "0000:42:00.0"], ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0"]),
    ],
)
def test_boards_that_are_named_go_by_address(boards: list[str], addresses: list[str]) -> None:
    host = with_facts(host_of(*TWINS), kernel_command_line=TWIN_IDS)
    found = _of_host(host, frozenset(map(PciAddress.parse, boards)))
    (rule,) = found.layouts["imported"].devices
    assert (list(map(str, rule.select.address)), rule.select.id) == (addresses, ())
    staying = {str(d.address) for d in TWINS} - set(addresses)
    assert [left.split()[1] for left in found.left] == sorted(staying)


def test_all_boards_go_by_their_id_where_that_is_said_or_so_already() -> None:
    host = with_facts(host_of(*TWINS), kernel_command_line=TWIN_IDS)
    (rule,) = _of_host(host, "all").layouts["imported"].devices
    assert rule.select.id == ("10de:2235", "10de:20b5")
    bound = host_of(*(replace(twin, driver="vfio-pci") for twin in TWINS))
    found = _of_host(with_facts(bound, kernel_command_line=TWIN_IDS), frozenset())
    assert [r.select.id for r in found.layouts["imported"].devices] == [rule.select.id]


def test_the_console_and_functions_of_one_slot_are_no_boards_to_ask_for() -> None:
    console = replace(TWINS[0], is_boot_display=True)
    ports = [gpu(f"0000:44:00.{n}", iommu_group=44) for n in range(4)]
    for devices in ((console, TWINS[1]), ports):
        host = with_facts(host_of(*devices), kernel_command_line="vfio-pci.ids=10de:2235")
        assert len(_of_host(host, frozenset()).layouts["imported"].devices) == 1


def test_a_board_that_shares_no_id_is_none_of_the_question() -> None:
    host = with_facts(host_of(*TWINS), kernel_command_line=TWIN_IDS)
    with pytest.raises(
        UsageError, match=r"0000:43:00\.0 is not one of the boards that share"
    ) as caught:
        _of_host(host, frozenset({PciAddress.parse("0000:43:00.0")}))
    assert caught.value.hint == "those are: 0000:41:00.0, 0000:42:00.0"
    alone = with_facts(host_of(TWINS[0]), kernel_command_line=TWIN_IDS)
    with pytest.raises(UsageError, match="is not one of the boards that share") as caught:
        _of_host(alone, frozenset({PciAddress.parse("0000:43:00.0")}))
    assert caught.value.hint == "leave out --board: no ID is shared"


@pytest.mark.parametrize(
    ("entry", "addresses"),
    [
        ("10de:2235:1043", ["0000:42:00.0"]),
        ("10de:2235:1043:2222", ["0000:42:00.0"]),
        ("10de:2235:1043:1111", []),
        ("10de:ffffffff:ffffffff:ffffffff:030000:ffff00", ["0000:43:00.0"]),
    ],
)
def test_what_an_id_cannot_say_goes_by_address(entry: str, addresses: list[str]) -> None:
    devices = (*TWINS[:2], replace(TWINS[2], class_code="030000"))
    host = with_facts(host_of(*devices), kernel_command_line=f"vfio-pci.ids={entry}")
    found = _of_host(host, frozenset())
    rules = found.layouts["imported"].devices if addresses else ()
    assert [list(map(str, rule.select.address)) for rule in rules] == [addresses] * bool(addresses)
    assert (found.file is None) == (not addresses)


def test_odd_identifiers_of_a_recording_are_no_match() -> None:
    odd = replace(TWINS[0], vendor_id="junk", subsystem_id="", class_code="junk")
    classes = "vfio-pci.ids=10de:ffffffff:ffffffff:ffffffff:030200:ffff00"
    host = with_facts(host_of(odd, TWINS[2]), kernel_command_line=classes)
    (rule,) = _of_host(host, frozenset()).layouts["imported"].devices
    assert list(map(str, rule.select.address)) == ["0000:43:00.0"]
    host = with_facts(host_of(replace(TWINS[2], class_code="junk")), kernel_command_line=classes)
    assert _of_host(host, frozenset()).file is None


def test_virtual_functions_are_not_selected_by_an_identifier() -> None:
    function = gpu("0000:43:00.4", "2237", iommu_group=45, physical_function=TWINS[2].address)
    host = host_of(*TWINS, function)
    found = _of_host(with_facts(host, kernel_command_line="vfio-pci.ids=10de:2237"))
    (rule,) = found.layouts["imported"].devices
    assert rule.at_least == 0
    assert "select it with physical_function: 0000:43:00.0" in found.left[0]


def test_identifiers_do_not_select_the_console() -> None:
    host = host_of(gpu("0000:41:00.0", is_boot_display=True), gpu("0000:42:00.0"))
    found = _of_host(with_facts(host, kernel_command_line="vfio-pci.ids=10de:2235"))
    assert ["console's display" in left for left in found.left] == [True]


def _definition(parent: str, uuid: str, text: str = "") -> TextFile:
    body = text or '{"mdev_type": "nvidia-558", "start": "auto", "attrs": []}'
    return TextFile(f"/etc/mdevctl.d/{parent}/{uuid}", body)


def test_definitions_of_mdevctl_become_wishes_of_their_gpu() -> None:
    parameters = (
        '{"mdev_type": "nvidia-558", "start": "auto", "attrs": '
        '[{"nvidia/vgpu_params": "frame_rate_limiter=0, disable_vnc=1"}, {"power/control": "on"}]}'
    )
    manual = '{"mdev_type": "nvidia-558", "start": "manual"}'
    function = gpu("0000:41:00.4", physical_function=HOST.devices[0].address)
    files = (
        _definition("0000:41:00.4", UUIDS[0]),
        _definition("0000:41:00.0", UUIDS[1], parameters),
        _definition("mtty", UUIDS[2], '{"mdev_type": "mtty-2", "start": "auto"}'),
        _definition("0000:41:00.0", UUIDS[3], manual),
        _definition("0000:41:00.0", UUIDS[4], "no JSON"),
        _definition("0000:42:00.0", UUIDS[0]),
    )
    host = with_facts(host_of(*HOST.devices, function), definitions=DefinitionFacts(files=files))
    found = _of_host(host)
    assert yaml_of(found) == (
        "  imported:\n"
        "    devices:\n"
        "      - select:\n"
        '          address: "0000:41:00.0"\n'
        "        state: vgpu\n"
        "        vgpus:\n"
        "          - type: nvidia-558\n"
        "            count: 1\n"
        "            uuids:\n"
        f"              - {UUIDS[0]}\n"
        "          - type: nvidia-558\n"
        "            count: 1\n"
        "            uuids:\n"
        f"              - {UUIDS[1]}\n"
        "            parameters:\n"
        '              frame_rate_limiter: "0"\n'
        '              disable_vnc: "1"\n'
        "      - select:\n"
        "          parent: mtty\n"
        "        state: vgpu\n"
        "        vgpus:\n"
        "          - type: mtty-2\n"
        "            count: 1\n"
        "            uuids:\n"
        f"              - {UUIDS[2]}\n"
    )
    told = "\n".join(found.left)
    for part in (
        f"{UUIDS[3]}: it is started manually",
        f"{UUIDS[4]}: not JSON",
        f"0000:42:00.0/{UUIDS[0]}: 0000:41:00.4 already uses this UUID",
        "the place on 0000:41:00.0 is chosen again, possibly not 0000:41:00.4",
        "the attribute power/control: layouts only set vgpu_params",
    ):
        assert part in told
    assert len(found.left) == 5


def test_a_gpu_that_goes_to_guests_whole_makes_no_vgpus() -> None:
    facts = DefinitionFacts(files=(_definition("0000:41:00.0", UUIDS[0]),))
    host = with_facts(HOST, files=_driverctl(x41_00_0="vfio-pci"), definitions=facts)
    found = _of_host(host)
    assert [rule.state for rule in found.layouts["imported"].devices] == ["passthrough"]
    assert "driverctl passes 0000:41:00.0 through" in found.left[-1]


def test_a_host_without_any_of_it_has_no_layout() -> None:
    assert _of_host(HOST).file is None


def test_the_host_s_layout_gives_way_to_a_configuration_of_its_name() -> None:
    host = with_facts(HOST, kernel_command_line="vfio-pci.ids=10de:20b5")
    found = configs("  imported:\n  - {devices: all, vgpu-devices: {}}\n", host)
    assert list(found.layouts) == ["imported", "imported-host"]
