"""`vfiomgr check console`: who uses a card of the desktop, and how each releases it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import desktop as desktops
from tests.fakes.desktop import Desktop
from tests.unit.devices import with_facts
from vfiomgr.check import check_console
from vfiomgr.documents.text import TextFile
from vfiomgr.passthrough.reserve import Reserve
from vfiomgr.pci.model import IN_ITS_MEMORY, PciAddress
from vfiomgr.persistence.model import PersistedBinding, render_rule, rule_file
from vfiomgr.snapshot.document import from_document, to_document
from vfiomgr.snapshot.redaction import Redaction
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Run
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot

_UNREAD = "programs of the desktop: /proc does not show the processes of all users"
FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


def read(desktop: Desktop) -> HostSnapshot:
    kernel = desktop.kernel
    return scan(kernel, kernel, with_users=True, with_readiness=True, with_desktop=True)


def found(report: Report, rule: str) -> list[Diagnostic]:
    """The findings of a rule, which must be printable as they are."""
    findings = [each for each in report.findings if each.rule == rule]
    for each in findings:
        assert each.evidence
        assert each.severity == "ok" or (each.why and each.remedy)
    return findings


def one(report: Report, rule: str) -> Diagnostic:
    (finding,) = found(report, rule)
    return finding


def rules(report: Report) -> set[str]:
    """The rules with findings, except what is fine."""
    return {each.rule for each in report.findings if each.severity != "ok"}


def ended(session: str) -> str:
    """Name how: logind leaves the programs of a session that its display manager has closed."""
    return f"loginctl terminate-session {session}; systemctl stop session-{session}.scope"


def test_gnome_on_the_only_card(tmp_path: Path) -> None:
    report = check_console(read(desktops.gnome(tmp_path)))
    assert not report.unknown
    assert one(report, "console-display").summary.endswith("shows the console")
    release = one(report, "console-release")
    assert release.severity == "info"
    assert release.remedy.endswith(f"vfiomgr bind --release {FIRST} --dry-run")
    assert "end session 2 of anna" in release.evidence
    bound = f"{FIRST}: amdgpu -> vfio-pci (driver_override vfio-pci)"
    assert any(text.startswith(bound) for text in release.evidence)
    session = one(report, "console-session")
    assert session.severity == "warning"
    assert session.summary.startswith("a session of anna uses 0000:01:00.0")
    assert "open nodes: gnome-shell (PID 1200)" in session.evidence
    assert session.remedy == f"systemctl stop gdm.service; {ended('2')}"
    manager = one(report, "console-display-manager")
    assert manager.evidence == ("gdm3 (PID 900), gdm.service",)
    assert manager.remedy.startswith("systemctl stop gdm.service; systemctl start getty@tty1")
    audio = one(report, "console-audio")
    assert "/dev/snd/controlC0" in audio.evidence
    assert audio.remedy == "systemctl --user --machine=1000@.host stop wireplumber.service"
    text = one(report, "console-text")
    assert text.remedy == "detach it first: echo 0 > /sys/class/vtconsole/vtcon1/bind"
    assert "no SSH server" in one(report, "console-way-back").summary
    assert not found(report, "console-process")


def test_plasma_with_the_devices_that_logind_opened(tmp_path: Path) -> None:
    desktop = desktops.kde(tmp_path)
    desktop.sysfs.put("/var/lib/systemd/linger/anna", "")
    session = one(check_console(read(desktop)), "console-session")
    assert "/run/systemd/sessions/3: logind opened /dev/dri/card0" in session.evidence
    assert session.remedy == (
        f"systemctl stop sddm.service; {ended('3')}; "
        "systemctl stop user@1000.service (its services linger)"
    )


def test_sway_from_a_login_has_no_display_manager(tmp_path: Path) -> None:
    report = check_console(read(desktops.sway(tmp_path)))
    assert one(report, "console-session").remedy == (
        f"systemctl stop getty@tty1.service; {ended('1')}"
    )
    assert not found(report, "console-display-manager")
    assert not found(report, "console-audio")


def test_an_x_server_of_the_display_manager_belongs_to_its_session(tmp_path: Path) -> None:
    report = check_console(read(desktops.xfce(tmp_path)))
    assert one(report, "console-session").remedy == (
        f"systemctl stop lightdm.service; {ended('c2')}"
    )
    manager = one(report, "console-display-manager")
    assert "Xorg (PID 950, lightdm.service): /dev/dri/card0" in manager.evidence
    assert not found(report, "console-process")


def test_the_greeter_is_a_session_of_its_own(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.display_manager("gdm.service", "gdm")
    desktop.session("c1", UID="42", USER="gdm", CLASS="greeter", SERVICE="gdm-launch-environment")
    desktop.of_user(1000, "gnome-shell", "org.gnome.Shell.service", "/dev/dri/card0", uid=42)
    session = one(check_console(read(desktop)), "console-session")
    assert session.summary.startswith("the greeter uses")
    assert session.remedy == f"systemctl stop gdm.service; {ended('c1')}"


def test_a_host_without_a_desktop_has_only_its_text_console(tmp_path: Path) -> None:
    report = check_console(read(desktops.headless(tmp_path)))
    assert rules(report) == {"console-display", "console-text", "console-release"}
    assert one(report, "console-way-back").severity == "ok"
    assert not report.unknown


def test_a_text_console_that_is_detached_or_elsewhere_is_not_reported(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path, cards=2)
    desktop.text_console()
    host = read(desktop)
    desktop.sysfs.put("/sys/class/vtconsole/vtcon1/bind", "0")
    assert not found(check_console(read(desktop)), "console-text")
    assert found(check_console(host, FIRST), "console-text")
    assert not found(check_console(host, SECOND), "console-text")


def test_services_and_computing_processes(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.service(700, "nvidia-persiste", "nvidia-persistenced.service", "/dev/dri/card0")
    desktop.process(710, "python3", "/", "/dev/dri/renderD128")
    desktop.session("5", TYPE="tty", SEAT="", REMOTE="1", SERVICE="sshd")
    desktop.of_session(720, "blender", "5", "/dev/dri/renderD128")
    report = check_console(read(desktop))
    remedy = one(report, "console-service").remedy
    assert remedy.startswith("systemctl stop nvidia-persistenced.service. After the guest: ")
    process = one(report, "console-process")
    assert process.remedy == "let them finish, or end them: kill 710 720"
    assert not found(report, "console-session")


def test_a_service_is_stopped_since_systemd_may_start_it_again(tmp_path: Path) -> None:
    """pop-os/system76-power#448: ollama, whose unit has Restart=always."""
    desktop = Desktop(tmp_path)
    desktop.service(700, "ollama", "ollama.service", "/dev/dri/renderD128")
    desktop.service(701, "ollama", "ollama.service", "/dev/dri/card0")
    process = one(check_console(read(desktop)), "console-process")
    assert process.remedy == "let them finish, or end them: systemctl stop ollama.service"
    desktop.process(710, "python3", "/user.slice/user-1000.slice/a.service", "/dev/dri/card0")
    both = one(check_console(read(desktop)), "console-process").remedy
    assert both.endswith("end them: systemctl stop ollama.service; kill 710")


def test_systemd_that_keeps_a_card_is_not_to_be_killed(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.service(600, "systemd-logind", "systemd-logind.service", "/dev/dri/card0")
    (process,) = found(check_console(read(desktop)), "console-process")
    assert "kill" not in process.remedy
    other = desktops.sway(tmp_path / "sway")
    other.service(600, "systemd-logind", "systemd-logind.service", "/dev/dri/card0")
    assert not found(check_console(read(other)), "console-process")


def test_a_program_that_nobody_can_start_again_blocks_the_release(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    desktop.service(2000, "ollama", "ollama.service", "/dev/dri/renderD128")
    release = one(check_console(read(desktop)), "console-release")
    assert release.severity == "blocker"
    assert "ollama (PID 2000, ollama.service)" in release.summary
    assert release.remedy


def test_a_free_second_card_needs_no_release(tmp_path: Path) -> None:
    report = check_console(read(desktops.sway(tmp_path, cards=1)), FIRST)
    assert found(report, "console-release")
    free = Desktop(tmp_path / "free", cards=2)
    assert found(check_console(read(free), SECOND), "console-release") == []


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path))
    closed = with_facts(host, users=None)
    report = check_console(closed)
    assert [text.partition(":")[0] for text in report.unknown] == ["processes that use the card"]
    assert "may use" in one(report, "console-session").summary
    assert check_console(replace(host, desktop=None)).unknown == (
        "the desktop: not in the snapshot",
    )


@pytest.mark.parametrize(
    ("lacking", "name"),
    [
        ("/run/systemd/sessions", "user sessions"),
        ("/sys/class/vtconsole", "virtual consoles"),
        ("/proc/net/tcp", "SSH server"),
    ],
)
def test_absent_files_of_a_recording_are_unknown(tmp_path: Path, lacking: str, name: str) -> None:
    from vfiomgr.host.tree import HostTree  # noqa: PLC0415 - the tree of a recording

    desktop = Desktop(tmp_path)
    desktop.sysfs.drop(lacking)
    tree = HostTree(desktop.kernel.root)
    host = scan(tree, tree, with_users=True, with_readiness=True, with_desktop=True)
    assert name in {text.partition(":")[0] for text in check_console(host).unknown}


def test_a_session_file_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    desktop.sysfs.make("/run/systemd/sessions/7")
    (text,) = check_console(read(desktop)).unknown
    assert text == "user sessions: cannot read /run/systemd/sessions/7"


def test_an_ssh_server_of_a_socket_counts(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    row = "   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000"
    desktop.sysfs.put("/proc/net/tcp", row)
    assert one(check_console(read(desktop)), "console-way-back").severity == "ok"
    desktop.sysfs.put("/proc/net/tcp", row.replace("00000000:0016", "0100007F:0016"))
    assert one(check_console(read(desktop)), "console-way-back").severity == "warning"


def test_the_alias_names_the_display_manager_if_no_process_can_be_read(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path))
    assert host.desktop is not None
    hidden = replace(host, desktop=replace(host.desktop, processes=(), unread=(_UNREAD,)))
    manager = one(check_console(hidden), "console-display-manager")
    assert manager.evidence[0].endswith("/display-manager.service -> gdm.service")
    masked = replace(host.desktop, processes=(), display_manager=None)
    report = check_console(replace(host, desktop=masked))
    assert not found(report, "console-display-manager")


def test_a_display_manager_that_does_not_run_is_not_stopped(tmp_path: Path) -> None:
    desktop = desktops.sway(tmp_path)
    alias = "/etc/systemd/system/display-manager.service"
    desktop.sysfs.link_absolute(alias, "/usr/lib/systemd/system/gdm.service")
    report = check_console(read(desktop))
    assert not found(report, "console-display-manager")
    assert "gdm" not in one(report, "console-session").remedy


def test_clients_of_an_x_server_are_not_its_compositor(tmp_path: Path) -> None:
    desktop = desktops.xfce(tmp_path, 2)
    desktop.of_session(1201, "gnome-shell", "c2", "/dev/dri/card1")
    advice = one(check_console(read(desktop), SECOND), "console-second-card")
    assert advice.summary.startswith("Xorg has opened")


def test_a_card_on_vfio_pci_is_lent_already(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path))
    lent = tuple(
        replace(d, driver="vfio-pci", nodes=()) if str(d.address).startswith("0000:01") else d
        for d in host.devices
    )
    report = check_console(replace(host, devices=lent))
    assert one(report, "console-display").summary.endswith("is on vfio-pci")
    assert not {rule for rule in rules(report) if rule != "console-text"}


def test_two_cards_leave_a_screen(tmp_path: Path) -> None:
    assert not found(check_console(read(desktops.gnome(tmp_path, 2))), "console-way-back")


@pytest.mark.parametrize("make", [desktops.gnome, desktops.kde, desktops.sway, desktops.xfce])
def test_a_reservation_keeps_compositors_off_a_second_card(
    tmp_path: Path, make: Callable[[Path, int], Desktop]
) -> None:
    desktop = make(tmp_path, 2)
    host = read(desktop)
    advice = one(check_console(host, SECOND), "console-second-card")
    assert "has opened 0000:02:00.0" in advice.summary
    assert advice.remedy.startswith(f"vfiomgr bind --reserve {SECOND}, and reboot")
    assert f"vfiomgr bind --persist {SECOND}" in advice.remedy
    assert not found(check_console(host, FIRST), "console-second-card")
    api.apply(Reserve((PciAddress.parse(SECOND),)), tree=desktop.kernel)
    since = one(check_console(read(desktop), SECOND), "console-second-card")
    assert since.severity == "info"
    assert since.remedy.startswith("reboot, since it is reserved now")
    for pid in (1200, 950):
        desktop.sysfs.drop(f"/proc/{pid}")
    desktop.session("3", DEVICES="")
    left = one(check_console(read(desktop), SECOND), "console-second-card")
    assert left.severity == "ok"
    assert left.evidence == ("/etc/udev/rules.d/72-vfiomgr-0000:02:00.0.rules",)


def test_a_system_that_keeps_no_rules_is_not_advised_to_reserve(tmp_path: Path) -> None:
    host = with_facts(read(desktops.gnome(tmp_path, 2)), settings_system="nixos")
    remedy = one(check_console(host, SECOND), "console-second-card").remedy
    assert "--reserve" not in remedy
    assert "have the configuration of NixOS write these udev rules" in remedy


@pytest.mark.parametrize("command", ["Hyprland", "niri", "cosmic-comp", "weston", "gamescope"])
def test_other_compositors(tmp_path: Path, command: str) -> None:
    desktop = Desktop(tmp_path, cards=2)
    desktop.session("2")
    desktop.of_session(1200, command, "2", "/dev/dri/card0", "/dev/dri/card1")
    found_one = one(check_console(read(desktop), SECOND), "console-second-card")
    assert found_one.summary.startswith(f"{command} has opened {SECOND}")
    assert f"vfiomgr bind --reserve {SECOND}" in found_one.remedy


def test_a_card_that_no_compositor_has_open_needs_no_advice(tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path, 1)
    desktop.sysfs.drop("/proc/1200")
    two = Desktop(tmp_path / "two", cards=2)
    two.session("2")
    two.of_user(1200, "gnome-shell", "org.gnome.Shell@wayland.service", "/dev/dri/card0")
    host = read(two)
    assert not found(check_console(host, SECOND), "console-second-card")
    assert not found(check_console(host, SECOND), "console-session")
    closed = check_console(with_facts(host, users=None), SECOND)
    assert "may open" in one(closed, "console-second-card").summary


def test_a_card_that_is_bound_at_boot_needs_no_advice(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path, 2))
    second = host.device(PciAddress.parse(SECOND))
    binding = PersistedBinding(second.identity, "vfio-pci", "vfio_pci")
    rule = TextFile(rule_file(binding.address), render_rule(binding))
    bound = replace(host, files=replace(host.files, texts=(rule,)))
    assert not found(check_console(bound, SECOND), "console-second-card")


def with_firmware(host: HostSnapshot) -> HostSnapshot:
    """The first card has no driver, but the framebuffer of the firmware."""
    shown = {"display_signs": (f"efifb{IN_ITS_MEMORY}",), "driver": None, "nodes": ()}
    devices = (replace(d, **shown) if str(d.address) == FIRST else d for d in host.devices)
    return replace(host, devices=tuple(devices))


def test_the_firmware_framebuffer_that_old_kernels_keep(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path, driver=None)
    host = with_firmware(read(desktop))
    kernel = replace(host.kernel, release="5.15.0")
    blocked = check_console(replace(host, kernel=kernel))
    assert one(blocked, "console-framebuffer").severity == "blocker"
    assert "Linux 5.15.0" in one(blocked, "console-framebuffer").evidence
    assert blocked.is_blocked
    later = check_console(host)
    assert not found(later, "console-framebuffer")
    assert one(later, "console-not-restored").severity == "warning"
    assert not found(check_console(read(desktop)), "console-not-restored")


def test_linux_6_1_may_lose_the_console_of_the_other_card(tmp_path: Path) -> None:
    host = with_firmware(read(Desktop(tmp_path, cards=2)))
    old = replace(host, kernel=replace(host.kernel, release="6.1.0-13-amd64"))
    assert one(check_console(old, SECOND), "console-other-card").severity == "warning"
    assert not found(check_console(old, FIRST), "console-other-card")
    assert not found(check_console(host, SECOND), "console-other-card")


def test_a_panel_that_is_wired_to_the_card(tmp_path: Path) -> None:
    place = "/sys/devices/platform/asus-nb-wmi/gpu_mux_mode"
    desktop = Desktop(tmp_path)
    desktop.sysfs.put(place, "1")
    assert not found(check_console(read(desktop)), "console-mux")
    desktop.sysfs.put(place, "0")
    mux = one(check_console(read(desktop)), "console-mux")
    assert (mux.severity, mux.remedy) == ("blocker", "vfiomgr laptop hybrid, and reboot")


def test_other_reasons_against_the_binding_are_blockers(tmp_path: Path) -> None:
    desktop = Desktop(tmp_path)
    host = read(desktop)
    off = replace(host, groups=(), iommu=replace(host.iommu, has_groups=False))
    off = replace(off, devices=tuple(replace(d, iommu_group=None) for d in host.devices))
    assert one(check_console(off), "console-bind-refused").severity == "blocker"
    assert not found(check_console(host), "console-bind-refused")


def test_reset_reports_are_those_of_the_card(tmp_path: Path) -> None:
    host = read(Desktop(tmp_path, cards=2))
    vega = tuple(
        replace(d, device_id="687f", reset_method=("bus",)) if d.address.slot[1] == 1 else d
        for d in host.devices
    )
    host = replace(host, devices=vega)
    assert "0000:01:00.0" in one(check_console(host), "amd-reset").evidence[0]
    assert not found(check_console(host, SECOND), "amd-reset")


def test_no_remedy_takes_the_only_display_at_each_boot(tmp_path: Path) -> None:
    """https://github.com/mroboff/vm-curator/issues/60 has a Radeon RX 9070 XT as its only card."""
    host = read(desktops.kde(tmp_path))
    cards = [replace(d, device_id="7550") if d.is_boot_display else d for d in host.devices]
    remedies = one(check_console(replace(host, devices=tuple(cards))), "amd-unbind").remedies
    assert [remedy.text for remedy in remedies] == ["use managed='no' in the guest"]


def test_the_audio_function_stands_for_its_card(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path))
    assert check_console(host, "0000:01:00.1") == check_console(host)


def test_no_display(tmp_path: Path) -> None:
    host = read(Desktop(tmp_path, cards=2))
    hidden = replace(host, devices=tuple(replace(d, is_boot_display=False) for d in host.devices))
    shown = one(check_console(hidden), "console-display")
    assert (shown.severity, shown.summary) == ("info", "no display of this host shows the console")
    assert shown.remedy == f"name a display of this host: {FIRST}, {SECOND}"


def test_a_snapshot_keeps_the_desktop_and_hides_its_users(tmp_path: Path) -> None:
    host = read(desktops.gnome(tmp_path))
    assert check_console(from_document(to_document(host))) == check_console(host)
    redacted = json.dumps(Redaction()(to_document(host)))
    assert "anna" not in redacted
    assert "user-1" in redacted


def test_the_command(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    desktop = desktops.gnome(tmp_path)
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: desktop.kernel)
    before = desktop.kernel.state()
    answer = run("check", "console")
    assert answer.status == 0
    assert answer.stdout.splitlines()[-1].startswith("no blocker found: ")
    document = json.loads(run("check", "console", "01:00.0", "--format", "json").stdout)
    assert document["kind"] == "CheckReport"
    assert "console-session" in {item["id"] for item in document["items"]}
    assert run("check", "console", "--strict").status == 0
    assert desktop.kernel.state() == before
