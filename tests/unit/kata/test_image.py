from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.kata.explain.image import GuestFile, GuestImage, check_guest_image, file_system_of

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.rules.runner import Report

GPU = pci_device()
AMD = replace(pci_device("0000:05:00.0"), vendor_id="1002", name="AMD Navi")
PLAIN = "/opt/kata/share/kata-containers/"
KERNEL = GuestFile("kernel", f"{PLAIN}vmlinux.container", f"{PLAIN}vmlinux-6.12", 9)
IMAGE = GuestFile("image", f"{PLAIN}kata-containers.img", f"{PLAIN}kata-ubuntu.img", 9, "ext4")
NVIDIA_KERNEL = GuestFile("kernel", f"{PLAIN}vmlinux-nvidia-gpu.container", f"{PLAIN}v", 9)
NVIDIA_IMAGE = GuestFile("image", f"{PLAIN}kata-containers-nvidia-gpu.img", f"{PLAIN}i", 9, "erofs")
INITRD = GuestFile("initrd", f"{PLAIN}kata-initrd.img", f"{PLAIN}kata-initrd.img", 9)


def guest(*files: GuestFile, **more: object) -> GuestImage:
    base = GuestImage("k.toml", "qemu", files, None, "", "guest-kernel")
    return replace(base, **more)


NVIDIA = guest(NVIDIA_KERNEL, NVIDIA_IMAGE, rootfs_type="erofs")


def found(report: Report, kind: str) -> list[str]:
    return [finding.severity for finding in report.findings if finding.rule == kind]


def test_kata_s_build_for_gpus_is_fine() -> None:
    report = check_guest_image(NVIDIA, [GPU])
    assert {finding.severity for finding in report.findings} == {"ok"}
    assert {"guest-file", "rootfs-type", "guest-driver"} == {f.rule for f in report.findings}
    assert report.not_checked


@pytest.mark.parametrize(
    ("image", "kind", "words"),
    [
        (guest(KERNEL, replace(IMAGE, resolved=None)), "guest-file", "image does not exist"),
        (guest(KERNEL, replace(IMAGE, size=0)), "guest-file", "image is empty"),
        (guest(replace(KERNEL, resolved=None), IMAGE), "guest-file", "kernel does not exist"),
        (guest(replace(KERNEL, is_regular=False), IMAGE), "guest-file", "is not a regular file"),
        (guest(IMAGE), "guest-file", "no kernel"),
        (replace(NVIDIA, vfio_mode="bogus"), "guest-setting", "invalid vfio_mode: 'bogus'"),
        (guest(IMAGE, mistyped=(("kernel", "1"),)), "guest-setting", "kernel is 1"),
        (guest(KERNEL), "guest-root", "no root file system"),
        (guest(KERNEL, IMAGE, INITRD), "guest-root", "an image and an initrd"),
        (replace(NVIDIA, rootfs_type=None), "rootfs-type", ", but rootfs_type is ext4"),
        (guest(KERNEL, IMAGE, rootfs_type="erofs"), "rootfs-type", "is ext4"),
    ],
)
def test_what_keeps_a_guest_from_starting_blocks(image: GuestImage, kind: str, words: str) -> None:
    report = check_guest_image(image)
    first = report.findings[0]
    assert (first.severity, first.rule, report.is_blocked) == ("blocker", kind, True)
    assert words in first.summary
    assert first.evidence
    assert first.why
    assert first.remedy


@pytest.mark.parametrize(
    ("image", "devices", "severities"),
    [
        (NVIDIA, [GPU], ["ok"]),
        (guest(KERNEL, IMAGE), [GPU], ["warning"]),
        (guest(KERNEL, IMAGE), [], ["info"]),
        (guest(KERNEL, NVIDIA_IMAGE, rootfs_type="erofs"), [GPU], ["warning"]),
        (guest(NVIDIA_KERNEL, IMAGE), [], ["warning"]),
        (guest(KERNEL, INITRD), [GPU], ["warning"]),
        (guest(KERNEL, IMAGE), [AMD], ["info"]),
        (NVIDIA, [GPU, AMD], ["ok", "info"]),
        (guest(KERNEL, IMAGE, vfio_mode="vfio"), [GPU], []),
    ],
)
def test_names_tell_of_the_driver(
    image: GuestImage, devices: list[PciDevice], severities: list[str]
) -> None:
    report = check_guest_image(image, devices)
    assert sorted(found(report, "guest-driver")) == sorted(severities)


@pytest.mark.parametrize(
    ("image", "devices", "severities"),
    [
        (NVIDIA, [GPU], []),
        (guest(KERNEL, IMAGE), [GPU], ["warning"]),
        (guest(KERNEL, IMAGE), [], ["info"]),
        (guest(KERNEL, IMAGE, guest_hook_path="/usr/share/oci/hooks"), [GPU], ["ok"]),
        (guest(KERNEL, IMAGE), [AMD], ["info"]),
        (guest(KERNEL, IMAGE), [GPU, AMD], ["warning", "info"]),
        (guest(KERNEL, IMAGE, vfio_mode="vfio"), [GPU], []),
    ],
)
def test_a_container_gets_nodes_by_the_guest_s_cdi_or_by_a_hook(
    image: GuestImage, devices: list[PciDevice], severities: list[str]
) -> None:
    assert found(check_guest_image(image, devices), "guest-nodes") == severities


def test_an_unknown_mode_leaves_nothing_out() -> None:
    report = check_guest_image(guest(KERNEL, IMAGE, vfio_mode="bogus"), [GPU])
    assert found(report, "guest-driver") == ["warning"]


def test_a_value_of_a_wrong_type_is_not_told_as_a_missing_one() -> None:
    report = check_guest_image(guest(mistyped=(("hypervisor", "[], not a table"),)))
    assert [finding.rule for finding in report.findings] == ["guest-setting"]


def test_an_unknown_file_system_is_told_as_not_checked() -> None:
    report = check_guest_image(guest(KERNEL, replace(IMAGE, file_system=None)))
    assert not report.is_blocked
    assert report.unknown[0].startswith(f"the file system of {IMAGE.resolved}")
    assert ", but rootfs_type is ext4" in report.unknown[0]
    assert check_guest_image(guest(KERNEL, INITRD)).unknown == ()


def disk(superblock: bytes, start: int | None = 6144) -> bytes:
    """An image with a table of one partition, or none."""
    if start is None:
        return superblock
    table = bytearray(512)
    table[0x1BE + 4] = 0x83
    struct.pack_into("<I", table, 0x1BE + 8, start)
    table[510:] = b"\x55\xaa"
    return bytes(table).ljust(start * 512, b"\0") + superblock


EROFS = b"\0" * 1024 + bytes.fromhex("e2e1f5e0") + b"\0" * 1020
EXT4 = b"\0" * 1080 + b"\x53\xef" + b"\0" * 966
XFS = b"XFSB" + b"\0" * 2044


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (disk(EROFS), "erofs"),
        (disk(EXT4, 2048), "ext4"),
        (disk(XFS), "xfs"),
        (disk(EROFS, None), "erofs"),
        (disk(b"\0" * 2048), None),
        (disk(EXT4)[:2000], None),
        (b"", None),
        (EXT4[:454] + b"\x07" + EXT4[455:510] + b"\x55\xaa" + EXT4[512:], "ext4"),
    ],
)
def test_the_superblock_tells_the_file_system(content: bytes, name: str | None) -> None:
    def read(start: int, length: int) -> bytes:
        return content[start : start + length]

    assert file_system_of(read) == name


@pytest.mark.parametrize(
    ("image", "device", "waits", "words"),
    [
        (guest(KERNEL, IMAGE), GPU, True, "has no CDI specification of the guest"),
        (guest(KERNEL, IMAGE, guest_hook_path="/hooks"), GPU, True, "has no CDI specification"),
        (guest(KERNEL, IMAGE), GPU, False, "neither the image nor a hook"),
        (guest(KERNEL, IMAGE), AMD, True, "containers get no device nodes"),
    ],
)
def test_an_agent_that_waits_for_cdi_needs_an_image_that_writes_it(
    image: GuestImage, device: PciDevice, words: str, *, waits: bool
) -> None:
    report = check_guest_image(image, [device], waits_for_cdi=waits)
    (node,) = [finding for finding in report.findings if finding.rule == "guest-nodes"]
    assert words in node.summary
