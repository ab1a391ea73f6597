"""Find what would prevent the start of a domain."""
