"""Checks what the modules of vfiomgr import from each other."""
