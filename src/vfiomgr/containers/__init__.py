"""Devices in containers: CDI specifications, OCI bundles, and the container runtimes."""
