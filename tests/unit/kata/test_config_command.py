"""`vfiomgr kata config`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from vfiomgr.documents.text import is_sealed, sealed
from vfiomgr.kata.check import check_keys
from vfiomgr.kata.model import KataRelease
from vfiomgr.units import Version

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Answer, Matches, Run
    from vfiomgr.kata.model import RuntimeName

SHARED = "opt/kata/share/defaults/kata-containers"
BASE = """\
# Of the distribution.
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
machine_type = "q35"

# Expressions.
enable_annotations = ["enable_iommu"]  # one
kernel_params = "quiet"
default_memory = 2048

[agent.kata]
dial_timeout = 45

[runtime]
sandbox_cgroup_only=false
"""
RS_BASE = f"{BASE}hypervisor_name = 'qemu'\n".replace("dial_timeout = 45", "dial_timeout_ms = 10")

TYPED: dict[RuntimeName, str] = {"go": "go", "rs": "rust"}
"""What is typed for a runtime."""


def install(
    kernel: FakeKernel, *, version: str = "4.0.0", files: dict[str, str] | None = None
) -> Path:
    """Kata's own build below the root; its directory of configurations."""
    root = Path(kernel.root)
    for name, text in {
        "opt/kata/VERSION": f"{version}\n",
        "opt/kata/bin/containerd-shim-kata-v2": "",
        "opt/kata/runtime-rs/bin/containerd-shim-kata-v2": "",
        f"{SHARED}/configuration-qemu.toml": BASE,
        f"{SHARED}/runtime-rs/configuration.toml": RS_BASE,
        **(files or {}),
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / SHARED / "configuration.toml").symlink_to("configuration-qemu.toml")
    return root / SHARED


def document(answer: Answer) -> dict[str, Any]:
    assert answer.status == 0, answer.stderr
    return tomllib.loads(answer.stdout)


@pytest.mark.parametrize("runtime", ["go", "rs"])
@pytest.mark.parametrize("version", ["3.2", "3.15", "3.24", "3.31", "4.0", "4.1"])
def test_each_release_and_runtime_has_its_keys(
    run: Run, matches: Matches, version: str, runtime: RuntimeName
) -> None:
    options = ("--kata-version", version, "--kata-runtime", TYPED[runtime])
    answer = run("kata", "config", "02:00.0", *options)
    matches(f"kata/{version}-{runtime}.toml", answer.stdout)
    release = KataRelease(Version.parse(version), runtime)
    assert check_keys(document(answer), release, is_drop_in=True) == ()


@pytest.mark.parametrize(
    ("version", "runtime", "ports", "words"),
    [
        ("3.31", "rs", 2, "fails with two functions of one IOMMU group (duplicate id)"),
        ("4.0", "rs", 1, "does not pass 0000:02:00.1 to the guest"),
        ("4.1", "rs", 2, ""),
        ("4.0", "go", 2, ""),
    ],
)
def test_only_functions_that_reach_the_guest_have_ports(
    run: Run, version: str, runtime: RuntimeName, ports: int, words: str
) -> None:
    options = ("--kata-version", version, "--kata-runtime", TYPED[runtime])
    answer = run("kata", "config", "02:00.0", *options)
    assert document(answer)["hypervisor"]["qemu"]["pcie_root_port"] == ports
    assert words in answer.stderr
    assert words or not any(said in answer.stderr for said in ("does not pass", "duplicate id"))


@pytest.mark.parametrize(("version", "runtime"), [("4.1", "go"), ("3.31", "rs"), ("4.1", "rs")])
def test_cloud_hypervisor_has_its_own(
    run: Run, matches: Matches, version: str, runtime: RuntimeName
) -> None:
    options = ("--kata-version", version, "--kata-runtime", TYPED[runtime])
    answer = run("kata", "config", "02:00.0", *options, "--hypervisor", "clh")
    matches(f"kata/{version}-{runtime}-clh.toml", answer.stdout)


def test_the_installed_kata_is_found_with_its_runtime_and_configuration(
    run: Run, kernel: FakeKernel
) -> None:
    directory = install(kernel)
    answer = run("kata", "config", "02:00.0")
    assert "create_container_timeout" in document(answer)["agent"]["kata"], "runtime-rs since 4.0"
    assert "Kata not found" not in answer.stderr
    body = json.loads(
        run("kata", "config", "02:00.0", "--kata-runtime", "go", "--format", "json").stdout
    )
    assert body["path"] == f"/{SHARED}/config.d/50-vfiomgr.toml", "beside what the link leads to"
    (directory.parents[4] / "opt/kata/VERSION").write_text("3.31.0")
    assert "create_container_timeout" in document(run("kata", "config"))["runtime"]


def test_what_is_not_installed_is_the_newest_and_that_is_said(run: Run) -> None:
    answer = run("kata", "config")
    first, *_ = answer.stderr.splitlines()
    assert first == "Kata not found; assuming Kata 4.1.0 (runtime-rs) (set --kata-version)"
    assert run("kata", "config", "--kata-version", "x").status == 2


def test_json_and_yaml_tell_the_same_as_the_text(run: Run) -> None:
    line = ("kata", "config", "02:00.0", "--kata-version", "4.1", "--kata-runtime", "go")
    body = json.loads(run(*line, "--format", "json").stdout)
    assert body == YAML(typ="safe").load(run(*line, "--format", "yaml").stdout)
    assert (body["kind"], body["text"]) == ("KataConfiguration", run(*line).stdout)
    assert (body["path"], body["kata_version"], body["runtime"], body["hypervisor"]) == (
        "config.d/50-vfiomgr.toml",
        "4.1.0",
        "go",
        "qemu",
    )
    assert (body["plug"], body["root_ports"]) == ("cold", 2)
    assert body["devices"] == ["0000:02:00.0", "0000:02:00.1"]
    assert {"table": "hypervisor.qemu", "key": "pcie_root_port", "value": 2} in body["keys"]


def test_a_drop_in_is_written_once_and_then_nothing_is_to_do(run: Run, kernel: FakeKernel) -> None:
    directory = install(kernel, version="3.31.0")
    target = directory / "config.d/50-vfiomgr.toml"
    line = ("kata", "config", "02:00.0", "--output", str(target))
    planned = run(*line, "--dry-run")
    assert "+cold_plug_vfio" in planned.stdout
    assert not target.exists()
    assert run(*line).stdout == f"wrote {target}\n"
    written = target.read_text()
    assert tomllib.loads(written)["hypervisor"]["qemu"]["default_memory"] == 8192
    modified = target.stat().st_mtime_ns
    assert run(*line).stdout == f"{target}: unchanged\n", "its own drop-in is no base"
    assert target.stat().st_mtime_ns == modified
    body = json.loads(run(*line, "--format", "json").stdout)
    assert (body["is_changed"], body["text"]) == (False, written)


def test_a_drop_in_that_kata_does_not_read_is_noted(run: Run, kernel: FakeKernel) -> None:
    line = ("--root", kernel.root, "kata", "config", "02:00.0")
    unread = run(*line, "--output", "/etc/50-vfiomgr.toml")
    assert "Kata reads drop-ins only from config.d beside its configuration\n" in unread.stderr
    install(kernel)
    place = f"/{SHARED}/runtime-rs/config.d/50-vfiomgr.toml"
    assert f"write the drop-in to its place with: --output {place}\n" in run(*line).stderr
    unread = run(*line, "--output", "/etc/50-vfiomgr.toml")
    assert f"does not read {kernel.root}/etc/50-vfiomgr.toml with this configuration; pass " in (
        unread.stderr
    )
    assert f"pass --output {place}\n" in unread.stderr
    assert "--output" not in run(*line, "--output", place).stderr


def test_a_file_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = run("kata", "config", "--output", str(tmp_path / "file/x.toml"))
    assert answer.status == 1
    assert "cannot write" in answer.stderr


def test_a_drop_in_that_others_share_or_override_is_warned_about(
    run: Run, kernel: FakeKernel
) -> None:
    install(
        kernel,
        version="3.31.0",
        files={
            f"{SHARED}/configuration-clh.toml": "[hypervisor.clh]\n",
            f"{SHARED}/config.d/20-old.toml.bak": "[hypervisor.qemu]\nenable_debug = true",
            f"{SHARED}/config.d/90-late.toml": "[hypervisor.qemu]\npcie_root_port = 1",
        },
    )
    told = run("kata", "config", "02:00.0").stderr
    assert f"/{SHARED}/config.d also applies to configuration-clh.toml" in told
    assert "20-old.toml.bak is read too" in told
    assert "90-late.toml is read later and sets pcie_root_port to 1" in told


def test_what_kata_refuses_of_the_files_that_are_there_is_told(
    run: Run, kernel: FakeKernel
) -> None:
    files = {
        f"{SHARED}/config.d/10-a.toml": "[hypervisor.qemu]\nnix = 1",
        f"{SHARED}/configuration-qemu.toml": BASE.replace("= 2048", "= '2G'\nown = 1"),
    }
    install(kernel, version="3.31.0", files=files)
    told = run("kata", "config", "02:00.0").stderr
    assert f"/{SHARED}/config.d/10-a.toml: Kata 3.31.0 (Go runtime) does not know nix" in told
    assert "default_memory in [hypervisor.qemu] is '2G'" in told
    assert "does not know own" not in told
    assert "does not know own" in run("kata", "config", "02:00.0", "-v").stderr


def test_lists_are_merged_with_those_of_the_configuration_that_is_found(
    run: Run, kernel: FakeKernel
) -> None:
    install(kernel, version="3.31.0")
    line = ("--annotations", "default_memory,kernel_params", "--kernel-params", "pci=realloc")
    qemu = document(run("kata", "config", *line))["hypervisor"]["qemu"]
    assert qemu["kernel_params"] == "quiet pci=realloc"
    assert qemu["enable_annotations"] == ["enable_iommu", "^default_memory$", "^kernel_params$"]


def test_a_whole_configuration_keeps_comments_and_takes_drop_ins_in(
    run: Run, kernel: FakeKernel, matches: Matches
) -> None:
    files = {f"{SHARED}/config.d/10-debug.toml": "[hypervisor.qemu]\nenable_debug = true\n"}
    install(kernel, version="3.31.0", files=files)
    own = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"
    target = Path(f"{kernel.root}{own}")
    base = f"/{SHARED}/configuration.toml"
    line = ("kata", "config", "02:00.0", "--whole", base, "--annotations", "default_memory")
    printed = run(*line).stdout
    matches("kata/whole.toml", printed)
    answer = run(*line, "--output", str(target))
    assert target.read_text() == sealed(printed)
    assert is_sealed(target.read_text())
    assert answer.stdout == f"wrote {target}\n"
    assert "config.d/10-debug.toml: a configuration elsewhere" in answer.stderr
    assert run(*line, "--output", str(target)).stdout == f"{target}: unchanged\n"
    again = ("kata", "config", "02:00.0", "--whole", own, "--output", str(target))
    assert run(*again, "--annotations", "default_memory").stdout == f"{target}: unchanged\n"
    target.write_text(f"{target.read_text()}# my own line\n")
    assert run(*again, "--annotations", "kernel_params").stdout == f"wrote {target}\n"
    assert "# my own line" in target.read_text()
    assert not is_sealed(target.read_text()), "what was edited is still in it"


def test_a_configuration_tells_its_runtime(run: Run, kernel: FakeKernel) -> None:
    install(kernel, version="3.31.0")
    rs = f"/{SHARED}/runtime-rs/configuration.toml"
    agent = document(run("kata", "config", "--whole", rs))["agent"]["kata"]
    assert agent["reconnect_timeout_ms"] == 1200000
    refused = run("kata", "config", "--whole", rs, "--kata-runtime", "go")
    assert (refused.status, "is for --kata-runtime rust" in refused.stderr) == (2, True)
    refused = run("kata", "config", "--whole", rs, "--hypervisor", "clh")
    assert (refused.status, "no table [hypervisor.clh]" in refused.stderr) == (2, True)
    assert run("kata", "config", "--whole", "/nowhere.toml").status == 2
    assert run("kata", "config", "--whole", rs, "--beside", rs).status == 2


def test_what_kata_would_refuse_of_a_configuration_is_refused(run: Run, kernel: FakeKernel) -> None:
    install(kernel, version="4.1.0")
    base = Path(f"{kernel.root}/base.toml")
    base.write_text(RS_BASE.replace("kernel_params", "guest_hook_path = 1\nkernel_params"))
    refused = run("kata", "config", "--whole", "/base.toml")
    assert refused.status == 4
    assert "guest_hook_path in [hypervisor.qemu] is 1" in refused.stderr
    base.write_text(RS_BASE.replace("[agent.kata]", "[agent.kata]\nnix = 1\n"))
    told = run("kata", "config", "--whole", "/base.toml")
    assert (told.status, tomllib.loads(told.stdout)["agent"]["kata"]["nix"]) == (0, 1)
    assert "does not know nix in [agent.kata]: runtime-rs refuses" in told.stderr
    base.write_text("[hypervisor")
    assert run("kata", "config", "--beside", "/base.toml").status == 65
    base.write_text(RS_BASE.replace("[agent.kata]", "own = 1\nhot_plug_vfio = 'x'\n[agent.kata]"))
    answer = run("kata", "config", "--whole", "/base.toml")
    assert answer.status == 0
    assert "ignores: own in [hypervisor.qemu], hot_plug_vfio in" in answer.stderr
    assert (
        "runtime-rs ignores it silently"
        in run("kata", "config", "--whole", "/base.toml", "-v").stderr
    )


def test_a_broken_configuration_that_is_found_is_no_base(run: Run, kernel: FakeKernel) -> None:
    directory = install(kernel, version="3.31.0")
    (directory / "configuration-qemu.toml").write_text("[hypervisor")
    answer = run("kata", "config")
    assert answer.status == 0
    assert ": not valid TOML:" in answer.stderr
    assert "no configuration for qemu found" in answer.stderr


@pytest.mark.parametrize("command", ["kata config", "kata pod", "check pod"])
def test_an_unknown_vgpu_is_not_found(run: Run, command: str) -> None:
    answer = run(*command.split(), "F715F63C-0d00-4007-9c5a-b07b0c6c05de")
    assert answer.status == 2
    assert "active vGPU not found: f715f63c-0d00-4007-9c5a-b07b0c6c05de" in answer.stderr
    assert "vfiomgr libvirt hostdev" not in answer.stderr


def test_a_snapshot_tells_nothing_of_kata_and_serves_all_the_same(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    install(kernel)
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    answer = run("--snapshot", str(file), "kata", "config", "02:00.0")
    assert document(answer)["hypervisor"]["qemu"]["pcie_root_port"] == 2
    assert "Kata not found" in answer.stderr


def test_files_of_kata_are_named_from_the_root_on(run: Run) -> None:
    answer = run("kata", "config", "--firmware", "OVMF.fd")
    assert (answer.status, "is not an absolute path" in answer.stderr) == (2, True)
    line = ("--firmware", "/x/OVMF.fd", "--memory", "16G", "--no-pod-resources")
    found = document(run("kata", "config", *line))
    assert found["hypervisor"]["qemu"]["firmware"] == "/x/OVMF.fd"
    assert found["hypervisor"]["qemu"]["default_memory"] == 16384
    assert found["runtime"]["pod_resource_api_sock"] == ""


def test_the_kubelets_socket_is_where_its_directory_is(run: Run, kernel: FakeKernel) -> None:
    Path(f"{kernel.root}/var/lib/k0s/kubelet").mkdir(parents=True)
    found = document(run("kata", "config", "--kata-version", "4.1"))
    socket = "/var/lib/k0s/kubelet/pod-resources/kubelet.sock"
    assert found["runtime"]["pod_resource_api_sock"] == socket


def test_a_warning_about_a_value_is_not_called_an_ignored_key(run: Run, kernel: FakeKernel) -> None:
    other = "[hypervisor.clh]\npcie_root_port = 17\nnix = 1\nhot_plug_vfio = ''\n"
    directory = install(kernel)
    (directory / "configuration-qemu.toml").write_text(f"{BASE}{other}")
    line = ("kata", "config", "02:00.0", "--kata-runtime", "go")
    for more in ((), ("--whole", f"/{SHARED}/configuration-qemu.toml")):
        told = run(*line, *more).stderr.splitlines()
        (ports,) = [each for each in told if "pcie_root_port in [hypervisor.clh] is 17" in each]
        assert "the Go runtime creates at most 16 ports" in ports
        assert "ignores" not in ports
    (ignored,) = [each for each in told if "has keys that this Kata ignores" in each]
    assert ignored.endswith(": nix in [hypervisor.clh] (-v shows details)")
    verbose = run("-v", *line, *more).stderr
    assert "nix in [hypervisor.clh]: the Go runtime ignores it silently" in verbose


def below(tmp_path: Path) -> tuple[str, ...]:
    """A recorded host with Kata, as --root names it."""
    root = tmp_path / "recorded"
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "opt/kata/share").mkdir(parents=True)
    (root / "opt/kata/VERSION").write_text("4.1.0\n")
    return ("kata", "config", "--root", str(root))


def test_output_is_a_file_of_the_host_that_is_meant(run: Run, tmp_path: Path) -> None:
    """Never one of the machine that vfiomgr runs on, which has the same paths."""
    root = tmp_path / "recorded"
    inner = root / "etc/kata-containers/gpu/x.toml"
    line = (*below(tmp_path), "--output", str(inner)[len(str(root)) :])
    assert "pcie_root_port" in run(*line, "--dry-run").stdout
    assert not inner.exists()
    assert run(*line).stdout == f"wrote {inner}\n"
    assert run(*line).stdout == f"{inner}: unchanged\n"
    assert run(*line[:-1], str(inner)).stdout == f"{inner}: unchanged\n"


def test_output_does_not_leave_the_root(run: Run, tmp_path: Path) -> None:
    line = (*below(tmp_path), "--output")
    (tmp_path / "other").mkdir()
    (tmp_path / "recorded/out").symlink_to("../other")
    (tmp_path / "recorded/abroad").symlink_to(tmp_path / "other")
    (tmp_path / "recorded/link").symlink_to("/etc/kata.toml")
    for name in ("/out/x.toml", "/abroad/x.toml"):
        run(*line, name)
    assert not list((tmp_path / "other").iterdir())
    assert run(*line, "/link").stdout == f"wrote {tmp_path}/recorded/etc/kata.toml\n"
    relative = run(*line, "x.toml")
    assert relative.status == 2
    assert "is not a file below --root" in relative.stderr


def test_a_snapshot_has_no_file_to_write(run: Run, tmp_path: Path) -> None:
    snapshot = tmp_path / "host.json"
    snapshot.write_text(run("snapshot").stdout)
    target = tmp_path / "x.toml"
    answer = run("kata", "config", "--snapshot", str(snapshot), "--output", str(target))
    assert (answer.status, target.exists()) == (2, False)
    assert "omit --output, and redirect the output: > FILE" in answer.stderr


def test_a_version_that_cannot_be_read_is_told(run: Run, kernel: FakeKernel) -> None:
    install(kernel, version="junk")
    told = run("kata", "config").stderr
    assert "/opt/kata/VERSION is not a valid version; assuming Kata 4.1.0" in told
    (Path(kernel.root) / "opt/kata/VERSION").unlink()
    assert (
        "containerd-shim-kata-v2 found, but its version is unknown" in run("kata", "config").stderr
    )


def test_what_is_for_no_device_says_so(run: Run) -> None:
    answer = run("kata", "config")
    assert answer.status == 0
    assert (
        "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create, then this "
        "command again"
    ) in answer.stderr


@pytest.mark.parametrize(
    "text",
    [
        'hypervisor.qemu.path = "x" # kept\nhypervisor.clh.a = 1',
        'runtime = {}\nagent = {kata = {}}\n[hypervisor.qemu]\npath = "x" # kept',
        'hypervisor = {qemu = {path = "x"}} # kept',
        '[hypervisor]\nqemu = {path = "x"}',
        '[hypervisor]\nqemu.path = "x" # kept',
        '[hypervisor.clh]\n[runtime]\n[hypervisor.qemu]\npath = "x" # kept\n',
        '[hypervisor.clh]\n[runtime]\n[hypervisor.qemu]\npath="x"\n[agent]\nkata.x = {y = 1}',
    ],
)
@pytest.mark.parametrize("beside", ["", "runtime.a = 1\nhypervisor.qemu.b.c = 2\nz.y = [1]"])
def test_sections_may_be_inline_dotted_or_scattered(
    run: Run, kernel: FakeKernel, text: str, beside: str
) -> None:
    install(kernel, version="3.31.0")
    root = Path(kernel.root)
    (root / "odd").mkdir()
    (root / "odd/base.toml").write_text(text)
    if beside:
        (root / "odd/config.d").mkdir()
        (root / "odd/config.d/10-own.toml").write_text(beside)
    line = ("kata", "config", "02:00.0", "--kata-runtime", "go", "--memory", "4G")
    made = document(run(*line, "--whole", "/odd/base.toml"))
    qemu = made["hypervisor"]["qemu"]
    assert (qemu["path"], qemu["default_memory"]) == ("x", 4096)
    assert (made["agent"]["kata"]["dial_timeout"], made["runtime"]["vfio_mode"]) == (
        1200,
        "guest-kernel",
    )
    if beside:
        assert (qemu["b"], made["runtime"]["a"], made["z"]) == ({"c": 2}, 1, {"y": [1]})
    if "qemu.path" in text and "kept" in text:
        assert 'path = "x" # kept' in run(*line, "--whole", "/odd/base.toml").stdout
    assert run(*line, "--beside", "/odd/base.toml").status == 0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[hypervisor]\nqemu = 1", "/base.toml: hypervisor.qemu is 1"),
        ("agent = 1\n[hypervisor.qemu]", "/base.toml: agent is 1"),
        ("runtime = []\n[hypervisor.qemu]", "/base.toml: runtime is []"),
    ],
)
@pytest.mark.parametrize("option", ["--whole", "--beside"])
def test_sections_that_are_no_tables_are_told_with_their_place(
    run: Run, kernel: FakeKernel, text: str, place: str, option: str
) -> None:
    (Path(kernel.root) / "base.toml").write_text(text)
    answer = run("kata", "config", option, "/base.toml")
    assert (answer.status, place in answer.stderr) == (65, True), answer.stderr
    (Path(kernel.root) / "config.d").mkdir()
    (Path(kernel.root) / "config.d/10.toml").write_text(text)
    (Path(kernel.root) / "base.toml").write_text("[hypervisor.qemu]")
    answer = run("kata", "config", option, "/base.toml")
    assert (answer.status, "config.d/10.toml: " in answer.stderr) == (65, True), answer.stderr


def test_values_that_kata_refuses_together_are_those_with_the_drop_in(
    run: Run, kernel: FakeKernel
) -> None:
    mended = BASE.replace(
        "[agent", 'hot_plug_vfio = "root-port"\ncold_plug_vfio = "root-port"\n[agent'
    )
    directory = install(
        kernel, version="3.31.0", files={f"{SHARED}/configuration-qemu.toml": mended}
    )
    line = ("kata", "config", "02:00.0", "--kata-runtime", "go")
    assert "cold_plug_vfio and hot_plug_vfio in" not in run(*line).stderr, (
        "the drop-in sets one of them to no-port"
    )
    (directory / "config.d").mkdir()
    (directory / "config.d/90.toml").write_text('[hypervisor.qemu]\nhot_plug_vfio = "root-port"\n')
    (directory / "configuration-qemu.toml").write_text(BASE)
    told = run(*line).stderr
    assert "configuration-qemu.toml with its drop-ins and this one: cold_plug_vfio and hot" in told


def test_the_hypervisor_that_runtime_rs_names_is_the_one_that_counts(
    run: Run, kernel: FakeKernel
) -> None:
    text = RS_BASE.replace("'qemu'", "'cloud-hypervisor'") + "[hypervisor.cloud-hypervisor]\n"
    (Path(kernel.root) / "base.toml").write_text(text)
    for option in ("--whole", "--beside"):
        refused = run("kata", "config", option, "/base.toml")
        assert refused.status == 2
        assert (
            'has hypervisor_name = "cloud-hypervisor", so [hypervisor.qemu] has no effect'
            in refused.stderr
        )
        assert "--hypervisor clh" in refused.stderr
        made = document(run("kata", "config", option, "/base.toml", "--hypervisor", "clh"))
        assert "cold_plug_vfio" in made["hypervisor"]["cloud-hypervisor"]


def test_a_drop_in_takes_the_place_of_none_but_its_own(run: Run, kernel: FakeKernel) -> None:
    directory = install(kernel, version="3.31.0")
    base, link = directory / "configuration-qemu.toml", directory / "configuration.toml"
    other = directory / "own.toml"
    other.write_text("# mine\n")
    for named in (base, link, other):
        before = named.read_text()
        beside = ("--beside", f"/{SHARED}/configuration.toml", "--output", str(named))
        for options in (beside, (*beside, "--dry-run"), beside[2:]):
            refused = run("kata", "config", "02:00.0", *options)
            assert (refused.status, refused.stdout) == (4, "")
            assert ": it is not a drop-in of vfiomgr" in refused.stderr
            assert named.read_text() == before
    other.write_text("")
    line = ("kata", "config", "02:00.0", "--output", str(other))
    assert run(*line).status == 0
    assert run(*line, "--memory", "6G").status == 0, "its own"
    assert tomllib.loads(other.read_text())["hypervisor"]["qemu"]["default_memory"] == 6144


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("16", "missing unit: {} 16\n  remedy: write 16G or 16M"),
        ("255M", "{0} 255M is 255 MiB, but Kata needs at least 256\n  remedy: write a number"),
    ],
)
def test_a_guest_of_a_few_mebibytes_is_a_forgotten_unit(run: Run, memory: str, said: str) -> None:
    for line in (
        ("config", "--memory", memory),
        ("pod", "--runtimeclass", "--default-memory", memory),
    ):
        refused = run("kata", *line)
        assert refused.status == 2
        assert said.format(line[-2]) in refused.stderr
        wrong = run("kata", *line[:-1], "lots")
        remedy = f"remedy: write a number with a unit, e.g. {line[-2]} 6G or {line[-2]} 6144M"
        assert remedy in wrong.stderr
        for size in ("6G", "6144M"):
            assert run("kata", *line[:-1], size).status == 0
    assert run("kata", "config", "--memory", "256M").status == 0


def test_annotations_that_no_kata_has_are_refused(run: Run) -> None:
    line = ("kata", "config", "--kata-version", "4.1", "--kata-runtime", "go", "--annotations")
    refused = run(*line, "kernel_params,nosuchthing")
    assert (
        refused.status,
        "no such annotation in any Kata: --annotations nosuchthing" in refused.stderr,
    ) == (2, True)
    assert run(*line, "kernel_params,default_max_vcpus,kernel_hash").status == 0


def test_a_firmware_that_is_not_there_is_told(run: Run, kernel: FakeKernel) -> None:
    line = ("kata", "config", "--firmware", "/x/OVMF.fd")
    assert "--firmware /x/OVMF.fd does not exist" in run(*line).stderr
    (Path(kernel.root) / "x").mkdir()
    (Path(kernel.root) / "x/OVMF.fd").write_text("")
    assert "is not there" not in run(*line).stderr


def test_a_runtime_is_go_or_rust(run: Run) -> None:
    wrong = run("kata", "config", "--kata-runtime", "c")
    assert (wrong.status, "'c' is not one of 'go', 'rust'" in wrong.stderr) == (2, True)
