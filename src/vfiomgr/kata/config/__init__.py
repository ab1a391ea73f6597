"""The configuration of Kata: what devices need of it, and what it refuses."""
