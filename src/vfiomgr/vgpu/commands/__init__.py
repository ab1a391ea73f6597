"""`vfiomgr vgpu`."""
