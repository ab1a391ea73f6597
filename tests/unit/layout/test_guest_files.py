"""Devices of guests in the files of nova, Proxmox VE, Incus and LXD."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from vfiomgr.errors import InvalidDocument
from vfiomgr.layout.document import read_layouts, render_layouts
from vfiomgr.layout.guest_files import read_guest_files
from vfiomgr.layout.imports import Import, import_layouts
from vfiomgr.layout.model import PassthroughRule


def gpu(address: str, device_id: str = "2235", **changes: object) -> object:
    return replace(pci_device(address), device_id=device_id, **changes)


HOST = host_of(
    gpu("0000:41:00.0", iommu_group=41),  # type: ignore[arg-type]
    gpu("0000:41:00.1", "1aef", class_code="040300", driver="snd_hda_intel", iommu_group=41),  # type: ignore[arg-type]
    gpu("0000:42:00.0", "20b5", iommu_group=42),  # type: ignore[arg-type]
    gpu("0001:41:00.0", iommu_group=43),  # type: ignore[arg-type]
    gpu(  # type: ignore[arg-type]
        "0000:43:00.0", "1572", vendor_id="8086", class_code="020000", driver="i40e", iommu_group=44
    ),
)


def imported(**texts: str) -> Import:
    files = {name.replace("_", "."): text for name, text in texts.items()}
    found = import_layouts(HOST, None, guests=read_guest_files(files))
    if found.file is not None:
        assert read_layouts(render_layouts(found.file), "x") == found.file
    return replace(found, left=[left for left in found.left if "modprobe.d" not in left])


def rules(found: Import) -> list[tuple[list[str], bool]]:
    """The addresses of each rule, and whether functions of the slot stay."""
    made = found.layouts["imported"].devices if found.layouts else ()
    assert all(isinstance(rule, PassthroughRule) for rule in made)
    return [
        ([str(a) for a in r.select.address], r.only) for r in made if isinstance(r, PassthroughRule)
    ]


@pytest.mark.parametrize(
    ("spec", "addresses"),
    [
        ('{"vendor_id": "10de", "product_id": "20b5"}', ["0000:42:00.0"]),
        ('{"vendor_id": "10DE", "product_id": "2235"}', ["0000:41:00.0", "0001:41:00.0"]),
        ('{"address": "0000:42:00.0"}', ["0000:42:00.0"]),
        ('{"address": "*:42:00.*"}', ["0000:42:00.0"]),
        ('{"address": ":42:00."}', ["0000:42:00.0"]),
        ('{"address": "42:0.0", "managed": "no"}', ["0000:42:00.0"]),
        ('{"address": {"domain": "0001", "bus": "4[0-9]"}}', ["0001:41:00.0"]),
        (
            '[{"address": "42:00.0"}, {"vendor_id": "*", "product_id": "1572"}]',
            ["0000:42:00.0", "0000:43:00.0"],
        ),
    ],
)
def test_device_specs_of_nova_mean_functions(spec: str, addresses: list[str]) -> None:
    found = imported(nova_conf=f"[DEFAULT]\ndebug = true\n[pci]\ndevice_spec = {spec}\n")
    assert [one for named, _ in rules(found) for one in named] == addresses


def test_a_device_spec_may_be_repeated_continued_and_have_an_earlier_name() -> None:
    text = (
        '[pci]\n# device_spec = {"address": "0000:43:00.0"}\n'
        'device_spec = {"address":\n    "0000:42:00.0"}\n'
        'passthrough_whitelist = {"address": "0001:41:00.0"}\n'
        'alias = {"name": "a40", "product_id": "2235"}\n'
        "[devices]\nenabled_mdev_types = nvidia-35\n[other]\ndevice_spec = {}\n"
    )
    found = imported(nova_conf=text)
    assert rules(found) == [(["0000:42:00.0"], False), (["0001:41:00.0"], False)]
    assert found.left == [
        "nova.conf: enabled_mdev_types = nvidia-35: nova creates these vGPUs itself"
    ]


def test_a_function_of_a_slot_stays_only_if_its_group_allows() -> None:
    found = imported(nova_conf='[pci]\ndevice_spec = {"address": "0000:41:00.0"}\n')
    assert rules(found) == [(["0000:41:00.0"], False)]
    assert "IOMMU group 41 cannot be passed through while" in found.left[0]


@pytest.mark.parametrize(
    ("line", "addresses"),
    [
        ("0000:41:00,pcie=1,x-vga=1", ["0000:41:00.0", "0000:41:00.1"]),
        ("41:00", ["0000:41:00.0", "0000:41:00.1"]),
        ("42:00.0", ["0000:42:00.0"]),
        ("host=0000:42:00.0;0000:43:00.0,pcie=1", ["0000:42:00.0", "0000:43:00.0"]),
    ],
)
def test_a_machine_of_proxmox_names_functions_or_slots(line: str, addresses: list[str]) -> None:
    text = f"#hostpci9: 43:00.0\nbios: ovmf\nhostpci0: {line}\n[before-upgrade]\nhostpci1: 43:00\n"
    assert rules(imported(c100_conf=text)) == [(addresses, False)]


PCI_CFG = (
    "gpus\n"
    "\tdescription for guests\n"
    "\tmap id=10de:20b5,iommugroup=1,node=pve1,path=0000:42:00.0,subsystem-id=10de:145a\n"
    "\tmap id=10de:20b5,iommugroup=1,node=pve2,path=0000:81:00.0\n"
    "\n"
    "other\n"
    "\tmap id=10de:2235,node=pve1,path=0000:42:00.0\n"
)


def test_a_mapping_of_proxmox_means_the_devices_of_this_node() -> None:
    machine = "hostpci0: mapping=gpus,pcie=1\nhostpci1: mapping=other\n"
    found = imported(c100_conf=machine, pci_cfg=PCI_CFG)
    assert rules(found) == [(["0000:42:00.0"], False)]
    assert found.left == [
        "c100.conf: hostpci0, mapping gpus: no device of this host fits",
        "c100.conf: hostpci1, mapping other: no device of this host fits",
    ]
    assert rules(imported(pci_cfg=PCI_CFG)) == [(["0000:42:00.0"], False)]
    alone = imported(c100_conf=machine)
    assert not alone.layouts
    assert alone.left[0].endswith("mapping gpus is unknown: pass /etc/pve/mapping/pci.cfg too")


def test_vgpus_of_other_managers_are_left_to_them() -> None:
    found = imported(c100_conf="hostpci0: 0000:42:00.4,mdev=nvidia-63\n")
    assert not found.layouts
    assert found.left == ["c100.conf: hostpci0: mdev=nvidia-63: Proxmox creates this vGPU itself"]


def incus(device: str, kind: str = "virtual-machine") -> str:
    return (
        f"name: win\ntype: {kind}\nconfig: {{}}\ndevices:\n  root: {{type: disk}}\n  a: {device}\n"
    )


@pytest.mark.parametrize(
    ("device", "addresses"),
    [
        ('{type: gpu, gputype: physical, pci: "42:00.0"}', [["0000:42:00.0"]]),
        ('{type: gpu, vendorid: "10de", productid: 20b5}', [["0000:42:00.0"]]),
        ('{type: gpu, vendorid: "10de"}', [["0000:41:00.0", "0000:42:00.0", "0001:41:00.0"]]),
        ('{type: pci, address: "0000:43:00.0"}', [["0000:43:00.0"]]),
    ],
)
def test_devices_of_incus_mean_functions(device: str, addresses: list[list[str]]) -> None:
    assert [named for named, _ in rules(imported(win_yaml=incus(device)))] == addresses


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (incus('{type: gpu, pci: "42:00.0"}', "container"), "containers use the GPU through"),
        (
            incus("{type: gpu, gputype: mdev, mdev: nvidia-63}"),
            "gputype mdev: Incus and LXD create",
        ),
        (incus('{type: gpu, id: "1"}'), "id 1: name the GPU by its address"),
    ],
)
def test_devices_of_incus_that_are_not_carried_over(text: str, why: str) -> None:
    found = imported(win_yaml=text)
    assert not found.layouts
    assert why in found.left[0]


def test_expanded_devices_and_lists_of_instances_are_read() -> None:
    device = '{type: pci, address: "42:00.0"}'
    one = f"{{name: a, type: virtual-machine, devices: {{}}, expanded_devices: {{g: {device}}}}}"
    assert rules(imported(all_yaml=f"- {one}\n")) == [(["0000:42:00.0"], False)]
    assert rules(imported(d_yaml='gpu0: {type: pci, address: "42:00.0"}\n'))


def test_an_absent_function_may_come_later() -> None:
    found = imported(c100_conf="hostpci0: 0000:99:00.0\n")
    (rule,) = found.layouts["imported"].devices
    assert rule.at_least == 0
    assert "is not present now" in found.left[0]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("nova_conf", "[pci]\ndevice_spec = {address}\n", "device_spec is not JSON"),
        ("nova_conf", '[pci]\ndevice_spec = ["x"]\n', "device_spec 1 is not a JSON object"),
        ("nova_conf", '[pci]\ndevice_spec = {"address": "1:2:3:4.5"}\n', "more than a domain"),
        ("nova_conf", '[pci]\ndevice_spec = {"address": "zz:00.0"}\n', "cannot read the address"),
        (
            "nova_conf",
            '[pci]\ndevice_spec = {"address": {"bus": "["}}\n',
            "cannot read the address",
        ),
        ("c_conf", "hostpci0: nonsense\n", "is not a PCI address"),
        ("x_yaml", "a: 1\n", "not a configuration with devices of guests"),
        ("x_yaml", "", "not a configuration with devices of guests"),
        ("x_yaml", incus("{type: pci}"), "is not a PCI address"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, text: str, why: str) -> None:
    with pytest.raises(InvalidDocument, match=why) as refused:
        imported(**{name: text})
    assert refused.value.hint
