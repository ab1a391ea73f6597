"""Attributes of vGPUs that drivers support."""

from __future__ import annotations

PARAMETERS = "nvidia/vgpu_params"
"""NVIDIA's attribute for all settings of a vGPU; each write replaces all of them."""


def is_same_text(one: str, other: str) -> bool:
    """Whether two attribute values are equal, ignoring white space."""
    return "".join(one.split()) == "".join(other.split())
