"""Objects of Kubernetes: rendered and read."""
