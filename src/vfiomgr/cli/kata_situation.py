"""What `kata explain` looks at, gathered from the host and from the files that were named."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.kata.read import parse, read_settings
from vfiomgr.adapters.runtimes import handlers
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.host import kata_surroundings as around
from vfiomgr.host import runtimes
from vfiomgr.host.kata import read_configuration
from vfiomgr.host.tree import HostTree
from vfiomgr.model.kata import handler_configuration, search_path
from vfiomgr.model.path import HostPath
from vfiomgr.planner.kata.situation import ConfigurationFacts, KubeletFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.cli.session import Session
    from vfiomgr.model.handler import CriName, HandlerEntry, HandlerFacts
    from vfiomgr.model.kata import RuntimeName
    from vfiomgr.model.kata_installation import KataConfigurationFile
    from vfiomgr.model.runtime import ProgramName
    from vfiomgr.model.version import Version

_MACHINE = "/"
"""Where the files of who types a command are, whatever host it is about."""
_CONTAINERDS: tuple[ProgramName, ...] = ("containerd", "k3s", "rke2")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_KUBELET_DEFAULT = 120.0


def read_handlers(tree: HostTree, cri: CriName | None) -> HandlerFacts:
    """The handlers of a container runtime; of the one that is configured where none is named."""
    if cri == "crio" or (cri is None and _has_crio_alone(tree)):
        crio = runtimes.main_file("crio")
        files = [(crio, tree.read_text(crio))]
        found = [(path, text) for path, text in files if text is not None]
        return handlers.read_crio([*found, *around.texts_below(tree, around.CRIO_DROP_INS)])
    beside = tuple(around.texts_below(tree, around.CONTAINERD_DROP_INS, "*.toml"))
    for program in _CONTAINERDS:
        main = runtimes.main_file(program)
        text = tree.read_text(main)
        if text is not None:
            version = runtimes.read_version(tree, program)
            imported, problem = _imported(tree, main, text, version)
            known = {path for path, _ in imported}
            unsure = [(path, text) for path, text in beside if path not in known]
            facts = handlers.read_containerd([(main, text), *imported], unsure)
            return replace(facts, version=version, unreadable=(*facts.unreadable, *problem))
    version = runtimes.read_version(tree, "containerd")
    return replace(handlers.read_containerd([], beside), version=version)


def _imported(
    tree: HostTree, main: HostPath, text: str, version: Version | None
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """What the main file brings in, or why that cannot be read."""
    patterns = handlers.imports_of(text) or ()
    try:
        files = runtimes.read_imported(tree, main, patterns, version)
    except InvalidDocument as error:
        return [], (error.message,)
    return [(file.path, file.text) for file in files if file.text is not None], ()


def _has_crio_alone(tree: HostTree) -> bool:
    has_containerd = any(tree.exists(runtimes.main_file(name)) for name in _CONTAINERDS)
    has_crio = tree.exists(runtimes.main_file("crio")) or bool(tree.children(around.CRIO_DROP_INS))
    return has_crio and not has_containerd


def configuration_paths(
    entry: HandlerEntry | None,
    conf_file: tuple[str, str] | None,
    handler: str | None,
    runtime: RuntimeName,
) -> tuple[HostPath, ...]:
    """Where the shim finds its configuration, the first first."""
    if entry is not None and entry.config_path:
        return (HostPath(entry.config_path),)
    if conf_file is not None:
        return (HostPath(conf_file[0]),)
    own = () if handler is None or entry is not None else (handler_configuration(handler),)
    return (*own, *search_path(runtime))


def configuration_of(session: Session, handler: str) -> ConfigurationFacts:
    """The configuration of a handler, as the container runtime or vfiomgr's own place has it."""
    if session.snapshot is not None:
        return ConfigurationFacts((), problem="a snapshot does not hold the configuration")
    return read_settings_of(session.tree, _paths_of(handler, installed_handler(session, handler)))


def installed_handler(session: Session, handler: str) -> HandlerEntry | None:
    """What the container runtime of the host knows of a handler."""
    return None if session.snapshot else read_handlers(session.tree, None).handler(handler)


def _paths_of(handler: str, entry: HandlerEntry | None) -> tuple[HostPath, ...]:
    return (*configuration_paths(entry, None, handler, "rs"), *search_path("go"))


def read_settings_of(tree: HostTree, paths: Iterable[HostPath]) -> ConfigurationFacts:
    """The first configuration that is there, with its drop-ins."""
    looked = []
    for path in paths:
        looked.append(path)
        file = read_configuration(tree, path)
        if file is not None:
            return _facts(file, tuple(looked))
    first, *others = looked or ("configuration",)
    problem = f"there is no {first}" + (", nor one where Kata looks otherwise" if others else "")
    return ConfigurationFacts(tuple(looked), problem=problem)


def _facts(file: KataConfigurationFile, looked: tuple[str, ...]) -> ConfigurationFacts:
    drop_ins = [(HostPath(part.path), part.text) for part in file.drop_ins]
    try:
        settings = read_settings(file.resolved, file.text, drop_ins)
        texts = [(file.resolved, file.text), *sorted(drop_ins)]
        documents = tuple((path, parse(text, path)) for path, text in texts)
    except InvalidDocument as error:
        return ConfigurationFacts(looked, file, problem=error.message)
    return ConfigurationFacts(looked, file, settings, documents)


def named_configuration(session: Session, typed: str) -> ConfigurationFacts:
    """A file that a user named: below the root where it is there, else on this machine.

    Raises:
        UsageError: it is in neither.

    """
    place = HostPath(os.path.abspath(typed))
    own = HostTree(_MACHINE)
    trees = [own] if session.snapshot is not None else [session.tree, own]
    for tree in trees:
        facts = read_settings_of(tree, (place,))
        if facts.file is not None:
            return facts
    message = f"cannot read the configuration {typed}"
    raise UsageError(message, "name a file that is there and may be read: --config FILE")


def read_kubelet(tree: HostTree) -> KubeletFacts | None:
    """The kubelet's patience; None where its configuration is not there to be read."""
    text = tree.read_text(around.KUBELET)
    if text is None:
        return None
    from vfiomgr.model.document import parse_document  # noqa: PLC0415 - slow

    try:
        document: Any = parse_document(text, around.KUBELET, "")
    except InvalidDocument:
        return None
    said = document.get("runtimeRequestTimeout") if isinstance(document, dict) else None
    parts = _DURATION.findall(str(said or ""))
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return KubeletFacts(around.KUBELET, seconds or _KUBELET_DEFAULT)
