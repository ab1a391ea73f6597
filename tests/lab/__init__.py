"""The laboratory: a real kernel with emulated PCI devices, in which tests run."""
