"""The objects that run the agent: kustomize, Helm and `node manifests` give the same ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cel
import helm_python
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes_validate import utils
from ruamel.yaml import YAML

from tests.unit.golden.transcripts import PROGRAM, as_installed
from tests.unit.node.pod_security import containers, violations
from tests.unit.runtimes import put
from vfiomgr import __version__
from vfiomgr.errors import UsageError
from vfiomgr.kata.kubernetes import as_json, as_yaml
from vfiomgr.kata.model import KUBELET_ROOT, KUBELET_ROOTS
from vfiomgr.layout.document import read_layouts
from vfiomgr.node import manifests as manifests_module
from vfiomgr.node.manifests import (
    DISTRIBUTIONS,
    IMAGE,
    ManifestRequest,
    NodeLayout,
    manifests,
    render_agent,
    render_cdi,
)
from vfiomgr.node.model import SERVICE_ACCOUNT
from vfiomgr.persistence.installed_layout import FILE, RECORD, InstalledLayout, parse_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

SOURCES = Path(__file__).parents[3] / "kata/node-agent"
NEWEST = utils.all_versions()[-3:]
LAYOUT = NodeLayout((SOURCES / "layout/layout.yaml").read_text(), "node")
LABELS = ("helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by")
"""What Helm adds to the labels of its objects."""
READ_ONLY = {"pod-resources", "layout", "sys", "vfio"}
WRITABLE = {"device-plugins", "cdi", "state", "features", "tmp"}
LOCAL = f"the image {IMAGE} is not in a registry; pass --image with a name that nodes can pull\n"
K0S = KUBELET_ROOTS["k0s"]
_REGISTRY = "plugins_registry"
REQUESTS = {
    "default": (ManifestRequest(), {}),
    "k0s": (
        ManifestRequest(kubelet_root=K0S, node_selector=(("gpu", "on"),), selinux=True),
        {"kubeletRoot": str(K0S), "nodeSelector": {"gpu": "on"}, "selinux": True},
    ),
    "events": (ManifestRequest(namespace="gpu", events=True), {"events": True}),
    "dra": (ManifestRequest(namespace="gpu", dra=True), {"dra": True}),
    "binding conditions": (
        ManifestRequest(namespace="gpu", kubelet_root=K0S, dra=True, binding_conditions=True),
        {"kubeletRoot": str(K0S), "dra": True, "bindingConditions": True},
    ),
    "binder": (
        ManifestRequest(namespace="gpu", dra=True, binder=True, layout=LAYOUT),
        {"dra": True, "binder": True, "layout": LAYOUT.text, "layoutName": LAYOUT.name},
    ),
    "dra and the operator": (
        ManifestRequest(namespace="gpu", dra=True, gpu_operator=True),
        {"dra": True, "gpuOperator": True},
    ),
    "dra on k0s": (
        ManifestRequest(kubelet_root=K0S, dra=True, events=True, arguments=("--reset",)),
        {"kubeletRoot": str(K0S), "dra": True, "events": True, "args": ["--reset"]},
    ),
    "layout": (
        ManifestRequest(image="registry.example/agent:2", namespace="gpu", layout=LAYOUT),
        {
            "image": {"repository": "registry.example/agent", "tag": "2"},
            "layout": LAYOUT.text,
            "layoutName": LAYOUT.name,
        },
    ),
}
each_request = pytest.mark.parametrize(
    ("request_", "values"), REQUESTS.values(), ids=list(REQUESTS)
)


@pytest.fixture(autouse=True, scope="module")
def remembered_schemas() -> Any:
    """Schemas of some megabytes, which are read once instead of for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        patch.setattr(utils, "all_versions", cache(utils.all_versions))
        yield


def plain(request: ManifestRequest) -> list[Any]:
    """The objects as Kubernetes reads them."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    text = as_yaml(manifests(request))
    objects = list(yaml.load_all(text))
    assert json.loads(json.dumps(as_json(manifests(request))))["items"] == objects
    return objects


def named(objects: list[Any]) -> dict[tuple[str, str], Any]:
    """The objects by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def pods(objects: list[Any]) -> dict[str, Any]:
    """The specifications of the pods by the names of their DaemonSets."""
    found = (each for each in objects if each["kind"] == "DaemonSet")
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


def rendered(values: dict[str, Any], namespace: str) -> list[Any]:
    """What Helm itself makes of the chart, without the labels that it adds."""
    yaml = YAML(typ="safe", pure=True)
    with helm_python.Chart.load(SOURCES / "chart") as chart:
        texts = chart.render(values, name="vfiomgr", namespace=namespace)
    objects = [one for text in texts.values() for one in yaml.load_all(text) if one]
    for one in objects:
        labels = one["metadata"]["labels"]
        assert [labels.pop(label) for label in LABELS][1:] == ["vfiomgr", "Helm"]
        if not labels:
            del one["metadata"]["labels"]
    return objects


@each_request
def test_kubernetes_accepts_what_is_printed(
    request_: ManifestRequest, values: dict[str, Any]
) -> None:
    helm = rendered(values, request_.namespace)
    for document in (*plain(request_), *helm):
        for version in NEWEST:
            utils.validate(document, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    document = plain(ManifestRequest())[-1]
    context = document["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    context["priviledged"] = context.pop("privileged")
    for version in NEWEST:
        with pytest.raises(utils.ValidationError):
            utils.validate(document, version, strict=True)


def test_the_base_of_kustomize_is_what_is_printed_by_default() -> None:
    yaml = YAML(typ="safe", pure=True)
    base = yaml.load((SOURCES / "base/kustomization.yaml").read_text())
    texts = [(SOURCES / "base" / name).read_text() for name in base["resources"]]
    assert as_yaml(manifests(ManifestRequest())) == "---\n".join(texts)
    files = {path.name for path in (SOURCES / "base").iterdir()}
    assert files == {*base["resources"], "kustomization.yaml"}
    assert base["namespace"] == ManifestRequest().namespace


def test_the_overlay_of_kustomize_applies_a_valid_layout() -> None:
    yaml = YAML(typ="safe", pure=True)
    overlay = yaml.load((SOURCES / "layout/kustomization.yaml").read_text())
    assert overlay["resources"] == ["../base", "daemonset.yaml"]
    (generator,) = overlay["configMapGenerator"]
    assert generator == {"name": "vfiomgr-layout", "files": ["layout.yaml"]}
    assert list(read_layouts(LAYOUT.text, "layout.yaml").layouts) == [LAYOUT.name]
    (patch,) = overlay["patches"]
    (volume,) = yaml.load(patch["patch"])["spec"]["template"]["spec"]["volumes"]
    with_layout = pods(plain(ManifestRequest(layout=LAYOUT)))["vfiomgr-node"]
    assert volume.pop("hostPath") is None
    assert volume in with_layout["volumes"]


@each_request
def test_helm_renders_the_same_objects(request_: ManifestRequest, values: dict[str, Any]) -> None:
    ours = named(plain(request_))
    del ours["Namespace", request_.namespace]
    found = named(rendered(values, request_.namespace))
    for one in found.values():
        if request_.node_selector and one["kind"] == "DaemonSet":
            selector = one["spec"]["template"]["spec"]["nodeSelector"]
            assert selector.pop("kubernetes.io/os") == "linux"
            selector["kubernetes.io/os"] = "linux"
    assert found == ours


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm_python.lint(SOURCES / "chart", strict=True)
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    assert {message["severity"] for message in report["messages"]} <= {1}


def test_helm_refuses_values_that_the_chart_does_not_have() -> None:
    with pytest.raises(helm_python.HelmValuesError, match="'kubeletroot' not allowed"):
        rendered({"kubeletroot": "/var/lib/k0s/kubelet"}, "gpu")
    with pytest.raises(helm_python.HelmValuesError, match="kubeletRoot"):
        rendered({"kubeletRoot": "kubelet"}, "gpu")


def test_all_have_the_version_of_vfiomgr() -> None:
    chart = YAML(typ="safe", pure=True).load((SOURCES / "chart/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert IMAGE.endswith(f":{__version__}")
    images = {
        one["image"] for spec in pods(plain(ManifestRequest())).values() for one in containers(spec)
    }
    assert images == {IMAGE}
    text = (SOURCES / "layout/daemonset.yaml").read_text()
    assert text.count("image:") == text.count(f'image: "{IMAGE}"') == 2


@each_request
def test_the_agent_is_baseline_except_for_its_paths(
    request_: ManifestRequest, values: dict[str, Any]
) -> None:
    allowed = {"hostPathVolumes"} | ({"seLinuxOptions"} if request_.selinux else set())
    for objects in (plain(request_), rendered(values, request_.namespace)):
        agent = pods(objects)["vfiomgr-node"]
        assert violations(agent) == allowed


@pytest.mark.parametrize("from_chart", [False, True])
def test_only_labelled_nodes_are_changed(*, from_chart: bool) -> None:
    request = ManifestRequest(node_selector=(("gpu", "on"),), layout=LAYOUT)
    values = {"nodeSelector": {"gpu": "on"}, "layout": LAYOUT.text, "layoutName": LAYOUT.name}
    found = pods(rendered(values, "vfiomgr") if from_chart else plain(request))
    agent = {"kubernetes.io/os": "linux", "gpu": "on"}
    assert found["vfiomgr-node"]["nodeSelector"] == agent
    preparation = found["vfiomgr-layout"]["nodeSelector"]
    assert preparation == {**agent, "vfiomgr.io/layout": "node"}


def test_the_example_of_a_layout_is_refused(run: Run) -> None:
    answer = run("plan", str(SOURCES / "layout/layout.yaml"))
    assert answer.status == 4
    assert "requires at least 1 device, but this host has none" in answer.stderr


def test_only_the_pods_of_a_layout_are_privileged() -> None:
    found = pods(plain(ManifestRequest(layout=LAYOUT)))
    preparation = found["vfiomgr-layout"]
    assert violations(preparation) == {"hostPathVolumes", "hostNamespaces", "privileged"}
    assert [each["name"] for each in containers(preparation)] == ["apply", "watch"]
    del preparation["initContainers"]
    assert violations(preparation) == {"hostPathVolumes", "hostNamespaces"}
    assert violations(found["vfiomgr-node"]) == {"hostPathVolumes"}


def test_only_the_pod_that_binds_is_privileged() -> None:
    found = pods(plain(ManifestRequest(dra=True, binder=True)))
    binder = found["vfiomgr-binder"]
    assert violations(binder) == {"hostPathVolumes", "hostNamespaces", "privileged"}
    assert binder["automountServiceAccountToken"] is False
    assert violations(found["vfiomgr-node"]) == {"hostPathVolumes"}
    (container,) = containers(binder)
    assert container["args"] == ["node", "bind"]
    values = {"dra": True, "binder": True, "binderArgs": ["--layout", "a b"]}
    (named,) = containers(pods(rendered(values, "vfiomgr"))["vfiomgr-binder"])
    assert named["args"] == ["node", "bind", "--layout", "a b"]
    writable = {m["name"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"sys", "dev", "run", "state", "tmp"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda pod: pod.update(hostPID=True), "hostNamespaces"),
        (lambda pod: pod["securityContext"]["seccompProfile"].update(type="Unconfined"),
         "seccompProfile"),
        (lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]), "sysctls"),
        (lambda pod: context(pod).update(privileged=True), "privileged"),
        (lambda pod: context(pod).update(procMount="Unmasked"), "procMount"),
        (lambda pod: context(pod)["capabilities"].update(add=["SYS_ADMIN"]),
         "capabilities_baseline"),
        (lambda pod: context(pod).update(appArmorProfile={"type": "Unconfined"}),
         "appArmorProfile"),
        (lambda pod: context(pod).update(windowsOptions={"hostProcess": True}),
         "windowsHostProcess"),
        (lambda pod: pod["containers"][0]["ports"][0].update(hostPort=9478), "hostPorts"),
        (lambda pod: pod["containers"][0]["livenessProbe"]["httpGet"].update(host="10.0.0.1"),
         "hostProbesAndHostLifecycle"),
    ],
)  # fmt: skip
def test_what_is_not_baseline_is_found(change: Callable[[Any], None], rule: str) -> None:
    pod = pods(plain(ManifestRequest()))["vfiomgr-node"]
    change(pod)
    assert violations(pod) == {"hostPathVolumes", rule}


def context(pod: Any) -> Any:
    return pod["containers"][0]["securityContext"]


def test_the_agent_is_hardened_beyond_baseline() -> None:
    pod = pods(plain(ManifestRequest()))["vfiomgr-node"]
    (agent,) = containers(pod)
    assert pod["automountServiceAccountToken"] is False
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert agent["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in agent["volumeMounts"]}
    assert mounts == dict.fromkeys(READ_ONLY, True) | dict.fromkeys(WRITABLE, False)
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


@pytest.mark.parametrize(
    ("new", "is_allowed"),
    [
        ({"nvidia.com/gpu.deploy.dcgm": "paused-for-vfiomgr", "zone": "a"}, True),
        ({"nvidia.com/gpu.deploy.dcgm": "true", "zone": "b"}, False),
        ({"nvidia.com/gpu.deploy.dcgm": "true"}, False),
        ({"nvidia.com/gpu.deploy.dcgm": "true", "zone": "a", "other": "c"}, False),
        ({"nvidia.com/gpu.deploy.dcgm": "true", "zone": "a", "nvidia.com/gpu.deploy.nvsm": "x"},
         False),
    ],
)  # fmt: skip
def test_the_agent_may_change_the_labels_of_the_operators_monitoring_only(
    new: dict[str, str], *, is_allowed: bool
) -> None:
    request = ManifestRequest(dra=True, gpu_operator=True)
    kind = "ValidatingAdmissionPolicy"
    policy = named(plain(request))[kind, "vfiomgr-node-gpu-operator"]
    *_, labels = policy["spec"]["validations"]
    old = {"nvidia.com/gpu.deploy.dcgm": "true", "zone": "a"}
    assert cel.evaluate(labels["expression"], {"variables": {"old": old, "new": new}}) is is_allowed


def test_the_agent_gets_a_token_for_events_only_if_asked() -> None:
    found = named(plain(ManifestRequest(namespace="gpu", events=True)))
    role = found["Role", "vfiomgr-node-events"]
    assert role["metadata"]["namespace"] == "default"
    assert role["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    binding = found["RoleBinding", "vfiomgr-node-events"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": "vfiomgr-node", "namespace": "gpu"}
    assert binding["subjects"] == [account]
    pod = found["DaemonSet", "vfiomgr-node"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["containers"][0]["args"][-2:] == ["--events", SERVICE_ACCOUNT]
    usual = named(plain(ManifestRequest()))
    assert not [kind for kind, _ in usual if kind.startswith("Role")]


def test_the_driver_may_do_no_more_than_it_needs() -> None:
    found = named(plain(ManifestRequest(namespace="gpu", dra=True)))
    rules = {
        rule["resources"][0]: rule["verbs"]
        for rule in found["ClusterRole", "vfiomgr-node-dra"]["rules"]
    }
    assert rules == {
        "resourceslices": ["get", "list", "watch", "create", "update", "delete"],
        "resourceclaims": ["get"],
        "nodes": ["get"],
    }
    account = {"kind": "ServiceAccount", "name": "vfiomgr-node", "namespace": "gpu"}
    assert found["ClusterRoleBinding", "vfiomgr-node-dra"]["subjects"] == [account]
    spec = found["ValidatingAdmissionPolicy", "vfiomgr-node-dra"]["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["resourceslices"]
    assert rule["operations"] == ["CREATE", "UPDATE", "DELETE"]
    assert spec["failurePolicy"] == "Fail"
    (condition,) = spec["matchConditions"]
    assert f":{account['name']}" in condition["expression"]
    binding = found["ValidatingAdmissionPolicyBinding", "vfiomgr-node-dra"]["spec"]
    assert binding == {"policyName": "vfiomgr-node-dra", "validationActions": ["Deny"]}


def test_the_driver_has_the_same_paths_inside_and_outside() -> None:
    pod = pods(plain(ManifestRequest(kubelet_root=K0S, dra=True)))["vfiomgr-node"]
    (agent,) = pod["containers"]
    assert agent["args"][-3:] == ["--dra", "--kubelet-root", str(K0S)]
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for name, place in (("plugins", "plugins/vfiomgr.io"), ("plugins-registry", _REGISTRY)):
        assert mounts[name] == volumes[name]["hostPath"]["path"] == f"{K0S}/{place}"
    assert pod["automountServiceAccountToken"] is True


def test_the_overlay_of_kustomize_adds_the_driver() -> None:
    yaml = YAML(typ="safe", pure=True)
    overlay = yaml.load((SOURCES / "dra/kustomization.yaml").read_text())
    ours = named(plain(ManifestRequest(dra=True)))
    base, *more = overlay["resources"]
    assert base == "../base"
    for name in more:
        document = yaml.load((SOURCES / "dra" / name).read_text())
        assert ours[document["kind"], document["metadata"]["name"]] == document
    (patch,) = overlay["patches"]
    spec = yaml.load((SOURCES / "dra" / patch["path"]).read_text())["spec"]["template"]["spec"]
    pod = ours["DaemonSet", "vfiomgr-node"]["spec"]["template"]["spec"]
    (its,), (agent,) = spec["containers"], pod["containers"]
    assert (its["args"], its["env"]) == (agent["args"], agent["env"])
    assert agent["volumeMounts"][-2:] == its["volumeMounts"]
    assert pod["volumes"][-2:] == spec["volumes"]


def test_only_an_agent_that_binds_early_may_watch_pods_and_write_the_status_of_claims() -> None:
    role = "ClusterRole", "vfiomgr-node-binding"
    usual = named(plain(ManifestRequest(dra=True)))
    assert role not in usual
    found = named(plain(ManifestRequest(dra=True, binding_conditions=True)))
    assert {(rule["resources"][0], *rule["verbs"]) for rule in found[role]["rules"]} == {
        ("pods", "list", "watch"),
        ("resourceclaims/status", "patch"),
        ("resourceclaims/driver", "associated-node:patch"),
    }
    (own,) = (rule for rule in found[role]["rules"] if "resourceNames" in rule)
    assert own["resourceNames"] == ["vfiomgr.io"]
    yaml = YAML(typ="safe", pure=True)
    overlay = yaml.load((SOURCES / "binding/kustomization.yaml").read_text())
    base, *more = overlay["resources"]
    assert base == "../dra"
    for name in more:
        document = yaml.load((SOURCES / "binding" / name).read_text())
        assert found[document["kind"], document["metadata"]["name"]] == document
    ((step,),) = (yaml.load(patch["patch"]) for patch in overlay["patches"])
    (agent,) = pods(list(found.values()))["vfiomgr-node"]["containers"]
    assert agent["args"][-1] == step["value"]


def test_one_agent_at_a_time_serves_a_node() -> None:
    found = named(plain(ManifestRequest()))["DaemonSet", "vfiomgr-node"]
    assert found["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0},
    }


def test_the_probes_ask_the_port_of_the_metrics() -> None:
    (agent,) = pods(plain(ManifestRequest()))["vfiomgr-node"]["containers"]
    (port,) = agent["ports"]
    assert agent["args"] == ["node", "run", "--metrics", f"0.0.0.0:{port['containerPort']}"]
    probes = {name: agent[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/healthz", "port": port["name"]},
        "readinessProbe": {"path": "/readyz", "port": port["name"]},
    }
    (other,) = pods(rendered({"port": 9999, "args": ["--consumer", "kata"]}, "gpu"))[
        "vfiomgr-node"
    ]["containers"]
    assert other["args"] == ["node", "run", "--metrics", "0.0.0.0:9999", "--consumer", "kata"]
    assert other["ports"][0]["containerPort"] == 9999


def test_a_cluster_without_node_feature_discovery_gets_no_directory_for_it() -> None:
    pod = pods(rendered({"nfd": False}, "gpu"))["vfiomgr-node"]
    names = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert names == mounts == (READ_ONLY | WRITABLE) - {"features"}


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@example("# \r\n\t\x85")
@example(" \n a\n\n")
def test_a_layout_arrives_as_it_is(text: str) -> None:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    layout_map = manifests_module._layout_map(NodeLayout(text))
    assert yaml.load(as_yaml([layout_map]))["data"] == {"layout.yaml": text}


def test_the_agent_knows_which_layout_of_the_file_was_chosen() -> None:
    objects = plain(ManifestRequest(layout=NodeLayout(LAYOUT.text, 'a ä"b')))
    record = named(objects)["ConfigMap", "vfiomgr-layout"]["data"][RECORD.name]
    assert parse_record(record) == InstalledLayout('a ä"b')
    found = pods(objects)
    for mount in found["vfiomgr-node"]["containers"][0]["volumeMounts"]:
        if mount["name"] == "layout":
            assert mount["mountPath"] == FILE.parent
    unnamed = named(plain(ManifestRequest(layout=NodeLayout(LAYOUT.text))))
    assert list(unnamed["ConfigMap", "vfiomgr-layout"]["data"]) == [FILE.name]


def test_a_changed_layout_is_applied_by_new_pods() -> None:
    def digest(text: str) -> object:
        objects = named(plain(ManifestRequest(layout=NodeLayout(text))))
        pod = objects["DaemonSet", "vfiomgr-layout"]["spec"]["template"]
        return pod["metadata"]["annotations"]["vfiomgr.io/layout"]

    assert digest("a") == digest("a") != digest("b")


def test_a_layout_larger_than_a_config_map_is_refused() -> None:
    with pytest.raises(UsageError, match="a ConfigMap cannot hold a layout of 1 MiB or more"):
        ManifestRequest(layout=NodeLayout("é" * (1 << 19)))


# ---- the command


def root_in(text: str) -> str:
    """Where the pods find the kubelet's socket for pod resources."""
    objects = list(YAML(typ="safe", pure=True).load_all(text))
    volumes = {each["name"]: each for each in pods(objects)["vfiomgr-node"]["volumes"]}
    assert volumes["device-plugins"]["hostPath"]["path"] == "/var/lib/kubelet/device-plugins"
    path: str = volumes["pod-resources"]["hostPath"]["path"]
    return path.removesuffix("/pod-resources")


def with_kubelet(kernel: FakeKernel, root: str) -> None:
    put(kernel, f"{root}/pod-resources/kubelet.sock", "")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_paths_of_each_distribution_are_found_on_the_host(
    run: Run, kernel: FakeKernel, distribution: str
) -> None:
    root = KUBELET_ROOTS[distribution]
    with_kubelet(kernel, root)
    answer = run("node", "manifests")
    assert (answer.status, answer.stderr, root_in(answer.stdout)) == (0, LOCAL, root)
    other = run("node", "manifests", "--distribution", "k0s").stdout
    assert root_in(other) == "/var/lib/k0s/kubelet"


def test_without_a_kubelet_the_usual_path_is_assumed(run: Run) -> None:
    answer = run("node", "manifests", "--image", "registry.example/agent:2")
    assert root_in(answer.stdout) == "/var/lib/kubelet"
    assert answer.stderr == (
        "kubelet not found; assuming /var/lib/kubelet (set --distribution or --kubelet-root)\n"
    )
    assert run("node", "manifests", "--distribution", "kubeadm").stderr == LOCAL


def test_microk8s_links_the_usual_path_to_its_own(run: Run, kernel: FakeKernel) -> None:
    with_kubelet(kernel, KUBELET_ROOTS["microk8s"])
    kernel.sysfs.link("/var/lib/kubelet", KUBELET_ROOTS["microk8s"])
    assert root_in(run("node", "manifests").stdout) == KUBELET_ROOTS["microk8s"]


def test_several_kubelets_are_not_guessed_between(run: Run, kernel: FakeKernel) -> None:
    with_kubelet(kernel, KUBELET_ROOT)
    with_kubelet(kernel, K0S)
    answer = run("node", "manifests")
    assert answer.status == 2
    assert answer.stderr == (
        "vfiomgr: error: several kubelets found: /var/lib/kubelet, /var/lib/k0s/kubelet\n"
        "  remedy: pass --distribution or --kubelet-root\n"
    )
    assert root_in(run("node", "manifests", "--kubelet-root", "/data/kubelet/").stdout) == (
        "/data/kubelet"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kubelet-root kubelet", "--kubelet-root: 'kubelet' is not an absolute path"),
        ("--kubelet-root /a/../b", "--kubelet-root: '/a/../b' is not an absolute path"),
        ("--kubelet-root /", "--kubelet-root: '/' is not an absolute path"),
        ("--kubelet-root /a --distribution k3s", "--distribution and --kubelet-root contradict"),
        ("--namespace A", "--namespace 'A' is not a valid Kubernetes name"),
        ("--node-selector a", "--node-selector 'a' is not a node label"),
        ("--image ''", "--image '' is not an image name"),
        ("--unit vfiomgr-node.service --alias a", "not an alias: 'a'"),
        ("--binder", "--binder does nothing without --dra"),
        ("--stop-gpu-operator", "--stop-gpu-operator does nothing without --dra"),
        ("--no-daemon-set", "--no-daemon-set does nothing without --dra"),
        ("--dra --no-daemon-set --image a/b:1", "--no-daemon-set and --image contradict"),
        ("--dra --no-daemon-set --with-layout x", "--no-daemon-set and --with-layout contradict"),
        ("--dra --no-daemon-set --binder", "--no-daemon-set and --binder contradict"),
        ("--dra --no-daemon-set --node-selector a=b", "--no-daemon-set and --node-selector con"),
        ("--layout a", "--layout does nothing without --with-layout"),
        ("--with-layout none.yaml", "cannot read the layout file none.yaml"),
        ("--unit vfiomgr-node.service --image a", "--unit and --image contradict each other"),
        ("--unit vfiomgr-node.service --node-selector a=b", "--unit and --node-selector contra"),
    ],
)
def test_wrong_options_are_refused(run: Run, options: str, message: str) -> None:
    answer = run("node", "manifests", *(word.strip("'") for word in options.split()))
    assert (answer.status, answer.stdout) == (2, "")
    assert message in answer.stderr


def test_a_layout_is_checked_before_it_reaches_a_node(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(LAYOUT.text.replace("passthrough", "passthru"))
    answer = run("node", "manifests", "--with-layout", str(file))
    assert (answer.status, answer.stdout) == (65, "")
    assert "passthru" in answer.stderr
    file.write_text(LAYOUT.text)
    answer = run("node", "manifests", "--with-layout", str(file), "--format", "json")
    objects = json.loads(answer.stdout)["items"]
    assert named(objects)["ConfigMap", "vfiomgr-layout"]["data"]["layout.yaml"] == LAYOUT.text


def test_selinux_on_the_host_is_noted(run: Run, kernel: FakeKernel) -> None:
    with_kubelet(kernel, KUBELET_ROOT)
    put(kernel, "/sys/fs/selinux/enforce", "1")
    note = "SELinux is in use: pass --selinux if the agent cannot create its socket\n"
    assert run("node", "manifests").stderr == LOCAL + note
    answer = run("node", "manifests", "--selinux")
    assert answer.stderr == LOCAL
    assert "type: container_device_plugin_t" in answer.stdout


def test_a_unit_needs_a_program_that_is_installed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = ("node", "manifests", "--unit", "vfiomgr-node.service")
    monkeypatch.setenv("PATH", "/nonexistent")  # not that of an activated environment
    answer = run(*unit)
    assert (answer.status, answer.stdout) == (4, "")
    assert "vfiomgr is not installed as a command" in answer.stderr
    as_installed(monkeypatch)
    answer = run(*unit)
    assert (answer.status, answer.stderr) == (0, "")
    assert f"ExecStart={PROGRAM} -I -m vfiomgr node run " in answer.stdout


NAMES = ("--resource-prefix", "example.com", "--alias", "10de:2235=a40", "--consumer", "kata")


@pytest.mark.parametrize("unit", ["vfiomgr-node.service", "vfiomgr-node-cdi.service"])
def test_a_unit_names_resources_as_the_agent_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    as_installed(monkeypatch)
    answer = run("node", "manifests", "--unit", unit, *NAMES)
    assert (answer.status, answer.stderr) == (0, "")
    (line,) = (line for line in answer.stdout.splitlines() if line.startswith("ExecStart="))
    assert line.endswith(f" {' '.join(NAMES)}")
    objects = list(YAML(typ="safe", pure=True).load_all(run("node", "manifests", *NAMES).stdout))
    (agent,) = pods(objects)["vfiomgr-node"]["containers"]
    assert agent["args"][-len(NAMES) :] == list(NAMES)


def test_agents_that_are_services_need_the_objects_without_the_daemon_set(run: Run) -> None:
    options = ("node", "manifests", "--dra", "--format", "json")
    every, own = (run(*options, *more) for more in ((), ("--no-daemon-set",)))
    kept = [each for each in json.loads(every.stdout)["items"] if each["kind"] != "DaemonSet"]
    assert json.loads(own.stdout)["items"] == kept
    assert not own.stderr, "neither an image nor the kubelet's directory is in them"


def test_the_unit_of_an_agent_with_claims_reaches_the_api_server_and_the_kubelet(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_installed(monkeypatch)
    unit = ("node", "manifests", "--unit", "vfiomgr-node.service", "--dra")
    lines = run(*unit, "--kubelet-root", "/srv/kubelet").stdout.splitlines()
    (start,) = (line for line in lines if line.startswith("ExecStart="))
    assert start.endswith(
        " --dra --credentials /etc/vfiomgr/node-agent --kubelet-root /srv/kubelet"
    )
    (made,) = (line for line in lines if line.startswith("ExecStartPre=") and "/srv/" in line)
    assert made.split()[-2:] == ["/srv/kubelet/plugins", "/srv/kubelet/plugins_registry"]
    writable = [line for line in lines if line.startswith("ReadWritePaths=")]
    assert writable[-1].split()[-2:] == ["-/srv/kubelet/plugins", "-/srv/kubelet/plugins_registry"]
    assert lines.index("IPAddressDeny=") > lines.index("IPAddressDeny=any")
    assert "RestrictAddressFamilies=AF_INET AF_INET6" in lines
    assert "After=network-online.target" in lines
    assert "CapabilityBoundingSet=" not in lines, "it creates vGPUs"


def test_the_unit_of_an_agent_that_binds_early(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    as_installed(monkeypatch)
    unit = ("node", "manifests", "--unit", "vfiomgr-node.service", "--binding-conditions")
    found = run(*unit, "--dra", "--kubelet-root", "/srv/kubelet").stdout
    assert "--kubelet-root /srv/kubelet --binding-conditions\n" in found
    answer = run(*unit)
    assert (answer.status, answer.stdout) == (2, "")
    assert "--binding-conditions" in answer.stderr
    assert "--dra" in answer.stderr


def test_the_unit_of_an_agent_with_claims_can_write_events(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_installed(monkeypatch)
    unit = ("node", "manifests", "--unit", "vfiomgr-node.service", "--events")
    found = run(*unit, "--dra", "--kubelet-root", "/srv/kubelet").stdout
    assert " --kubelet-root /srv/kubelet --events /etc/vfiomgr/node-agent\n" in found
    answer = run(*unit)
    assert (answer.status, answer.stdout) == (2, "")
    assert "--events" in answer.stderr


def test_the_unit_of_specifications_has_nothing_of_claims(run: Run) -> None:
    answer = run("node", "manifests", "--unit", "vfiomgr-node-cdi.service", "--dra")
    assert answer.status == 2
    assert "--unit" in answer.stderr
    assert "--dra" in answer.stderr


def test_an_alias_is_one_line(run: Run) -> None:
    answer = run("node", "manifests", "--unit", "vfiomgr-node.service", "--alias", "a\nb=c")
    assert (answer.status, answer.stdout) == (2, "")
    assert "not an alias: 'a\\nb=c'" in answer.stderr


def test_the_arguments_of_a_unit_are_quoted() -> None:
    unit = render_cdi("/usr/bin/vfiomgr", ["--alias", 'NVIDIA "A40" 5%$\\=a40'])
    assert 'node run --once --alias "NVIDIA \\"A40\\" 5%%$$\\\\=a40"\n' in unit


@pytest.mark.parametrize("render", [render_cdi, render_agent])
def test_devices_are_ready_before_any_kubelet_starts(render: Callable[[str], str]) -> None:
    unit = render("/usr/bin/vfiomgr")
    before = next(line for line in unit.splitlines() if line.startswith("Before="))
    for kubelet in ("kubelet", "k3s-agent", "rke2-agent", "k0sworker"):
        assert f"{kubelet}.service" in before


def test_the_specifications_are_written_once() -> None:
    assert "ExecStart=/usr/bin/vfiomgr node run --once\n" in render_cdi("/usr/bin/vfiomgr")
