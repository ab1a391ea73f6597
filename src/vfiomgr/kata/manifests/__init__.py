"""Kubernetes objects for Kata: RuntimeClasses and pods."""
