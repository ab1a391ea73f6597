"""What would break the start of a domain, found before."""
