"""The step that loads a kernel module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoadModule:
    """Load a kernel module that brings `driver`; it stays loaded."""

    module: str
    driver: str
    kind: Literal["load-module"] = "load-module"

    def describe(self) -> str:
        """One line for people."""
        return f"load the kernel module {self.module}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"modprobe {self.module}",)

    def inverse(self) -> None:
        """None: a loaded module hurts nobody and may be in use by then."""
