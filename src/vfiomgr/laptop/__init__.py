"""The graphics modes of laptops, by the switches of their firmware."""
