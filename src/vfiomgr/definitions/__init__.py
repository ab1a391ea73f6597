"""vGPUs that are kept over a reboot: defined, started, stopped, restored.

Mediated devices are defined in mdevctl's files, virtual functions with a type in vfiomgr's own.
"""
