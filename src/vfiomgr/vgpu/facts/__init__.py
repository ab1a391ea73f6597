"""vGPUs and what can carry them, by family, as a host shows them."""
