"""Packages that import their public names on first use (PEP 562), since a command needs few."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def importing(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package; `places` maps each public name to its module."""

    def find(name: str) -> object:
        if name not in places:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return find
