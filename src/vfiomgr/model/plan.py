"""A plan: the steps from the host as it is to what an intent wants."""

from __future__ import annotations

from dataclasses import dataclass

from vfiomgr.model.step import Step

FIRST = 0
"""The lane whose steps come before those of all others."""
LAST = -1
"""The lane whose steps come after those of all others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `--dry-run` prints is what a run executes."""

    summary: str
    steps: tuple[Step, ...]
    locks: tuple[str, ...] = ()
    """Names of what no other process may change meanwhile, e.g. `group-38`."""
    notes: tuple[str, ...] = ()
    """What a reader should know: companions that come along, functions that are left alone."""
    already: tuple[str, ...] = ()
    """What is in the wanted state and not touched."""
    settles: tuple[str, ...] = ()
    """The functions and vGPUs that are as somebody wants them afterwards, moved or not."""
    later: tuple[str, ...] = ()
    """What can be planned only once this is done: about functions that do not exist yet."""
    lanes: tuple[int, ...] = ()
    """For each step its lane; they run side by side, after FIRST, before LAST. Empty: in order."""

    @property
    def is_empty(self) -> bool:
        """Whether the host is as wanted already."""
        return not self.steps
