"""GPUs whose drivers share them out among plain virtual functions."""
