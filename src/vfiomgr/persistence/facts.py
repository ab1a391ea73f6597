"""Facts about persistent settings in /etc, the initramfs, and the owners of VFIO nodes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.documents.text import TextFile
from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters
from vfiomgr.host.owners import NodeFact
from vfiomgr.paths import SCRIPT, VFIO_CDEVS, VFIO_NODES, HostPath
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.model import (
    DRIVERCTL,
    HOOKS,
    RULES,
    SWEPT,
    UNIT,
    FileFacts,
    Initramfs,
    is_rule_file,
    parse_rule,
)
from vfiomgr.persistence.reservation import is_reservation_file, parse_reservation
from vfiomgr.persistence.systems import SYSTEMS

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.persistence.model import Manager, PersistedBinding

_SYSTEMD = HostPath("/run/systemd/system")
RELEASES = (HostPath("/etc/os-release"), HostPath("/usr/lib/os-release"))


def read_facet(tree: HostTree) -> FileFacts:
    """Read the facet."""
    return FileFacts(
        read_files(tree),
        read_nodes(tree),
        read_initramfs(tree),
        has_systemd(tree),
        read_system(tree),
        read_unkept(tree),
    )


def read_keeping(tree: HostTree) -> FileFacts:
    """Read only whether files in /etc are kept."""
    return FileFacts(system=read_system(tree), unkept=read_unkept(tree))


def read_named(tree: HostTree, paths: Iterable[str]) -> FileFacts:
    """Read some files, and nothing else, as the facet."""
    texts = ((path, tree.read_text(HostPath(path))) for path in paths)
    return FileFacts(tuple(TextFile(path, text) for path, text in texts if text is not None))


def read_files(tree: HostTree) -> tuple[TextFile, ...]:
    """Read the rules, hooks, units and layout of vfiomgr, and the entries of driverctl."""
    texts = ((path, tree.read_text(path)) for path in list_files(tree))
    files = tuple(TextFile(path, text) for path, text in texts if text is not None)
    for file in files:
        if file.path.startswith(RULES) and not (
            parse_rule(file.text) or parse_reservation(file.text)
        ):
            warnings.warn(f"ignoring {file.path}: no record of vfiomgr found", stacklevel=2)
    return files


def list_files(tree: HostTree) -> list[HostPath]:
    """The paths of the files of `read_files`, whether they exist or not."""
    names = tree.children(RULES)
    paths = [RULES / name for name in names if is_rule_file(name) or is_reservation_file(name)]
    paths += [DRIVERCTL / name for name in tree.children(DRIVERCTL)]
    return [*paths, *dict.fromkeys(HOOKS.values()), UNIT, SWEPT, *installed_layout.FILES, SCRIPT]


def read_rules(tree: HostTree) -> tuple[PersistedBinding, ...]:
    """Read the bindings in vfiomgr's rules."""
    return FileFacts(read_files(tree)).bindings


def rules_changed(tree: HostTree) -> int | None:
    """The time of the last change of a rule."""
    return tree.modified(RULES)


def read_nodes(tree: HostTree) -> tuple[NodeFact, ...]:
    """Read the owners of the nodes of groups and devices."""
    found = ((path, tree.access(path)) for path in list_nodes(tree))
    return tuple(NodeFact(path, access) for path, access in found if access is not None)


def list_nodes(tree: HostTree) -> list[HostPath]:
    """The nodes of groups and devices."""
    paths = [VFIO_NODES / name for name in tree.children(VFIO_NODES) if name.isdecimal()]
    return [*paths, *(VFIO_CDEVS / name for name in tree.children(VFIO_CDEVS))]


def has_systemd(tree: HostTree) -> bool:
    """Whether systemd runs the host (sd_booted(3))."""
    return tree.exists(_SYSTEMD)


_MARKS = {
    "/etc/harvester-release.yaml": "harvester",
    "/etc/unraid-version": "unraid",
    "/usr/bin/midclt": "truenas",
}
"""Files of systems whose os-release has the ID of another."""
_IDENTIFIER = expression(r"""^ID=["']?([^"'\s]+)""", re.MULTILINE)
_IN_MEMORY = frozenset({"ramfs", "rootfs", "tmpfs"})
_UPPER = expression(r"(?:^|,)upperdir=([^,]+)")


def read_system(tree: HostTree) -> str:
    """The key in SYSTEMS; empty for others."""
    marked = next((name for file, name in _MARKS.items() if tree.exists(HostPath(file))), "")
    texts = (tree.read_text(HostPath(place)) for place in RELEASES)
    match = _IDENTIFIER.search(next(filter(None, texts), ""))
    return marked or (match[1] if match is not None and match[1] in SYSTEMS else "")


def read_unkept(tree: HostTree) -> str:
    """What shows that files in /etc are lost: a mount that is read-only or in memory.

    The changes of an overlay are in its upper directory, if that is visible.
    """
    lines = (line.split() for line in (tree.read_text(_MOUNTS) or "").splitlines())
    mounts = [(HostPath(f[1]), f[2], f[3]) for f in lines if len(f) >= _MOUNT_FIELDS]
    point, kind, options = _mount_of(RULES, mounts)
    upper = _UPPER.search(options)
    if "ro" in options.split(","):
        return f"{_MOUNTS}: {point} is read-only"
    if kind == "overlay" and upper is not None:
        point, kind, _ = _mount_of(HostPath(upper[1]), mounts)
    return f"{_MOUNTS}: {point} is in memory ({kind})" if kind in _IN_MEMORY else ""


_MOUNT_FIELDS = 4


def _mount_of(path: HostPath, mounts: Iterable[tuple[HostPath, str, str]]) -> tuple[str, str, str]:
    """The last mount at the nearest directory above: where, its type and options."""
    above = [m for m in mounts if path == m[0] or path.startswith(f"{m[0].rstrip('/')}/")]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", "", ""))


_STORAGE, _NETWORK, _DISPLAY, _USB = "01", "02", "03", "0c03"
_ASSIGNMENT = expression(r"""(\w+)\+?=(?:"([^"]*)"|'([^']*)'|\(([^)]*)\)|(\S*))""")
_COMMENT = expression(r"(^|\s)#.*$", re.MULTILINE)
_INITRAMFS_TOOLS = HostPath("/etc/initramfs-tools")
_DRACUT = HostPath("/etc/dracut.conf")
_MKINITCPIO = HostPath("/etc/mkinitcpio.conf")
_PRESETS = HostPath("/etc/mkinitcpio.d")
_OSTREE = HostPath("/run/ostree-booted")
_ARGUMENTS = HostPath("/proc/cmdline")
_MOUNTS = HostPath("/proc/mounts")
_BOOT_LOADER = HostPath("/etc/sysconfig/bootloader")
_BLS = frozenset({"systemd-boot", "grub2-bls"})
_EFI = tuple(HostPath(f"{place}/EFI") for place in ("/boot/efi", "/efi", "/boot"))
_PLACES = ("/usr/sbin", "/usr/bin")


def read_initramfs(tree: HostTree) -> Initramfs | None:
    """Find the initramfs tool of the host, and what its configuration includes.

    The installed program decides: the configuration of a former tool may still be there. In a copy
    of a host without programs, the configuration does. The image itself is not unpacked: that takes
    seconds, and the next image may differ. What deploys images calls dracut. Of other tools only
    the name is read; sdbootutil deploys what dracut builds to places of its own.
    """
    manager = read_manager(tree)
    if manager is not None:
        return _dracut(tree, manager)
    if has_sdbootutil(tree):
        return Initramfs("sdbootutil")
    installed = _installed_tool(tree)
    if installed is not None:
        return _READERS[installed](tree) if installed in _READERS else Initramfs(installed)
    for place, read in (
        (_INITRAMFS_TOOLS / "initramfs.conf", _initramfs_tools),
        (_MKINITCPIO, _mkinitcpio),
        (_DRACUT, _dracut),
        (HostPath("/etc/dracut.conf.d"), _dracut),
    ):
        if tree.exists(place):
            return read(tree)
    return None


def read_preset_image(tree: HostTree, release: str) -> str | None:
    """The first image that mkinitcpio builds for a kernel; None if no preset names one.

    A preset has an image, a unified kernel image or both for each name in PRESETS (process_preset
    in mkinitcpio).
    """
    preset, names = _preset(tree, release)
    keys = (f"{name}_{kind}" for name in names for kind in ("image", "uki", "efi_image"))
    return next((preset[key][-1] for key in keys if preset.get(key)), None)


def _preset(tree: HostTree, release: str) -> tuple[dict[str, list[str]], list[str]]:
    """The settings of a kernel's preset, and the names in PRESETS.

    The kernel's package writes its name to `pkgbase`, and its preset is named after it
    (libalpm/scripts/mkinitcpio): `linux`, `linux-lts`, Manjaro's `linux66`.
    """
    package = tree.read(HostPath(f"/usr/lib/modules/{release}/pkgbase"))
    preset = {} if package is None else _settings(tree, [_PRESETS / f"{package}.preset"])
    return preset, [name.strip("\"'") for name in preset.get("PRESETS", [])]


def read_manager(tree: HostTree) -> Manager | None:
    """What deploys the initramfs, told by what the running system shows, not by its name."""
    is_ostree = tree.exists(_OSTREE)
    if is_ostree and has_program(tree, "rpm-ostree"):
        return "rpm-ostree"
    if has_program(tree, "bootc") and (is_ostree or _is_composefs(tree)):
        return "bootc"
    if has_program(tree, "transactional-update") and _is_root_read_only(tree):
        return "transactional-update"
    return None


def has_sdbootutil(tree: HostTree) -> bool:
    """Whether sdbootutil installed the boot loader (`is-installed`), or is configured to.

    It leaves a file on the EFI partition, which only root can read.
    """
    if not has_program(tree, "sdbootutil"):
        return False
    kind = _settings(tree, [_BOOT_LOADER]).get("LOADER_TYPE", [])
    directories = (above / name for above in _EFI for name in tree.children(above))
    return not _BLS.isdisjoint(kind) or any(
        tree.exists(directory / "installed_by_sdbootutil") for directory in directories
    )


def has_program(tree: HostTree, name: str) -> bool:
    """Whether a program of the distribution is installed."""
    return _program(tree, name) is not None


def _is_composefs(tree: HostTree) -> bool:
    """Whether bootc deployed the system without ostree: bootc_composefs/status.rs."""
    return bool(parameters(tree.read_text(_ARGUMENTS), "composefs"))


def _is_root_read_only(tree: HostTree) -> bool:
    """Whether / is read-only; transactional-update may also be installed where it is not."""
    lines = (line.split() for line in (tree.read_text(_MOUNTS) or "").splitlines())
    roots = [fields[3].split(",") for fields in lines if fields[1:2] == ["/"]]
    return not roots or "ro" in roots[-1]


def _installed_tool(tree: HostTree) -> str | None:
    """The tool whose program is installed.

    After a change from initramfs-tools to dracut, mkinitramfs can stay, as part of the package
    initramfs-tools-core; update-initramfs is then absent or calls dracut.
    """
    found = [tool for tool, name in _PROGRAMS.items() if has_program(tree, name)]
    if "dracut" in found and "initramfs-tools" in found:
        script = _program(tree, "update-initramfs")
        is_former = script is None or "mkinitramfs" not in (tree.read_text(script) or "")
        found.remove("initramfs-tools" if is_former else "dracut")
    return next(iter(found), None)


def _program(tree: HostTree, name: str) -> HostPath | None:
    places = (HostPath(directory) / name for directory in _PLACES)
    return next((place for place in places if tree.exists(place)), None)


def _initramfs_tools(tree: HostTree) -> Initramfs:
    """Read initramfs.conf(5); the hook `framebuffer` adds display drivers if FRAMEBUFFER is set."""
    shipped = HostPath("/usr/share/initramfs-tools")
    settings = _settings(
        tree,
        [
            _INITRAMFS_TOOLS / "initramfs.conf",
            *_in(tree, _INITRAMFS_TOOLS / "conf.d"),
            *_in(tree, shipped / "conf-hooks.d"),
            *_in(tree, _INITRAMFS_TOOLS / "conf-hooks.d"),
        ],
    )
    classes = [_STORAGE, _NETWORK, _USB] if settings.get("MODULES") == ["most"] else []
    classes += [_DISPLAY] if settings.get("FRAMEBUFFER", ["n"])[-1:] == ["y"] else []
    lines = _plain(tree, _INITRAMFS_TOOLS / "modules").splitlines()
    named = [line.split()[0] for line in lines if line.strip()]
    return _of("initramfs-tools", named, classes)


def _dracut(tree: HostTree, tool: str = "dracut") -> Initramfs:
    """Read dracut.conf(5); by default it includes storage, network and display drivers."""
    local = HostPath("/etc/dracut.conf.d")
    shipped = [*_in(tree, HostPath("/usr/lib/dracut/dracut.conf.d"))]
    overridden = {path.name for path in _in(tree, local)}
    paths = [
        _DRACUT,
        *(path for path in shipped if path.name.endswith(".conf") and path.name not in overridden),
        *_in(tree, local, but=HOOKS["dracut"]),
    ]
    settings = _settings(tree, paths)
    classes = [_STORAGE, _NETWORK, _USB]
    classes += [_DISPLAY] if "drm" not in settings.get("omit_dracutmodules", []) else []
    named = settings.get("add_drivers", []) + settings.get("force_drivers", [])
    found = _of(tool, named, classes, omitted=settings.get("omit_drivers", []))
    added = any("/modprobe.d/" in file for file in settings.get("install_items", []))
    is_generic = settings.get("hostonly", [])[-1:] == ["no"]
    return replace(found, lacks_modprobe=is_generic and not added)


def _mkinitcpio(tree: HostTree) -> Initramfs:
    """Read mkinitcpio.conf(5): MODULES, and the hooks `kms` and `block`, which add drivers."""
    fragments = HostPath("/etc/mkinitcpio.conf.d")
    own = _own_configuration(tree)
    shared = [_MKINITCPIO, *_in(tree, fragments, but=HOOKS["mkinitcpio"])]
    settings = _settings(tree, shared if own is None else [own])
    hooks = settings.get("HOOKS", [])
    drivers = {"kms": _DISPLAY, "block": _STORAGE}
    classes = [drivers[hook] for hook in drivers if hook in hooks]
    found = _of("mkinitcpio", settings.get("MODULES", []), classes)
    return replace(found, reads_fragments=own is None and tree.exists(fragments), configuration=own)


def _own_configuration(tree: HostTree) -> HostPath | None:
    """The configuration that the running kernel's preset names, of the first name in PRESETS.

    It becomes -c, and mkinitcpio.conf and mkinitcpio.conf.d are not read; an empty one does not
    (process_preset and parseopts in mkinitcpio).
    """
    preset, names = _preset(tree, tree.read(HostPath("/proc/sys/kernel/osrelease")) or "")
    keys = [key for name in names[:1] for key in (f"{name}_config", "ALL_config")]
    return next((HostPath(preset[key][-1]) for key in keys if preset.get(key)), None)


def _of(
    tool: str,
    named: Iterable[str],
    classes: Iterable[str],
    *,
    omitted: Iterable[str] = (),
) -> Initramfs:
    modules, left_out = (
        tuple(sorted({name.replace("-", "_") for name in names})) for names in (named, omitted)
    )
    return Initramfs(tool, modules, tuple(classes), left_out)


_PROGRAMS: dict[str, str] = {
    "initramfs-tools": "mkinitramfs",
    "limine-mkinitcpio": "limine-mkinitcpio",
    "mkinitcpio": "mkinitcpio",
    "booster": "booster",
    "dracut": "dracut",
}
_READERS: dict[str, Callable[[HostTree], Initramfs]] = {
    "initramfs-tools": _initramfs_tools,
    "mkinitcpio": _mkinitcpio,
    "dracut": _dracut,
}


def _settings(tree: HostTree, paths: Iterable[HostPath]) -> dict[str, list[str]]:
    """The words of each assignment in a shell-like file; every assignment adds words.

    Assuming that a driver is in the image is the safe choice.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        for name, *values in _ASSIGNMENT.findall(_plain(tree, path)):
            found.setdefault(name, []).extend(" ".join(values).split())
    return found


def _plain(tree: HostTree, path: HostPath) -> str:
    return _COMMENT.sub("", tree.read_text(path) or "")


def _in(tree: HostTree, directory: HostPath, but: str = "") -> Iterator[HostPath]:
    return (p for p in (directory / name for name in tree.children(directory)) if p != but)
