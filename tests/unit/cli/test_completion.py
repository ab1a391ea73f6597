"""What completes, from which host, and that nothing else happens."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
import pytest

from tests.fakes.bars import FakeBar
from tests.fakes.vgpu_hosts import a40_host, l40s_host
from tests.unit.cli.test_hostile_names import HOSTILE, require_harmless
from tests.unit.cli.test_odd_hosts import twins
from tests.unit.cli.test_usage import commands
from vfiomgr.main import shells
from vfiomgr.main.program import cli
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

FREE_TEXT = {
    "--acpi-nodes": "numbers of the guest's cells",
    "--acpi-index": "a number",
    "--address-bits": "a number",
    "--pasid-bits": "a number",
    "--alias": "devices and a name",
    "--annotations": "patterns of names",
    "--attribute": "a name and what is written to it",
    "--boot-order": "a number",
    "--command": "a command of the container",
    "--containerd-version": "a release, which need not be installed",
    "--count": "a number",
    "--cpus": "a number",
    "--debounce": "seconds",
    "--default-memory": "a size",
    "--looking-glass": "the size of a screen",
    "--usb": "the IDs of any USB device",
    "--exec-quantum": "milliseconds",
    "--framebuffer": "a size",
    "--functions": "a number",
    "--guest-bus": "a number",
    "--hard-limit": "a size",
    "--heads": "a number",
    "--hugepages": "a size",
    "--image": "an image of some registry",
    "--kata-version": "a release, which need not be installed",
    "--kernel-arguments": "arguments of the guest's kernel",
    "--kernel-params": "arguments of the guest's kernel",
    "--libvirt-version": "a release, which need not be installed",
    "--match": "part of a name",
    "--memory": "a size",
    "--metrics": "an address of this machine",
    "--name": "a new name",
    "--namespace": "a name in some cluster",
    "--node": "a name in some cluster",
    "--network": "a network with its options",
    "--node-selector": "labels of some cluster",
    "--overhead-cpus": "a number",
    "--pods-interval": "seconds",
    "--preempt-timeout": "microseconds",
    "--qemu-version": "a release, which need not be installed",
    "--resource-prefix": "a domain of some organization",
    "--scan-interval": "seconds",
    "--spare-ports": "a number",
    "--teaming": "the alias of an interface of the guest",
    "--timeout": "seconds",
    "--vcpus": "a number",
    "--vf-memory": "a size",
    "--vf-msix": "a number",
    "libvirt domain NAME": "a new name",
    "libvirt hook run DOMAIN": "libvirt says it",
    "libvirt hook run OPERATION": "libvirt says it",
    "libvirt hook run [REST]...": "libvirt says it",
    "sriov set [COUNT]": "a number",
    "vgpu create [UUID]": "a new UUID",
    "vgpu instances [PROFILE=COUNT]...": "nvidia-smi takes seconds to list profiles",
}
"""What takes any text, and why nothing completes it."""


class Complete(Protocol):
    """`complete("bind 0000:")` gives the candidates of `vfiomgr bind 0000:`."""

    def __call__(self, typed: str, shell: str = "zsh") -> list[str]:
        """Ask."""


@pytest.fixture
def complete(run: Run, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Complete a line as the script of a shell asks it; nothing goes to stderr."""

    def ask(typed: str, shell: str = "zsh") -> list[str]:
        monkeypatch.setenv("_VFIOMGR_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", f"vfiomgr {typed}")
        answer = run()
        assert (answer.status, answer.stderr) == (0, "")
        lines = answer.stdout.splitlines()
        return [line.removeprefix("plain,").partition("\t")[0] for line in lines if line]

    return ask


def _label(context: click.Context, parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    path = context.command_path.removeprefix("vfiomgr ")
    return f"{path} {parameter.make_metavar(context)}"


def _completes(parameter: click.Parameter) -> bool:
    has_own = parameter._custom_shell_complete is not None
    return has_own or isinstance(parameter.type, click.Choice | click.Path)


def test_each_value_completes_or_is_free_text_with_a_reason() -> None:
    seen: set[str] = set()
    free: set[str] = set()
    contexts = [
        click.Context(cli, **cli.context_settings),
        *commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings)),
    ]
    for context in contexts:
        for parameter in context.command.params:
            if isinstance(parameter, click.Option) and (parameter.is_flag or parameter.count):
                continue
            label = _label(context, parameter)
            seen.add(label)
            if not _completes(parameter):
                free.add(label)
    assert free == set(FREE_TEXT)
    assert len(seen) > 80


def addresses(kernel: FakeKernel) -> list[str]:
    """Those of the first domain."""
    names = os.listdir(f"{kernel.root}/sys/bus/pci/devices")
    return sorted(name for name in names if name.startswith("0000:"))


def test_an_address_continues_as_it_was_begun(complete: Complete, kernel: FakeKernel) -> None:
    names = addresses(kernel)
    assert complete("show 0000:") == names
    first = next(name for name in names if name.startswith("0000:04"))
    short = first.removeprefix("0000:")
    assert complete(f"bind {short[:-1]}")[0] == short
    libvirt = f"pci_{first.replace(':', '_').replace('.', '_')}"
    assert libvirt in complete("bind pci_0000_0")
    assert first not in complete(f"bind {first} 0000:")
    assert complete("bind /sys/bus/pci/dev") == ["file,"]


def test_the_sizes_of_bars_are_those_of_the_devices_that_are_typed(
    complete: Complete, kernel: FakeKernel
) -> None:
    kernel.add_bars("0000:05:00.0", FakeBar(1, 256, (256, 16384)))
    kernel.add_bars("0000:01:00.0", FakeBar(0, 256, (256, 512)))
    assert complete("bind 05:00.0 --bar 1=") == ["1=256M", "1=16G"]
    assert complete("bind 0000:01:00.0 --bar ") == ["0=256M", "0=512M"]
    assert complete("bind 0000:02:00.0 --bar ") == []
    assert sorted(complete("bind --bar 0")) == ["0=256M", "0=512M"]


def test_bash_is_given_what_follows_the_last_break(
    complete: Complete, monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel
) -> None:
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'@><=;|&(:")
    given = complete("show 0000:", "bash")
    assert [f"0000:{name}" for name in given] == addresses(kernel)
    assert complete("bind --root=/sr", "bash") == ["dir,"]
    assert complete("--format=js", "bash") == ["json"]


def test_a_short_address_of_two_functions_is_no_candidate(
    complete: Complete, tmp_path: Path
) -> None:
    root = twins(tmp_path / "odd").root
    assert complete(f"--root {root} bind 0000:04:00.0") == ["0000:04:00.0"]
    assert complete(f"--root {root} bind 04:00.0") == []


@pytest.mark.parametrize("command", ["vgpu create", "vgpu define"])
def test_types_complete_by_name_and_by_identifier(
    complete: Complete, tmp_path: Path, command: str
) -> None:
    root = a40_host(tmp_path / "a40").root
    names = complete(f"--root {root} {command} --type A40-4")
    assert names
    assert all(name.startswith("A40-4") for name in names)
    assert names == complete(f"--root {root} {command} --type=A40-4")
    assert complete(f"--root {root} {command} --type nvidia-5")[0].startswith("nvidia-5")
    assert complete(f"{command} --root {root} --parent 0000:99:00.0 --type A40-4") == []


def test_parents_are_gpus_first(complete: Complete, tmp_path: Path) -> None:
    host = l40s_host(tmp_path / "l40s")
    found = complete(f"--root {host.root} vgpu create --parent ")
    device = Path(host.root, "sys/bus/pci/devices", found[0])
    assert (device / "sriov_totalvfs").exists()
    assert len(found) == 33
    assert found[0] in complete(f"--root {host.root} sriov set ")


def test_a_snapshot_completes_as_its_host_does(complete: Complete, tmp_path: Path) -> None:
    host = a40_host(tmp_path / "a40")
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(scan(host, host)))
    for typed in (
        "bind 0000:",
        "vgpu remove ",
        "vgpu create --type ",
        "vgpu create --parent ",
        "vgpu create --numa ",
        "vgpu undefine ",
    ):
        assert complete(f"--snapshot {file} {typed}") == complete(f"--root {host.root} {typed}")


@pytest.mark.parametrize("option", ["--root", "--snapshot"])
@pytest.mark.parametrize(
    "typed",
    ["bind ", "vgpu create --type ", "vgpu remove ", "vgpu start ", "cdi remove ", "sriov set "],
)
def test_a_wrong_host_completes_to_nothing(
    complete: Complete, tmp_path: Path, option: str, typed: str
) -> None:
    text, pipe = tmp_path / "text", tmp_path / "pipe"
    text.write_text("{")
    os.mkfifo(pipe)
    for place in (text, pipe, tmp_path / "absent", tmp_path, "/dev/zero"):
        found = complete(f"{option} {place} {typed}")
        assert [name for name in found if name.startswith("0000:")] == []


def test_files_complete_beside_devices_where_there_is_no_host(
    complete: Complete, tmp_path: Path
) -> None:
    assert complete(f"check pod --root {tmp_path} po") == ["file,"]
    assert complete("check domain --connect test:///nowhere wi") == ["file,"]


def test_files_of_a_host_are_below_its_root(complete: Complete, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "etc/kata").mkdir(parents=True)
    (image / "etc/kata.toml").touch()
    (image / "etc/out").symlink_to("/etc/kata")
    root = f"kata config --root {image} --whole"
    assert complete(f"{root} ") == ["/etc/"]
    assert complete(f"{root} /etc/k") == ["/etc/kata/", "/etc/kata.toml"]
    assert complete(f"{root} /etc/o") == ["/etc/out/"]
    assert complete(f"{root} /../../et") == ["/../../etc/"]
    assert complete(f"{root} etc") == []


def test_a_slow_host_completes_to_nothing(
    complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "_PATIENCE", 0.1)

    def slowly(_: str) -> bool:
        time.sleep(30)
        return True

    monkeypatch.setattr("vfiomgr.snapshot.completion.is_address", slowly)
    assert complete("bind 0000:") == []


def test_layouts_are_read_from_the_file_that_is_typed(complete: Complete, tmp_path: Path) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text("version: vfiomgr/v1\nlayouts:\n  guests: {wrong: 1}\n  games: {}\n")
    assert complete(f"apply {file} --layout ") == ["guests", "games"]
    assert complete(f"layout assert {file} --layout ga") == ["games"]
    assert complete(f"layout watch --layout gu {file} --layout ga") == ["games"]
    for text in ("{", "[]", "layouts: x", "", "a: &a [*a]", "\0"):
        file.write_text(text)
        assert complete(f"apply {file} --layout ") == []
    for place in ("-", tmp_path, tmp_path / "absent", "/dev/zero"):
        assert complete(f"apply {place} --layout ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_hostile_names_are_left_out(complete: Complete, tmp_path: Path, shell: str) -> None:
    file = tmp_path / "layout.yaml"
    names = [HOSTILE.removesuffix("\udcff"), "a\nplain,b", "--yes", "good", "a\tb", "\x7f"]
    file.write_text(json.dumps({"layouts": dict.fromkeys(names)}))
    assert complete(f"apply {file} --layout ", shell) == ["good"]


def test_a_variable_that_is_no_option_is_not_named_while_completing(
    complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line on stderr would stand in the line that somebody types; `complete` requires none."""
    monkeypatch.setenv("VFIOMGR_DEADLINE", "0")
    assert complete("bin") == ["bind"]


def test_what_a_device_is_called_reaches_no_terminal(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.pci.names.Names.of", lambda *_: (HOSTILE, ""))
    monkeypatch.setenv("_VFIOMGR_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", f"vfiomgr --root {kernel.root} bind 0000:")
    answer = run().stdout
    assert "[red]x" in answer
    for line in answer.splitlines():
        text, _, help_ = line.partition("\t")
        require_harmless(text + help_)


def test_commands_and_options_have_their_help_where_a_shell_shows_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shell, has_help in (("bash", False), ("zsh", True), ("fish", True)):
        monkeypatch.setenv("_VFIOMGR_COMPLETE", f"{shell}_complete")
        for typed in ("vfiomgr ", "vfiomgr libvirt ", "vfiomgr bind --"):
            monkeypatch.setenv("COMP_WORDS", typed)
            lines = run().stdout.splitlines()
            assert len(lines) > 5
            assert all(("\t" in line) is has_help for line in lines), lines


def test_unlisted_commands_are_no_candidates(complete: Complete) -> None:
    assert "persist" not in complete("")
    assert complete("vgpu res") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(run: Run, shell: str) -> None:
    answer = run("completion", shell)
    assert (answer.status, answer.stderr) == (0, "")
    assert f"_VFIOMGR_COMPLETE={shell}_complete" in answer.stdout
    assert run("completion", "tcsh").status == 2


def test_a_flag_before_an_argument_is_regarded(complete: Complete) -> None:
    assert complete("runtime install --kata kata-v") == ["kata-vfio"]
    assert complete("runtime install kata-v") == []
