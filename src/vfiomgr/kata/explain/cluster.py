"""Objects of a cluster besides pods: virtual machines of KubeVirt, and claims of devices."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.resource_names import kind_of_model
from vfiomgr.expressions import expression
from vfiomgr.kata.explain import harvester
from vfiomgr.kata.explain.context import KataTrace, chain_break, judged
from vfiomgr.kata.explain.pod import POOL, OtherObject, PodSpec
from vfiomgr.kata.explain.pools import unmatched
from vfiomgr.kata.explain.resources import on_host_driver
from vfiomgr.passthrough.readiness_hints import bind_remedy
from vfiomgr.pci.model import CLASS_DISPLAY
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic, Remedy
    from vfiomgr.kata.explain.context import StepState
    from vfiomgr.pci.model import PciDevice

_GUESTS: dict[str, tuple[str, ...]] = {
    "VirtualMachineInstance": ("spec",),
    "VirtualMachine": ("spec", "template", "spec"),
    "VirtualMachineInstanceReplicaSet": ("spec", "template", "spec"),
    "VirtualMachinePool": ("spec", "virtualMachineTemplate", "spec", "template", "spec"),
}
_CLAIMS = ("ResourceClaim", "ResourceClaimTemplate")
_DRA_GROUP, _LAST = "resource.k8s.io", Version(99, 0)
_DRA_APIS: dict[str, tuple[Version, Version]] = {
    "v1alpha1": (Version(1, 26), Version(1, 26)),
    "v1alpha2": (Version(1, 27), Version(1, 30)),
    "v1alpha3": (Version(1, 31), Version(1, 32)),
    "v1beta1": (Version(1, 32), _LAST),
    "v1beta2": (Version(1, 33), _LAST),
    "v1": (Version(1, 34), _LAST),
}
"""The releases of Kubernetes that serve claims in each version (pkg/apis/resource at the tags)."""
_GATE, _NVIDIA, _VFIO_CLASS = "HostDevices", "10de", "vfio.gpu.nvidia.com"
_GATES = ("spec", "configuration", "developerConfiguration", "featureGates")
_PERMITTED, _PCI, _LIST = "permittedHostDevices", "pciHostDevices", "hostDevices"
_ALIAS = expression(r"[A-Za-z0-9_-]+")
_ASKS_CDEVS = "v1.9.0"
_FIRST_DRIVER = ("/k8s-dra-driver:v0.1.0", "/k8s-dra-driver:0.1.0")
_OLD, _GENERATES = Version(0, 0), Version(1, 28)
_EXTERNAL, _SELECTOR = "externalResourceProvider", "pciVendorSelector"
_OF_PLUGIN: dict[str, Any] = {_EXTERNAL: True}
"""What is known of a resource that KubeVirt's object does not list."""
_NOT_CHECKED = (
    "not checked: whether a plugin offers the resources (status.allocatable: kubectl describe node)"
)


class ClusterContext(Value):
    """An object, the others of its file, and the host."""

    host: HostSnapshot
    kubernetes: Version | None
    """The release of the host's kubelet."""
    item: OtherObject
    kubevirt: OtherObject | None
    has_old_map: bool
    """Whether the file has the ConfigMap kubevirt-config."""
    images: tuple[str, ...] = ()
    """Those of all pods of the file."""
    pools: tuple[dict[str, Any], ...] = ()
    """Those of the SR-IOV network device plugin in the file."""
    offered: tuple[OtherObject, ...] = ()
    """The PCIDevices and PCIDeviceClaims of Harvester in the file."""

    @property
    def devices(self) -> list[tuple[str, dict[str, Any]]]:
        """The list (`gpus`, `hostDevices`) of each device of a guest, and its entry."""
        base = (*_GUESTS.get(self.item.kind, ("",)), "domain", "devices")
        return [(key, e) for key in ("gpus", _LIST) for e in _entries(self.item, *base, key)]

    @property
    def requested(self) -> list[tuple[str, str]]:
        """The list and the resource of each device of a guest."""
        return [(key, str(e["deviceName"])) for key, e in self.devices if e.get("deviceName")]

    def permitted(self, *kinds: str) -> list[dict[str, Any]]:
        """What KubeVirt permits of some kinds."""
        base = ("spec", "configuration", _PERMITTED)
        return [entry for kind in kinds for entry in _entries(self.kubevirt, *base, kind)]


def _entries(item: OtherObject | None, *path: str) -> list[dict[str, Any]]:
    found = None if item is None else item.at(*path)
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


def _may(name: str, subject: object, what: str, *remedies: str | Remedy) -> Diagnostic:
    return chain_break(name, subject, what, *remedies, is_certain=False)


def _configuration(context: ClusterContext) -> Iterator[Diagnostic]:
    """The gate, and a ConfigMap that early KubeVirt read first (pkg/virt-config at 0.3x)."""
    item, kubevirt = context.item, context.kubevirt
    uses = item.kind == "KubeVirt" or _LIST in dict(context.requested)
    if kubevirt is None:
        return
    if context.has_old_map:
        yield _may(
            "kubevirt-configmap",
            "kubevirt-config",
            "the ConfigMap kubevirt-config overrides spec.configuration of KubeVirt, with its "
            f"{_PERMITTED}, in the releases that read it",
            "kubectl delete configmap -n kubevirt kubevirt-config (delete the ConfigMap), and "
            f"write its settings into {'.'.join(_GATES)}",
        )
    elif uses and _GATE not in (kubevirt.at(*_GATES) or ()):
        yield _may(
            "kubevirt-gate",
            _GATE,
            f"featureGates of KubeVirt lack {_GATE}: it refuses hostDevices unless this release "
            "enables the gate by default",
            f"add {_GATE} to {'.'.join(_GATES)}",
        )


def _permitted(context: ClusterContext) -> Iterator[Diagnostic]:
    """The resources that KubeVirt permits, also those of mediated devices and USB."""
    if context.kubevirt is None:
        return
    known = context.permitted(_PCI, "mediatedDevices", "usb")
    bound = dict.fromkeys(_selector(d).upper() for d in context.host.devices if d.is_on_vfio)
    remedy = (
        f"add an entry below {_PERMITTED}.{_PCI}, with resourceName and pciVendorSelector (on "
        f"vfio-pci here: {', '.join(bound) or 'none'})"
    )
    if context.item.kind == "KubeVirt" and not known:
        what = f"{_PERMITTED} is empty: KubeVirt refuses guests with host devices"
        yield _may("kubevirt-permitted", _PERMITTED, what, remedy)
    names = {entry.get("resourceName") for entry in known}
    for name in dict.fromkeys(name for _, name in context.requested if name not in names):
        what = f"{_PERMITTED} of KubeVirt does not have {name}: it refuses the guest"
        yield chain_break("kubevirt-permitted", name, what, _enabled(context, name) or remedy)


def _enabled(context: ClusterContext, name: str) -> str:
    """The remedy of Harvester, whose controller writes the list for the devices that it claims."""
    at = {o.at("status", "resourceName"): str(o.at("status", "address")) for o in context.offered}
    device = context.host.device_named(at.get(name, ""))
    members = [] if device is None else context.host.group_members(device.iommu_group)
    functions = ", ".join(str(each.address) for each in members if not each.is_bridge)
    return (
        f"enable passthrough in Harvester for all functions of the IOMMU group ({functions}): a "
        f"PCIDeviceClaim for each, which writes {_PERMITTED}"
        if functions
        else ""
    )


def _device_names(context: ClusterContext) -> Iterator[Diagnostic]:
    """KubeVirt makes libvirt's alias of the name of a device (pkg/virt-launcher, hostdevice).

    An alias has letters, digits, - and _ (USER_ALIAS_CHARS in libvirt's domain_conf.c);
    harvester/harvester#10517, kubevirt/kubevirt#16043.
    """
    for kind, entry in context.devices:
        name = str(entry.get("name", ""))
        if name and not _ALIAS.fullmatch(name):
            yield _may(
                "kubevirt-device-name",
                name,
                f"the name of a device in {kind} has other characters than letters, digits, - and "
                f"_: {name}; KubeVirt makes libvirt's alias of it, and the guest may end at its "
                "start",
                f"change the name in {kind}",
                "on Harvester, which puts the host name of the node first, give the node a host "
                "name without a dot"
                if "." in name
                else "",
            )


def _with_ids(context: ClusterContext, name: object) -> list[PciDevice]:
    """The functions with the IDs that KubeVirt permits for a resource."""
    entries = (e for e in context.permitted(_PCI) if e.get("resourceName") == name)
    wanted = {str(entry.get(_SELECTOR)).lower() for entry in entries}
    return [device for device in context.host.devices if _selector(device) in wanted]


def _of_harvester(context: ClusterContext) -> Iterator[Diagnostic]:
    pod = context.item.at(*_GUESTS.get(context.item.kind, ("",)))
    for _, entry in context.devices if isinstance(pod, dict) else ():
        same = _with_ids(context, entry.get("deviceName"))
        yield from harvester.findings(context.host, pod, entry, context.offered, same)


def _companions(context: ClusterContext) -> Iterator[Diagnostic]:
    """NVIDIA's plugin lists all functions of a group, and KubeVirt takes addresses in turn.

    Allocate of NVIDIA/kubevirt-gpu-device-plugin before its pull request 191 of July 2026.
    """
    counts, host = Counter(name for _, name in context.requested), context.host
    external = {e.get("resourceName") for e in context.permitted(_PCI) if e.get(_EXTERNAL) is True}
    for name, count in counts.items():
        gpus = _with_ids(context, name)
        members = (m for gpu in gpus for m in host.group_members(gpu.iommu_group) if m not in gpus)
        other = next((m for m in members if not m.is_bridge), None)
        is_of_plugin = name in external and name.startswith("nvidia.com/") and not context.offered
        if other is not None and is_of_plugin and count > 1:
            yield _may(
                "plugin-companions",
                name,
                f"the guest has {count} of {name}: NVIDIA's plugin of before July 2026 lists all "
                "functions of a GPU's group, and KubeVirt takes them in turn, so that "
                f"{other} may take the place of a GPU",
                "use a newer kubevirt-gpu-device-plugin, one GPU for each guest, or KubeVirt's own "
                f"plugin ({_EXTERNAL}: false)",
            )


def _selector(device: PciDevice) -> str:
    return f"{device.vendor_id}:{device.device_id}".lower()


def _of_host_driver(context: ClusterContext) -> Iterator[Diagnostic]:
    """A resource of containers on the host's kernel: its plugin gives a guest no VFIO device."""
    for name in dict.fromkeys(name for _, name in context.requested):
        for device in on_host_driver(context.host, name)[:1]:
            plugin = "nvidia.com/MODEL of NVIDIA's kubevirt-gpu-device-plugin, or "
            yield chain_break(
                "pod-host-resource",
                name,
                f"{name} is the resource of a device plugin for the driver {device.driver}: a "
                "guest of KubeVirt gets no VFIO device from it",
                f"bind the device to vfio-pci (vfiomgr bind {device.address}) and request a "
                f"resource of VFIO devices: {plugin if device.vendor_id == _NVIDIA else ''}one of "
                f"KubeVirt's own plugin ({_PERMITTED})",
                evidence=(f"{device} is on {device.driver}",),
            )


def _not_bound(context: ClusterContext) -> Iterator[Diagnostic]:
    """Functions that KubeVirt's own plugin does not offer: it takes those on vfio-pci."""
    for entry in context.permitted(_PCI):
        wanted = str(entry.get(_SELECTOR)).lower()
        found = [d for d in context.host.devices if _selector(d) == wanted]
        is_bound = any(device.is_on_vfio for device in found)
        if found and not is_bound and entry.get(_EXTERNAL) is not True:
            address, driver = found[0].address, found[0].driver or "no driver"
            yield _may(
                "kubevirt-not-bound",
                address,
                f"{entry.get('resourceName')}: KubeVirt offers functions on vfio-pci only, and "
                f"{address} is on {driver}",
                bind_remedy(f"vfiomgr bind {address} --persist", found[:1], persist=True),
            )


def _cdevs(context: ClusterContext) -> Iterator[Diagnostic]:
    """A release that passes character devices of VFIO that it does not look for.

    formatVFIOCdevDeviceSpecs in pkg/virt-handler/device-manager; kubevirt/kubevirt#18905.
    """
    kubevirt, host = context.kubevirt, context.host
    version = "" if kubevirt is None else str(kubevirt.at("status", "observedKubeVirtVersion"))
    is_asked = context.item.kind == "KubeVirt" or context.requested
    if not is_asked or not version.startswith(_ASKS_CDEVS) or host.vfio.has_cdevs is not False:
        return
    for device in [d for d in host.devices if d.is_on_vfio and d.vfio_device][:1]:
        yield _may(
            "kubevirt-cdev",
            device.address,
            f"KubeVirt {version} asks for /dev/vfio/devices/{device.vfio_device}, and the kernel "
            "has no character devices of VFIO (CONFIG_VFIO_DEVICE_CDEV): guests stay in "
            "CreateContainerError",
            "use a later KubeVirt than 1.9.0, or 1.8",
            "boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV",
        )


def _names(context: ClusterContext) -> Iterator[Diagnostic]:
    """Names that NVIDIA's plugin gives a model: by pci.ids in its image, else the device ID.

    Nothing is said if the pci.ids of this host lacks one of its models.
    """
    nvidia = (d for d in context.host.devices if d.vendor_id == _NVIDIA)
    gpus = [device for device in nvidia if device.class_code.startswith(CLASS_DISPLAY)]
    models = dict.fromkeys(f"nvidia.com/{kind_of_model(device).name}" for device in gpus)
    is_named = all(not n.lower().endswith(f"_{d.device_id}") for n in models for d in gpus)
    ids = {_selector(device) for device in gpus}
    known = {name.lower() for name in models} | {f"nvidia.com/{d.device_id}" for d in gpus}
    permitted = {str(e.get("resourceName")): e for e in context.permitted(_PCI)}
    for name in dict.fromkeys([*(name for _, name in context.requested), *permitted]):
        domain, _, model = name.partition("/")
        is_model = domain == "nvidia.com" and "-" not in model and model != model.lower()
        entry = permitted.get(name, _OF_PLUGIN)
        is_own = bool(context.offered) or entry.get(_EXTERNAL) is not True  # Harvester, KubeVirt
        is_own = is_own or str(entry.get(_SELECTOR, min(ids, default=""))).lower() not in ids
        if gpus and is_named and is_model and not is_own and name.lower() not in known:
            yield _may(
                "resource-name",
                name,
                f"NVIDIA's plugin offers {', '.join(models)} for the GPUs of this host, as its "
                f"pci.ids names them, not {name}",
                "use the name in status.allocatable of the node (kubectl describe node), in "
                f"{_PERMITTED} too",
            )


def _claim_config(context: ClusterContext) -> Iterator[Diagnostic]:
    """Claims of NVIDIA's driver for guests of KubeVirt (VfioDeviceConfig, resource.nvidia.com)."""
    text = str(context.item.data) if context.item.kind in _CLAIMS else ""
    is_whole = "'enableAPIDevice': True" in text and "'backendPolicy': 'LegacyOnly'" in text
    if _VFIO_CLASS in text and not is_whole:
        yield _may(
            "claim-config",
            context.item.name,
            "the claim does not set enableAPIDevice: true and backendPolicy: LegacyOnly: a guest "
            "of KubeVirt may get its group without /dev/vfio/vfio, or nodes of IOMMUFD, which "
            "early releases of KubeVirt do not use",
            "set them in config of the claim or its DeviceClass (opaque, driver gpu.nvidia.com, "
            "kind VfioDeviceConfig, iommu); the driver needs its gates PassthroughSupport and "
            "DeviceMetadata",
        )


def _driver(context: ClusterContext) -> Iterator[Diagnostic]:
    """NVIDIA's first driver, and claims with the names of later releases of Kubernetes.

    kubernetes-sigs/dra-driver-nvidia-gpu#46; its libraries were of 1.27 until cc750487.
    """
    image = next((image for image in context.images if image.endswith(_FIRST_DRIVER)), None)
    if image and context.item.kind == _CLAIMS[1] and (context.kubernetes or _OLD) >= _GENERATES:
        yield _may(
            "dra-driver-release",
            context.item.name,
            f"{image} may be older than Kubernetes 1.28, which generates the names of claims of a "
            f"template: with Kubernetes {context.kubernetes} the driver finds none of them",
            "use a later release of the driver (25.3 or later needs Kubernetes 1.32), or build it "
            "with k8s.io/dynamic-resource-allocation 0.28 or later",
        )


def _served(context: ClusterContext) -> Iterator[Diagnostic]:
    group, _, version = context.item.api_version.partition("/")
    node = context.kubernetes
    if node is None or group != _DRA_GROUP or version not in _DRA_APIS:
        return
    minor = Version(node.major, node.minor)
    served = [name for name, (a, b) in _DRA_APIS.items() if a <= minor <= b]
    if version not in served:
        yield _may(
            "claim-version",
            context.item.name,
            f"Kubernetes {node} of this node does not serve {group}/{version} (it serves "
            f"{', '.join(served) or 'no version'})",
            f"write apiVersion: {group}/{served[-1]}" if served else "",
            "use a driver and objects for this release of Kubernetes",
        )


def _pool(context: ClusterContext) -> Iterator[Diagnostic]:
    """The selectors of the SR-IOV network device plugin."""
    if context.item.kind == POOL:
        yield from unmatched(context.host, context.item.data, context.pools)


RULES: RuleSet[ClusterContext] = register(
    RuleSet(
        "objects of a cluster",
        rules=(
            rule(_configuration, "kubevirt-configmap", "kubevirt-gate"),
            rule(_permitted, "kubevirt-permitted"),
            rule(_device_names, "kubevirt-device-name"),
            rule(_of_harvester, "harvester-moved", "harvester-group", "harvester-node"),
            rule(_companions, "plugin-companions"),
            rule(_of_host_driver, "pod-host-resource"),
            rule(_not_bound, "kubevirt-not-bound"),
            rule(_cdevs, "kubevirt-cdev"),
            rule(_names, "resource-name"),
            rule(_claim_config, "claim-config"),
            rule(_driver, "dra-driver-release"),
            rule(_served, "claim-version"),
            rule(_pool, "pool-selectors"),
        ),
    )
)


def _what(context: ClusterContext) -> str:
    item = context.item
    if item.kind not in _GUESTS:
        return f"{item.kind} {item.name}" + (f"; {_NOT_CHECKED}" if item.kind == "KubeVirt" else "")
    names = Counter(name for _, name in context.requested)
    shown = (f"{name} ({count})" if count > 1 else name for name, count in names.items())
    told = f"requests {', '.join(shown) or 'no device'}; {_NOT_CHECKED}"
    if context.kubevirt is None:
        told += (
            f"; {_PERMITTED} and featureGates of KubeVirt (add its object to the file: kubectl "
            "get kubevirt -A -o yaml)"
        )
    variables = [f"PCI_RESOURCE_{name.upper()}" for name in names]
    if variables:
        told += (
            f"; with {_EXTERNAL} the plugin must also set {', '.join(variables)} (with _ for . and "
            f"/), which virt-launcher reads (else use a newer plugin, or {_EXTERNAL}: false for "
            "KubeVirt's own)"
        )
    return told


def traces(
    host: HostSnapshot,
    kubernetes: Version | None,
    others: tuple[OtherObject, ...],
    pods: tuple[PodSpec, ...],
) -> Iterator[KataTrace]:
    """What is judged of the objects of a file; beside pods or guests only those with problems."""
    kubevirt = next((each for each in others if each.kind == "KubeVirt"), None)
    has_old_map = any((o.kind, o.name) == ("ConfigMap", "kubevirt-config") for o in others)
    pools = tuple(each.data for each in others if each.kind == POOL)
    offered = tuple(each for each in others if each.kind in harvester.KINDS)
    images = tuple(each.image for pod in pods for each in pod.containers)
    has_guests = any(each.kind in _GUESTS for each in others)
    for item in others:
        is_claim = item.api_version.startswith(f"{_DRA_GROUP}/")
        is_setting = item.kind == "KubeVirt" and not has_guests
        if not (item.kind in (*_GUESTS, POOL) or is_claim or is_setting):
            continue
        context = ClusterContext(
            host, kubernetes, item, kubevirt, has_old_map, images, pools, offered
        )
        place, breaks = f"{item.source}:{item.line}", tuple(RULES.find(context))
        if breaks or item.kind in _GUESTS or not (pods or has_guests):
            fine: StepState = "ok" if item.kind == POOL else "unknown"
            step = judged("request", _what(context), (place,), breaks, fine)
            yield KataTrace(item.name, item.kind, item.source, item.line, steps=(step,))
