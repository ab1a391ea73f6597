from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.host_files import tree_of
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.persistence.facts import read_keeping
from vfiomgr.persistence.steps import ImportDriverctl
from vfiomgr.persistence.systems import SYSTEMS, refuse_lost, why_lost

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.engine.plan import Request
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device()
AUDIO = replace(
    pci_device("0000:04:00.1"), device_id="2291", class_code="040300", driver="snd_hda_intel"
)
TWIN = replace(pci_device("0000:05:00.0"), iommu_group=5)
ROOT = "proc/mounts: /dev/a / ext4 rw 0 0"
OVERLAY = "overlay /etc overlay rw,lowerdir=/etc,workdir=/w,upperdir"
BIND = Bind((GPU.address,), persist=True)


def refusal(host: HostSnapshot, request: Request = BIND) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        plan(host, request)
    assert caught.value.diagnostics[0].rule == "rules-not-kept"
    return str(caught.value), caught.value.hint


@pytest.mark.parametrize(
    ("files", "system", "unkept"),
    [
        ("etc/os-release: ID=debian", "", ""),
        ("usr/lib/os-release: NAME=NixOS\\nID=nixos", "nixos", ""),
        ('etc/os-release: ID="talos"', "talos", ""),
        ("etc/os-release: ID=slackware\\netc/unraid-version: version=7", "slackware", ""),
        ("etc/os-release: ID=slackware\netc/unraid-version: version=7", "unraid", ""),
        ("etc/os-release: ID=sles\netc/harvester-release.yaml: harvester: v1", "harvester", ""),
        ("usr/bin/midclt: #!", "truenas", ""),
        ("proc/mounts: proc /proc proc rw 0 0", "", ""),
        ("proc/mounts: /dev/sda2 / btrfs ro 0 0\\n/dev/sda3 /etc btrfs rw 0 0", "", ""),
        ("proc/mounts: /dev/sda2 / ext4 ro,relatime 0 0", "", "/ is read-only"),
        ("proc/mounts: rootfs / rootfs rw 0 0\\n/dev/sda2 / ext4 rw 0 0", "", ""),
        ("proc/mounts: rootfs / rootfs rw 0 0", "", "/ is in memory (rootfs)"),
        (
            f"{ROOT}\\ntmpfs /run tmpfs rw 0 0\\n{OVERLAY}=/run/etc 0 0",
            "",
            "/run is in memory (tmpfs)",
        ),
        (f"{ROOT}\\n{OVERLAY}=/var/etc 0 0", "", ""),
        ("proc/mounts: overlay / overlay rw,upperdir=/upper/upper 0 0", "", ""),
        ("proc/mounts: /dev/a / ext4 rw 0 0\\ntmpfs /etc/udev/rules.data tmpfs ro 0 0", "", ""),
    ],
)
def test_the_running_system_shows_whether_it_keeps_files(
    tmp_path: Path, files: str, system: str, unkept: str
) -> None:
    facts = read_keeping(tree_of(tmp_path, files))
    assert facts.system == (system if system in SYSTEMS else "")
    assert facts.unkept == (f"/proc/mounts: {unkept}" if unkept else "")


def test_each_system_names_its_own_place_for_a_binding() -> None:
    for name, system in SYSTEMS.items():
        host = with_facts(host_of(GPU, AUDIO), settings_system=name)
        if not system.why:
            assert plan(host, BIND).steps
            continue
        text, hint = refusal(host)
        assert text == f"{system.name} does not keep files in /etc: {system.why}"
        assert hint.startswith("bind at boot with ")
        assert "{" not in hint.replace("ATTR{driver_override}", "")


def test_a_twin_that_stays_is_not_taken_by_pci_ids() -> None:
    text = refusal(with_facts(host_of(GPU, AUDIO), settings_system="nixos"))[1]
    assert "vfio-pci.ids=10de:2291,10de:25b6" in text
    text = refusal(with_facts(host_of(GPU, AUDIO, TWIN), settings_system="nixos"))[1]
    assert "ids=" not in text
    assert 'KERNEL=="0000:04:00.0|0000:04:00.1", ATTR{driver_override}="vfio-pci"' in text
    text = refusal(with_facts(host_of(GPU, AUDIO, TWIN), settings_system="bottlerocket"))[1]
    assert text.startswith("run it again after each boot")


def test_files_in_memory_are_no_place_for_rules() -> None:
    lost = with_facts(host_of(GPU), unkept_files="/proc/mounts: / is in memory (tmpfs)")
    text, hint = refusal(lost)
    assert text == "this host does not keep files in /etc: /proc/mounts: / is in memory (tmpfs)"
    assert hint == "run it again after each boot, or add it to what the host boots from"
    assert why_lost(lost.files)
    entry = TextFile("/etc/driverctl.d/0000:04:00.0", "vfio-pci\n")
    assert refusal(with_facts(lost, files=(entry,)), ImportDriverctl())


def test_until_the_next_boot_everything_is_bound() -> None:
    host = with_facts(host_of(GPU, AUDIO), settings_system="nixos")
    assert plan(host, replace(BIND, persist=False)).steps


def test_files_of_container_runtimes_are_refused_where_etc_is_not_kept() -> None:
    path = "/etc/containerd/config.toml"
    for name in ("talos", "bottlerocket", "harvester", "unraid", "truenas"):
        with pytest.raises(Refusal, match="does not keep "):
            refuse_lost(name, [path])
    refuse_lost("harvester", ["/var/lib/rancher/rke2/agent/etc/containerd/config.toml.tmpl"])
    for name in ("nixos", "flatcar", "debian", ""):
        refuse_lost(name, [path])
