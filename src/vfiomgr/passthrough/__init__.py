"""PCI functions bound to VFIO drivers and given back; resets.

`plan` finds what goes to a guest together, `guards` what speaks against it and what lifts it.
`watch` is the one part that acts without a plan: it writes the driver_override of a function that
the kernel has just found, before the kernel looks for a driver.
"""
