"""Entries for CRI-O: a separate drop-in (crio.conf.d(5)); handler tables are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.containerd import foreign
from vfiomgr.containers.runtimes.edit import HEAD, Decision, Edit
from vfiomgr.containers.runtimes.model import Setting
from vfiomgr.diagnostic import refuse
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.runtimes.model import Key, RuntimeFacts, RuntimeRequest

_RUNTIMES: Key = ("crio", "runtime", "runtimes")
_DEFAULT: Key = ("crio", "runtime", "default_runtime")
_KNOWS_CDI = Version(1, 24)


def decide(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to CRI-O's configuration.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: an entry of another program has the name.

    """
    entry = (*_RUNTIMES, request.name)
    for file in (facts.main, *facts.imported, facts.drop_in):
        data = {} if file.text is None else text.parse(file.text, file.path)
        if values.found(data, entry) is not values.ABSENT:
            raise foreign(request, f"CRI-O, in {file.path}")
    if facts.effective and values.found(facts.effective, entry) is not values.ABSENT:
        raise foreign(request, "CRI-O")
    settings = [Setting(entry, _table(request))]
    if request.set_default:
        _refuse_later_default(facts, request)
        settings.append(Setting(_DEFAULT, request.name))
    return Decision(
        (Edit(facts.drop_in, tuple(settings), HEAD),),
        tuple(_notes(facts, request)),
        ours=(entry, *((_DEFAULT,) if request.set_default else ())),
        expected=tuple(settings),
    )


def _refuse_later_default(facts: RuntimeFacts, request: RuntimeRequest) -> None:
    """Make sure that no file after the drop-in sets another default.

    Raises:
        Refusal: one does.

    """
    for file in facts.imported:
        data = {} if file.text is None else text.parse(file.text, file.path)
        named = values.found(data, _DEFAULT)
        is_later = file.path.name > facts.drop_in.path.name
        if is_later and named not in (values.ABSENT, "", request.name):
            message = f"{file.path} sets {named} as the default, and CRI-O reads it last"
            refuse(
                "runtime-default-taken",
                file.path,
                message,
                "remove that setting, or omit --set-default",
            )


def _table(request: RuntimeRequest) -> dict[str, Any]:
    """The table of the entry (crio.conf(5), "CRIO.RUNTIME.RUNTIMES TABLE")."""
    if request.config_path is None:
        return {"runtime_path": request.path, "runtime_type": "oci"}
    return {
        "runtime_path": request.path,
        "runtime_type": "vm",
        "runtime_root": "/run/vc",
        "runtime_config_path": request.config_path,
        "privileged_without_host_devices": True,
    }


def _notes(facts: RuntimeFacts, request: RuntimeRequest) -> Iterator[str]:
    if not request.enable_cdi or request.is_kata:
        return
    if facts.version is not None and facts.version < _KNOWS_CDI:
        message = f"CRI-O {facts.version} does not support CDI"
        refuse(
            "runtime-without-cdi",
            "CRI-O",
            message,
            "omit --cdi, or install CRI-O 1.24 or later",
        )
    yield "--cdi is not needed: CRI-O always reads CDI specifications"
