"""Documents as text: JSON, YAML, TOML and XML, with the places of what they hold.

`reader` reads what people write, JSON or YAML 1.2, into values that know their line and column;
`parsed` reads JSON and TOML into plain values, or reports them as malformed. `json_text` writes
other values into a text of JSON, and keeps the text of all that stays.
"""
