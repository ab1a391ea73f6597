"""`vfiomgr libvirt hostdev` on a fake kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.test_reading import imported_by

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.cli.conftest import Run

GPU = "0000:01:00.0"


def test_options_are_written_for_the_libvirt_that_is_told(run: Run) -> None:
    options = ("--driver-model", "nvgrace_gpu_vfio_pci", "--rom", "/gpu.rom", "--boot-order", "1")
    idle = run("libvirt", "hostdev", GPU, *options, "--libvirt-version", "10.0")
    assert (idle.status, idle.stdout) == (2, "")
    assert f"vfiomgr bind {GPU} --driver nvgrace_gpu_vfio_pci" in idle.stderr
    managed = (*options, "--managed")
    made = run("libvirt", "hostdev", GPU, *managed, "--libvirt-version", "10.0")
    assert made.status == 0
    for text in ("model='nvgrace_gpu_vfio_pci'", "<rom file='/gpu.rom'/>", "<boot order='1'/>"):
        assert text in made.stdout
    refused = run("libvirt", "hostdev", GPU, *managed, "--libvirt-version", "9.10")
    assert (refused.status, refused.stdout) == (4, "")
    assert "<driver model>, which libvirt has since 10.0.0: this is 9.10.0" in refused.stderr


def test_an_unknown_libvirt_is_taken_for_an_old_one_and_told(run: Run) -> None:
    refused = run("libvirt", "hostdev", GPU, "--iommufd")
    assert refused.status == 4
    assert refused.stderr.splitlines()[0] == (
        "no libvirt is installed here: this is for 9.0.0; --libvirt-version tells"
    )
    plain = run("libvirt", "hostdev", GPU)
    assert "9.0.0" not in plain.stderr, "nothing of it depends on the release"


def test_the_installed_libvirt_is_asked(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"virtqemud": "virtqemud (libvirt) 12.1.0\n", "qemu-system-x86_64": None}
    said["/usr/libexec/qemu-kvm"] = "QEMU emulator version 8.2.5 (qemu-kvm-8.2.5-1.el9)\n"
    monkeypatch.setattr(kernel, "run", lambda command, _seconds: said.get(command[0]))
    refused = run("libvirt", "hostdev", GPU, "--iommufd")
    assert "needs QEMU 9.0.0: this is 8.2.5" in refused.stderr
    said["/usr/libexec/qemu-kvm"] = None
    assert "iommufd='yes'" in run("libvirt", "hostdev", GPU, "--iommufd").stdout


@pytest.mark.parametrize("version", ["ten", ""])
def test_a_version_that_is_none_is_told(run: Run, version: str) -> None:
    answer = run("libvirt", "hostdev", GPU, "--iommufd", "--libvirt-version", version)
    assert answer.status == 2
    assert f"{version!r} is not a version" in answer.stderr


def test_devices_that_are_ready_are_read_like_a_list(run: Run, kernel: FakeKernel) -> None:
    """What a change needs, and what plans it, takes longer than all the rest."""
    run("bind", GPU)
    imported = imported_by("--root", kernel.root, "libvirt", "hostdev", GPU)
    assert "jinja2" in imported
    assert not imported & {"vfiomgr.api", "vfiomgr.planner.intents", "vfiomgr.host.surroundings"}
    assert not imported & {"pydantic", "rich", "libvirt", "vfiomgr.model.intent"}


def test_of_many_functions_that_wait_one_command_tells_all(run: Run, kernel: FakeKernel) -> None:
    names = ["0000:01:00.0", "0000:02:00.0", "10000:01:00.0"]
    told = run("libvirt", "hostdev", *names).stderr.splitlines()
    assert len(told) == 1
    assert "functions are not ready for a guest" in told[0]
    command = told[0].partition("vfiomgr ")[2].split()
    assert run(*command).status in (0, 4)
    assert set(names) <= set(command)
    assert kernel.writes == []
