"""The commands about all devices, and about interrupted operations."""
