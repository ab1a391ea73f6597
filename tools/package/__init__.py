"""Builds the packages: a wheel, a .deb and an .rpm."""
