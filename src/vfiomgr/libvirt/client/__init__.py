"""What is asked of libvirt itself."""
