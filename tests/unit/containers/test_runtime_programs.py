"""Entries for CRI-O, Docker, k3s and rke2: what is written, kept and taken back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import tomlkit

from tests.fakes.hosts import network_adapter
from tests.fakes.programs import Said
from tests.unit.runtimes import (
    CONFIGURATION,
    SHIM,
    configuration,
    data,
    install,
    kata,
    prepare,
    put,
    text,
    uninstall,
)
from vfiomgr.containers.runtimes.apply import apply_prepared
from vfiomgr.containers.runtimes.entries import prepare_entry, prepare_removal
from vfiomgr.containers.runtimes.location import locate, refuse_elsewhere
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.containers.runtimes.model import ProgramName

CRIO = HostPath("/etc/crio/crio.conf.d/50-vfiomgr.conf")
DAEMON = HostPath("/etc/docker/daemon.json")
K3S = HostPath("/var/lib/rancher/k3s/agent/etc/containerd")
BASE = '{{ template "base" . }}\n'


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A host with Kata and nothing that runs it yet."""
    made = network_adapter(tmp_path)
    put(made, SHIM, "")
    put(made, CONFIGURATION, "")
    return made


@dataclass
class Teller:
    """A program that answers as it is told to."""

    answer: Callable[[Sequence[str]], Said]

    def changes(self, _arguments: Sequence[str]) -> bool:
        """It only tells."""
        return False

    def run(self, arguments: Sequence[str]) -> Said:
        """Answer."""
        return self.answer(arguments)


def bring(kernel: FakeKernel, name: str, answer: Callable[[Sequence[str]], Said]) -> None:
    kernel.programs.install(f"/usr/bin/{name}")
    kernel.programs.known[f"/usr/bin/{name}"] = Teller(answer)


# ---- CRI-O


def crio(version: str = "1.31.0", *, drops: str = "") -> Callable[[Sequence[str]], Said]:
    """CRI-O, which merges tables of drop-ins, or drops a key where there is a drop-in."""

    def answer(arguments: Sequence[str]) -> Said:
        if "--version" in arguments:
            return Said(output=f"crio version {version}\nVersion: {version}\n")
        *named, _, drop_ins, command = arguments
        assert command == "config"
        from pathlib import Path  # noqa: PLC0415

        runtimes: dict[str, Any] = {"runc": {"runtime_path": "/usr/bin/runc"}}
        runtime: dict[str, Any] = {"conmon_cgroup": "pod", "runtimes": runtimes}
        inner = sorted(Path(drop_ins).iterdir()) if Path(drop_ins).exists() else []
        files = [*map(Path, named[1:]), *inner]
        for file in files:
            found = tomlkit.parse(file.read_text()).unwrap().get("crio", {}).get("runtime", {})
            runtimes |= found.pop("runtimes", {})
            runtime |= found
        if drops and len(files) > 1:
            del runtime[drops]
        return Said(output=tomlkit.dumps({"crio": {"runtime": runtime}}))

    return answer


def test_cri_o_has_a_drop_in_and_reads_nothing_else_otherwise(kernel: FakeKernel) -> None:
    put(kernel, "/etc/crio/crio.conf", '[crio.runtime]\nconmon_cgroup = "system.slice"\n')
    bring(kernel, "crio", crio())
    before = configuration(kernel)
    prepared = install(kernel, kata("crio"))
    assert prepared.unchecked == ()
    assert data(kernel, CRIO)["crio"]["runtime"]["runtimes"] == {
        "kata-vfio": {
            "runtime_path": SHIM,
            "runtime_type": "vm",
            "runtime_root": "/run/vc",
            "runtime_config_path": CONFIGURATION,
            "privileged_without_host_devices": True,
        }
    }
    assert not install(kernel, kata("crio")).request.changes
    uninstall(kernel, program="crio")
    assert configuration(kernel) == before


@pytest.mark.parametrize("path", ["/usr/libexec/crio/conmon", ""])
def test_a_runtime_of_cri_o_has_the_conmon_of_the_others(kernel: FakeKernel, path: str) -> None:
    line = f'monitor_path = "{path}"' if path else ""
    put(kernel, "/etc/crio/crio.conf.d/10-crio.conf", f"[crio.runtime.runtimes.crun]\n{line}\n")
    install(kernel, RuntimeRequest("crio", "nvidia", "/usr/bin/nvidia-container-runtime"))
    install(kernel, kata("crio"))
    entries = data(kernel, CRIO)["crio"]["runtime"]["runtimes"]
    assert entries["nvidia"].get("monitor_path", "") == path
    assert "monitor_path" not in entries["kata-vfio"]


def test_cri_o_that_would_lose_a_setting_is_left_alone(kernel: FakeKernel) -> None:
    bring(kernel, "crio", crio(drops="conmon_cgroup"))
    before = configuration(kernel)
    with pytest.raises(Refusal, match=r"CRI-O 1\.31\.0 would also read .*conmon_cgroup"):
        install(kernel, kata("crio"))
    assert configuration(kernel) == before


def test_a_directory_among_drop_ins_is_none(kernel: FakeKernel) -> None:
    put(kernel, "/etc/crio/crio.conf.d/old/10.conf", "broken")
    install(kernel, kata("crio"))
    assert text(kernel, CRIO)


def test_two_handlers_share_the_drop_in(kernel: FakeKernel) -> None:
    install(kernel, kata("crio"))
    install(kernel, RuntimeRequest("crio", "crun", "/usr/bin/crun", set_default=True))
    assert data(kernel, CRIO)["crio"]["runtime"]["default_runtime"] == "crun"
    uninstall(kernel, program="crio")
    assert list(data(kernel, CRIO)["crio"]["runtime"]["runtimes"]) == ["crun"]
    uninstall(kernel, "crun", "crio")
    assert text(kernel, CRIO) is None


@pytest.mark.parametrize("place", ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d/10-kata.conf"])
def test_a_handler_of_others_in_cri_o_is_refused(kernel: FakeKernel, place: str) -> None:
    put(kernel, place, '[crio.runtime.runtimes.kata-vfio]\nruntime_path = "/x"\n')
    with pytest.raises(Refusal, match=place):
        prepare(kernel, kata("crio"))


@pytest.mark.parametrize("place", ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d/99-other.conf"])
def test_a_default_of_cri_os_names_the_entry_and_it_stays(kernel: FakeKernel, place: str) -> None:
    install(kernel, kata("crio"))
    put(kernel, place, '[crio.runtime]\ndefault_runtime = "kata-vfio"\n')
    before = configuration(kernel)
    with pytest.raises(Refusal, match=rf"crio\.runtime\.default_runtime in {place} names"):
        uninstall(kernel, program="crio")
    assert configuration(kernel) == before


def test_a_default_that_a_later_file_of_cri_os_sets_is_told(kernel: FakeKernel) -> None:
    theirs = '[crio.runtime]\ndefault_runtime = "runc"\n'
    put(kernel, "/etc/crio/crio.conf.d/10-early.conf", theirs)
    prepare(kernel, kata("crio", set_default=True))
    later = "/etc/crio/crio.conf.d/99-late.conf"
    put(kernel, later, theirs)
    with pytest.raises(Refusal) as refusal:
        prepare(kernel, kata("crio", set_default=True))
    assert f"{later} sets runc as the default" in refusal.value.message
    assert "--set-default" in refusal.value.hint
    prepare(kernel, kata("crio"))
    put(kernel, later, theirs.replace("runc", "kata-vfio"))
    prepare(kernel, kata("crio", set_default=True))


def test_a_default_that_is_taken_back_is_told(kernel: FakeKernel) -> None:
    install(kernel, kata("crio", set_default=True))
    (note,) = prepare(kernel, kata("crio")).request.notes
    assert "kata-vfio is no longer the default runtime; pass --set-default to keep it" in note
    assert "--set-default" in note
    assert not prepare(kernel, kata("crio", set_default=True)).request.notes
    install(kernel, kata("crio"))
    assert not prepare(kernel, kata("crio")).request.notes


def test_cdi_of_an_old_cri_o_is_refused(kernel: FakeKernel) -> None:
    bring(kernel, "crio", crio("1.23.0"))
    with pytest.raises(Refusal, match="does not support CDI"):
        prepare(kernel, RuntimeRequest("crio", "crun", "/usr/bin/crun", enable_cdi=True))


# ---- Docker


def dockerd(version: str, error: str = "") -> Callable[[Sequence[str]], Said]:
    """Docker, which looks at files since 23.0."""

    def answer(arguments: Sequence[str]) -> Said:
        if "--version" in arguments:
            return Said(output=f"Docker version {version}, build 297e128\n")
        assert arguments[:2] == ("--validate", "--config-file")
        from pathlib import Path  # noqa: PLC0415

        json.loads(Path(arguments[2]).read_text())
        return Said(1 if error else 0, error=error)

    return answer


OLD = '{\n    "log-driver": "journald",\n    "features": {\n        "buildkit": true\n    }\n}\n'


def test_docker_keeps_all_else_in_its_order_and_looks_at_it_first(kernel: FakeKernel) -> None:
    put(kernel, DAEMON, OLD)
    bring(kernel, "dockerd", dockerd("27.3.1"))
    prepared = install(kernel, kata("docker"))
    assert prepared.unchecked == ()
    assert any("Kata 3.29" in note for note in prepared.request.notes)
    written = json.loads(text(kernel, DAEMON) or "")
    assert list(written) == ["log-driver", "features", "runtimes"]
    assert written["features"] == {"buildkit": True}
    assert written["runtimes"] == {
        "kata-vfio": {"runtimeType": SHIM, "options": {"ConfigPath": CONFIGURATION}}
    }
    uninstall(kernel, program="docker")
    assert text(kernel, DAEMON) == OLD


def test_docker_without_a_file_gets_one_and_loses_it_again(kernel: FakeKernel) -> None:
    wanted = RuntimeRequest("docker", "crun", "/usr/bin/crun", set_default=True, enable_cdi=True)
    prepared = install(kernel, wanted)
    assert "not installed here" in prepared.unchecked[0]
    assert json.loads(text(kernel, DAEMON) or "") == {
        "runtimes": {"crun": {"path": "/usr/bin/crun"}},
        "default-runtime": "crun",
        "features": {"cdi": True},
    }
    uninstall(kernel, "crun", "docker")
    assert text(kernel, DAEMON) is None


def test_what_docker_rejects_is_not_written(kernel: FakeKernel) -> None:
    put(kernel, DAEMON, OLD)
    bring(kernel, "dockerd", dockerd("27.3.1", "unable to configure the Docker daemon"))
    with pytest.raises(Refusal, match="Docker rejects the file: unable to configure"):
        install(kernel, kata("docker"))
    assert text(kernel, DAEMON) == OLD


def test_an_old_docker_takes_no_shims_but_plain_runtimes_unseen(kernel: FakeKernel) -> None:
    bring(kernel, "dockerd", dockerd("20.10.24+dfsg1", "unknown flag: --validate"))
    with pytest.raises(Refusal) as refusal:
        install(kernel, kata("docker"))
    assert "Docker 20.10.24 does not support shims such as Kata's in" in refusal.value.message
    assert "23.0" in refusal.value.hint
    assert install(kernel, RuntimeRequest("docker", "crun", "/usr/bin/crun")).unchecked


@pytest.mark.parametrize("name", ["runc", "theirs"])
def test_names_that_docker_has_are_refused(kernel: FakeKernel, name: str) -> None:
    put(kernel, DAEMON, '{"runtimes": {"theirs": {"path": "/x"}}}')
    with pytest.raises(Refusal, match="did not write it"):
        prepare(kernel, RuntimeRequest("docker", name, "/usr/bin/crun"))


def test_an_entry_of_dockers_that_was_edited_since_stays(kernel: FakeKernel) -> None:
    install(kernel, kata("docker"))
    put(kernel, DAEMON, (text(kernel, DAEMON) or "").replace(SHIM, "/other"))
    with pytest.raises(Refusal, match=r"runtimes\.kata-vfio\.runtimeType in /etc/docker"):
        uninstall(kernel, program="docker")


def test_a_daemon_json_with_comments_is_told(kernel: FakeKernel) -> None:
    put(kernel, DAEMON, "{} // mine\n")
    with pytest.raises(InvalidDocument, match=r"daemon\.json:1:4: not JSON"):
        prepare(kernel, kata("docker"))


@pytest.mark.parametrize("before", [None, "", OLD, "{}\n"])
def test_the_format_is_that_of_the_program_whatever_the_file_is_called(
    kernel: FakeKernel, before: str | None
) -> None:
    other = "/etc/docker/other.conf"
    put(kernel, other, before)
    place = locate(kernel, "docker", other)
    apply_prepared(prepare_entry(kernel, place, kata("docker"), ""), ApplyContext(kernel))
    assert "kata-vfio" in json.loads(text(kernel, other) or "")["runtimes"]
    assert not prepare_entry(kernel, place, kata("docker"), "").request.changes
    put(kernel, other, (text(kernel, other) or "").replace("{", '{"later": 1,', 1))
    apply_prepared(prepare_removal(kernel, place, "kata-vfio", ""), ApplyContext(kernel))
    assert json.loads(text(kernel, other) or "") == {**json.loads(before or "{}"), "later": 1}


def test_a_file_of_dockers_that_is_no_json_is_refused(kernel: FakeKernel) -> None:
    put(kernel, "/etc/docker/other.conf", "[1]\n")
    with pytest.raises(InvalidDocument, match=r"other\.conf is not JSON"):
        prepare(kernel, kata("docker"), "/etc/docker/other.conf")


def test_a_default_of_dockers_names_the_entry_and_it_stays(kernel: FakeKernel) -> None:
    install(kernel, kata("docker"))
    there = (text(kernel, DAEMON) or "").replace("{", '{"default-runtime": "kata-vfio",', 1)
    put(kernel, DAEMON, there)
    with pytest.raises(Refusal, match=r"default-runtime in .*daemon\.json names kata-vfio"):
        uninstall(kernel, program="docker")
    assert text(kernel, DAEMON) == there


# ---- k3s and rke2


def rendered(version: int) -> str:
    cri = "io.containerd.cri.v1.runtime" if version == 3 else "io.containerd.grpc.v1.cri"
    runc = f"plugins.'{cri}'.containerd.runtimes.runc"
    return f"version = {version}\n[{runc}]\n[{runc}.options]\nSystemdCgroup = true\n"


@pytest.mark.parametrize("program", ["k3s", "rke2"])
@pytest.mark.parametrize(("version", "name"), [(3, "config-v3.toml.tmpl"), (2, "config.toml.tmpl")])
def test_the_template_is_the_one_of_the_configuration_that_was_made_last(
    kernel: FakeKernel, program: ProgramName, version: int, name: str
) -> None:
    place = HostPath(f"/var/lib/rancher/{program}/agent/etc/containerd")
    put(kernel, place / "config.toml", rendered(version))
    prepared = install(kernel, kata(program))
    made = text(kernel, place / name) or ""
    assert made.startswith(f'{BASE}\n# vfiomgr: kata-vfio\n[plugins."io.containerd.')
    assert ("cri.v1.runtime" in made) == (version == 3)
    assert "when it starts" in prepared.unchecked[0]
    put(kernel, place / "config.toml", rendered(version) + made.partition("\n")[2])
    assert not install(kernel, kata(program)).request.changes
    uninstall(kernel, program=program)
    assert text(kernel, place / name) is None


def test_a_template_of_version_2_is_not_put_out_of_use(kernel: FakeKernel) -> None:
    theirs = f"{BASE}\n[plugins.'io.containerd.grpc.v1.cri'.registry]\n"
    put(kernel, K3S / "config.toml", rendered(2))
    put(kernel, K3S / "config.toml.tmpl", theirs)
    install(kernel, kata("k3s"))
    assert text(kernel, K3S / "config-v3.toml.tmpl") is None
    assert (text(kernel, K3S / "config.toml.tmpl") or "").startswith(theirs)
    uninstall(kernel, program="k3s")
    assert text(kernel, K3S / "config.toml.tmpl") == theirs


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("later", ["", "# later\n"])
def test_a_template_comes_back_to_the_byte(kernel: FakeKernel, end: str, later: str) -> None:
    theirs = f'{{{{- template "base" . }}}}\n# theirs{end}'
    put(kernel, K3S / "config-v3.toml.tmpl", theirs)
    for name in ("a", "b"):
        install(kernel, kata("k3s", name=name))
    put(
        kernel,
        K3S / "config-v3.toml.tmpl",
        (text(kernel, K3S / "config-v3.toml.tmpl") or "") + later,
    )
    uninstall(kernel, "a", "k3s")
    assert "runtimes.b]" in (text(kernel, K3S / "config-v3.toml.tmpl") or "")
    uninstall(kernel, "b", "k3s")
    left = text(kernel, K3S / "config-v3.toml.tmpl") or ""
    gap = "\n" if later and not end else ""
    assert left == f"{theirs}{gap}{later}"


def test_a_block_that_was_edited_since_stays(kernel: FakeKernel) -> None:
    put(kernel, K3S / "config.toml", rendered(3))
    install(kernel, kata("k3s"))
    place = K3S / "config-v3.toml.tmpl"
    put(kernel, place, (text(kernel, place) or "").replace(SHIM, "/other"))
    with pytest.raises(Refusal) as refusal:
        uninstall(kernel, program="k3s")
    assert "kata-vfio in /var/lib/rancher" in refusal.value.message
    assert "# vfiomgr: kata-vfio" in refusal.value.hint


@pytest.mark.parametrize("template", ["[plugins.'x'.containerd.runtimes.kata-vfio]\n", None])
def test_a_handler_of_others_in_k3s_is_refused(kernel: FakeKernel, template: str | None) -> None:
    there = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata-vfio]\n"
    put(kernel, K3S / "config.toml", rendered(3) + ("" if template else there))
    put(kernel, K3S / "config-v3.toml.tmpl", template)
    with pytest.raises(Refusal, match="did not write it"):
        prepare(kernel, kata("k3s"))


@pytest.mark.parametrize(
    ("made", "name", "theirs", "rule"),
    [
        ("[plugins.cri]\n", "config.toml.tmpl", None, "runtime-config-version"),
        ("version = 1\n", "config.toml.tmpl", BASE, "runtime-config-version"),
        (None, "config.toml.tmpl", "[plugins.cri]\n", "runtime-config-version"),
        (None, "config.toml.tmpl", "", "runtime-config-version"),
        (None, "config-v3.toml.tmpl", "version = 2\n", "runtime-config-version"),
        (
            None,
            "config-v3.toml.tmpl",
            f'version = 3\nbin_dirs = ["/srv/k3s/data/{"3c" * 16}/bin"]\n',
            "runtime-template-stale",
        ),
    ],
)
def test_a_template_in_which_the_entry_is_not_read_or_goes_stale_is_refused(
    kernel: FakeKernel, made: str | None, name: str, theirs: str | None, rule: str
) -> None:
    put(kernel, K3S / "config.toml", made)
    put(kernel, K3S / name, theirs)
    with pytest.raises(Refusal) as refusal:
        prepare(kernel, kata("k3s"))
    assert refusal.value.diagnostics[0].rule == rule
    assert ("upgrade k3s" if made else BASE.strip()) in refusal.value.hint


@pytest.mark.parametrize("name", ["config-v3.toml.tmpl", "config.toml.tmpl"])
def test_a_template_of_ones_own_is_appended_to(kernel: FakeKernel, name: str) -> None:
    theirs = f"version = {3 if 'v3' in name else 2}\nroot = '/srv/data'\n"
    put(kernel, K3S / name, theirs)
    install(kernel, kata("k3s"))
    assert (text(kernel, K3S / name) or "").startswith(theirs)


@pytest.mark.parametrize(
    ("release", "is_refused"),
    [("1.27.4", True), ("1.27.5", False), ("1.28.0", True), ("1.23.6", True), ("1.34.1", False)],
)
def test_a_new_template_needs_a_release_that_has_the_base(
    kernel: FakeKernel, release: str, *, is_refused: bool
) -> None:
    put(kernel, K3S / "config.toml", rendered(2))
    bring(kernel, "k3s", lambda _: Said(output=f"k3s version v{release}+k3s1 (6a322f12)\n"))
    if not is_refused:
        assert prepare(kernel, kata("k3s")).request.changes
        return
    with pytest.raises(Refusal, match='no template "base"'):
        prepare(kernel, kata("k3s"))


# ---- runtimes whose files vfiomgr does not write

K0S = "/etc/k0s/containerd.toml"
MANAGED = "# k0s_managed=true\nversion = 3\n"
MICROK8S = "/var/snap/microk8s/current/args"


@pytest.mark.parametrize(
    ("files", "program", "main", "place"),
    [
        ({K0S: MANAGED}, None, None, "/etc/k0s/containerd.d/NAME.toml"),
        ({"/usr/local/bin/k0s": ""}, "containerd", None, "systemctl restart k0sworker"),
        ({K0S: MANAGED}, "containerd", K0S, "cri.v1.runtime'.containerd.runtimes.NAME]"),
        ({K0S: "version = 2\n"}, None, None, f"--runtime containerd --runtime-config {K0S}"),
        ({K0S: MANAGED, "/usr/bin/containerd": ""}, None, None, "or select another runtime"),
        ({"/snap/bin/microk8s": ""}, None, None, "snap restart microk8s.daemon-containerd"),
        (
            {f"{MICROK8S}/containerd-template.toml": "version = 2\n"},
            "containerd",
            f"{MICROK8S}/containerd.toml",
            f"{MICROK8S}/containerd-template.toml",
        ),
        ({"/snap/bin/docker": "", DAEMON: "{}"}, None, None, "/var/snap/docker/current/config"),
        ({"/var/snap/docker/current/x": ""}, "docker", None, "docker-ce or docker.io"),
    ],
)
def test_a_runtime_that_reads_other_files_is_refused_with_the_place(
    kernel: FakeKernel,
    files: dict[str, str],
    program: ProgramName | None,
    main: str | None,
    place: str,
) -> None:
    for path, told in files.items():
        put(kernel, path, told)
    with pytest.raises(Refusal) as refusal:
        refuse_elsewhere(kernel, program, main)
    assert place in refusal.value.hint
    assert refusal.value.diagnostics[0].rule == "runtime-elsewhere"


@pytest.mark.parametrize(
    ("files", "program", "main"),
    [
        ({"/usr/bin/containerd": ""}, None, None),
        ({K0S: "version = 2\n"}, "containerd", K0S),
        ({K0S: MANAGED, "/usr/bin/containerd": ""}, "containerd", None),
        ({K0S: MANAGED}, "crio", None),
        ({"/snap/bin/microk8s": ""}, "containerd", f"{MICROK8S}/containerd-template.toml"),
        ({"/snap/bin/docker": "", "/usr/bin/dockerd": ""}, None, None),
        ({"/snap/bin/docker": "", "/usr/bin/containerd": ""}, None, None),
        ({}, None, None),
    ],
)
def test_a_runtime_that_reads_its_usual_files_is_not_refused(
    kernel: FakeKernel, files: dict[str, str], program: ProgramName | None, main: str | None
) -> None:
    for path, told in files.items():
        put(kernel, path, told)
    refuse_elsewhere(kernel, program, main)


@pytest.mark.parametrize(
    ("drop_in", "why"),
    [
        ('imports = ["/x.toml"]\n', "does not merge"),
        ('[plugins."io.containerd.runtime.v1.linux"]\n', "CRI does not use"),
        ("# imports = []\n", None),
    ],
)
def test_what_a_drop_in_of_k0s_has_in_vain_is_named(
    kernel: FakeKernel, drop_in: str, why: str | None
) -> None:
    put(kernel, K0S, MANAGED)
    put(kernel, "/etc/k0s/containerd.d/nvidia.toml", drop_in)
    with pytest.raises(Refusal) as refusal:
        refuse_elsewhere(kernel, None, None)
    assert ("nvidia.toml" in refusal.value.message) == (why is not None)
    assert (why or "") in refusal.value.message


def test_the_file_of_a_rootless_docker_is_named_and_not_changed(kernel: FakeKernel) -> None:
    put(kernel, "/home/me/.config/systemd/user/docker.service", "[Service]\n")
    put(kernel, "/home/you/.config/x", "")
    put(kernel, DAEMON, "{}")
    prepared = prepare(kernel, RuntimeRequest("docker", "crun", "/usr/bin/crun"))
    notes = [note for note in prepared.request.notes if "rootless" in note]
    assert [note.partition(" ")[0] for note in notes] == ["/home/me/.config/docker/daemon.json"]


def test_options_of_runc_go_along_in_k3s(kernel: FakeKernel) -> None:
    put(kernel, K3S / "config.toml", rendered(3))
    install(kernel, RuntimeRequest("k3s", "crun", "/usr/bin/crun"))
    assert "SystemdCgroup = true" in (text(kernel, K3S / "config-v3.toml.tmpl") or "")
    with pytest.raises(Refusal, match=r"sets its default runtime itself$"):
        prepare(kernel, RuntimeRequest("k3s", "crun2", "/usr/bin/crun", set_default=True))
    with pytest.raises(Refusal, match="itself, and already has runc") as refused:
        prepare(kernel, RuntimeRequest("k3s", "runc", "/usr/bin/crun", set_default=True))
    assert "runtimeClassName: runc" in str(refused.value.diagnostics[0].remedy)


@pytest.mark.parametrize(
    ("version", "line", "is_off"),
    [
        (2, "", True),
        (2, "enable_cdi = true\n", False),
        (3, "", False),
        (3, "enable_cdi = false\n", True),
    ],
)
def test_cdi_that_k3s_has_off_cannot_be_asked_for(
    kernel: FakeKernel, version: int, line: str, *, is_off: bool
) -> None:
    cri = "io.containerd.cri.v1.runtime" if version == 3 else "io.containerd.grpc.v1.cri"
    put(kernel, K3S / "config.toml", f"{rendered(version)}[plugins.'{cri}']\n{line}")
    wanted = RuntimeRequest("k3s", "crun", "/usr/bin/crun", enable_cdi=True)
    if is_off:
        with pytest.raises(
            Refusal, match="cannot enable CDI in k3s with an entry in a template"
        ) as refusal:
            prepare(kernel, wanted)
        assert "omit --cdi, or use a k3s with containerd 2" in refusal.value.hint
    else:
        prepare(kernel, wanted)
    assert len(prepare(kernel, kata("k3s")).request.notes) == is_off
    bring(kernel, "k3s", lambda _: Said(output="k3s version v1.34.1+k3s1 (6a322f12)\n"))
    assert len(prepare(kernel, kata("k3s")).request.notes) == ("false" in line)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("v1.30.9+k3s1", "config.toml.tmpl"),
        ("v1.31.5+k3s1", "config.toml.tmpl"),
        ("v1.31.6+k3s1", "config-v3.toml.tmpl"),
        ("v1.32.2+k3s1", "config-v3.toml.tmpl"),
        ("v1.34.1+k3s1", "config-v3.toml.tmpl"),
    ],
)
def test_before_its_first_start_k3s_tells_by_its_version(
    kernel: FakeKernel, told: str, name: str
) -> None:
    bring(kernel, "k3s", lambda _: Said(output=f"k3s version {told} (6a322f12)\n"))
    install(kernel, kata("k3s"))
    assert text(kernel, K3S / name)


def test_a_template_that_nobody_can_tell_is_refused(kernel: FakeKernel) -> None:
    with pytest.raises(Refusal) as refusal:
        prepare(kernel, kata("k3s"))
    assert "--containerd-version" in refusal.value.hint
    place = locate(kernel, "k3s", None, Version(2, 0))
    changes = prepare_entry(kernel, place, kata("k3s"), "").request.changes
    assert changes[-1].path == K3S / "config-v3.toml.tmpl"
