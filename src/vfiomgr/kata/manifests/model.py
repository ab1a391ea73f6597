"""Names, quantities and objects of Kubernetes that a pod with a device needs."""

from __future__ import annotations

import re
from typing import Literal

from vfiomgr.errors import UsageError
from vfiomgr.value import Value

Workload = Literal["Pod", "Deployment"]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, like IsDNS1123Label of k8s.io/apimachinery/pkg/util/validation."""
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The part of a qualified name after the slash (IsQualifiedName there)."""
_MOST_OF_SUBDOMAIN = 253
_NATIVE_DOMAIN = "kubernetes.io"
_REQUESTS = "requests."
_IMAGE = re.compile(r"[a-zA-Z0-9][^\s\x00-\x1f\x7f]{0,1023}")


def is_label(text: str) -> bool:
    """Whether a text is a DNS label: a name for handlers, containers and namespaces."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether a text is labels with dots between them: a name for objects."""
    return len(text) <= _MOST_OF_SUBDOMAIN and all(map(is_label, text.split(".")))


def is_extended_resource(name: str) -> bool:
    """Whether a device plugin offers a resource (IsExtendedResourceName, pkg/apis/core/helper)."""
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


def mebibytes(count: int) -> str:
    """An amount of memory: `16Gi`, `10240Mi`."""
    gibibytes, rest = divmod(count, 1024)
    return f"{count}Mi" if rest or not gibibytes else f"{gibibytes}Gi"


class ResourceRequest(Value):
    """How many devices of a resource a container requests."""

    name: str
    count: int


class PodRequest(Value):
    """A pod, alone or as the template of a Deployment, with devices for its VM."""

    kind: Workload
    name: str
    namespace: str | None
    runtime_class: str
    image: str
    command: tuple[str, ...]
    """Empty for the command of the image."""
    resources: tuple[ResourceRequest, ...]
    memory_mib: int
    cpus: int


class RuntimeClassRequest(Value):
    """A RuntimeClass: the name of a handler, and the overhead of its VMs."""

    name: str
    handler: str
    overhead_mib: int
    overhead_cpus: int
    default_memory_mib: int
    """The part of the overhead that is the VM's memory (default_memory of Kata's configuration)."""
    node_selector: tuple[tuple[str, str], ...]
