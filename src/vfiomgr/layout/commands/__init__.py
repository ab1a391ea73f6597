"""`vfiomgr layout`, `plan`, `apply`, `revert` and `watch`."""
