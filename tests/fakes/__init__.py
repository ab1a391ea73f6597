"""Stand-ins that act as the real thing does: here, the kernel."""
