"""The command line itself: what all commands are made of, and which there are."""
