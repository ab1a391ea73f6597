"""Metrics of a host for Prometheus."""
