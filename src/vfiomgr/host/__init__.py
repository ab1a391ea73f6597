"""The only door to the files, nodes and programs of a host."""
