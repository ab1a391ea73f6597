"""Builds the packages: a wheel, a .deb, an .rpm and a package for Arch Linux."""
