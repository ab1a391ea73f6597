"""A command that runs one container with devices in Kata."""
