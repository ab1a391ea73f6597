"""Definitions of vGPUs: kept over a reboot, started and restored."""
