"""Check that a runtime reads the entry, and everything else unchanged."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import facts_dump, values
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.model import shown
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.runtimes.edit import Decision
    from vfiomgr.containers.runtimes.facts_dump import Dump, Texts
    from vfiomgr.containers.runtimes.location import RuntimeLocation
    from vfiomgr.containers.runtimes.model import Key, RuntimeFacts
    from vfiomgr.host.tree import HostTree


_MOST = 5
"""How many keys a message names."""


def refuse_others(before: values.Data, after: values.Data, decision: Decision, name: str) -> None:
    """Make sure that only the intended settings of a runtime differ.

    Raises:
        Refusal: it would lose or change other settings, or would not read the entry.

    """
    one, other = values.without_zeros(before), values.without_zeros(after)
    foreign = [key for key in values.differences(one, other) if not _is_ours(key, decision.ours)]
    if foreign:
        more = f" and {len(foreign) - _MOST} more" if len(foreign) > _MOST else ""
        message = (
            f"{name} would also read other settings differently: "
            f"{', '.join(map(shown, foreign[:_MOST]))}{more}"
        )
        refuse(
            "runtime-reads-otherwise",
            name,
            message,
            "nothing was changed; please report the files that it reads",
        )
    unseen = list(_unseen(other, decision))
    if unseen:
        message = f"{name} would not read {', '.join(map(shown, unseen[:_MOST]))}"
        hint = f"nothing was changed; check whether another file of {name} sets it again"
        refuse("runtime-entry-unseen", name, message, hint)


def _is_ours(key: Key, ours: tuple[Key, ...]) -> bool:
    return any(key[: len(own)] == own for own in ours)


def _unseen(after: values.Data, decision: Decision) -> Iterator[Key]:
    """Keys that a runtime does not read as written, under either name of CRI."""
    for setting in decision.expected:
        if setting.is_item or setting.key == ("version",):
            continue
        key = setting.key
        names = [key] if key[0] != "plugins" else [(key[0], cri, *key[2:]) for cri in CRI_NAMES]
        wanted = values.without_zeros(setting.value)
        if not any(_holds(values.found(after, name), wanted) for name in names):
            yield key


def _holds(there: object, wanted: object) -> bool:
    """Whether a value is the expected one, or a table that contains it."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(
            name in there and _holds(there[name], value) for name, value in wanted.items()
        )
    return there == wanted


def checked(  # noqa: PLR0913 - a check is of one text against another
    tree: HostTree,
    place: RuntimeLocation,
    facts: RuntimeFacts,
    texts: Texts,
    *,
    decision: Decision,
    before: Dump | None,
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Let the runtime read the planned files; return what was not checked, and what it will read.

    Raises:
        Refusal: it would not read the entry, or would read other settings differently.

    """
    name = str(place)
    if place.program == "docker":
        with _refusing():
            is_valid = facts_dump.validate_docker(tree, texts[place.main] or "{}")
        return (() if is_valid else (_why_unchecked(tree, place),)), None
    if before is None:
        return (_why_unchecked(tree, place),), None
    with _refusing():
        after = dump(tree, place, facts, texts)
    if after is None:
        return (_why_unchecked(tree, place),), None
    new = [key for key in after.unknown if key not in before.unknown]
    if new:
        message = f"unknown keys for {name}: {'; '.join(dict.fromkeys(new))}"
        refuse(
            "runtime-unknown-key",
            name,
            message,
            "nothing was changed; check that it is the version that reads these files",
        )
    refuse_others(before.data, after.data, decision, name)
    return (), after.data


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a rejection by a runtime into a refusal: nothing has been written yet."""
    try:
        yield
    except HostError as error:
        refuse("runtime-rejects", "", error.message, error.hint)


def dump(tree: HostTree, place: RuntimeLocation, facts: RuntimeFacts, texts: Texts) -> Dump | None:
    """The settings that a runtime reads from the files; None if it cannot be queried.

    Raises:
        HostError: it cannot read them.

    """
    if place.other is not None:
        return None
    match place.program:
        case "containerd":
            return facts_dump.dump_containerd(tree, place.given, texts, place.version)
        case "crio":
            drop_ins = [file.path for file in (*facts.imported, facts.drop_in)]
            return facts_dump.dump_crio(tree, place.main, drop_ins, texts)
        case _:
            return None


def _why_unchecked(tree: HostTree, place: RuntimeLocation) -> str:
    name = str(place)
    if place.program in ("k3s", "rke2"):
        return f"how {name} reads the template: it does so when it starts"
    if place.other is not None:
        return f"how {name} reads the files: containerd {place.other} is installed"
    if not tree.runs_programs:
        return f"how {name} reads the files: programs of {tree.root} cannot be run from here"
    return f"how {name} reads the files: it is not installed here, or does not answer"
