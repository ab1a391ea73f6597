"""The programs of a host that read CDI specifications: whether they read them at all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.cdi.check import other_nodes
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC, CdiFile
from vfiomgr.containers.cdi.rules import CdiFinding
from vfiomgr.containers.runtimes import location, values
from vfiomgr.containers.runtimes.handlers import enabled_cdi, imports_of, read_containerd
from vfiomgr.diagnostic import as_remedies
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import ProgramName
    from vfiomgr.host.tree import HostTree

_TITLES = {"podman": "Podman", "crio": "CRI-O", "docker": "Docker", "containerd": "containerd"}
_SINCE = {
    "podman": Version(4, 1),
    "crio": Version(1, 23),
    "docker": Version(25, 0),
    "containerd": Version(1, 7),
}
"""The first releases that read CDI specifications."""
_WITHOUT_STATIC = {"podman": Version(4, 3), "crio": Version(1, 26)}
"""From these on /run/cdi is read without /etc/cdi (CDI 0.5.1, PR 79; go.mod at the tags)."""
_PODMAN_STATIC = (Version(5, 5), Version(5, 6))
"""From the first on Podman takes its directories from containers.conf, whose default is /etc/cdi
alone before the second (containers/podman #26569)."""
_PODMAN_FILES = tuple(
    HostPath(f"{place}/containers/containers.conf") for place in ("/usr/share", "/etc")
)
_PODMAN_OF_USER, _HOME = ".config/containers/containers.conf", HostPath("/home")
_PODMAN_KEY = expression(r"(?m)^\s*cdi_spec_dirs\s*=")
_DOCKER_ON = Version(28, 2)
"""From here on Docker has CDI without features.cdi (moby/moby#49963)."""
_CONTAINERD_ON = Version(2, 0)
"""From here on enable_cdi is true by default (internal/cri/config/config_unix.go)."""
_NVIDIA = (HostPath("/sys/module/nvidia"), HostPath("/dev/nvidia0"))
_RELEASE = HostPath("/proc/sys/kernel/osrelease")
_CAPABILITIES = HostPath("/proc/driver/nvidia/capabilities")
_MINOR = expression(r"DeviceFileMinor:\s*(\d+)")
_GPU_NODE = expression(r"/dev/nvidia\d+")
_REFRESH = "nvidia-cdi-refresh.service"
_UNITS = tuple(map(HostPath, ("/etc/systemd/system", "/usr/lib/systemd/system")))
_REFRESHED = tuple(place / "multi-user.target.wants" / _REFRESH for place in _UNITS)
_UNCOMPRESSED = expression(r"(?m)^ExecCondition=.*\.ko(?::|\[:\]).*modules\.dep")
_NVIDIA_MODULE = expression(r"(?m)^\S*/(nvidia(?:-current)?\.ko[.\w]*):")
_MODE_OF_RUNTIME = ("nvidia-container-runtime", "mode")
_OTHERS_READ, _OTHERS_ENTER = 0o004, 0o001


class DockerSettings(Value):
    """What a configuration of Docker sets."""

    path: str
    has_cdi: bool | None
    """features.cdi; None if it is not set."""
    has_directories: bool
    """Whether cdi-spec-dirs is set."""
    is_rootless: bool


class Readers(Value):
    """What decides whether the programs of a host read its specifications."""

    versions: Mapping[str, Version]
    """Those of installed programs, as far as known."""
    has_static: bool
    """Whether /etc/cdi exists."""
    docker: tuple[DockerSettings, ...] = ()
    containerd: tuple[tuple[str, bool | None], ...] = ()
    """Each main file of a containerd that runs pods, and its enable_cdi; None if it is not set."""
    has_other_nodes: bool = True
    """Whether a device has a node that is not of VFIO; Kata reads those of VFIO itself."""
    mig_nodes: tuple[str, ...] = ()
    """The nodes of the existing compute instances of MIG."""
    files: tuple[tuple[str, frozenset[str]], ...] = ()
    """Each file, and the device nodes in it."""
    closed: tuple[str, ...] = ()
    """Files and directories that only their owner reads."""
    is_refreshed: bool = False
    """Whether nvidia-cdi-refresh is enabled, and NVIDIA's driver has a GPU."""
    unmatched: str = ""
    """The driver's compressed module, if the unit has a condition for an uncompressed one."""
    has_podman_directories: bool = False
    """Whether a containers.conf sets cdi_spec_dirs."""
    mode: str = ""
    """That of NVIDIA's runtime, if nvidia-ctk takes it as its own and has no such mode."""


def read_readers(tree: HostTree, files: tuple[CdiFile, ...]) -> Readers:
    """The facts about the programs of a host that has specifications."""
    programs: tuple[ProgramName, ...] = ("crio", "docker", "containerd")
    found: dict[str, Version | None] = {n: location.read_version(tree, n) for n in programs}
    found["podman"] = location.version_of(tree, "podman", ("podman",))
    versions = {name: version for name, version in found.items() if version is not None}
    return Readers(
        versions,
        tree.exists(STATIC),
        tuple(_docker(tree, is_installed="docker" in versions)),
        tuple(_containerd(tree)),
        bool(other_nodes(files)),
        tuple(_mig_nodes(tree)),
        tuple((file.path, other_nodes([file])) for file in files),
        tuple(_closed(tree, files)),
        any(map(tree.exists, _REFRESHED)) and all(map(tree.exists, _NVIDIA)),
        _unmatched(tree),
        any(_PODMAN_KEY.search(tree.read_text(path) or "") for path in _podman_files(tree)),
        _unsuitable_mode(tree),
    )


def _podman_files(tree: HostTree) -> Iterator[HostPath]:
    """Each containers.conf of the system and of users, and its drop-ins."""
    homes = (HostPath("/root"), *(HostPath(f"/home/{name}") for name in tree.children(_HOME)))
    for place in (*_PODMAN_FILES, *(home / _PODMAN_OF_USER for home in homes)):
        yield place
        yield from (
            place.parent / f"{place.name}.d" / name
            for name in tree.children(HostPath(f"{place}.d"))
        )


def _unsuitable_mode(tree: HostTree) -> str:
    """nvidia-ctk 1.18.0 reads the mode of the runtime (NVIDIA/nvidia-container-toolkit 1376)."""
    _, document = location.read_toolkit(tree, location.TOOLKIT) or ("", {})
    mode = values.found(document, _MODE_OF_RUNTIME)
    if mode not in ("cdi", "legacy"):
        return ""
    version = location.version_of(tree, "nvidia-ctk", ("nvidia-container-toolkit",))
    return str(mode) if version == Version(1, 18) else ""


def _unmatched(tree: HostTree) -> str:
    """Up to 1.18.1 the condition has a colon after .ko (NVIDIA/nvidia-container-toolkit 1517).

    Nothing is known of a unit with drop-ins.
    """
    unit = next((text for place in _UNITS if (text := tree.read_text(place / _REFRESH))), "")
    is_changed = any(tree.exists(place / f"{_REFRESH}.d") for place in _UNITS)
    if is_changed or not _UNCOMPRESSED.search(unit):
        return ""
    release = tree.read(_RELEASE) or ""
    modules = tree.read_text(HostPath(f"/lib/modules/{release}/modules.dep")) or ""
    found = set(_NVIDIA_MODULE.findall(modules))
    return "" if any(name.endswith(".ko") for name in found) else min(found, default="")


def _docker(tree: HostTree, *, is_installed: bool) -> Iterator[DockerSettings]:
    main = location.main_file("docker")
    rootless = location.rootless_files(tree)
    paths = [main] if is_installed or tree.exists(main) else []
    for path in (*paths, *rootless):
        text = tree.read_text(path) if tree.exists(path) else "{}"
        try:
            data: Any = json.loads(text or "")
        except ValueError:
            continue
        data = data if isinstance(data, dict) else {}
        features = data.get("features")
        flag = features.get("cdi") if isinstance(features, dict) else None
        has_directories = bool(data.get("cdi-spec-dirs"))
        is_set = flag if isinstance(flag, bool) else None
        yield DockerSettings(path, is_set, has_directories, path in rootless)


def _containerd(tree: HostTree) -> Iterator[tuple[str, bool | None]]:
    """Without CRI, containerd serves Docker, which reads CDI itself."""
    main = location.main_file("containerd")
    if not tree.exists(main):
        return

    def imports(path: HostPath) -> tuple[str, ...]:
        return imports_of(tree.read_text(path) or "") or ()

    version = location.read_version(tree, "containerd")
    paths = (main, *location.imported(tree, main, imports, version).paths)
    files = [(path, tree.read_text(path) or "") for path in paths]
    facts = read_containerd(files)
    if facts.is_known and not facts.disabling:
        yield main, enabled_cdi(text for _, text in files)


def _mig_nodes(tree: HostTree) -> Iterator[str]:
    """Their minor numbers are in gpuN/mig/giN/ciN/access (NVIDIA's MIG user guide)."""
    for gpu in tree.children(_CAPABILITIES):
        for instance in tree.children(_CAPABILITIES / gpu / "mig"):
            place = _CAPABILITIES / gpu / "mig" / instance
            for compute in tree.children(place):
                said = _MINOR.search(tree.read_text(place / compute / "access") or "")
                if compute.startswith("ci") and said is not None:
                    yield f"/dev/nvidia-caps/nvidia-cap{said[1]}"


def _closed(tree: HostTree, files: tuple[CdiFile, ...]) -> Iterator[str]:
    for file in files:
        path = HostPath(file.path)
        for place, bit in ((path.parent, _OTHERS_ENTER), (path, _OTHERS_READ)):
            status = tree.status(place)
            if status is not None and not status.st_mode & bit:
                yield place


def _finding(rule_id: str, subject: str, program: str, what: str, *remedies: str) -> CdiFinding:
    ways, who = as_remedies(remedies), (program or "all",)
    return CdiFinding(rule_id, "warning", subject, what, remedies=ways, consumers=who)


def _named(facts: Readers, name: str) -> str:
    return f"{_TITLES[name]} {facts.versions[name]}"


def _too_old(facts: Readers) -> Iterator[CdiFinding]:
    """Programs without CDI."""
    for name, since in _SINCE.items():
        version = facts.versions.get(name)
        is_unused = name == "containerd" and not (facts.containerd and facts.has_other_nodes)
        if version is None or version >= since or is_unused:
            continue
        program, is_tool = _named(facts, name), name in ("podman", "docker")
        yield _finding(
            "reader-too-old",
            STATIC,
            program,
            f"{program} reads no CDI specifications; {_TITLES[name]} does from {since} on",
            f"upgrade it to {since} or later",
            "for NVIDIA's GPUs use nvidia-container-runtime in its mode cdi" if is_tool else "",
        )


def _without_static(facts: Readers) -> Iterator[CdiFinding]:
    """CDI before 0.5.1 reads no directory if one is missing."""
    for name, since in _WITHOUT_STATIC.items():
        version = facts.versions.get(name)
        if version is None or facts.has_static or not _SINCE[name] <= version < since:
            continue
        program = _named(facts, name)
        yield _finding(
            "reader-directory",
            STATIC,
            program,
            f"{STATIC} does not exist, so {program} reads no specification, those in /run/cdi too",
            f"create it: mkdir {STATIC}",
            f"upgrade {_TITLES[name]} to {since} or later",
        )


def _static_only(facts: Readers) -> Iterator[CdiFinding]:
    """A release of Podman that reads /run/cdi only if it is told to."""
    version, (since, until) = facts.versions.get("podman"), _PODMAN_STATIC
    dynamic = [path for path, _ in facts.files if path.startswith(f"{DYNAMIC}/")]
    if version is None or not since <= version < until or not dynamic:
        return
    if facts.has_podman_directories:
        return
    program = _named(facts, "podman")
    yield _finding(
        "reader-directory",
        dynamic[0],
        "podman-5.4",
        f"{program} reads {STATIC} only, not {dynamic[0]}: containers.conf sets no cdi_spec_dirs",
        f'set cdi_spec_dirs = ["{STATIC}", "{DYNAMIC}"] in [engine] of '
        "/etc/containers/containers.conf, or pass --cdi-spec-dir",
        f"upgrade Podman to {until} or later",
    )


def _docker_off(facts: Readers) -> Iterator[CdiFinding]:
    version = facts.versions.get("docker")
    if version is None or version < _SINCE["docker"]:
        return
    podman = facts.versions.get("podman")
    has_podman = podman is not None and podman >= _SINCE["podman"]
    for each in facts.docker:
        program = _named(facts, "docker")
        who = f"the rootless {program} of this file" if each.is_rootless else program
        if each.has_cdi is False or (each.has_cdi is None and version < _DOCKER_ON):
            default = "sets it to false" if each.has_cdi is False else "does not set it"
            yield _finding(
                "reader-not-enabled",
                each.path,
                program,
                f"CDI is off in {who}: {each.path} {default} (features.cdi, needed before "
                f"{_DOCKER_ON}), so it finds no 'device driver \"cdi\"'"
                + (f"; {_named(facts, 'podman')} reads it" if has_podman else ""),
                f'set "features": {{"cdi": true}} in {each.path}, then restart this Docker',
            )
        if each.is_rootless and not each.has_directories:
            home = HostPath(each.path).parent.parent
            yield _finding(
                "reader-directory",
                each.path,
                program,
                f"{who} may not see {STATIC} and /run/cdi: rootlesskit gives it directories /etc "
                "and /run of its own",
                f'copy the specification to {home}/cdi, and set "cdi-spec-dirs": ["{home}/cdi"] in '
                f"{each.path}",
            )


def _containerd_off(facts: Readers) -> Iterator[CdiFinding]:
    version = facts.versions.get("containerd")
    if version is None or version < _SINCE["containerd"] or not facts.has_other_nodes:
        return
    for path, is_enabled in facts.containerd:
        if is_enabled is False or (is_enabled is None and version < _CONTAINERD_ON):
            program = _named(facts, "containerd")
            yield _finding(
                "reader-not-enabled",
                path,
                program,
                f"CDI is off in {program}: {path} does not set enable_cdi to true, so pods that "
                "request devices by CDI silently get none",
                f"set enable_cdi = true in the table of CRI in {path}, then restart containerd",
            )


def _not_for_users(facts: Readers) -> Iterator[CdiFinding]:
    """Files that a program without root's rights cannot read."""
    is_rootless = any(each.is_rootless for each in facts.docker)
    program = "rootless Podman" if "podman" in facts.versions else "rootless Docker"
    if not facts.closed or not (is_rootless or "podman" in facts.versions):
        return
    paths = dict.fromkeys(facts.closed)
    yield _finding(
        "reader-permissions",
        facts.closed[0],
        program,
        f"users cannot read {', '.join(paths)}, so {program} finds no device there (root's does)",
        "if users run containers with these devices, make it readable: chmod a+rX "
        f"{' '.join(paths)}",
    )


def _without_mig(facts: Readers) -> Iterator[CdiFinding]:
    """Specifications of whole GPUs that lack existing instances of MIG."""
    known = frozenset().union(*(nodes for _, nodes in facts.files))
    missing = [node for node in facts.mig_nodes if node not in known]
    whole = [path for path, nodes in facts.files if any(map(_GPU_NODE.fullmatch, nodes))]
    if missing and whole:
        count = f"{len(missing)} MIG {'instance' if len(missing) == 1 else 'instances'}"
        yield _finding(
            "mig-missing",
            whole[0],
            "",
            f"{count} of this host {'is' if len(missing) == 1 else 'are'} in no specification "
            f"({missing[0]}): the MIG layout was changed after {whole[0]} was generated",
            f"generate it again after each change: nvidia-ctk cdi generate "
            f"--output={shlex.quote(whole[0])}, or systemctl start nvidia-cdi-refresh",
        )


def _without_uvm(facts: Readers) -> Iterator[CdiFinding]:
    """CUDA opens /dev/nvidia-uvm, which exists only after the module nvidia-uvm was loaded."""
    for path, nodes in facts.files:
        if any(map(_GPU_NODE.fullmatch, nodes)) and _CONTROL in nodes and _UVM not in nodes:
            yield _finding(
                "uvm-missing",
                path,
                "",
                f"{path} has GPUs, but not {_UVM}, which CUDA opens: the module nvidia-uvm was not "
                "loaded when it was generated",
                "load it, also at boot (nvidia-modprobe -u -c=0; nvidia-uvm in "
                f"/etc/modules-load.d), and generate it again: nvidia-ctk cdi generate "
                f"--output={shlex.quote(path)}",
            )


_CONTROL, _UVM = "/dev/nvidiactl", "/dev/nvidia-uvm"


def _not_refreshed(facts: Readers) -> Iterator[CdiFinding]:
    """A unit that ran before the driver was loaded (nvidia-container-toolkit 1.18 and later)."""
    if not facts.is_refreshed or any(any(map(_GPU_NODE.fullmatch, n)) for _, n in facts.files):
        return
    why = "the unit may have run before the driver was loaded"
    later = "to load the driver earlier at boot, write nvidia to /etc/modules-load.d/nvidia.conf"
    remedies = [f"systemctl restart nvidia-cdi-refresh; {later}"]
    if facts.unmatched:
        why = f"its ExecCondition does not match {facts.unmatched} in modules.dep"
        remedies = [
            "upgrade nvidia-container-toolkit to 1.18.2 or later",
            "set ExecCondition= (empty) in a drop-in: systemctl edit nvidia-cdi-refresh",
            f"nvidia-ctk cdi generate --output={DYNAMIC}/nvidia.yaml (after each boot)",
        ]
    elif facts.mode:
        why = f'nvidia-ctk 1.18.0 has no mode {facts.mode}, and takes mode = "{facts.mode}" from '
        why += str(location.TOOLKIT)
        remedies = [
            "upgrade nvidia-container-toolkit to 1.18.1 or later",
            'set mode = "auto" in that file, then systemctl restart nvidia-cdi-refresh',
            f"nvidia-ctk cdi generate --mode=auto --output={DYNAMIC}/nvidia.yaml (after each boot)",
        ]
    yield _finding(
        "refresh-missing",
        DYNAMIC,
        "",
        "nvidia-cdi-refresh is enabled and NVIDIA's driver is loaded, but no specification has a "
        f"GPU: {why}",
        *remedies,
    )


def _unknown_versions(facts: Readers) -> Iterator[str]:
    unset = [path for path, is_enabled in facts.containerd if is_enabled is None]
    if unset and "containerd" not in facts.versions and facts.has_other_nodes:
        yield f"whether CDI is on in containerd: no enable_cdi in {unset[0]}, no known version"


READER_RULES: RuleSet[Readers] = register(
    RuleSet(
        "the programs that read CDI specifications",
        rules=(
            rule(_too_old, "reader-too-old"),
            rule(_without_static, "reader-directory"),
            rule(_static_only, "reader-directory"),
            rule(_docker_off, "reader-not-enabled", "reader-directory"),
            rule(_containerd_off, "reader-not-enabled"),
            rule(_not_for_users, "reader-permissions"),
            rule(_without_mig, "mig-missing"),
            rule(_without_uvm, "uvm-missing"),
            rule(_not_refreshed, "refresh-missing"),
        ),
        unknown=(_unknown_versions,),
        host=lambda facts: facts,
    )
)
