"""Kubernetes objects that run the agent on prepared nodes, and its systemd units.

The objects are rendered from kata/node-agent; the units are for an agent without a container.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vfiomgr import __version__
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.kubernetes import (
    quoted,
    require_image,
    require_label,
    template,
)
from vfiomgr.kata.model import KUBELET_ROOT, KUBELET_ROOTS
from vfiomgr.node.model import FEATURES, SERVICE_ACCOUNT
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import (
    BOOT,
    FILE,
    RECORD,
    SETTLE,
    InstalledLayout,
    render_record,
)
from vfiomgr.persistence.model import SANDBOX, UNITS, require_plain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.kata.kubernetes import Object

_PLAIN = expression(r"[A-Za-z0-9._+/:=-]+")
"""Words without a special meaning in units."""
AGENT = UNITS / "vfiomgr-node.service"
CDI = UNITS / "vfiomgr-node-cdi.service"
PLUGINS = HostPath("/var/lib/kubelet/device-plugins")
"""The kubelet's directory of device plugins, whatever its --root-dir is."""

_AFTER = f"local-fs.target {BOOT.name} vfiomgr-persist.service vfiomgr-vgpu.service"
_KUBELETS = (
    "kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service "
    "k0scontroller.service k0sworker.service snap.microk8s.daemon-kubelite.service"
)
_SERVING = f"""\
CapabilityBoundingSet=
CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH
ReadWritePaths=-{PLUGINS} -{FEATURES}
ProtectKernelModules=yes
DevicePolicy=closed
RestrictNamespaces=yes
SystemCallFilter=~@module
"""
"""Changes to the sandbox of services that change the host: this one only reads it.

The two capabilities are for the users of a device, in /proc. /sys stays writable, because resources
can ask for resets."""
ENVIRONMENT = HostPath("/etc/vfiomgr/node-agent.env")
"""KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT and NODE_NAME, for an agent with claims."""
CREDENTIALS = HostPath("/etc/vfiomgr/node-agent")
"""Its token and ca.crt."""
_CLAIMS = """\
EnvironmentFile={environment}
ExecStartPre=+mkdir -p -m 0750 {directories}
ReadWritePaths=-{plugins} -{features} {writable}
IPAddressDeny=
RestrictAddressFamilies=AF_INET AF_INET6

[Unit]
Wants=network-online.target
After=network-online.target
"""
"""Changes to that sandbox for an agent with claims: it creates vGPUs as other services do, asks the
API server, and serves the kubelet in two more directories.

With `-`, since systemd makes the mounts of ReadWritePaths for ExecStartPre too (also with `+`), and
there the directories may not exist yet; for ExecStart they do."""
_INSTALL = """
[Install]
WantedBy=multi-user.target
"""


def render_agent(
    program: str,
    arguments: Iterable[str] = (),
    claims: HostPath | None = None,
    *,
    events: bool = False,
) -> str:
    """Render the unit of the agent, with more arguments for it.

    With `claims`, the kubelet's --root-dir, it also serves ResourceClaims, and can write `events`
    of the node with the same token.

    It starts before the kubelet, which soon after its own start rejects the pods of before a reboot
    if their devices are not listed. The kubelet's directories are created before the sandbox, which
    could not include them later.

    Raises:
        Refusal: the path would need quoting.
    """
    options, rights = "--metrics unix:/run/vfiomgr/metrics.sock", _SERVING
    if claims is not None:
        options += f" --dra --credentials {CREDENTIALS} --kubelet-root {_quoted(claims)}"
        options += f" --events {CREDENTIALS}" if events else ""
        directories = [_quoted(claims / name) for name in ("plugins", "plugins_registry")]
        rights = _CLAIMS.format(
            environment=ENVIRONMENT,
            directories=" ".join(directories),
            writable=" ".join(f"-{each}" for each in directories),
            plugins=PLUGINS,
            features=FEATURES,
        )
    return f"""\
[Unit]
Description=Offer VFIO devices and vGPUs to the kubelet
After={_AFTER} {CDI.name}
Before={_KUBELETS}

[Service]
Type=notify
TimeoutStartSec=90
ExecStartPre=+mkdir -p -m 0750 {PLUGINS}
ExecStart={_command(program, options, arguments)}
ExecReload=kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
SuccessExitStatus=130
TimeoutStopSec=10
WatchdogSec=60
{SANDBOX}{rights}{_INSTALL}"""


def render_cdi(program: str, arguments: Iterable[str] = ()) -> str:
    """Render the unit that writes the CDI specifications at boot, before the kubelet starts.

    The arguments name the resources, which are those of the agent only if it has the same ones.

    Pods of before the reboot then get their devices by name, although the numbers of the IOMMU
    groups have changed.

    Raises:
        Refusal: the path would need quoting.
    """
    return f"""\
[Unit]
Description=Write the CDI specifications of devices for pods
After={_AFTER}
Before={_KUBELETS}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=-udevadm settle --timeout={SETTLE}
ExecStart={_command(program, "--once", arguments)}
TimeoutStartSec=120
{SANDBOX}{_SERVING}{_INSTALL}"""


def _command(program: str, options: str, arguments: Iterable[str]) -> str:
    return " ".join((require_plain(program), "node run", options, *map(_quoted, arguments)))


def _quoted(word: str) -> str:
    """A word in ExecStart= (systemd.syntax(7), systemd.service(5))."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'


RENDERERS = {AGENT.name: render_agent, CDI.name: render_cdi}


DISTRIBUTIONS = tuple(KUBELET_ROOTS)
POD_RESOURCES = "pod-resources"
_CHOOSE = "pass --distribution or --kubelet-root"


def named_kubelet_root(distribution: str | None, path: str | None) -> HostPath | None:
    """The --root-dir of a kubelet that a user names; None if the host must be searched.

    Raises:
        UsageError: the path is not a plain absolute path.
    """
    if path is None:
        return None if distribution is None else KUBELET_ROOTS[distribution]
    names = path.rstrip("/").split("/")
    if (
        names[0]
        or not names[1:]
        or not all(names[1:])
        or {".", ".."} & set(names)
        or not path.isprintable()
    ):
        message = f"--kubelet-root: {path!r} is not an absolute path"
        raise UsageError(message, f"write the --root-dir of the kubelet, e.g. {KUBELET_ROOT}")
    return HostPath("/".join(names))


def found_kubelet_root(tree: HostTree) -> HostPath | None:
    """The --root-dir of the kubelet on a host; None if no kubelet has run there.

    MicroK8s links /var/lib/kubelet to its own directory.

    Raises:
        UsageError: several kubelets have run there.
    """
    known = dict.fromkeys(KUBELET_ROOTS.values())
    used = (tree.resolve(root) for root in known if tree.exists(root / POD_RESOURCES))
    roots = tuple(dict.fromkeys(root for root in used if root is not None))
    if len(roots) > 1:
        message = f"several kubelets found: {', '.join(roots)}"
        raise UsageError(message, _CHOOSE)
    return roots[0] if roots else None


NAMESPACE = "vfiomgr"
IMAGE = f"localhost/vfiomgr-node:{__version__}"
"""The name that packaging/Containerfile is built with."""
LAYOUT = "vfiomgr-layout"
"""The ConfigMap with the layout, and the DaemonSet that applies it."""
SELINUX_TYPE = "container_device_plugin_t"
"""The type of container-selinux that may create sockets in the kubelet's directory."""

_BASE, _EVENTS, _PREPARATION = "node-agent/base", "node-agent/events", "node-agent/layout"
_DRA, _BINDING = "node-agent/dra", "node-agent/binding"
BINDING_CONDITIONS = "--binding-conditions"
_DRA_OBJECTS = (
    *("deviceclass-vfio", "deviceclass-vgpu"),
    *("clusterrole", "clusterrolebinding", "policy", "policybinding"),
)
_BINDER = "node-agent/binder"
_OPERATOR = "node-agent/gpu-operator"
_OPERATOR_OBJECTS = ("clusterrole", "clusterrolebinding", "policy", "policybinding")
_IN_DEFAULT = ("Role", "RoleBinding")
"""Events of nodes are in the namespace default."""
_IN_NONE = (
    *("DeviceClass", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
"""The objects for claims belong to the cluster."""
_DIGEST = "vfiomgr.io/layout"
_MOST_BYTES = 1 << 20
"""Of a ConfigMap (MaxSecretSize in pkg/apis/core/types.go)."""


class NodeLayout(Value):
    """A layout that privileged pods apply to the nodes."""

    text: str
    name: str | None = None
    """The name of the layout, if the text has several."""


class ManifestRequest(Value):
    """How the agent is deployed."""

    image: str = IMAGE
    namespace: str = NAMESPACE
    kubelet_root: HostPath = KUBELET_ROOT
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels of the prepared nodes."""
    selinux: bool = False
    layout: NodeLayout | None = None
    events: bool = False
    """Whether the agent gets a token, and may create events of its node."""
    dra: bool = False
    """Whether the agent is also a DRA driver, with a token for slices and claims."""
    binding_conditions: bool = False
    """Whether this driver binds devices before pods are placed, for which it watches pods."""
    binder: bool = False
    """Whether a second pod on each node binds devices for claims, since the agent may not."""
    gpu_operator: bool = False
    """Whether the agent may have NVIDIA's GPU Operator stop its monitoring on its node."""
    arguments: tuple[str, ...] = ()
    """More arguments of the agent."""

    def __post_init__(self) -> None:
        """Raise UsageError for what Kubernetes would refuse."""
        if self.layout is not None and len(self.layout.text.encode()) >= _MOST_BYTES:
            message = "--with-layout: a ConfigMap cannot hold a layout of 1 MiB or more"
            raise UsageError(message, "install it on the nodes: vfiomgr layout install FILE")
        require_image("--image", self.image)
        require_label("--namespace", self.namespace)


def manifests(request: ManifestRequest) -> tuple[Object, ...]:
    """The objects in the order in which they are created."""
    return tuple(_placed(one, request.namespace) for one in _objects(request))


def _objects(request: ManifestRequest) -> Iterator[Object]:
    yield template(f"{_BASE}/namespace")
    yield template(f"{_BASE}/serviceaccount")
    if request.events:
        yield template(f"{_EVENTS}/role")
        yield template(f"{_EVENTS}/rolebinding")
    if request.dra:
        yield from (template(f"{_DRA}/{name}") for name in _DRA_OBJECTS)
        if request.binding_conditions:
            yield template(f"{_BINDING}/clusterrole")
            yield template(f"{_BINDING}/clusterrolebinding")
    if request.gpu_operator:
        yield from (template(f"{_OPERATOR}/{name}") for name in _OPERATOR_OBJECTS)
    if request.layout is not None:
        yield _layout_map(request.layout)
        yield _layout_pods(request, request.layout)
    if request.binder:
        yield _binder_pods(request)
    yield _agent_pods(request)


def _placed(document: Object, namespace: str) -> Object:
    """The object in its namespace, or the namespace itself."""
    for subject in document.get("subjects", ()):
        subject["namespace"] = quoted(namespace)
    key = "name" if document["kind"] == "Namespace" else "namespace"
    if document["kind"] not in (*_IN_DEFAULT, *_IN_NONE):
        document["metadata"][key] = quoted(namespace)
    return document


def _agent_pods(request: ManifestRequest) -> Object:
    document = template(f"{_BASE}/daemonset")
    spec = _filled(document, request)
    if request.selinux:
        spec["securityContext"]["seLinuxOptions"] = {"type": SELINUX_TYPE}
    spec["containers"][0]["args"] += [quoted(word) for word in request.arguments]
    if request.events or request.dra:
        spec["automountServiceAccountToken"] = True
        name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        spec["containers"][0]["env"] = [{"name": "NODE_NAME", "valueFrom": name}]
    if request.events:
        spec["containers"][0]["args"] += ["--events", SERVICE_ACCOUNT]
    if request.dra:
        _add_dra(spec, request.kubelet_root)
        if request.binding_conditions:
            spec["containers"][0]["args"].append(BINDING_CONDITIONS)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    volumes["pod-resources"]["hostPath"]["path"] = quoted(request.kubelet_root / POD_RESOURCES)
    _read_map(request, volumes["layout"])
    return document


def _binder_pods(request: ManifestRequest) -> Object:
    document = template(f"{_BINDER}/daemonset")
    spec = _filled(document, request)
    _read_map(request, spec["volumes"][0])
    return document


def _read_map(request: ManifestRequest, layout: Any) -> None:  # noqa: ANN401 - as YAML has it
    """Have a volume contain the layout of the cluster rather than that of the node."""
    if request.layout is not None:
        del layout["hostPath"]
        layout["configMap"] = {"name": LAYOUT}


def _add_dra(spec: Any, root: HostPath) -> None:  # noqa: ANN401 - as YAML has it
    """Add what the DRA driver needs to the pod of the agent."""
    more = template(f"{_DRA}/daemonset")["spec"]["template"]["spec"]
    (container,), (its,) = spec["containers"], more["containers"]
    container["args"] += ["--dra"]
    if root != KUBELET_ROOT:
        container["args"] += ["--kubelet-root", quoted(root)]
    for mount, volume in zip(its["volumeMounts"], more["volumes"], strict=True):
        place = volume["hostPath"]["path"].replace(KUBELET_ROOT, root, 1)
        mount["mountPath"] = volume["hostPath"]["path"] = quoted(place)
    container["volumeMounts"] += its["volumeMounts"]
    spec["volumes"] += more["volumes"]


def _layout_pods(request: ManifestRequest, layout: NodeLayout) -> Object:
    document = template(f"{_PREPARATION}/daemonset")
    spec = _filled(document, request)
    if layout.name is not None:
        for container in (*spec["initContainers"], *spec["containers"]):
            container["args"] += ["--layout", quoted(layout.name)]
    # A changed layout is applied by new pods.
    annotations = {_DIGEST: quoted(sha256(layout.text.encode()).hexdigest())}
    document["spec"]["template"]["metadata"]["annotations"] = annotations
    return document


def _filled(document: Object, request: ManifestRequest) -> Any:  # noqa: ANN401 - as YAML has it
    """Fill in what all pods have in common; return their specification."""
    spec = document["spec"]["template"]["spec"]
    selector = ((quoted(key), quoted(value)) for key, value in request.node_selector)
    own = spec["nodeSelector"]
    for number, (key, value) in enumerate(selector):
        own.insert(number, key, value)  # a key that ends with a comment stays last
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = quoted(request.image)
    return spec


def _layout_map(layout: NodeLayout) -> Object:
    """The layout as files for pods, as `layout install` writes them on a host."""
    files = {FILE.name: _block(layout.text)}
    if layout.name is not None:
        files[RECORD.name] = _block(render_record(InstalledLayout(layout.name)))
    metadata = {"name": LAYOUT}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}


def _block(text: str) -> str:
    """A text as a block of lines; quoted if YAML has no such block for its characters."""
    from ruamel.yaml.scalarstring import (  # noqa: PLC0415 - slow
        DoubleQuotedScalarString,
        LiteralScalarString,
    )

    is_plain = all(map(str.isprintable, text.split("\n")))
    scalar: str = LiteralScalarString(text) if is_plain else DoubleQuotedScalarString(text)
    return scalar
