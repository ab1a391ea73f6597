"""`vfiomgr vgpu instances`, `mode` and `switch`."""
