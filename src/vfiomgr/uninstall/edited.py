"""The files that were edited since vfiomgr wrote them: their hash or, without one, their text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.plan import is_as_written
from vfiomgr.definitions import boot
from vfiomgr.definitions import model as definitions
from vfiomgr.documents.text import is_sealed, unsealed
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.libvirt.hook import render_script
from vfiomgr.paths import SCRIPT, HostPath
from vfiomgr.persistence import installed_layout as layouts
from vfiomgr.persistence.initramfs.model import HOOKS, render_hook
from vfiomgr.persistence.model import (
    RULES,
    UNIT,
    is_rule_file,
    parse_rule,
    render_rule,
    render_unit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vfiomgr.documents.text import TextFile
    from vfiomgr.snapshot.model import HostSnapshot

_PROGRAM = "/vfiomgr-program"
_ANY_PROGRAM = r"/[A-Za-z0-9._+/-]+(?: -I -m vfiomgr)?"
"""The paths that `require_plain` accepts, since vfiomgr may have had another path before."""
_WITH_PROGRAM: Mapping[str, Callable[[str], str]] = {
    UNIT: render_unit,
    SCRIPT: render_script,
    definitions.SERVICE: boot.render_service,
    definitions.INSTANCE: boot.render_instance,
}


def edited_files(host: HostSnapshot) -> Iterator[str]:
    """The paths of edited files, which stay."""
    for file in (*host.files, *host.defined.files):
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
    texts = [*_texts(host, path, file.text)]
    return not texts or any(_matches(text, file.text) for text in texts)


def _matches(rendered: str, text: str) -> bool:
    expected = _ANY_PROGRAM.join(map(re.escape, unsealed(rendered).split(_PROGRAM)))
    return re.fullmatch(expected, text) is not None


def _texts(host: HostSnapshot, path: str, text: str) -> Iterator[str]:
    """The text that vfiomgr would write to a path now; empty for files that nobody edits."""
    if path in _WITH_PROGRAM:
        yield _WITH_PROGRAM[path](_PROGRAM)
    elif path in (layouts.BOOT, layouts.WATCH):
        render = layouts.render_boot if path == layouts.BOOT else layouts.render_watch
        allowed = tuple(re.findall(r" --allow ([a-z-]+)", text))
        for name in (None, layouts.layout_name(host)):
            yield render(_PROGRAM, name, allowed)
    elif path == layouts.WANTED:
        yield from (layouts.render_wanted(with_watch=each) for each in (True, False))
    elif path == definitions.WANTED:
        yield boot.render_wanted()
    elif path == definitions.RULE:
        yield boot.render_registration_rule()
    else:
        for tool in (tool for tool, hook in HOOKS.items() if hook == path):
            yield render_hook(tool, host.persisted)


def _is_own_rule(host: HostSnapshot, file: TextFile) -> bool:
    """Whether a rule of a function is as `bind` or `layout install` wrote it."""
    layout = layouts.parse_record(host.file(layouts.RECORD))
    written = () if layout is None else layout.rules
    if any(rule.path == file.path and rule.is_as_written(file.text) for rule in written):
        return True
    binding = parse_rule(file.text)
    return binding is not None and render_rule(binding) == file.text
