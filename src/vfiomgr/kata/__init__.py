"""Kata Containers: its configuration, its pods, and why a pod gets no device.

In Python: `configuration` and `explain_pod`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.kata.configurations import KataConfiguration, configuration
    from vfiomgr.kata.explain.pods import explain_pod

__all__ = ["KataConfiguration", "configuration", "explain_pod"]
_PLACES = {
    "KataConfiguration": "configurations",
    "configuration": "configurations",
    "explain_pod": "explain.pods",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what is public when it is used."""
        if name not in _PLACES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
