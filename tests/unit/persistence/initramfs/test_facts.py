from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.host_files import tree_of
from vfiomgr.persistence.facts import (
    read_initramfs,
    read_manager,
    read_preset_image,
)
from vfiomgr.persistence.model import Initramfs, Manager

if TYPE_CHECKING:
    from pathlib import Path

DEBIAN = """
    etc/initramfs-tools/initramfs.conf: MODULES=most\\nBUSYBOX=auto # FRAMEBUFFER=y
    etc/initramfs-tools/modules: # comment\\nvfio-pci ids=1\\n
    """

BOTH = f"{DEBIAN}\nusr/bin/dracut: #!\nusr/sbin/mkinitramfs: #!"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            DEBIAN,
            Initramfs("initramfs-tools", ("vfio_pci",), ("01", "02", "0c03")),
        ),
        (
            f"{DEBIAN}\nusr/share/initramfs-tools/conf-hooks.d/plymouth: FRAMEBUFFER=y",
            Initramfs("initramfs-tools", ("vfio_pci",), ("01", "02", "0c03", "03")),
        ),
        ("etc/initramfs-tools/initramfs.conf: MODULES=dep", Initramfs("initramfs-tools")),
        (
            """
            etc/dracut.conf: # nothing
            etc/dracut.conf.d/a.conf: add_drivers+=" vfio-pci "\\nomit_drivers+=" nouveau "
            etc/dracut.conf.d/90-vfiomgr.conf: add_drivers+=" ours "
            """,
            Initramfs("dracut", ("vfio_pci",), ("01", "02", "0c03", "03"), ("nouveau",)),
        ),
        (
            'etc/dracut.conf.d/a.conf: omit_dracutmodules+=" drm plymouth "',
            Initramfs("dracut", (), ("01", "02", "0c03")),
        ),
        (
            "etc/mkinitcpio.conf: MODULES=(amdgpu)\\nHOOKS=(base udev kms block)",
            Initramfs("mkinitcpio", ("amdgpu",), ("03", "01"), reads_fragments=False),
        ),
        (
            """
            etc/mkinitcpio.conf: HOOKS=(base udev)
            etc/mkinitcpio.conf.d/own.conf: MODULES+=(nvidia)
            etc/mkinitcpio.d/linux.preset: #ALL_config="/etc/mkinitcpio.conf"\nPRESETS=('default')
            """,
            Initramfs("mkinitcpio", ("nvidia",)),
        ),
        (
            f"{DEBIAN}\nusr/bin/dracut: #!\netc/dracut.conf: # nothing",
            Initramfs("dracut", (), ("01", "02", "0c03", "03")),
        ),
        (
            BOTH,
            Initramfs("dracut", (), ("01", "02", "0c03", "03")),
        ),
        (
            f"{BOTH}\nusr/sbin/update-initramfs: exec dracut --force",
            Initramfs("dracut", (), ("01", "02", "0c03", "03")),
        ),
        (
            f"{BOTH}\nusr/sbin/update-initramfs: mkinitramfs -o x",
            Initramfs("initramfs-tools", ("vfio_pci",), ("01", "02", "0c03")),
        ),
        (
            """
            usr/bin/dracut: #!
            usr/lib/dracut/dracut.conf.d/01-dist.conf: omit_drivers+=" nouveau "
            usr/lib/dracut/dracut.conf.d/02-dist.conf: add_drivers+=" amdgpu "
            usr/lib/dracut/dracut.conf.d/fips/50-fips.conf: add_drivers+=" nvidia "
            etc/dracut.conf.d/02-dist.conf: add_drivers+=" vfio-pci "
            """,
            Initramfs("dracut", ("vfio_pci",), ("01", "02", "0c03", "03"), ("nouveau",)),
        ),
        (
            """
            usr/bin/mkinitcpio: #!
            usr/bin/limine-mkinitcpio: #!
            etc/mkinitcpio.conf: HOOKS=(base systemd kms)
            """,
            Initramfs("limine-mkinitcpio"),
        ),
        (
            """
            usr/bin/booster: #!
            usr/bin/dracut: #!
            """,
            Initramfs("booster"),
        ),
        ("etc/hostname: x", None),
    ],
)
def test_the_initramfs_is_known_by_its_tool_and_the_configuration(
    tmp_path: Path, files: str, expected: Initramfs | None
) -> None:
    assert read_initramfs(tree_of(tmp_path, files)) == expected


def preset(text: str) -> str:
    """The kernel of a package, and its preset."""
    return f"""
        usr/lib/modules/6.6.30-2-MANJARO/pkgbase: linux66\\n
        etc/mkinitcpio.d/linux66.preset: {text}
        etc/mkinitcpio.d/linux.preset: PRESETS=('default')\\ndefault_image=/boot/other.img
        """


MANJARO = """\
#ALL_config="/etc/mkinitcpio.conf"\\n\
ALL_kver="/boot/vmlinuz-6.6-x86_64"\\n\
PRESETS=('default' 'fallback')\\n\
default_image="/boot/initramfs-6.6-x86_64.img"\\n\
#default_uki="/efi/EFI/Linux/manjaro-6.6-x86_64.efi"\\n\
fallback_image="/boot/initramfs-6.6-x86_64-fallback.img"\\n\
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (preset(MANJARO), "/boot/initramfs-6.6-x86_64.img"),
        (preset("PRESETS=(one two)\\ntwo_image='/boot/two.img'"), "/boot/two.img"),
        (preset("PRESETS=('a')\\na_uki=/efi/a.efi"), "/efi/a.efi"),
        (preset("PRESETS=('a')\\na_efi_image=/efi/a.efi"), "/efi/a.efi"),
        (preset("PRESETS=('a')\\na_image=/old.img\\na_image=/new.img"), "/new.img"),
        (preset("PRESETS=('default')"), None),
        ("usr/lib/modules/6.6.30-2-MANJARO/pkgbase: linux66", None),
        ("etc/mkinitcpio.d/linux.preset: PRESETS=('a')\\na_image=/boot/a.img", None),
    ],
)
def test_the_image_of_a_kernel_is_the_first_one_of_its_preset(
    tmp_path: Path, files: str, expected: str | None
) -> None:
    assert read_preset_image(tree_of(tmp_path, files), "6.6.30-2-MANJARO") == expected


OWN = Initramfs(
    "mkinitcpio",
    ("nvidia",),
    ("03",),
    reads_fragments=False,
    configuration="/etc/mkinitcpio-lts.conf",
)
SHARED = Initramfs("mkinitcpio", ("amdgpu", "nouveau"))
OLDER = replace(OWN, modules=("amdgpu",), classes=(), configuration="/etc/mkinitcpio.conf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ALL_config='/etc/mkinitcpio-lts.conf'", OWN),
        ("default_config=/etc/mkinitcpio-lts.conf\\nALL_config=/etc/other.conf", OWN),
        ("default_config=''\\nALL_config=/etc/mkinitcpio-lts.conf", OWN),
        ('ALL_config="/etc/mkinitcpio.conf"', OLDER),
        ('ALL_config=""', SHARED),
        ("fallback_config=/etc/mkinitcpio-lts.conf", SHARED),
    ],
)
def test_the_preset_of_the_running_kernel_names_the_configuration(
    tmp_path: Path, text: str, expected: Initramfs
) -> None:
    kernel = preset(f"PRESETS=('default' 'fallback')\\n{text}")
    files = f"""
        {kernel}
        proc/sys/kernel/osrelease: 6.6.30-2-MANJARO
        etc/mkinitcpio.d/other.preset: PRESETS=('default')\\nALL_config=/etc/other.conf
        etc/mkinitcpio.conf: MODULES=(amdgpu)
        etc/mkinitcpio.conf.d/own.conf: MODULES+=(nouveau)
        etc/mkinitcpio-lts.conf: MODULES=(nvidia)\\nHOOKS=(base kms)
        """
    assert read_initramfs(tree_of(tmp_path, files)) == expected


MANAGERS = """
    usr/bin/dracut: #!
    usr/bin/rpm-ostree: #!
    usr/bin/bootc: #!
    usr/sbin/transactional-update: #!
    usr/bin/sdbootutil: #!
    """
"""Programs that may all be installed on hosts that use none of them."""
WRITABLE = "proc/mounts: /dev/sda2 / btrfs rw,relatime 0 0\\ntmpfs /run tmpfs ro 0 0"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (WRITABLE, None),
        (f"{WRITABLE}\nrun/ostree-booted:", "rpm-ostree"),
        (f"{WRITABLE}\nproc/cmdline: quiet composefs=0a1b root=UUID=1", "bootc"),
        ("proc/mounts: /dev/sda2 / btrfs ro,relatime 0 0", "transactional-update"),
        ("etc/hostname: x", "transactional-update"),  # a copy without /proc
        (f'{WRITABLE}\netc/sysconfig/bootloader: LOADER_TYPE="grub2-efi"', None),
    ],
)
def test_the_running_system_shows_what_deploys_it(
    tmp_path: Path, files: str, expected: Manager | None
) -> None:
    tree = tree_of(tmp_path, f"{MANAGERS}\n{files}")
    assert read_manager(tree) == expected
    image = read_initramfs(tree)
    assert image is not None
    assert image.tool == (expected or "dracut")


@pytest.mark.parametrize(
    "files",
    [
        "boot/efi/EFI/systemd/installed_by_sdbootutil: token",
        'etc/sysconfig/bootloader: LOADER_TYPE="grub2-bls"',
    ],
)
def test_where_sdbootutil_deploys_the_image_dracut_alone_does_not(
    tmp_path: Path, files: str
) -> None:
    image = read_initramfs(tree_of(tmp_path, f"{MANAGERS}\n{WRITABLE}\n{files}"))
    assert image == Initramfs("sdbootutil")
    assert not image.is_known


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("run/ostree-booted:\nusr/bin/bootc: #!", "bootc"),
        ("run/ostree-booted:", None),
        ("proc/cmdline: composefs=0a1b", None),
        ("etc/sysconfig/bootloader: LOADER_TYPE=systemd-boot", None),
    ],
)
def test_without_its_program_nothing_deploys(
    tmp_path: Path, files: str, expected: Manager | None
) -> None:
    assert read_manager(tree_of(tmp_path, files)) == expected
