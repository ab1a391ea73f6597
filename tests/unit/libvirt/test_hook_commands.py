"""`vfiomgr libvirt hook …` as libvirt and people run it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.libvirt_node import node_uri
from tests.unit.devices import host_of, with_facts
from vfiomgr.engine.host import not_checked
from vfiomgr.engine.registry import plan
from vfiomgr.libvirt.hook import InstallHook, render_script
from vfiomgr.libvirt.model import NAMESPACE
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, AUDIO, CONSOLE = "0000:01:00.0", "0000:01:00.1", "0000:00:02.0"
OPTED_IN = f"<metadata><v:devices xmlns:v='{NAMESPACE}' bind='yes'/></metadata>"


def xml(address: str, metadata: str = OPTED_IN) -> str:
    _, bus, rest = address.split(":")
    slot, function = rest.split(".")
    place = f"bus='0x{bus}' slot='0x{slot}' function='0x{function}'"
    return f"""\
<domain type='kvm'>
  <name>win</name><uuid>5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11</uuid>{metadata}
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0' {place}/></source>
    </hostdev>
  </devices>
</domain>
"""


class Input:
    """What libvirt writes to the hook; it must not be waited for in vain."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    @property
    def buffer(self) -> io.BytesIO:
        """As bytes."""
        assert self.text is not None, "nothing was to be read"
        return io.BytesIO(self.text.encode())

    def isatty(self) -> bool:
        """Whether a person types."""
        return False


def hand(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(sys, "stdin", Input(text))


def driver(kernel: FakeKernel, address: str) -> str | None:
    return api.scan(kernel).device(PciAddress.parse(address)).driver


def never(*_: object, **__: object) -> None:
    """Stand for what a hook must not do: libvirt waits for it."""
    pytest.fail("libvirt was called")


def test_a_guest_gets_its_devices_and_the_host_has_them_again(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.libvirt.commands.connection.connect", never)
    first = driver(kernel, GPU)
    hand(monkeypatch, xml(GPU))
    answer = run("libvirt", "hook", "run", "win", "prepare", "begin", "-")
    assert (answer.status, answer.stdout) == (0, ""), answer.stderr
    assert f"vfiomgr: {GPU} bound for win\nvfiomgr: {AUDIO} bound for win\n" in answer.stderr
    assert driver(kernel, GPU) == "vfio-pci"
    hand(monkeypatch, xml(GPU))
    answer = run("libvirt", "hook", "run", "win", "release", "end", "-")
    assert (answer.status, answer.stdout) == (0, "")
    assert f"{GPU} returned to the host for win" in answer.stderr
    assert driver(kernel, GPU) == first


def test_what_is_refused_stops_the_start_with_its_reason(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(monkeypatch, xml(CONSOLE))
    answer = run("libvirt", "hook", "run", "win", "prepare", "begin", "-")
    assert answer.status == 4
    assert "console's display" in answer.stderr
    assert driver(kernel, CONSOLE) == "i915"


def test_a_guest_that_did_not_ask_is_left_alone(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(monkeypatch, xml(GPU, metadata=""))
    answer = run("libvirt", "hook", "run", "win", "prepare", "begin", "-")
    assert (answer.status, answer.stderr) == (0, "")
    assert driver(kernel, GPU) != "vfio-pci"


@pytest.mark.parametrize("operation", ["start", "started", "stopped", "migrate", "reconnect"])
def test_other_operations_are_none_of_its_business(
    run: Run, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    hand(monkeypatch, None)
    answer = run("libvirt", "hook", "run", "win", operation, "begin", "-")
    assert (answer.status, answer.stdout, answer.stderr) == (0, "", "")


def test_installing_shows_its_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfiomgr.libvirt.commands.hook.own_program", lambda: "/usr/bin/vfiomgr")
    answer = run("libvirt", "hook", "install", "--dry-run", "--format", "json")
    (step,) = json.loads(answer.stdout)["steps"]
    assert step["path"] == SCRIPT
    assert step["mode"] == 0o755
    answer = run("libvirt", "hook", "install")
    assert f"wrote {SCRIPT}" in answer.stdout
    assert "hook install DOMAIN" in answer.stdout
    assert "nothing to do" in run("libvirt", "hook", "install").stdout
    assert f"removed {SCRIPT}" in run("libvirt", "hook", "uninstall", "--all").stdout


@pytest.mark.parametrize(("value", "is_said"), [("0 0", True), ("1 1", False)])
def test_installing_says_which_boolean_of_selinux_is_off(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch, value: str, *, is_said: bool
) -> None:
    monkeypatch.setattr("vfiomgr.libvirt.commands.hook.own_program", lambda: "/usr/bin/vfiomgr")
    kernel.sysfs.put("/sys/fs/selinux/enforce", "1")
    kernel.sysfs.put("/sys/fs/selinux/booleans/virt_hooks_unconfined", value)
    answer = run("libvirt", "hook", "install")
    assert answer.status == 0
    assert ("setsebool -P virt_hooks_unconfined on" in answer.stderr) is is_said


def test_the_hook_of_a_domain_is_not_uninstalled_by_accident(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vfiomgr.libvirt.commands.hook.own_program", lambda: "/usr/bin/vfiomgr")
    uri = node_uri(tmp_path)
    node = tmp_path / "libvirt-node.xml"
    node.write_text(node.read_text().replace("<os>", f"{OPTED_IN}<os>"))
    monkeypatch.setenv("VFIOMGR_CONNECT", uri)
    run("libvirt", "hook", "install")
    answer = run("libvirt", "hook", "uninstall")
    assert (answer.status, answer.stdout) == (4, "")
    assert "cannot uninstall the hook: it is enabled for test" in answer.stderr
    assert "vfiomgr libvirt hook uninstall test, or to " in answer.stderr
    assert "vfiomgr libvirt hook uninstall --all\n" in answer.stderr
    assert kernel.exists(SCRIPT)
    assert run("libvirt", "hook", "uninstall", "test", "--all").status == 2
    assert f"removed {SCRIPT}" in run("libvirt", "hook", "uninstall", "--all").stdout


def test_the_hook_is_not_uninstalled_unchecked(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vfiomgr.libvirt.commands.hook.own_program", lambda: "/usr/bin/vfiomgr")
    monkeypatch.setenv("VFIOMGR_CONNECT", f"test://{tmp_path}/absent.xml")
    run("libvirt", "hook", "install")
    answer = run("libvirt", "hook", "uninstall")
    assert (answer.status, answer.stdout) == (1, "")
    assert "cannot check which domains use the hook: " in answer.stderr
    assert kernel.exists(SCRIPT)


def test_a_file_needs_no_uses_of_devices() -> None:
    host, request = (
        with_facts(host_of(), users=None, host_uses=None),
        InstallHook("/usr/bin/vfiomgr"),
    )
    assert not_checked(host, request, plan(host, request)) == ()


@pytest.mark.parametrize("operation", ["prepare", "release", "start", "migrate"])
def test_the_script_calls_vfiomgr_where_it_acts_and_passes_on_what_it_says(
    tmp_path: Path, operation: str
) -> None:
    program = tmp_path / "vfiomgr"
    program.write_text('#!/bin/sh\necho "$@" >&2\ncat >&2\nexit 4\n')
    program.chmod(0o755)
    script = tmp_path / "50-vfiomgr"
    script.write_text(render_script(str(program)))
    script.chmod(0o755)
    command = [str(script), "win", operation, "begin", "-"]
    answer = subprocess.run(command, input="<domain/>", capture_output=True, text=True, check=False)
    if operation in ("prepare", "release"):
        assert answer.returncode == 4
        assert answer.stderr == f"libvirt hook run -- win {operation} begin -\n<domain/>"
    else:
        assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("name", ["--help", "--root", "--dry-run", "-v"])
def test_a_guest_may_be_called_like_an_option(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    program = tmp_path / "vfiomgr"
    program.write_text('#!/bin/sh\nfor one; do echo "$one"; done\n')
    program.chmod(0o755)
    script = tmp_path / "50-vfiomgr"
    script.write_text(render_script(str(program)))
    command = ["sh", str(script), name, "prepare", "begin", "-"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hand(monkeypatch, xml(GPU).replace(">win<", f">{name}<"))
    answer = run(*told.splitlines())
    assert (answer.status, answer.stdout) == (0, ""), answer.stderr
    assert f"{GPU} bound for {name}" in answer.stderr
    assert driver(kernel, GPU) == "vfio-pci"


def test_the_script_recovers_what_a_killed_vfiomgr_left(run: Run, tmp_path: Path) -> None:
    program, said = tmp_path / "vfiomgr", tmp_path / "said"
    killed = '[ "$1" = libvirt ] && kill -9 $$'
    program.write_text(f'#!/bin/sh\n{killed}\nfor one; do echo "$one"; done >{said}\n')
    program.chmod(0o755)
    script = tmp_path / "50-vfiomgr"
    script.write_text(render_script(str(program)))
    command = ["sh", str(script), "win", "prepare", "begin", "-"]
    answer = subprocess.run(command, input=b"<domain/>", capture_output=True, check=False)
    assert answer.returncode == 128 + signal.SIGKILL
    recovered = run(*said.read_text().splitlines())
    assert (recovered.status, recovered.stdout) == (0, "nothing to do: no interrupted operations\n")


def test_the_script_releases_the_devices_of_a_guest_whose_libvirt_was_killed(
    tmp_path: Path,
) -> None:
    program, said = tmp_path / "vfiomgr", tmp_path / "said"
    program.write_text(
        f"""#!/bin/sh
echo "$@" >>{said}
cat >>{said}
[ "$6" = release ] && exec touch {tmp_path}/released
kill -9 "$LIBVIRT"
while [ -e "/proc/$LIBVIRT" ]; do sleep 0.1; done
"""
    )
    program.chmod(0o755)
    script = tmp_path / "50-vfiomgr"
    script.write_text(render_script(str(program)))
    starting = f"exec 3<&0; LIBVIRT=$$ sh {script} win prepare begin - <&3 & wait"
    with subprocess.Popen(("/bin/sh", "-c", starting), stdin=subprocess.PIPE) as libvirt:
        assert libvirt.stdin is not None
        libvirt.stdin.write(b"<domain/>")
        libvirt.stdin.close()
        assert libvirt.wait() == -signal.SIGKILL
    while not (tmp_path / "released").exists():
        time.sleep(0.05)
    prepared = "libvirt hook run -- win prepare begin -\n<domain/>"
    assert said.read_text() == prepared + prepared.replace("prepare begin", "release end")


def test_guests_start_where_vfiomgr_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "50-vfiomgr"
    script.write_text(render_script(os.fspath(tmp_path / "gone")))
    script.chmod(0o755)
    command = [str(script), "win", "prepare", "begin", "-"]
    answer = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert "is gone, so devices of guests are not bound" in answer.stderr
