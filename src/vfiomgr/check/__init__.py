"""Whether a host is ready to give devices to guests: rules over facts, each with evidence."""
