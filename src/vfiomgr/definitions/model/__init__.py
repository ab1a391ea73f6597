"""vGPU definitions as values and as files."""
