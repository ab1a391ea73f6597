"""A host at one moment, as one value that goes to JSON and back; and how it is read."""
