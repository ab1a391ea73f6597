"""A host's devices in the words of other managers, which `layout import` reads back."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace
from ruamel.yaml import YAML

from tests import api
from tests.unit.devices import host_of, with_facts
from tests.unit.layout.test_export import ON_VFIO, card
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.errors import UsageError
from vfiomgr.layout.compare import compare
from vfiomgr.layout.for_managers import MANAGERS, configuration
from vfiomgr.layout.from_host import export
from vfiomgr.layout.guest_files import read_guest_files
from vfiomgr.layout.imports import import_layouts
from vfiomgr.layout.model import Layout, PassthroughRule
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from tests.unit.conftest import Run
    from vfiomgr.layout.for_managers import Manager
    from vfiomgr.snapshot.model import HostSnapshot

AUDIO = replace(
    card(1, model="2291", class_code="040300", **ON_VFIO),
    address=PciAddress(0, 1, 0, 1),
    iommu_group=101,
)
HOST = host_of(card(1, **ON_VFIO), AUDIO, card(2, **ON_VFIO), card(3), card(4, model="2235"))
"""A card with its audio function and one without for guests, two for the host."""


def written(host: HostSnapshot, manager: Manager) -> str:
    return configuration(host, manager, "pve1" if manager == "proxmox" else None).text


def left(host: HostSnapshot, manager: Manager) -> list[str]:
    return configuration(host, manager, "pve1" if manager == "proxmox" else None).left


def passed(host: HostSnapshot, layout: Layout) -> set[str]:
    """The functions that rules pass through, all of which are as they should be."""
    compared = compare(host, api.layout_request(None, "test", layout))
    assert [str(difference) for difference in compared.differences] == []
    rules = [rule for rule in layout.devices if isinstance(rule, PassthroughRule)]
    found: set[str] = set()
    for rule in rules:
        devices = [host.device(address) for address in rule.select.address]
        slots = [] if rule.only else [other for d in devices for other in host.slot(d)]
        found.update(str(d.address) for d in (*devices, *slots))
    return found


def imported(host: HostSnapshot, manager: Manager) -> Layout:
    found = import_layouts(
        host, None, guests=read_guest_files({"file": written(host, manager)})
    ).layouts
    return found.get("imported", Layout(devices=()))


# ---- grammars, as the sources in the module's docstring have them

CONFIG_LINE = re.compile(r"\[[a-z]+(_[a-z]+-\d+)?\]|[a-z_]+ = \S.*|")
SPEC: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["vendor_id", "product_id"],
    "properties": {
        "vendor_id": {"pattern": "^([0-9a-fA-F]{4}|\\*)$"},
        "product_id": {"pattern": "^([0-9a-fA-F]{4}|\\*)$"},
        "address": {"pattern": "^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]$"},
        "managed": {"enum": ["yes", "no"]},
    },
}
ALIAS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "vendor_id": {"pattern": "^([0-9a-fA-F]{4})$"},
        "product_id": {"pattern": "^([0-9a-fA-F]{4})$"},
        "device_type": {"enum": ["type-PCI", "type-PF", "type-VF"]},
    },
}


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in item}
    each = {"type": "object", "required": [*item], "properties": properties}
    return {"type": "array", "items": {**each, "additionalProperties": False}, "minItems": 1}


KUBEVIRT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "permittedHostDevices": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "pciHostDevices": _listed({"pciVendorSelector": "", "resourceName": ""}),
                "mediatedDevices": _listed({"mdevNameSelector": "", "resourceName": ""}),
            },
        },
        "mediatedDevicesConfiguration": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"mediatedDeviceTypes": {"type": "array", "items": {"type": "string"}}},
        },
    },
}
PATH = r"[a-f0-9]{4,}:[a-f0-9]{2}:[a-f0-9]{2}(?:\.[a-f0-9])?"
MAP = re.compile(
    r"\tmap id=[0-9a-f]{4}:[0-9a-f]{4}(,iommugroup=\d+)?,node=pve1"
    rf",path=(?:{PATH};)*{PATH}(,subsystem-id=[0-9a-f]{{4}}:[0-9a-f]{{4}})?"
)
INCUS = {
    "oneOf": [
        {"type": "object", "properties": properties, "required": [*properties]}
        | {"additionalProperties": False}
        for properties in (
            {"type": {"const": "pci"}, "address": {"pattern": rf"^{PATH}$"}},
            {"type": {"const": "gpu"}, "gputype": {"const": "physical"}, "pci": {}},
            {"type": {"const": "gpu"}, "gputype": {"const": "mdev"}, "pci": {}, "mdev": {}},
        )
    ]
}


def options(text: str, key: str) -> list[str]:
    return [line.partition(" = ")[2] for line in text.splitlines() if line.startswith(f"{key} =")]


def loaded(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(io.StringIO(text))


def judge(host: HostSnapshot, manager: Manager) -> None:
    text = written(host, manager)
    if manager == "nova":
        assert all(CONFIG_LINE.fullmatch(line) for line in text.splitlines())
        for spec in options(text, "device_spec"):
            jsonschema.validate(json.loads(spec), SPEC)
        for alias in options(text, "alias"):
            jsonschema.validate(json.loads(alias), ALIAS)
    elif manager == "kubevirt":
        jsonschema.validate(loaded(text)["spec"]["configuration"], KUBEVIRT)
    elif manager == "proxmox":
        for block in filter(None, text.split("\n\n")):
            name, *lines = block.splitlines()
            assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]+", name)
            assert all(MAP.fullmatch(line) or line == "\tmdev 1" for line in lines)
    else:
        for device in loaded(text)["devices"].values():
            jsonschema.validate(device, INCUS)


CARDS = some.lists(
    some.tuples(
        some.sampled_from(["25b6", "2235"]),
        some.booleans(),
        some.sampled_from([None, True, False]),
        some.sampled_from(["030200", "020000"]),
    ),
    max_size=5,
)


@given(CARDS)
def test_what_is_written_is_read_back_as_the_same_devices(
    cards: list[tuple[str, bool, bool | None, str]],
) -> None:
    devices = []
    for bus, (model, is_for_guests, audio, kind) in enumerate(cards, start=1):
        facts = ON_VFIO if is_for_guests else {}
        devices.append(card(bus, model=model, class_code=kind, **facts))
        if audio is not None:
            other = replace(AUDIO, address=PciAddress(0, bus, 0, 1), iommu_group=100 + bus)
            devices.append(other if audio else replace(other, driver="snd_hda_intel"))
    host = host_of(*devices)
    expected = {str(d.address) for d in devices if d.is_on_vfio}
    assert passed(host, export(host, by_address=True)) == expected
    for manager in MANAGERS:
        judge(host, manager)
        if manager != "kubevirt" and expected:
            assert passed(host, imported(host, manager)) == expected


def test_nova_has_a_spec_by_model_only_if_all_of_it_are_for_guests() -> None:
    assert options(written(HOST, "nova"), "device_spec") == [
        '{"vendor_id": "10de", "product_id": "25b6", "address": "0000:01:00.0"}',
        '{"vendor_id": "10de", "product_id": "25b6", "address": "0000:02:00.0"}',
        '{"vendor_id": "10de", "product_id": "2291"}',
    ]
    assert options(written(HOST, "nova"), "alias")[0] == (
        '{"vendor_id": "10de", "product_id": "25b6", "device_type": "type-PCI", '
        '"name": "pci-10de-25b6-pci"}'
    )


def test_nova_leaves_functions_on_their_variant_drivers() -> None:
    host = host_of(card(1, driver="nvgrace_gpu_vfio_pci"))
    (spec,) = options(written(host, "nova"), "device_spec")
    assert json.loads(spec) == {"vendor_id": "10de", "product_id": "25b6", "managed": "no"}
    assert left(host, "nova") == []
    assert "not exported: driver" in left(host, "incus")[0]


@pytest.mark.parametrize("manager", MANAGERS)
def test_vgpus_of_mediated_devices(manager: Manager) -> None:
    host = vgpu_host((a40_type(4),) * 2, functions=4)
    judge(host, manager)
    text = written(host, manager)
    assert any("vGPU" in note for note in left(host, manager))
    if manager == "nova":
        assert options(text, "enabled_mdev_types") == ["nvidia-5043"]
        assert options(text, "device_addresses") == [
            "0000:01:01.0,0000:01:01.1,0000:01:01.2,0000:01:01.3"
        ]
    elif manager == "kubevirt":
        (permitted,) = loaded(text)["spec"]["configuration"]["permittedHostDevices"].values()
        assert permitted[0]["mdevNameSelector"] == "NVIDIA A40-4Q"
    elif manager == "proxmox":
        assert "\tmdev 1\n" in text
        assert imported(host, manager).devices == ()
        (skipped,) = read_guest_files({"pci.cfg": text}).left
        assert skipped.endswith("_vgpu: mdev: Proxmox creates vGPUs on it itself")
    else:
        assert loaded(text)["devices"] == {}


def test_a_vgpu_of_the_vendors_driver_is_a_function_for_nova_and_unknown_to_kubevirt() -> None:
    physical, function = PciAddress(0, 1, 0, 0), PciAddress(0, 1, 1, 0)
    gpu = card(1, model="26b9", sriov_totalvfs=1, sriov_numvfs=1, virtual_functions=(function,))
    virtual = replace(card(1, model="26b9", physical_function=physical), address=function)
    vgpu = Vgpu(
        None, "vendor-vfio", str(function), "1150", "NVIDIA L40S-4Q", "nvidia", 4, None, None
    )
    host = with_facts(host_of(gpu, virtual), vgpus=(vgpu,))
    (spec,) = options(written(host, "nova"), "device_spec")
    assert json.loads(spec)["address"] == str(function)
    assert json.loads(spec)["managed"] == "no"
    judge(host, "kubevirt")
    assert any("only recent releases of KubeVirt" in text for text in left(host, "kubevirt"))


@pytest.mark.parametrize("manager", MANAGERS)
def test_what_has_no_word_is_reported(manager: Manager) -> None:
    nic = card(5, model="1521", class_code="020000", sriov_numvfs=2, sriov_totalvfs=4)
    told = left(host_of(*HOST.devices, nic), manager)
    assert any("does not create its 2 virtual functions" in text for text in told)
    if manager in ("nova", "kubevirt"):
        assert any("assigns 0000:01:00.1 of the same slot separately" in text for text in told)
    if manager == "kubevirt":
        assert any("permits all devices of a model" in text for text in told)
        assert any("feature gate HostDevices is required" in text for text in told)


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_host_without_devices_for_guests_is_reported(manager: Manager) -> None:
    nothing = "no device of this host is passed through or divided: nothing to export"
    assert left(host_of(card(3)), manager) == [nothing]
    assert nothing not in left(HOST, manager)


def test_models_of_one_name_have_resources_and_mappings_of_their_own() -> None:
    host = host_of(card(1, **ON_VFIO), card(2, model="2235", **ON_VFIO))
    permitted = loaded(written(host, "kubevirt"))["spec"]["configuration"]["permittedHostDevices"]
    assert len({one["resourceName"] for one in permitted["pciHostDevices"]}) == len(host.devices)
    assert len(written(host, "proxmox").split("\n\n")) == len(host.devices)


def test_the_node_of_proxmox() -> None:
    with pytest.raises(UsageError, match="missing option: --node"):
        configuration(HOST, "proxmox")
    with pytest.raises(UsageError, match="invalid --node"):
        configuration(HOST, "proxmox", "a,path=b")
    with pytest.raises(UsageError, match="--node requires proxmox"):
        configuration(HOST, "nova", "pve1")


def test_the_command_prints_text_and_notes(run: Run) -> None:
    run("bind", "02:00.0")
    told = run("layout", "export", "--for", "nova")
    assert told.stdout.startswith('[pci]\ndevice_spec = {"vendor_id": "10de", ')
    assert "nova assigns 0000:02:00.1 of the same slot separately" in told.stderr
    proxmox = run("layout", "export", "--for", "proxmox", "--node", "pve1")
    assert "path=0000:02:00,subsystem-id=" in proxmox.stdout
    assert run("layout", "export", "--for", "nova", "--format", "json").status == 2
    assert run("layout", "export", "--for", "nova", "--addresses").status == 2
    assert run("layout", "export", "--node", "pve1").status == 2
