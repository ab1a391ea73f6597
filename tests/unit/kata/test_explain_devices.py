"""`vfiomgr check pod`: which devices could be given, and what becomes of each."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.vgpu_hosts import a40_host, l40s_host, t4_host
from tests.unit.kata_breaks import breaks, is_certain, said
from tests.unit.kata_nodes import (
    CONFIGURATION,
    CONTAINERD,
    GROUP,
    HANDLER,
    KIND,
    SETTINGS,
    SHIMS,
    SPECIFICATION,
    KataNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Answer, Matches, Run

FIRST, SECOND = "0000:41:00.0", "0000:42:00.0"
AUDIO = "0000:41:00.1"


@pytest.fixture
def node(tmp_path: Path) -> KataNode:
    """With the Go runtime, and no device yet."""
    return KataNode(tmp_path / "node", "go")


@pytest.fixture
def kernel(node: KataNode) -> FakeKernel:
    """What `run` runs on."""
    return node.kernel


@pytest.fixture
def explain(run: Run, node: KataNode) -> Callable[..., Answer]:
    """Explain the pod of the node, or another subject."""

    def explain_it(*arguments: str, subject: str = "") -> Answer:
        return run("check", "pod", subject or str(node.pod), *arguments)

    return explain_it


def document(answer: Answer) -> Any:
    (item,) = json.loads(answer.stdout)["items"]
    return item


def states(item: Any) -> dict[str, str]:
    return {step["name"]: step["state"] for step in item["steps"]}


def functions(item: Any) -> list[tuple[str, str, int | None]]:
    return [
        (function["address"], function["port"], function["guest_index"])
        for chain in item["devices"]
        for function in chain["functions"]
    ]


def test_each_device_that_could_be_given_is_told_and_where_they_differ(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2)
    node.add_gpu(3, numa_node=1, driver="nvidia")
    node.publish(range(GROUP, GROUP + 3))
    item = document(explain("--format", "json"))
    assert [chain["id"] for chain in item["devices"]] == ["40", "41", "42"]
    assert functions(item) == [
        ("0000:41:00.0", "rp0", 0),
        ("0000:42:00.0", "rp0", 0),
        ("0000:43:00.0", "rp0", 0),
    ]
    assert item["differences"] == [
        f"{KIND}, is complete: yes: 40, 41; no: 42",
        f"{KIND}, NUMA node: -: 40, 41; 1: 42",
    ]
    (found,) = breaks(item)
    assert not is_certain(found), "the kubelet may give another one"
    assert found["remedy"] == "vfiomgr bind 0000:43:00.0"
    told = explain()
    assert told.status == 0
    assert "each device that the kubelet could assign:" in told.stdout


def test_an_unbound_device_breaks_once_no_other_is_left(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(1)
    node.add_gpu(2, driver="nvidia")
    node.publish([GROUP, GROUP + 1])
    node.change(node.pod, "pgpu: 1", "pgpu: 2")
    answer = explain("--format", "json")
    assert answer.status == 1
    (found,) = breaks(document(answer))
    assert f"{SECOND} (" in said(found)
    assert "is on the host driver nvidia" in said(found)
    assert states(document(answer))["functions"] == "broken"


def test_several_gpus_have_ports_and_indexes_in_the_order_of_the_kubelet(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2, with_audio=True)
    node.publish([GROUP, GROUP + 1])
    node.change(node.pod, "pgpu: 1", "pgpu: 2")
    item = document(explain("--format", "json"))
    assert functions(item) == [
        (FIRST, "rp0", 0),
        (AUDIO, "rp1", None),
        (SECOND, "rp2", 1),
        ("0000:42:00.1", "rp3", None),
    ]
    keys = [chain["annotations"] for chain in item["devices"]]
    assert keys == [
        [["cdi.k8s.io/vfio40", "nvidia.com/gpu=0"]],
        [["cdi.k8s.io/vfio41", "nvidia.com/gpu=1"]],
    ]
    assert f"{AUDIO}, 0000:42:00.1: a PCI device of the guest" in explain().stdout


def test_twelve_gpus_of_the_go_runtime_are_told_as_the_text_order_has_them(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(12)
    node.publish(range(GROUP, GROUP + 12))
    node.change(node.pod, "pgpu: 1", "pgpu: 12")
    item = document(explain("--format", "json"))
    by_port = {port: index for _, port, index in functions(item)}
    assert [by_port[f"rp{n}"] for n in (0, 1, 2, 9, 10, 11)] == [0, 1, 4, 11, 2, 3]
    assert (
        document(explain("--format", "json", "--kata-runtime", "rust"))["devices"][2]["functions"][
            0
        ]["guest_index"]
        == 2
    )


def test_ten_ports_sort_as_they_count_and_seventeen_are_too_many(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(17)
    node.publish(range(GROUP, GROUP + 17))
    node.change(node.pod, "pgpu: 1", "pgpu: 10")
    assert explain().status == 0
    node.change(node.pod, "pgpu: 10", "pgpu: 17")
    answer = explain()
    assert answer.status == 1
    assert "17 functions need a root port each, but Kata has only 16" in answer.stdout


def test_a_domain_other_than_zero_is_lost(explain: Callable[..., Answer], node: KataNode) -> None:
    node.add_gpus(2, domain=1)
    node.publish([GROUP, GROUP + 1])
    found = breaks(document(explain("--format", "json")))
    assert [(b["number"], is_certain(b)) for b in found] == [(8, False)]
    node.change(node.pod, "pgpu: 1", "pgpu: 2")
    answer = explain()
    assert answer.status == 1
    assert "is in a PCI domain other than 0000" in answer.stdout


def test_only_nvidias_gpus_are_told_to_the_guests_agent(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(1, vendor="1002")
    node.publish()
    answer = explain()
    assert answer.status == 0
    assert f"{FIRST} on vfio-pci -> rp0 -> a PCI device of the guest" in answer.stdout
    assert "annotation for the agent:" not in answer.stdout


def test_a_device_alone_is_followed_by_a_pod_that_asks_for_it(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2)
    node.publish([GROUP, GROUP + 1])
    answer = explain("--format", "json", subject=SECOND)
    item = document(answer)
    assert answer.status == 0
    assert functions(item) == [(SECOND, "rp0", 0)]
    assert item["devices"][0]["cdi_name"] == f"{KIND}=41"
    assert states(item)["runtime class"] == "unknown", "nobody showed one"
    other = explain("--resource", "a.io/b", subject=SECOND)
    assert other.status == 1
    assert "the pod requests 1 of a.io/b, but the CDI specifications have none" in other.stdout


def test_a_device_by_its_name_in_cdi(explain: Callable[..., Answer], node: KataNode) -> None:
    node.add_gpus(2)
    node.publish([GROUP, GROUP + 1])
    answer = explain("--format", "json", subject=f"{KIND}=41")
    assert (answer.status, functions(document(answer))) == (0, [(SECOND, "rp0", 0)])
    node.change(SPECIFICATION, "/dev/vfio/41", "/dev/vfio/99")
    answer = explain(subject=f"{KIND}=41")
    assert answer.status == 1
    assert "/dev/vfio/99 belongs to no device of this host" in answer.stdout
    assert explain(subject=f"{KIND}=40").status == 0


def test_a_device_on_its_host_driver_is_told_what_it_needs(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(1, driver="nvidia")
    answer = explain(subject="41:00.0")
    assert answer.status == 1
    assert "remedy: vfiomgr bind 0000:41:00.0" in answer.stdout
    assert "remedy: vfiomgr node run" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "broken: CDI, functions"
    assert "\nunknown  node " in answer.stdout
    assert ", missing until its functions are available" in answer.stdout


def test_hot_plug_needs_neither_the_kubelets_socket_nor_cdi(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.change(CONFIGURATION, 'cold_plug_vfio = "root-port"', 'hot_plug_vfio = "root-port"')
    answer = explain("--format", "json")
    assert answer.status == 0
    item = document(answer)
    assert "which are hot-plugged" in next(
        s["what"] for s in item["steps"] if s["name"] == "request"
    )
    assert states(item)["CDI"] == "unknown"
    assert explain("--kata-runtime", "rust").status == 1, "runtime-rs has no hot plug"


def test_annotations_name_devices_where_the_kubelet_is_not_asked(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2)
    node.publish([GROUP, GROUP + 1])
    socket = "/var/lib/kubelet/pod-resources/kubelet.sock"
    node.change(node.pod, "annotations: {}", f'annotations: {{cdi.k8s.io/gpu: "{KIND}=41"}}')
    both = breaks(document(explain("--format", "json")))
    assert [(b["evidence"], is_certain(b)) for b in both] == [
        (["kata-containers/kata-containers#11125"], False)
    ]
    node.change(CONFIGURATION, socket, "")
    answer = explain("--format", "json")
    assert (answer.status, functions(document(answer))) == (0, [(SECOND, "rp0", 0)])
    assert breaks(document(answer)) == []
    (found,) = breaks(document(explain("--format", "json", "--kata-runtime", "rust")))
    assert (
        "runtime-rs gets devices from the kubelet's socket and from nodes of the sandbox "
        "(prepare_coldplug_cdi_devices); its sources do not seem to read CDI annotations"
    ) in said(found)
    assert not is_certain(found)
    node.change(node.pod, f"{KIND}=41", f"{KIND}=99")
    answer = explain()
    assert answer.status == 1
    assert f"no specification has {KIND}=99, from annotation cdi.k8s.io/gpu" in answer.stdout


def test_go_and_runtime_rs_take_the_same_name_from_different_directories(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2)
    node.publish([GROUP], names=["a"])
    node.publish([GROUP + 1], names=["a"], path="var/run/cdi/x.json")
    assert functions(document(explain("--format", "json"))) == [(SECOND, "rp0", 0)]
    found = document(explain("--format", "json", "--kata-runtime", "rust"))
    assert functions(found) == [(FIRST, "rp0", 0)]
    node.write("run/cdi/y.json", "{}")
    assert "checked: /etc/cdi/vfiomgr.json, /var/run/cdi/x.json\n" in explain().stdout


def test_without_var_run_the_directory_below_run_is_read(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish(path="run/cdi/x.json")
    assert "/run/cdi/x.json -> /dev/vfio/40" in explain().stdout


def test_what_is_not_there_is_not_known_and_not_broken(run: Run, tmp_path: Path) -> None:
    node = KataNode(tmp_path / "bare")
    (node.root / CONTAINERD).unlink()
    (node.root / CONFIGURATION).unlink()
    (node.root / "opt/kata/VERSION").unlink()
    node.add_gpus()
    node.publish()
    line = ("--root", str(node.root), "check", "pod", str(node.pod))
    answer = run(*line)
    assert answer.status == 0
    last = answer.stdout.splitlines()[-1]
    assert last == "unknown: handler, configuration, request"
    assert "(assumed: the newest known release)" in answer.stdout
    file = tmp_path / "host.json"
    file.write_text(run("--root", str(node.root), "snapshot").stdout)
    answer = run("--snapshot", str(file), "check", "pod", str(node.pod))
    assert answer.status == 0
    assert answer.stdout.splitlines()[-1].endswith("unknown: handler, configuration, request")
    assert f"{KIND}=40 -> /etc/cdi/vfiomgr.json -> /dev/vfio/40 -> group 40" in answer.stdout
    name = "io.katacontainers.config.hypervisor.cold_plug_vfio"
    node.change(node.pod, "annotations: {}", f"annotations: {{{name}: root-port}}")
    (found,) = breaks(document(run(*line, "--format", "json")))
    assert (found["number"], found["is_silent"], is_certain(found)) == (1, True, False)
    node.change(node.pod, f"annotations: {{{name}: root-port}}", "annotations: {}")
    config = tmp_path / "kata.toml"
    config.write_text(SETTINGS.format(name="").replace('"root-port"', '"no-port"'))
    answer = run("--snapshot", str(file), "check", "pod", str(node.pod), "--config", str(config))
    assert answer.status == 1
    assert f"{config} sets cold_plug_vfio = no-port" in answer.stdout


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({"etc/containerd/conf.d/a.toml": HANDLER}, "unknown"),
        (
            {
                CONTAINERD: 'version = 3\nimports = ["conf.d/*.toml"]\n',
                "etc/containerd/conf.d/a.toml": HANDLER,
            },
            "ok",
        ),
        (
            {CONTAINERD: "version = 3\n", "etc/containerd/conf.d/a.toml": HANDLER},
            "unknown",
        ),
        ({"var/lib/rancher/rke2/agent/etc/containerd/config.toml": HANDLER}, "ok"),
        ({CONTAINERD: HANDLER.replace("cri.v1.runtime", "grpc.v1.cri")}, "unknown"),
        ({CONTAINERD: HANDLER.replace("cri.v1.runtime", "grpc.v1.cri").replace("3", "2", 1)}, "ok"),
        ({CONTAINERD: "a = \n"}, "broken"),
        ({CONTAINERD: "version = 3\n"}, "broken"),
        ({"etc/crio/crio.conf": "[crio]\n"}, "broken"),
    ],
)
def test_handlers_are_found_where_the_runtimes_look(
    explain: Callable[..., Answer], node: KataNode, files: dict[str, str], known: str
) -> None:
    node.add_gpus()
    node.publish()
    (node.root / CONTAINERD).unlink()
    for path, text in files.items():
        node.write(path, text.replace("{shim}", SHIMS["go"]))
    item = document(explain("--format", "json"))
    assert states(item)["handler"] == known


BESIDE = {CONTAINERD: "version = 3\n", "etc/containerd/conf.d/a.toml": HANDLER}
ALONE = {"etc/containerd/conf.d/a.toml": HANDLER}
MIXED = {
    CONTAINERD: 'version = 2\nimports = ["conf.d/*"]\n',
    "etc/containerd/conf.d/a.toml": HANDLER,
}
CRI_V3 = "plugins.'io.containerd.cri.v1.runtime'"
DROPPED = {
    CONTAINERD: HANDLER.replace("version = 3", 'version = 2\nimports = ["conf.d/*"]').replace(
        "cri.v1.runtime", "grpc.v1.cri"
    ),
    "etc/containerd/conf.d/a.toml": f"version = 3\n[{CRI_V3}]\na = 1\n",
}
IGNORED = {
    CONTAINERD: 'version = 3\nimports = ["conf.d/*"]\n',
    "etc/containerd/conf.d/a.toml": HANDLER.replace("version = 3", "version = 2").replace(
        "cri.v1.runtime", "grpc.v1.cri"
    ),
}
FOREIGN = {
    CONTAINERD: HANDLER.replace("version = 3", 'version = 3\nimports = ["conf.d/*"]'),
    "etc/containerd/conf.d/a.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\na = 1\n",
}
HIDDEN = {
    CONTAINERD: HANDLER.replace(
        "version = 3", 'version = 2\nimports = ["/etc/containerd/conf.d/*"]'
    ),
    "etc/containerd/conf.d/a.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\na = 1\n",
}


@pytest.mark.parametrize(
    ("files", "version", "known"),
    [
        (BESIDE, "2.2.1", "broken"),
        (BESIDE, "2.3.0", "ok"),
        (ALONE, "2.1.0", "broken"),
        (ALONE, "2.2.0", "ok"),
        (MIXED, "1.7.28", "broken"),
        (MIXED, "2.1.9", "ok"),
        (MIXED, "2.3.4", "broken"),
        (DROPPED, "2.1.9", "broken"),
        (DROPPED, "2.3.4", "broken"),
        (IGNORED, "1.7.15", "broken"),
        (IGNORED, "1.7.28", "ok"),
        (FOREIGN, "1.7.28", "broken"),
        (IGNORED, "2.1.9", "broken"),
        (IGNORED, "2.3.4", "ok"),
        (FOREIGN, "2.1.9", "ok"),
        (HIDDEN, "1.7.28", "broken"),
        (HIDDEN, "2.0.0", "ok"),
    ],
)
def test_what_containerd_makes_of_drop_ins_is_told_of_its_version(
    run: Run,
    node: KataNode,
    files: dict[str, str],
    version: str,
    known: str,
) -> None:
    node.add_gpus()
    node.publish()
    (node.root / CONTAINERD).unlink()
    for path, text in files.items():
        node.write(path, text.replace("{shim}", SHIMS["go"]))
    package = f"Package: containerd.io\nStatus: install ok installed\nVersion: {version}-1\n"
    node.write("var/lib/dpkg/status", package)
    recorded = node.pod.parent / "recorded"
    recorded.symlink_to(node.root)
    answer = run("--root", str(recorded), "check", "pod", str(node.pod), "--format", "json")
    assert states(document(answer))["handler"] == known
    assert answer.status == (1 if known == "broken" else 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("handler: kata-vfio", "handler: nvidia"),
        ("handler: kata-vfio", "handler: runc"),
        ("  runtimeClassName: kata-vfio\n", ""),
    ],
)
def test_behind_a_wrong_handler_nothing_is_judged_by_a_configuration_of_others(
    explain: Callable[..., Answer], node: KataNode, old: str, new: str
) -> None:
    node.add_gpus()
    node.publish()
    plugs_none = (node.root / CONFIGURATION).read_text().replace("root-port", "no-port")
    node.write("etc/kata-containers/configuration.toml", plugs_none)
    runc = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n"
    text = (node.root / CONTAINERD).read_text()
    node.write(CONTAINERD, f'{text}{runc}runtime_type = "io.containerd.runc.v2"\n')
    node.change(node.pod, old, new)
    answer = explain("--format", "json")
    assert answer.status == 1
    item = document(answer)
    (found,) = breaks(item)
    assert "--handler nvidia" not in found["remedy"]
    assert ("kata-vfio" in found["remedy"]) == bool(new)
    assert set(list(states(item).values())[3:]) == {"unknown"}
    assert functions(item) == [(FIRST, "rp0", 0)], "what would be there is told all the same"


def test_an_annotation_alone_is_followed_to_the_guest(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus(2)
    node.publish([GROUP, GROUP + 1])
    node.change(node.pod, "nvidia.com/pgpu: 1, ", "")
    node.change(node.pod, "annotations: {}", f'annotations: {{cdi.k8s.io/gpu: "{KIND}=41"}}')
    answer = explain("--format", "json")
    item = document(answer)
    assert (answer.status, functions(item)) == (0, [(SECOND, "rp0", 0)])
    assert set(states(item).values()) == {"ok"}
    told = explain().stdout
    assert "of nothing" not in told
    assert "remove the cdi.k8s.io annotations: the kubelet's answer is enough" not in told
    last = told.splitlines()[-1]
    assert last == "no step is broken; possible problems: request"


@pytest.mark.parametrize(
    ("text", "place"), [("a: b\nc: [\n", ":3:1: a bracket"), ("- a\n", ":1: not a mapping")]
)
def test_a_kubelet_whose_configuration_cannot_be_read_is_not_known(
    explain: Callable[..., Answer], node: KataNode, text: str, place: str
) -> None:
    node.add_gpus()
    node.publish()
    node.write("var/lib/kubelet/config.yaml", text)
    answer = explain("--format", "json")
    assert answer.status == 0
    step = document(answer)["steps"][3]
    assert step["state"] == "unknown"
    assert "/var/lib/kubelet/config.yaml" in step["what"]
    assert place in step["what"]


def test_a_kubelet_since_1_34_needs_no_feature_gate(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    node.write("var/lib/kubelet/config.yaml", "runtimeRequestTimeout: 20m\n")
    package = "Package: kubelet\nStatus: install ok installed\nVersion: {}\n"
    node.write("var/lib/dpkg/status", package.format("1.33.4-1.1"))
    assert "may break: /var/lib/kubelet/config.yaml does not enable" in explain().stdout
    node.write("var/lib/dpkg/status", package.format("1.34.0-1.1"))
    assert "feature gate KubeletPodResourcesGet, which" not in explain().stdout


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize("case", ["right", "broken"])
def test_it_is_told_as_it_always_was(
    run: Run, node: KataNode, matches: Matches, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    node.add_gpus(2, with_audio=True)
    node.add_gpu(3, driver="nvidia", numa_node=1)
    node.publish([GROUP, GROUP + 1, GROUP + 2])
    text = node.pod.read_text()
    if case == "broken":
        text = text.replace("10240Mi", "160Mi").replace("privileged: false", "privileged: true")
        node.change(CONFIGURATION, '"root-port"', '"no-port"')
        node.change(CONTAINERD, "_host_devices = true", "_host_devices = false")
    for output, arguments in (("txt", ()), ("json", ("--format", "json"))):
        pipe(monkeypatch, text)
        answer = run("check", "pod", "-", *arguments)
        assert answer.status == (1 if case == "broken" else 0)
        matches(f"kata/explain-{case}.{output}", answer.stdout)


def test_a_unit_may_set_kata_conf_file(explain: Callable[..., Answer], node: KataNode) -> None:
    node.add_gpus()
    node.publish()
    node.change(CONTAINERD, f'ConfigPath = "/{CONFIGURATION}"', "")
    node.write(SHIMS["go"].removeprefix("/"), "\x7fELF KATA_CONF_FILE=/program/text")
    assert explain().status == 0, "a program is no script"
    unit = "etc/systemd/system/containerd.service.d/kata.conf"
    node.write(unit, f'[Service]\nEnvironment="KATA_CONF_FILE=/{CONFIGURATION}"\n')
    answer = explain()
    assert answer.status == 1
    assert f"break 7: /{unit} sets KATA_CONF_FILE=/{CONFIGURATION}" in answer.stdout
    assert explain("--kata-version", "3.32").status == 0, "only 4.0 and later mind"
    shipped = "/opt/kata/share/defaults/kata-containers/configuration-qemu.toml"
    node.write(shipped.removeprefix("/"), (node.root / CONFIGURATION).read_text())
    node.change(unit, f"/{CONFIGURATION}", shipped)
    assert explain().status == 0


def test_of_several_pods_those_without_problems_are_counted(
    explain: Callable[..., Answer], node: KataNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.add_gpus()
    node.publish()
    text = node.pod.read_text()
    _, pod = text.split("---\n")
    pipe(monkeypatch, f"{text}---\n{pod.replace('cuda', 'other')}")
    answer = run("check", "pod", "-", "--format", "json")
    found = json.loads(answer.stdout)
    assert [(i["pod"], i["source"], i["line"]) for i in found["items"]] == [
        ("cuda", "<stdin>", 7),
        ("other", "<stdin>", 20),
    ]
    assert found["is_broken"] is False
    pipe(monkeypatch, f"{text}---\n{pod.replace('cuda', 'other')}")
    assert run("check", "pod", "-").stdout == "no problem found in 2 pods (see --all)\n"
    pipe(monkeypatch, f"{text}---\n{pod.replace('cuda', 'other')}")
    assert run("check", "pod", "-", "--all").stdout.count("\nno problem found\n") == 2
    node.pod.write_text(f"{text}---\n{pod.replace('runtimeClassName: kata-vfio', '')}")
    told = explain()
    assert told.status == 1
    assert told.stdout.endswith("\n\nno problem found in 1 pod (see --all)\n")
    whole = explain("--all").stdout
    assert whole.count("\nPod ") == 1
    assert "\nno problem found\n\nPod cuda" in whole


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("missing.yaml", 2, "cannot read the pod missing.yaml"),
        ("0000:99:00.0", 2, "no such PCI device"),
        ("gpu", 2, "'gpu' is not a PCI address"),
        ("a.io/b=c", 2, "no such device in the CDI specifications of this host: a.io/b=c"),
        ("0000:41:00.0 --kata-version new", 2, "'new' is not a version"),
        ("0000:41:00.0 --config /nowhere.toml", 2, "cannot read configuration /nowhere.toml"),
        ("0000:41:00.0 --handler A", 2, "--handler 'A' is not a valid Kubernetes name"),
        ("0000:41:00.0 --resource cpu", 2, "is not a resource of a device plugin"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    run: Run, node: KataNode, line: str, status: int, words: str
) -> None:
    node.add_gpus()
    answer = run("check", "pod", *line.split())
    assert (answer.status, answer.stdout) == (status, "")
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


def test_a_malformed_pod_is_told_by_file_and_line(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.change(node.pod, "16Gi", "much")
    answer = explain()
    assert (answer.status, answer.stdout) == (65, "")
    assert f"{node.pod}:18:" in answer.stderr
    assert "invalid quantity: 'much'" in answer.stderr


def test_a_vgpu_of_a_virtual_function_arrives_and_one_without_a_type_does_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vf, free = "0000:21:00.4", "0000:21:00.5"
    kernel = l40s_host(tmp_path / "l40s", total_vfs=2)
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: kernel)
    node = KataNode(tmp_path / "vgpus", "go", kernel)
    run("vgpu", "create", "--type", "L40S-2Q", "--parent", vf)
    node.publish([json.loads(run("show", vf, "--format", "json").stdout)["iommu_group"]])
    answer = run("check", "pod", str(node.pod), "--format", "json")
    assert answer.status == 0, answer.stdout
    assert functions(document(answer)) == [(vf, "rp0", 0)]
    answer = run("check", "pod", free)
    assert answer.status == 1
    assert f"vfiomgr vgpu create --parent {free}" in answer.stdout


def test_a_mediated_device_is_refused_with_what_works_instead(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(tmp_path / "t4")
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: kernel)
    node = KataNode(tmp_path / "mdevs", "go", kernel)
    uuid = run("vgpu", "create", "--type", "T4-2Q").stdout.strip()
    answer = run("check", "pod", uuid)
    assert (answer.status, answer.stdout) == (4, "")
    assert f"vfiomgr libvirt hostdev {uuid}" in answer.stderr
    shown = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
    node.publish([shown[0]["iommu_group"]])
    answer = run("check", "pod", str(node.pod), "--format", "json")
    assert answer.status == 1
    (found,) = breaks(document(answer))
    assert "is a mediated device of" in said(found)
    assert found["evidence"] == ["kata-containers/kata-containers#10681"]
    assert "vfiomgr vgpu remove" in found["remedy"]


def test_a_function_of_mediated_devices_is_not_to_be_bound(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = a40_host(tmp_path / "a40")
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: kernel)
    KataNode(tmp_path / "mdevs", "go", kernel)
    shown = json.loads(run("list", "--format", "json").stdout)["items"]
    vf = next(item["address"] for item in shown if item["physical_function"])
    item = document(run("check", "pod", vf, "--format", "json"))
    assert (states(item)["node"], states(item)["functions"]) == ("unknown", "broken")
    (found,) = [
        found
        for found in breaks(item)
        if ", which creates mediated devices; Kata does not support them" in said(found)
    ]
    assert "now it refuses" not in found["remedy"]
    assert f"vfiomgr vgpu create --parent {vf}" in found["remedy"]


def test_a_file_of_containerd_that_is_no_text_breaks_and_one_that_nobody_may_read_does_not(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    (node.root / CONTAINERD).write_bytes(b"version = 3\n# \xff\n")
    answer = explain("--format", "json")
    (found,) = breaks(document(answer))
    assert said(found).startswith(f"/{CONTAINERD}:2: it is not UTF-8: containerd does not start")
    assert (answer.status, states(document(answer))["handler"]) == (1, "broken")
    (node.root / CONTAINERD).unlink()
    (node.root / CONTAINERD).mkdir()
    item = document(explain("--format", "json"))
    assert states(item)["handler"] == "unknown"
    (step,) = [step for step in item["steps"] if step["name"] == "handler"]
    assert step["what"] == "kata-vfio: cannot read the configuration of containerd"


def test_a_shim_is_known_by_where_its_links_lead(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    node.write(SHIMS["rs"].removeprefix("/"), "\x7fELF")
    link = node.root / "usr/local/bin/containerd-shim-kata-go-v2"
    link.parent.mkdir(parents=True)
    link.symlink_to(SHIMS["go"])
    node.change(CONTAINERD, SHIMS["go"], "/usr/local/bin/containerd-shim-kata-go-v2")
    item = document(explain("--format", "json"))
    assert (item["release"], breaks(item)) == ("Kata 4.1.0 (Go runtime)", [])
    node.change(CONTAINERD, '  runtime_path = "/usr/local/bin/containerd-shim-kata-go-v2"\n', "")
    node.change(CONTAINERD, "io.containerd.kata-vfio.v2", "io.containerd.kata-go.v2")
    item = document(explain("--format", "json"))
    assert (item["release"], breaks(item)) == ("Kata 4.1.0 (Go runtime)", [])
    link.unlink()
    link.symlink_to(SHIMS["rs"])
    item = document(explain("--format", "json"))
    assert item["release"] == "Kata 4.1.0 (runtime-rs)"
    assert "has the shim of runtime-rs" in said(breaks(item)[0])


def test_the_configuration_tells_the_runtime_of_a_shim_that_nobody_knows(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    node.write(SHIMS["rs"].removeprefix("/"), "\x7fELF")
    node.write("srv/kata/shim", "\x7fELF")
    node.change(CONTAINERD, SHIMS["go"], "/srv/kata/shim")
    assert document(explain("--format", "json"))["release"] == "Kata 4.1.0 (Go runtime)"
    node.change(CONFIGURATION, "[runtime]\n", '[runtime]\nhypervisor_name = "qemu"\n')
    assert document(explain("--format", "json"))["release"] == "Kata 4.1.0 (runtime-rs)"
    told = document(explain("--format", "json", "--kata-runtime", "go"))["release"]
    assert told == "Kata 4.1.0 (Go runtime)"
    (node.root / CONFIGURATION).unlink()
    assert document(explain("--format", "json"))["release"] == "Kata 4.1.0 (runtime-rs)"


def test_a_usual_place_that_links_to_the_other_runtime_is_that_ones(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    (node.root / SHIMS["go"].removeprefix("/")).unlink()
    node.write(SHIMS["rs"].removeprefix("/"), "\x7fELF")
    (node.root / SHIMS["go"].removeprefix("/")).symlink_to(SHIMS["rs"])
    item = document(explain("--format", "json"))
    assert item["release"] == "Kata 4.1.0 (runtime-rs)"


def test_of_many_devices_a_table_tells_the_first_and_how_many_more(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    for number in range(1, 61):
        node.add_gpu(number, driver="vfio-pci" if number < 41 else "nvidia", numa_node=number % 2)
    node.publish(range(GROUP, GROUP + 60))
    answer = explain()
    assert answer.status == 0
    lines = answer.stdout.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 400
    assert sum(line.startswith(f"  {KIND}=") for line in lines) == 3
    assert "  and 57 more: -v or --format json shows all" in lines
    (cdi,) = (line for line in lines if line.startswith("ok       CDI"))
    assert cdi.endswith(f"; {KIND}=42 in /{SPECIFICATION}; and 57 more")
    assert sum("may break: " in line for line in lines) == 8
    assert "         and 12 more: -v shows all" in lines
    assert (
        f"  differences: {KIND}, NUMA node: 1: 40, 42, 44, and 27 more; 0: 41, 43, 45, and 27 more"
        in lines
    )
    whole = explain("-v").stdout
    assert sum(line.startswith(f"  {KIND}=") for line in whole.splitlines()) == 60
    assert whole.count("may break: ") == 20
    assert " more" not in whole
    item = document(explain("--format", "json"))
    assert (len(item["devices"]), len(breaks(item))) == (60, 20)
    node.change(node.pod, "annotations: {}", f'annotations: {{cdi.k8s.io/gpu: "{KIND}=x"}}')
    assert f"{KIND}=47 and 52 more (vfiomgr cdi list)" in explain().stdout


def test_a_pod_that_asks_for_nothing_is_told_so(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    node.change(node.pod, "nvidia.com/pgpu: 1, ", "")
    answer = explain()
    assert (
        "request        the pod requests no device, neither by a resource nor by a CDI annotation"
        in answer.stdout
    )
    assert "nothing the pod" not in answer.stdout


def test_a_release_that_is_newer_than_known_is_noted(
    explain: Callable[..., Answer], node: KataNode
) -> None:
    node.add_gpus()
    node.publish()
    assert explain("--kata-version", "4.1.7").stderr == ""
    answer = explain("--kata-version", "9.9")
    assert answer.stderr.count("is newer than 4.1.0, the last known release") == 1
    assert ": checked as that release" in answer.stderr


@pytest.mark.parametrize(
    ("schema", "version", "is_told"),
    [
        (4, "2.0.11", True),
        (4, "2.1.9", True),
        (4, "2.2.0", True),
        (4, "1.7.28", True),
        (4, "2.3.4", False),
        (4, "", False),
        (3, "2.1.9", False),
    ],
)
def test_a_version_that_containerd_does_not_read_stops_it(
    run: Run, node: KataNode, schema: int, version: str, *, is_told: bool
) -> None:
    node.publish()
    node.change(CONTAINERD, "version = 3", f"version = {schema}")
    package = f"Package: containerd.io\nStatus: install ok installed\nVersion: {version}-1\n"
    node.write("var/lib/dpkg/status", package if version else "")
    line = ("--root", str(node.root), "check", "pod", str(node.pod))
    answer = run(*line)
    words = f"has version 4, which containerd {version} does not read: it does not start"
    assert (words in answer.stdout) == is_told
    assert is_told or "does not start" not in answer.stdout


@pytest.mark.parametrize(
    ("files", "version", "count"), [(FOREIGN, "2.1.9", 0), (FOREIGN, "2.3.4", 0), (DROPPED, "", 1)]
)
def test_a_file_of_another_version_is_told_once_and_where_it_touches_the_handler(
    run: Run, node: KataNode, files: dict[str, str], version: str, count: int
) -> None:
    node.add_gpus()
    node.publish()
    for path, text in files.items():
        node.write(path, text.replace("{shim}", SHIMS["go"]))
    package = f"Package: containerd.io\nStatus: install ok installed\nVersion: {version}-1\n"
    node.write("var/lib/dpkg/status", package if version else "")
    recorded = node.pod.parent / "recorded"
    recorded.symlink_to(node.root)
    answer = run("--root", str(recorded), "check", "pod", str(node.pod), "--format", "json")
    told = [said(found) for found in breaks(document(answer))]
    assert ["has version" in what for what in told] == [True] * count, told


@pytest.mark.parametrize(
    ("main", "place", "is_lost"),
    [
        ('imports = ["/etc/containerd/conf.d/*.toml"]', "opt/kata/containerd/config.d", True),
        ("", "etc/containerd/config.d", True),
        ('imports = ["/opt/kata/containerd/config.d/*"]', "opt/kata/containerd/config.d", False),
        ("", "srv/other", False),
    ],
)
def test_a_handler_of_a_file_that_is_not_imported_is_found(
    run: Run, node: KataNode, main: str, place: str, *, is_lost: bool
) -> None:
    node.write(CONTAINERD, f"version = 3\n{main}\n")
    node.write(f"{place}/kata-deploy.toml", HANDLER.format(shim="/opt/kata/bin/x"))
    found = run("--root", str(node.root), "check", "pod", str(node.pod)).stdout
    assert (f"/{place}/kata-deploy.toml defines handler kata-vfio, but imports" in found) == is_lost
    assert ("nvidia-ctk" in found) is False


@pytest.mark.parametrize(
    ("resource", "driver", "is_found"),
    [
        ("nvidia.com/gpu", "nvidia", True),
        ("nvidia.com/mig-1g.10gb", "nvidia", True),
        ("nvidia.com/pgpu", "nvidia", False),
        ("nvidia.com/gpu", "vfio-pci", False),
        ("amd.com/gpu", "nvidia", False),
    ],
)
def test_a_resource_of_the_host_driver_has_no_device_for_a_guest(
    explain: Callable[..., Answer], node: KataNode, resource: str, driver: str, *, is_found: bool
) -> None:
    node.add_gpu(1, driver=driver)
    node.change(node.pod, "nvidia.com/pgpu: 1", f"{resource}: 1")
    found = [
        one
        for one in breaks(document(explain("--format", "json")))
        if one["id"] == "pod-host-resource"
    ]
    assert [is_certain(one) for one in found] == [True] * is_found
