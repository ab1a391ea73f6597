"""vGPU definitions that survive a reboot: define, start, stop, restore.

Mediated devices are defined in mdevctl's files, virtual functions of vendor drivers in vfiomgr's.
"""
