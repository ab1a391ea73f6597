"""Facts about persistent settings in /etc, and the owners of VFIO nodes."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from vfiomgr.documents.text import TextFile
from vfiomgr.expressions import expression
from vfiomgr.paths import SCRIPT, VFIO_CDEVS, VFIO_NODES, HostPath
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.model import (
    DRIVERCTL,
    HOOKS,
    RULES,
    SWEPT,
    UNIT,
    Initramfs,
    Tool,
    is_rule_file,
    parse_rule,
)
from vfiomgr.snapshot.values import NodeFact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.persistence.model import PersistedBinding

_SYSTEMD = HostPath("/run/systemd/system")
_STORAGE, _NETWORK, _DISPLAY, _USB = "01", "02", "03", "0c03"
_ASSIGNMENT = expression(r"""(\w+)\+?=(?:"([^"]*)"|'([^']*)'|\(([^)]*)\)|(\S*))""")
_COMMENT = expression(r"(^|\s)#.*$", re.MULTILINE)
_INITRAMFS_TOOLS = HostPath("/etc/initramfs-tools")
_DRACUT = HostPath("/etc/dracut.conf")
_MKINITCPIO = HostPath("/etc/mkinitcpio.conf")


def read_files(tree: HostTree) -> tuple[TextFile, ...]:
    """Read the rules, hooks, units and layout of vfiomgr, and the entries of driverctl."""
    paths = [RULES / name for name in tree.children(RULES) if is_rule_file(name)]
    paths += [DRIVERCTL / name for name in tree.children(DRIVERCTL)]
    paths += [*HOOKS.values(), UNIT, SWEPT, *installed_layout.FILES, SCRIPT]
    texts = ((path, tree.read_text(path)) for path in paths)
    files = tuple(TextFile(path, text) for path, text in texts if text is not None)
    for file in files:
        if file.path.startswith(RULES) and parse_rule(file.text) is None:
            warnings.warn(f"ignoring {file.path}: no record of vfiomgr found", stacklevel=2)
    return files


def read_rules(tree: HostTree) -> tuple[PersistedBinding, ...]:
    """Read the bindings in vfiomgr's rules."""
    files = (file for file in read_files(tree) if file.path.startswith(RULES))
    bindings = (parse_rule(file.text) for file in files)
    return tuple(binding for binding in bindings if binding is not None)


def rules_changed(tree: HostTree) -> int | None:
    """The time of the last change of a rule."""
    return tree.modified(RULES)


def read_nodes(tree: HostTree) -> tuple[NodeFact, ...]:
    """Read the owners of the nodes of groups and devices."""
    paths = [VFIO_NODES / name for name in tree.children(VFIO_NODES) if name.isdecimal()]
    paths += [VFIO_CDEVS / name for name in tree.children(VFIO_CDEVS)]
    found = ((path, tree.access(path)) for path in paths)
    return tuple(NodeFact(path, access) for path, access in found if access is not None)


def has_systemd(tree: HostTree) -> bool:
    """Whether systemd runs the host (sd_booted(3))."""
    return tree.exists(_SYSTEMD)


def read_initramfs(tree: HostTree) -> Initramfs | None:
    """Find the initramfs tool of the host, and what its configuration includes.

    The installed program decides: the configuration of a former tool may still be there. In a copy
    of a host without programs, the configuration does. The image itself is not unpacked: that takes
    seconds, and the next image may differ.
    """
    installed = _installed_tool(tree)
    if installed is not None:
        return _READERS[installed](tree)
    for place, read in (
        (_INITRAMFS_TOOLS / "initramfs.conf", _initramfs_tools),
        (_MKINITCPIO, _mkinitcpio),
        (_DRACUT, _dracut),
        (HostPath("/etc/dracut.conf.d"), _dracut),
    ):
        if tree.exists(place):
            return read(tree)
    return None


def _installed_tool(tree: HostTree) -> Tool | None:
    """The tool whose program is installed.

    After a change from initramfs-tools to dracut, mkinitramfs can stay, as part of the package
    initramfs-tools-core; update-initramfs is then absent or calls dracut.
    """
    found = [tool for tool, name in _PROGRAMS.items() if _program(tree, name) is not None]
    if "dracut" in found and "initramfs-tools" in found:
        script = _program(tree, "update-initramfs")
        is_former = script is None or "mkinitramfs" not in (tree.read_text(script) or "")
        found.remove("initramfs-tools" if is_former else "dracut")
    return next(iter(found), None)


def _program(tree: HostTree, name: str) -> HostPath | None:
    places = (HostPath(directory) / name for directory in ("/usr/sbin", "/usr/bin"))
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


def _dracut(tree: HostTree) -> Initramfs:
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
    return _of("dracut", named, classes, omitted=settings.get("omit_drivers", []))


def _mkinitcpio(tree: HostTree) -> Initramfs:
    """Read mkinitcpio.conf(5): MODULES, and the hooks `kms` and `block`, which add drivers."""
    fragments = HostPath("/etc/mkinitcpio.conf.d")
    settings = _settings(tree, [_MKINITCPIO, *_in(tree, fragments, but=HOOKS["mkinitcpio"])])
    hooks = settings.get("HOOKS", [])
    classes = [_DISPLAY] * ("kms" in hooks) + [_STORAGE] * ("block" in hooks)
    named = settings.get("MODULES", [])
    return _of("mkinitcpio", named, classes, reads_fragments=tree.exists(fragments))


def _of(
    tool: Tool,
    named: Iterable[str],
    classes: Iterable[str],
    *,
    omitted: Iterable[str] = (),
    reads_fragments: bool = True,
) -> Initramfs:
    modules, left_out = (
        tuple(sorted({name.replace("-", "_") for name in names})) for names in (named, omitted)
    )
    return Initramfs(tool, modules, tuple(classes), left_out, reads_fragments)


_PROGRAMS: dict[Tool, str] = {
    "initramfs-tools": "mkinitramfs",
    "mkinitcpio": "mkinitcpio",
    "dracut": "dracut",
}
_READERS: dict[Tool, Callable[[HostTree], Initramfs]] = {
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
