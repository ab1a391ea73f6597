"""The initramfs: what builds it on this host, and what makes it contain the rules of vfiomgr."""
