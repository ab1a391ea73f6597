"""libvirt's hook: bind devices when a guest starts, and unbind them when it ends."""
