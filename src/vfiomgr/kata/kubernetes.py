"""Objects of Kubernetes: names, and texts for kubectl from the templates of kata/."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from vfiomgr.containers.cdi.model import further_request
from vfiomgr.documents.jsonable import UNFOLDED
from vfiomgr.documents.text import resource_directory
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.model import DEVICE_CLASS
from vfiomgr.value import Value

if TYPE_CHECKING:
    from ruamel.yaml import YAML


Workload = Literal["Pod", "Deployment", "VirtualMachine"]

_LABEL = expression(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, like IsDNS1123Label of k8s.io/apimachinery/pkg/util/validation."""
_QUALIFIED = expression(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The part of a qualified name after the slash (IsQualifiedName there)."""
_MOST_OF_SUBDOMAIN = 253
_NATIVE_DOMAIN = "kubernetes.io"
_IMAGE = expression(r"[a-zA-Z0-9][^\s\x00-\x1f\x7f]{0,1023}")


def is_label(text: str) -> bool:
    """Whether a text is a DNS label: a name for handlers, containers and namespaces."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether a text is labels with dots between them: a name for objects."""
    return len(text) <= _MOST_OF_SUBDOMAIN and all(map(is_label, text.split(".")))


CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""The prefix of the name of a DeviceClass as a resource."""


def is_extended_resource(name: str) -> bool:
    """Whether a device plugin offers a resource (IsExtendedResourceName, pkg/apis/core/helper)."""
    domain, slash, rest = name.partition("/")
    is_native = domain == _NATIVE_DOMAIN or domain.endswith(f".{_NATIVE_DOMAIN}")
    if not slash or is_native or name.startswith("requests."):
        return False
    return is_subdomain(domain) and _QUALIFIED.fullmatch(rest) is not None


def _require(is_right: object, option: str, text: str, what: str, hint: str) -> str:
    if not is_right:
        message = f"{option} {text!r} {what}"
        raise UsageError(message, hint)
    return text


def require_label(option: str, text: str) -> str:
    """Return the text if it is a DNS label, else raise a UsageError."""
    hint = "use up to 63 lower-case letters, digits and hyphens, e.g. kata-vfio"
    return _require(is_label(text), option, text, "is not a valid Kubernetes name", hint)


def require_subdomain(option: str, text: str) -> str:
    """Return the text if it is a valid object name, else raise a UsageError."""
    hint = "use labels of lower-case letters, digits and hyphens, with dots between them"
    return _require(is_subdomain(text), option, text, "is not a valid Kubernetes name", hint)


def require_resource(option: str, text: str) -> str:
    """Return the text if it is the name of a device plugin's resource, else raise a UsageError."""
    hint = "use domain/name outside kubernetes.io, e.g. nvidia.com/pgpu"
    is_right = is_extended_resource(text)
    return _require(is_right, option, text, "is not a resource of a device plugin", hint)


def require_image(option: str, text: str) -> str:
    """Return the text if it is not empty and has no spaces, else raise a UsageError."""
    hint = "use registry/name:tag, e.g. docker.io/library/busybox:1"
    return _require(_IMAGE.fullmatch(text), option, text, "is not an image name", hint)


def parse_selector(option: str, text: str) -> tuple[str, str]:
    """Parse `key=value` of a node label.

    Raises:
        UsageError: the key or the value is invalid for a label.
    """
    key, equals, value = text.partition("=")
    domain, slash, name = key.rpartition("/")
    is_key = _QUALIFIED.fullmatch(name) and (is_subdomain(domain) if slash else True)
    is_right = equals and is_key and (not value or _QUALIFIED.fullmatch(value))
    hint = "use key=value, e.g. katacontainers.io/kata-runtime=true"
    _require(is_right, option, text, "is not a node label", hint)
    return key, value


class ResourceRequest(Value):
    """How many devices of a resource, or of those that a claim selects, a container requests."""

    name: str
    """The resource; with a claim, a CEL expression for devices, or nothing for any."""
    count: int
    is_gpu: bool = True
    """Whether KubeVirt lists the devices as GPUs, not as host devices."""
    functions: int = 1
    """How many functions of a device KubeVirt gets, each by a request; with a claim only."""


class PodRequest(Value):
    """A pod, alone or as the template of a Deployment, or a VM of KubeVirt, with devices."""

    kind: Workload
    name: str
    namespace: str | None
    runtime_class: str
    """Not for KubeVirt."""
    image: str
    """With KubeVirt, the container disk from which the VM boots."""
    memory_mib: int
    cpus: int
    command: tuple[str, ...] = ()
    """Empty for the command of the image."""
    resources: tuple[ResourceRequest, ...] = ()
    by_claim: bool = False
    """Whether the devices are requested by a claim (DRA) instead of resources."""
    selector: str = ""
    """The CEL expression of the DeviceClass (DRA) that offers the resource; empty for none."""


class RuntimeClassRequest(Value):
    """A RuntimeClass: the name of a handler, and the overhead of its VMs."""

    name: str
    handler: str
    overhead_mib: int
    overhead_cpus: int
    default_memory_mib: int
    """The part of the overhead that is the VM's memory (default_memory of Kata's configuration)."""
    node_selector: tuple[tuple[str, str], ...]


Object = Any
"""A mapping of ruamel.yaml with its comments; in JSON it is a plain object."""
_APP = "app.kubernetes.io/name"
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
    if not request.node_selector:
        del document["scheduling"]
        return document
    selector = document["scheduling"]["nodeSelector"]
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
        document["spec"]["selector"]["matchLabels"][_APP] = quoted(request.name)
        document["spec"]["template"]["metadata"]["labels"][_APP] = quoted(request.name)
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
        device: Object = {"name": _numbered(number)}
        if request.by_claim:
            device |= {"claimName": _CLAIM, "requestName": device["name"]}
        else:
            device["deviceName"] = quoted(item.name)
        devices.setdefault("gpus" if item.is_gpu else "hostDevices", []).append(device)
        for further in range(1, item.functions):
            name = further_request(_numbered(number), further)
            part = {"name": name, "claimName": _CLAIM, "requestName": name}
            devices.setdefault("hostDevices", []).append(part)
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
