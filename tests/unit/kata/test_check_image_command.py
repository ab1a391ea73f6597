from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.kata.test_image import EROFS, disk

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = "0000:01:00.0"
SHARE = "/opt/kata/share"
OWN = f"{SHARE}/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml"
MAIN = f"""
[hypervisor.qemu]
kernel = "{SHARE}/kata-containers/vmlinux-nvidia-gpu.container"
image = "{SHARE}/kata-containers/kata-containers-nvidia-gpu.img"
rootfs_type = "ext4"
[runtime]
vfio_mode = "guest-kernel"
"""


@pytest.fixture
def kata(kernel: FakeKernel) -> FakeKernel:
    """A host with Kata's build for GPUs; the configuration is a link, as kata-deploy makes it."""
    put = kernel.sysfs.put_bytes
    put(f"{SHARE}/kata-containers/vmlinux-6.12-nvidia-gpu", b"kernel")
    put(f"{SHARE}/kata-containers/kata-nvidia.img", disk(EROFS))
    put(OWN, MAIN.encode())
    link = kernel.sysfs.link_absolute
    images = f"{SHARE}/kata-containers"
    link(f"{images}/vmlinux-nvidia-gpu.container", f"{images}/vmlinux-6.12-nvidia-gpu")
    link(f"{images}/kata-containers-nvidia-gpu.img", f"{images}/kata-nvidia.img")
    link("/etc/kata-containers/configuration.toml", OWN)
    return kernel


def test_what_does_not_fit_blocks_and_a_drop_in_mends_it(run: Run, kata: FakeKernel) -> None:
    answer = run("check", "kata", GPU)
    assert answer.status == 1
    assert answer.stdout.startswith("blocker: the image is erofs, but rootfs_type is ext4\n")
    assert 'remedy    write rootfs_type = "erofs"' in answer.stdout
    assert answer.stdout.endswith("no guest can use devices: 1 blocker, 3 fine (see --all)\n")
    assert answer.stderr.startswith(
        "not checked: contents of the image: driver, agent and hooks (boot it with a debug "
        "console, or mount it with losetup -P)"
    )
    place = f"{SHARE}/defaults/kata-containers/config.d/50-x.toml"
    kata.sysfs.put_bytes(place, b'[hypervisor.qemu]\nrootfs_type = "erofs"\n')
    mended = run("check", "kata", GPU)
    assert mended.status == 0
    assert mended.stdout == "no problem found: 4 fine (see --all)\n"
    everything = run("check", "kata", GPU, "--all").stdout
    assert "ok: image and kernel are for NVIDIA GPUs, by their names" in everything


def test_json_has_all_findings(run: Run, kata: FakeKernel) -> None:
    del kata
    answer = run("check", "kata", "--config", OWN, "--format", "json")
    assert answer.status == 1
    body = json.loads(answer.stdout)
    assert (body["kind"], body["summary"]["blocker"]) == ("CheckReport", 1)
    assert body["items"][0]["evidence"][0] == f"{OWN}: rootfs_type = ext4"


def test_the_handler_s_own_configuration_comes_first(run: Run, kata: FakeKernel) -> None:
    place = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"
    kata.sysfs.put_bytes(place, b'[hypervisor.clh]\nkernel = "/nix"\n')
    answer = run("check", "kata")
    assert answer.status == 1
    assert f"{place}: kernel = /nix" in answer.stdout
    assert "[hypervisor.clh]" in answer.stdout


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (None, (), (2, "no readable configuration of Kata:")),
        (None, ("--config", "/nix.toml"), (2, "/nix.toml")),
        (b"[hypervisor\n", ("--config", "/k.toml"), (65, "/k.toml:1: not valid TOML:")),
    ],
)
def test_what_cannot_be_read_is_told(
    run: Run,
    kernel: FakeKernel,
    text: bytes | None,
    options: tuple[str, ...],
    told: tuple[int, str],
) -> None:
    if text is not None:
        kernel.sysfs.put_bytes("/k.toml", text)
    answer = run("check", "kata", *options)
    assert (answer.status, answer.stdout) == (told[0], "")
    assert told[1] in answer.stderr
    assert "remedy: " in answer.stderr


def test_a_link_that_leads_to_itself_is_no_file(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.link_absolute("/k.toml", "/k.toml")
    assert run("check", "kata", "--config", "/k.toml").status == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hypervisor = []\n", "hypervisor is [], not a table"),
        ("[hypervisor]\nqemu = 1\n", "hypervisor.qemu is 1, not a table"),
        ("[hypervisor.qemu]\nkernel = 1\n", "kernel in [hypervisor.qemu] is 1, not a string"),
        (f"runtime = true\n{MAIN.partition('[runtime]')[0]}", "runtime is true, not a table"),
        (MAIN.replace('"guest-kernel"', "2"), "vfio_mode in [runtime] is 2, not a string"),
        (MAIN.replace("guest-kernel", "bogus"), "invalid vfio_mode: 'bogus'"),
        (
            MAIN.replace("vmlinux-nvidia-gpu.container", ""),
            "the guest's kernel is not a regular file",
        ),
    ],
)
def test_what_kata_could_not_read_blocks(run: Run, kata: FakeKernel, text: str, told: str) -> None:
    kata.sysfs.put_bytes(
        OWN, text.replace('rootfs_type = "ext4"', 'rootfs_type = "erofs"').encode()
    )
    answer = run("check", "kata", GPU)
    assert answer.status == 1
    assert answer.stdout.startswith(f"blocker: {told}\n")
    assert answer.stdout.count("blocker: ") == 1


def test_an_image_of_zeros_is_told_as_not_checked(run: Run, kata: FakeKernel) -> None:
    place = f"{SHARE}/kata-containers/kata-nvidia.img"
    kata.sysfs.put_bytes(place, bytes(8192))
    answer = run("check", "kata", GPU)
    assert f"unknown: the file system of {place}\n  evidence  none of " in answer.stdout


def test_the_configuration_that_the_installed_handler_names_is_looked_at(
    run: Run, kata: FakeKernel
) -> None:
    named = "/etc/kata-containers/named.toml"
    kata.sysfs.put_bytes(named, b'[hypervisor.clh]\nkernel = "/nix"\n')
    entry = f"""version = 3
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata-vfio]
runtime_type = "io.containerd.kata-vfio.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata-vfio.options]
ConfigPath = "{named}"
"""
    kata.sysfs.put_bytes("/etc/containerd/config.toml", entry.encode())
    assert f"{named}: kernel = /nix" in run("check", "kata").stdout


def test_without_a_default_an_installed_configuration_is_checked(
    run: Run, kata: FakeKernel
) -> None:
    os.unlink(os.path.join(kata.root, "etc/kata-containers/configuration.toml"))
    other = f"{SHARE}/defaults/kata-containers/configuration-clh.toml"
    kata.sysfs.put_bytes(other, b'[hypervisor.clh]\nkernel = "/nix"\n')
    kata.sysfs.put_bytes(
        OWN, MAIN.replace("rootfs", 'cold_plug_vfio = "root-port"\nrootfs').encode()
    )
    answer = run("check", "kata")
    assert answer.stderr.startswith(f"checking {OWN}; for another configuration")
    assert f"{OWN}: rootfs_type = ext4" in answer.stdout
