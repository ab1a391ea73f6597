"""vfiomgr: take PCI devices from their host driver to a guest, and back."""

__version__ = "0.1.0"
