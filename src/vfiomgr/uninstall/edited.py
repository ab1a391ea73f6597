"""The files that were edited since vfiomgr wrote them, by their hash or their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.plan import is_as_written
from vfiomgr.definitions import model as definitions
from vfiomgr.documents.text import is_sealed
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import SCRIPT, HostPath
from vfiomgr.persistence import installed_layout as layouts
from vfiomgr.persistence.initramfs.model import HOOKS
from vfiomgr.persistence.model import (
    RULES,
    UNIT,
    is_rule_file,
    parse_rule,
    render_rule,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.documents.text import TextFile
    from vfiomgr.snapshot.model import HostSnapshot

_SEALED = frozenset(
    {
        UNIT,
        SCRIPT,
        definitions.SERVICE,
        definitions.INSTANCE,
        definitions.WANTED,
        definitions.RULE,
        layouts.BOOT,
        layouts.WATCH,
        layouts.WANTED,
        *HOOKS.values(),
    }
)
"""Units and hooks, whose last line is a hash of the others."""


def edited_files(host: HostSnapshot) -> Iterator[str]:
    """The paths of edited files, which stay."""
    for file in (*host.files.texts, *host.defined.files):
        try:
            is_own = _is_as_written(host, file)
        except (InvalidDocument, Refusal):  # no vfiomgr could have written this
            is_own = False
        if not is_own:
            yield file.path
    for specification in host.cdi_files:
        has_text = specification.text is not None
        if specification.is_own and has_text and not is_as_written(specification):
            yield specification.path


def _is_as_written(host: HostSnapshot, file: TextFile) -> bool:
    """Whether vfiomgr writes such a text to a path, or writes nothing there.

    Raises:
        InvalidDocument: it is not a definition of vGPUs.
        Refusal: it contains something that vfiomgr cannot write.

    """
    if is_sealed(file.text):
        return True
    path = HostPath(file.path)
    if path.parent == RULES and is_rule_file(path.name):
        return _is_own_rule(host, file)
    if path.parent == definitions.GPU_DIRECTORY:
        definition = definitions.parse_gpu_definition(file)
        return definitions.render_gpu_definition(definition) == file.text
    return path not in _SEALED


def _is_own_rule(host: HostSnapshot, file: TextFile) -> bool:
    """Whether a rule of a function is as `bind` or `layout install` wrote it."""
    layout = layouts.parse_record(host.files.text(layouts.RECORD))
    written = () if layout is None else layout.rules
    if any(rule.path == file.path and rule.is_as_written(file.text) for rule in written):
        return True
    binding = parse_rule(file.text)
    return binding is not None and render_rule(binding) == file.text
