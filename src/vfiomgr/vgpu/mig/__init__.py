"""GPU instances (MIG) and the modes of NVIDIA GPUs."""
