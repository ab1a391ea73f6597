"""libvirt: domain XML."""
