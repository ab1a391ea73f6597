"""Quotas of virtual functions as documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas


def quota_items(host: HostSnapshot, gpu: GpuQuotas) -> list[dict[str, object]]:
    """The physical function, and virtual functions that exist or already have memory."""
    device = host.device_named(gpu.gpu)
    addresses = () if device is None else (device.address, *device.virtual_functions)
    return [
        quota_item(function, addresses[function.number] if is_there else None)
        for function in gpu.functions
        if (is_there := function.number < len(addresses)) or function.memory
    ]


def quota_item(function: FunctionQuotas, address: object) -> dict[str, object]:
    """The quotas of a function for JSON, in bytes, milliseconds and microseconds."""
    return {
        "function": f"vf{function.number}" if function.number else "pf",
        "address": address,
        "memory": function.memory,
        "exec_quantum_ms": function.exec_quantum_ms,
        "preempt_timeout_us": function.preempt_timeout_us,
        "sched_priority": function.sched_priority,
        "differing": function.differing,
        "attributes": {attribute.name: attribute.text for attribute in function.attributes},
    }
