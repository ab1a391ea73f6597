"""Domain XML: read, rendered and edited."""
