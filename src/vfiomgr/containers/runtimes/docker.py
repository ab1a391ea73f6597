"""Entries for Docker: daemon.json, merged as JSON (dockerd(8))."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.containerd import foreign
from vfiomgr.containers.runtimes.edit import EMPTY_JSON, Decision, Edit
from vfiomgr.containers.runtimes.model import Setting
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import InvalidDocument
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.runtimes.model import RuntimeFacts, RuntimeRequest

_TAKES_SHIMS = Version(23, 0)
"""runtimeType and options in daemon.json."""
_KNOWS_CDI = Version(25, 0)
_NEEDS_NEWER_KATA = Version(26, 0)
_BUILT_IN = frozenset({"runc", "io.containerd.runc.v2"})


def decide(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to daemon.json.

    Raises:
        InvalidDocument: the file is not readable.
        Refusal: the name is in use, or this Docker does not support such entries.

    """
    main = facts.main
    data = {} if main.text is None else text.parse(main.text, main.path)
    if data and not text.is_json(main.text or "", main.path):
        message = f"{main.path} is not JSON, which Docker requires"
        raise InvalidDocument(message, "name Docker's own file (default: /etc/docker/daemon.json)")
    entry = ("runtimes", request.name)
    if values.found(data, entry) is not values.ABSENT or request.name in _BUILT_IN:
        raise foreign(request, f"Docker, in {main.path}")
    if request.is_kata and facts.version is not None and facts.version < _TAKES_SHIMS:
        message = f"Docker {facts.version} does not support shims such as Kata's in {main.path}"
        refuse("runtime-too-old", "Docker", message, "install Docker 23.0 or later")
    settings = [Setting(entry, _table(request)), *_further(facts, data, request)]
    notes: tuple[str, ...] = ()
    if request.is_kata and (facts.version is None or facts.version >= _NEEDS_NEWER_KATA):
        notes = ("with Docker 26 or later, Kata 3.29 or later is required",)
    return Decision(
        (Edit(main, tuple(settings), EMPTY_JSON),),
        notes,
        ours=tuple(setting.key for setting in settings),
        expected=tuple(settings),
    )


def _table(request: RuntimeRequest) -> dict[str, Any]:
    if request.config_path is None:
        return {"path": request.path}
    return {"runtimeType": request.path, "options": {"ConfigPath": request.config_path}}


def _further(facts: RuntimeFacts, data: values.Data, request: RuntimeRequest) -> Iterator[Setting]:
    if request.set_default:
        yield Setting(("default-runtime",), request.name)
    if request.is_kata or not request.enable_cdi:
        return
    if facts.version is not None and facts.version < _KNOWS_CDI:
        message = f"Docker {facts.version} does not support CDI"
        refuse(
            "runtime-without-cdi",
            "Docker",
            message,
            "omit --cdi, or install Docker 25 or later",
        )
    if values.found(data, ("features", "cdi")) is not True:
        yield Setting(("features", "cdi"), value=True, is_shared=True)
