"""Objects of a cluster besides pods: virtual machines of KubeVirt, and claims of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.containers.resource_names import kind_of_model
from vfiomgr.kata.explain.context import KataTrace, chain_break, judged
from vfiomgr.kata.explain.pod import OtherObject
from vfiomgr.pci.model import CLASS_DISPLAY
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic

_GUESTS: dict[str, tuple[str, ...]] = {
    "VirtualMachineInstance": ("spec",),
    "VirtualMachine": ("spec", "template", "spec"),
    "VirtualMachineInstanceReplicaSet": ("spec", "template", "spec"),
    "VirtualMachinePool": ("spec", "virtualMachineTemplate", "spec", "template", "spec"),
}
_CLAIMS = {"ResourceClaim": ("spec",), "ResourceClaimTemplate": ("spec", "spec")}
_DRA_GROUP = "resource.k8s.io/"
_DRA_APIS: dict[str, tuple[Version, Version | None]] = {
    "v1alpha1": (Version(1, 26), Version(1, 26)),
    "v1alpha2": (Version(1, 27), Version(1, 30)),
    "v1alpha3": (Version(1, 31), Version(1, 32)),
    "v1beta1": (Version(1, 32), None),
    "v1beta2": (Version(1, 33), None),
    "v1": (Version(1, 34), None),
}
"""The releases of Kubernetes that serve claims in each version (pkg/apis/resource at the tags)."""
_GATE, _NVIDIA, _VFIO_CLASS = "HostDevices", "10de", "vfio.gpu.nvidia.com"
_PERMITTED = "permittedHostDevices"
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

    @property
    def permitted(self) -> list[dict[str, Any]]:
        """The PCI devices that KubeVirt permits."""
        found = self._configuration(_PERMITTED, "pciHostDevices")
        return [entry for entry in found or () if isinstance(entry, dict)]

    @property
    def requested(self) -> list[tuple[str, str]]:
        """The list (`gpus`, `hostDevices`) and the resource of each device of a guest."""
        place = _GUESTS.get(self.item.kind)
        devices = self.item.at(*place, "domain", "devices") if place else None
        devices = devices if isinstance(devices, dict) else {}
        entries = ((key, entry) for key in ("gpus", "hostDevices") for entry in _list(devices, key))
        return [(key, str(e["deviceName"])) for key, e in entries if e.get("deviceName")]

    @property
    def permitted_names(self) -> set[str]:
        """The resources that KubeVirt permits, also those of mediated devices and USB."""
        kinds = ("pciHostDevices", "mediatedDevices", "usb")
        lists = (self._configuration(_PERMITTED, kind) or () for kind in kinds)
        return {str(e.get("resourceName")) for each in lists for e in each if isinstance(e, dict)}

    @property
    def has_gate(self) -> bool:
        """Whether KubeVirt's gate for host devices is set."""
        return _GATE in (self._configuration("developerConfiguration", "featureGates") or ())

    def _configuration(self, *path: str) -> Any:  # noqa: ANN401 - as YAML has it
        return self.kubevirt and self.kubevirt.at("spec", "configuration", *path)


def _list(mapping: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = mapping.get(key)
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


def _configmap(context: ClusterContext) -> Iterator[Diagnostic]:
    """Early KubeVirt read its configuration from a ConfigMap first (virt-config at 0.3x)."""
    if context.kubevirt is not None and context.has_old_map:
        yield chain_break(
            "kubevirt-configmap",
            "kubevirt-config",
            "the ConfigMap kubevirt-config overrides spec.configuration of KubeVirt, with its "
            f"{_PERMITTED}, in the releases that read it",
            "kubectl delete configmap -n kubevirt kubevirt-config (delete the ConfigMap), and "
            "write its settings into spec.configuration.developerConfiguration.featureGates",
            is_certain=False,
        )


def _gate(context: ClusterContext) -> Iterator[Diagnostic]:
    uses = context.item.kind == "KubeVirt" or any(k == "hostDevices" for k, _ in context.requested)
    if uses and context.kubevirt is not None and not context.has_gate and not context.has_old_map:
        yield chain_break(
            "kubevirt-gate",
            _GATE,
            f"featureGates of KubeVirt lack {_GATE}: it refuses hostDevices unless this release "
            "enables the gate by default",
            f"add {_GATE} to spec.configuration.developerConfiguration.featureGates",
            is_certain=False,
        )


def _permitted(context: ClusterContext) -> Iterator[Diagnostic]:
    if context.kubevirt is None:
        return
    vfio = dict.fromkeys(
        f"{d.vendor_id}:{d.device_id}".upper() for d in context.host.devices if d.is_on_vfio
    )
    how = f"add an entry below {_PERMITTED}.pciHostDevices, with resourceName and"
    selector = f"{how} pciVendorSelector (on vfio-pci here: {', '.join(vfio) or 'none'})"
    if context.item.kind == "KubeVirt" and not context.permitted_names:
        what = f"{_PERMITTED} is empty: KubeVirt refuses guests with host devices"
        yield chain_break("kubevirt-permitted", _PERMITTED, what, selector, is_certain=False)
    for name in dict.fromkeys(name for _, name in context.requested):
        if name not in context.permitted_names:
            what = f"{_PERMITTED} of KubeVirt does not have {name}: it refuses the guest"
            yield chain_break("kubevirt-permitted", name, what, selector)


def _selectors(context: ClusterContext) -> Iterator[Diagnostic]:
    """Functions that KubeVirt's own plugin does not offer: it takes those on vfio-pci."""
    for entry in context.permitted:
        name = str(entry.get("resourceName"))
        if context.item.kind != "KubeVirt" and name not in [n for _, n in context.requested]:
            continue
        selector = str(entry.get("pciVendorSelector")).lower()
        found = [
            d for d in context.host.devices if f"{d.vendor_id}:{d.device_id}".lower() == selector
        ]
        host_bound = [d for d in found if not d.is_on_vfio]
        if (
            entry.get("externalResourceProvider") is not True
            and found
            and len(host_bound) == len(found)
        ):
            first = host_bound[0]
            yield chain_break(
                "kubevirt-not-bound",
                first.address,
                f"{name}: KubeVirt offers functions on vfio-pci only, and {first.address} is on "
                f"{first.driver or 'no driver'}",
                f"vfiomgr bind {first.address} --persist",
                is_certain=False,
            )


def _names(context: ClusterContext) -> Iterator[Diagnostic]:
    """Names that NVIDIA's plugin gives a model: by pci.ids in its image, else the device ID.

    Nothing is said if the pci.ids of this host lacks one of its models.
    """
    own = [e for e in context.permitted if e.get("externalResourceProvider") is not True]
    free = {str(entry.get("resourceName")) for entry in own}
    models = {
        device.device_id.lower(): f"nvidia.com/{kind_of_model(device).name}"
        for device in context.host.devices
        if device.vendor_id == _NVIDIA and device.class_code.startswith(CLASS_DISPLAY)
    }
    named = {i: n for i, n in models.items() if not n.lower().endswith(f"_{i}")}
    requested = [name for _, name in context.requested]
    known = {str(entry.get("resourceName")) for entry in context.permitted} - free
    for name in dict.fromkeys([*requested, *sorted(known)]):
        domain, _, model = name.partition("/")
        offered = {each.lower() for each in (*free, *named.values())}
        is_model = domain == "nvidia.com" and "-" not in model and model != model.lower()
        if (
            not is_model
            or named != models
            or not named
            or name.lower() in offered
            or model.lower() in models
        ):
            continue
        yield chain_break(
            "resource-name",
            name,
            f"NVIDIA's plugin offers {', '.join(dict.fromkeys(named.values()))} for the GPUs of "
            f"this host, as its pci.ids names them, not {name}",
            "use the name in status.allocatable of the node (kubectl describe node), in "
            f"{_PERMITTED} too",
            is_certain=False,
        )


def _claim_config(context: ClusterContext) -> Iterator[Diagnostic]:
    """Claims of NVIDIA's driver for guests of KubeVirt (VfioDeviceConfig, resource.nvidia.com)."""
    devices = context.item.at(*_CLAIMS.get(context.item.kind, ()), "devices")
    if context.item.kind not in _CLAIMS or _VFIO_CLASS not in str(devices):
        return
    text = str(devices)
    is_whole = "'enableAPIDevice': True" in text and "'backendPolicy': 'LegacyOnly'" in text
    if not is_whole:
        yield chain_break(
            "claim-config",
            context.item.name,
            "the claim does not set enableAPIDevice: true and backendPolicy: LegacyOnly: a guest "
            "of KubeVirt may get its group without /dev/vfio/vfio, or nodes of IOMMUFD, which "
            "early releases of KubeVirt do not use",
            "set them in config of the claim or its DeviceClass (opaque, driver gpu.nvidia.com, "
            "kind VfioDeviceConfig, iommu); the driver needs its gates PassthroughSupport and "
            "DeviceMetadata",
            is_certain=False,
        )


def _served(context: ClusterContext) -> Iterator[Diagnostic]:
    version, node = context.item.api_version.removeprefix(_DRA_GROUP), context.kubernetes
    if node is None or not context.item.api_version.startswith(_DRA_GROUP):
        return
    minor = Version(node.major, node.minor)
    served = [
        name
        for name, (first, last) in _DRA_APIS.items()
        if first <= minor and (last is None or minor <= last)
    ]
    if version in _DRA_APIS and version not in served:
        yield chain_break(
            "claim-version",
            context.item.name,
            f"Kubernetes {node} of this node does not serve {_DRA_GROUP}{version} (it serves "
            f"{', '.join(served) or 'no version'})",
            f"write apiVersion: {_DRA_GROUP}{served[-1]}" if served else "",
            "use a driver and objects for this release of Kubernetes",
            is_certain=False,
        )


RULES: RuleSet[ClusterContext] = register(
    RuleSet(
        "objects of a cluster",
        rules=(
            rule(_configmap, "kubevirt-configmap"),
            rule(_gate, "kubevirt-gate"),
            rule(_permitted, "kubevirt-permitted"),
            rule(_selectors, "kubevirt-not-bound"),
            rule(_names, "resource-name"),
            rule(_claim_config, "claim-config"),
            rule(_served, "claim-version"),
        ),
    )
)


def _what(context: ClusterContext) -> str:
    item = context.item
    if item.kind not in _GUESTS:
        return f"{item.kind} {item.name}" + (f"; {_NOT_CHECKED}" if item.kind == "KubeVirt" else "")
    names = [name for _, name in context.requested]
    told = f"requests {', '.join(names) or 'no device'}; {_NOT_CHECKED}"
    if context.kubevirt is None:
        told += (
            f"; {_PERMITTED} and featureGates of KubeVirt (add its object to the file: kubectl "
            "get kubevirt -A -o yaml)"
        )
    variables = [f"PCI_RESOURCE_{name.upper().translate(_TO_VARIABLE)}" for name in names]
    if variables:
        told += (
            f"; with externalResourceProvider the plugin must also set {', '.join(variables)}, "
            "which virt-launcher reads (else use a newer plugin, or externalResourceProvider: "
            "false for KubeVirt's own)"
        )
    return told


_TO_VARIABLE = str.maketrans("./-", "___")


def traces(
    host: HostSnapshot, kubernetes: Version | None, others: tuple[OtherObject, ...], *, pods: bool
) -> Iterator[KataTrace]:
    """What is judged of the objects of a file; beside pods or guests only those with problems."""
    kubevirt = next((each for each in others if each.kind == "KubeVirt"), None)
    has_old_map = any((o.kind, o.name) == ("ConfigMap", "kubevirt-config") for o in others)
    has_guests = any(each.kind in _GUESTS for each in others)
    for item in others:
        is_claim = item.api_version.startswith(_DRA_GROUP)
        is_setting = item.kind == "KubeVirt" and not has_guests
        if not (item.kind in _GUESTS or is_claim or is_setting):
            continue
        context = ClusterContext(host, kubernetes, item, kubevirt, has_old_map)
        place, breaks = f"{item.source}:{item.line}", tuple(RULES.find(context))
        if breaks or item.kind in _GUESTS or not (pods or has_guests):
            step = judged("request", _what(context), (place,), breaks, "unknown")
            yield KataTrace(
                pod=item.name,
                kind=item.kind,
                source=item.source,
                line=item.line,
                handler=None,
                release="",
                release_source="",
                steps=(step,),
                devices=(),
                differences=(),
            )
