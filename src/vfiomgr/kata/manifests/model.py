"""Names, quantities and objects of Kubernetes, as far as a pod with a device needs them."""

from __future__ import annotations

import re
from typing import Literal

from vfiomgr.errors import UsageError
from vfiomgr.value import Value

Workload = Literal["Pod", "Deployment"]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, as IsDNS1123Label of k8s.io/apimachinery/pkg/util/validation has it."""
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The part of a qualified name behind the slash (IsQualifiedName there)."""
_MOST_OF_SUBDOMAIN = 253
_NATIVE_DOMAIN = "kubernetes.io"
_REQUESTS = "requests."
_IMAGE = re.compile(r"[a-zA-Z0-9][^\s\x00-\x1f\x7f]{0,1023}")


def is_label(text: str) -> bool:
    """Whether a text is a DNS label: what handlers, containers and namespaces are called."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether a text is labels with dots between them: what objects are called."""
    return len(text) <= _MOST_OF_SUBDOMAIN and all(map(is_label, text.split(".")))


def is_extended_resource(name: str) -> bool:
    """Whether a resource is a device plugin's (IsExtendedResourceName of pkg/apis/core/helper)."""
    domain, slash, rest = name.partition("/")
    if not slash or domain == _NATIVE_DOMAIN or domain.endswith(f".{_NATIVE_DOMAIN}"):
        return False
    if name.startswith(_REQUESTS):
        return False
    return is_subdomain(domain) and _QUALIFIED.fullmatch(rest) is not None


def _require(is_right: object, option: str, text: str, what: str, hint: str) -> str:
    if not is_right:
        message = f"{option} {text!r} {what}"
        raise UsageError(message, hint)
    return text


def require_label(option: str, text: str) -> str:
    """The text; a UsageError where it is no DNS label."""
    hint = "write lower-case letters, digits and hyphens, 63 at most, e.g. kata-vfio"
    return _require(is_label(text), option, text, "is no name for Kubernetes", hint)


def require_subdomain(option: str, text: str) -> str:
    """The text; a UsageError where no object can be called so."""
    hint = "write labels of lower-case letters, digits and hyphens, with dots between them"
    return _require(is_subdomain(text), option, text, "is no name for Kubernetes", hint)


def require_resource(option: str, text: str) -> str:
    """The text; a UsageError where it is not the name of a device plugin's resource."""
    hint = "write it as domain/name outside of kubernetes.io, e.g. nvidia.com/pgpu"
    is_right = is_extended_resource(text)
    return _require(is_right, option, text, "is no resource of a device plugin", hint)


def require_image(option: str, text: str) -> str:
    """The text; a UsageError where it has spaces, or is empty."""
    hint = "write it as registry/name:tag, e.g. docker.io/library/busybox:1"
    return _require(_IMAGE.fullmatch(text), option, text, "names no image", hint)


def parse_selector(option: str, text: str) -> tuple[str, str]:
    """`key=value` of a node's label.

    Raises:
        UsageError: the key or the value cannot be of a label.

    """
    key, equals, value = text.partition("=")
    domain, slash, name = key.rpartition("/")
    is_key = _QUALIFIED.fullmatch(name) and (is_subdomain(domain) if slash else True)
    is_right = equals and is_key and (not value or _QUALIFIED.fullmatch(value))
    hint = "write it as key=value, e.g. katacontainers.io/kata-runtime=true"
    _require(is_right, option, text, "is no label of a node", hint)
    return key, value


def mebibytes(count: int) -> str:
    """A quantity of memory: `16Gi`, `10240Mi`."""
    gibibytes, rest = divmod(count, 1024)
    return f"{count}Mi" if rest or not gibibytes else f"{gibibytes}Gi"


class ResourceRequest(Value):
    """How many devices of a resource a container asks for."""

    name: str
    count: int


class PodRequest(Value):
    """A pod, alone or as the template of a Deployment, whose VM receives devices."""

    kind: Workload
    name: str
    namespace: str | None
    runtime_class: str
    image: str
    command: tuple[str, ...]
    """Empty for what the image itself says."""
    resources: tuple[ResourceRequest, ...]
    memory_mib: int
    cpus: int


class RuntimeClassRequest(Value):
    """What names a handler of the container runtime for pods, and what its VMs take besides."""

    name: str
    handler: str
    overhead_mib: int
    overhead_cpus: int
    default_memory_mib: int
    """What of the overhead is the VM's own memory (default_memory of Kata's configuration)."""
    node_selector: tuple[tuple[str, str], ...]
