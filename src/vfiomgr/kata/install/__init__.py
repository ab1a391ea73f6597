"""Install Kata in the configuration of a container runtime."""
