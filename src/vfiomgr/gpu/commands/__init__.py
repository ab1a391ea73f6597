"""The commands `vfiomgr vgpu instances` and `mode`."""
