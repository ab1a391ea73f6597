"""Metrics: what Prometheus reads about a host, its devices and its checks."""
