"""Domains of libvirt: made, checked, edited, and given devices."""
