"""Functions bound to VFIO drivers and given back: guards, resets, the steps."""
