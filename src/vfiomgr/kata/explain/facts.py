"""Facts of a host, besides Kata's own files, about the way of a device to a pod."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.runtimes import handlers
from vfiomgr.containers.runtimes import location as runtimes_facts
from vfiomgr.containers.runtimes.containerd import mixed_versions
from vfiomgr.containers.runtimes.handlers import UnreadFile
from vfiomgr.containers.runtimes.model import ConfigFile, ProgramName
from vfiomgr.documents.reader import read_values
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import is_vfio_node
from vfiomgr.host.tree import HostTree
from vfiomgr.kata.explain.context import (
    KUBELET_TIMEOUT,
    ConfigurationFacts,
    DockerFacts,
    KubeletFacts,
    ToolkitFacts,
)
from vfiomgr.kata.explain.image import GuestImage, read_guest_file
from vfiomgr.kata.facts import KataSettings, parse, read_configuration, read_settings, runtime_at
from vfiomgr.kata.model import handler_configuration, search_path
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.users.node_agent import RECORD

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.handlers import (
        CriName,
        HandlerEntry,
        HandlerFacts,
        MixedVersions,
    )
    from vfiomgr.kata.explain.context import ShimState
    from vfiomgr.kata.model import KataConfigurationFile, RuntimeName
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


CONTAINERD_DROP_INS = HostPath("/etc/containerd/conf.d")
CRIO_DROP_INS = HostPath("/etc/crio/crio.conf.d")
KUBELET = HostPath("/var/lib/kubelet/config.yaml")
_KUBELET_SOCKET = RECORD.parent / "kubelet.sock"
_GATE = "KubeletPodResourcesGet"
_UNITS = tuple(
    HostPath(directory)
    for directory in ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
)
_KUBEADM_FLAGS = HostPath("/var/lib/kubelet/kubeadm-flags.env")
_KUBELET_FLAGS = (
    HostPath("/etc/kubernetes/kubelet.env"),
    _KUBEADM_FLAGS,
    HostPath("/etc/default/kubelet"),
    HostPath("/etc/sysconfig/kubelet"),
)
_SHIM_SOCKET = HostPath("/var/run/dockershim.sock")
_DOCKERSHIM, _CRI_DOCKERD, _NO_DOCKERSHIM = "dockershim", "cri-dockerd", Version(1, 24)
_TAKES_HANDLERS = Version(0, 4)
"""The first cri-dockerd with handlers (Mirantis/cri-dockerd#350)."""
_RUNTIME_FLAG = expression(r"--container-runtime(-endpoint)?[=\s][\"']?([^\s\"'\\]+)")
_K3S_FLAG = expression(r"\s[\"']?--docker\b(?!=false|-)")
_DEFAULT_FLAG = expression(r"--default-runtime[=\s][\"']?([^\s\"'\\]+)")
_COMMENT = expression(r"(?m)^[ \t]*[#;].*$")
_SERVICES = {"containerd": ("containerd", "k3s", "rke2-server", "rke2-agent"), "crio": ("crio",)}
_SHIM_DIRECTORIES = tuple(
    HostPath(directory)
    for directory in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
)
_MOST = 1 << 20
_SCRIPT = "#!"
_CONFIGURATION = expression(r"\bKATA_CONF_FILE=[\"']?([^\s\"'\x00]+)")
"""A script's export, or Environment= of a unit."""


def texts_below(
    tree: HostTree, directory: HostPath, pattern: str = "*"
) -> Iterator[tuple[str, str]]:
    """The matching files of a directory, in name order."""
    for name in sorted(tree.children(directory)):
        path = directory / name
        text = tree.read_text(path, _MOST) if fnmatch.fnmatchcase(name, pattern) else None
        if text is not None:
            yield path, text


def kata_conf_file(tree: HostTree, runtime: str, program: str) -> tuple[str, str] | None:
    """The value of KATA_CONF_FILE for a shim, and where it is set: a wrapper script, or a unit.

    A program without a path is searched like containerd does.
    """
    for path, text in (*_programs(tree, program), *_units(tree, *_SERVICES[runtime])):
        said = _CONFIGURATION.search(text)
        if said is not None:
            return said[1], path
    return None


def state_of_shim(tree: HostTree, program: str) -> ShimState:
    """Whether a program exists: at its path, or where containerd would find its name."""
    if not program:
        return "not looked for"
    if any(tree.resolve(path) is not None for path in _places(program)):
        return "there"
    return "missing" if program.startswith("/") else "not found"


def runtime_of(tree: HostTree, program: str) -> RuntimeName | None:
    """The runtime of a shim; None if unknown."""
    found = (runtime_at(tree, path) for path in _places(program))
    return next((name for name in found if name is not None), None)


def _places(program: str) -> list[HostPath]:
    if program.startswith("/"):
        return [HostPath(program)]
    is_name = bool(program) and "/" not in program
    return [place / program for place in _SHIM_DIRECTORIES if is_name]


def _programs(tree: HostTree, program: str) -> Iterator[tuple[str, str]]:
    """The program, if it is a script."""
    for path in _places(program):
        text = tree.read_text(path, _MOST)
        if text is not None and text.startswith(_SCRIPT):
            yield path, text


def _units(tree: HostTree, *services: str) -> Iterator[tuple[str, str]]:
    for service in services:
        for directory in _UNITS:
            yield from texts_below(tree, directory, f"{service}.service")
            yield from texts_below(tree, directory / f"{service}.service.d", "*.conf")


_TOOLKIT = (
    HostPath("/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"),
    runtimes_facts.TOOLKIT,
)
_ACCEPTS = (
    ("envvar", "accept-nvidia-visible-devices-envvar-when-unprivileged", True),
    ("volume-mounts", "accept-nvidia-visible-devices-as-volume-mounts", False),
)
"""Strategies of the device plugin, with the toolkit's keys for them and their defaults."""
_GUEST_FILES = ("kernel", "image", "initrd")
_DEV = HostPath("/dev")
_MACHINE = "/"
"""Where the user's own files are, whatever host is checked."""
_IMPORTED = (HostPath("/opt/kata/containerd/config.d"), HostPath("/etc/containerd/config.d"))
"""Directories that containerd reads only if imports lists them; the first is kata-deploy's."""
_CONTAINERDS: tuple[ProgramName, ...] = ("containerd", "k3s", "rke2")
_RANCHER_SOCKET = HostPath("/run/k3s/containerd/containerd.sock")
"""K3s and RKE2 run a containerd of their own, whatever other one the host has."""
_DURATION = expression(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def read_handlers(tree: HostTree, cri: CriName | None) -> HandlerFacts:
    """The handlers of a container runtime; by default of the configured one."""
    if cri == "crio" or (cri is None and _has_crio_alone(tree)):
        crio = runtimes_facts.main_file("crio")
        files = [(crio, tree.read_text(crio))]
        found = [(path, text) for path, text in files if text is not None]
        has_conmon = any(tree.exists(place / "conmon") for place in _SHIM_DIRECTORIES)
        facts = handlers.read_crio([*found, *texts_below(tree, CRIO_DROP_INS)])
        return replace(
            facts,
            nvidia_hooks=tuple(
                path
                for place in dict.fromkeys((*handlers.HOOKS, *facts.hook_directories))
                for path, text in texts_below(tree, HostPath(place), "*.json")
                if "nvidia-container" in text
            ),
            lacks_conmon=not has_conmon and bool(tree.children(_SHIM_DIRECTORIES[-1])),
            without_program=frozenset(
                each.name
                for each in facts.handlers
                if not any(map(tree.resolve, _places(each.runtime_path or each.name)))
            ),
        )
    beside = tuple(texts_below(tree, CONTAINERD_DROP_INS, "*.toml"))
    programs = reversed(_CONTAINERDS) if tree.exists(_RANCHER_SOCKET) else _CONTAINERDS
    for program in programs:
        main = runtimes_facts.main_file(program)
        if tree.exists(main):
            return _containerd(tree, program, main, beside)
    if tree.exists(runtimes_facts.MICROK8S_MAIN):
        return _containerd(tree, "containerd", runtimes_facts.MICROK8S_MAIN, ())
    version = runtimes_facts.read_version(tree, "containerd")
    return replace(handlers.read_containerd([], beside), version=version)


def _containerd(
    tree: HostTree, program: ProgramName, main: HostPath, beside: Iterable[tuple[str, str]]
) -> HandlerFacts:
    """The definitions of a main file and all its imports."""
    version = runtimes_facts.read_version(tree, program)
    read: list[tuple[str, str]] = []
    unread: list[UnreadFile] = []

    def imports(path: HostPath) -> tuple[str, ...]:
        unread.extend(_read_into(read, tree, path))
        return handlers.imports_of(dict(read).get(path, "")) or ()

    paths = runtimes_facts.imported(tree, main, imports, version).paths
    unsure = [(path, text) for path, text in beside if path not in paths]
    facts = handlers.read_containerd(read, unsure)
    is_own = program != "containerd" or main == runtimes_facts.MICROK8S_MAIN
    places = () if is_own else _IMPORTED  # the others generate their main file
    others = [each for place in places for each in texts_below(tree, place, "*.toml")]
    if is_own:
        of_host = runtimes_facts.main_file("containerd")
        others = [(of_host, tree.read_text(of_host) or "")]
    lost = handlers.read_containerd(each for each in others if each[0] not in paths)
    good = [ConfigFile(HostPath(path), text) for path, text in read if path in facts.files]
    return replace(
        facts,
        version=version,
        unreadable=(*facts.unreadable, *unread),
        mixed=_mixed(main, good, version),
        unread=lost.handlers,
    )


def _mixed(
    main: HostPath, files: list[ConfigFile], version: Version | None
) -> tuple[MixedVersions, ...]:
    """What is known about imports of another version; nothing if the main file is unread."""
    if not files or files[0].path != main:
        return ()
    try:
        return tuple(mixed_versions(files[0], files[1:], version))
    except InvalidDocument:
        return ()  # it has a byte order mark, of which nobody knows what becomes


def _read_into(read: list[tuple[str, str]], tree: HostTree, path: HostPath) -> Iterator[UnreadFile]:
    """Record a file that is not readable as text; add any other to the read ones."""
    try:
        text = runtimes_facts.read_config(tree, path).text
    except InvalidDocument:
        yield _unread(path, tree.read_text(path))
    else:
        read += [] if text is None else [(path, text)]


def _unread(path: HostPath, text: str | None) -> UnreadFile:
    """A file without readable text, or with invalid characters."""
    if text is None:
        return UnreadFile(path, "cannot read it; run as root", is_wrong=False)
    line = text.partition("\ufffd")[0].count("\n") + 1
    return UnreadFile(f"{path}:{line}", "it is not UTF-8")


def _has_crio_alone(tree: HostTree) -> bool:
    has_containerd = any(tree.exists(runtimes_facts.main_file(name)) for name in _CONTAINERDS)
    has_crio = tree.exists(runtimes_facts.main_file("crio")) or bool(tree.children(CRIO_DROP_INS))
    return has_crio and not has_containerd


def configuration_paths(
    entry: HandlerEntry | None,
    conf_file: tuple[str, str] | None,
    handler: str,
    runtime: RuntimeName,
) -> tuple[HostPath, ...]:
    """The paths where the shim looks for its configuration, in order."""
    if entry is not None and entry.config_path:
        return (HostPath(entry.config_path),)
    if conf_file is not None:
        return (HostPath(conf_file[0]),)
    own = () if entry is not None else (handler_configuration(handler),)
    return (*own, *search_path(runtime))


def own_configuration(tree: HostTree, handler: str) -> ConfigurationFacts:
    """The configuration that vfiomgr wrote for a handler that the container runtime lacks."""
    own = read_settings_of(tree, [handler_configuration(handler)])
    problem = f"handler {handler} not found, which would name it"
    return own if own.file is not None else ConfigurationFacts((), problem=problem)


def handler_configuration_of(
    tree: HostTree,
    entry: HandlerEntry | None,
    conf_file: tuple[str, str] | None,
    handler: str | None,
    runtime: RuntimeName,
) -> ConfigurationFacts:
    """The configuration that the shim of a handler reads."""
    if handler is None or (entry is not None and not entry.is_kata):
        return ConfigurationFacts((), problem="no Kata handler")
    return read_settings_of(tree, configuration_paths(entry, conf_file, handler, runtime))


def configuration_of(host: HostSource, handler: str) -> ConfigurationFacts:
    """The configuration of a handler, from the container runtime or in vfiomgr's own place."""
    if host.snapshot is not None:
        return ConfigurationFacts((), problem="a snapshot does not contain the configuration")
    paths = configuration_paths(installed_handler(host, handler), None, handler, "rs")
    return read_settings_of(host.tree, (*paths, *search_path("go")))


def installed_handler(host: HostSource, handler: str) -> HandlerEntry | None:
    """The handler's entry in the container runtime of the host."""
    return None if host.snapshot else read_handlers(host.tree, None).handler(handler)


def read_settings_of(tree: HostTree, paths: Iterable[HostPath]) -> ConfigurationFacts:
    """The first existing configuration, with its drop-ins."""
    looked = []
    for path in paths:
        looked.append(path)
        file = read_configuration(tree, path)
        if file is not None:
            return _facts(file, tuple(looked))
    first, *others = looked or ("configuration",)
    problem = f"{first} does not exist" + (", and Kata's other places have none" if others else "")
    return ConfigurationFacts(tuple(looked), problem=problem)


def _facts(file: KataConfigurationFile, looked: tuple[str, ...]) -> ConfigurationFacts:
    try:
        settings = read_settings(file.resolved, file.text, file.drop_ins)
        texts = [(file.resolved, file.text), *sorted(file.drop_ins)]
        documents = tuple((path, parse(text, path)) for path, text in texts)
    except InvalidDocument as error:
        return ConfigurationFacts(looked, file, problem=error.message)
    return ConfigurationFacts(looked, file, settings, documents)


def named_configuration(host: HostSource, typed: str) -> ConfigurationFacts:
    """A file that a user named: below the root if it exists there, else on this machine.

    Raises:
        UsageError: it is in neither.
    """
    place = HostPath(os.path.abspath(typed))
    own = HostTree(_MACHINE)
    trees = [own] if host.snapshot is not None else [host.tree, own]
    for tree in trees:
        facts = read_settings_of(tree, (place,))
        if facts.file is not None:
            return facts
    message = f"cannot read configuration {typed}"
    raise UsageError(message, "name an existing, readable file: --config FILE")


def image_of(tree: HostTree, settings: KataSettings) -> GuestImage:
    """The guest files of a configuration."""
    named = ((key, settings.hypervisor_text(key)) for key in _GUEST_FILES)
    hypervisor = f"hypervisor.{settings.hypervisor}"
    return GuestImage(
        source=str(settings.path),
        hypervisor=settings.hypervisor,
        files=tuple(read_guest_file(tree, key, path) for key, path in named if path),
        rootfs_type=settings.hypervisor_text("rootfs_type") or None,
        guest_hook_path=settings.hypervisor_text("guest_hook_path"),
        vfio_mode=settings.vfio_mode,
        mistyped=(
            *settings.no_texts(hypervisor, *_GUEST_FILES, "rootfs_type", "guest_hook_path"),
            *settings.no_texts("runtime", "vfio_mode", "hypervisor_name"),
        ),
    )


def absent_nodes(tree: HostTree, host: HostSnapshot) -> frozenset[str]:
    """VFIO nodes of specifications that do not exist; none without /dev."""
    if not tree.exists(_DEV):
        return frozenset()
    edits = (edit for file in host.cdi_files for _, edit in read_file(file).all_edits())
    named = {node.on_host for edit in edits for node in edit.device_nodes}
    return frozenset(n for n in named if is_vfio_node(n) and not tree.exists(HostPath(n)))


def lacks_checkpoint(tree: HostTree) -> bool:
    """Whether a kubelet runs without a record of what its device plugins registered."""
    return tree.exists(_KUBELET_SOCKET) and not tree.exists(RECORD)


def empty_resources(tree: HostTree) -> frozenset[str]:
    """Resources without a healthy device in the kubelet's record (writeCheckpoint)."""
    try:
        data = json.loads(tree.read_text(RECORD, _MOST) or "")["Data"]["RegisteredDevices"]
        return frozenset(name for name, devices in data.items() if not devices)
    except (ValueError, LookupError, TypeError, AttributeError):
        return frozenset()  # it is not there, or of another release


def lacks_plugins(tree: HostTree) -> bool:
    """Whether a kubelet runs and no device plugin has a socket, in either directory for them."""
    above = RECORD.parent
    names = (*tree.children(above), *tree.children(above.parent / "plugins_registry"))
    return tree.exists(_KUBELET_SOCKET) and {n for n in names if n.endswith(".sock")} == {
        _KUBELET_SOCKET.name
    }


def read_toolkit(tree: HostTree) -> ToolkitFacts | None:
    """The configuration of NVIDIA's container runtime, first that of the GPU Operator."""
    found = runtimes_facts.read_toolkit(tree, *_TOOLKIT)
    if found is None:
        return None
    path, document = found
    return ToolkitFacts(
        path,
        tuple(
            (strategy, f"{key} = {'false' if key in document else 'false, the default'}")
            for strategy, key, default in _ACCEPTS
            if path and document.get(key, default) is False
        ),
    )


def has_socket(tree: HostTree, settings: KataSettings | None) -> bool | None:
    """Whether the kubelet's socket exists; None if unknown or not set."""
    path = "" if settings is None else settings.pod_resource_api_sock.removeprefix("unix://")
    if not path.startswith("/") or not tree.exists(HostPath(path).parent.parent):
        return None
    return tree.exists(HostPath(path))


def kubelet_version(tree: HostTree) -> Version | None:
    """The version that the kubelet prints, or that of its package."""
    packages = ("kubelet",)
    told = runtimes_facts.version_of(tree, "kubelet", packages)
    return told or runtimes_facts.packaged(tree, packages)


def read_docker(
    tree: HostTree, kubelet: KubeletFacts | None, version: Version | None
) -> DockerFacts | None:
    """Whether the kubelet runs pods with Docker; None also if that is unknown.

    Before 1.24 the kubelet does so by itself (dockershim), unless a flag names another runtime.
    kubeadm writes such flags, and the kubelet serves the socket of dockershim. k3s has cri-dockerd
    in its program.
    """
    for path, text in _units(tree, "k3s", "k3s-agent"):
        if _K3S_FLAG.search(_COMMENT.sub("", text)):
            return DockerFacts(_CRI_DOCKERD, f"{path}: --docker", _default_of_docker(tree))
    files = [(path, tree.read_text(path, _MOST)) for path in _KUBELET_FLAGS]
    read = [*_units(tree, "kubelet"), *((path, text) for path, text in files if text is not None)]
    runtime, endpoint = "", "" if kubelet is None else kubelet.endpoint
    source = str(KUBELET)
    for path, text in read:
        for suffix, value in _RUNTIME_FLAG.findall(_COMMENT.sub("", text)):
            source = path
            runtime, endpoint = (runtime, value) if suffix else (value, endpoint)
    is_old = version is not None and version < _NO_DOCKERSHIM
    if _CRI_DOCKERD in endpoint:
        own = runtimes_facts.version_of(tree, _CRI_DOCKERD, (_CRI_DOCKERD,))
        takes = None if own is None else own >= _TAKES_HANDLERS
        return DockerFacts(_CRI_DOCKERD, f"{source}: {endpoint}", _default_of_docker(tree), takes)
    is_told = tree.exists(_SHIM_SOCKET) or _KUBEADM_FLAGS in dict(read)
    is_default = not endpoint and runtime == "" and is_told
    if not is_old or not (is_default or runtime == "docker" or _DOCKERSHIM in endpoint):
        return None
    shown = f"{source}: {endpoint}" if endpoint else "without --container-runtime-endpoint"
    shown = f"kubelet {version}, {shown}"
    return DockerFacts(_DOCKERSHIM, shown, _default_of_docker(tree), takes_handlers=False)


def _default_of_docker(tree: HostTree) -> str | None:
    """Docker's default runtime, of its unit or its configuration; None if that is not readable."""
    for _, text in _units(tree, "docker"):
        if found := _DEFAULT_FLAG.search(_COMMENT.sub("", text)):
            return str(found[1])
    path = runtimes_facts.main_file("docker")
    stated = tree.read_text(path, _MOST)
    if stated is None:
        return None if tree.exists(path) else "runc"
    try:
        document: Any = read_values(stated, path, "")
    except InvalidDocument:
        return None
    found = document.get("default-runtime", "runc") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def read_kubelet(tree: HostTree, version: Version | None) -> KubeletFacts | None:
    """What the kubelet's configuration sets; None if it is not readable."""
    text = tree.read_text(KUBELET)
    if text is None:
        return None
    try:
        document: Any = read_values(text, KUBELET, "")
    except InvalidDocument as error:
        return KubeletFacts(KUBELET, 0, error.message)
    if not isinstance(document, dict | None):
        return KubeletFacts(KUBELET, 0, f"{KUBELET}:1: not a mapping")
    document = document or {}
    parts = _DURATION.findall(str(document.get("runtimeRequestTimeout") or ""))
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    gates = document.get("featureGates")
    gate = gates.get(_GATE) if isinstance(gates, dict) else None
    return KubeletFacts(
        KUBELET,
        seconds or KUBELET_TIMEOUT,
        pod_resources_get=gate if isinstance(gate, bool) else None,
        version=version,
        endpoint=str(document.get("containerRuntimeEndpoint") or ""),
        cgroup_driver=str(document.get("cgroupDriver") or ""),
    )
