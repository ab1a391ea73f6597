from __future__ import annotations

import os
import shlex
import subprocess
from configparser import ConfigParser

import pytest

from vfiomgr.errors import Refusal
from vfiomgr.persistence.installed_layout import (
    BOOT,
    FILE,
    WATCH,
    InstalledLayout,
    WrittenRule,
    digest_of,
    parse_record,
    render_boot,
    render_record,
    render_wanted,
    render_watch,
    shell_command,
)
from vfiomgr.persistence.model import SANDBOX

PROGRAM = "/usr/bin/vfiomgr"


def unit(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_the_boot_comes_after_drivers_and_before_all_who_use_devices() -> None:
    read = unit(render_boot(PROGRAM, "gpus"))
    sandbox = {line.partition("=")[0] for line in SANDBOX.splitlines()}
    assert {name: v for name, v in read["Service"].items() if name not in sandbox} == {
        "Type": "oneshot",
        "RemainAfterExit": "yes",
        "ExecStartPre": "-udevadm settle --timeout=60",
        "ExecStart": f"{PROGRAM} apply {FILE} --layout gpus",
    }
    after, before = (set(read["Unit"][key].split()) for key in ("After", "Before"))
    assert {"systemd-udev-trigger.service", "nvidia-vgpud.service"} <= after
    assert not any("settle" in name for name in after), "systemd-udev-settle is deprecated"
    assert before >= {
        "display-manager.service",
        "libvirtd.service",
        "virtqemud.service",
        "virtnodedevd.service",
        "kubelet.service",
        "containerd.service",
        "crio.service",
        "docker.service",
    }


def test_the_sandbox_lets_a_service_look_into_network_namespaces() -> None:
    """Without it setns() fails, and a container's interface is missed (host/bounded.py)."""
    sandbox = dict(line.split("=", 1) for line in SANDBOX.splitlines())
    assert sandbox["RestrictNamespaces"].split() == ["net", "mnt"]
    assert {"AF_NETLINK"} <= set(sandbox["RestrictAddressFamilies"].split())
    assert {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE"} <= set(sandbox["CapabilityBoundingSet"].split())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: enters a mount namespace")
def test_the_capabilities_of_a_service_are_enough_to_enter_a_mount_namespace() -> None:
    """As `_table_at` in users/disks.py does for a process in a chroot."""
    sandbox = dict(line.split("=", 1) for line in SANDBOX.splitlines())
    names = sandbox["CapabilityBoundingSet"].lower().split()
    bounds = ",".join(("-all", *(f"+{name.removeprefix('cap_')}" for name in names)))
    limited = ("setpriv", f"--bounding-set={bounds}", "--inh-caps=-all")
    entering = ("nsenter", "--mount=/proc/self/ns/mnt", "true")
    subprocess.run((*limited, *entering), check=True)


def test_the_watch_follows_the_boot_and_both_are_wanted() -> None:
    read = unit(render_watch(PROGRAM, "gpus", ("boot-display",)))
    assert read["Unit"]["After"] == BOOT.name
    command = f"{PROGRAM} layout watch {FILE} --layout gpus --enforce --allow boot-display"
    assert read["Service"]["ExecStart"] == command
    assert unit(render_wanted(with_watch=True))["Unit"]["Wants"] == f"{BOOT.name} {WATCH.name}"
    assert unit(render_wanted(with_watch=False))["Unit"]["Wants"] == BOOT.name


@pytest.mark.parametrize("render", [render_boot, render_watch])
def test_what_a_unit_cannot_hold_is_refused(render: object) -> None:
    assert callable(render)
    with pytest.raises(Refusal, match="cannot write a systemd unit"):
        render("/opt/my tools/vfiomgr", "gpus")
    with pytest.raises(Refusal, match="for the layout"):
        render(PROGRAM, "two\nlines")


def test_a_name_with_special_characters_is_one_word() -> None:
    command = unit(render_boot(PROGRAM, 'a "b" 50% $c \\d'))["Service"]["ExecStart"]
    word = shlex.split(command)[-1]
    assert word.replace("%%", "%").replace("$$", "$") == 'a "b" 50% $c \\d'
    assert "50%% $$c" in command, "systemd would expand both"


def test_a_record_is_read_as_it_was_written() -> None:
    installed = InstalledLayout(
        "gpus", (WrittenRule("/a", digest_of("x\n")), WrittenRule("/b", "00", "z\n"))
    )
    assert parse_record(render_record(installed)) == installed
    assert [rule.is_as_written("x\n") for rule in installed.rules] == [True, False]


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"api_version": "vfiomgr/v9"}', '{"api_version": "vfiomgr/v1"}']
)
def test_what_is_no_record_says_nothing(text: str | None) -> None:
    assert parse_record(text) is None


def test_a_shell_gets_a_name_as_it_is() -> None:
    name = "nic 100% $HOME `id`"
    words = shlex.split(shell_command(name, ("boot-display",)))
    assert words == ["vfiomgr", "apply", str(FILE), "--layout", name, "--allow", "boot-display"]
