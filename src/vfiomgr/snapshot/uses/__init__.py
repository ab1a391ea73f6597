"""What of the running host rests on a device."""
