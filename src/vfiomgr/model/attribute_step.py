"""A step about one attribute of a vGPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.definition import PARAMETERS


@dataclass(frozen=True, slots=True)
class SetVgpuAttribute:
    """Write an attribute of a vGPU; `before` is None where nobody knows what it read, or need to.

    So it is of a vGPU that the same plan makes: undone, the vGPU goes, and its attributes with it.
    """

    vgpu: str
    """Its UUID, or the address of its virtual function."""
    directory: str
    attribute: str
    """Its path below the directory."""
    before: str | None
    after: str
    kind: Literal["set-vgpu-attribute"] = "set-vgpu-attribute"

    def describe(self) -> str:
        """One line for people."""
        if self.before == self.after:
            return f"{self.vgpu}: remember that {self.attribute} is {self.after!r}"
        return f"{self.vgpu}: set {self.attribute} to {self.after!r}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        if self.before == self.after:
            return ()
        text = shlex.quote(self.written.removesuffix("\n"))
        end = "\\n" if self.written.endswith("\n") else ""
        return (f"printf '%s{end}' {text} > {self.directory}/{self.attribute}",)

    @property
    def written(self) -> str:
        """What is written.

        NVIDIA's driver takes the last byte for a newline, whatever it is, and wants a blank for
        nothing (vgpu_params_store in its nvidia-vgpu-vfio).
        """
        if self.attribute != PARAMETERS:
            return self.after
        return f"{self.after.rstrip() or ' '}\n"

    def inverse(self) -> SetVgpuAttribute | None:
        """What it read before, where that is known."""
        if self.before is None:
            return None
        return SetVgpuAttribute(
            self.vgpu, self.directory, self.attribute, before=self.after, after=self.before
        )
