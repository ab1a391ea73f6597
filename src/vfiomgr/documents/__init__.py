"""Documents as text: JSON, YAML, TOML and XML, with the places of what they hold.

`parsed` alone reads JSON and TOML; whatever a text holds, it is read or reported as malformed.
"""
