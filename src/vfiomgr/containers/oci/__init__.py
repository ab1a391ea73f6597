"""OCI bundles: devices put into the configuration of a container that has not started yet.

`plan` says which nodes a device has and what speaks against it, `edit` changes `config.json` and
keeps an account of what was put in within the file itself.
"""
