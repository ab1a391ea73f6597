"""What a container runtime says of files before they are written."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.runtimes import difference
from vfiomgr.errors import HostError, Refusal
from vfiomgr.host import runtime_dump

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.adapters.runtimes.edit import Decision
    from vfiomgr.executor.runtime_place import Place
    from vfiomgr.host.runtime_dump import Dump, Texts
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.runtime import RuntimeFacts


def checked(  # noqa: PLR0913 - a check is of one text against another
    tree: HostTree,
    place: Place,
    facts: RuntimeFacts,
    texts: Texts,
    *,
    decision: Decision,
    before: Dump | None,
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Have the runtime read what is to be; what was not checked, and what it will read.

    Raises:
        Refusal: it would not read it, or read something else differently as well.

    """
    name = str(place)
    if place.program == "docker":
        with _refusing():
            is_valid = runtime_dump.validate_docker(tree, texts[place.main] or "{}")
        return (() if is_valid else (_why_unchecked(tree, place),)), None
    if before is None:
        return (_why_unchecked(tree, place),), None
    with _refusing():
        after = dump(tree, place, facts, texts)
    if after is None:
        return (_why_unchecked(tree, place),), None
    new = [key for key in after.unknown if key not in before.unknown]
    if new:
        message = f"{name} does not know: {'; '.join(dict.fromkeys(new))}"
        raise Refusal(message, "nothing was changed; is this the version that reads these files?")
    difference.refuse_others(before.data, after.data, decision, name)
    return (), after.data


@contextmanager
def _refusing() -> Iterator[None]:
    """What a runtime rejects before anything is written is refused, and has not failed."""
    try:
        yield
    except HostError as error:
        raise Refusal(error.message, error.hint) from error


def dump(tree: HostTree, place: Place, facts: RuntimeFacts, texts: Texts) -> Dump | None:
    """What a runtime reads of files as they are, or as texts say; None where it cannot be asked.

    Raises:
        HostError: it cannot read them.

    """
    if place.other is not None:
        return None
    match place.program:
        case "containerd":
            return runtime_dump.dump_containerd(tree, place.given, texts, place.version)
        case "crio":
            drop_ins = [file.path for file in (*facts.imported, facts.drop_in)]
            return runtime_dump.dump_crio(tree, place.main, drop_ins, texts)
        case _:
            return None


def _why_unchecked(tree: HostTree, place: Place) -> str:
    name = str(place)
    if place.program in ("k3s", "rke2"):
        return f"what {name} makes of the template: it does so when it starts"
    if place.other is not None:
        return f"what {name} makes of it: containerd {place.other} is installed"
    if not tree.runs_programs:
        return f"what {name} makes of it: programs of {tree.root} cannot be run from here"
    return f"what {name} makes of it: it is not installed here, or does not answer"
