"""Bind PCI functions to VFIO drivers, unbind them, and reset them.

`plan` finds which functions must move together; `guards` holds the safety checks and their
remedies. Only `watch` acts without a plan: it writes the driver_override of a function that the
kernel has just found, before the kernel looks for a driver.
"""
