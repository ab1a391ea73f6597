"""The level "baseline" of Kubernetes' Pod Security Standards, as a list of violations.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/. The rules have the
names of their files in k8s.io/pod-security-admission/policy (check_*.go).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Spec = dict[str, Any]
CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
SELINUX_TYPES = frozenset(
    {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
_HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")


def containers(spec: Spec) -> list[Spec]:
    """All containers of a pod."""
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [container for kind in kinds for container in spec.get(kind, [])]


def violations(spec: Spec) -> set[str]:
    """The rules that a pod breaks."""
    found = set(_of_pod(spec)) | set(_of_context(spec.get("securityContext", {})))
    for container in containers(spec):
        found |= set(_of_container(container))
        found |= set(_of_context(container.get("securityContext", {})))
    return found


def _of_pod(spec: Spec) -> Iterator[str]:
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "hostNamespaces"
    if any("hostPath" in volume for volume in spec.get("volumes", [])):
        yield "hostPathVolumes"
    sysctls = spec.get("securityContext", {}).get("sysctls", [])
    if not {each["name"] for each in sysctls} <= SYSCTLS:
        yield "sysctls"


def _of_context(context: Spec) -> Iterator[str]:
    """What a pod and a container can both set."""
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or {"user", "role"} & set(selinux):
        yield "seLinuxOptions"
    for name in ("seccompProfile", "appArmorProfile"):
        if context.get(name, {}).get("type") == "Unconfined":
            yield name
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "windowsHostProcess"


def _of_container(container: Spec) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged"
    if not set(context.get("capabilities", {}).get("add", [])) <= CAPABILITIES:
        yield "capabilities_baseline"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPorts"
    handlers = [container.get(name, {}) for name in _HANDLERS]
    handlers += container.get("lifecycle", {}).values()
    asked = (handler.get(name, {}) for handler in handlers for name in ("httpGet", "tcpSocket"))
    if any(each.get("host") for each in asked):
        yield "hostProbesAndHostLifecycle"
