"""`vfiomgr libvirt domain` for a desktop: what --desktop chooses, and single options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lxml import etree

from tests.unit.devices import with_facts
from tests.unit.guest_hosts import GPU, two_sockets
from tests.unit.guests.test_cores import COMPLEXES, RYZEN, host_of
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.build.desktop_named import (
    parse_audio,
    parse_evdev,
    parse_looking_glass,
    parse_usb,
)
from vfiomgr.libvirt.desktop import EvdevInput, GuestAudio, LookingGlass, UsbDevice
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Answer, Run

    Domain = Callable[..., Answer]

KEYBOARD = "/dev/input/by-id/usb-Logitech_K120-event-kbd"
MOUSE = "/dev/input/by-id/usb-Logitech_G502-event-mouse"

GLASS_NOTE = (
    "Looking Glass: write `f /dev/shm/looking-glass 0660 USER kvm -` with the user of the client "
    "to /etc/tmpfiles.d/looking-glass.conf, and run systemd-tmpfiles --create looking-glass.conf"
)
SCREEN_NOTE = (
    "after the GPU's driver is installed, remove the emulated screen: vfiomgr libvirt edit pc "
    "--no-video"
)
BACKEND = (
    '{"qom-type":"memory-backend-file","id":"looking-glass","mem-path":"/dev/kvmfr0",'
    '"size":67108864,"share":true}'
)


@pytest.fixture
def domain(run: Run, tmp_path: Path) -> Domain:
    """Print a domain for a host with sixteen cores and a GPU."""
    file = tmp_path / "host.json"
    host = with_facts(two_sockets(), topology=host_of(RYZEN, COMPLEXES), cpu_vendor="AuthenticAMD")
    file.write_text(write_snapshot(host))

    def printed(*options: str, libvirt: str = "9.0") -> Answer:
        wanted = ("pc", "--memory", "16G", "--vcpus", "8", "--libvirt-version", libvirt)
        return run("--snapshot", str(file), "libvirt", "domain", *wanted, *options)

    return printed


def element(answer: Answer, path: str) -> dict[str, str]:
    """The attributes of the only element with this path."""
    (found,) = etree.fromstring(answer.stdout).iterfind(path)
    return {str(name): str(value) for name, value in found.attrib.items()}


def count(answer: Answer, path: str) -> int:
    return len(list(etree.fromstring(answer.stdout).iterfind(path)))


def interfaces(answer: Answer) -> list[str]:
    return [str(one.tag) for one in etree.fromstring(answer.stdout).iterfind("features/hyperv/*")]


def test_a_desktop_has_what_a_note_lists(domain: Domain) -> None:
    made = domain("--desktop", "--device", GPU, "--disk", "/vm/a.qcow2")
    assert made.status == 0
    assert made.stderr.splitlines() == [
        "--desktop: --looking-glass 3840x2160, --graphics spice, --audio spice, --pin-cores",
        GLASS_NOTE,
        "the installer is on the emulated screen: virt-viewer pc",
        SCREEN_NOTE,
    ]
    assert element(made, "devices/shmem") == {"name": "looking-glass"}
    assert etree.fromstring(made.stdout).findtext("devices/shmem/size") == "128"
    assert element(made, "devices/graphics")["type"] == "spice"
    assert element(made, "devices/channel/target")["name"] == "com.redhat.spice.0"
    assert element(made, "devices/audio") == {"id": "1", "type": "spice"}
    assert element(made, "devices/sound")["model"] == "ich9"
    assert element(made, "devices/memballoon")["model"] == "none"
    assert element(made, "devices/video/model")["type"] == "vga"
    assert element(made, "cputune/iothreadpin")["iothread"] == "1"
    assert count(made, "devices/input") == 0, "a tablet would move the pointer to places"
    assert count(made, "devices/tpm") == 0


def test_a_windows_desktop_is_what_windows_11_asks_for(domain: Domain) -> None:
    made = domain("--desktop", "--os", "windows", "--device", GPU)
    chosen = made.stderr.splitlines()[0]
    assert chosen.endswith("--pin-cores, --secure-boot, --tpm")
    assert element(made, "devices/tpm/backend")["version"] == "2.0"
    assert element(made, "features/smm")["state"] == "on"
    assert interfaces(made) == [
        *("relaxed", "vapic", "spinlocks", "vpindex", "runtime", "synic", "stimer"),
        *("frequencies", "reenlightenment", "tlbflush", "ipi"),
    ]
    later = domain("--desktop", "--os", "windows", "--device", GPU, libvirt="11.3")
    assert "<avic state='on'/>" in later.stdout
    assert element(later, "features/hyperv/stimer/direct") == {"state": "on"}
    older = domain("--os", "windows", "--device", GPU, libvirt="4.5")
    assert interfaces(older) == ["relaxed", "vapic", "spinlocks", "vpindex", "runtime", "synic"]


def test_a_screen_that_no_guest_can_have_is_refused_with_the_limit(domain: Domain) -> None:
    refused = domain("--device", GPU, "--looking-glass", "99999x99999")
    assert refused.status == 2
    assert "write at most 16384x16384" in refused.stderr
    assert domain("--device", GPU, "--looking-glass", "16384x2160").status == 0


def test_single_options_override_what_a_desktop_has(domain: Domain) -> None:
    without = domain(
        *("--desktop", "--os", "windows", "--device", GPU, "--looking-glass", "none"),
        *("--graphics", "vnc", "--no-pin-cores", "--no-secure-boot", "--video", "none"),
    )
    assert without.stderr == (
        "--desktop: --looking-glass none, --graphics vnc, --audio none, --no-pin-cores, "
        "--no-secure-boot, --no-tpm\n"
    )
    for path in ("devices/shmem", "devices/sound", "devices/tpm", "iothreads", "devices/channel"):
        assert count(without, path) == 0
    assert element(without, "devices/input")["type"] == "tablet"
    assert element(without, "devices/video/model")["type"] == "none"
    bios = domain("--desktop", "--os", "windows", "--device", GPU, "--firmware", "bios")
    assert "--no-secure-boot" in bios.stderr
    unpinned = domain("--desktop", "--no-pinning", "--device", GPU)
    assert (unpinned.status, count(unpinned, "cputune")) == (0, 0)
    assert "--no-pin-cores" in unpinned.stderr
    assert "--looking-glass none" in domain("--desktop").stderr, "without a GPU nothing is shared"


def test_the_kernel_module_shares_frames_by_arguments_of_qemu(domain: Domain) -> None:
    made = domain("--device", GPU, "--looking-glass", "2560x1440,kvmfr", "--fixed-aperture")
    root = etree.fromstring(made.stdout)
    namespace = {"q": "http://libvirt.org/schemas/domain/qemu/1.0"}
    values = [str(one.get("value")) for one in root.iterfind("q:commandline/q:arg", namespace)]
    assert values == [
        *("-fw_cfg", "name=opt/ovmf/X-PciMmio64Mb,string=65536"),
        "-object",
        BACKEND,
        "-device",
        '{"driver":"ivshmem-plain","id":"shmem0","memdev":"looking-glass"}',
    ]
    assert count(made, "devices/shmem") == 0
    for text in (
        "`options kvmfr static_size_mb=64` to /etc/modprobe.d/kvmfr.conf",
        'TAG+="uaccess"` to /etc/udev/rules.d/70-kvmfr.rules',
        'add "/dev/kvmfr0" to cgroup_device_acl in /etc/libvirt/qemu.conf',
        "add the line `/dev/kvmfr0 rw,` to /etc/apparmor.d/local/abstractions/libvirt-qemu",
    ):
        assert text in made.stderr
    old = domain("--device", GPU, "--looking-glass", "2560x1440,kvmfr", libvirt="7.8")
    assert (old.status, "libvirt 7.9.0 or later" in old.stderr) == (4, True)


def test_keyboard_and_mouse_of_the_host_are_switched_by_keys(domain: Domain) -> None:
    made = domain("--evdev", f"{KEYBOARD},toggle=scrolllock", "--evdev", MOUSE)
    sources = [
        dict(one.attrib) for one in etree.fromstring(made.stdout).iterfind(".//input/source")
    ]
    assert sources == [
        {"dev": KEYBOARD, "grab": "all", "repeat": "on", "grabToggle": "scrolllock"},
        {"dev": MOUSE},
    ]
    assert made.stderr == (
        "the devices of --evdev belong to the guest from its start; scrolllock switches\n"
    )
    mouse = domain("--evdev", MOUSE).stderr
    assert mouse.startswith(f"no keyboard switches {MOUSE} back to the host while the guest runs")
    number = domain("--evdev", "/dev/input/event3,keyboard")
    assert "grabToggle='ctrl-ctrl'" in number.stdout
    assert number.stderr == (
        "the devices of --evdev belong to the guest from its start; ctrl-ctrl switches\n"
        "/dev/input/event3 may be another device after a reboot; use a name below "
        "/dev/input/by-id/\n"
    )
    assert domain("--evdev", KEYBOARD, libvirt="7.5").status == 4


@pytest.mark.parametrize(
    ("option", "attributes"),
    [
        ("pipewire,user=1000", {"type": "pipewire", "runtimeDir": "/run/user/1000"}),
        (
            "pulseaudio,user=1000",
            {"type": "pulseaudio", "serverName": "/run/user/1000/pulse/native"},
        ),
    ],
)
def test_sound_of_a_user(domain: Domain, option: str, attributes: dict[str, str]) -> None:
    made = domain("--audio", option, libvirt="9.10")
    assert element(made, "devices/audio") == {"id": "1", **attributes}
    assert 'set user = "+1000" in /etc/libvirt/qemu.conf' in made.stderr
    is_pipewire = option.startswith("pipewire")
    assert domain("--audio", option, libvirt="9.9").status == (4 if is_pipewire else 0)


def test_a_usb_device_may_be_missing_at_the_start(domain: Domain) -> None:
    made = domain("--usb", "046D:c52b")
    assert element(made, "devices/hostdev")["type"] == "usb"
    assert element(made, "devices/hostdev/source") == {"startupPolicy": "optional"}
    assert element(made, "devices/hostdev/source/vendor") == {"id": "0x046d"}
    assert element(made, "devices/hostdev/source/product") == {"id": "0xc52b"}


@pytest.mark.parametrize(
    ("size", "mib"),
    [
        ("1280x720", 32),  # the host application needs more than 16
        ("1920x1080", 32),
        ("2560x1440", 64),
        ("3840x2160", 128),
        ("5120x2880", 256),
        ("7680x4320", 512),
        ("3840x2160,hdr", 256),
        ("1920x1080,hdr", 64),
    ],
)
def test_the_memory_is_enough_for_the_driver_and_the_application(size: str, mib: int) -> None:
    glass = parse_looking_glass(size)
    assert glass is not None
    assert glass.size_mib == mib


def test_options_are_read_as_written() -> None:
    glass = LookingGlass(1920, 1080, is_kvmfr=True, has_hdr=True)
    assert parse_looking_glass("1920x1080,hdr,kvmfr") == glass
    assert parse_looking_glass("none") is None
    assert parse_evdev(KEYBOARD) == EvdevInput(KEYBOARD, is_keyboard=True, toggle="ctrl-ctrl")
    assert parse_evdev(MOUSE) == EvdevInput(MOUSE, is_keyboard=False)
    assert parse_audio("pipewire,user=1000") == GuestAudio("pipewire", 1000)
    assert parse_usb("046D:C52B") == UsbDevice("046d", "c52b")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--looking-glass", text) for text in ("", "1080p", "1920x1080,fast", "0x1080", "9x9")),
        *(("--evdev", text) for text in ("", "event3", "/etc/passwd", f"{KEYBOARD},toggle=f12")),
        ("--evdev", f"{KEYBOARD},keyboard=yes"),
        *(("--audio", text) for text in ("", "alsa", "pipewire", "spice,user=1", "pipewire,user=")),
        *(("--usb", text) for text in ("", "046d", "046d:c52", "046d:c52bb", "mouse")),
        ("--audio", "spice"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(
    domain: Domain, option: str, value: str
) -> None:
    refused = domain(option, value)
    assert refused.status == 2
    assert "remedy:" in refused.stderr
    assert option in refused.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--pin-cores", "--no-pinning"),
        ("--os", "windows", "--secure-boot", "--no-tpm"),
    ],
)
def test_options_that_exclude_each_other(domain: Domain, options: tuple[str, ...]) -> None:
    refused = domain(*options)
    assert (refused.status, options[-1] in refused.stderr) == (2, True)


def test_a_path_with_a_comma_or_a_quote_is_no_input_device() -> None:
    with pytest.raises(UsageError):
        parse_evdev("/dev/input/by-id/it's")
