"""`runtime install` and `uninstall`, of Kata and of other runtimes, as typed."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from tests.fakes.containerd import Containerd
from tests.unit.runtimes import CONFIGURATION, DROP_IN, MAIN, SHIM, V2, V3, put, text
from vfiomgr.containers.runtimes.record import RECORD
from vfiomgr.kata.explain.facts import read_handlers
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run
    from vfiomgr.containers.runtimes.handlers import CriName

RS_SHIM = HostPath("/opt/kata/runtime-rs/bin/containerd-shim-kata-v2")


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfiomgr.containers.runtimes.apply._stamp", lambda: "20261121T120000Z")


@pytest.mark.parametrize("told", ["2.1", "2.1.9"])
def test_a_containerd_of_another_release_is_not_asked(
    kernel: FakeKernel, run: Run, told: str
) -> None:
    put(kernel, SHIM, "")
    put(kernel, CONFIGURATION, "")
    put(kernel, MAIN, V3)
    Containerd("1.6.20").install(kernel)
    answer = run("runtime", "install", "--kata", "--containerd-version", told)
    assert answer.status == 0, answer.stderr
    assert "containerd 1.6.20 is installed" in answer.stderr
    assert text(kernel, DROP_IN)
    answer = run("runtime", "uninstall", "kata-vfio", "--containerd-version", told)
    assert answer.status == 0
    assert text(kernel, MAIN) == V3
    Containerd("2.1.4").install(kernel)
    answer = run("runtime", "install", "--kata", "--containerd-version", told)
    assert "not checked" not in answer.stderr, "that is the same release"


@pytest.fixture
def node(kernel: FakeKernel) -> FakeKernel:
    """The workstation with Kata and containerd 2.1."""
    put(kernel, SHIM, "")
    put(kernel, CONFIGURATION, "")
    put(kernel, MAIN, V3)
    Containerd("2.1.9").install(kernel)
    return kernel


def test_the_plan_shows_the_difference_and_changes_nothing(
    node: FakeKernel, run: Run, matches: Matches
) -> None:
    answer = run("runtime", "install", "--kata", "--dry-run")
    assert (answer.status, answer.stderr) == (0, "")
    matches("kata-install-plan.txt", answer.stdout)
    assert text(node, MAIN) == V3
    assert text(node, DROP_IN) is None
    assert text(node, RECORD) is None


def test_the_plan_for_1_7_shows_the_main_file(node: FakeKernel, run: Run, matches: Matches) -> None:
    put(node, MAIN, V2)
    Containerd("1.7.28").install(node)
    matches(
        "kata-install-in-place-plan.txt", run("runtime", "install", "--kata", "--dry-run").stdout
    )


def test_what_was_done_is_told_with_what_comes_next(node: FakeKernel, run: Run) -> None:
    answer = run("runtime", "install", "--kata")
    assert answer.status == 0
    assert f"wrote {DROP_IN}" in answer.stdout
    other = run("runtime", "uninstall", "kata")
    assert other.stdout.endswith(
        "has no entry kata that vfiomgr added; it added: kata-vfio\nnothing to do\n"
    )
    assert f"backup: {MAIN}.vfiomgr-20261121T120000Z" in answer.stderr
    assert "systemctl restart containerd" in answer.stderr
    assert "undo with: vfiomgr runtime uninstall kata-vfio" in answer.stderr
    again = run("runtime", "install", "--kata")
    assert "handler kata-vfio already exists\nnothing to do" in again.stdout
    assert "restart" not in again.stderr
    gone = run("runtime", "uninstall", "kata-vfio")
    assert f"removed {DROP_IN}" in gone.stdout
    assert text(node, MAIN) == V3
    assert "nothing to do" in run("runtime", "uninstall", "kata-vfio").stdout


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_read_what_was_done(node: FakeKernel, run: Run, form: str) -> None:
    def parsed(words: str) -> dict[str, object]:
        read = json.loads if form == "json" else YAML(typ="safe", pure=True).load
        document = read(run(*words.split(), "--format", form).stdout)
        assert isinstance(document, dict)
        return document

    plan = parsed("runtime install --kata --dry-run")
    assert plan["kind"] == "Plan"
    differences = plan["differences"]
    assert isinstance(differences, dict)
    assert list(differences) == [DROP_IN, MAIN]
    assert plan["not_checked"] == []
    done = parsed("runtime install --kata")
    assert (done["kind"], done["changed"]) == ("Outcome", True)
    assert done["backups"] == [f"{MAIN}.vfiomgr-20261121T120000Z"]
    assert done["restart"] == "systemctl restart containerd"
    assert parsed("runtime install --kata")["changed"] is False
    assert text(node, DROP_IN)


def test_without_katas_configuration_the_command_that_makes_it_is_named(
    node: FakeKernel, run: Run
) -> None:
    answer = run("runtime", "install", "other", "--kata")
    own = "/etc/kata-containers/vfiomgr/other/configuration.toml"
    assert answer.status == 4
    assert f"configuration for the handler's shim not found: {own}" in answer.stderr
    assert f"vfiomgr kata config --whole BASE --output {own}" in answer.stderr
    base = "/opt/kata/share/defaults/kata-containers/configuration.toml"
    put(node, base, "[runtime]\n")
    assert f"--whole {base} --output {own}" in run("runtime", "install", "other", "--kata").stderr
    answer = run("runtime", "install", "--kata", "--config", "/etc/none.toml")
    assert "; or omit --config /etc/none.toml" in answer.stderr
    assert text(node, DROP_IN) is None


def test_the_configuration_that_kata_ships_for_gpus_serves(node: FakeKernel, run: Run) -> None:
    shipped = "/opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml"
    put(node, shipped, "")
    answer = run("runtime", "install", "other", "--kata")
    assert answer.status == 0
    assert f"the handler uses {shipped}" in answer.stderr
    assert shipped in (text(node, DROP_IN) or "")


@pytest.mark.parametrize(
    ("key", "version", "serves"),
    [
        ("cold_plug_vfio", "3.20.0", True),
        ("hot_plug_vfio", "3.20.0", True),
        ("cold_plug_vfio", "4.1.0", True),
        ("hot_plug_vfio", "4.1.0", False),
    ],
)
def test_what_kata_finds_by_itself_serves_where_a_drop_in_plugs_devices(
    node: FakeKernel, run: Run, key: str, version: str, *, serves: bool
) -> None:
    shim = RS_SHIM if version == "4.1.0" else SHIM
    node.remove(HostPath(SHIM))
    put(node, shim, "")
    put(node, "/opt/kata/VERSION", f"{version}\n")
    below = "/opt/kata/share/defaults/kata-containers"
    directory = f"{below}/runtime-rs" if shim == RS_SHIM else below
    table = '[runtime]\nhypervisor_name = "qemu"\n' if shim == RS_SHIM else "[runtime]\n"
    put(node, f"{directory}/configuration.toml", f"{table}[hypervisor.qemu]\n")
    assert run("runtime", "install", "other", "--kata").status == 4
    put(node, f"{directory}/config.d/50.toml", f'[hypervisor.qemu]\n{key} = "root-port"\n')
    answer = run("runtime", "install", "other", "--kata")
    assert answer.status == (0 if serves else 4), answer.stderr
    if serves:
        assert f"the handler uses {directory}/configuration.toml" in answer.stderr
        assert f"{directory}/configuration.toml" in (text(node, DROP_IN) or "")


@pytest.mark.parametrize(
    ("configuration", "version", "taken"),
    [
        ("", "3.20.0", "go"),
        ("", "4.1.0", "rs"),
        ("[runtime]\n", "4.1.0", "go"),
        ('[runtime]\nhypervisor_name = "qemu"\n', "3.20.0", "rs"),
    ],
)
def test_of_two_shims_the_one_that_the_configuration_is_for_is_taken(
    node: FakeKernel, run: Run, configuration: str, version: str, taken: str
) -> None:
    put(node, RS_SHIM, "")
    put(node, CONFIGURATION, configuration)
    put(node, "/opt/kata/VERSION", f"{version}\n")
    answer = run("runtime", "install", "--kata")
    shim = RS_SHIM if taken == "rs" else HostPath(SHIM)
    assert f"using Kata's shim {shim};" in answer.stderr
    assert f'runtime_path = "{shim}"' in (text(node, DROP_IN) or "")


def test_a_shim_that_is_not_there_is_refused(node: FakeKernel, run: Run) -> None:
    answer = run("runtime", "install", "--kata", "--path", "/opt/none")
    assert (answer.status, "/opt/none does not exist" in answer.stderr) == (4, True)
    put(node, CONFIGURATION, '[runtime]\nhypervisor_name = "qemu"\n')
    answer = run("runtime", "install", "--kata")
    assert answer.status == 4
    assert f"{CONFIGURATION} is for runtime-rs" in answer.stderr
    node.remove(HostPath(SHIM))
    answer = run("runtime", "install", "--kata")
    assert answer.status == 4
    assert "--path FILE" in answer.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("runtime install Kata_VFIO --kata", "invalid handler name: "),
        ("runtime install kata.vfio --kata", "invalid handler name: "),
        ("runtime install --kata --config kata.toml", "not an absolute path:"),
        ("runtime install --kata --runtime-config config.toml", "not an absolute path:"),
        ("runtime install --kata --containerd-version new", "is not a version"),
        ("runtime install crun", "missing option: --path FILE"),
        ("runtime install crun --path crun", "not an absolute path:"),
        ("runtime install a/b --path /usr/bin/crun", "invalid runtime name:"),
        (
            "runtime install --kata --runtime podman",
            "'podman' is not one of 'containerd', 'crio', 'docker'",
        ),
    ],
)
def test_mistakes_are_told(node: FakeKernel, run: Run, line: str, words: str) -> None:
    answer = run(*line.split())
    assert answer.status == 2
    assert words in answer.stderr
    assert "remedy: " in answer.stderr
    assert text(node, DROP_IN) is None


def test_of_several_runtimes_that_of_a_kubernetes_is_proposed(node: FakeKernel, run: Run) -> None:
    put(node, "/usr/local/bin/rke2", "")
    put(node, "/var/lib/rancher/rke2/agent/etc/containerd/config.toml", "version = 3\n")
    answer = run("runtime", "install", "--kata")
    assert answer.status == 2
    assert "select one, e.g. --runtime rke2" in answer.stderr


def test_several_runtimes_are_told_apart_by_the_user(node: FakeKernel, run: Run) -> None:
    put(node, "/usr/bin/dockerd", "")
    assert run("runtime", "install", "--kata", "--dry-run").status == 0, (
        "Docker is not what Kubernetes uses"
    )
    put(node, "/etc/crio/crio.conf", "")
    answer = run("runtime", "install", "--kata")
    assert answer.status == 2
    assert "several container runtimes found: containerd, crio" in answer.stderr
    assert "e.g. --runtime containerd" in answer.stderr
    assert run("runtime", "install", "--kata", "--runtime", "crio").status == 0
    assert text(node, "/etc/crio/crio.conf.d/50-vfiomgr.conf")


@pytest.mark.parametrize("cri", ["containerd", "crio", "docker"])
def test_an_entry_is_removed_from_where_it_is_whatever_else_is_there(
    node: FakeKernel, run: Run, cri: str
) -> None:
    put(node, "/etc/crio/crio.conf", "")
    put(node, "/etc/docker/daemon.json", "{}\n")
    put(node, "/usr/bin/crun", "", 0o755)
    before = node.sysfs.picture("/etc")
    assert run("runtime", "install", "--kata", "--runtime", cri).status == 0
    assert (
        run("runtime", "install", "crun", "--path", "/usr/bin/crun", "--runtime", cri).status == 0
    )
    answer = run("runtime", "uninstall", "kata-vfio")
    assert answer.status == 0, answer.stderr
    assert "nothing to do" not in answer.stdout
    answer = run("runtime", "uninstall", "crun")
    assert answer.status == 0, answer.stderr
    assert node.sysfs.picture("/etc") == before


@pytest.mark.parametrize("program", ["containerd", "crio", "docker", "k3s"])
def test_an_entry_of_another_kind_than_named_is_refused(
    node: FakeKernel, run: Run, program: str
) -> None:
    put(node, "/usr/bin/crun", "", 0o755)
    release = ("--containerd-version", "2.1") if program == "k3s" else ()
    place = ("--runtime", program, *release)
    assert run("runtime", "install", "--kata", *place).status == 0
    made = run("runtime", "install", "crun", "--path", "/usr/bin/crun", *place)
    assert made.status == 0, made.stderr
    answer = run("runtime", "uninstall", "crun", "--kata", *place)
    assert answer.status == 4
    assert "was added by vfiomgr runtime install\n" in answer.stderr
    assert "remedy: vfiomgr runtime uninstall crun\n" in answer.stderr
    assert run("runtime", "uninstall", "crun", *place).status == 0
    assert run("runtime", "uninstall", "kata-vfio", *place).status == 0


def test_an_entry_below_another_file_is_removed_there(node: FakeKernel, run: Run) -> None:
    other = "/etc/second/config.toml"
    put(node, other, V3)
    assert run("runtime", "install", "--kata", "--runtime-config", other).status == 0
    assert run("runtime", "uninstall", "kata-vfio").status == 0
    assert text(node, other) == V3
    assert text(node, "/etc/second/conf.d/50-vfiomgr.toml") is None


def test_of_several_entries_of_one_name_the_user_chooses(node: FakeKernel, run: Run) -> None:
    put(node, "/etc/docker/daemon.json", "{}\n")
    for cri in ("containerd", "docker"):
        assert run("runtime", "install", "--kata", "--runtime", cri).status == 0
    answer = run("runtime", "uninstall", "kata-vfio")
    assert answer.status == 2
    assert f"several container runtimes have entry kata-vfio: containerd ({MAIN}), docker" in (
        answer.stderr
    )
    assert f"--runtime containerd --runtime-config {MAIN}" in answer.stderr
    assert run("runtime", "uninstall", "kata-vfio", "--runtime", "docker").status == 0
    assert text(node, "/etc/docker/daemon.json") == "{}\n"
    assert run("runtime", "uninstall", "kata-vfio").status == 0
    assert text(node, MAIN) == V3


def test_without_any_runtime_that_is_told(kernel: FakeKernel, run: Run) -> None:
    put(kernel, SHIM, "")
    put(kernel, CONFIGURATION, "")
    answer = run("runtime", "install", "--kata")
    assert answer.status == 2
    assert "no container runtime found (containerd, CRI-O, Docker, k3s, rke2)" in answer.stderr
    assert "remedy: install one, or select the future one" in answer.stderr
    answer = run("runtime", "uninstall", "kata-vfio")
    assert answer.status == 2
    assert "no container runtime found" in answer.stderr
    assert "remedy: select the runtime that has the entry" in answer.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("runtime install --kata --config /opt", "/opt is a directory"),
        ("runtime install --kata --config /opt/pipe", "/opt/pipe is not a regular file"),
        ("runtime install --kata --path /opt", "/opt is a directory"),
        ("runtime install --kata --path /opt/plain", "/opt/plain is not executable"),
        ("runtime install --kata --path /opt/dangling", "/opt/dangling does not exist"),
        ("runtime install crun --path /opt", "/opt is a directory"),
        ("runtime install crun --path /opt/plain", "/opt/plain is not executable"),
    ],
)
def test_what_is_no_file_or_no_program_is_refused(
    node: FakeKernel, run: Run, line: str, words: str
) -> None:
    put(node, "/opt/plain", "")
    os.mkfifo(node.locate(HostPath("/opt/pipe")))
    os.symlink("/opt/none", node.locate(HostPath("/opt/dangling")))
    answer = run(*line.split())
    assert answer.status == 4
    assert words in answer.stderr
    assert "remedy: " in answer.stderr
    assert text(node, DROP_IN) is None


def test_a_link_to_a_program_is_one(node: FakeKernel, run: Run) -> None:
    put(node, "/opt/crun-1.2", "", 0o755)
    os.symlink("/opt/crun-1.2", node.locate(HostPath("/opt/crun")))
    assert run("runtime", "install", "crun", "--path", "/opt/crun").status == 0


def test_a_plain_runtime_comes_and_goes(node: FakeKernel, run: Run) -> None:
    put(node, "/usr/bin/crun", "", 0o755)
    assert run("runtime", "install", "crun", "--path", "/usr/bin/crun").status == 0
    assert 'BinaryName = "/usr/bin/crun"' in (text(node, DROP_IN) or "")
    assert run("runtime", "install", "none", "--path", "/usr/bin/none").status == 4
    answer = run("runtime", "uninstall", "crun")
    assert answer.status == 0
    assert text(node, DROP_IN) is None


def test_an_edited_entry_is_refused_with_the_command_that_was_typed(
    node: FakeKernel, run: Run
) -> None:
    run("runtime", "install", "--kata", "--runtime", "containerd")
    put(node, DROP_IN, (text(node, DROP_IN) or "").replace(SHIM, "/x"))
    answer = run("runtime", "uninstall", "kata-vfio", "--runtime", "containerd")
    assert answer.status == 4
    assert "runtime_path" in answer.stderr
    assert "run vfiomgr runtime uninstall kata-vfio --runtime containerd again" in answer.stderr


@pytest.mark.parametrize("main", [V2, V3])
@pytest.mark.parametrize("cri", ["containerd", "crio"])
def test_what_is_installed_is_what_explain_finds(
    node: FakeKernel, run: Run, main: str, cri: CriName
) -> None:
    put(node, MAIN, main)
    assert run("runtime", "install", "--kata", "--runtime", cri).status == 0
    entry = read_handlers(node, cri).handler("kata-vfio")
    assert entry is not None
    assert (entry.runtime_path, entry.config_path) == (SHIM, CONFIGURATION)
    assert entry.privileged_without_host_devices
    assert cri == "crio" or entry.tells("cdi.k8s.io/vfiomgr")


# ---- another root


def image(tmp_path: Path, **files: str) -> Path:
    """The root of an image: no kernel, not even a directory for one."""
    for name, content in {SHIM: "", CONFIGURATION: "", **files}.items():
        place = tmp_path / "image" / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return tmp_path / "image"


@pytest.mark.usefixtures("kernel")
def test_an_image_needs_no_kernel(tmp_path: Path, run: Run) -> None:
    root = image(tmp_path, **{MAIN: V2})
    answer = run("runtime", "install", "--kata", "--root", str(root), "--containerd-version", "1.7")
    assert answer.status == 0, answer.stderr
    assert "not checked: how containerd 1.7.0 reads the files" in answer.stderr
    assert f"undo with: vfiomgr runtime uninstall kata-vfio --root {root}\n" in answer.stderr
    place = root / MAIN.lstrip("/")
    assert "enable_cdi = true" in place.read_text()
    assert run("runtime", "uninstall", "kata-vfio", "--root", str(root)).status == 0
    assert place.read_text() == V2


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("package", "version", "is_in_place"),
    [
        ("containerd", "1.6.20~ds1-1+deb12u1", True),
        ("containerd.io", "1.7.27-1", True),
        ("containerd.io", "2:2.1.4-1~debian.13~trixie", False),
    ],
)
def test_below_another_root_packages_tell_the_version(
    tmp_path: Path, run: Run, package: str, version: str, *, is_in_place: bool
) -> None:
    status = f"Package: {package}\nStatus: install ok installed\nVersion: {version}\n\n"
    root = image(tmp_path, **{MAIN: V2, "/var/lib/dpkg/status": status})
    assert run("runtime", "install", "--kata", "--root", str(root)).status == 0
    assert (root / DROP_IN.lstrip("/")).exists() != is_in_place
    enables = "enable_cdi" in (root / MAIN.lstrip("/")).read_text()
    assert enables == version.startswith("1.7")


@pytest.mark.usefixtures("kernel")
def test_a_run_that_was_cut_off_in_an_image_can_be_recovered(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vfiomgr.host.tree import HostTree  # noqa: PLC0415

    root = image(tmp_path, **{MAIN: V2})
    replace = HostTree.replace

    def die(
        self: HostTree, path: HostPath, data: bytes, mode: int = 0o644, *, durable: bool = True
    ) -> None:
        replace(self, path, data, mode, durable=durable)
        if path == RECORD:
            raise SystemExit(137)

    monkeypatch.setattr(HostTree, "replace", die)
    assert run("runtime", "install", "--kata", "--root", str(root)).status == 137
    monkeypatch.setattr(HostTree, "replace", replace)
    answer = run("recover", "--root", str(root))
    assert answer.status == 0, answer.stderr
    assert "undone: add handler kata-vfio to containerd" in answer.stdout
    assert (root / MAIN.lstrip("/")).read_text() == V2
    assert not (root / RECORD.lstrip("/")).exists()


@pytest.mark.usefixtures("kernel")
def test_in_an_image_without_runs_there_is_nothing_to_recover(tmp_path: Path, run: Run) -> None:
    answer = run("recover", "--root", str(image(tmp_path, **{MAIN: V2})))
    assert (answer.status, answer.stderr) == (0, "")
    assert "nothing to do" in answer.stdout


def test_in_a_recording_runs_about_files_are_ended_and_those_about_devices_refused(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests import api  # noqa: PLC0415
    from vfiomgr.host.tree import HostTree  # noqa: PLC0415
    from vfiomgr.passthrough.steps import Bind  # noqa: PLC0415
    from vfiomgr.pci.model import PciAddress  # noqa: PLC0415

    def die(_path: str, _text: str) -> None:
        raise SystemExit(137)

    kernel.before_write = die
    with pytest.raises(SystemExit):
        api.apply(Bind((PciAddress.parse("0000:01:00.0"),)), tree=kernel)
    kernel.before_write = None
    put(kernel, SHIM, "")
    put(kernel, CONFIGURATION, "")
    put(kernel, MAIN, V2)
    root = tmp_path / "copied"
    shutil.copytree(kernel.root, root, symlinks=True)
    replace = HostTree.replace

    def cut(
        self: HostTree, path: HostPath, data: bytes, mode: int = 0o644, *, durable: bool = True
    ) -> None:
        replace(self, path, data, mode, durable=durable)
        if path == RECORD:
            raise SystemExit(137)

    monkeypatch.setattr(HostTree, "replace", cut)
    words = ("--runtime", "containerd", "--containerd-version", "1.7", "--root", str(root))
    assert run("runtime", "install", "--kata", *words).status == 137
    monkeypatch.setattr(HostTree, "replace", replace)
    answer = run("recover", "--root", str(root))
    assert answer.status == 4
    assert "a recorded host cannot be changed" in answer.stderr
    assert "undone: add handler kata-vfio to containerd 1.7.0" in answer.stderr
    assert not (root / RECORD.lstrip("/")).exists()


def test_a_snapshot_has_no_files(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "host.json"
    place.write_text(run("snapshot").stdout)
    answer = run("--snapshot", str(place), "runtime", "install", "--kata")
    assert answer.status == 2
    assert "--root DIR" in answer.stderr


def test_the_command_that_makes_the_configuration_is_about_the_same_root(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "image").mkdir()
    line = (
        "runtime",
        "install",
        "--kata",
        "--root",
        str(tmp_path / "image"),
        "--runtime",
        "containerd",
    )
    assert f"vfiomgr kata config --root {tmp_path}/image --whole" in run(*line).stderr


def test_the_configuration_that_stays_is_named(node: FakeKernel, run: Run) -> None:
    run("runtime", "install", "--kata")
    answer = run("runtime", "uninstall", "kata-vfio")
    assert f"the configuration of kata-vfio stays: {CONFIGURATION}" in answer.stderr
    assert f"rm {node.locate(CONFIGURATION)}" in answer.stderr
    assert node.exists(CONFIGURATION)
    node.remove(CONFIGURATION)
    assert "stays" not in run("runtime", "uninstall", "kata-vfio").stderr


def test_a_version_of_containerd_is_asked_for_as_containerds_are(
    node: FakeKernel, run: Run
) -> None:
    answer = run("runtime", "install", "--kata", "--containerd-version", "foo")
    assert (answer.status, text(node, DROP_IN)) == (2, None)
    assert "write it as 2.1" in answer.stderr


def test_without_rights_it_is_said_what_needs_them(
    node: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.engine.locks.os.geteuid", lambda: 1000)
    monkeypatch.setattr(type(node), "is_machine", property(lambda _: True))
    answer = run("runtime", "install", "--kata")
    assert answer.status == 1
    assert "changing configuration files of the host requires root" in answer.stderr
