"""Uninstall: remove what vfiomgr wrote on a host, with the removal plans of all capabilities."""
