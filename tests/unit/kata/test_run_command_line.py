from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, TWIN = "0000:01:00.0", "0000:02:00.0"
CONFIG = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"


def test_the_command_is_the_answer_and_the_rest_is_told_beside_it(run: Run) -> None:
    run("bind", GPU)
    run("bind", TWIN)
    answer = run("kata", "run-command", "01:00.1", TWIN, "--image", "ubuntu", "--command", "ls /")
    assert answer.status == 0
    assert answer.stdout == (
        "ctr run --rm --tty --runtime io.containerd.kata.v2 --device /dev/vfio/10 "
        "--device /dev/vfio/11 ubuntu kata-0000-01-00.0 ls /\n"
    )
    assert "run first: ctr image pull ubuntu" in answer.stderr
    assert "cold_plug_vfio or hot_plug_vfio" in answer.stderr
    assert "vfiomgr bind" not in answer.stderr


def test_what_waits_is_told_with_its_bind(run: Run) -> None:
    answer = run("kata", "run-command", GPU, "--with", "docker", "--format", "json")
    body = json.loads(answer.stdout)
    assert body["kind"] == "KataRunCommand"
    assert body["devices"] == [GPU]
    assert body["command"][-3:-1] == ["--device", "/dev/vfio/10"]
    assert body["command"][-1].startswith("nvcr.io/nvidia/")
    assert "runtimeType" in body["notes"][0]
    assert f"vfiomgr bind {GPU}" in answer.stderr


def test_the_handler_s_configuration_is_taken_where_it_is_there(
    run: Run, kernel: FakeKernel
) -> None:
    run("bind", GPU)
    kernel.sysfs.put_bytes(CONFIG, b"")
    assert f"--runtime-config-path {CONFIG}" in run("kata", "run-command", GPU).stdout
    own = run("kata", "run-command", GPU, "--config", "/k.toml").stdout
    assert "--runtime-config-path /k.toml" in own


def test_docker_has_its_own_name_for_kata(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    ask = ("kata", "run-command", GPU, "--with", "docker", "--kata-version", "4.1")
    shim = {"runtimeType": "/opt/kata/bin/containerd-shim-kata-v2"}
    for runtimes, name in (
        ({"my-kata": shim, "other": {"runtimeType": "/bin/other"}}, "my-kata"),
        ({"a": shim, "kata-vfio": shim}, "kata-vfio"),
    ):
        text = json.dumps({"runtimes": runtimes})
        kernel.sysfs.put_bytes("/etc/docker/daemon.json", text.encode())
        answer = run(*ask)
        assert f"--runtime {name} " in answer.stdout
        assert "runtimeType" not in answer.stderr
    kernel.sysfs.put_bytes("/etc/docker/daemon.json", b"{ not json")
    assert "--runtime kata " in run(*ask).stdout


def test_a_mediated_device_is_refused_with_what_works(run: Run) -> None:
    uuid = run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small").stdout.strip()
    answer = run("kata", "run-command", uuid)
    assert (answer.status, answer.stdout) == (4, "")
    assert "vfiomgr libvirt hostdev" in answer.stderr


def test_runtime_rs_plugs_cold_alone(run: Run) -> None:
    run("bind", GPU)
    for options in (("--kata-runtime", "rust"), ("--kata-version", "4.1")):
        assert "(cold_plug_vfio)" in run("kata", "run-command", GPU, *options).stderr
    go = run("kata", "run-command", GPU, "--kata-version", "4.1", "--kata-runtime", "go").stderr
    assert "(cold_plug_vfio or hot_plug_vfio)" in go


def test_a_configuration_with_a_port_needs_no_word(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    for text, told in (
        ('[hypervisor.qemu]\nhot_plug_vfio = "root-port"\n', False),
        ('[hypervisor.qemu]\ncold_plug_vfio = "root-port"\n', False),
        ('[hypervisor.qemu]\ncold_plug_vfio = "no-port"\n', True),
    ):
        kernel.sysfs.put_bytes("/etc/kata-containers/configuration.toml", text.encode())
        said = run("kata", "run-command", GPU).stderr
        assert ("/etc/kata-containers/configuration.toml lacks a port" in said) is told
        assert ("needs a port" in said) is False
    place = "/etc/kata-containers/config.d/50-vfiomgr.toml"
    kernel.sysfs.put_bytes(place, b'[hypervisor.qemu]\nhot_plug_vfio = "root-port"\n')
    assert "lacks a port" not in run("kata", "run-command", GPU).stderr
    hot_alone = run("kata", "run-command", GPU, "--config", CONFIG, "--kata-runtime", "rust").stderr
    assert f"{CONFIG} needs a port for the device (cold_plug_vfio)" in hot_alone


def test_the_installed_kata_counts_where_none_is_told(run: Run, kernel: FakeKernel) -> None:
    kernel.vfio.has_cdev = True
    kernel.sysfs.put_bytes("/opt/kata/VERSION", b"3.14.0\n")
    run("bind", GPU)
    ask = ("kata", "run-command", GPU, "--node", "cdev")
    assert "Kata 3.14.0 (Go runtime) does not support the VFIO character device" in run(*ask).stderr
    assert run(*ask, "--kata-version", "3.15").status == 0


def test_cdevs_are_named_once_they_are_there(run: Run, kernel: FakeKernel) -> None:
    kernel.vfio.has_cdev = True
    ask = ("kata", "run-command", GPU, "--node", "cdev", "--function-only")
    early = run(*ask)
    assert early.status == 4
    assert f"vfiomgr bind {GPU}" in early.stderr
    run("bind", GPU)
    assert "--device /dev/vfio/devices/vfio0 nvcr" in run(*ask).stdout
    old = run(*ask, "--kata-version", "3.2")
    assert old.status == 4
    assert "3.15" in old.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--command", "'x"), "no closing quotation"),
        (("--kata-version", "x"), "is not a version"),
    ],
)
def test_mistakes_are_told(run: Run, options: tuple[str, str], words: str) -> None:
    answer = run("kata", "run-command", GPU, *options)
    assert (answer.status, answer.stdout) == (2, "")
    assert words in answer.stderr


def test_a_snapshot_answers_as_its_host(run: Run, tmp_path: Path) -> None:
    run("bind", GPU)
    (tmp_path / "host.json").write_text(run("snapshot").stdout)
    there = run("--snapshot", str(tmp_path / "host.json"), "kata", "run-command", GPU)
    assert there == run("kata", "run-command", GPU)


RS_SHIM = "/opt/kata/runtime-rs/bin/containerd-shim-kata-v2"


def test_a_shim_outside_of_path_is_named_by_its_path(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    kernel.sysfs.put_bytes("/usr/bin/containerd-shim-kata-v2", b"")
    assert "--runtime io.containerd.kata.v2" in run("kata", "run-command", GPU).stdout
    kernel.sysfs.put_bytes(RS_SHIM, b"")
    for tool in ("ctr", "nerdctl"):
        answer = run("kata", "run-command", GPU, "--with", tool, "--kata-runtime", "rust")
        assert f"--runtime {RS_SHIM} " in answer.stdout
        assert "(containerd 1.6 and later)" in answer.stderr
    docker = run("kata", "run-command", GPU, "--with", "docker", "--kata-runtime", "rust").stderr
    assert f'"runtimeType": "{RS_SHIM}"' in docker
    assert "vfiomgr runtime install --kata --runtime docker" in docker


def test_what_the_installed_handler_names_is_taken(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    kernel.sysfs.put_bytes("/etc/kata-containers/named.toml", b"")
    entry = f"""version = 3
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata-vfio]
runtime_type = "io.containerd.kata-vfio.v2"
runtime_path = "{RS_SHIM}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata-vfio.options]
ConfigPath = "/etc/kata-containers/named.toml"
"""
    kernel.sysfs.put_bytes("/etc/containerd/config.toml", entry.encode())
    told = run("kata", "run-command", GPU).stdout
    assert f"--runtime {RS_SHIM} --runtime-config-path /etc/kata-containers/named.toml" in told
    other = run("kata", "run-command", GPU, "--config", "/k.toml").stdout
    assert "--runtime io.containerd.kata.v2 --runtime-config-path /k.toml" in other


def test_nothing_is_printed_for_a_configuration_that_is_none(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    kernel.sysfs.put_bytes("/k.toml", b"[hypervisor\n")
    answer = run("kata", "run-command", GPU, "--config", "/k.toml")
    assert (answer.status, answer.stdout) == (65, "")
