"""Kata Containers: its configuration, its pods, and why a pod gets no device."""
