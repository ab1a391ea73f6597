"""Domains as values."""
