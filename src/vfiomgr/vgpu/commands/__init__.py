"""The command group `vfiomgr vgpu`."""
