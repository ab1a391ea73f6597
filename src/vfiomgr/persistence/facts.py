"""Facts about persistent settings in /etc, and the owners of VFIO nodes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr.documents.text import TextFile
from vfiomgr.host.owners import NodeFact
from vfiomgr.paths import SCRIPT, VFIO_CDEVS, VFIO_NODES, HostPath
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.facet import FileFacts
from vfiomgr.persistence.initramfs.facts import read_initramfs
from vfiomgr.persistence.initramfs.model import HOOKS
from vfiomgr.persistence.model import (
    DRIVERCTL,
    RULES,
    SWEPT,
    UNIT,
    is_rule_file,
    parse_rule,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.persistence.model import PersistedBinding

_SYSTEMD = HostPath("/run/systemd/system")


def read_facet(tree: HostTree) -> FileFacts:
    """Read the facet."""
    return FileFacts(read_files(tree), read_nodes(tree), read_initramfs(tree), has_systemd(tree))


def read_named(tree: HostTree, paths: Iterable[str]) -> FileFacts:
    """Read some files, and nothing else, as the facet."""
    texts = ((path, tree.read_text(HostPath(path))) for path in paths)
    return FileFacts(tuple(TextFile(path, text) for path, text in texts if text is not None))


def read_files(tree: HostTree) -> tuple[TextFile, ...]:
    """Read the rules, hooks, units and layout of vfiomgr, and the entries of driverctl."""
    texts = ((path, tree.read_text(path)) for path in list_files(tree))
    files = tuple(TextFile(path, text) for path, text in texts if text is not None)
    for file in files:
        if file.path.startswith(RULES) and parse_rule(file.text) is None:
            warnings.warn(f"ignoring {file.path}: no record of vfiomgr found", stacklevel=2)
    return files


def list_files(tree: HostTree) -> list[HostPath]:
    """The paths of the files of `read_files`, whether they exist or not."""
    paths = [RULES / name for name in tree.children(RULES) if is_rule_file(name)]
    paths += [DRIVERCTL / name for name in tree.children(DRIVERCTL)]
    return [*paths, *dict.fromkeys(HOOKS.values()), UNIT, SWEPT, *installed_layout.FILES, SCRIPT]


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
    found = ((path, tree.access(path)) for path in list_nodes(tree))
    return tuple(NodeFact(path, access) for path, access in found if access is not None)


def list_nodes(tree: HostTree) -> list[HostPath]:
    """The nodes of groups and devices."""
    paths = [VFIO_NODES / name for name in tree.children(VFIO_NODES) if name.isdecimal()]
    return [*paths, *(VFIO_CDEVS / name for name in tree.children(VFIO_CDEVS))]


def has_systemd(tree: HostTree) -> bool:
    """Whether systemd runs the host (sd_booted(3))."""
    return tree.exists(_SYSTEMD)
