"""The configuration of Kata: what devices need, and what Kata refuses."""
