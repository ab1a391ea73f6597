"""Writes docs/rules.md from the rules of all packages."""
