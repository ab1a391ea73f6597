"""Kata Containers: configuration of its runtime."""
