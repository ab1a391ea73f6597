"""Attach devices to domains and detach them, running or not."""
