"""OCI bundles: devices put into the configuration of a container that has not started yet."""
