"""Configuration of container runtimes: containerd, CRI-O, Docker, k3s and rke2."""
