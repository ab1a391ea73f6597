"""Definitions as values, and as the files that hold them."""
