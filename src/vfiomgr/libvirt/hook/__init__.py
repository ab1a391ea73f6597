"""libvirt's hook: devices bound when a guest starts, given back when it ends."""
