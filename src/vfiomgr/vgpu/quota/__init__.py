"""GPUs whose drivers divide them among plain virtual functions."""
