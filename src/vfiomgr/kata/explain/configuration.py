"""The settings for devices in Kata's configuration, and annotations that change them.

Annotations in src/runtime/virtcontainers/pkg/annotations/annotations.go, addAnnotations in
src/runtime/pkg/oci/utils.go, update_config_by_annotation in
src/libs/kata-types/src/annotations/mod.rs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.kata.check import check_keys, container_timeout
from vfiomgr.kata.explain import releases
from vfiomgr.kata.explain.context import (
    KUBELET_TIMEOUT,
    ON_ROOT_BUS,
    Q35,
    SETTINGS,
    PodContext,
    chain_break,
    judged,
)
from vfiomgr.kata.explain.pod import KATA_ANNOTATION
from vfiomgr.kata.facts import GUEST_KERNEL, NO_PORT, VFIO_MODES, KataSettings
from vfiomgr.kata.model import (
    AGENT_WAITS,
    LEAST_GUEST_MIB,
    MAX_PORTS,
    ROOT_PORTS_SINCE,
    KataRelease,
    is_cdi_gpu,
)
from vfiomgr.rules.runner import RuleSet, reading, register, rule
from vfiomgr.units import Version, counted, size

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext, TraceStep
    from vfiomgr.kata.model import KeyType
    from vfiomgr.paths import HostPath

COLD_PLUG, HOT_PLUG = "cold_plug_vfio", "hot_plug_vfio"
HYPERVISOR_ANNOTATION = "io.katacontainers.config.hypervisor."
_VFIO_MODE = f"{KATA_ANNOTATION}runtime.vfio_mode"
_PORTS, _PORT_LIMIT = ("pcie_root_port", "pcie_switch_port"), Version(3, 17)
"""Annotations that runtime-rs limits to MAX_PORTS, and the release that introduced the check."""
_PC_WINDOW = 2 << 30
_MANY_SECONDS = 600
_AGENT_TIMEOUT, _FEW_GPUS = "agent.cdi_timeout", 4
"""The agent's parameter, and how many GPUs are ready in time without it."""
_KERNEL_PARAMS, _MEMORY = "kernel_params", "default_memory"
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_UNKNOWN_KEY, _NO_IOMMU = "kata-unknown-key", "kata-vfio-without-iommu"
_DROP_IN_KEYS = ("kata-drop-in-key-ignored", "kata-drop-in-key-refused")


def configuration(context: PodContext) -> TraceStep:
    """The configuration, and how it plugs devices."""
    facts, settings = context.configuration, context.settings
    breaks = RULES.find(context)
    if settings is None:
        why = facts.problem or "no readable configuration"
        what = f"cannot find Kata's configuration: {why}"
        return judged("configuration", what, facts.looked_for, breaks, "unknown")
    read = (str(settings.path), *map(str, settings.drop_ins))
    port = context.cold_plug
    plugged = f"devices are plugged before the guest starts ({COLD_PLUG} = {port})"
    if not context.release.has_plug_keys:
        plugged = "devices are plugged with their container: this release has no other way"
    elif context.is_hot and port == NO_PORT:
        plugged = f"devices are plugged with their container ({HOT_PLUG} = {settings.hot_plug})"
    elif port == NO_PORT:
        plugged = f"no device is plugged ({COLD_PLUG} = {port})"
    what = f"{plugged}, vfio_mode {settings.vfio_mode}"
    kubelet = context.kubelet
    is_open = kubelet is not None and bool(kubelet.problem)
    if kubelet is not None and is_open:
        what += f"; the timeout of the kubelet is unknown: {kubelet.problem}"
    return judged("configuration", what, read, breaks, "unknown" if is_open else "ok")


def _unusable(context: PodContext) -> Iterator[Diagnostic]:
    """A configuration of the handler that does not exist or is not readable."""
    facts, entry = context.configuration, context.entry
    if context.settings is not None:
        return
    if facts.file is not None:
        path, remedy = facts.file.path, "correct it: every pod of the handler fails until then"
        what = f"cannot read {path}: {facts.problem}"
        yield chain_break("kata-configuration-unreadable", path, what, remedy)
    elif entry is not None and entry.config_path in facts.looked_for:
        yield chain_break(
            "kata-configuration-missing",
            entry.config_path,
            f"{entry.config_path} does not exist, but {entry.source} names it for {entry.name}: "
            "every pod of the handler fails",
            f"vfiomgr kata config --whole BASE --output {shlex.quote(entry.config_path)}",
        )


def _asked(context: PodContext) -> list[str]:
    """The device plug keys that annotations of the pod set."""
    keys = {HYPERVISOR_ANNOTATION + key: key for key in (COLD_PLUG, HOT_PLUG)}
    return [keys[name] for name, _ in context.pod.annotations if name in keys]


def _mismatched(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """A shim with a configuration of the other runtime."""
    shim, own = context.shim_runtime, settings.stated_runtime
    if shim is None or own is None or shim == own:
        return
    names = {"rs": "runtime-rs", "go": "the Go runtime"}
    has = "has a hypervisor_name" if own == "rs" else "has no hypervisor_name"
    entry = context.entry
    where = "" if entry is None else f" (vfiomgr runtime install {shlex.quote(entry.name)} --kata)"
    yield chain_break(
        "kata-configuration-other-runtime",
        settings.path,
        f"the handler has the shim of {names[shim]}, but {settings.path} is for {names[own]}: "
        f"[runtime] {has}",
        f"use a configuration for {names[shim]}, or the shim of {names[own]}{where}",
        is_certain=False,
    )


def _annotated_blindly(context: PodContext) -> Iterator[Diagnostic]:
    """Number 1, if the configuration is unknown, so that the annotation may have no effect."""
    for key in _asked(context) if context.settings is None else ():
        remedy = f"set {key} in the configuration: vfiomgr kata config"
        yield chain_break(
            "kata-annotation-alone",
            key,
            f"{key} is annotated; it has no effect unless the configuration sets it too, because "
            "Kata looks for devices before it reads annotations",
            remedy if context.release.knows("hypervisor", key) else "remove the annotation",
            is_certain=False,
        )


def _annotated(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 1: CDI names are resolved with the file's settings, before annotations are read."""
    for key in _asked(context):
        annotation = HYPERVISOR_ANNOTATION + key
        remedy = "remove the annotation"
        if context.release.knows("hypervisor", key):
            remedy += f", and set {key} in {settings.path}: vfiomgr kata config"
        allowed = settings.allows_annotation(key)
        in_file = settings.hypervisor_text(key) or NO_PORT
        if context.is_rs and allowed:
            yield not_known(annotation, remedy)
        elif not context.is_rs and not allowed:
            yield not_enabled(annotation, remedy)
        elif not context.release.knows("hypervisor", key):
            what = f"{context.release} does not support annotation {annotation}, and ignores it"
            yield chain_break("kata-annotation-unknown", annotation, what, remedy, is_certain=False)
        elif key == COLD_PLUG and in_file == NO_PORT:
            how = "runtime-rs ignores it" if context.is_rs else "Kata looks for devices before it"
            what = f"{key} is only set by annotation, and {how}: no device is injected"
            yield chain_break("kata-annotation-alone", annotation, what, remedy)


def _plugging(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    if settings.cold_plug != NO_PORT and not context.release.has_plug_keys:
        yield _no_cold_plug(context.release)
    has_port = context.cold_plug != NO_PORT or context.is_hot
    if has_port or _asked(context) or not context.requests_devices:
        return
    hot = f"; runtime-rs ignores {HOT_PLUG}" if settings.hot_plug != NO_PORT else ""
    what = (
        f"{settings.path} sets {COLD_PLUG} = no-port{hot}: devices are not plugged into the guest"
    )
    if releases.NETWORKS in dict(context.pod.annotations):
        what += "; a virtual function of the pod's network may be left on vfio-pci"
    ports = "" if settings.root_ports else " and pcie_root_port to the number of devices"
    remedy = f"set {COLD_PLUG} = root-port{ports}; vfiomgr kata config prints a drop-in for it"
    if context.is_rs:
        yield chain_break("kata-not-plugged-silently", settings.path, what, remedy)
    else:
        issue = ("kata-containers/kata-containers#9014",)
        yield chain_break("kata-not-plugged", settings.path, what, remedy, evidence=issue)


def _no_cold_plug(release: KataRelease) -> Diagnostic:
    """The key is ignored: devices with nodes in a container are plugged when it starts."""
    first = release.first("hypervisor", COLD_PLUG)
    what = (
        f"{release} does not support {COLD_PLUG} (added in {first}): it plugs devices when their "
        "container starts"
    )
    remedy = f"remove it, or use Kata {first} or later"
    if KataRelease(release.version, "go" if release.runtime == "rs" else "rs").has_plug_keys:
        remedy += ", or its other runtime"
    return chain_break("kata-no-cold-plug", COLD_PLUG, what, remedy, is_certain=False)


def _too_few_root_ports(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Ports of the Go runtime before 3.2, which creates pcie_root_port of them and no more.

    On the root bus of q35 QEMU can only plug into a port; "Bus 'pcie.0' does not support
    hotplugging", or "Bus 'rp0' not found" (hotplugVFIODevice in virtcontainers/qemu.go at 2.x).
    """
    if not context.is_on_root_bus or settings.machine_type != Q35:
        return
    known = len({device for each in context.picked for device in each.functions})
    needed = max(known, sum(item.count for item in context.requests), 1)
    ports = settings.root_ports if context.release.version >= ROOT_PORTS_SINCE else 0
    if context.requests and ports < needed and (known or not ports):
        yield chain_break(
            "kata-too-few-ports",
            settings.path,
            f"{ON_ROOT_BUS} is set, and {settings.path} gives {ports or 'no'} root "
            f"{'port' if ports == 1 else 'ports'} (pcie_root_port): QEMU cannot plug "
            f"{counted(needed, 'device')} into the root bus of {Q35}",
            _root_port_keys(context.release, needed, settings),
            is_certain=known > ports,
        )


def _large_bars(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """BARs that the machine pc cannot place: its 64-bit window has 2 GiB.

    I440FX_PCI_HOST_HOLE64_SIZE_DEFAULT in hw/pci-host/i440fx.c of QEMU; reported in
    kata-containers/runtime#2432.
    """
    if not context.is_early_go or settings.machine_type != "pc":
        return
    functions = dict.fromkeys(device for each in context.picked for device in each.functions)
    for device in functions:
        largest = max((bar.size for bar in device.bars), default=0)
        if largest > _PC_WINDOW:
            yield chain_break(
                "kata-machine-type",
                device.address,
                f"machine_type is pc, whose guests have no room for a BAR of {size(largest)} "
                f"({device.address}): it stays unassigned, and the driver does not load",
                _root_port_keys(context.release, len(functions), settings),
            )


def _root_port_keys(release: KataRelease, count: int, settings: KataSettings) -> str:
    """The keys that give devices root ports before cold_plug_vfio, or the release with them."""
    missing = [] if settings.machine_type == Q35 else [f'machine_type = "{Q35}"']
    if settings.value(f"hypervisor.{settings.hypervisor}", ON_ROOT_BUS) is not True:
        missing.append(f"{ON_ROOT_BUS} = true")
    told = ", ".join([*missing, f"pcie_root_port = {count}"])
    if release.version >= ROOT_PORTS_SINCE:
        return f"set {told} in {settings.path}"
    return f"use Kata {ROOT_PORTS_SINCE} or later, with {told} in {settings.path}"


def _refused(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """What Kata refuses in the combined settings, and keys that it refuses in its own file."""
    release, name = context.release, settings.path
    (_, own), *_ = context.configuration.documents
    found = [f for f in check_keys(settings.document, release) if f.rule != _UNKNOWN_KEY]
    found += [f for f in check_keys(own, release) if f.rule == _UNKNOWN_KEY]
    for finding in found:
        if finding.severity == "blocker" or finding.rule == _NO_IOMMU:
            yield replace(finding, summary=f"{name}: {finding.summary}", evidence=())


def _drop_ins(context: PodContext, _settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 6: all files of config.d apply to all configurations beside it."""
    documents = context.configuration.documents
    for number, (path, document) in enumerate(documents[1:], 1):
        if not path.endswith(".toml"):
            yield _stray(path, document, [d for p, d in documents if p != path])
        for found in check_keys(document, context.release, is_drop_in=True):
            if found.rule == _UNKNOWN_KEY and found.severity != "info":
                name = _DROP_IN_KEYS[found.severity == "blocker"]
                yield replace(found, rule=name, summary=f"{path}: {found.summary}", evidence=())
        yield from _kernel_params(path, document, [d for _, d in documents[:number]])
    file = context.configuration.file
    if file is not None and file.drop_ins and file.neighbours:
        yield chain_break(
            "kata-drop-ins-shared",
            file.drop_in_directory,
            f"{file.drop_in_directory} also applies to {', '.join(map(str, file.neighbours))}: "
            "configurations in one directory share their drop-ins",
            "give the handler its own directory, as vfiomgr runtime install --kata does",
            is_certain=False,
        )


def _stray(
    path: HostPath, document: Mapping[str, Any], others: list[Mapping[str, Any]]
) -> Diagnostic:
    known = {key: value for other in others for key, value in _leaves(other)}
    changed = [key[-1] for key, value in _leaves(document) if known.get(key) != value]
    does = f"it overrides {', '.join(changed)}" if changed else "it currently changes nothing"
    return chain_break(
        "kata-drop-in-ending",
        path,
        f"{path} is read too, whatever its suffix: {does}",
        f"move it out of {path.parent}",
        is_certain=bool(changed),
    )


def _leaves(
    document: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _kernel_params(
    path: HostPath, document: Mapping[str, Any], before: list[Mapping[str, Any]]
) -> Iterator[Diagnostic]:
    """A string replaces the previous one."""
    for key, value in _leaves(document):
        if key[-1] != "kernel_params" or not isinstance(value, str):
            continue
        old = [v for d in before for k, v in _leaves(d) if k == key and isinstance(v, str)]
        lost = [word for word in (old[-1] if old else "").split() if word not in value.split()]
        if lost:
            yield chain_break(
                "kata-kernel-params-replaced",
                path,
                f"kernel_params in {path} replaces the previous one, so {' '.join(lost)} is lost",
                f"add the lost parameters to {path}",
                is_certain=False,
            )


def _timeouts(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 10."""
    key, timeout = container_timeout(context.release, settings)
    kubelet = context.kubelet
    limit = KUBELET_TIMEOUT if kubelet is None else kubelet.request_timeout
    is_unknown = kubelet is not None and bool(kubelet.problem)
    if limit >= timeout or is_unknown or not context.requests_devices:
        return
    source = "by default" if kubelet is None else f"in {kubelet.source}"
    yield chain_break(
        "kata-kubelet-timeout",
        key,
        f"the kubelet times out after {limit:g} s (runtimeRequestTimeout {source}), before "
        f"Kata's {key} of {timeout:g} s: guests with much pinned memory or a large image may "
        "need longer",
        f"set runtimeRequestTimeout: {timeout:g}s in the kubelet's configuration, and restart "
        "the kubelet",
        is_certain=False,
    )


def _agent_timeout(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """The agent's wait for the guest's CDI specification, which comes after all GPUs are ready.

    100 seconds by default, too few for eight GPUs (kata-containers/kata-containers#10891).
    """
    gpus = {device for each in context.picked for device in each.functions if is_cdi_gpu(device)}
    is_set = _AGENT_TIMEOUT in settings.kernel_params or context.release.version < AGENT_WAITS
    if is_set or len(gpus) <= _FEW_GPUS or settings.vfio_mode != GUEST_KERNEL:
        return
    key, timeout = container_timeout(context.release, settings)
    limit = KUBELET_TIMEOUT if context.kubelet is None else context.kubelet.request_timeout
    short = [key] if timeout < _MANY_SECONDS else []
    short += ["the kubelet's runtimeRequestTimeout"] if limit < _MANY_SECONDS else []
    also = f", and set {' and '.join(short)} to 10 minutes or more" if short else ""
    yield chain_break(
        "kata-agent-timeout",
        _AGENT_TIMEOUT,
        f"the guest's agent waits 100 s for the CDI specification of {len(gpus)} GPUs "
        f"({_AGENT_TIMEOUT} is not in kernel_params), and Kata {timeout:g} s ({key}): guests with "
        "many GPUs need longer",
        f"add {_AGENT_TIMEOUT}={_MANY_SECONDS} to kernel_params{also}",
        is_certain=False,
        evidence=("kata-containers/kata-containers#10891",),
    )


def annotation_breaks(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """What Kata refuses or ignores in annotations, except COLD_PLUG and HOT_PLUG."""
    for name, value in _hypervisor_annotations(context):
        yield from _hypervisor_breaks(context, settings, name, value)
    mode = context.pod.annotation(_VFIO_MODE)
    if mode is None:
        return
    remedy = f"remove the annotation {_VFIO_MODE}: containers need guest-kernel"
    if mode not in VFIO_MODES:
        yield chain_break(
            "kata-vfio-mode", _VFIO_MODE, f"invalid vfio_mode in an annotation: {mode!r}", remedy
        )
    elif mode == "vfio" and not settings.has_iommu:
        yield chain_break(
            "kata-vfio-without-iommu",
            _VFIO_MODE,
            "vfio_mode is annotated as 'vfio', but enable_iommu is not set: VFIO in the guest "
            "needs an IOMMU there, so containers with a device do not start",
            remedy,
            is_certain=False,
        )


def with_annotations(context: PodContext) -> PodContext:
    """The context with the settings from the pod's own annotations.

    Annotated ports are omitted: Kata looks for devices before it reads annotations.
    """
    settings = context.settings
    if settings is None:
        return context
    document: dict[str, Any] = dict(settings.document)
    for name, text in _hypervisor_annotations(context):
        value = _value(context.release, settings, name, text)
        if value is not None and settings.allows_annotation(name):
            _put(document, ("hypervisor", settings.hypervisor), name, value)
    mode = context.pod.annotation(_VFIO_MODE)
    if mode in VFIO_MODES:
        _put(document, ("runtime",), "vfio_mode", mode)
    effective = replace(settings, document=document)
    return replace(context, configuration=replace(context.configuration, settings=effective))


def _hypervisor_annotations(context: PodContext) -> Iterator[tuple[str, str]]:
    for key, value in context.pod.annotations:
        name = key.removeprefix(HYPERVISOR_ANNOTATION)
        if name != key and name not in (COLD_PLUG, HOT_PLUG):
            yield name, value


def _hypervisor_breaks(
    context: PodContext, settings: KataSettings, name: str, value: str
) -> Iterator[Diagnostic]:
    full, out = f"{HYPERVISOR_ANNOTATION}{name}", "remove the annotation"
    allow = f"{out}, or allow it: vfiomgr kata config --annotations {shlex.quote(name)}"
    if context.release.is_before_known:
        allow = f"{out}, or add {name} to enable_annotations in {settings.path}"
    is_taken = context.release.takes_annotation(name)
    remedy = allow if is_taken else out
    if not settings.allows_annotation(name) and not context.is_rs:
        yield not_enabled(full, remedy)
    elif not settings.allows_annotation(name):
        what = f"runtime-rs ignores annotation {full}: enable_annotations does not allow it"
        yield chain_break("kata-annotation-ignored", full, what, remedy, is_certain=False)
    elif not is_taken and context.is_rs:
        yield not_known(full, out)
    elif not is_taken:
        what = f"{context.release} does not support annotation {full}, and ignores it"
        yield chain_break("kata-annotation-unknown", full, what, out, is_certain=False)
    elif _is_refused(context.release, name, value):
        what = f"the pod fails: annotation {full} has the invalid value {value!r}"
        wanted = f"replace {value!r} by a valid value of {name}, or remove the annotation"
        if name == _MEMORY:
            wanted = f'write MiB as a string, {LEAST_GUEST_MIB} or more: {name}: "8192"'
        yield chain_break("kata-annotation-value", full, what, wanted)


def not_enabled(annotation: str, remedy: str) -> Diagnostic:
    """The Go runtime fails because of an annotation that is not allowed."""
    what = (
        f"the pod fails with 'annotation {annotation} is not enabled': enable_annotations of the "
        "configuration does not allow it"
    )
    return chain_break("kata-annotation-not-enabled", annotation, what, remedy)


def not_known(annotation: str, remedy: str) -> Diagnostic:
    """runtime-rs fails because of an annotation that is allowed but unknown."""
    what = f"runtime-rs fails: annotation {annotation} is allowed, but not supported"
    return chain_break("kata-annotation-refused", annotation, what, remedy)


def _is_refused(release: KataRelease, name: str, text: str) -> bool:
    kind = _type(release, name)
    if kind != "integer":
        return kind == "boolean" and text.lower() not in (*_BOOLEANS, "t", "f")
    if not text.isdecimal():
        return True
    if release.runtime == "rs":
        return name in _PORTS and release.version >= _PORT_LIMIT and int(text) > MAX_PORTS
    return name == _MEMORY and int(text) < LEAST_GUEST_MIB


def _type(release: KataRelease, name: str) -> KeyType | None:
    form = release.form("hypervisor", name)
    return None if form is None else form.type


def _value(
    release: KataRelease, settings: KataSettings, name: str, text: str
) -> str | int | bool | None:
    """The value for its key; None if it sets none."""
    kind = _type(release, name)
    if not release.takes_annotation(name) or _is_refused(release, name, text):
        return None
    if kind == "integer":
        return int(text)
    if kind == "boolean":
        return _BOOLEANS.get(text.lower())
    if name == _KERNEL_PARAMS:
        return f"{settings.kernel_params} {text}".strip()
    return text if kind == "string" else None


def _put(document: dict[str, Any], place: tuple[str, ...], key: str, value: object) -> None:
    table = document
    for name in place:
        inner = table.get(name)
        table[name] = dict(inner) if isinstance(inner, dict) else {}
        table = table[name]
    table[key] = value


RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the configuration",
        rules=(
            rule(_unusable, "kata-configuration-unreadable", "kata-configuration-missing"),
            rule(_annotated_blindly, "kata-annotation-alone"),
            reading(
                SETTINGS,
                _annotated,
                "kata-annotation-alone",
                "kata-annotation-not-enabled",
                "kata-annotation-refused",
                "kata-annotation-unknown",
            ),
            reading(
                SETTINGS,
                annotation_breaks,
                "kata-annotation-ignored",
                "kata-annotation-not-enabled",
                "kata-annotation-refused",
                "kata-annotation-unknown",
                "kata-annotation-value",
                "kata-vfio-mode",
                _NO_IOMMU,
            ),
            reading(SETTINGS, _mismatched, "kata-configuration-other-runtime"),
            reading(
                SETTINGS,
                _plugging,
                "kata-no-cold-plug",
                "kata-not-plugged",
                "kata-not-plugged-silently",
            ),
            reading(SETTINGS, _too_few_root_ports, "kata-too-few-ports"),
            reading(SETTINGS, _large_bars, "kata-machine-type"),
            reading(
                SETTINGS,
                _refused,
                "kata-both-plugs",
                "kata-both-ports",
                "kata-port",
                "kata-too-many-ports",
                "kata-vfio-mode",
                "kata-wrong-type",
                _NO_IOMMU,
                _UNKNOWN_KEY,
            ),
            reading(
                SETTINGS,
                _drop_ins,
                *_DROP_IN_KEYS,
                "kata-drop-in-ending",
                "kata-drop-ins-shared",
                "kata-kernel-params-replaced",
            ),
            reading(SETTINGS, _timeouts, "kata-kubelet-timeout"),
            reading(SETTINGS, _agent_timeout, "kata-agent-timeout"),
            reading(
                SETTINGS,
                releases.of_configuration,
                "kata-hypervisor",
                "kata-sandbox-cgroup",
                "vfio-node-in-container",
                "kata-early-hotplug",
            ),
            reading(
                SETTINGS, releases.of_devices, "kata-hypervisor-devices", "kata-address-spaces"
            ),
            reading(SETTINGS, releases.untranslated, "kata-pcidevice"),
            reading(SETTINGS, releases.portless, "kata-endpoint-port"),
            reading(SETTINGS, releases.mapped_twice, "kata-mapped-twice"),
            reading(SETTINGS, releases.dropped, "kata-block-volumes"),
            reading(SETTINGS, releases.shared_groups, "kata-guest-group"),
            reading(SETTINGS, releases.small_ports, "kata-port-window"),
        ),
    )
)
