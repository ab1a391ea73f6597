"""Kata Containers: configuration, pods, and checks of the way from a pod to its devices.

In Python: `configuration`, `explain_pod`, `check_image`, `pods`, `runtime_class`, `run_command`.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.kata.command_lines import run_command
    from vfiomgr.kata.configurations import KataConfiguration, configuration
    from vfiomgr.kata.explain.pods import explain_pod
    from vfiomgr.kata.named import check_image
    from vfiomgr.kata.workloads import pods, runtime_class

__all__ = [
    "KataConfiguration",
    "check_image",
    "configuration",
    "explain_pod",
    "pods",
    "run_command",
    "runtime_class",
]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__,
        {
            "KataConfiguration": "configurations",
            "check_image": "named",
            "configuration": "configurations",
            "explain_pod": "explain.pods",
            "pods": "workloads",
            "run_command": "command_lines",
            "runtime_class": "workloads",
        },
    )
