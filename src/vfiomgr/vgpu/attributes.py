"""Attributes of vGPUs that their drivers understand."""

from __future__ import annotations

PARAMETERS = "nvidia/vgpu_params"
"""NVIDIA's attribute for all settings of a vGPU: each write replaces them all."""


def is_same_text(one: str, other: str) -> bool:
    """Whether two texts mean the same to an attribute, whatever white space is in them."""
    return "".join(one.split()) == "".join(other.split())
