"""vGPUs of every family: what GPUs have room for, placed, made and removed."""
