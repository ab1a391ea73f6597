"""Kata Containers: what a configuration says, and what of it would break."""
