"""Facts about vGPUs and their parents, by family."""
