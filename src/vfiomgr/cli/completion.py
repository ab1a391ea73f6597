"""Completion of arguments and options: what click calls `shell_complete`.

Each function stands for the one of its name in `candidates`, which is imported when a shell asks.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.cli.candidates import (
        complete_address,
        complete_assignable,
        complete_board,
        complete_defined_or_active,
        complete_definition,
        complete_device,
        complete_device_or_file,
        complete_driver,
        complete_gpu,
        complete_group,
        complete_host_file,
        complete_numa_node,
        complete_owner,
        complete_parent,
        complete_sriov,
        complete_type,
        complete_vendor,
        complete_vfio_driver,
        complete_vgpu,
    )

    __all__ = [
        "complete_address",
        "complete_assignable",
        "complete_board",
        "complete_defined_or_active",
        "complete_definition",
        "complete_device",
        "complete_device_or_file",
        "complete_driver",
        "complete_gpu",
        "complete_group",
        "complete_host_file",
        "complete_numa_node",
        "complete_owner",
        "complete_parent",
        "complete_sriov",
        "complete_type",
        "complete_vendor",
        "complete_vfio_driver",
        "complete_vgpu",
    ]
else:

    def __getattr__(name: str) -> Callable[..., object]:
        if name.startswith("complete_"):
            return partial(_complete, name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)


def _complete(name: str, *asked: object) -> object:
    return getattr(import_module("vfiomgr.cli.candidates"), name)(*asked)
