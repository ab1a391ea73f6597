"""Objects of Kubernetes for Kata: RuntimeClasses and pods."""
