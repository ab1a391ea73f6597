"""What is kept for the next boot: udev rules, units, the initramfs."""
