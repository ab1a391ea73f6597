"""The commands `vfiomgr vgpu instances`, `mode` and `switch`."""
