"""Completion in real shells, on a terminal: what is typed, Tab, and the line that comes of it."""

from __future__ import annotations

import json
import shutil
import socket
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import a40_host
from tests.integration.terminal import Terminal
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
EVIL = "evil $(touch pwned)`touch pwned`;touch pwned'\"&|<>{}*?[]~# end"
"""A name of a layout that every shell would act on."""
ESCAPE = "escape\x1b[31m\n\u202e"
"""A name that no shell is given."""
DOMAIN = "test:///default"
"""libvirt's own host for tests, which has one domain, `test`."""
_READ_BACK = "vfiomgr apply layout.yaml --layout "


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    """The name of a shell."""
    return str(request.param)


@pytest.fixture(scope="module")
def terminal(shell: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A shell whose directory has a host with an A40 and a vGPU, its snapshot, and layouts."""
    home = tmp_path_factory.mktemp(shell)
    kernel = a40_host(home, total_vfs=16)
    types = PCI_DEVICES / "0000:21:00.4/mdev_supported_types"
    kernel.write(types / "nvidia-557/create", UUID)
    shutil.move(kernel.root, home / "gpus")
    layouts: dict[str, object] = {
        name: {"devices": []} for name in ("guests", "games", "host", EVIL, ESCAPE)
    }
    text = json.dumps({"version": "vfiomgr/v1", "layouts": layouts})
    (home / "layout.yaml").write_text(text)
    (home / "snapshot.json").write_text("{}")
    with Terminal(shell, home) as terminal:
        terminal.run(f"vfiomgr --root {home}/gpus snapshot > gpus.json")
        yield terminal


COMPLETED = {
    "a command": ("vfiomgr unb", "vfiomgr unbind "),
    "a command of a group": ("vfiomgr libvirt host", "vfiomgr libvirt hostdev "),
    "an option": ("vfiomgr bind --with-g", "vfiomgr bind --with-group "),
    "a choice": ("vfiomgr list --format j", "vfiomgr list --format json "),
    "a choice after =": ("vfiomgr list --format=y", "vfiomgr list --format=yaml "),
    "an address": (
        "vfiomgr --root gpus bind 0000:21:00.4",
        "vfiomgr --root gpus bind 0000:21:00.4 ",
    ),
    "the beginning of an address": ("vfiomgr --root gpus show 0", "vfiomgr --root gpus show 0000:"),
    "an address up to where several continue": (
        "vfiomgr --root gpus bind 0000:21:0",
        "vfiomgr --root gpus bind 0000:21:0",
    ),
    "the middle of an address": (
        "vfiomgr --root gpus bind 0000:21:01.",
        "vfiomgr --root gpus bind 0000:21:01.",
    ),
    "a second address": (
        "vfiomgr --root gpus bind 0000:21:00.4 0000:21:02.3",
        "vfiomgr --root gpus bind 0000:21:00.4 0000:21:02.3 ",
    ),
    "a short address": ("vfiomgr --root gpus show 21:00.0", "vfiomgr --root gpus show 21:00.0 "),
    "the beginning of a short address": (
        "vfiomgr --root gpus show 21:00",
        "vfiomgr --root gpus show 21:00.",
    ),
    "an address of libvirt": (
        "vfiomgr --root gpus show pci_0000_21_00_0",
        "vfiomgr --root gpus show pci_0000_21_00_0 ",
    ),
    "an address in quotes": (
        "vfiomgr --root gpus show '0000:21:00.0",
        "vfiomgr --root gpus show '0000:21:00.0' ",
    ),
    "the root after the command": (
        "vfiomgr show --root gpus 0000:21:00.0",
        "vfiomgr show --root gpus 0000:21:00.0 ",
    ),
    "a root below the home": (
        "vfiomgr show --root ~/gpus 0000:21:00.0",
        "vfiomgr show --root ~/gpus 0000:21:00.0 ",
    ),
    "a root that is a variable": (
        "vfiomgr show --root $HOME/gpus 0000:21:00.0",
        "vfiomgr show --root $HOME/gpus 0000:21:00.0 ",
    ),
    "a snapshot": (
        "vfiomgr --snapshot gpus.json show 0000:21:00.0",
        "vfiomgr --snapshot gpus.json show 0000:21:00.0 ",
    ),
    "a vGPU": (
        "vfiomgr --root gpus vgpu remove f7",
        f"vfiomgr --root gpus vgpu remove {UUID} ",
    ),
    "a vGPU for a guest": (
        "vfiomgr --root gpus libvirt hostdev f7",
        f"vfiomgr --root gpus libvirt hostdev {UUID} ",
    ),
    "a type": (
        "vfiomgr --root gpus vgpu create --type A40-24Q",
        "vfiomgr --root gpus vgpu create --type A40-24Q ",
    ),
    "the beginning of a type": (
        "vfiomgr --root gpus vgpu create --type A4",
        "vfiomgr --root gpus vgpu create --type A40-",
    ),
    "the identifier of a type": (
        "vfiomgr --root gpus vgpu create --parent 0000:21:00.0 --type nvidia-558",
        "vfiomgr --root gpus vgpu create --parent 0000:21:00.0 --type nvidia-558 ",
    ),
    "a parent": (
        "vfiomgr --root gpus vgpu list --types --parent 0000:21:00.0",
        "vfiomgr --root gpus vgpu list --types --parent 0000:21:00.0 ",
    ),
    "a layout": (
        "vfiomgr plan layout.yaml --layout gu",
        "vfiomgr plan layout.yaml --layout guests ",
    ),
    "a file": ("vfiomgr plan lay", "vfiomgr plan layout.yaml "),
    "a file of an option": (
        "vfiomgr plan layout.yaml --output snap",
        "vfiomgr plan layout.yaml --output snapshot.json ",
    ),
    "a file of a redirection": ("vfiomgr snapshot > snap", "vfiomgr snapshot > snapshot.json "),
    "a directory": ("vfiomgr --root gp", "vfiomgr --root gpus/"),
    "a directory after =": ("vfiomgr --root=gp", "vfiomgr --root=gpus/"),
    "a directory of the host": (
        "vfiomgr --root gpus kata config --whole /sy",
        "vfiomgr --root gpus kata config --whole /sys/",
    ),
    "a domain": (
        f"vfiomgr libvirt attach -c {DOMAIN} te",
        f"vfiomgr libvirt attach -c {DOMAIN} test ",
    ),
    "a handler": (
        "vfiomgr runtime install --kata kata-v",
        "vfiomgr runtime install --kata kata-vfio ",
    ),
    "a wrong host": ("vfiomgr --root absent bind 0", "vfiomgr --root absent bind 0"),
    "a wrong snapshot": (
        "vfiomgr --snapshot snapshot.json bind 0",
        "vfiomgr --snapshot snapshot.json bind 0",
    ),
    "nothing of the kind": (
        "vfiomgr --root gpus bind 0000:99",
        "vfiomgr --root gpus bind 0000:99",
    ),
}


@pytest.mark.parametrize(("typed", "expected"), COMPLETED.values(), ids=COMPLETED)
def test_a_line_is_completed(terminal: Terminal, typed: str, expected: str) -> None:
    assert terminal.complete(typed) == expected


def test_a_libvirt_that_does_not_answer_completes_to_nothing(
    terminal: Terminal, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/deaf")
        listening.listen()
        typed = f"vfiomgr libvirt attach -c 'qemu+unix:///system?socket={tmp_path}/deaf' te"
        assert terminal.complete(typed) == typed


_SUDO = """
_sudo() {
    COMP_POINT=$((COMP_POINT - 5)) COMP_LINE=${COMP_LINE#sudo } COMP_CWORD=$((COMP_CWORD - 1))
    COMP_WORDS=("${COMP_WORDS[@]:1}")
    _vfiomgr_completion vfiomgr "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
}
complete -F _sudo sudo
"""
"""What bash-completion does for sudo; its second argument differs from that of bash itself."""


def test_a_line_after_sudo_is_completed(terminal: Terminal) -> None:
    if terminal.shell == "bash":
        (terminal.home / "sudo.bash").write_text(_SUDO)
        terminal.run("source sudo.bash")
    program = terminal.home / "bin/sudo"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o755)
    typed = "sudo vfiomgr --root gpus show 0000:21:00.0"
    assert terminal.complete(typed) == f"{typed} "


@pytest.mark.parametrize("opening", ["", "'", '"'])
def test_a_hostile_name_is_inserted_as_text(terminal: Terminal, opening: str) -> None:
    line = terminal.complete(f"{_READ_BACK}{opening}ev")
    if opening == "'" and terminal.shell == "bash":
        assert line == f"{_READ_BACK}'ev"  # which quotes of its kind cannot hold
        return
    word = line.removeprefix(_READ_BACK)
    assert EVIL in terminal.run(f"printf '%s\\n' {word}").replace("\r", "")
    assert not (terminal.home / "pwned").exists()


def test_a_name_with_escapes_is_left_out(terminal: Terminal) -> None:
    assert terminal.complete(f"{_READ_BACK}esc") == f"{_READ_BACK}esc"
    seen = terminal.shown(_READ_BACK)
    assert "games" in seen
    assert "escape" not in seen


def test_candidates_are_listed_with_what_they_are(terminal: Terminal) -> None:
    commands = terminal.shown("vfiomgr vgpu ")
    assert "create" in commands
    assert "undefine" in commands
    has_help = "Make vGPUs" in commands or "Create vGPUs" in commands
    assert has_help is (terminal.shell != "bash")
    addresses = terminal.shown("vfiomgr --root gpus bind 0000:21:00.")
    assert "00.0" in addresses
    assert "00.7" in addresses
    assert ("A40" in addresses) is (terminal.shell != "bash")


def test_nothing_is_printed_where_a_host_is_wrong(terminal: Terminal) -> None:
    for typed in ("vfiomgr --root absent bind 0", "vfiomgr --snapshot snapshot.json bind 0"):
        seen = terminal.shown(typed).replace("\x07", "").split()
        assert [part for part in seen if part not in typed] == [], "fish may draw it in parts"


def test_the_word_breaks_of_bash_stay_as_they_are(tmp_path: Path) -> None:
    with Terminal("bash", tmp_path / "home") as terminal:
        terminal.run('printf %s "$COMP_WORDBREAKS" > before')
        terminal.complete("vfiomgr bind 0000:")
        terminal.run('printf %s "$COMP_WORDBREAKS" > after')
        before = (terminal.home / "before").read_text()
        assert (terminal.home / "after").read_text() == before
        assert ":" in before


def test_a_shell_without_vfiomgr_says_nothing(shell: str, tmp_path: Path) -> None:
    with Terminal(shell, tmp_path / "home") as terminal:
        prefix = "set -x PATH /usr/bin /bin" if shell == "fish" else "PATH=/usr/bin:/bin"
        terminal.run(prefix)
        assert terminal.complete("vfiomgr bind 0000:") == "vfiomgr bind 0000:"
        assert "not found" not in terminal.run(":")
