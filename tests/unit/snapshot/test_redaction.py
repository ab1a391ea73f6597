"""A snapshot for a public report: what is replaced, and that rules still find the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Unbind
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.snapshot.created import Created
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.snapshot.redaction import Redaction
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

UUID = "5a7b4a0e-9f3c-4a52-8c0d-3f1d2e6b7a90"
KEY = b"key"


def personal_host() -> HostSnapshot:
    gpu = replace(pci_device(), serial="1322621034567")
    origin = OriginalState(gpu.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    node = f"/dev/vfio/{gpu.iommu_group}"
    return with_facts(
        host_of(gpu),
        kernel_command_line="root=/dev/mapper/acme--vg-root ip=10.20.30.40::10.20.30.1:::eth0 "
        "nameserver=[fd00:1:2::7] "
        f"rd.luks.uuid={UUID} resume=LABEL=alices-swap vfio-pci.ids=10de:25b6",
        boot_id=UUID.upper(),
        origins=(origin,),
        vgpus=(Vgpu(UUID, "mdev", "0000:04:00.0", "nvidia-1", None, None, 7, None, None),),
        users=(
            DeviceUser(
                node, 7, "qemu", "machine-qemu\\x2d3\\x2dacme\\x2dwin11.scope", (), "acme-win11"
            ),
            DeviceUser("/dev/dri/card0", 8, "Xorg", "user@1000.service"),
        ),
        host_uses=(HostUse(gpu.address, "mounted-disk", "/dev/sda1 is mounted on /home/alice/vm"),),
        agent=agent_of("0000:04:00.0", pod="acme-prod/billing-7d9f/main", claim="acme-prod/gpu"),
        files=(TextFile("/etc/vfiomgr/layout.yaml", "# acme-win11 of alice, 52:54:00:ab:cd:ef\n"),),
        cdi_files=(CdiFile("/etc/cdi/a.yaml", "path: /home/alice/x\nid: " + "ab12" * 16, None),),
    )


def redacted(host: HostSnapshot, *names: str, key: bytes = KEY) -> str:
    return write_snapshot(host, Redaction(names, key))


def on_command_line(words: str) -> str:
    text = redacted(with_facts(personal_host(), kernel_command_line=words))
    found: str = json.loads(text)["kernel_command_line"]
    return found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("ignition.config.url=https://acme.example/a.ign x", "ignition.config.url=https://url-1 x"),
        ("netroot=iscsi:alice:pw@10.1.2.3::3260", "netroot=login-1@192.0.2.1::3260"),
        ("nfsroot=filer.acme:/export/alice,v3", "nfsroot=url-1"),
        ("root=nfs4:filer.acme:/x rw", "root=nfs4:url-1 rw"),
        ("root=/dev/acme-vg/root resume=/dev/sda2", "root=/dev/name-1 resume=/dev/sda2"),
        ("rd.lvm.lv=acme/root root=/dev/cciss/c0d0", "rd.lvm.lv=name-1 root=/dev/cciss/c0d0"),
        ("a rd.iscsi.password=s3 b", "a rd.iscsi.password=secret-1 b"),
        ("cloud.token=abc token=abc", "cloud.token=secret-1 token=secret-1"),
        ("intel_iommu=on iommu=pt pci=noaer", "intel_iommu=on iommu=pt pci=noaer"),
    ],
)
def test_secrets_of_the_kernel_command_line_are_replaced(words: str, told: str) -> None:
    assert on_command_line(words) == told


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        ("acme-trainer.service", "unit-1.service"),
        ("nvidia-dcgm.service", "nvidia-dcgm.service"),
        ("user@1000.service", "user@1000.service"),
    ],
)
def test_units_of_unknown_programs_are_replaced(unit: str, told: str) -> None:
    host = with_facts(personal_host(), users=(DeviceUser("/dev/nvidia0", 8, "python", unit),))
    assert json.loads(redacted(host))["users"][0]["unit"] == told


def test_the_name_of_the_host_is_replaced_and_its_time_stays() -> None:
    host = with_facts(personal_host(), vgpu_marks=(TextFile("/run/x", "made on h7x.acme\n"),))
    created = Created("2026-11-29T08:00:00Z", "h7x.acme", "1.0.0")
    redaction = Redaction((), KEY)
    text = write_snapshot(host, redaction, created)
    document = json.loads(text)
    assert "h7x" not in text
    assert document["created"] == {
        "time": "2026-11-29T08:00:00Z",
        "host_name": "host-1",
        "vfiomgr_version": "1.0.0",
    }
    again = json.loads(write_snapshot(host, redaction, Created(None, "h7x.acme", None)))
    assert again["created"]["host_name"] == "host-1"
    assert again["vgpus"] == document["vgpus"]


@pytest.mark.parametrize(
    "secret",
    [
        *("1322621034567", UUID, UUID.upper(), "acme", "win11", "alice", "10.20.30.40", "fd00"),
        *("52:54:00:ab:cd:ef", "ab12ab12", "acme-prod", "billing", "alices-swap", "host7"),
    ],
)
def test_nothing_personal_stays(secret: str) -> None:
    host = with_facts(personal_host(), vgpu_marks=(TextFile("/run/x", "made on host7.acme\n"),))
    assert secret in write_snapshot(host)
    assert secret not in redacted(host, "host7.acme", "host7")


@pytest.mark.parametrize(
    "kept",
    [
        *("0000:04:00.0", "vfio-pci.ids=10de:25b6", "/dev/vfio/4", "/dev/dri/card0", "Xorg"),
        *("/etc/vfiomgr/layout.yaml", "nvidia", "user@1000.service", "/etc/cdi/a.yaml"),
    ],
)
def test_facts_about_the_machine_stay(kept: str) -> None:
    assert kept in redacted(personal_host())


def test_the_result_is_a_snapshot_with_the_same_refusals() -> None:
    host = with_facts(personal_host(), agent=None, files=())
    bound = replace(host.devices[0], driver="vfio-pci", nodes=())
    host = replace(host, devices=(bound,))
    again = read_snapshot(redacted(host), "report.json")
    refusals = []
    for one in (host, again):
        with pytest.raises(Refusal) as refusal:
            plan(one, Unbind((bound.address,)))
        refusals.append([d.rule for d in refusal.value.diagnostics])
    assert refusals[0] == refusals[1] == ["held-by-guest"]
    assert [user.guest for user in again.users.processes or ()] == ["guest-1", None]
    assert (again.users.processes or ())[0].unit == "machine-qemu\\x2d3\\x2dguest-1.scope"


def test_equal_values_get_equal_replacements_and_other_hosts_get_others() -> None:
    document = json.loads(redacted(personal_host()))
    serials = {document["devices"][0]["serial"], document["origins"][0]["device"]["serial"]}
    assert serials == {"serial-1"}
    uuids = {document["boot_id"], document["vgpus"][0]["uuid"]}
    assert len(uuids) == 1
    assert f"rd.luks.uuid={uuids.pop()}" in document["kernel_command_line"]
    assert json.loads(redacted(personal_host(), key=b"b"))["boot_id"] != document["boot_id"]


def test_a_serial_number_in_a_layout_is_that_of_the_device() -> None:
    layout = TextFile("/etc/vfiomgr/layout.yaml", "select: {serial: '1322621034567'}\n")
    document = json.loads(redacted(with_facts(personal_host(), files=(layout,))))
    serial = document["devices"][0]["serial"]
    assert f"select: {{serial: '{serial}'}}" in json.dumps(document["files"])


def test_a_guest_with_the_name_of_a_driver_changes_no_driver() -> None:
    host = personal_host()
    user = DeviceUser("/dev/vfio/4", 7, "qemu", None, (), "nvidia")
    known = with_facts(host, users=(user,), pci_drivers=("nvidia",))
    document: dict[str, Any] = json.loads(redacted(known))
    assert document["users"][0]["guest"] == "guest-1"
    assert document["devices"][0]["driver"] == host.devices[0].driver
    assert document["pci_drivers"] == ["nvidia"]


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "550.54.14", "1.2.3.4.5", "libx.so.1.2.3.4"])
def test_local_addresses_and_versions_stay(text: str) -> None:
    host = with_facts(personal_host(), files=(TextFile("/etc/x", f"a {text} b\n"),))
    assert f"a {text} b" in redacted(host)


def test_facts_that_were_not_read_are_no_error() -> None:
    document = {"readiness": {"memlock": None, "nodes": None}, "users": None, "vfio_modules": None}
    assert (
        Redaction()({**document, "agent": {"resources": None}, "pci_drivers": None})["users"]
        is None
    )
