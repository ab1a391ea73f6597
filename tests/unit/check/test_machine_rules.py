"""What a machine, the page size of its kernel, or its security policy denies devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.check.test_rules import amd, device, facts, found, host
from tests.unit.host_files import tree_of
from vfiomgr.check.facts import read_readiness
from vfiomgr.check.model import Distribution, SelinuxDenial
from vfiomgr.check.plan import check
from vfiomgr.messages.known import LoggedMessage
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.model import Bar

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.snapshot.model import HostSnapshot

SMALL = Bar(0, 1 << 38, 16 << 10, is_memory=True, is_64bit=True, is_prefetchable=False)
WITH_CLH = Distribution("debian", "Debian 13", ("cloud-hypervisor",))
PAGES_64K = {"config_source": "/boot/config", "config": {"ARM64_64K_PAGES": "y"}}
AUDIT = (
    'type=AVC msg=audit(1.0:1): avc:  denied  { write } for  pid=4 comm="libvirtd" '
    'name="config" dev="sysfs" ino=1 scontext=a:b:virt_launcher.process:s0 '
    "tcontext=a:b:sysfs_t:s0 tclass=file permissive=0"
)


def kernel(there: HostSnapshot, **changes: Any) -> HostSnapshot:
    return replace(there, kernel=replace(there.kernel, **changes))


@pytest.mark.parametrize(
    ("machine", "pages", "expected"),
    [
        ("apple,j274", "ARM64_4K_PAGES", True),
        ("apple,j274", "ARM64_64K_PAGES", False),
        ("raspberrypi,5-model-b", "ARM64_4K_PAGES", False),
    ],
)
def test_pages_smaller_than_those_of_apples_iommu(machine: str, pages: str, expected: Any) -> None:
    known = facts(config_source="/boot/config", config={pages: "y"})
    there = kernel(host(readiness=known), compatible=(machine,))
    assert (found(there, "kernel-fault") is not None) is expected
    unread = kernel(host(readiness=facts()), compatible=(machine,))
    assert found(unread, "kernel-fault") is None


@pytest.mark.parametrize(
    ("changes", "known", "expected"),
    [
        ({}, {}, True),
        ({"driver": "nvme"}, {}, False),
        ({"bars": (replace(SMALL, size=64 << 10),)}, {}, False),
        ({}, {"distribution": None}, False),
        ({}, {"config": {"ARM64_4K_PAGES": "y"}}, False),
    ],
)
def test_bars_below_a_page_for_cloud_hypervisor(
    changes: dict[str, Any], known: dict[str, Any], expected: Any
) -> None:
    nvme = device(**{"class_code": "010802", "driver": "vfio-pci", "bars": (SMALL,), **changes})
    there = host(nvme, readiness=facts(**{**PAGES_64K, "distribution": WITH_CLH, **known}))
    assert (found(there, "kernel-fault") is not None) is expected


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("balloon: 4096\\nmemory: 16384\\nhostpci0: 0000:01:00,pcie=1", True),
        ("balloon: 4096\\nmemory: current=16384\\nhostpci0: mapping=gpu", True),
        ("balloon: 0\\nmemory: 16384\\nhostpci0: 0000:01:00", False),
        ("balloon: 16384\\nmemory: 16384\\nhostpci0: 0000:01:00", False),
        ("memory: 16384\\nhostpci0: 0000:01:00", False),
        ("balloon: 4096\\nmemory: 16384", False),
        ("memory: 16384\\nhostpci0: 0000:01:00\\n\\n[before]\\nballoon: 4096", False),
    ],
)
def test_a_balloon_gives_nothing_back_in_a_guest_with_a_device(
    tmp_path: Path, text: str, *, is_found: bool
) -> None:
    tree = tree_of(tmp_path, f"etc/pve/qemu-server/100.conf: {text}")
    known = read_readiness(tree, None, ())
    finding = found(host(readiness=known), "balloon")
    assert (finding is not None) is is_found
    assert finding is None or finding.remedy.endswith("qm set 100 --balloon 0")


@pytest.mark.parametrize(
    ("value", "corrected"),
    [
        ("(0b:00.0)(0b::00.1)", "xen-pciback.hide=(0000:0b:00.0)(0000:0b:00.1)"),
        ("(0000:0b:00.0)(0b:00.1)", None),
        ("(0000:0b:00.*)", None),
        ("(03:*.*)(0000:03:*.*)(0x0b:0x0.0x1)(00000b:00.0)", None),
        ("(0b:00.0)(0b-00.1)", "each function as (DDDD:BB:DD.F)"),
        ("(0b::20.1)", "each function as (DDDD:BB:DD.F)"),
    ],
)
def test_addresses_that_pciback_does_not_accept(value: str, corrected: str | None) -> None:
    words = f"ro xen-pciback.hide={value} quiet"
    finding = found(kernel(host(readiness=facts()), command_line=words), "xen-hide-invalid")
    assert (finding is not None) is (corrected is not None)
    assert finding is None or f"write {corrected}" in finding.remedy


@pytest.mark.parametrize(
    ("enforce", "line", "target"),
    [
        ("1", AUDIT, "config in /sys"),
        ("1", AUDIT.replace('name="config" dev="sysfs"', 'path="/etc/cdi"'), "/etc/cdi"),
        ("0", AUDIT, None),
        ("1", AUDIT.replace("permissive=0", "permissive=1"), None),
        ("1", AUDIT.replace("libvirtd", "httpd"), None),
        ("1", AUDIT.replace("libvirtd", "qemu-system-x86"), "config in /sys"),
        ("1", AUDIT.replace("libvirtd", "containerd-shim"), "config in /sys"),
        ("1", AUDIT.replace("libvirtd", "qemu-ga"), None),
        ("1", AUDIT.replace("libvirtd", "qemu-nbd"), None),
        ("1", AUDIT.replace("libvirtd", "virt-what"), None),
        ("1", AUDIT.replace("libvirtd", "qemu-kvm;reboot"), None),
        ("1", AUDIT.replace("type=AVC", "node=a type=AVC"), "config in /sys"),
        ("1", AUDIT.replace('dev="sysfs"', 'dev="dm-0"'), None),
    ],
)
def test_denials_of_selinux_about_devices(
    tmp_path: Path, enforce: str, line: str, target: str | None
) -> None:
    files = f"sys/fs/selinux/enforce: {enforce}\nvar/log/audit/audit.log: {line}\\n{line}\n"
    denials = read_readiness(tree_of(tmp_path, files), None, ()).denials
    assert denials is not None
    assert [each.what for each in denials] == ([f"write on {target}"] if target else [])


def test_only_denials_since_the_boot_at_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, "sys/fs/selinux/enforce: 1\nproc/stat: cpu 1 2\\nbtime 1000\n")
    log = tmp_path / "var/log/audit/audit.log"
    log.parent.mkdir(parents=True)
    before, after = (AUDIT.replace("1.0:1", time) for time in ("999.9:1", "1000.0:2"))
    log.write_text(before)
    assert read_readiness(tree, None, ()).denials == ()
    log.write_text(f"{before}\n{after}\n")
    assert len(read_readiness(tree, None, ()).denials or ()) == 1
    monkeypatch.setattr("vfiomgr.check.facts._AUDIT_LIMIT", len(after) + 9)
    assert len(read_readiness(tree, None, ()).denials or ()) == 1
    log.write_text(f"{after}\n{'x' * 2 * len(after)}\n")
    assert read_readiness(tree, None, ()).denials == ()


def test_an_audit_log_that_cannot_be_read_is_not_checked(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "sys/fs/selinux/enforce: 1")
    assert read_readiness(tree, None, ()).denials is None
    said = "what SELinux denied: /var/log/audit/audit.log is not readable"
    assert said in check(host(readiness=facts(denials=None))).not_checked
    assert said not in check(host(readiness=facts(denials=()))).not_checked
    permissive = tree_of(tmp_path / "permissive", "sys/fs/selinux/enforce: 0")
    assert read_readiness(permissive, None, ()).denials == ()


def test_a_host_without_audit_log_has_no_denials(tmp_path: Path) -> None:
    assert not read_readiness(tree_of(tmp_path, "sys/fs/selinux/enforce: 1"), None, ()).denials


@pytest.mark.parametrize(
    ("context", "advice"), [("a:b:virt_launcher.process", "KubeVirt"), ("a:b:svirt_t", "update")]
)
def test_a_denial_is_mended_in_the_policy(context: str, advice: str) -> None:
    denial = SelinuxDenial("libvirtd", "write on config in /sys", context, "avc: denied")
    finding = found(host(readiness=facts(denials=(denial,))), "selinux-access")
    assert finding is not None
    assert advice in finding.remedy
    assert found(host(readiness=facts()), "selinux-access") is None


def test_a_program_named_like_a_command_is_quoted() -> None:
    denial = SelinuxDenial("qemu;reboot", "write on config in /sys", "a:b:svirt_t", "avc: denied")
    finding = found(host(readiness=facts(denials=(denial,))), "selinux-access")
    assert finding is not None
    assert "-c 'qemu;reboot' | audit2allow" in finding.remedy


def test_vendor_reset_that_failed_is_to_be_updated() -> None:
    gpu = amd("687f", reset_method=("device_specific",))
    logged = LoggedMessage("vendor-reset-failed", "AMD_VEGA10: failed", str(gpu.address))
    finding = found(host(gpu, readiness=facts(kernel_log=(logged,))), "amd-reset")
    assert finding is not None
    assert "update vendor-reset" in finding.remedy
    assert found(host(gpu, readiness=facts(kernel_log=())), "amd-reset") is None


FAULT = LoggedMessage("dmar-fault", "DMAR: [DMA Read] Request device [04:00.0]", "0000:04:00.0")


@pytest.mark.parametrize(
    ("words", "driver", "advice"),
    [
        ("ro quiet", "ahci", "add intel_iommu=off"),
        ("ro intel_iommu=on", "ahci", "replace intel_iommu=on with intel_iommu=off"),
        ("ro intel_iommu=sm_on", "ahci", "add intel_iommu=off"),
        ("ro iommu=nopt", "ahci", "replace iommu=nopt with iommu=pt"),
        ("ro iommu=nopt", "ahci", "add intel_iommu=off"),
        ("ro iommu.passthrough=0", "ahci", "replace iommu.passthrough=0 with iommu=pt"),
        ("ro intel_iommu=on iommu=pt", "ahci", None),
        ("ro iommu=nopt iommu=soft,pt", "ahci", None),
        ("ro iommu.passthrough=y", "ahci", None),
        ("ro intel_iommu=on", "vfio-pci", None),
    ],
)
def test_dma_of_the_host_that_vt_d_blocks(words: str, driver: str, advice: str | None) -> None:
    disks = device(driver=driver, class_code="010601")
    there = host(disks, readiness=facts(kernel_log=(FAULT,)))
    finding = found(kernel(there, command_line=words), "iommu-blocks-host")
    assert (finding is not None) is (advice is not None)
    assert finding is None or (str(advice) in finding.remedy and "iommu=pt" in finding.remedy)
    quiet = kernel(host(disks, readiness=facts()), command_line=words)
    assert found(quiet, "iommu-blocks-host") is None


def test_dma_that_vt_d_blocks_for_a_device_that_a_guest_had() -> None:
    gpu = device(driver="nvidia")
    reset = LoggedMessage("reset-failed", "vfio-pci 0000:04:00.0: not ready", FAULT.address)
    there = kernel(host(gpu, readiness=facts(kernel_log=(FAULT,))), command_line="ro quiet")
    assert found(there, "iommu-blocks-host") is not None
    logged = replace(there, readiness=facts(kernel_log=(reset, FAULT)))
    assert found(logged, "iommu-blocks-host") is None
    saved = OriginalState(gpu.identity, DriverState(gpu.driver, None), None, "b")
    assert found(kernel(replace(there, origins=(saved,)), boot_id="b"), "iommu-blocks-host") is None
