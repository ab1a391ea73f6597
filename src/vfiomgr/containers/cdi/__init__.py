"""CDI specifications: what a host can offer, what consumers make of files, where they belong."""
