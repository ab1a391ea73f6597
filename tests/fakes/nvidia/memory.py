"""What NVIDIA's driver keeps of each GPU beside sysfs: in files, since children write too."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tests.fakes.nvidia.rules import GpuInstance, Modes

_Seats = dict[str, tuple[int | None, int | None]]


class GpuMemory:
    """Modes of GPUs, where their vGPUs live, and which virtual functions are broken."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, exist_ok=True)

    def reboot(self) -> None:
        """Only MIG outlasts it."""
        for name in os.listdir(self._directory):
            self._forget(name)

    def reload(self, address: str) -> None:
        """The driver lets go of a GPU: only MIG is still there when it comes back.

        Nor is it in persistence mode then, as it may be from the boot on.
        """
        self._forget(address)
        self.set_persistent(address, is_on=False)

    def _forget(self, address: str) -> None:
        is_mig = self.modes(address).is_mig
        with suppress(FileNotFoundError):
            os.unlink(self._file(address))
        if is_mig:
            self.set_modes(address, Modes(is_mig=True))

    def modes(self, address: str) -> Modes:
        """What the GPU is set to."""
        row = self._read(address).get("modes", {})
        instances = [GpuInstance(**fields) for fields in row.pop("instances", [])]
        return Modes(**row, instances=instances)

    def set_modes(self, address: str, modes: Modes) -> None:
        """Set the GPU to something else."""
        self._write(address, modes=asdict(modes))

    def is_persistent(self, address: str) -> bool | None:
        """Whether somebody has set persistence mode; None where nobody did."""
        return self._read(address).get("is_persistent")

    def set_persistent(self, address: str, *, is_on: bool) -> None:
        """Keep the driver initialised, or not."""
        self._write(address, is_persistent=is_on)

    def seats(self, address: str) -> _Seats:
        """By the vGPU's name its GPU instance and placement."""
        return {name: (i, p) for name, (i, p) in self._read(address).get("seats", {}).items()}

    def sit(self, address: str, name: str, instance: int | None, placement: int | None) -> None:
        """Remember where a vGPU lives."""
        self._write(address, seats={**self.seats(address), name: (instance, placement)})

    def wedged(self, address: str) -> set[str]:
        """The virtual functions of the GPU that the driver has lost."""
        return set(self._read(address).get("wedged", []))

    def set_wedged(self, address: str, names: set[str]) -> None:
        """Remember which those are."""
        self._write(address, wedged=sorted(names))

    def _file(self, address: str) -> str:
        return os.path.join(self._directory, address)

    def _read(self, address: str) -> dict[str, Any]:
        try:
            with open(self._file(address), encoding="utf-8") as file:
                return dict(json.load(file))
        except FileNotFoundError:
            return {}

    def _write(self, address: str, **parts: object) -> None:
        text = json.dumps({**self._read(address), **parts})
        with open(self._file(address), "w", encoding="utf-8") as file:
            file.write(text)
