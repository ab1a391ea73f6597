"""Render objects for kubectl from the templates of kata/, keeping their comments."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.documents.jsonable import UNFOLDED
from vfiomgr.documents.text import resource_directory
from vfiomgr.expressions import expression
from vfiomgr.kata.model import DEVICE_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ruamel.yaml import YAML

    from vfiomgr.kata.manifests.plan import PodRequest, ResourceRequest, RuntimeClassRequest

Object = Any
"""A mapping of ruamel.yaml with its comments; in JSON it is a plain object."""
_LABEL = "app.kubernetes.io/name"
_CLAIM = "gpu"
"""The name of a claim in its pod, and of its first request."""
_PLAIN = expression(r"[A-Za-z][A-Za-z0-9._/@-]*(?::[A-Za-z][A-Za-z0-9._/@-]*)*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Text that YAML 1.1, which kubectl reads, takes for another type."""


def runtime_class(request: RuntimeClassRequest) -> Object:
    """A RuntimeClass (node.k8s.io/v1)."""
    document = template("runtimeclass")
    document["metadata"]["name"] = quoted(request.name)
    document["handler"] = quoted(request.handler)
    fixed = document["overhead"]["podFixed"]
    fixed["memory"] = quoted(f"{request.overhead_mib}Mi")
    fixed["cpu"] = quoted(str(request.overhead_cpus))
    fixed.yaml_add_eol_comment(f"default_memory is {request.default_memory_mib}", "memory")
    selector = document["scheduling"]["nodeSelector"]
    if not request.node_selector:
        del document["scheduling"]
        return document
    selector.clear()
    selector.update({quoted(key): quoted(value) for key, value in request.node_selector})
    return document


def workload(request: PodRequest) -> Object:
    """A Pod, a Deployment of it, or a VirtualMachine."""
    if request.kind == "VirtualMachine":
        return _virtual_machine(request)
    document = _named(request.kind.lower(), request)
    if request.kind == "Deployment":
        spec = document["spec"]["template"]["spec"]
        document["spec"]["selector"]["matchLabels"][_LABEL] = quoted(request.name)
        document["spec"]["template"]["metadata"]["labels"][_LABEL] = quoted(request.name)
    else:
        spec = document["spec"]
    spec["runtimeClassName"] = quoted(request.runtime_class)
    _fill(spec["containers"][0], request)
    _refer_to_claim(spec, request)
    return document


def _virtual_machine(request: PodRequest) -> Object:
    """A VirtualMachine of KubeVirt (kubevirt.io/v1)."""
    document = _named("virtualmachine", request)
    spec = document["spec"]["template"]["spec"]
    domain = spec["domain"]
    domain["cpu"]["cores"] = request.cpus
    domain["memory"]["guest"] = quoted(_memory(request.memory_mib))
    spec["volumes"][0]["containerDisk"]["image"] = quoted(request.image)
    devices: dict[str, list[Object]] = {}
    for number, item in enumerate(_one_by_one(request)):
        name = _numbered(number)
        wanted = (
            {"claimName": _CLAIM, "requestName": name}
            if request.by_claim
            else {"deviceName": quoted(item.name)}
        )
        devices.setdefault("gpus" if item.is_gpu else "hostDevices", []).append(
            {"name": name, **wanted}
        )
    domain["devices"].update(devices)
    _refer_to_claim(spec, request)
    return document


def claim_template(request: PodRequest) -> Object:
    """The ResourceClaimTemplate of a pod or VM (resource.k8s.io/v1)."""
    document = _named("claimtemplate", request)
    requests = document["spec"]["spec"]["devices"]["requests"]
    items = _one_by_one(request) if request.kind == "VirtualMachine" else request.resources
    for number, item in enumerate(items):
        wanted: dict[str, Any] = {"deviceClassName": DEVICE_CLASS, "count": item.count}
        if item.name:
            wanted["selectors"] = [{"cel": {"expression": quoted(item.name)}}]
        requests.append({"name": _numbered(number), "exactly": wanted})
    requests.fa.set_block_style()
    return document


def device_class(request: PodRequest) -> Object:
    """The DeviceClass that offers the resource of a pod (resource.k8s.io/v1)."""
    document = template("deviceclass")
    resource = request.resources[0].name
    domain, _, name = resource.partition("/")
    # The name of an object may have neither capitals nor underscores.
    document["metadata"]["name"] = quoted(f"{name.lower().replace('_', '-')}.{domain}")
    document["spec"]["extendedResourceName"] = quoted(resource)
    document["spec"]["selectors"][0]["cel"]["expression"] = quoted(request.selector)
    return document


def _named(name: str, request: PodRequest) -> Object:
    """A template with the name and the namespace of a request."""
    document = template(name)
    document["metadata"]["name"] = quoted(request.name)
    if request.namespace is not None:
        document["metadata"]["namespace"] = quoted(request.namespace)
    return document


def _numbered(number: int) -> str:
    return f"{_CLAIM}-{number}" if number else _CLAIM


def _one_by_one(request: PodRequest) -> list[ResourceRequest]:
    """One request for each device, as KubeVirt requires (resolveDevice in its pkg/dra/utils.go)."""
    return [replace(item, count=1) for item in request.resources for _ in range(item.count)]


def _refer_to_claim(spec: Object, request: PodRequest) -> None:
    if request.by_claim:
        claim = {"name": _CLAIM, "resourceClaimTemplateName": quoted(request.name)}
        spec["resourceClaims"] = [claim]


def _fill(container: Object, request: PodRequest) -> None:
    container["image"] = quoted(request.image)
    if request.command:
        from ruamel.yaml.comments import CommentedSeq  # noqa: PLC0415 - slow

        command = CommentedSeq(map(quoted, request.command))
        command.fa.set_flow_style()
        container["command"] = command
    else:
        del container["command"]
    limits = container["resources"]["limits"]
    limits["memory"] = quoted(_memory(request.memory_mib))
    limits["cpu"] = quoted(str(request.cpus))
    if request.by_claim:
        del container.ca.items["resources"]  # the comment is about resources of device plugins
        container["resources"].ca.comment = None
        container["resources"]["claims"] = [{"name": _CLAIM}]
        return
    limits.update({quoted(item.name): quoted(str(item.count)) for item in request.resources})


def _memory(count: int) -> str:
    """An amount of memory: `16Gi`, `10240Mi`."""
    gibibytes, rest = divmod(count, 1024)
    return f"{count}Mi" if rest or not gibibytes else f"{gibibytes}Gi"


def as_yaml(objects: Iterable[Object]) -> str:
    """One stream of documents for `kubectl apply -f -`."""
    yaml = _yaml()
    texts = []
    for document in objects:
        stream = io.StringIO()
        yaml.dump(document, stream)
        texts.append(stream.getvalue())
    return "---\n".join(texts)


def as_json(objects: Iterable[Object]) -> object:
    """The object itself, or a List of several."""
    plain = [_plain(document) for document in objects]
    return plain[0] if len(plain) == 1 else {"apiVersion": "v1", "kind": "List", "items": plain}


def _plain(value: Any) -> Any:  # noqa: ANN401 - as YAML has it
    if isinstance(value, dict):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def template(name: str) -> Object:
    """A document of kata/, without `.yaml`, with its comments."""
    with open(f"{resource_directory('kata')}/{name}.yaml", encoding="utf-8") as file:
        return _yaml().load(file)


def _yaml() -> YAML:
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and only these objects need it

    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.preserve_quotes = True
    yaml.allow_unicode = False
    yaml.width = UNFOLDED
    return yaml


def quoted(text: str) -> str:
    """A text, quoted if YAML 1.1 could take it for a number or a boolean."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString  # noqa: PLC0415 - slow

    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    scalar: str = DoubleQuotedScalarString(text)
    return scalar
