from __future__ import annotations

import gzip
import io
import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from ruamel.yaml import YAML

from tests.fakes.hosts import workstation
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr import __version__
from vfiomgr.check.model import (
    DeviceNode,
    Distribution,
    FirmwareFramebuffer,
    KernelModule,
    MemlockLimit,
    ModuleSetting,
    Readiness,
)
from vfiomgr.documents import reader
from vfiomgr.documents.jsonable import API_VERSION
from vfiomgr.documents.text import GZIP, TextFile
from vfiomgr.errors import InvalidDocument, UnknownDevice
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.guest_support import GuestSupport
from vfiomgr.pci.model import Bar, PciAddress
from vfiomgr.snapshot import document
from vfiomgr.snapshot.created import Created, created_now
from vfiomgr.snapshot.document import load_dated, read_dated, read_snapshot, write_snapshot
from vfiomgr.users.model import DeviceUser
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.snapshot.model import HostSnapshot


def readiness() -> Readiness:
    return Readiness(
        modules=(KernelModule("vfio", "built-in", ("x",), {"a": "Y"}), KernelModule("mdev", None)),
        module_settings=(
            ModuleSetting("/etc/modprobe.d/a.conf", "options", "vfio_pci", "ids=1:2"),
        ),
        config_source="/proc/config.gz",
        config={"IOMMUFD": "n"},
        has_dev=True,
        nodes=(DeviceNode("/dev/vfio/vfio", 0o666, "root:root"),),
        has_acpi_tables=True,
        dmar_flags=1,
        iommu_ecaps={"dmar0": 0xF020DF},
        iommu_caps={"dmar0": 0xD2008C40660462},
        interrupt_chips=("IR-PCI-MSI",),
        lockdown="none",
        secure_boot=False,
        framebuffers=(FirmwareFramebuffer("efifb", PciAddress(0, 4, 0, 0)),),
        memlock=(MemlockLimit("user qemu", "user", "hard memlock 1", False, "/etc/x"),),  # noqa: FBT003
        distribution=Distribution("debian", "Debian 12", ("apt-get",)),
        has_driver_override=True,
    )


def full_host() -> HostSnapshot:
    gpu = replace(
        pci_device(),
        virtual_functions=(PciAddress(0, 4, 0, 4),),
        bars=(Bar(0, 0x9000_0000, 1 << 24, is_memory=True, is_64bit=False, is_prefetchable=False),),
    )
    types = (describe_type("nvidia-1", "A2-1Q", "num_heads=4", "vfio-pci"),)
    origin = OriginalState(gpu.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    return with_facts(
        host_of(gpu),
        vgpu_parents=(
            VgpuParent("0000:04:00.4", "/x", "mdev", "nvidia", "0000:04:00.0", types, (3,)),
        ),
        vgpus=(Vgpu("u-u-i-d", "mdev", "0000:04:00.4", "nvidia-1", None, None, 7, None, None),),
        origins=(origin,),
        users=(DeviceUser("/dev/vfio/4", 17, "qemu"),),
        readiness=readiness(),
        gpu_modes=(GpuMode("0000:04:00.0", heterogeneous=None, mig=False, framebuffer=16384),),
        vgpu_marks=(TextFile("/run/vfiomgr/vgpus/u-u-i-d", "0000:04:00.4 nvidia-1\n"),),
    )


def test_a_snapshot_is_read_back_as_it_was_written() -> None:
    host = full_host()
    assert read_snapshot(write_snapshot(host), "host.json") == host


def test_a_snapshot_is_read_back_from_yaml_too() -> None:
    host = full_host()
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(json.loads(write_snapshot(host)), text)
    assert read_snapshot(text.getvalue(), "host.yaml") == host


def test_a_field_of_yaml_that_does_not_fit_is_named_with_its_place() -> None:
    text = f"kind: HostSnapshot\napi_version: {API_VERSION}\niommu: {{units: 7}}"
    with pytest.raises(InvalidDocument, match=r"host\.yaml:3:9: iommu\.units: Expected `array`"):
        read_snapshot(text, "host.yaml")


def test_a_field_that_does_not_fit_is_named_with_its_place() -> None:
    document = json.loads(write_snapshot(full_host()))
    document["devices"][0]["address"] = "zz:00.0"
    with pytest.raises(InvalidDocument, match=r"host\.json:1:\d+: devices\.0\.address: .*zz:00\.0"):
        read_snapshot(json.dumps(document), "host.json")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["kernel_release"], "6x.y"),
        (["guest_support", "libvirt"], "x.y"),
        (["guest_support", "libvirt"], ""),
        (["guest_support", "qemu"], "x.y"),
    ],
)
def test_a_bad_version_is_named_with_file_and_key(keys: list[str], text: str) -> None:
    known = with_facts(full_host(), guest_support=GuestSupport("12.4.0", "11.0.0"))
    document = json.loads(write_snapshot(known))
    part = document
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = text
    written = json.dumps(document, indent=1)
    line = written[: written.index(f'"{keys[-1]}": "{text}"')].count("\n") + 1
    why = rf"^host\.json:{line}:\d+: {'.'.join(keys)}: '{text}' is not a version$"
    with pytest.raises(InvalidDocument, match=why):
        read_snapshot(written, "host.json")


def test_a_kernel_without_a_number_has_an_unknown_version() -> None:
    text = write_snapshot(with_facts(full_host(), kernel_release="custom"))
    assert read_snapshot(text, "host.json").kernel.version is None


@pytest.mark.parametrize(
    "place",
    [
        [],
        ["devices", 0],
        ["origins", 0, "state"],
        ["readiness"],
        ["readiness", "modules", 0],
        ["readiness", "framebuffers", 0],
    ],
)
def test_an_unknown_key_is_refused_at_any_depth(place: list[str | int]) -> None:
    document = json.loads(write_snapshot(full_host()))
    part = document
    for key in place:
        part = part[key]
    part["colour"] = "red"
    text = json.dumps(document, indent=1)
    line = text[: text.index('"colour"')].count("\n") + 1
    with pytest.raises(InvalidDocument, match=rf"^host\.json:{line}:\d+: .*colour: unknown field"):
        read_snapshot(text, "host.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON: the file is truncated"),
        ('{"kind": "Host', "not JSON: the file is truncated"),
        ('{"devices": [{}\n', "not JSON: the file is truncated"),
        ('{"kind" 1}', "not JSON: line 1 column 9: expecting ':' delimiter"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ("", "host.json: the file is empty"),
        ("\n", "host.json: the file is empty"),
        ("kind: DeviceList", "not a document of kind HostSnapshot"),
        ("kind: HostSnapshot\napi_version: vfiomgr/v9", "unsupported api_version 'vfiomgr/v9'"),
        ("kind: HostSnapshot", "^host.json: missing key: api_version .must be 'vfiomgr/v"),
        ("kind: HostSnapshot\napi_version: [~]", "^host.json: wrong api_version, expected 'vf"),
        ("kind: [", r"host\.json:1:8: a bracket or brace is not closed"),
        ("kind: a\nkind: b", "host.json:2:1: duplicate key 'kind'"),
        ("kind: 2026-02-30", "not a document of kind HostSnapshot"),
        ("kind: !!python/name:os.system", "host.json:1:7: the tag .*:python/name:os.system"),
        ("---\nkind: a\n---\nkind: b", "host.json:4:1: a second document begins here"),
        ("[]", "not a document of kind HostSnapshot"),
        ('{"kind": "DeviceList"}', "not a document of kind HostSnapshot"),
        ('{"kind": "HostSnapshot", "api_version": "vfiomgr/v9"}', "vfiomgr/v9"),
    ],
)
def test_other_documents_are_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidDocument, match=why) as caught:
        read_snapshot(text, "host.json")
    assert caught.value.exit_code == 65


def test_a_snapshot_of_a_newer_version_says_so() -> None:
    text = f"kind: HostSnapshot\napi_version: {API_VERSION}\nfuture: 1"
    with pytest.raises(InvalidDocument, match="unknown field") as caught:
        read_snapshot(text, "host.yaml")
    assert caught.value.hint == (
        "upgrade vfiomgr if a newer version created it, or create a new one on that host with: "
        "vfiomgr snapshot > host.json"
    )


def test_a_large_snapshot_is_read_from_yaml_unless_aliases_made_it_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "_MOST_REPEATED", 1000)
    zeros = ", ".join(["0"] * 10)
    head = f"kind: HostSnapshot\napi_version: {API_VERSION}\n"
    many = "\n".join(f"- [{zeros}]" for _ in range(101))
    with pytest.raises(InvalidDocument, match="Expected `object`"):
        read_snapshot(f"{head}devices:\n{many}", "host.yaml")
    aliases = f"- &a [{zeros}]\n" + "- *a\n" * 101
    with pytest.raises(InvalidDocument, match="too large for a document; use fewer"):
        read_snapshot(f"{head}devices:\n{aliases}", "host.yaml")


CREATED = Created("2026-11-29T08:00:00Z", "gpu7", "1.0.0")


def test_the_creation_is_in_the_document_and_not_among_the_facts() -> None:
    text = write_snapshot(full_host(), created=CREATED)
    assert read_dated(text, "host.json") == (full_host(), CREATED)
    assert read_snapshot(text, "host.json") == full_host()
    assert read_dated(write_snapshot(full_host()), "host.json") == (full_host(), Created())


@pytest.mark.parametrize(
    ("created", "why"),
    [
        ({"time": "yesterday"}, "created.time: not a time in UTC such as 2026-11-29T08:00:00Z"),
        ({"time": 7}, "created.time: Expected `str"),
        ({"zone": "x"}, "created.zone: unknown field"),
        ("now", "created: Expected `object`, got `str`"),
    ],
)
def test_another_creation_is_refused(created: object, why: str) -> None:
    document = json.loads(write_snapshot(full_host())) | {"created": created}
    with pytest.raises(InvalidDocument) as caught:
        read_snapshot(json.dumps(document), "host.json")
    assert why in caught.value.message


def test_only_a_snapshot_of_a_running_host_has_a_time(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    (tmp_path / "host/proc/sys/kernel/hostname").write_text("gpu7\n")
    recorded = created_now(HostTree(str(tmp_path / "host")))
    assert recorded == Created(None, "gpu7", __version__)
    live = created_now(kernel)
    assert live.time is not None
    assert read_dated(write_snapshot(full_host(), created=live), "x")[1] == live


def test_a_compressed_snapshot_is_read(tmp_path: Path) -> None:
    file = tmp_path / "host.json.gz"
    file.write_bytes(gzip.compress(write_snapshot(full_host(), created=CREATED).encode()))
    assert load_dated(str(file)) == (full_host(), CREATED)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidDocument, match=r"host\.json\.gz: not JSON: the file is truncated"):
        load_dated(str(file))


def test_a_compressed_snapshot_may_not_grow_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "_LONGEST_SNAPSHOT", 1000)
    file = tmp_path / "host.json.gz"
    for data, why in ((gzip.compress(b" " * 1001), "larger than 0 MiB"), (GZIP, "damaged")):
        file.write_bytes(data)
        with pytest.raises(InvalidDocument, match=f"cannot decompress the snapshot .*{why}"):
            load_dated(str(file))


@pytest.mark.parametrize(
    ("data", "why", "remedy"),
    [
        ("{}".encode("utf-16"), "UTF-16 text instead of UTF-8", "convert it: iconv -f UTF-16 "),
        (b"{\xff}", "not UTF-8 text", "create a new one on that host with: "),
    ],
)
def test_a_file_that_is_not_utf8_is_named(
    tmp_path: Path, data: bytes, why: str, remedy: str
) -> None:
    file = tmp_path / "host.json"
    file.write_bytes(data)
    with pytest.raises(InvalidDocument) as caught:
        Host.from_snapshot(file)
    assert caught.value.message == f"{file}: {why}"
    assert (caught.value.hint or "").startswith(remedy)


def test_a_virtual_function_goes_alone_and_stays_behind() -> None:
    physical = pci_device()
    audio = pci_device("0000:04:00.1")
    virtual = replace(pci_device("0000:04:00.4"), physical_function=physical.address, iommu_group=9)
    host = host_of(physical, audio, virtual)
    assert host.slot(virtual) == (virtual,)
    assert host.slot(physical) == (physical, audio)


def test_an_origin_of_another_boot_or_another_device_is_not_this_devices() -> None:
    gpu = pci_device()
    origin = OriginalState(gpu.identity, DriverState("nvidia", None), "nvidia", "boot")
    assert with_facts(host_of(gpu), origins=(origin,)).origin(gpu) == origin
    rebooted = with_facts(host_of(gpu), origins=(origin,), boot_id="next")
    assert rebooted.origin(gpu) is None
    exchanged = replace(gpu, device_id="2204")
    assert with_facts(host_of(exchanged), origins=(origin,)).origin(exchanged) is None


def test_an_unknown_address_is_an_error() -> None:
    with pytest.raises(UnknownDevice, match=r"0000:99:00\.0"):
        host_of(pci_device()).device(PciAddress.parse("0000:99:00.0"))
