"""Devices in containers: CDI specifications, OCI bundles, and container runtimes."""
