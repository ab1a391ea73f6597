"""Facts about vGPU definitions in /etc, what starts them at boot, and their attributes."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.definitions import model
from vfiomgr.definitions.model import MDEVCTL_DIRECTORY, DefinitionFacts, MdevctlRule, VgpuAttribute
from vfiomgr.documents.text import TextFile
from vfiomgr.expressions import expression
from vfiomgr.host.text import exists, settings_of, text_of
from vfiomgr.paths import HostPath
from vfiomgr.vgpu.model import PARAMETERS, Vgpu

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_SCRIPTS = "scripts.d"
"""A directory beside the parents, with programs that mdevctl calls."""
_CALLOUTS = (
    MDEVCTL_DIRECTORY / "scripts.d/callouts",
    HostPath("/usr/lib/mdevctl/scripts.d/callouts"),
)
_RULES = tuple(
    HostPath(f"{place}/udev/rules.d/60-mdevctl.rules")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
"""The first file overrides the others (udev(7)); an empty file or /dev/null disables the rule."""
_STARTER = expression(r"(/[^\s'\"]*mdevctl)\s+start-parent-mdevs")


def read_definitions(tree: HostTree, vgpus: Iterable[Vgpu]) -> DefinitionFacts:
    """Read all definitions, including those of absent devices."""
    read = {place: text_of(tree, place) for place in _definition_files(tree)}
    own = {place: text_of(tree, place) for place in model.FILES}
    facts = DefinitionFacts(
        files=tuple(TextFile(p, text) for p, text in (read | own).items() if text is not None),
        unreadable=tuple(place for place, text in read.items() if text is None),
        mdevctl=_mdevctl_rule(tree),
        callouts=tuple(place / name for place in _CALLOUTS for name in tree.children(place)),
    )
    return replace(facts, attributes=tuple(_attributes(tree, facts, vgpus)))


def _definition_files(tree: HostTree) -> Iterator[HostPath]:
    parents = [
        MDEVCTL_DIRECTORY / name for name in tree.children(MDEVCTL_DIRECTORY) if name != _SCRIPTS
    ]
    for directory in (*parents, model.GPU_DIRECTORY):
        for name in tree.children(directory):
            if not name.startswith(".") and _is_file(tree, directory / name):
                yield directory / name


def _is_file(tree: HostTree, place: HostPath) -> bool:
    """Whether a path is a file, or a broken link."""
    real = tree.resolve(place)
    status = None if real is None else tree.status(real)
    return status is None or stat.S_ISREG(status.st_mode)


def _mdevctl_rule(tree: HostTree) -> MdevctlRule | None:
    """Read the effective rule of mdevctl, and whether its program exists."""
    place = next((place for place in _RULES if exists(tree, place)), None)
    starter = None if place is None else _STARTER.search("\n".join(settings_of(tree, place)))
    if place is None or starter is None:
        return None
    program = HostPath(starter[1])
    return MdevctlRule(place, program, has_program=exists(tree, program))


def _attributes(
    tree: HostTree, files: DefinitionFacts, vgpus: Iterable[Vgpu]
) -> Iterator[VgpuAttribute]:
    """Read the defined attributes and NVIDIA's parameters of active vGPUs."""
    for vgpu in vgpus:
        is_mdev = vgpu.uuid is not None
        directory = (paths.MDEV_DEVICES if is_mdev else paths.PCI_DEVICES) / vgpu.name
        defined = [d for d in files.vgpus if d.uuid == vgpu.uuid]
        names = [name for d in defined for name, _ in d.attributes]
        for name in dict.fromkeys((PARAMETERS, *names)):
            text = tree.read(directory / name)
            if text is not None:
                yield VgpuAttribute(vgpu.name, name, text)
