"""Kata Containers: configuration, pods, and checks of the way from a pod to its devices.

In Python: `configuration`, `explain_pod`, `check_image`, `pods`, `runtime_class`, `run_command`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.kata.command_lines import run_command
    from vfiomgr.kata.configurations import KataConfiguration, configuration
    from vfiomgr.kata.explain.pods import explain_pod
    from vfiomgr.kata.named import check_image, pods, runtime_class

__all__ = [
    "KataConfiguration",
    "check_image",
    "configuration",
    "explain_pod",
    "pods",
    "run_command",
    "runtime_class",
]
_PLACES = {
    "KataConfiguration": "configurations",
    "check_image": "named",
    "configuration": "configurations",
    "explain_pod": "explain.pods",
    "pods": "named",
    "run_command": "command_lines",
    "runtime_class": "named",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _PLACES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
