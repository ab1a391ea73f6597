"""From the pod to Kata's shim: the RuntimeClass, and its handler."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.containerd import refuses_schema
from vfiomgr.containers.runtimes.handlers import V2_PLUGIN, V3_PLUGIN, first_reader
from vfiomgr.containers.runtimes.location import MICROK8S_MAIN, MICROK8S_TEMPLATE
from vfiomgr.kata.explain.context import (
    SETTINGS,
    PodContext,
    TraceStep,
    chain_break,
    is_of_kata,
    judged,
)
from vfiomgr.kata.explain.image import without_kvm
from vfiomgr.kata.explain.pod import CDI_ANNOTATION, KATA_ANNOTATION
from vfiomgr.kata.model import DEFAULT_HANDLER, KATA_DIRECTORIES
from vfiomgr.kata.plan import recommended_overhead_mib
from vfiomgr.paths import HostPath
from vfiomgr.rules.runner import Fact, RuleSet, reading, register, rule
from vfiomgr.units import MIB, Version

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.handlers import HandlerEntry, HandlerFacts
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.facts import KataSettings

_TABLE_UNREAD = "kata-handler-unread"
_ALIKE = 0.85
"""The minimum similarity of a name to a mistyped one."""
_DEFAULT_MEMORY_MIB = 2048
"""Kata's default (defaultMemSize)."""
_TIGHT_MIB = 256
"""The minimum memory for QEMU."""
_SHIPPED_ONLY = Version(4, 0)
_NO_OCI = Version(2, 0)
"""The first Kata whose kata-runtime has no commands of an OCI runtime."""
_KEEPS_DEVICES = Version(1, 3)
"""The first containerd with privileged_without_host_devices."""
_NONE, _CONTAINERD_2 = Version(0, 0), Version(2, 0)
_READS_BY_DEFAULT, _READS_BESIDE = Version(2, 2), Version(2, 3)
_MERGES_TABLES = 3
"""The version of containerd's configuration that only releases with merged drop-ins support."""
_FILE_OF_TOOLKIT = "99-nvidia.toml"
_REMOTE = "--container-runtime=remote "
_ENDPOINT = "--container-runtime-endpoint=unix:///run/containerd/containerd.sock"
_RANCHER = "/rancher/"
_CRI_NAMES = {"containerd": "containerd", "crio": "CRI-O"}
_NVIDIA = ("nvidia.com/gpu", "nvidia.com/mig-")
"""Resources of NVIDIA's device plugin for containers on the host's kernel."""
_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
_HANDLERS: Fact[PodContext, HandlerFacts] = Fact(
    lambda context: context.handlers, "the handlers", "a snapshot does not contain them"
)
_ENTRY: Fact[PodContext, HandlerEntry] = Fact(
    lambda context: context.entry, "the handler", "not found in the container runtime"
)


def pod(context: PodContext) -> TraceStep:
    """What the pod requests."""
    spec = context.pod
    asked = [f"{name} ({count})" for name, count in spec.resources]
    asked += [f"{name} (by annotation)" for name in spec.cdi_names]
    asked += [f"claim {name}" for name in spec.all_claims]
    place = (f"{spec.source}:{spec.line}",) if spec.line else ()
    what = ", ".join(asked) or "no device"
    return judged("pod", f"{spec} requests {what}", place)


def runtime_class(context: PodContext) -> TraceStep:
    """The handler of the pod."""
    spec, found = context.pod, context.runtime_class
    line = spec.runtime_class_line
    place = (f"{spec.source}:{line}",) if line else ()
    breaks = tuple(CLASS_RULES.find(context)) if context.is_kata else ()
    if spec.runtime_class is None:
        runs = context.handler_name or "usually runc"
        what = f"no RuntimeClass: the default runtime of the node runs the pod ({runs})"
        return judged("runtime class", what, place, breaks)
    if found is None:
        what = (
            f"{spec.runtime_class}: its RuntimeClass is not in the file; assuming handler "
            f"{context.handler_name}"
        )
        return judged("runtime class", what, place, otherwise="unknown")
    what = f"{found.name} uses handler {found.handler}"
    looked = (*place, f"{found.source}:{found.line}")
    return judged("runtime class", what, looked, breaks)


def _no_class(context: PodContext) -> Iterator[Diagnostic]:
    if context.pod.runtime_class is None and context.handler_name is None:
        yield chain_break(
            "kata-no-runtime-class",
            context.pod.name,
            "the pod has no runtimeClassName: the default runtime of the node runs it (usually "
            "runc, on the host kernel)",
            "add runtimeClassName to the pod's spec; vfiomgr kata pod --runtimeclass prints one",
        )


def _overhead(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 9: default_memory is in the pod's cgroup, but not in its limits."""
    found = context.runtime_class
    if found is None or not context.requests_devices:
        return
    memory = settings.default_memory_mib or _DEFAULT_MEMORY_MIB
    overhead = found.overhead_bytes or 0
    if overhead >= (memory + _TIGHT_MIB) * MIB:
        return
    is_less = overhead < memory * MIB
    has = f"{overhead // MIB}Mi" if overhead else "nothing"
    than = "less than" if is_less else "little more than"
    yield chain_break(
        "kata-overhead",
        found.name,
        f"the overhead of RuntimeClass {found.name} is {has}, {than} default_memory ({memory} "
        "MiB): VFIO pins all guest memory, so QEMU is killed for lack of memory",
        f"set overhead.podFixed.memory to {recommended_overhead_mib(memory)}Mi: vfiomgr kata "
        f"pod --runtimeclass --handler {shlex.quote(found.handler)} --default-memory {memory}M",
        is_certain=is_less,
        evidence=("kata-containers/kata-containers#6533",),
    )


def handler(context: PodContext) -> TraceStep:
    """The program that the container runtime starts for the handler."""
    breaks = (*HANDLER_RULES.find(context), *(SHIM_RULES.find(context) if context.is_kata else ()))
    docker = context.docker
    if docker is None:
        return _handler_of_cri(context, breaks)
    what = f"the kubelet runs pods with Docker ({docker.program})"
    is_fine = context.handler_name is None and docker.default is not None
    return judged("handler", what, (docker.source,), breaks, "ok" if is_fine else "unknown")


def _handler_of_cri(context: PodContext, breaks: tuple[Diagnostic, ...]) -> TraceStep:
    name, facts, entry = context.handler_name, context.handlers, context.entry
    program = _CRI_NAMES[context.cri]
    looked = () if facts is None else (*facts.files, *map(str, facts.unreadable))
    label = name or "the default handler"
    if facts is None or (not facts.is_known and entry is None):
        what = f"{label}: cannot read the configuration of {program}"
        if facts is not None and not facts.unreadable:
            what = f"{label}: no {program} configuration found"
        return judged("handler", what, looked, breaks, "unknown")
    if name is None:
        is_fine = facts.is_known and not context.is_kata
        what = f"the default handler of {program}" if is_fine else "no handler"
        return judged("handler", what, looked, breaks, "ok" if is_fine else "unknown")
    if facts.disabling:
        what = f"{name}: containerd runs no pods: its CRI plugin is disabled"
        return judged("handler", what, looked, breaks)
    if entry is None and facts.has_built_in(name):
        return judged("handler", f"{name} is built into {program}", looked, breaks)
    if entry is None:
        what = f"{name} is not in the configuration of {program}"
        return judged("handler", what, looked, breaks)
    runs = entry.runtime_path or entry.shim or "an unknown program (its type is not set)"
    where = f"{name} in {entry.source} runs {runs}"
    what = f"{where} with {entry.config_path}" if entry.config_path else where
    is_passed_over = _is_passed_over(facts, entry)
    if is_passed_over:
        what += (
            "; the main file does not import that file, so containerd before "
            f"{_drop_ins_since(facts)} ignores it"
        )
    is_unknown = is_passed_over or any(found.rule == _TABLE_UNREAD for found in breaks)
    return judged("handler", what, looked, breaks, "unknown" if is_unknown else "ok")


def _is_passed_over(facts: HandlerFacts, entry: HandlerEntry) -> bool:
    """Whether containerd may not read the file of a handler: no main file imports it."""
    is_old = (facts.version or _NONE) < _drop_ins_since(facts)
    return facts.is_known and entry.source in facts.unsure and is_old


def _docker(context: PodContext) -> Iterator[Diagnostic]:
    """Handlers under Docker, and its default runtime, which alone gives NVIDIA's GPUs to pods.

    RunPodSandbox in pkg/kubelet/dockershim/docker_sandbox.go; Mirantis/cri-dockerd#350.
    """
    docker, name = context.docker, context.handler_name
    if docker is None:
        return
    asked = [resource for resource, _ in context.pod.resources if resource.startswith(_NVIDIA)]
    if name not in (None, "docker") and not docker.takes_handlers:
        is_shim = docker.program == "dockershim"
        containerd = f"have the kubelet use containerd: {_REMOTE if is_shim else ''}{_ENDPOINT}"
        if docker.source.endswith("--docker"):
            containerd = "remove --docker there, so that k3s uses its containerd"
        without = "" if context.is_kata else "remove runtimeClassName from the pod"
        later = "" if is_shim else "use cri-dockerd 0.4 or later, and make it a runtime of Docker"
        yield chain_break(
            "kubelet-docker",
            name,
            f"the kubelet runs pods with Docker ({docker.program}), which does not know handlers "
            f"of containerd: pods fail with 'RuntimeHandler \"{name}\" not supported'",
            containerd,
            without,
            later,
            is_certain=docker.takes_handlers is False,
            evidence=(docker.source,),
        )
    if asked and not context.is_kata and "nvidia" not in (docker.default or "nvidia"):
        yield chain_break(
            "docker-default-runtime",
            docker.default,
            f"Docker's default runtime is {docker.default}, and the kubelet runs pods with Docker "
            f"({docker.program}): neither NVIDIA's device plugin nor pods with {asked[0]} get "
            "NVIDIA's libraries and devices",
            'set "default-runtime": "nvidia" in /etc/docker/daemon.json (nvidia-ctk runtime '
            "configure --runtime=docker --set-as-default), then restart Docker and the plugin",
            is_certain=False,
        )


def _unreadable(_context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """Files that prevent the start of a container runtime; a drop-in counts only if it is read."""
    since, program = _drop_ins_since(facts), _CRI_NAMES[facts.cri]
    for file in facts.unreadable:
        is_passed_over = file.is_unsure and facts.version is not None and facts.version < since
        if not file.is_wrong or is_passed_over:
            continue
        who = f"{program}, from {since} on," if file.is_unsure and not facts.version else program
        yield chain_break(
            "kata-runtime-unreadable",
            file.place,
            f"{file}: {who} does not start with it (a running one continues until it is restarted)",
            f"correct that place, then restart {program}",
            is_certain=not file.is_unsure or facts.version is not None,
        )


def _disabled(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    is_known = context.entry is not None or facts.is_known
    is_asked = context.handler_name is not None or not context.is_kata
    if is_asked and facts.disabling and is_known:
        named = " and ".join(facts.disabling)
        yield chain_break(
            "kata-cri-disabled",
            named,
            f"{named} disables CRI (disabled_plugins), so the kubelet cannot use containerd",
            f"remove cri from disabled_plugins in {named}, then restart containerd",
        )


def _lacking(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A handler that the container runtime does not have, and those that it has."""
    name = context.handler_name or facts.default
    if not facts.is_known or facts.disabling or facts.handler(name) or facts.has_built_in(name):
        return
    program = _CRI_NAMES[facts.cri]
    there = ", ".join(entry.name for entry in facts.handlers) or "no handlers"
    lost = next((entry.source for entry in facts.unread if entry.name == name), None)
    if lost is not None and not _has_own_containerd(facts):
        yield _not_imported(facts, name, lost)
        return
    yield chain_break(
        "kata-handler-missing",
        name,
        f"{program} has no handler {name} (available: {there}): its pods fail with 'no runtime "
        f'for "{name}" is configured\'',
        *(_instead(facts, name, program) if context.is_kata else _another(facts, name, program)),
    )


def _has_own_containerd(facts: HandlerFacts) -> bool:
    """Whether the cluster runs a containerd of its own, which does not read the host's file."""
    return MICROK8S_MAIN in facts.files or any(_RANCHER in file for file in facts.files)


def _default_runtime(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A pod without RuntimeClass, where only pods of another handler get NVIDIA's GPUs.

    With a CDI specification the device plugin may give them to any handler.
    """
    asked = [name for name, _ in context.pod.resources if name.startswith(_NVIDIA)]
    if context.is_kata or context.pod.runtime_class or not asked or facts.nvidia_hooks:
        return
    name, main = facts.default or "runc", next(iter(facts.files), "")
    default = facts.handler(name)
    runs = f"{name} {f'{default.binary} {default.runtime_path}' if default else ''}"
    has_cdi = any(_NVIDIA[0] in (file.text or "") for file in context.host.cdi_files)
    if has_cdi or "nvidia" in runs or not facts.is_known or facts.disabling:
        return
    unread = facts.unread if _has_own_containerd(facts) else ()
    other = next((e for e in (*facts.handlers, *unread) if e.name.startswith("nvidia")), None)
    if other is None:
        return
    template = f"a template beside {main} (config.toml.tmpl)" if _RANCHER in main else main
    if MICROK8S_MAIN in facts.files:
        template = str(MICROK8S_TEMPLATE)
    named = f"set runtimeClassName: {other.name} in the pod, with a RuntimeClass of this handler"
    key = "default_runtime_name" if facts.cri == "containerd" else "default_runtime"
    fixes = [named, f'make it the default: {key} = "{other.name}" in {template}']
    where = f"{other.name} in {other.source} does, for pods with runtimeClassName"
    if other not in facts.handlers:
        where = f"{other.name} in {other.source} does, but the cluster's containerd reads {main}"
        newer = "newer K3s and RKE2 add it themselves if they find the program"
        fixes = [f"write this handler to {template}, restart the service ({newer}), and {named}"]
    yield chain_break(
        "nvidia-not-default",
        name,
        f"the default handler {name} does not give {asked[0]} to pods; {where}",
        *fixes,
        is_certain=False,
    )


def _hook_unread(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """NVIDIA's OCI hook in a directory that CRI-O does not read (NVIDIA/gpu-operator#172)."""
    uses = any(name.startswith(_NVIDIA) for name, _ in context.pod.resources) or any(
        name == _VISIBLE for each in context.pod.containers for name, _ in each.environment
    )
    hooks, known = facts.nvidia_hooks, facts.hook_directories
    is_read = any(hook.rpartition("/")[0] in known for hook in hooks)
    if context.is_kata or context.pod.runtime_class or not uses or not hooks or is_read:
        return
    default = facts.handler(facts.default)
    runs = f"{facts.default} {default.runtime_path if default else ''}"
    if "nvidia" in runs or any(_NVIDIA[0] in (file.text or "") for file in context.host.cdi_files):
        return
    place = hooks[0].rpartition("/")[0]
    listed = ", ".join(f'"{each}"' for each in (*known, place))
    yield chain_break(
        "nvidia-hook-unread",
        hooks[0],
        f"CRI-O does not read NVIDIA's hook {hooks[0]} (hooks_dir: {', '.join(known)}), and its "
        "default handler is not NVIDIA's: pods start without GPU and driver libraries",
        f"set hooks_dir = [{listed}] in [crio.runtime] of a file in /etc/crio/crio.conf.d, then "
        "systemctl restart crio",
        "make NVIDIA's runtime the default: nvidia-ctk runtime configure --runtime=crio "
        "--set-as-default",
    )


def _not_imported(facts: HandlerFacts, name: str, source: str) -> Diagnostic:
    """A handler of a file that no imports line names any more.

    nvidia-ctk 1.18.0 writes a list of its own (NVIDIA/nvidia-container-toolkit PR 1382).
    """
    main, again = next(iter(facts.files), "the main file"), ""
    if any(file.endswith(_FILE_OF_TOOLKIT) for file in facts.files):
        again = "; nvidia-ctk 1.18.0 replaces the list at each run, 1.18.1 keeps it"
    return chain_break(
        "kata-handler-missing",
        name,
        f"{source} defines handler {name}, but imports in {main} does not name this file: "
        f"containerd does not read it, and its pods fail with 'no runtime for \"{name}\"'",
        f'add "{source}" to imports in {main}, then restart containerd{again}',
    )


def _another(facts: HandlerFacts, name: str, program: str) -> Iterator[str]:
    """What adds a handler that is not Kata's, and keeps it."""
    near = get_close_matches(name, [entry.name for entry in facts.handlers], 1, _ALIKE)
    if near:
        yield f"did you mean {near[0]}? set it as the handler of the RuntimeClass"
    if MICROK8S_MAIN in facts.files:
        addon = ", or enable the addon nvidia of a later MicroK8s again" if "nvidia" in name else ""
        yield (
            f"write the handler to {MICROK8S_TEMPLATE}, from which MicroK8s renders this file, "
            f"then run snap restart microk8s.daemon-containerd{addon}"
        )
        return
    tool = f"nvidia-ctk runtime configure --runtime={facts.cri}" if "nvidia" in name else ""
    install = f"vfiomgr runtime install {shlex.quote(name)} --path PROGRAM"
    yield f"add it with {f'{tool}, or with ' if tool else ''}{install}; then restart {program}"
    if facts.cri == "containerd" and facts.files:
        yield (
            f"if a tool rewrites {facts.files[0]}, let it write the handler too, or an imports "
            "line for a file in /etc/containerd/conf.d (before containerd 2.0 with the whole CRI "
            "table)"
        )


def _instead(facts: HandlerFacts, name: str, program: str) -> Iterator[str]:
    """The likely intended handler; only a possible Kata handler can be created."""
    kata = [entry.name for entry in facts.handlers if entry.is_kata]
    near = get_close_matches(name, kata or [DEFAULT_HANDLER], 1, _ALIKE)
    install = f"vfiomgr runtime install {shlex.quote(name)} --kata, then restart {program}"
    if near and near[0] != name:
        meant = f"did you mean {near[0]}? set it as the handler of the RuntimeClass"
        yield meant if kata else f"{meant}, and create it: vfiomgr runtime install --kata"
    elif not kata and is_of_kata(name):
        yield install
    elif not kata:
        created = f"create {DEFAULT_HANDLER} with vfiomgr runtime install --kata"
        yield f"{created}, and set it as the handler"
    else:
        named = f"use an existing Kata handler: {', '.join(kata)}"
        yield f"{named}; or create this one: {install}" if is_of_kata(name) else named


def _no_shim(context: PodContext, entry: HandlerEntry) -> Iterator[Diagnostic]:
    """A shim that is missing at its path, or in the usual directories."""
    if context.shim not in ("missing", "not found") or not entry.is_kata:
        return
    is_certain = context.shim == "missing"
    place = "does not exist" if is_certain else "is in none of the usual directories"
    named = f'set runtime_path = "{next(iter(context.shims), "FILE")}" there'
    remedy = named if context.shims else f"install Kata Containers at that path, or {named}"
    yield chain_break(
        "kata-shim-missing",
        entry.runtime_path or entry.shim,
        f"{entry.runtime_path or entry.shim}, the shim of {entry.name} in {entry.source}, "
        f"{place}: no pod of the handler starts",
        f"{remedy}, then restart {_CRI_NAMES[context.cri]}",
        is_certain=is_certain,
    )


def _no_kata(context: PodContext, entry: HandlerEntry) -> Iterator[Diagnostic]:
    if entry.is_kata:
        yield from _command_line(context, entry)
        return
    facts = context.handlers
    kata = [each.name for each in facts.handlers if each.is_kata] if facts is not None else []
    name = shlex.quote(f"{entry.name}-vfio")
    another = f"use another name for the handler: vfiomgr runtime install {name} --kata"
    yield chain_break(
        "kata-handler-not-kata",
        entry.name,
        f"handler {entry.name} runs {entry.runtime_type or 'runc'}, not Kata's shim",
        f"use a Kata handler: {', '.join(kata)}" if kata else another,
    )


def _command_line(context: PodContext, entry: HandlerEntry) -> Iterator[Diagnostic]:
    """A handler of CRI-O for the command line of kata-runtime, which only Kata 1 has.

    crio.conf(5): runtime_type is oci by default; kata-containers/kata-containers#2498.
    """
    if context.cri != "crio" or entry.runtime_type == "vm" or context.release.version < _NO_OCI:
        return
    shim = next(iter(context.shims), "the path of containerd-shim-kata-v2")
    yield chain_break(
        "kata-handler-not-kata",
        entry.name,
        f'handler {entry.name} has runtime_type "{entry.runtime_type or "oci"}", for which CRI-O '
        f"runs commands of {entry.runtime_path}; {context.release} has only a shim",
        f'set runtime_type = "vm" and runtime_path = "{shim}" in {entry.source}, then restart '
        "CRI-O",
    )


def _conf_file(context: PodContext) -> Iterator[Diagnostic]:
    """Number 7; a ConfigPath of the container runtime overrides the variable."""
    entry, said = context.entry, context.conf_file
    if said is None or (entry is not None and entry.config_path):
        return
    path, source = said
    is_shipped = HostPath(path).parent in KATA_DIRECTORIES
    if context.release.version < _SHIPPED_ONLY or is_shipped:
        return
    yield chain_break(
        "kata-conf-file",
        source,
        f"{source} sets KATA_CONF_FILE={path}, but {context.release} accepts only paths that "
        "Kata ships",
        "set the file in the container runtime instead (ConfigPath, or runtime_config_path in "
        f"CRI-O): vfiomgr runtime install --kata --config {shlex.quote(path)}",
    )


def _sizing(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 11: CRI-O does not report the container sizes to the sandbox."""
    if context.cri != "crio" or not settings.has_static_resources:
        return
    limits = [
        f"{name} {container.limit(name)} of {container.name}"
        for container in context.pod.containers
        for name in ("memory", "cpu")
        if container.limit(name) is not None
    ]
    if not limits:
        return
    memory = settings.default_memory_mib or _DEFAULT_MEMORY_MIB
    yield chain_break(
        "kata-crio-sizes",
        context.pod.name,
        "static_sandbox_resource_mgmt is on, but CRI-O does not pass container sizes: the guest "
        f"has only default_memory ({memory} MiB) and default_vcpus, without {', '.join(limits)}",
        "set default_memory and default_vcpus to what the pods need, or use containerd",
    )


def _privileged(context: PodContext) -> Iterator[Diagnostic]:
    """Number 12."""
    names = [container.name for container in context.pod.containers if container.is_privileged]
    entry = context.entry
    if names and entry is not None and entry.privileged_without_host_devices:
        yield from _privileged_in_old(context, names)
    if not names or (entry is not None and entry.privileged_without_host_devices):
        return
    unless = "" if entry is not None else ", unless privileged_without_host_devices is set"
    yield chain_break(
        "kata-privileged",
        context.pod.name,
        f"{', '.join(names)} is privileged, so it gets every device of the host{unless}: all "
        "VFIO groups are assigned to this guest, including those of other pods",
        "set privileged_without_host_devices = true for the handler (vfiomgr runtime install "
        "--kata does), or remove privileged from the pod",
        is_certain=entry is not None,
    )


def _privileged_in_old(context: PodContext, names: list[str]) -> Iterator[Diagnostic]:
    """A containerd that ignores the key (pkg/cri in 1.3.0; kata-containers/documentation#637)."""
    version = None if context.handlers is None else context.handlers.version
    if context.cri == "containerd" and version is not None and version < _KEEPS_DEVICES:
        yield chain_break(
            "kata-privileged",
            context.pod.name,
            f"{', '.join(names)} is privileged, and containerd {version} ignores "
            "privileged_without_host_devices: all VFIO groups are assigned to this guest, "
            "including those of other pods",
            f"upgrade containerd to {_KEEPS_DEVICES} or later, or remove privileged from the pod",
        )


def _untold(context: PodContext, entry: HandlerEntry) -> Iterator[Diagnostic]:
    """Annotations that containerd does not pass."""
    if context.cri != "containerd":
        return
    wanted = (CDI_ANNOTATION, KATA_ANNOTATION)
    lost = [k for k, _ in context.pod.annotations if k.startswith(wanted) and not entry.tells(k)]
    if lost:
        yield chain_break(
            "kata-annotations-not-passed",
            entry.name,
            f"containerd does not pass {', '.join(lost)}: pod_annotations of {entry.name} in "
            f"{entry.source} has no matching pattern",
            'set pod_annotations = ["io.katacontainers.*", "cdi.k8s.io/*"]: vfiomgr runtime '
            f"install {shlex.quote(entry.name)} --kata",
        )


def _drop_ins_since(facts: HandlerFacts) -> Version:
    """The containerd that reads conf.d without an import: by default, or with any main file."""
    return _READS_BESIDE if facts.files else _READS_BY_DEFAULT


def _unread(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A drop-in that is not imported, with a containerd that does not read it by default."""
    entry = context.entry
    if entry is None or facts.disabling or facts.version is None:
        return
    if _is_passed_over(facts, entry):
        yield chain_break(
            "kata-runtime-drop-in-unread",
            entry.source,
            f"{entry.source} is not read: no main file imports it, and containerd "
            f"{facts.version} does not read it by default, so pods fail with 'no runtime for "
            f'"{entry.name}" is configured\'',
            f"vfiomgr runtime install {shlex.quote(entry.name)} --kata, then restart containerd",
        )


def _elsewhere(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A table of a plugin that this containerd does not read in this version of the file."""
    entry = context.entry
    if entry is None or facts.cri != "containerd" or not facts.passes_over(entry):
        return
    schema, version = facts.schema(entry.source), facts.version
    is_old = version is not None and version < _CONTAINERD_2
    plugin, number = (V2_PLUGIN, 2) if is_old else (V3_PLUGIN, 3)
    states = "without a version line" if schema is None else f"of version {schema}"
    or_else = ""
    if schema in (None, 1) and V2_PLUGIN in entry.plugins and not is_old:
        or_else = "state version = 2 at the start of the file"
    yield chain_break(
        _TABLE_UNREAD,
        entry.source,
        f"{entry.name} is in a table of {' and '.join(entry.plugins)}, which containerd"
        f"{f' {version}' if version else ' before 2.3'} does not read in a configuration {states}: "
        f"pods fail with 'no runtime for \"{entry.name}\" is configured'",
        f'write it as [plugins."{plugin}".containerd.runtimes.{entry.name}], in a configuration '
        f"with version = {number}",
        *([or_else] if or_else else []),
        is_certain=version is not None,
    )


def _no_type(context: PodContext, entry: HandlerEntry) -> Iterator[Diagnostic]:
    """A handler of containerd without a type; containerd 2 keeps that of its own runc."""
    if context.cri != "containerd" or entry.runtime_type or entry.name == "runc":
        return
    shim = f"io.containerd.{'kata' if context.is_kata else 'runc'}.v2"
    yield chain_break(
        "kata-handler-no-type",
        entry.name,
        f"{entry.name} in {entry.source} has no runtime_type: containerd starts, but pods fail "
        "with 'container.Runtime.Name must be set'",
        f'set runtime_type = "{shim}" there, then restart containerd',
    )


def _no_monitor(_context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A handler without the conmon that the others have: CRI-O checks those of type oci.

    It first ignores handlers without their program, except the default (ValidateRuntimes,
    ValidateConmonPath in pkg/config/config.go, 1.27 to 1.36).
    """
    other = next((entry for entry in facts.handlers if entry.monitor_path), None)
    for entry in facts.handlers if other is not None and facts.lacks_conmon else ():
        is_ignored = entry.name in facts.without_program and entry.name != facts.default
        is_checked = entry.runtime_type in ("", "oci") and not is_ignored
        if other is None or entry.monitor_path or not is_checked:
            continue
        yield chain_break(
            "crio-no-monitor",
            entry.name,
            f"{entry.name} in {entry.source} has no monitor_path, and no usual directory has "
            "conmon: CRI-O does not start (a running one continues until it is restarted)",
            f'set monitor_path = "{other.monitor_path}" in [crio.runtime.runtimes.{entry.name}] '
            f"of {entry.source}, as {other.name} has it, then restart CRI-O",
        )


def _cgroups(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """A handler of runc with another driver of cgroups than the kubelet.

    systemd then sets the device filter of a cgroup that it does not manage (NVIDIA/nvidia-docker
    1730). k3s and RKE2 write the setting of runc's entry for NVIDIA's since k3s-io/k3s 8470.
    """
    entry, runc = context.entry or facts.handler(facts.default), facts.handler("runc")
    driver = "" if context.kubelet is None else context.kubelet.cgroup_driver
    is_runc = entry is not None and entry.shim.startswith("containerd-shim-runc-")
    told = None if runc is None else runc.systemd_cgroup
    if told is None and facts.version is not None and facts.version < _CONTAINERD_2:
        told = driver == "systemd" or None  # containerd 2 tells the kubelet its own driver
    if entry is None or not is_runc or entry.name == "runc" or not told or entry.systemd_cgroup:
        return
    where = entry.source
    who = "runc there has" if runc and runc.systemd_cgroup else "the kubelet's cgroupDriver needs"
    setting = f"set SystemdCgroup = true in the options of {entry.name}"
    remedies = [f"{setting} in {where}, then restart containerd"]
    if _RANCHER in where:
        remedies = [
            f"{setting} in a template beside {where} (config.toml.tmpl)",
            "upgrade K3s or RKE2 to 1.25.15, 1.26.10, 1.27.7, 1.28.3 or later",
        ]
    yield chain_break(
        "runtime-cgroup-driver",
        entry.name,
        f"{entry.name} in {where} does not set SystemdCgroup, which {who}: systemd may kill its "
        "containers, or take their devices away when it reloads ('Failed to initialize NVML: "
        "Unknown Error')",
        *remedies,
        is_certain=False,
    )


def _mixed(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """Imports of another version than the main file, if they concern the handler."""
    own = None if context.entry is None else context.entry.source
    for mixed in facts.mixed:
        is_own = own == mixed.file
        before = facts.files[: facts.files.index(mixed.file)] if mixed.file in facts.files else ()
        is_lost = {"stops": True, "ignored": is_own, "hides": own in before, "unknown": False}
        if mixed.effect == "ignored" and not is_own:
            continue
        if mixed.effect in {"hides", "unknown"} and mixed.file not in facts.with_cri:
            continue
        stops = mixed.effect == "stops"
        yield chain_break(
            "kata-runtime-versions-refused" if stops else "kata-runtime-versions-mixed",
            mixed.file,
            mixed.what,
            f"{mixed.remedy}; then restart containerd",
            is_certain=is_lost[mixed.effect],
        )


def _too_new(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """The version that is stated last, which counts for all files before containerd 2.3.

    Of the containerd in k3s and RKE2 only the first number is known.
    """
    source, schema = next(reversed(facts.schemas), ("", 1))
    version, entry = facts.version, context.entry
    is_said = _RANCHER in source or any(mixed.file == source for mixed in facts.mixed)
    if is_said or version is None or (entry is not None and facts.passes_over(entry)):
        return
    if refuses_schema(version, schema):
        yield chain_break(
            "kata-runtime-versions-refused",
            source,
            f"{source} has version {schema}, which containerd {version} does not read: it does "
            "not start",
            f"use containerd {first_reader(schema)} or later, or write that file for an earlier "
            "version; then restart containerd",
        )


def _merged_badly(context: PodContext, facts: HandlerFacts) -> Iterator[Diagnostic]:
    """Drop-ins that some releases of containerd do not merge by table."""
    entry = context.entry
    if entry is None or facts.cri != "containerd" or entry.source in facts.unsure:
        return
    main, *drop_ins = facts.files
    passed = {entry.source, *(mixed.file for mixed in facts.mixed)}
    others = [name for name in drop_ins if name in facts.with_cri and name not in passed]
    schema, version = facts.schema(main), facts.version
    is_old = (schema or 0) < _MERGES_TABLES if version is None else version < _CONTAINERD_2
    if others and is_old:
        yield chain_break(
            "kata-runtime-drop-in-replaced",
            entry.source,
            f"before containerd 2.0 the CRI table of {others[-1]} replaces all others, so "
            f"{entry.name} of {entry.source} is lost",
            f"also define {entry.name} in {others[-1]}, or move all to {main}",
            is_certain=version is not None,
        )


CLASS_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: its RuntimeClass",
        rules=(
            rule(_no_class, "kata-no-runtime-class"),
            reading(SETTINGS, _overhead, "kata-overhead"),
        ),
    )
)
HANDLER_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod: the handler",
        rules=(
            rule(_docker, "kubelet-docker", "docker-default-runtime"),
            reading(_HANDLERS, _disabled, "kata-cri-disabled"),
            reading(_HANDLERS, _lacking, "kata-handler-missing"),
            reading(_HANDLERS, _default_runtime, "nvidia-not-default"),
            reading(_HANDLERS, _hook_unread, "nvidia-hook-unread"),
            reading(_ENTRY, _no_type, "kata-handler-no-type"),
            reading(_HANDLERS, _no_monitor, "crio-no-monitor"),
            reading(_HANDLERS, _cgroups, "runtime-cgroup-driver"),
            reading(_HANDLERS, _elsewhere, _TABLE_UNREAD),
            reading(_HANDLERS, _unread, "kata-runtime-drop-in-unread"),
            reading(_HANDLERS, _unreadable, "kata-runtime-unreadable"),
            reading(
                _HANDLERS, _mixed, "kata-runtime-versions-refused", "kata-runtime-versions-mixed"
            ),
            reading(_HANDLERS, _too_new, "kata-runtime-versions-refused"),
            reading(_HANDLERS, _merged_badly, "kata-runtime-drop-in-replaced"),
        ),
    )
)
SHIM_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the handler",
        rules=(
            rule(lambda context: without_kvm(context.host), "kvm"),
            reading(_ENTRY, _no_kata, "kata-handler-not-kata"),
            reading(_ENTRY, _no_shim, "kata-shim-missing"),
            rule(_conf_file, "kata-conf-file"),
            reading(SETTINGS, _sizing, "kata-crio-sizes"),
            rule(_privileged, "kata-privileged"),
            reading(_ENTRY, _untold, "kata-annotations-not-passed"),
        ),
    )
)
