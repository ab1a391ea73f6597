"""A desktop guest: Looking Glass's memory, keyboard and mouse, sound, its emulated screen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.host_files import tree_of
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GPU,
    domain,
    found,
    function,
    host,
    libvirt,
    pci_element,
    xml,
)
from vfiomgr.host.tree import HostTree
from vfiomgr.libvirt.desktop import SHARED
from vfiomgr.libvirt.preflight.desktop import named_files
from vfiomgr.libvirt.preflight.desktop_files import (
    DesktopFiles,
    FileState,
    QemuAccount,
    read_desktop,
)
from vfiomgr.libvirt.preflight.host_files import LibvirtFiles
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.units import MIB, Version

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.model import Hypervisor
    from vfiomgr.rules.runner import Report

SHM, KVMFR = f"{SHARED}/looking-glass", "/dev/kvmfr0"
BY_ID = "/dev/input/by-id/usb-Logitech_K120-event-kbd"
NO_BALLOON = "<memballoon model='none'/>"
GLASS = (
    "<shmem name='looking-glass'><model type='ivshmem-plain'/><size unit='M'>64</size></shmem>"
    + NO_BALLOON
)
QEMU = QemuAccount("libvirt-qemu", 64055, frozenset({64055, 106}))
OWN = FileState(is_node=False, size_bytes=64 * MIB, uid=1000, gid=106, mode=0o660)
NODE = replace(OWN, is_node=True, size_bytes=0)
ALLOWED = DesktopFiles(
    {SHM: OWN, KVMFR: NODE, BY_ID: replace(NODE, uid=0, gid=0)},
    QEMU,
    frozenset({"/dev/null", KVMFR}),
    (64,),
)
RULES = frozenset(
    {
        *("shared-memory-stale", "shared-memory-denied", "shared-memory-missing"),
        *("kvmfr-missing", "kvmfr-too-small", "kvmfr-acl", "kvmfr-apparmor"),
        *("input-missing", "input-by-number", "audio-pipewire", "audio-user"),
        *("looking-glass-balloon", "emulated-screen"),
    }
)


def evdev(path: str) -> str:
    return f"<input type='evdev'><source dev='{path}'/></input>"


def arguments(*values: str) -> str:
    """A domain with these arguments of QEMU's own."""
    text = "".join(f"<qemu:arg value='{value}'/>" for value in values)
    written = xml(BOTH + NO_BALLOON).replace(
        "<domain ", "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' ", 1
    )
    return written.replace("</domain>", f"<qemu:commandline>{text}</qemu:commandline></domain>")


def backend(size: str = '"size":67108864') -> str:
    written = f'{{"qom-type":"memory-backend-file","id":"x","mem-path":"{KVMFR}",{size}}}'
    return arguments("-object", written)


def judge(
    text: str, files: DesktopFiles | None = ALLOWED, hypervisor: Hypervisor | None = None
) -> Report:
    known = LibvirtFiles(desktop=files)
    (report,) = preflight(host(), [domain(text)], hypervisor or libvirt(), {}, known)
    return report


def only(report: Report) -> Diagnostic | None:
    """The only finding of these rules."""
    own = [finding for finding in report.findings if finding.rule in RULES]
    assert len(own) < 2, [finding.rule for finding in own]
    return own[0] if own else None


def without(path: str) -> DesktopFiles:
    return replace(ALLOWED, files={k: v for k, v in ALLOWED.files.items() if k != path})


def with_state(path: str, state: FileState) -> DesktopFiles:
    return replace(ALLOWED, files={**ALLOWED.files, path: state})


@pytest.mark.parametrize(
    "text",
    [
        xml(BOTH),
        xml(BOTH + GLASS),
        backend(),
        arguments("-object", f"memory-backend-file,id=x,mem-path={KVMFR},size=64M,share=on"),
        xml(BOTH + evdev(BY_ID)),
        xml(BOTH + "<audio id='1' type='spice'/><video><model type='vga'/></video>"),
    ],
)
def test_what_is_right_is_silent_with_and_without_the_files(text: str) -> None:
    assert only(judge(text)) is None
    assert only(judge(text, None)) is None


@pytest.mark.parametrize(
    ("files", "rule", "words", "remedy"),
    [
        (
            with_state(SHM, replace(OWN, size_bytes=32 * MIB)),
            "shared-memory-stale",
            f"{SHM} has 32 MiB, and the domain needs 64 MiB",
            f"rm {SHM}",
        ),
        (
            with_state(SHM, replace(OWN, gid=1000)),
            "shared-memory-denied",
            "its owner and mode do not allow libvirt-qemu",
            f"chgrp GROUP {SHM} && chmod g+rw {SHM}",
        ),
        (
            with_state(SHM, replace(OWN, uid=QEMU.uid, mode=0o460)),
            "shared-memory-denied",
            "its owner and mode",
            "/etc/tmpfiles.d",
        ),
        (
            without(SHM),
            "shared-memory-missing",
            "does not exist, and nothing creates it",
            f"write `f {SHM} 0660 USER kvm -`",
        ),
    ],
)
def test_memory_that_qemu_or_the_client_cannot_use(
    files: DesktopFiles, rule: str, words: str, remedy: str
) -> None:
    finding = only(judge(xml(BOTH + GLASS), files))
    assert finding is not None
    assert (finding.rule, words in finding.summary) == (rule, True)
    assert remedy in finding.remedy
    assert finding.evidence[0].endswith("<shmem name='looking-glass'>")


@pytest.mark.parametrize(
    "files",
    [
        with_state(SHM, replace(OWN, size_bytes=0)),
        with_state(SHM, replace(OWN, size_bytes=128 * MIB)),
        replace(without(SHM), kept=frozenset({SHM})),
        replace(with_state(SHM, replace(OWN, gid=1)), account=None),
        replace(with_state(SHM, replace(OWN, mode=0)), account=replace(QEMU, uid=0)),
        with_state(SHM, replace(OWN, gid=1, mode=0o606)),
    ],
)
def test_memory_that_works_or_of_which_too_little_is_known(files: DesktopFiles) -> None:
    assert only(judge(xml(BOTH + GLASS), files)) is None


def test_other_memory_is_created_by_qemu() -> None:
    for other in (GLASS.replace("looking-glass", "frames"), GLASS.replace("plain", "doorbell")):
        assert only(judge(xml(BOTH + other), without(SHM))) is None


@pytest.mark.parametrize(
    ("files", "rule", "remedy"),
    [
        (without(KVMFR), "kvmfr-missing", "modprobe kvmfr static_size_mb=64"),
        (with_state(KVMFR, OWN), "kvmfr-missing", f"rm {KVMFR}; modprobe kvmfr"),
        (replace(ALLOWED, sizes_mib=(32,)), "kvmfr-too-small", "static_size_mb=64"),
        (replace(ALLOWED, sizes_mib=(0,)), "kvmfr-too-small", "static_size_mb=64"),
        (
            with_state(KVMFR, replace(NODE, mode=0o600)),
            "shared-memory-denied",
            "/etc/udev/rules.d/70-kvmfr.rules",
        ),
        (
            replace(ALLOWED, device_acl=frozenset({"/dev/null"})),
            "kvmfr-acl",
            'cgroup_device_acl = [ "/dev/null", "/dev/kvmfr0" ]',
        ),
        (
            replace(ALLOWED, device_acl=frozenset()),
            "kvmfr-acl",
            '"/dev/ptmx", "/dev/kvm", "/dev/userfaultfd", "/dev/kvmfr0" ]',
        ),
        (
            replace(ALLOWED, denied=frozenset({KVMFR})),
            "kvmfr-apparmor",
            f"add the line `{KVMFR} rw,` to /etc/apparmor.d/local/abstractions/libvirt-qemu",
        ),
    ],
)
def test_the_node_of_the_kernel_module(files: DesktopFiles, rule: str, remedy: str) -> None:
    finding = only(judge(backend(), files))
    assert finding is not None
    assert (finding.rule, finding.severity) == (rule, "blocker")
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("size", "parameter"),
    [('"size":"64.5M"', "static_size_mb=SIZE (with"), ('"size":67108865', "static_size_mb=65,")],
)
def test_the_module_is_never_loaded_without_memory(size: str, parameter: str) -> None:
    finding = only(judge(backend(size), without(KVMFR)))
    assert finding is not None
    assert parameter in finding.remedy


def test_a_node_of_unknown_size_is_large_enough() -> None:
    assert only(judge(backend(), replace(ALLOWED, sizes_mib=()))) is None
    assert only(judge(backend('"size":"64.5M"'), replace(ALLOWED, sizes_mib=(1,)))) is None
    assert only(judge(backend(), replace(ALLOWED, device_acl=None))) is None


def test_an_input_device_by_number_and_one_that_is_not_there() -> None:
    number = "/dev/input/event3"
    finding = only(judge(xml(BOTH + evdev(number)), with_state(number, NODE)))
    assert finding is not None
    assert (finding.rule, finding.severity) == ("input-by-number", "warning")
    assert "ls -l /dev/input/by-id" in finding.remedy
    for files in (without(BY_ID), with_state(BY_ID, OWN)):
        missing = only(judge(xml(BOTH + evdev(BY_ID)), files))
        assert missing is not None
        assert (missing.rule, missing.severity) == ("input-missing", "blocker")


@pytest.mark.parametrize(
    ("attributes", "rule"),
    [
        ("type='pipewire' runtimeDir='/run/user/1000'", "audio-user"),
        ("type='pulseaudio' serverName='/run/user/1000/pulse/native'", "audio-user"),
        ("type='pulseaudio' serverName='unix:/run/user/1000/pulse/native'", "audio-user"),
        ("type='pipewire' runtimeDir='/run/user/64055'", None),
        ("type='pulseaudio' serverName='server:4713'", None),
        ("type='spice'", None),
    ],
)
def test_a_sound_server_is_that_of_qemus_user(attributes: str, rule: str | None) -> None:
    new = replace(libvirt(), libvirt=Version(11, 3), qemu=Version(10, 0))
    finding = only(judge(xml(BOTH + f"<audio id='1' {attributes}/>"), ALLOWED, new))
    assert (None if finding is None else finding.rule) == rule
    if finding is not None:
        assert 'set user = "+1000" in /etc/libvirt/qemu.conf' in finding.remedy
    session = replace(new, uri="qemu:///session")
    assert only(judge(xml(BOTH + f"<audio id='1' {attributes}/>"), ALLOWED, session)) is None


@pytest.mark.parametrize(
    ("releases", "words"),
    [
        (((9, 9), (8, 1)), "libvirt 9.9.0 (since 9.10.0) has no PipeWire"),
        (((9, 10), (8, 0)), "QEMU 8.0.0 (since 8.1.0) has no PipeWire"),
        (((9, 10), (8, 1)), None),
    ],
)
def test_pipewire_needs_a_release(
    releases: tuple[tuple[int, int], tuple[int, int]], words: str | None
) -> None:
    of_libvirt, of_qemu = (Version(*release) for release in releases)
    asked = replace(libvirt(), libvirt=of_libvirt, qemu=of_qemu)
    text = xml(BOTH + "<audio id='1' type='pipewire' runtimeDir='/run/user/64055'/>")
    finding = only(judge(text, ALLOWED, asked))
    assert (None if finding is None else finding.summary) == words


def test_a_balloon_beside_looking_glass_is_information() -> None:
    for balloon in ("", "<memballoon model='virtio'/>"):
        finding = only(judge(xml(BOTH + GLASS.replace(NO_BALLOON, balloon))))
        assert finding is not None
        assert (finding.rule, finding.severity) == ("looking-glass-balloon", "info")


def test_an_emulated_screen_beside_a_gpu_is_information_with_the_way_to_remove_it() -> None:
    card = function(str(GPU.address), class_code="030000")
    seen = host(replace(card, bars=GPU.bars))
    known = LibvirtFiles(desktop=ALLOWED)

    def screen(video: str, rest: str = GLASS) -> Diagnostic | None:
        text = xml(pci_element(str(GPU.address)) + rest + video)
        (report,) = preflight(seen, [domain(text)], libvirt(), {}, known)
        return found(report, "emulated-screen")

    finding = screen("<video><model type='vga'/></video>")
    assert finding is not None
    assert finding.severity == "info"
    assert "run vfiomgr libvirt edit gpu.xml --no-video" in finding.remedy
    assert screen("<video><model type='none'/></video>") is None
    assert screen("<video><model type='vga'/></video>", NO_BALLOON) is None, "no desktop guest"


def test_files_of_a_domain_are_those_that_qemu_opens() -> None:
    read = domain(xml(BOTH + GLASS + evdev(BY_ID) + evdev("")))
    assert list(named_files(read)) == [SHM, BY_ID]
    assert list(named_files(domain(backend()))) == [KVMFR]


ACCOUNTS = r"""
    etc/passwd: root:x:0:0::/:\nann:x:1000:1001::/:\nlibvirt-qemu:x:64055:64056::/:
    etc/group: kvm:x:106:libvirt-qemu,ann\nvideo:x:44:ann
    etc/tmpfiles.d/a.conf: # f /dev/shm/other\nf /dev/shm/looking-glass 0660 ann kvm -
    sys/module/kvmfr/parameters/static_size_mb: 64,32
    dev/shm/looking-glass: 12345
    dev/input/by-id/kbd -> ../event3
    dev/input/event3: x
"""
USER = r'etc/libvirt/qemu.conf: # user = "root"\nuser = "+1000"\n'
CONF = USER + r'cgroup_device_acl = [\n  "/dev/null",\n  "/dev/kvmfr0"\n]' + ACCOUNTS


def test_the_files_are_read(tmp_path: Path) -> None:
    read = read_desktop(tree_of(tmp_path, CONF), [SHM, "/dev/input/by-id/kbd", KVMFR])
    uid, gid = os.getuid(), os.getgid()
    mode = (tmp_path / "dev/shm/looking-glass").stat().st_mode & 0o777
    assert read.files[SHM] == FileState(is_node=False, size_bytes=6, uid=uid, gid=gid, mode=mode)
    assert set(read.files) == {SHM, "/dev/input/by-id/kbd"}
    assert read.account == QemuAccount("+1000", 1000, frozenset({1001, 106, 44}))
    assert read.device_acl == frozenset({"/dev/null", KVMFR})
    assert read.sizes_mib == (64, 32)
    assert read.kept == {SHM}
    assert read.denied == frozenset()


def test_a_device_node_is_one_even_behind_a_link() -> None:
    read = read_desktop(HostTree("/"), ["/dev/null", "/dev/stdin/none"])
    assert read.files["/dev/null"].is_node
    assert "/dev/stdin/none" not in read.files


def test_defaults_of_libvirt_are_those_of_debian_and_fedora(tmp_path: Path) -> None:
    text = CONF.partition("etc/passwd")[2]
    plain = "etc/libvirt/qemu.conf: #\netc/passwd" + text
    read = read_desktop(tree_of(tmp_path / "a", plain), [SHM])
    assert read.account == QemuAccount("libvirt-qemu", 64055, frozenset({64056, 106}))
    assert read.device_acl == frozenset(), "libvirt's own list"
    none = read_desktop(tree_of(tmp_path / "b", ACCOUNTS), [SHM])
    assert (none.account, none.device_acl) == (None, None)
    unknown = 'etc/libvirt/qemu.conf: user = "nobody"' + ACCOUNTS
    assert read_desktop(tree_of(tmp_path / "c", unknown), [SHM]).account is None
    free = 'etc/libvirt/qemu.conf: cgroup_controllers = [ "cpu" ]' + ACCOUNTS
    assert read_desktop(tree_of(tmp_path / "d", free), [SHM]).device_acl is None


def test_apparmor_denies_what_no_rule_names(tmp_path: Path) -> None:
    confined = (
        "sys/kernel/security/apparmor/profiles: libvirtd (enforce)\n"
        "etc/apparmor.d/abstractions/libvirt-qemu: "
    )
    denied = read_desktop(tree_of(tmp_path / "a", f"{confined}{SHARED}/* rw,"), [KVMFR]).denied
    assert denied == {KVMFR}
    assert not read_desktop(tree_of(tmp_path / "b", f"{confined}{KVMFR} rw,"), [KVMFR]).denied


def test_nothing_is_read_for_other_domains(tmp_path: Path) -> None:
    assert read_desktop(tree_of(tmp_path, CONF), []) == DesktopFiles()
