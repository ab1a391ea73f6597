"""The command line: thin; everything that decides or acts is below."""
