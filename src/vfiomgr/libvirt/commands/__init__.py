"""`vfiomgr libvirt`."""
