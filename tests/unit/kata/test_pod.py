"""Objects of Kubernetes, read with their lines; what is wrong is told with file, line, remedy."""

from __future__ import annotations

import contextlib
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.explain.pod import read_objects
from vfiomgr.units import parse_quantity, whole

POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: cuda
  annotations: {cdi.k8s.io/gpu: "a/b=0, a/b=1"}
spec:
  runtimeClassName: kata-vfio
  initContainers:
  - name: first
    resources: {limits: {a.io/x: 1}}
  containers:
  - name: main
    securityContext: {privileged: true}
    resources:
      claims: [{name: gpu}]
      limits: {nvidia.com/pgpu: "2", memory: 16Gi, cpu: 500m}
      requests: {nvidia.com/pgpu: "2", memory: 1Gi}
  resourceClaims: [{name: gpu}]
"""
CLASS = """\
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: kata-vfio}
handler: kata-gpu
overhead: {podFixed: {memory: "10240Mi", cpu: "1"}}
"""


def test_a_pod_is_read_with_its_lines() -> None:
    objects = read_objects(f"# both\n{CLASS}---\n{POD}---\n", "p.yaml")
    (pod,), (found,) = objects.pods, objects.runtime_classes
    assert (pod.kind, pod.name, pod.runtime_class, pod.line) == ("Pod", "cuda", "kata-vfio", 8)
    assert pod.runtime_class_line == 14
    assert pod.resources == (("a.io/x", 1), ("nvidia.com/pgpu", 2))
    assert pod.cdi_names == ("a/b=0", "a/b=1")
    assert pod.claims == pod.containers[1].claims == ("gpu",)
    first, main = pod.containers
    assert (first.role, main.role, main.is_privileged) == ("init container", "container", True)
    assert (main.limit("memory"), main.limit("cpu"), main.line) == ("16Gi", "500m", 19)
    assert (found.name, found.handler, found.line) == ("kata-vfio", "kata-gpu", 2)
    assert found.overhead_bytes == 10 << 30


def test_mappings_are_merged_as_kubectl_merges_them() -> None:
    text = POD.replace("limits: {a.io/x: 1}", "limits: &more {a.io/x: 1}")
    text = text.replace("limits: {nvidia.com/pgpu", "limits: {<<: *more, nvidia.com/pgpu")
    (pod,) = read_objects(text, "p.yaml").pods
    assert pod.containers[1].limit("a.io/x") == "1"


def _container(devices: int, memory: str, **more: str) -> dict[str, object]:
    limits = {"a.io/x": devices, "memory": memory}
    return {"name": "c", "image": "i", "resources": {"limits": limits}, **more}


def test_init_containers_run_before_the_rest_and_sidecars_beside_it() -> None:
    spec: dict[str, object] = {
        "initContainers": [
            _container(2, "9Gi"),
            _container(1, "1Gi", restartPolicy="Always"),
            _container(3, "2Gi"),
        ],
        "containers": [_container(1, "3Gi"), _container(1, "2Gi")],
    }

    def read() -> tuple[int, int]:
        body = {"kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        (pod,) = read_objects(json.dumps(body), "p.yaml").pods
        ((name, count),) = pod.resources
        assert name == "a.io/x"
        return count, pod.memory_bytes >> 30

    assert read() == (4, 9), "the third with the sidecar, and the first alone"
    spec["containers"] = [_container(2, "6Gi"), _container(2, "6Gi")]
    assert read() == (5, 13), "the sidecar and both containers"
    spec["resources"] = {"limits": {"memory": "20Gi"}}
    assert read() == (5, 20), "what the pod says as a whole"


SPEC = {"runtimeClassName": "k", "containers": [{"name": "c", "image": "i"}]}
TEMPLATE = {"metadata": {"annotations": {"a": "b"}}, "spec": SPEC}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Deployment", {"spec": {"template": TEMPLATE}}),
        ("StatefulSet", {"spec": {"template": TEMPLATE}}),
        ("DaemonSet", {"spec": {"template": TEMPLATE}}),
        ("Job", {"spec": {"template": TEMPLATE}}),
        ("CronJob", {"spec": {"jobTemplate": {"spec": {"template": TEMPLATE}}}}),
        ("PodTemplate", {"template": TEMPLATE}),
    ],
)
def test_all_that_makes_pods_is_read_also_in_a_list_and_as_json(
    kind: str, body: dict[str, object]
) -> None:
    item = {"kind": kind, "metadata": {"name": "n"}, **body}
    text = json.dumps({"kind": "List", "items": [item, {"kind": "ConfigMap"}]}, indent="\t")
    objects = read_objects(text, "p.json")
    (pod,) = objects.pods
    assert (pod.kind, pod.name, pod.runtime_class) == (kind, "n", "k")
    assert pod.annotation("a") == "b"
    assert [other.kind for other in objects.others] == ["ConfigMap"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "p.yaml:1:1: the file is empty"),
        ("---\n---\n", "p.yaml:1:1: the file is empty"),
        ("a: [", "p.yaml:1:5: a bracket or brace is not closed"),
        ("kind: Pod\n\tspec: 1", "p.yaml:2:1: a tab cannot be used for indentation"),
        ("kind: ConfigMap", "p.yaml:1:1: no pod found, only ConfigMap"),
        (CLASS, "p.yaml:1:1: no pod found, only RuntimeClass"),
        ("- 1", "p.yaml:1:1: not an object"),
        ("a: 1", "p.yaml:1:1: the object has no kind"),
        ("services: {a: {image: b}}", "no service of it reserves a GPU; a service gets GPUs by"),
        ("services: {a: {gpus: all}}", "a Compose file, not an object of Kubernetes; a service"),
        ("kind: 5", 'p.yaml:1:7: kind: kind is not a string; quote it: "5"'),
        ("kind: Pod", "p.yaml:1:1: Pod has no spec"),
        ("kind: Job\nspec: {}", "p.yaml:1:1: Job has no spec.template.spec"),
        ("kind: Pod\nspec: {a: 1}", "p.yaml:2:7: spec: the pod has no containers"),
        (
            "kind: Pod\nspec: {containers: [{name: c, resources: {claims: [{name: a}]}}]}",
            "spec.containers[0].resources.claims: 'a' is not a claim in spec.resourceClaims",
        ),
        (
            "kind: Pod\nspec: {containers: [{name: c, resources: {limit: {a.io/x: 1}}}]}",
            "spec.containers[0].resources.limit: unknown key 'limit'; use limits, requests, claims",
        ),
        (
            "kind: Pod\nspec: {containers: 5}",
            "p.yaml:2:20: spec.containers: containers is not a list",
        ),
        ("kind: Pod\nspec: {containers: [1]}", "p.yaml:2:21: spec.containers[0]: not a con"),
        (POD.replace("kata-vfio", "5"), "p.yaml:7:21: spec.runtimeClassName: runtimeClassName is"),
        (
            POD.replace('"a/b=0, a/b=1"', "5"),
            "p.yaml:5:33: metadata.annotations.cdi.k8s.io/gpu: the annotation is not",
        ),
        (
            POD.replace("16Gi", "16Gx"),
            "p.yaml:16:46: spec.containers[0].resources.limits.memory: invalid quantity: '16",
        ),
        (POD.replace('pgpu: "2"', "pgpu: 0.5"), "use whole numbers for devices"),
        (POD.replace('pgpu: "2"', "pgpu: -1"), "use whole numbers for devices"),
        (POD.replace('limits: {nvidia.com/pgpu: "2",', "limits: {"), "requested without a limit"),
        (POD.replace("limits: {a.io/x: 1}", "limits: 5"), "limits is not a mapping"),
        (CLASS.replace("handler: kata-gpu", "x: y"), "the RuntimeClass has no handler"),
        (POD + "kind: Pod\n", "duplicate key 'kind'"),
    ],
)
def test_what_is_wrong_is_told_by_file_line_and_remedy(text: str, said: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_objects(text, "p.yaml")
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "privileged"), [("true", True), ("yes", True), ("false", False), ("no", False)]
)
def test_truths_are_those_of_kubectls_yaml(text: str, *, privileged: bool) -> None:
    (pod,) = read_objects(POD.replace("privileged: true", f"privileged: {text}"), "").pods
    assert pod.containers[1].is_privileged == privileged


def test_several_flaws_are_told_at_once() -> None:
    text = POD.replace("16Gi", "16Gx").replace("500m", "half")
    with pytest.raises(InvalidDocument, match="2 errors") as caught:
        read_objects(text, "p.yaml")
    assert [line.split(":")[1] for line in caught.value.details] == ["16", "16"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("16Gi", 16 << 30),
        ("10240Mi", 10240 << 20),
        ("1.5Gi", 3 << 29),
        ("500m", Fraction(1, 2)),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("2k", 2000),
        (".5", Fraction(1, 2)),
        ("-1", -1),
        ("16GiB", None),
        ("", None),
        ("1 Gi", None),
        ("Gi", None),
        ("1e", None),
    ],
)
def test_quantities_mean_what_kubernetes_takes_them_for(text: str, value: Fraction | None) -> None:
    assert parse_quantity(text) == value


def test_a_quantity_is_rounded_up() -> None:
    assert whole(Fraction(3, 2)) == 2


@given(st.text(max_size=200) | st.text(alphabet="kind: Pod\nspec{}[]-&*!|>\"'#%,\t", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidDocument):
        assert read_objects(text, "p.yaml").pods
