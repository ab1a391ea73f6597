"""What is kept for the next boot: udev rules, systemd units, the initramfs.

A rule holds its own record in a comment. `installed_layout` is what an installed layout wrote, so
that other commands know which rules are its own.
"""
