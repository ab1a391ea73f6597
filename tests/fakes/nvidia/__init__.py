"""NVIDIA's vGPU host driver, its GPUs and its programs, as parts of the fake kernel."""
