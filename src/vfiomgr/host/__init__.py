"""The only door to /sys, /proc, /dev, /etc and kernel modules."""
