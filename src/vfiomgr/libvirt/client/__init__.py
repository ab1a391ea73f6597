"""Calls to libvirt itself."""
