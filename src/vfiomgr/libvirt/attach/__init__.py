"""Devices given to domains and taken from them, running or not."""
