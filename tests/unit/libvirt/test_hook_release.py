"""The hook of a guest whose display the desktop releases (`hook install DOMAIN --release`)."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import desktop as desktops
from tests.fakes.faults import PowerCut
from tests.fakes.live_desktop import LiveDesktop
from tests.unit.engine.faults import STRIDE
from tests.unit.libvirt.domains import EMPTY, hostdev, with_hostdevs
from tests.unit.libvirt.test_hook_apply import drivers, prepare, read_records, release
from tests.unit.libvirt.test_hook_commands import xml
from vfiomgr.documents.xml_text import parse
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.libvirt.checks import check_domain, check_domains
from vfiomgr.libvirt.hook import render_settings
from vfiomgr.libvirt.model import NAMESPACE, HookSettings
from vfiomgr.libvirt.xml.read import hook_settings
from vfiomgr.paths import SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, AUDIO = "0000:01:00.0", "0000:01:00.1"
RELEASE = HookSettings(release=True)
GUEST = replace(with_hostdevs(EMPTY, hostdev(GPU), hostdev(AUDIO)), hook=RELEASE)


def has_desktop(live: LiveDesktop) -> bool:
    return live.has_screen() and live.is_active("gdm.service")


def test_the_only_card_goes_to_the_guest_and_returns_with_its_desktop(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    assert prepare(live.kernel, GUEST) == (GPU, AUDIO)
    assert drivers(live.kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    assert not live.is_active("gdm.service")
    release(live.kernel, GUEST)
    assert drivers(live.kernel, GPU, AUDIO) == ["amdgpu", "snd_hda_intel"]
    assert has_desktop(live)
    assert read_records(live.kernel) == ()


def test_without_the_setting_the_guest_does_not_start_and_nothing_ends(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    with pytest.raises(Refusal, match="is the console's display"):
        prepare(live.kernel, replace(GUEST, hook=HookSettings()))
    assert live.log == []


def test_a_hook_that_runs_is_not_refused_for_what_could_keep_it_from_running(
    tmp_path: Path,
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    put = live.kernel.sysfs.put
    put(SCRIPT, "#!/bin/sh\n")
    put("/sys/fs/selinux/enforce", "1")
    put("/sys/fs/selinux/booleans/virt_hooks_unconfined", "0 0")
    (report,) = check_domains(api.host_at(live.kernel), [GUEST], None)
    assert "hook-boolean" in {finding.rule for finding in report.findings}
    assert prepare(live.kernel, GUEST) == (GPU, AUDIO)


def test_a_hook_that_dies_anywhere_leaves_what_the_release_restores(tmp_path: Path) -> None:
    """Libvirt asks for the release also of a guest whose start failed (qemuProcessStop)."""
    first = LiveDesktop(desktops.gnome(tmp_path / "complete"))
    earlier = len(first.kernel.operations)
    prepare(first.kernel, GUEST)
    for at in range(1, len(first.kernel.operations) - earlier + 1, STRIDE):
        live = LiveDesktop(desktops.gnome(tmp_path / str(at)))
        live.kernel.kill(at=at, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            prepare(live.kernel, GUEST)
        live.kernel.revive()
        release(live.kernel, GUEST)
        api.recover(tree=live.kernel)
        assert has_desktop(live), at
        assert drivers(live.kernel, GPU, AUDIO) == ["amdgpu", "snd_hda_intel"], at
        assert read_records(live.kernel) == (), at


def test_a_release_that_dies_anywhere_is_completed_by_the_next_one(tmp_path: Path) -> None:
    first = LiveDesktop(desktops.gnome(tmp_path / "complete"))
    prepare(first.kernel, GUEST)
    earlier = len(first.kernel.operations)
    release(first.kernel, GUEST)
    for at in range(1, len(first.kernel.operations) - earlier + 1):
        live = LiveDesktop(desktops.gnome(tmp_path / str(at)))
        prepare(live.kernel, GUEST)
        live.kernel.kill(at=at)
        with pytest.raises(PowerCut):
            release(live.kernel, GUEST)
        live.kernel.revive()
        release(live.kernel, GUEST)
        assert has_desktop(live), at
        assert drivers(live.kernel, GPU, AUDIO) == ["amdgpu", "snd_hda_intel"], at


def test_the_screen_returns_before_what_cannot_return(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    prepare(live.kernel, GUEST)
    live.kernel.fail_writes(f"/sys/bus/pci/devices/{AUDIO}/driver_override", errno.EIO)
    with pytest.raises(RolledBack, match=AUDIO):
        release(live.kernel, GUEST)
    assert has_desktop(live)
    assert drivers(live.kernel, GPU, AUDIO) == ["amdgpu", "vfio-pci"]
    assert [record.functions for record in read_records(live.kernel)] == [(GPU, AUDIO)]


def test_a_desktop_that_keeps_the_card_keeps_its_session_manager(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.immortal.add(1300)
    with pytest.raises(RolledBack, match=r"still in use after 40 seconds by wireplumber"):
        prepare(live.kernel, GUEST)
    assert has_desktop(live)
    assert read_records(live.kernel) == ()


def test_a_guest_that_could_not_start_ends_no_session(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    absent = replace(GUEST, hostdevs=(*GUEST.hostdevs, hostdev("0000:7f:00.0")))
    with pytest.raises(Refusal, match=r"0000:7f:00\.0"):
        prepare(live.kernel, absent)
    assert live.log == []
    assert has_desktop(live)


def test_the_setting_is_read_as_it_is_written() -> None:
    every = HookSettings(release=True, end_sessions=True, isolate_cpus=True, hugepages=True)
    for settings in (HookSettings(), RELEASE, HookSettings(isolate_cpus=True), every):
        mark = render_settings(settings).replace("<devices", f"<devices xmlns='{NAMESPACE}'")
        root = parse(f"<domain><metadata>{mark}</metadata></domain>".encode(), "win")
        assert hook_settings(root) == settings


def test_check_domain_plans_the_release_too(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    for settings, expected in ((HookSettings(), True), (RELEASE, False)):
        mark = render_settings(settings).replace("<devices", f"<devices xmlns='{NAMESPACE}'")
        text = xml(GPU, f"<metadata>{mark}</metadata>")
        report = check_domain(api.host_at(live.kernel), text)
        refused = [each for each in report.findings if each.rule == "hook-refused"]
        assert bool(refused) is expected


def test_install_refuses_settings_without_a_domain(run: Run) -> None:
    for line in ("--release", "win --end-sessions"):
        answer = run("libvirt", "hook", "install", *line.split())
        assert answer.status == 2
        assert answer.stderr


@pytest.fixture
def live(tmp_path: Path) -> LiveDesktop:
    """GNOME on the only card."""
    return LiveDesktop(desktops.gnome(tmp_path))


@pytest.fixture
def kernel(live: LiveDesktop) -> FakeKernel:
    """Its kernel, for commands."""
    return live.kernel


def test_the_hook_runs_as_libvirt_runs_it(
    live: LiveDesktop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = render_settings(RELEASE).replace("<devices", f"<devices xmlns='{NAMESPACE}'")

    class Input:
        buffer = io.BytesIO(xml(GPU, f"<metadata>{mark}</metadata>").encode())

    monkeypatch.setattr(sys, "stdin", Input())
    answer = run("libvirt", "hook", "run", "win", "prepare", "begin", "-")
    assert answer.status == 0, answer.stderr
    assert f"{GPU} bound for win" in answer.stderr
    assert live.log == ["stop gdm.service", "end session 2"]


_HOOK = """
import os, time
from vfiomgr.engine.worker import ForkedWorker
worker = ForkedWorker([lambda: time.sleep(600)])
worker.start(0, 600)
print(worker.pid, flush=True)
os._exit(0)
"""


def test_a_worker_that_the_kernel_keeps_does_not_keep_the_hooks_pipes() -> None:
    """Libvirt waits until all have closed the hook's output (virt-manager #299)."""
    command = (sys.executable, "-c", _HOOK)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as hook:
        output, _ = hook.communicate(timeout=60)
    os.kill(int(output), signal.SIGKILL)  # it is still there


def test_unbind_returns_the_screen_although_the_audio_function_cannot(
    live: LiveDesktop, run: Run
) -> None:
    assert run("bind", "--release", GPU, "--yes").status == 0
    live.kernel.driver("snd_hda_intel").probe_error = errno.EIO
    assert run("unbind", GPU).status == 1
    assert drivers(live.kernel, GPU) == ["amdgpu"]
    assert has_desktop(live)
    live.kernel.driver("snd_hda_intel").probe_error = None
    assert run("unbind", GPU).status == 0
    assert drivers(live.kernel, GPU, AUDIO) == ["amdgpu", "snd_hda_intel"]
