"""Documents as text: JSON, YAML, TOML and XML with the places of what they hold."""
