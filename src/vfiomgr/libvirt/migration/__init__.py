"""Migration of guests with host devices: what can migrate, why not, and which host fits."""
