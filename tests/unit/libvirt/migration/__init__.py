"""Migration of guests with host devices."""
