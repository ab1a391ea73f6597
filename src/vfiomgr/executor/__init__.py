"""Carries plans out: the only place that changes a host."""
