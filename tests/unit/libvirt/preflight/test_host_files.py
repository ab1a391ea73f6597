"""Libvirt's files on the host: hooks that do not run, devices in hooks, ROMs and AppArmor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.rom import rom_image
from tests.unit.host_files import tree_of
from tests.unit.libvirt.preflight.situations import (
    GPU,
    domain,
    found,
    function,
    host,
    libvirt,
    pci_element,
    xml,
)
from vfiomgr.libvirt.preflight.host_files import read_files
from vfiomgr.libvirt.preflight.plan import preflight

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.libvirt.preflight.host_files import LibvirtFiles
    from vfiomgr.rules.runner import Report

ROM = "/roms/gpu.rom"
BRIDGE = function("0000:00:01.0", class_code="060400", driver="pcieport", header_type=1)
CONFINED = """
    sys/kernel/security/apparmor/profiles: /usr/sbin/cups (enforce)\\nlibvirtd (enforce)
    etc/apparmor.d/abstractions/libvirt-qemu: #include <abstractions/base>\\n/usr/share/{q,v}*/** r,
"""


INCLUDED = (
    "etc/apparmor.d/abstractions/base: include if exists <x.d>\n"
    'etc/apparmor.d/x.d/mine: audit "/roms/**" rw,'
)


def judge(files: LibvirtFiles, text: str | None = None) -> Report:
    """What is found of a domain with these files."""
    (report,) = preflight(host(BRIDGE), [domain(text)], libvirt(), {}, files)
    return report


def with_rom(rest: str = "") -> str:
    """A domain whose GPU has a ROM file."""
    return xml(pci_element(str(GPU.address), rest=f"<rom file='{ROM}'/>") + rest)


def denied(root: Path, *more: str, text: str = CONFINED) -> bool:
    """Whether AppArmor denies the ROM."""
    return read_files(tree_of(root, "\n".join((text, *more))), [ROM]).denied == (ROM,)


def test_a_rom_outside_of_the_profile_is_found_with_its_remedies(tmp_path: Path) -> None:
    files = read_files(tree_of(tmp_path, CONFINED), [ROM, "/usr/share/vgabios/a/b.rom"])
    assert files.denied == (ROM,)
    finding = found(judge(files, with_rom()), "rom-apparmor")
    assert finding is not None
    assert "move it to /usr/share/vgabios, or add the line `/roms/gpu.rom r,`" in finding.remedy
    unconfined = with_rom().replace("</devices>", "</devices><seclabel type='none'/>")
    assert found(judge(files, unconfined), "rom-apparmor") is None


@pytest.mark.parametrize(
    "more",
    [
        "etc/apparmor.d/abstractions/base: owner /roms/*.rom r,",
        INCLUDED,
        "etc/apparmor.d/abstractions/base: @{ROMS}/gpu.rom r,",
        "etc/apparmor.d/abstractions/base: /{rom,roms/[a-z]pu.rom r,",
        "etc/apparmor.d/abstractions/base: /usr/share/x}{ r,",
        'etc/apparmor.d/abstractions/base: "/roms/**" r,',
        "etc/apparmor.d/abstractions/base: r /roms/**,",
        "etc/apparmor.d/libvirt/TEMPLATE.qemu: /roms/* r,",
        'etc/libvirt/qemu.conf: security_driver = "none"',
        "etc/libvirt/qemu.conf: security_default_confined=0",
    ],
)
def test_allowed_included_not_understood_or_not_confined_is_silent(
    tmp_path: Path, more: str
) -> None:
    assert not denied(tmp_path, more)


@pytest.mark.parametrize(
    "more",
    [
        "etc/apparmor.d/abstractions/base: deny /roms/** r,\\n# /roms/** r,\\n/roms/*.rom w,",
        "etc/apparmor.d/local/abstractions/libvirt-qemu: /roms/** r,",
        'etc/libvirt/qemu.conf: security_driver = [ "selinux", "apparmor" ]',
    ],
)
def test_what_does_not_allow_it_or_is_not_included_changes_nothing(
    tmp_path: Path, more: str
) -> None:
    assert denied(tmp_path, more)


def test_a_profile_that_cannot_be_read_or_only_complains_denies_nothing(tmp_path: Path) -> None:
    assert not denied(tmp_path / "a", text=CONFINED.replace("libvirtd (enforce)", "libvirtd"))
    assert not denied(tmp_path / "b", text=CONFINED.partition("etc/")[0])


def hooks(root: Path, text: str, mode: int = 0o755) -> LibvirtFiles:
    """The files of a host with one hook."""
    tree = tree_of(root, f"etc/libvirt/hooks/qemu.d/win/prepare/begin/a.sh: {text}")
    (root / "etc/libvirt/hooks/qemu.d/win/prepare/begin/a.sh").chmod(mode)
    return read_files(tree, [])


def test_a_hook_that_nobody_may_execute_is_found(tmp_path: Path) -> None:
    finding = found(judge(hooks(tmp_path, "#!/bin/sh", 0o644)), "hook-not-executable")
    assert finding is not None
    script = "/etc/libvirt/hooks/qemu.d/win/prepare/begin/a.sh"
    assert finding.evidence == (f"{script}: mode 0644",)
    assert f"chmod 755 {script};" in finding.remedy
    for text, mode in (("#!/bin/sh", 0o744), ("A=1", 0o644)):
        assert found(judge(hooks(tmp_path, text, mode)), "hook-not-executable") is None
    other = xml(name="linux")
    assert found(judge(hooks(tmp_path, "#!/bin/sh", 0o644), other), "hook-not-executable") is None


HELPER = 'etc/libvirt/hooks/qemu: #!/bin/sh\\nfind -L "$BASEDIR/qemu.d/$GUEST_NAME/$2/$3"\n'


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("", "qemu.d does not exist or is empty"),
        ("etc/libvirt/hooks/qemu.d/Win/prepare/begin/a.sh: #!/bin/sh", "Win/prepare/begin/a.sh is"),
        ("etc/libvirt/hooks/qemu.d/win/start.sh: #!/bin/sh", "win/start.sh is not below"),
        ("etc/libvirt/hooks/qemu.d/win/prepare/begin/a.sh: #!/bin/sh", None),
        ("etc/libvirt/hooks/qemu.d/win/prepare/begin: #!/bin/sh", None),
        ("etc/libvirt/hooks/qemu.d/linux/prepare/begin/a.sh: #!/bin/sh", None),
        ("etc/libvirt/hooks/qemu: #!/bin/sh\\nvfio-startup $1", None),
    ],
)
def test_a_helper_of_hooks_needs_scripts_for_the_guest(
    tmp_path: Path, more: str, shown: str | None
) -> None:
    files = read_files(tree_of(tmp_path, HELPER + more), [])
    finding = found(judge(files), "hook-without-scripts")
    assert (finding is None) is (shown is None)
    if finding is not None:
        assert str(shown) in finding.evidence[-1]
        assert "mkdir -p /etc/libvirt/hooks/qemu.d/win/prepare/begin" in finding.remedy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pci_0000_77_00_0", "names a device that does not exist: 0000:77:00.0"),
        ("pci_0000_00_01_0", "stays with the host: 0000:00:01.0"),
        ("pci_0000_01_00_0", None),
        ("0000:00:01.0", None),
    ],
)
def test_devices_of_hooks_are_those_that_may_be_detached(
    tmp_path: Path, name: str, words: str | None
) -> None:
    finding = found(judge(hooks(tmp_path, f"GPU={name}")), "hook-device")
    assert (words is None) is (finding is None)
    if finding is not None:
        assert str(words) in finding.summary
        assert finding.evidence[0].endswith(f"/a.sh:1: GPU={name}")


@pytest.mark.parametrize(
    ("data", "title", "remedy"),
    [
        (b"NVGI" * 16, "is no option ROM", "dump it from this card while no driver uses it"),
        (b"\x55\xaa" * (256 << 9) + rom_image(), "is no option ROM", "dump it from this card"),
        (
            b"NVGI" * 16 + rom_image(),
            "has 64 bytes before its ROM",
            "remove them: vfiomgr rom check /roms",
        ),
        (
            rom_image("10de:1b80"),
            "is the ROM of another device: 10de:1b80",
            "or remove <rom file> in",
        ),
        (rom_image(kind=0), "has no image for UEFI", "or remove <rom file> in line"),
        (rom_image(kind=0, last=0) + rom_image(), None, None),
        (rom_image("10de:1b80", devices=b"\xb6\x25\0\0"), None, None),
    ],
)
def test_a_rom_that_cannot_work_is_found(
    tmp_path: Path, data: bytes, title: str | None, remedy: str | None
) -> None:
    (tmp_path / "roms").mkdir()
    (tmp_path / "roms/gpu.rom").write_bytes(data)
    text = with_rom().replace("<os>", "<os firmware='efi'>")
    finding = found(judge(read_files(tree_of(tmp_path, ""), [ROM]), text), "rom-invalid")
    assert (finding is None) is (title is None)
    if finding is not None:
        assert str(title) in finding.summary
        assert str(remedy) in finding.remedy


def test_the_rom_of_the_boot_display_is_not_dumped_from_sysfs(tmp_path: Path) -> None:
    (tmp_path / "roms").mkdir()
    (tmp_path / "roms/gpu.rom").write_bytes(rom_image(kind=0))
    text = with_rom().replace("<os>", "<os firmware='efi'>")
    console = host(replace(GPU, is_boot_display=True))
    (report,) = preflight(
        console, [domain(text)], libvirt(), {}, read_files(tree_of(tmp_path, ""), [ROM])
    )
    finding = found(report, "rom-invalid")
    assert finding is not None
    assert "nvflash" in finding.remedy
    assert "echo 1 > rom" not in finding.remedy


def test_a_bios_runs_a_rom_without_uefi(tmp_path: Path) -> None:
    (tmp_path / "roms").mkdir()
    (tmp_path / "roms/gpu.rom").write_bytes(rom_image(kind=0))
    files = read_files(tree_of(tmp_path, ""), [ROM, "/roms", "/roms/other.rom"])
    assert set(files.roms) == {ROM}
    assert found(judge(files, with_rom().replace(" firmware='efi'", "")), "rom-invalid") is None


LOG = "var/log/libvirt/qemu/win.log"
OLD = (
    "2026-01-02 10:11:12.131+0000: starting up libvirt version: 11.3.0\nVFIO_MAP_DMA failed: -22\n"
)
NEW = OLD.replace("-22", "Cannot allocate memory") + "2026-01-02T10:12Z qemu: ordinary\n"


def logged(root: Path, text: str, name: str = "win") -> Report:
    """What is found of a domain with a log of QEMU."""
    log = root / LOG
    log.parent.mkdir(parents=True)
    log.write_text(text)
    return judge(read_files(tree_of(root, ""), [], [name]), xml(name=name))


def test_what_qemu_logged_since_the_last_start_is_found(tmp_path: Path) -> None:
    (finding,) = (f for f in logged(tmp_path, OLD + NEW).findings if f.rule == "qemu-log")
    assert finding.severity == "warning"
    assert finding.summary.startswith("QEMU logged: VFIO could not lock the guest's memory")
    line = "VFIO_MAP_DMA failed: Cannot allocate memory"
    assert finding.evidence == (f"/{LOG}, last start: {line}",)
    assert "hard_limit" in finding.remedy


def test_a_log_is_read_from_its_last_64_kib_on(tmp_path: Path) -> None:
    report = logged(tmp_path, OLD + "ordinary\n" * 8000 + "VFIO_MAP_DMA failed: Bad address\n")
    (finding,) = (f for f in report.findings if f.rule == "qemu-log")
    assert "Bad address" in finding.evidence[0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (NEW + OLD.partition("\n")[0], "win"),
        (
            OLD.replace(
                "VFIO_MAP_DMA failed: -22", "Could not enable error recovery for the device"
            ),
            "win",
        ),
        (NEW, "linux"),
        (NEW, "../qemu/win"),
    ],
)
def test_an_earlier_start_a_harmless_message_and_another_domain_are_silent(
    tmp_path: Path, text: str, name: str
) -> None:
    assert found(logged(tmp_path, text, name), "qemu-log") is None
