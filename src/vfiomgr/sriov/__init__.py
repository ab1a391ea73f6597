"""Virtual functions: their number, and what each gets of its GPU."""
