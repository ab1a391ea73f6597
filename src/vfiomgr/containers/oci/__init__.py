"""OCI bundles: add devices to the configuration of a container before it starts.

`nodes` finds the nodes of a device and reasons against adding it, `edit` changes `config.json` and
records the added parts in the file itself.
"""
