"""What Kubernetes' own schemas say of what is printed for it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_validate import utils
from msgspec.structs import replace
from ruamel.yaml import YAML

from tests.fakes.functions import moved
from tests.unit.devices import pci_device
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.kata import kubernetes as render
from vfiomgr.kata.kubernetes import (
    PodRequest,
    ResourceRequest,
    RuntimeClassRequest,
    Workload,
    is_extended_resource,
    is_label,
    is_subdomain,
    parse_selector,
    require_image,
)
from vfiomgr.kata.model import DEVICE_CLASS
from vfiomgr.kata.plan import recommended_overhead_mib
from vfiomgr.kata.workloads import PodDevice, model_name, offers, pods_for

NEWEST = utils.all_versions()[-3:]
GPU = replace(pci_device(), driver="vfio-pci")
AUDIO = replace(GPU, address=moved(GPU.address, function=1), class_code="040300")
NIC = replace(GPU, vendor_id="8086", class_code="020000", name="Intel Corporation I350")
POD = PodRequest("Pod", "gpu", None, "kata-vfio", "", 16384, 4)


@pytest.fixture(autouse=True, scope="module")
def remembered_schemas() -> Any:
    """Schemas of some megabytes, which are read once instead of for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        patch.setattr(utils, "all_versions", cache(utils.all_versions))
        yield


def read(text: str, version: tuple[int, int] | None = None) -> list[Any]:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = version
    return list(yaml.load_all(text))


def validate(objects: list[Any]) -> None:
    """Both readings of the text, and the object that is JSON, pass in the newest releases."""
    text = render.as_yaml(objects)
    documents = read(text)
    assert documents == read(text, (1, 1))
    as_json = json.loads(json.dumps(render.as_json(objects)))
    assert documents == (as_json["items"] if as_json["kind"] == "List" else [as_json])
    for document in documents:
        for version in NEWEST:
            utils.validate(document, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    document = read(render.as_yaml([render.runtime_class(class_request())]))[0]
    document["handlr"] = document.pop("handler")
    for version in NEWEST:
        with pytest.raises(utils.ValidationError):
            utils.validate(document, version, strict=True)


def class_request(**changes: Any) -> RuntimeClassRequest:
    wanted = RuntimeClassRequest("kata-vfio", "kata-vfio", 10240, 1, 8192, (("a/b", "true"),))
    return replace(wanted, **changes)


@pytest.mark.parametrize("selector", [(), (("katacontainers.io/kata-runtime", "true"),)])
def test_a_runtime_class_is_valid(selector: tuple[tuple[str, str], ...]) -> None:
    objects = [render.runtime_class(class_request(node_selector=selector))]
    validate(objects)
    (document,) = read(render.as_yaml(objects))
    assert document["overhead"]["podFixed"] == {"memory": "10240Mi", "cpu": "1"}
    wanted = {"nodeSelector": dict(selector)} if selector else None
    assert document.get("scheduling") == wanted


def test_the_overhead_is_that_of_kata_deploy() -> None:
    """kata-deploy's classes for GPUs: 10240Mi for default_memory 8192, 4096Mi for 2048."""
    found = recommended_overhead_mib(8192), recommended_overhead_mib(2048)
    assert found == (10240, 4096)


LABELS = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?\Z") | st.sampled_from(
    ["on", "y", "null", "true", "012", "1e3", "0x10", "1-1", "off", "a" * 63]
)
DOMAINS = st.lists(LABELS, min_size=1, max_size=3).map(".".join)
NAMES = st.from_regex(r"\A[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?\Z")
RESOURCES = st.builds(lambda domain, name: f"{domain}/{name}", DOMAINS, NAMES)
IMAGES = st.from_regex(r"\A[a-z0-9]([a-z0-9./:@_-]{0,20}[a-z0-9])?\Z")


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_wished_is_valid_and_means_the_same_in_yaml_1_1(data: st.DataObject) -> None:
    names = data.draw(st.lists(RESOURCES, min_size=1, max_size=3, unique=True))
    wanted = PodRequest(
        kind=data.draw(st.sampled_from(("Pod", "Deployment"))),
        name=data.draw(LABELS),
        namespace=data.draw(st.none() | LABELS),
        runtime_class=data.draw(DOMAINS),
        image=data.draw(IMAGES),
        command=data.draw(st.sampled_from(((), ("sleep", "infinity"), ("on", "1e3", "a b: c")))),
        resources=tuple(ResourceRequest(name, data.draw(st.integers(1, 16))) for name in names),
        memory_mib=data.draw(st.integers(1, 1 << 22)),
        cpus=data.draw(st.integers(1, 512)),
    )
    labels = data.draw(st.dictionaries(RESOURCES, NAMES, max_size=3))
    klass = class_request(
        name=wanted.runtime_class, handler=wanted.name, node_selector=labels.items()
    )
    validate([render.runtime_class(klass), render.workload(wanted)])
    _, document = read(render.as_yaml([render.runtime_class(klass), render.workload(wanted)]))
    assert document["metadata"]["name"] == wanted.name
    is_pod = wanted.kind == "Pod"
    spec = document["spec"] if is_pod else document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["runtimeClassName"], container["image"]) == (wanted.runtime_class, wanted.image)
    limits = {item.name: str(item.count) for item in wanted.resources}
    assert container["resources"]["limits"].items() >= limits.items()


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
@pytest.mark.parametrize("expression", ["", 'device.attributes["vfiomgr.io"].device == "2235"'])
def test_a_claim_requests_the_devices_of_a_pod(kind: Workload, expression: str) -> None:
    items = (ResourceRequest(expression, 2), ResourceRequest(expression, 1))
    wanted = PodRequest(
        kind,
        "train",
        "research",
        "kata-vfio",
        "busybox:1",
        1024,
        1,
        resources=items,
        by_claim=True,
    )
    template, workload = render.claim_template(wanted), render.workload(wanted)
    validate([template, workload])
    claim, pod = read(render.as_yaml([template, workload]))
    assert claim["metadata"] == {"name": "train", "namespace": "research"}
    requests = claim["spec"]["spec"]["devices"]["requests"]
    assert [(each["name"], each["exactly"]["count"]) for each in requests] == [
        ("gpu", 2),
        ("gpu-1", 1),
    ]
    assert {each["exactly"]["deviceClassName"] for each in requests} == {DEVICE_CLASS}
    selectors = [{"cel": {"expression": expression}}] if expression else None
    assert [each["exactly"].get("selectors") for each in requests] == [selectors] * 2
    spec = pod["spec"] if kind == "Pod" else pod["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "train"}]
    (container,) = spec["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert set(container["resources"]["limits"]) == {"memory", "cpu"}
    assert "device plugin" not in render.as_yaml([workload])


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
@pytest.mark.parametrize("device", [GPU, NIC])
@pytest.mark.parametrize("functions", [1, 2, 8])
@pytest.mark.parametrize("together", [True, False])
def test_pods_for_devices_of_many_hosts_are_valid(
    kind: Workload, device: Any, functions: int, *, together: bool
) -> None:
    slot = [replace(device, address=moved(device.address, function=n)) for n in range(functions)]
    named = {each.address: "vfiomgr.io/A" for each in slot}
    offered = offers([PodDevice(tuple(slot))] * 2, "agent", named)
    made = pods_for(offered, replace(POD, kind=kind), None, together=together)
    validate([render.workload(each) for each in made])
    (wanted,) = made
    is_gpu = device.is_graphics_or_accelerator
    count = 2 if together else 1
    assert wanted.resources == (ResourceRequest("vfiomgr.io/A", count, is_gpu=is_gpu),)
    assert ("cuda" in wanted.image) == (device is GPU)
    assert bool(wanted.command) == (device is NIC or kind == "Deployment")


def test_each_resource_has_a_pod_of_its_own_unless_devices_are_named() -> None:
    other = replace(GPU, name="NVIDIA Corporation GH100 [H100 PCIe]")
    offered = offers([PodDevice((GPU, AUDIO)), PodDevice((other,))], "model", {})
    assert list(offered) == ["nvidia.com/GA107GL_A2___A16", "nvidia.com/GH100_H100_PCIE"]
    apart = pods_for(offered, POD, None, together=False)
    assert [wanted.name for wanted in apart] == ["gpu-1", "gpu-2"]
    (both,) = pods_for(offered, POD, None, together=True)
    assert [item.count for item in both.resources] == [1, 1]
    with pytest.raises(UsageError, match="is ambiguous: the devices belong to"):
        pods_for(offered, POD, 2, together=True)


def test_sixteen_root_ports_are_all_that_one_pod_gets() -> None:
    offered = offers([PodDevice((GPU, AUDIO))], "pgpu", {})
    assert pods_for(offered, POD, 8, together=True)
    with pytest.raises(Refusal, match="18 functions need a root port each"):
        pods_for(offered, POD, 9, together=True)


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("NVIDIA Corporation GP104GL [Tesla P4]", "GP104GL_TESLA_P4"),
        ("NVIDIA Corporation AD102GL [L40S]", "AD102GL_L40S"),
        ("NVIDIA Corporation TU104 [GeForce RTX 2080 Rev. A]", "TU104_GEFORCE_RTX_2080_REV__A"),
        ("NVIDIA Corporation 10de:25b6", "25b6"),
        ("Device 10de:25b6", "25b6"),
    ],
)
def test_a_model_is_named_as_kubevirts_plugin_does(name: str, resource: str) -> None:
    assert model_name(replace(GPU, name=name)) == resource


def test_plugins_of_nvidia_offer_nothing_else() -> None:
    with pytest.raises(Refusal, match="no NVIDIA plugin offers"):
        offers([PodDevice((NIC,))], "pgpu", {})


def test_names_have_the_grammar_of_kubernetes() -> None:
    assert is_label("a" * 63)
    assert not any(map(is_label, ("a" * 64, "-a", "a-", "A", "a.b", "", "a\n")))
    assert is_subdomain("a.b-c.d")
    assert not is_subdomain("a..b")
    assert is_extended_resource("nvidia.com/GP104GL_TESLA_P4")
    for name in ("cpu", "memory", "kubernetes.io/x", "a.kubernetes.io/x", "requests.a/b", "a/b/c"):
        assert not is_extended_resource(name)
    assert parse_selector("-", "a.b/c=d") == ("a.b/c", "d")
    assert parse_selector("-", "c=") == ("c", "")
    for text in ("c", "=d", "a/b/c=d", "a=b c", "/a=b"):
        with pytest.raises(UsageError, match="is not a node label"):
            parse_selector("-", text)
    for text in ("", "a b", "a\nb"):
        with pytest.raises(UsageError, match="is not an image name"):
            require_image("-", text)
