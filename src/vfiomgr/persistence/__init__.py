"""Settings that survive a reboot: udev rules, systemd units, the initramfs.

Each rule contains its own record in a comment. `installed_layout` records what an installed layout
wrote, so that other commands recognize its rules.
"""
