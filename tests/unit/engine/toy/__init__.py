"""A capability outside of the package: a label on a device, which nobody needs."""
