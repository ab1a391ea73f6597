"""`vfiomgr qemu args`: what it prints, and `vfiomgr.qemu` from Python."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import vfiomgr
from tests.unit.guest_hosts import AUDIO, FAR, GPU, two_sockets
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


@pytest.fixture
def server(tmp_path: Path) -> tuple[str, str]:
    """The option that selects the host of two sockets."""
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(two_sockets()))
    return ("--snapshot", str(file))


def test_lines_document_and_library_have_the_same_arguments(kernel: FakeKernel, run: Run) -> None:
    notes: list[str] = []
    host = vfiomgr.Host(kernel, on_note=notes.append)
    printed = run("qemu", "args", "02:00.0,rom=off", "--qemu-version", "10.0", "--memory", "2G")
    words = shlex.split(printed.stdout)
    assert printed.status == 0
    assert words == list(
        vfiomgr.qemu.arguments_for(host, "02:00.0,rom=off", qemu_version="10.0", memory="2G")
    )
    assert notes == printed.stderr.splitlines()
    assert any("vfiomgr bind 0000:02:00.0" in note for note in notes)
    shown = run(
        *("qemu", "args", "02:00.0,rom=off", "--qemu-version", "10.0", "--memory", "2G"),
        *("--format", "json"),
    )
    assert json.loads(shown.stdout)["arguments"] == words


def test_notes_say_what_no_argument_sets(run: Run, server: tuple[str, str]) -> None:
    printed = run(*server, "qemu", "args", GPU, "--memory", "16G")
    assert "QEMU locks 17 GiB of memory" in printed.stderr
    assert "ulimit -l 17825792" in printed.stderr
    assert "taskset --cpu-list 1-7,9-15" in printed.stderr
    assert "-drive if=pflash" in printed.stderr
    assert "the version of QEMU is unknown" in printed.stderr


def test_a_configuration_file_names_the_cpu_on_stderr(run: Run, server: tuple[str, str]) -> None:
    printed = run(*server, "qemu", "args", GPU, "--readconfig")
    assert "[machine]" in printed.stdout
    assert "-cpu" not in printed.stdout
    assert "add -cpu host,host-phys-bits=on" in printed.stderr


def test_check_reports_what_prevents_the_start(run: Run, tmp_path: Path) -> None:
    host = two_sockets()
    devices = tuple(
        replace(d, driver="nvidia") if str(d.address) in (GPU, AUDIO) else d for d in host.devices
    )
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(replace(host, devices=devices)))
    checked = run("--snapshot", str(file), "qemu", "args", GPU, "--check")
    assert checked.status == 1
    assert "not on a VFIO driver\n" in checked.stdout
    assert f"vfiomgr bind {GPU}" in checked.stdout
    assert "managed" not in checked.stdout
    assert "<" not in checked.stdout
    assert "arguments:" not in checked.stdout
    shown = run("--snapshot", str(file), "qemu", "args", GPU, "--check", "--format", "json")
    assert "on-host-driver" in {found["id"] for found in json.loads(shown.stdout)["items"]}


def test_check_finds_nothing_for_devices_on_vfio(run: Run, server: tuple[str, str]) -> None:
    checked = run(*server, "qemu", "args", GPU, FAR, "--check", "--memory", "64G", "--vcpus", "8")
    assert checked.status == 0
    assert "blocker" not in checked.stdout


@pytest.mark.parametrize(
    ("words", "rule", "remedy"),
    [
        ((f"{GPU},only",), "companion-left-out", f"pass {GPU} without the option only"),
        ((GPU, "--numa", "off"), "numa-unbound", "pass --numa strict"),
        ((GPU, "--spare-ports", "0"), "no-free-port", "pass --spare-ports N"),
    ],
)
def test_check_names_options_and_no_elements_of_a_domain(
    run: Run, server: tuple[str, str], words: tuple[str, ...], rule: str, remedy: str
) -> None:
    checked = run(*server, "qemu", "args", *words, "--check", "--format", "json")
    report = json.loads(checked.stdout)
    (found,) = (one for one in report["items"] if one["id"] == rule)
    assert remedy in found["remedy"]
    text = json.dumps(found)
    assert not [word for word in ("<", "omain", "libvirt", "managed", "line ") if word in text]


def test_check_knows_the_bar_window_that_the_arguments_set(
    run: Run, server: tuple[str, str]
) -> None:
    words = (GPU, FAR, "--address-bits", "39", "--memory", "16G")
    assert "X-PciMmio64Mb" in run(*server, "qemu", "args", *words).stdout
    assert "aperture-too-small" not in run(*server, "qemu", "args", *words, "--check").stdout


def test_iommufd_is_refused_on_a_kernel_without_it(run: Run) -> None:
    refused = run("qemu", "args", "02:00.0", "--iommufd", "--qemu-version", "10.0")
    assert refused.status == 4
    assert "/dev/iommu" in refused.stderr
    assert "modprobe iommufd" in refused.stderr
    assert "iommufd" not in run("qemu", "args", "02:00.0", "--qemu-version", "10.0").stdout


@pytest.mark.parametrize("name", ['/a"b.rom', f"/{'a' * 1023}.rom"])
def test_a_value_that_qemu_cannot_read_from_a_file_is_refused(
    run: Run, server: tuple[str, str], name: str
) -> None:
    device = f"{GPU},rom={name}"
    assert run(*server, "qemu", "args", device).status == 0
    printed = run(*server, "qemu", "args", device, "--readconfig")
    assert (printed.status, printed.stdout) == (2, "")
    assert f"cannot write romfile={name!r} for -readconfig" in printed.stderr
    assert "remedy: omit --readconfig" in printed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--check", "--readconfig"), "--readconfig and --check exclude each other"),
        (("--readconfig", "--format", "json"), "--readconfig and --format json exclude"),
    ],
)
def test_options_of_which_one_has_an_effect_are_refused(
    run: Run, server: tuple[str, str], options: tuple[str, ...], message: str
) -> None:
    printed = run(*server, "qemu", "args", GPU, *options)
    assert (printed.status, printed.stdout) == (2, "")
    assert message in printed.stderr


@pytest.mark.parametrize("command", [("qemu", "args"), ("libvirt", "hostdev")])
def test_a_place_in_the_boot_order_is_for_one_device(
    run: Run, server: tuple[str, str], command: tuple[str, str]
) -> None:
    devices = [f"{GPU},boot-order=1", f"{FAR},boot-order=1"]
    if command[0] == "libvirt":
        devices = ["--boot-order", "1", GPU, FAR]
    printed = run(*server, *command, *devices)
    assert (printed.status, printed.stdout) == (2, "")
    assert f"boot order 1 is set for {GPU} and for {FAR}" in printed.stderr
