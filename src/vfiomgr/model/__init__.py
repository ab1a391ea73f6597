"""Frozen values and documents; nothing here does input or output."""
